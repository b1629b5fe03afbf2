"""Publishes a policy for the rollout servers: first its tensors as an Orbax checkpoint, then the manifest that marks completion."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from bapo_jax.hosts import Hosts
from bapo_jax.files import write_text
from bapo_jax.models import hf
from bapo_jax.models.qwen import ModelConfig
from bapo_jax.rollout.published import FORMAT, MANIFEST, WEIGHTS, crc32, published_versions

# At every save Orbax warns that it finds no OCDBT files to merge; this format has none.
logging.get_absl_logger().addFilter(lambda record: 'Skipping merge of OCDBT' not in str(record.msg))


def publish(directory: Path, version: int, params: Any, config: ModelConfig, dtype: str, hosts: Hosts = Hosts()) -> Path:
    """Writes `directory/{version:06d}` in `dtype` and returns it; leaves a complete version as it is.

    Leftovers of an interrupted publication are removed first. The manifest marks completion, so no rename is needed and object
    stores work. Host 0 writes; where parameters are spread over `hosts`, the others help gather them.
    """
    path = Path(directory) / f'{version:06d}'
    if (path / MANIFEST).is_file():
        return path
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    hosts.tell('publish', version=version)
    tensors = {name: np.ascontiguousarray(array, hf.DTYPES[dtype]) for name, array in hf.to_hf(config, params)}
    # One plain file a tensor is the fastest: weights do not compress, and a policy is read whole, soon after.
    alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0}, barrier_sync_key_prefix='publish')
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer, ThreadPoolExecutor(1) as pool:
        checksums = pool.submit(lambda: {name: crc32(array) for name, array in tensors.items()})
        checkpointer.save((path / WEIGHTS).absolute(), args=ocp.args.PyTreeSave(tensors))
        checksums = checksums.result()
    manifest = {
        'format': FORMAT,
        'version': version,
        'model': hf.architecture(config),
        'tensors': {
            name: {'shape': list(array.shape), 'dtype': dtype, 'crc32': checksums[name]} for name, array in tensors.items()
        },
    }
    write_text(path / MANIFEST, json.dumps(manifest, indent=1) + '\n')
    return path


def remove_unneeded(directory: Path, pinned: Iterable[int]) -> None:
    """Deletes every published version that is not pinned. The manifest goes first, so no partial version looks complete."""
    pinned = set(pinned)
    for version, path in published_versions(directory):
        if version not in pinned:
            (path / MANIFEST).unlink()
            shutil.rmtree(path)
