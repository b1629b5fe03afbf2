"""Publishes a policy: its tensors as an Orbax checkpoint, then the manifest that marks completion.

Where only an adapter is trained, it is published alone, in PEFT's two files, which vLLM reads.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from bapo_jax.cluster.hosts import Hosts
from bapo_jax.machine.files import write_text
from bapo_jax.models import hf
from bapo_jax.models.adapters import adapter_tensors, save_adapter, travels_alone
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.weights.manifest import FORMAT, MANIFEST, THREADS, WEIGHTS, crc32

# At every save, Orbax warns that there are no OCDBT files to merge; this format never has any.
logging.get_absl_logger().addFilter(lambda record: 'Skipping merge of OCDBT' not in str(record.msg))

# Each device writes its shard as one file; only one of several replicas writes.
_ARRAYS = ocp.type_handlers.create_type_handler_registry(
    (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False))
)


def path_of(directory: Path, version: int) -> Path:
    """The path to which `publish` writes a version."""
    return Path(directory) / f'{version:06d}'


def publish(
    directory: Path, version: int, params: Any, config: ModelConfig, dtype: str, hosts: Hosts = Hosts(),
    base: str = '',
) -> Path:  # fmt: skip
    """Writes `directory/{version:06d}` in `dtype` and returns its path. Does not touch a complete version.

    A version names one policy, the one after that many training steps. So a complete version stays correct
    even if it was written from θ and the parameters are now those of its copy, α.

    Leftovers of an interrupted publication are removed first. The manifest marks completion, so no rename is
    needed and object stores work. Host 0 calls this and tells the other hosts, which call `write_policy`:
    every host writes its own part. `base` is the model of an adapter, as its files name it. Raises HostError
    if another host fails.
    """
    path = path_of(directory, version)
    if (path / MANIFEST).is_file():
        return path
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    hosts.tell('publish', version=version)
    written = write_policy(path, params, config, dtype, hosts, base)
    manifest = {'format': FORMAT, 'version': version, 'model': hf.architecture(config), **written}
    write_text(path / MANIFEST, json.dumps(manifest, indent=1) + '\n')
    return path


def write_policy(
    path: Path, params: Any, config: ModelConfig, dtype: str, hosts: Hosts, base: str = ''
) -> dict[str, dict[str, Any]]:
    """Writes this host's part of a policy to `path`, and returns the manifest's entries of tensors or files.

    Every host calls it, and its memory is that of `write_weights`. Host 0 writes an adapter. Raises HostError
    if another host fails.
    """
    if not travels_alone(config):
        return {'tensors': write_weights(path, params, config, dtype, hosts)}
    tensors = adapter_tensors(config, params, dtype)
    if jax.process_index():
        return {}
    save_adapter(path, config, tensors, base)
    files = {file.name: file.read_bytes() for file in sorted(path.iterdir())}
    return {'tensors': {}, 'files': {name: [len(said), zlib.crc32(said)] for name, said in files.items()}}


def write_weights(
    path: Path, params: Any, config: ModelConfig, dtype: str, hosts: Hosts
) -> dict[str, dict[str, Any]]:
    """Writes this host's part of the tensors to `path`/weights, and returns their manifest entries.

    Every host calls it. Meanwhile the devices hold a copy in `dtype`, and the host its own part of that copy.
    Only host 0 gets the checksums of all parts. Raises HostError if another host fails.
    """
    # Named processes synchronise at barriers of the coordination service, which have a timeout. Without names
    # they use a collective.
    everyone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes=set(range(jax.process_count())), barrier_sync_key_prefix='publish'
    )
    # One plain file per part is fastest: weights do not compress, and the whole policy is read soon after.
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False,
        use_compression=False,
        type_handler_registry=_ARRAYS,
        multiprocessing_options=everyone,
    )
    tensors, checksums = {}, {}
    with (
        ocp.Checkpointer(handler, multiprocessing_options=everyone) as checkpointer,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        for name, array in hf.as_in_files(config, params, dtype):
            tensors[name] = array
            checksums[name] = pool.submit(_checksums, array)  # runs while later layers are cast and written
        checkpointer.save((path / WEIGHTS).absolute(), args=ocp.args.PyTreeSave(tensors))
    of_parts: dict[str, dict[str, int]] = {name: {} for name in tensors}
    for of_host in hosts.collect(json.dumps({name: future.result() for name, future in checksums.items()})):
        for name, crcs in json.loads(of_host).items():
            of_parts[name] |= crcs
    return {
        name: {
            'shape': array.shape,
            'dtype': dtype,
            'part': array.sharding.shard_shape(array.shape),
            'crc32': of_parts[name],
        }
        for name, array in tensors.items()
    }


def _checksums(array: jax.Array) -> dict[str, int]:
    """The CRC-32 of each part of an array that this host writes, by file name."""
    parts = {}
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            place = ((s.start or 0) // size for s, size in zip(shard.index, shard.data.shape, strict=True))
            parts['.'.join(map(str, place))] = crc32(np.asarray(shard.data))
    return parts


def remove_unneeded(directory: Path, pinned: Iterable[int]) -> None:
    """Deletes every version that is not pinned, complete or not.

    Deletes the manifest first, so that no partial version looks complete.
    """
    pinned = set(pinned)
    for path in Path(directory).glob('[0-9]*'):
        if int(path.name) not in pinned:
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)
