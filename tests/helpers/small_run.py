"""A real run made small: the quickstart's policy and task, few prompts, few steps."""

import importlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import zstandard

from bapo_jax.export import export
from bapo_jax.machine import events, stopping
from bapo_jax.machine.lock import held
from bapo_jax.train import build, train

ROOT = Path(__file__).resolve().parents[2]


def small_config(method: str, benchmark: Path, **changes):
    """The quickstart with 8 prompts × 4 responses a step and 6 steps; `changes` as field__subfield=value."""
    config = importlib.import_module('configs.quickstart').get_config(method)
    config.model.path = str(ROOT / 'configs' / 'quickstart_base')
    small = {
        'steps': 6, 'task.limit': 60, 'rollout.group_size': 4, 'learner.batch_groups': 8, 'learner.mini_batch_groups': 4,
        'learner.row_tokens': 16 + 2 * 48, 'evaluate.samples': 2, 'evaluate.track_prompts': 4,
        'evaluate.benchmarks': (str(benchmark),), 'replay.max_reevaluate': 4, 'checkpoint.every': 2, 'log.rollouts_every': 1,
        'log.ledger': True,
    }  # fmt: skip
    config.update_from_flattened_dict(small | {name.replace('__', '.'): value for name, value in changes.items()})
    return config


def run(config, workdir: Path, amend: bool = False):
    """As the command does."""
    with stopping.on_signal(120.0), held(workdir), events.recorded(workdir):
        return train(build(config, workdir, amend=amend))


def kill_after(rows: int, config_of: Callable, benchmark: Path, workdir: Path, look: Callable = lambda: None) -> None:
    """Runs `config_of(benchmark)` in a process of its own, and kills it once it has logged so many rows; `look` is called before."""
    script = (
        f'import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tests" / "helpers")!r}]\n'
        f'from pathlib import Path; from small_run import run; from {config_of.__module__} import {config_of.__name__}\n'
        f'run({config_of.__name__}(Path({str(benchmark)!r})), Path({str(workdir)!r}))\n'
    )
    process = subprocess.Popen([sys.executable, '-c', script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log, deadline = workdir / 'metrics.jsonl', time.monotonic() + 240
    try:
        while not (log.is_file() and log.read_text().count('\n') >= rows):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        look()
    finally:
        process.kill()
        process.wait()


def metrics(workdir: Path, times: bool = False) -> list[dict]:
    """Rows of metrics.jsonl; without what may differ between two equal runs, times and speeds, unless asked for."""
    rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    return rows if times else [{k: v for k, v in row.items() if k != 'time' and not k.startswith(('timing_s/', 'perf/'))} for row in rows]


def rollouts(workdir: Path, step: int) -> list[dict]:
    """Rows of a step's rollout file."""
    data = zstandard.decompress((workdir / 'rollouts' / f'{step:06d}.jsonl.zst').read_bytes())
    return [json.loads(line) for line in data.decode().splitlines()]


def assert_goes_on(base, tmp_path):
    """Two steps of GRPO from `base`; the second again from the checkpoint of the first, bit for bit. Its export is in `exported`."""
    config = small_config(
        'grpo', base, model__path=str(base), task__reward='parity:odd', rollout__max_response_tokens=8, learner__slot_tokens=0,
        learner__row_tokens=24, learner__learning_rate=1e-3, steps=2, checkpoint__every=1, evaluate__benchmarks=(), evaluate__track_prompts=0,
    )  # fmt: skip
    run(config, tmp_path / 'whole')
    shutil.copytree(tmp_path / 'whole', tmp_path / 'again')
    shutil.rmtree(tmp_path / 'again' / 'checkpoints' / '2')
    run(config, tmp_path / 'again')
    rows = metrics(tmp_path / 'whole')
    assert metrics(tmp_path / 'again') == rows and [row['step'] for row in rows] == [0, 1, 2]
    assert all(row['actor/grad_norm'] > 0 and row['mismatch/logprob_abs_max'] < 1e-4 for row in rows[1:])
    export(tmp_path / 'whole', tmp_path / 'exported')
