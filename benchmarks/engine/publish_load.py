"""What it costs to hand a policy over: seconds against safetensors, seconds of a real server, memory of its
workers.

    python -m benchmarks.engine.publish_load
    VLLM_CPU_OMP_THREADS_BIND='0|1' python -m benchmarks.engine.publish_load --directory=/dev/shm \\
        --workers=1,2    # a core each

First a random policy of 1 GiB in float32. `publish` writes it from the trainer's parameters on the device as
the trainer does (transposed, Orbax, checksums, manifest). The reading side checks every byte and maps the
tensors, as a server's worker does. The other way, safetensors saves the same tensors, transposed by the same
program, and loads them without a check. Then the same publication of 1 GiB in bfloat16, and what that makes
for 8 billion parameters.

Then the quickstart's policy, as the trainer hands it to a real vLLM server (`make vllm-env`): written,
checked, loaded, caches reset. So is a LoRA adapter to it, alone, and one of 1.5B is written.

Last the memory of a real server's workers while they load another policy of 1 GiB in bfloat16, for each
number of workers (--tensor-parallel-size). A worker's peak counts the file pages that it has mapped. Its
shard stands for what the model takes.

Seconds are the best of --repeats, the two ways in turn, in --directory. They include the page cache: nothing
else is read or written between.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from benchmarks.compiled.step import model_of
from benchmarks.host.load import cpu_name
from flax.traverse_util import flatten_dict, unflatten_dict
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file, save_file

from bapo_jax.models import hf
from bapo_jax.models.decoder import ModelConfig, parameters_of
from bapo_jax.models.layers import Adapter
from bapo_jax.models.parameters import ADAPTER as ADAPTER_ROW
from bapo_jax.models.tokenizer import load_tokenizer, stop_tokens
from bapo_jax.rollout.vllm.client import VllmEngine
from bapo_jax.rollout.vllm.supervise import SupervisedServer
from bapo_jax.weights.manifest import check_bytes, read_manifest, read_tensors
from bapo_jax.weights.publish import publish

BASE = Path(__file__).resolve().parents[2] / 'configs' / 'quickstart_base'
LARGE = {
    'vocab_size': 32_768,
    'hidden_size': 1024,
    'intermediate_size': 4096,
    'num_heads': 16,
    'num_kv_heads': 4,
    'head_dim': 64,
}
ADAPTER = Adapter(16, 32.0, 'all')
LAYERS = {'float32': 16, 'bfloat16': 34}  # that make 1.0 GiB
GIB = 2**30
BYTES_8B = 2 * 8_190_735_360  # Qwen3-8B in bfloat16


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def random_policy(dtype: str) -> tuple[ModelConfig, Any, int]:
    """Shape, parameters on the device, and the bytes of its tensors in `dtype`."""
    config = dataclasses.replace(hf.read_config(BASE, dtype), **LARGE, num_layers=LAYERS[dtype])
    rng = np.random.default_rng(0)
    shapes = hf.abstract_params(config)[1]
    params = jax.tree.map(lambda x: jax.device_put(0.02 * rng.standard_normal(x.shape, np.float32)), shapes)
    return config, params, sum(x.size for x in jax.tree.leaves(shapes)) * hf.DTYPES[dtype].itemsize


def checked_tensors(path: Path) -> list[tuple[str, np.ndarray]]:
    manifest = read_manifest(path)
    check_bytes(path, manifest)
    return list(read_tensors(path, manifest))


def large_policy(directory: Path) -> Table:
    config, params, size = random_policy('float32')

    def save() -> None:
        save_file(dict(hf.to_hf(config, params)), directory / 'peer.safetensors')

    times = {'publish': [], 'read, checked': [], 'safetensors save': [], 'safetensors load': []}
    publish(directory, 0, params, config, 'float32')  # compiles
    for i in range(1, FLAGS.repeats + 1):
        times['safetensors save'].append(seconds(save))
        times['safetensors load'].append(seconds(lambda: load_file(directory / 'peer.safetensors')))
        (directory / 'peer.safetensors').unlink()
        times['publish'].append(seconds(lambda: publish(directory, i, params, config, 'float32')))
        path = directory / f'{i:06d}'
        times['read, checked'].append(seconds(lambda: checked_tensors(path)))
        shutil.rmtree(path)
    shutil.rmtree(directory / '000000')
    best = {name: min(x) for name, x in times.items()}
    ours, peer = best['publish'] + best['read, checked'], best['safetensors save'] + best['safetensors load']
    table = Table(
        'random tensors, float32',
        'seconds',
        title=f'{size / GIB:.2f} GiB, {len(hf.layout(config))} tensors; {where()}',
    )
    for name, s in best.items():
        table.add_row(name, f'{s:.2f}')
    table.add_section()
    table.add_row(
        'publish and load / safetensors save and load (target 1.0)',
        f'{ours:.2f} / {peer:.2f} = {ours / peer:.2f}',
    )
    return table


def in_bfloat16(directory: Path) -> Table:
    config, params, size = random_policy('bfloat16')
    written, read = [], []
    for i in range(1 + FLAGS.repeats):
        written.append(seconds(lambda: publish(directory, i, params, config, 'bfloat16')))
        read.append(seconds(lambda: checked_tensors(directory / f'{i:06d}')))
        shutil.rmtree(directory / f'{i:06d}')
    table = Table('random tensors, bfloat16', f'{size / GIB:.2f} GiB, s', 'at this rate 8B, s')
    for name, measured in (('publish (target 30 for 8B)', written), ('read, checked', read)):
        table.add_row(name, f'{min(measured):.2f}', f'{min(measured) * BYTES_8B / size:.1f}')
    table.add_row('the first publication, with compiling', f'{written[0]:.2f}', '')
    return table


def connect(
    server: SupervisedServer, directory: Path, config: ModelConfig, dtype: str, ends: tuple[int, ...]
) -> VllmEngine:
    server.start()
    return VllmEngine(
        [server],
        directory / 'policy',
        config,
        token=server.token,
        dtype=dtype,
        stop_tokens=ends,
        concurrency=1,
        deadline_s=300,
        base=str(BASE),
    )


def quickstart_policy(directory: Path) -> Table:
    table = Table('the quickstart, to a real vLLM server', 'MB', 'median s', 'largest s')
    for what, config in (
        ('policy', hf.read_config(BASE, 'float32')),
        (f'adapter of rank {ADAPTER.rank}', with_adapter(hf.read_config(BASE, 'float32'))),
    ):
        folder = directory / what.split()[0]
        folder.mkdir()
        params = hf.load_params(BASE, config)
        lora = ['--enable-lora', f'--max-lora-rank={ADAPTER.rank}', '--max-loras=2'] if config.adapter else []
        server = SupervisedServer(
            str(BASE), folder / 'server.log', dtype='float32', max_tokens=128, deadline_s=600, extra=lora
        )
        engine = connect(server, folder, config, 'float32', stop_tokens(BASE, load_tokenizer(BASE)))
        times = range(1, 1 + 5 * FLAGS.repeats)
        try:
            engine.load(params, 0)
            loaded = [seconds(lambda: engine.load(params, i)) for i in times]
        finally:
            engine.close()
        written = [seconds(lambda: publish(folder / 'alone', i, params, config, 'float32')) for i in times]
        size = bytes_of(folder / 'alone' / f'{times[0]:06d}')
        for how, measured in (('publish', written), ('publish and load (target 0.5)', loaded)):
            median, largest = np.median(measured), max(measured)
            table.add_row(f'{what}: {how}', f'{size / 1e6:.2f}', f'{median:.3f}', f'{largest:.3f}')
    return table


def large_adapter(directory: Path) -> Table:
    config, rng = with_adapter(model_of('1.5B', 'bfloat16')), np.random.default_rng(0)
    shapes = flatten_dict(hf.abstract_params(config)[1])
    matrices = {
        p.path: jax.device_put(0.02 * rng.standard_normal(shapes[p.path].shape, np.float32))
        for p in parameters_of(config)
        if p.when == ADAPTER_ROW
    }
    times = range(1 + FLAGS.repeats)
    written = [
        seconds(lambda: publish(directory, i, unflatten_dict(matrices), config, 'bfloat16')) for i in times
    ]
    size, of_all = (
        bytes_of(directory / '000000'),
        2 * sum(x.size for path, x in shapes.items() if path[-1] not in 'ab'),
    )
    table = Table(
        '1.5B in bfloat16', 'MB', 'publish, best s', title=f'rank {ADAPTER.rank}, all linear layers'
    )
    table.add_row('adapter', f'{size / 1e6:.1f}', f'{min(written):.3f}')
    table.add_row('policy', f'{of_all / 1e6:.0f}', '')
    return table


def with_adapter(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, adapter=ADAPTER)


def bytes_of(published: Path) -> int:
    return sum(file.stat().st_size for file in published.rglob('*') if file.is_file())


def worker_memory(directory: Path) -> Table:
    config, params, size = random_policy('bfloat16')
    model = directory / 'model'
    model.mkdir()
    fields = (
        json.loads((BASE / 'config.json').read_text('utf-8'))
        | hf.architecture(config)
        | {'torch_dtype': 'bfloat16'}
    )
    (model / 'config.json').write_text(json.dumps(fields))
    for name in ('tokenizer.json', 'tokenizer_config.json'):
        shutil.copy(BASE / name, model / name)
    hf.save(model, hf.to_hf(config, params), like=model, dtype='bfloat16')
    ends = stop_tokens(BASE, load_tokenizer(BASE))
    table = Table(
        'workers', 'load', 'worker', 'seconds', 'shard, MiB', 'before, MiB', 'peak above, MiB', '1 + '
        'peak / shard (target 1.2)',
        title=f'loading {size / GIB:.2f} GiB in bfloat16 into a real vLLM server',
    )  # fmt: skip
    for workers in map(int, FLAGS.workers):
        server = SupervisedServer(
            str(model), directory / f'server{workers}.log', dtype='bfloat16', max_tokens=128, deadline_s=900,
            extra=['--enforce-eager', '--tensor-parallel-size', str(workers)],
        )  # fmt: skip
        engine = connect(server, directory, config, 'bfloat16', ends)
        try:
            for i in range(3):
                publish(directory / 'policy', i, params, config, 'bfloat16')
                before = {pid: reset_peak(pid) for pid in worker_processes(server.pid, workers)}
                spent = seconds(lambda: engine.load(params, i))
                for rank, (pid, rss) in enumerate(before.items()):
                    above, shard = memory(pid, 'VmHWM') - rss, size / workers
                    table.add_row(
                        str(workers), str(i), str(rank), f'{spent:.2f}', f'{shard / 2**20:.0f}', f'{rss / 2**20:.0f}',
                        f'{above / 2**20:.0f}', f'{1 + above / shard:.2f}',
                    )  # fmt: skip
        finally:
            engine.close()
        shutil.rmtree(directory / 'policy')
    return table


def worker_processes(group: int, workers: int) -> list[int]:
    """The processes of a server that hold a model: its largest."""
    members = []
    for process in Path('/proc').glob('[0-9]*'):
        try:
            if os.getpgid(int(process.name)) == group:
                members.append(int(process.name))
        except ProcessLookupError:
            continue
    return sorted(members, key=lambda pid: memory(pid, 'VmRSS'))[-workers:]


def memory(pid: int, field: str) -> int:
    """Bytes, of a field of /proc/PID/status."""
    status = Path(f'/proc/{pid}/status').read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field + ':')) * 1024


def reset_peak(pid: int) -> int:
    """Makes the peak the memory of now, and returns that."""
    Path(f'/proc/{pid}/clear_refs').write_text('5')
    return memory(pid, 'VmRSS')


def where() -> str:
    packages = ', '.join(f'{name} {version(name)}' for name in ('jax', 'orbax-checkpoint', 'safetensors'))
    return f'{cpu_name()}, {os.cpu_count()} cores, {packages}, {datetime.date.today()}'


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    parts = [large_policy, in_bfloat16, quickstart_policy, large_adapter, worker_memory]
    for part in [part for part in parts if not FLAGS.only or part.__name__ in FLAGS.only]:
        with tempfile.TemporaryDirectory(dir=FLAGS.directory) as directory:
            Console(width=132).print(part(Path(directory)))


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_integer('repeats', 3, 'Measurements of each way.', lower_bound=1)
    flags.DEFINE_list('only', [], 'Names of functions of this file that make a table; default: all.')
    flags.DEFINE_string('directory', None, "Where to write; default: the system's temporary directory.")
    flags.DEFINE_list(
        'workers', ['1'], 'Numbers of tensor-parallel workers of the server whose memory is measured.'
    )
    app.run(main)
