"""What overlapping generation and training saves, in turn and overlapped, with lengths of a heavy tail.

    python -m benchmarks.engine.overlap                       # the in-process engine, and a real vLLM server
    python -m benchmarks.engine.overlap --engines=vllm
    python -m benchmarks.engine.overlap --sync_every=1 --cycles=20 --behind=0,1,4

A random policy with several stop tokens answers: lengths are geometric, 64 tokens on average, and cut at 256.
Nothing is learnt from them; a reward by the length's parity gives groups to train on. Server and trainer have
one core each. The in-process engine and the trainer share one device on two cores.

In the arm in turn, a step takes G seconds for generation and T for all else. A step with overlap costs at
least max(T + G/v, G + T/v) on average: the first generation after a sync has nothing to hide behind. With
rollout.most_behind=η > 0 it has, and the limit is max(T, G). That holds where the two work on different
devices. On one device a step takes T + G at best. The first two cycles of v steps, and at least two steps,
compile and are left out.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from absl import app, flags
from rich.table import Table

from bapo_jax.machine import terminal
from bapo_jax.models import hf
from bapo_jax.rollout.vllm.supervise import SupervisedServer
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE
from bapo_jax.run.log.metrics import read_metrics
from benchmarks.host.load import cpu_name

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / 'configs' / 'quickstart_base'
MEAN, LONGEST = 64, 256  # tokens of a response


def even(data_source: str, response: str, ground_truth: dict, extra: dict) -> float:
    """The reward: 1 for every second length."""
    return float(extra['tokens'] % 2 == 0)


def random_policy(directory: Path) -> Path:
    """A policy that draws tokens almost uniformly; one in 64 is a stop token."""
    config = hf.read_config(BASE)
    params = jax.tree.map(lambda x: x * 0.01, hf.init_params(config, 0))
    hf.save(directory, hf.to_hf(config, params), like=BASE)
    ends = [config.vocab_size - 5 + i for i in range(round(config.vocab_size / MEAN))]
    (directory / 'generation_config.json').write_text(json.dumps({'eos_token_id': ends}))
    return directory


@contextlib.contextmanager
def server(policy: Path, core: int) -> Iterator[SupervisedServer]:
    """A vLLM server with a core of its own."""
    cores = os.sched_getaffinity(0)
    os.environ['VLLM_CPU_OMP_THREADS_BIND'] = str(core)
    os.sched_setaffinity(0, {core})  # the server inherits it
    one = SupervisedServer(
        str(policy), policy.parent / 'server.log', dtype='float32', max_tokens=16 + LONGEST, deadline_s=600,
        # a core is busy with as many; more would hold up the earlier step
        extra=['--enforce-eager', '--max-num-seqs=64'],
    )  # fmt: skip
    try:
        one.start()
        os.sched_setaffinity(0, cores)
        yield one
    finally:
        one.stop()


def arm(
    behind: int | None, policy: Path, workdir: Path, cores: str, engine: list[str], token: str = ''
) -> list[dict]:
    """Trains on these cores, in turn if `behind` is None; the metrics of the steps that count."""
    v, first = FLAGS.sync_every, max(2 * FLAGS.sync_every, 3)
    last = first + v * FLAGS.cycles
    words = [
        sys.executable, '-m', 'bapo_jax.train', '--config=configs/quickstart.py:bapo_tuned', f'--workdir={workdir}', *engine,
        f'--config.model.path={policy}', '--config.task.reward=overlap:even', f'--config.rollout.overlap={behind is not None}',
        f'--config.rollout.most_behind={behind or 0}',
        f'--config.rollout.sync_every={v}', f'--config.rollout.max_response_tokens={LONGEST}', '--config.learner.slot_tokens=0',
        f'--config.learner.row_tokens={2 * (16 + LONGEST)}', '--config.learner.micro_batch_rows=4',
        '--config.learner.batch_groups=32', '--config.learner.mini_batch_groups=8', '--config.learner.learning_rate=1e-9',
        f'--config.steps={last}', '--config.evaluate.benchmarks=()', '--config.evaluate.track_prompts=0',
        '--config.log.rollouts_every=0', '--config.checkpoint.every=1000',
    ]  # fmt: skip
    environment = {
        **os.environ,
        TOKEN_VARIABLE: token,
        'JAX_NUM_CPU_DEVICES': '1',
        'PYTHONPATH': f'{ROOT}:{Path(__file__).parent}',
    }
    done = subprocess.run(
        ['taskset', '-c', cores, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f'error: {" ".join(words)}\n{done.stderr[-2000:]}')
    # Cycles begin at the syncs, steps v, 2v, …
    return [row for row in read_metrics(workdir) if first <= row['step'] < last]


def mean(rows: list[dict], *phases: str) -> float:
    return float(np.mean([sum(row.get(f'timing_s/{phase}', 0.0) for phase in phases) for row in rows]))


def main(_) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit('error: needs two cores, one for the server and one for the trainer')
    with tempfile.TemporaryDirectory() as directory:
        policy = random_policy(Path(directory) / 'policy')
        for engine in FLAGS.engines:
            workdir = Path(directory) / engine
            workdir.mkdir()
            with contextlib.ExitStack() as stack:
                if engine == 'jax':
                    where = f'{cores[0]},{cores[1]}'
                    words, token = ['--config.rollout.engine=jax', '--config.rollout.rows=64'], ''
                else:
                    where, one = str(cores[0]), stack.enter_context(server(policy, cores[1]))
                    words = ['--config.rollout.engine=vllm', f'--config.rollout.servers=({one.url!r},)']
                    token = one.token
                arms = {
                    behind: arm(behind, policy, workdir / str(behind), where, words, token)
                    for behind in (None, *map(int, FLAGS.behind))
                }
            report(engine, arms)


def report(engine: str, arms: dict[int | None, list[dict]]) -> None:
    """Prints the table of an engine's arms, and each one beside its limit."""
    v, turn = FLAGS.sync_every, arms[None]
    names = {None: 'in turn', 0: 'overlapped'} | {eta: f'most_behind={eta}' for eta in arms if eta}
    table = Table(
        'seconds a step', *(names[behind] for behind in arms),
        title=f'{engine}: v = {v}, {len(turn)} steps of 32 × 8 responses; {cpu_name()}, jax {version("jax")}, {datetime.date.today()}',
    )  # fmt: skip
    for phase in ('gen', 'reward', 'wait_rollouts', 'weight_sync', 'update_actor', 'step'):
        table.add_row(phase, *(f'{mean(rows, phase):.2f}' for rows in arms.values()))
    stale = (float(np.mean([row['staleness/mean'] for row in rows])) for rows in arms.values())
    table.add_row('staleness in steps', *(f'{steps:.2f}' for steps in stale))
    terminal.console().print(table)
    G = mean(turn, 'wait_rollouts')
    T = mean(turn, 'step') - G
    for behind, rows in list(arms.items())[1:]:
        step = mean(rows, 'step')
        print(f'{names[behind]}: {mean(turn, "step") / step:.2f} × as fast as in turn')
        if engine == 'jax':
            print(f'on one device: T + G = {T + G:.2f} s, and {step:.2f} s is {step / (T + G):.2f} × that')
        print(against_limit(names[behind], step, T, G, v, behind))


def against_limit(arm_name: str, step: float, T: float, G: float, v: int, behind: int) -> str:
    """The arm beside max(T, G) (target 1.15), or beside max(T + G/v, G + T/v) if nothing is requested before a sync."""
    what, limit = ('max(T, G)', max(T, G)) if behind else ('max(T + G/v, G + T/v)', max(T + G / v, G + T / v))
    return f'with T = {T:.2f} s and G = {G:.2f} s, {arm_name}: {what} = {limit:.2f} s, and {step:.2f} s is {step / limit:.2f} × that'


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_integer('sync_every', 5, 'v.', lower_bound=1)
    flags.DEFINE_list('behind', ['0'], 'Arms: η, how many steps past a sync are requested before it.')
    flags.DEFINE_list('engines', ['jax', 'vllm'], 'Of these two.')
    flags.DEFINE_integer('cycles', 4, 'Cycles of v steps measured.', lower_bound=1)
    app.run(main)
