"""What it costs to hand a policy over: publish and load, against safetensors save and load of the same tensors.

    python benchmarks/publish_load.py

First a random policy of 1 GiB (float32). `publish` writes it as the trainer does (Orbax, checksums, manifest), and `read_tensors`
reads it as a server does (checksums compared). The other way, safetensors writes the same policy and reads it back without
checksums. Both start from the trainer's parameters.

Then the quickstart's policy, as the trainer hands it to a real vLLM server (`make vllm-env`): written, read, checked, loaded,
caches reset.

Prints medians of --repeats, the two ways in turn, in --directory. They include the page cache: nothing else is read or written
between.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from absl import app, flags, logging
from host_load import cpu_name
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file, save_file

from bapo_jax.models import hf
from bapo_jax.models.tokenizer import load_tokenizer, stop_tokens
from bapo_jax.rollout.publish import publish
from bapo_jax.rollout.published import read_manifest, read_tensors
from bapo_jax.rollout.supervise import SupervisedServer
from bapo_jax.rollout.vllm_engine import VllmEngine

BASE = Path(__file__).resolve().parents[1] / 'configs' / 'quickstart_base'
# 1.0 GiB in float32.
LARGE = {'vocab_size': 32_768, 'hidden_size': 1024, 'intermediate_size': 4096, 'num_layers': 17, 'num_heads': 16, 'num_kv_heads': 4}


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def large_policy(directory: Path) -> Table:
    config = dataclasses.replace(hf.read_config(BASE, 'float32'), **LARGE)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), hf.abstract_params(config)[1])
    sizes = [array.nbytes for _, array in hf.to_hf(config, params)]

    def save() -> None:
        save_file(dict(hf.to_hf(config, params)), directory / 'peer.safetensors')

    times = {'publish': [], 'read, checked': [], 'safetensors save': [], 'safetensors load': []}
    for i in range(FLAGS.repeats):
        times['safetensors save'].append(seconds(save))
        times['safetensors load'].append(seconds(lambda: load_file(directory / 'peer.safetensors')))
        (directory / 'peer.safetensors').unlink()
        times['publish'].append(seconds(lambda: publish(directory, i, params, config, 'float32')))
        path = directory / f'{i:06d}'
        times['read, checked'].append(seconds(lambda: read_tensors(path, read_manifest(path))))
        shutil.rmtree(path)
    median = {name: float(np.median(x)) for name, x in times.items()}
    ours, peer = median['publish'] + median['read, checked'], median['safetensors save'] + median['safetensors load']
    table = Table('1 GiB of random tensors', 'seconds', title=f'{sum(sizes) / 2**30:.2f} GiB, {len(sizes)} tensors; {where()}')
    for name, s in median.items():
        table.add_row(name, f'{s:.2f}')
    table.add_section()
    table.add_row('publish and load / safetensors save and load (target 1.2)', f'{ours:.2f} / {peer:.2f} = {ours / peer:.2f}')
    return table


def quickstart_policy(directory: Path) -> Table:
    config = hf.read_config(BASE, 'float32')
    params = hf.load_params(BASE, config)
    ends = stop_tokens(BASE, load_tokenizer(BASE))
    server = SupervisedServer(str(BASE), directory / 'server.log', dtype='float32', max_tokens=128, deadline_s=600)
    server.start()
    engine = VllmEngine(
        server, directory / 'policy', config, token=server.token, dtype='float32', stop_tokens=ends, concurrency=1, deadline_s=60
    )
    try:
        engine.load(params, 0)
        whole = [seconds(lambda: engine.load(params, i)) for i in range(1, 1 + 5 * FLAGS.repeats)]
    finally:
        engine.close()
    alone = [seconds(lambda: publish(directory / 'alone', i, params, config, 'float32')) for i in range(5 * FLAGS.repeats)]
    table = Table('the quickstart policy, to a real vLLM server', 'median s', 'largest s')
    table.add_row('publish alone', f'{np.median(alone):.3f}', f'{max(alone):.3f}')
    table.add_row('publish and load (target 0.5)', f'{np.median(whole):.3f}', f'{max(whole):.3f}')
    return table


def where() -> str:
    packages = ', '.join(f'{name} {version(name)}' for name in ('orbax-checkpoint', 'tensorstore', 'safetensors'))
    return f'{cpu_name()}, {os.cpu_count()} cores, {packages}, {datetime.date.today()}'


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=FLAGS.directory) as directory:
        Console().print(large_policy(Path(directory)))
        Console().print(quickstart_policy(Path(directory)))


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_integer('repeats', 3, 'Measurements of each way.', lower_bound=1)
    flags.DEFINE_string('directory', None, "Where to write; default: the system's temporary directory.")
    app.run(main)
