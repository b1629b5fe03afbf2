"""What one CUDA card gives: attention kernels against each other, two training steps with an ablation each,
the quickstart, and other tiles of our kernel.

    python benchmarks/gpu_report.py    # or `make gpu-report`; wants jax[cuda13], flax and optax alone
    python benchmarks/gpu_report.py attention --again      # one part, though it has been run
    python benchmarks/gpu_report.py --table        # the tables of what has been run, anywhere
    # small shapes on a CPU into a temporary directory: does everything start?
    python benchmarks/gpu_report.py --rehearse

A part takes at most 8 minutes. Its raw numbers go to benchmarks/results/PART.json when it is done, whole or
not at all. A part whose file is there is skipped, so a report that was cut short continues. Each row is a
process of its own: it has the card's memory to itself, and one that fails fails alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout, installed or not

from bapo_jax.machine.files import write_text

PART_S = 470.0  # of a part, so that it ends within 8 minutes
# Candidates of gpu_kernels.py: kernels against each other, and settings of ours to try.
KERNELS = ('triton', 'cudnn', 'tokamax', 'cudnn public', 'pallas mha', 'xla')
TILES = ('triton wide', 'triton narrow', 'triton deep')
SHAPES = tuple((tokens, heads) for tokens in (8192, 10_240) for heads in ('12/2', '16/8'))
STEPS = {  # a training step: about 65,000 tokens a micro-batch
    'qwen2.5-1.5b': {'--tokens': 8192, '--rows': 8, '--micro_batches': 2, '--remat': 'full'},
    'qwen3-0.6b': {'--tokens': 16_384, '--rows': 4, '--micro_batches': 2, '--remat': 'full'},
}
CAPTION = (
    'Useful work counts neither padding nor masked pairs nor what is recomputed. The matrix rate is that of '
    'a bf16 product of 8192³ in the same process. Goal: at least 65 % of it on one H200. Elsewhere: 56.4 % '
    'of peak for a 1.3B model in JAX on one H100 (jax-linear-attention 0.1.0, self-reported); about 50 % '
    'for MaxText 7B; 37.4 % for the best RL learner (prime-rl, 4B).'
)


class Job(NamedTuple):
    """A row: arguments of a Python process that prints a JSON object last; or, with `imports`, one whose last
    lines are kept.
    """

    name: str
    arguments: tuple[str, ...]
    imports: str = ''  # a module that has to load first


def parts(rehearse: bool) -> dict[str, list[Job]]:
    """The jobs of each part, in order; small ones for a rehearsal."""
    small = ('--any-device',) if rehearse else ()
    tiny = ('--tiny', *small) if rehearse else ()

    def kernels(*names: str) -> list[Job]:
        return [Job(name, ('benchmarks/gpu_kernels.py', name, *tiny)) for name in names]

    jobs = {'attention': kernels(*(('triton', 'xla') if rehearse else KERNELS))}
    for model, base in STEPS.items():
        if rehearse:
            model_flags = {'--model': 'tiny', **base, '--tokens': 64, '--rows': 2}
        else:
            model_flags = {'--model': model, **base}
        jobs[model] = [
            Job(
                name,
                (
                    'benchmarks/train_step.py',
                    *(f'{k}={v}' for k, v in {**model_flags, **changes}.items()),
                    *small,
                ),
            )
            for name, changes in list(ablation(base).items())[: 2 if rehearse else None]
        ]
    train = ('-m', 'bapo_jax.train', '--config=configs/quickstart.py', '--workdir={workdir}')
    jobs['quickstart'] = [
        Job('quickstart', (*train, '--config.steps=1') if rehearse else train, imports='bapo_jax.train')
    ]
    jobs['tiles'] = kernels(*(TILES[:1] if rehearse else TILES))
    return jobs


def ablation(base: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What changes in each row of a training step. What recomputes nothing has the memory for one row at a
    time.
    """
    rows = base['--rows']
    return {
        'as it is': {},
        'attention=xla': {'--attention': 'xla'},
        'attention and MLP inputs kept': {'--remat': 'attention_and_mlp_inputs'},
        'recompute nothing, 1 row': {'--remat': 'none', '--rows': 1, '--micro_batches': rows},
        f'{2 * rows} rows': {'--rows': 2 * rows, '--micro_batches': 1},
        'tiles of 4,096 tokens in the head': {'--head_tokens': 4096},
    }


# ---- running


def run_part(jobs: list[Job], environment: dict[str, str]) -> dict[str, Any]:
    """The part's raw numbers: a result or an error by row."""
    ends, rows = time.monotonic() + PART_S, {}
    for job in jobs:
        left = ends - time.monotonic()
        rows[job.name] = (
            run_job(job, left, environment) if left > 5 else {'error': "not run: the part's time was up"}
        )
        print(f'  {job.name}: {rows[job.name].get("error", "done")}', flush=True)
    return {'date': str(datetime.date.today()), 'python': platform.python_version(), 'rows': rows}


def run_job(job: Job, seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    """The job's result and seconds; an error's last line where it fails, and none of its processes live on."""
    started = time.monotonic()
    if job.imports:
        missing = run([sys.executable, '-c', f'import {job.imports}'], seconds, environment)
        if missing.returncode:
            return {'error': f'not run: {last_line(missing.stderr)}'}
    with tempfile.TemporaryDirectory() as workdir:
        arguments = [argument.format(workdir=workdir) for argument in job.arguments]
        done = run([sys.executable, *arguments], seconds, environment)
    row = {'command': ' '.join(('python', *job.arguments)), 'wall_s': time.monotonic() - started}
    if done.returncode is None:
        return {**row, 'error': f'stopped after {seconds:.0f} s'}
    if done.returncode:
        return {**row, 'error': last_line(done.stderr) or f'exit status {done.returncode}'}
    return {
        **row,
        'result': done.stdout.splitlines()[-15:] if job.imports else json.loads(done.stdout.splitlines()[-1]),
    }


class Done(NamedTuple):
    returncode: int | None  # None: out of time
    stdout: str
    stderr: str


def run(command: list[str], seconds: float, environment: dict[str, str]) -> Done:
    """Runs it in a session of its own, which ends with it."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=seconds)
        return Done(process.returncode, stdout, stderr)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return Done(None, *process.communicate())


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), '')[:300]


# ---- the tables


def tables(results: Path, rehearse: bool) -> str:
    """Markdown of whatever is there; a row that was not run is empty and says so."""
    text = []
    for part, jobs in parts(rehearse).items():
        file = results / f'{part}.json'
        found = json.loads(file.read_text('utf-8')) if file.is_file() else {'rows': {}}
        rows = {job.name: found['rows'].get(job.name, {'error': 'not run'}) for job in jobs}
        as_table = {'attention': attention_table, 'tiles': attention_table, 'quickstart': plain}.get(
            part, step_table
        )
        text += [f'### {part}', '', where(found), '', *as_table(rows), '']
    return '\n'.join([*text, CAPTION])


def where(found: dict[str, Any]) -> str:
    """The device, versions and date of a part."""
    results = [row['result'] for row in found['rows'].values() if isinstance(row.get('result'), dict)]
    parts_ = [f'{results[0]["device"]}, jax {results[0]["jax"]}'] if results else []
    return ', '.join([*parts_, f'Python {found["python"]}', found['date']]) if 'date' in found else 'Not run.'


def attention_table(rows: dict[str, Any]) -> Iterator[str]:
    """TFLOP/s forward / forward and backward, by tokens and heads, first with one segment a row and then with
    three.
    """
    results = {name: row['result'] for name, row in rows.items() if 'result' in row}
    shapes = (
        sorted({(s['tokens'], s['heads']) for result in results.values() for s in result['speeds']}) or SHAPES
    )
    for segments in (1, 3):
        yield (
            f'TFLOP/s of useful work, forward / forward and backward, {segments} '
            f'segment{"s" if segments > 1 else ""} a row:'
        )
        yield ''
        yield from table_head(
            'kernel', *(f'{tokens:,} × {heads}' for tokens, heads in shapes), 'matrix product', 'equations'
        )
        for name, row in rows.items():
            if 'error' in row:
                yield table_row(name, *[''] * (len(shapes) + 1), row['error'])
                continue
            speeds = {
                (s['tokens'], s['heads']): s for s in row['result']['speeds'] if s['segments'] == segments
            }
            cells = [speed_cell(speeds.get(shape, {})) for shape in shapes]
            yield table_row(
                name,
                *cells,
                tera(row['result']['matrix_flops_per_s']),
                equations_cell(row['result']['equations']),
            )
        yield ''


def tera(flops_per_s: float) -> str:
    return f'{flops_per_s / 1e12:.3g}'


def speed_cell(speed: dict[str, Any]) -> str:
    if 'both_flops_per_s' not in speed:
        return 'fails' if 'error' in speed else ''
    return f'{tera(speed["forward_flops_per_s"])} / {tera(speed["both_flops_per_s"])}'


def equations_cell(equations: dict[str, Any]) -> str:
    """'right'; 'cannot run' with the first reason; or 'wrong' with the worst test."""
    if equations['ok']:
        return 'right'
    for name, says in equations.items():
        if isinstance(says, str):
            return f'**{"wrong" if says.startswith("FloatingPointError") else "cannot run"}**: {name}: {says}'
    name, error = max(((name, e) for name, e in equations.items() if name != 'ok'), key=lambda item: item[1])
    return f'**wrong**: {name}: error {error:.2g} of the largest value'


def step_table(rows: dict[str, Any]) -> Iterator[str]:
    yield from table_head(
        'setting',
        'tokens/s',
        'utilisation',
        'useful TFLOP/s',
        'matrix TFLOP/s',
        's a step',
        'peak GiB',
        'compile s',
        'note',
    )
    for name, row in rows.items():
        if 'error' in row:
            yield table_row(name, *[''] * 7, row['error'])
            continue
        r = row['result']
        peak = '' if r['peak_bytes'] is None else f'{r["peak_bytes"] / 2**30:.1f}'
        flops = tera(r['model_flops_per_s']), tera(r['matrix_flops_per_s'])
        numbers = (
            f'{r["tokens_per_s"]:,.0f}',
            f'{100 * r["utilisation"]:.1f} %',
            *flops,
            f'{r["seconds"]:.3g}',
            peak,
        )
        yield table_row(
            name, *numbers, f'{r["compile_s"]:.0f}', f'{r["rows"]} rows, {r["micro_batches"]} micro-batches'
        )


def plain(rows: dict[str, Any]) -> Iterator[str]:
    """The quickstart's time, and what it printed last."""
    for name, row in rows.items():
        if 'error' in row:
            yield f'{name}: {row["error"]}'
        else:
            yield from (f'{name}: {row["wall_s"]:.0f} s', '', '```', *row['result'], '```')


def table_head(*cells: str) -> list[str]:
    return [table_row(*cells), table_row(*['---'] * len(cells))]


def table_row(*cells: str) -> str:
    return f'| {" | ".join(cell.replace("|", "/") for cell in cells)} |'


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument(
        'parts', nargs='*', metavar='PART', help=f'of {", ".join(parts(False))}; default: all'
    )
    parser.add_argument('--again', action='store_true', help='run parts that have been run')
    parser.add_argument('--table', action='store_true', help='print the tables and run nothing')
    parser.add_argument(
        '--rehearse', action='store_true', help='small shapes on a CPU, into a temporary directory'
    )
    parser.add_argument(
        '--results', type=Path, default=ROOT / 'benchmarks/results', help='where the raw numbers are'
    )
    asked = parser.parse_args(arguments)
    jobs, environment = parts(asked.rehearse), dict(os.environ)
    unknown = set(asked.parts) - set(jobs)
    if unknown:
        parser.error(f'no part {sorted(unknown)[0]!r}; there are {", ".join(jobs)}')
    if asked.table:
        print(tables(asked.results, asked.rehearse))
        return
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary) if asked.rehearse else asked.results
        if asked.rehearse:
            environment['JAX_PLATFORMS'] = 'cpu'
        else:
            found = run(
                [sys.executable, '-c', 'import jax; print(jax.devices()[0].platform)'], 120, environment
            )
            if found.stdout.strip() != 'gpu':
                says = last_line(found.stderr) or f'JAX finds a {found.stdout.strip()} alone'
                raise SystemExit(
                    f'error: no CUDA device: {says}; install jax[cuda13], or see --rehearse and --table'
                )
        results.mkdir(parents=True, exist_ok=True)
        for part in asked.parts or jobs:
            file = results / f'{part}.json'
            if file.is_file() and not asked.again:
                print(f'{part}: done before; --again runs it once more')
                continue
            print(part, flush=True)
            write_text(file, json.dumps(run_part(jobs[part], environment), indent=1))
        print(tables(results, asked.rehearse))


if __name__ == '__main__':
    main(sys.argv[1:])
