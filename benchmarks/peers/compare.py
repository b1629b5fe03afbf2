"""Our update and iteration against plain PyTorch, TRL and google-tunix on two cores, in one run.

    python -m benchmarks.peers.compare --make_envs=DIR          # once: environments of TRL and tunix, 3 GB
    # W and W2, full and ragged; leave the machine idle meanwhile
    python -m benchmarks.peers.compare --envs=DIR
    python -m benchmarks.peers.compare --workloads=W            # without --envs: updates alone

Every measurement is a process of its own, one after the other: first each peer's candidates, to find its
fastest setting, then
--rounds rounds over all rows. Prints a Markdown table for each workload: medians over all rounds, and the
shortest time.

All rows work on the same policy and data. The run stops where a row's loss or gradient norm differs from
PyTorch's by over 1e-3. An update is given groups with behaviour log-probs; it takes GRPO's loss, its
gradient, clips that and steps AdamW. An iteration samples the responses first. The share of the matrix rate
is useful work over what the same process reaches on 2048³ products.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.peers import data as peers_data
from absl import app, flags
from benchmarks.host.load import cpu_name
from benchmarks.peers.data import WORKLOADS, Workload
from benchmarks.peers.ours import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
CORES = 2
TOLERANCE = 1e-3  # relative, of losses and gradient norms
COMPARED = ('loss', 'grad_norm', 'on_policy_norm')
ENVIRONMENTS = {  # in this order; torch's CPU build first, so that nothing brings a larger one
    'trl': (('torch==2.13.0+cpu',), ('trl==1.16.0', 'transformers==5.23.0')),
    'tunix': (('google-tunix==0.1.7', 'jax==0.10.2', 'flax==0.12.8', 'transformers==5.12.1'),),
}
TORCH_INDEX = 'https://download.pytorch.org/whl/cpu'


class Row(NamedTuple):
    """A line of a table: who, and the settings of which the fastest is taken."""

    name: str
    worker: str
    mode: str  # 'update' or 'iteration'
    candidates: tuple[str, ...]


def rows_of(w: Workload, envs: bool) -> list[Row]:
    """The first row of each mode is what the others are compared with."""
    sizes = (16, 32) if w.hidden < 512 else (16, 8)  # sequences of a micro-batch; --nosearch takes the first
    torch = [
        f'{processes} {how}, {n}' for how in ('compiled', 'eager') for processes in (2, 1) for n in sizes
    ]
    if w.ragged:
        torch = [f'{setting} sorted' for setting in torch[:4]] + torch[:2]
    rows = [Row('PyTorch', 'torch', 'update', tuple(torch))]
    rows += [Row(f'bapo_jax, {name}', 'ours', 'update', (name,)) for name in SETTINGS]
    if envs and not w.ragged:
        rows += [
            Row('TRL', 'trl', 'iteration', tuple(f'{n} sequences' for n in sizes)),
            Row(
                'google-tunix',
                'tunix',
                'iteration',
                tuple(f'{d} devices, {n} sequences' for d in (2, 1) for n in sizes),
            ),
            *(Row(f'bapo_jax, {name}', 'ours', 'iteration', (name,)) for name in SETTINGS),
        ]
    return rows


def call(worker: str, *words: str) -> str:
    """What a worker prints, run in its environment. Ends the program with the worker's last words where it
    fails.
    """
    python = Path(FLAGS.envs, worker, 'bin', 'python') if worker in ENVIRONMENTS else sys.executable
    cache = str(Path(FLAGS.workdir, 'cache').absolute())
    environment = {
        **os.environ,
        'JAX_PLATFORMS': 'cpu',
        'JAX_COMPILATION_CACHE_DIR': cache,
        'HF_HUB_OFFLINE': '1',
    }
    environment['PYTHONPATH'] = str(ROOT)
    module = worker if worker == 'ours' else f'in_{worker}'
    command = [str(python), '-m', f'benchmarks.peers.{module}', *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f'error: {worker} {" ".join(words)}\n{done.stderr[-3000:]}')
    return done.stdout


def measure(
    row: Row, setting: str, repeats: int, directory: Path, reference: dict[str, float]
) -> dict[str, Any]:
    """What the row's worker reports; `reference` collects the first row's loss and gradient norms, which the
    others must have.
    """
    mode = () if row.worker in ENVIRONMENTS else (row.mode,)
    result = json.loads(call(row.worker, *mode, str(directory), setting, str(repeats)).splitlines()[-1])
    for name in set(COMPARED) & set(result):
        want = reference.setdefault(name, result[name])
        if abs(result[name] - want) > TOLERANCE * abs(want):
            sys.exit(
                f'error: {row.name}, {setting}: {name} is {result[name]:.6g}, and {want:.6g} in the first row'
            )
    seconds = ' '.join(f'{s:.3g}' for s in result['seconds'])
    print(f'{directory.name}, {row.mode}, {row.name} ({setting}): {seconds} s', file=sys.stderr, flush=True)
    return result


def compare(w: Workload) -> None:
    """Prints the tables of a workload."""
    directory, reference = Path(FLAGS.workdir, w.name).absolute(), {}
    call('torch', 'prepare', w.name, str(directory))
    data = peers_data.load(directory)[1]
    flops = {'update': peers_data.update_flops(w, data)}
    flops['iteration'] = flops['update'] + peers_data.generation_flops(w, data)
    rows = rows_of(w, bool(FLAGS.envs))
    repeats = FLAGS.repeats if w.hidden < 512 else max(1, FLAGS.repeats // 3)

    def fastest(row: Row) -> str:
        if len(row.candidates) == 1 or not FLAGS.search:
            return row.candidates[0]
        return min(
            row.candidates, key=lambda setting: min(measure(row, setting, 2, directory, reference)['seconds'])
        )

    load = os.getloadavg()[0]
    settings = {row: fastest(row) for row in rows}
    results: dict[Row, list[dict[str, Any]]] = {row: [] for row in rows}
    for _ in range(FLAGS.rounds):
        for row in rows:
            results[row].append(measure(row, settings[row], repeats, directory, reference))
    for mode in sorted({row.mode for row in rows}, reverse=True):
        print(f'\n{w.name}, {mode}: {flops[mode] / 1e9:,.0f} GFLOP of useful work\n')
        print_table({row: results[row] for row in rows if row.mode == mode}, settings, flops[mode])
    loads = f'load average {load:.1f} before and {os.getloadavg()[0]:.1f} after, {CORES} of which are this'
    machine = f'{CORES} cores of {os.cpu_count()}, {cpu_name()}, Python {platform.python_version()}'
    print(f'\n{machine}, {datetime.date.today()}; {loads}')


def print_table(results: dict[Row, list[dict[str, Any]]], settings: dict[Row, str], flops: float) -> None:
    """Markdown; seconds are medians over all rounds, and the shortest in brackets."""
    first = None
    print('| | s (shortest) | generate / rest | of the first row | GFLOP/s | of its matrix rate | versions |')
    print('|---|---|---|---|---|---|---|')
    for row, runs in results.items():
        seconds = [s for run in runs for s in run['seconds']]
        generation = [s for run in runs for s in run.get('generation', ())]
        middle, rate = median(seconds), median(run['matrix_flops'] for run in runs)
        first = first or middle
        parts = f'{median(generation):.2f} / {middle - median(generation):.2f}' if generation else ''
        name = row.name if len(row.candidates) == 1 else f'{row.name}, {settings[row]}'
        print(
            f'| {name} | {middle:.2f} ({min(seconds):.2f}) | {parts} | {middle / first:.2f} | '
            f'{flops / middle / 1e9:.0f} '
            f'| {100 * flops / middle / rate:.0f} % of {rate / 1e9:.0f} | {runs[0]["versions"]} |'
        )


def make_environments(directory: Path) -> None:
    """One for each peer that is not in this project's own test environment. Raises CalledProcessError where
    pip fails.
    """
    for name, steps in ENVIRONMENTS.items():
        subprocess.run([sys.executable, '-m', 'venv', '--clear', str(directory / name)], check=True)
        pip = [str(directory / name / 'bin' / 'python'), '-m', 'pip', 'install', '-q']
        for requirements in steps:
            if subprocess.run(
                [*pip, *requirements]
            ).returncode:  # torch's CPU build may have to come from PyTorch's own index
                subprocess.run([*pip, '--extra-index-url', TORCH_INDEX, *requirements], check=True)


def main(_) -> None:
    if FLAGS.make_envs:
        make_environments(Path(FLAGS.make_envs))
        return
    unknown = set(FLAGS.workloads) - set(WORKLOADS)
    if unknown:
        sys.exit(f'error: --workloads={",".join(sorted(unknown))}: choose from {", ".join(WORKLOADS)}')
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    if len(cores) < CORES:
        sys.exit(f'error: needs {CORES} cores; {len(cores)} may be used')
    os.sched_setaffinity(0, cores)  # the workers inherit it
    for name in FLAGS.workloads:
        compare(WORKLOADS[name])


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_string(
        'make_envs', None, 'Makes the environments of TRL and tunix in this directory, and ends.'
    )
    flags.DEFINE_string('envs', None, 'The directory of --make_envs. Without it, only updates are compared.')
    flags.DEFINE_string('workdir', 'runs/peers', 'Where policies, data and compiled programs are kept.')
    flags.DEFINE_list('workloads', list(WORKLOADS), 'Of these; each is compared by itself.')
    flags.DEFINE_integer('rounds', 3, 'Rounds over all rows.', lower_bound=1)
    flags.DEFINE_integer(
        'repeats', 6, 'Updates or iterations timed in a process; a third as many of W2.', lower_bound=1
    )
    flags.DEFINE_bool(
        'search', True, "Times each peer's candidates first and takes the fastest, not the one listed first."
    )
    app.run(main)
