"""X2: how much of a re-evaluated prompt's rise is progress, and how much regression to the mean?

    python -m studies.first_proof.x2    # from the weak base, which runner.py makes; 3 minutes
    python -m studies.first_proof.x2 --base=quickstart

A hard prompt enters the buffer because k <= 1 of its G responses were right. It enters X2 because 1 < k' < G
later were. Both counts are selected for their luck. So the policies of the two steps each answer it 64 times
more:

    k'/G - k/G  =  (k'/G - p_now)  +  (p_now - p_then)  +  (p_then - k/G)
                    luck of X2        progress             bad luck that made it hard

with p the share of these fresh responses that is right. Prints one table of means over the groups and writes
it to x2.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import zstandard
from absl import app, flags
from ml_collections import ConfigDict
from rich.table import Table

from bapo_jax.inputs import read_inputs
from bapo_jax.learner.build import build_learner
from bapo_jax.machine import terminal
from bapo_jax.machine.files import write_text
from bapo_jax.rollout.collect import collect
from bapo_jax.rollout.engine import TRACKING, Draw, Sampling
from bapo_jax.rollout.inprocess.engine import JaxEngine
from bapo_jax.rollout.inprocess.room import Limits
from bapo_jax.run.checkpoint import Checkpoints
from bapo_jax.run.directory import read_run_config, settings_of
from studies.first_proof.grid import BASES, CENTRE, Setting, commands
from studies.lib.rows import ROOT

FLAGS = flags.FLAGS
flags.DEFINE_enum(
    'base', 'weak', sorted(BASES), 'A base of grid.py: where the run starts, and its steps and learning rate.'
)
flags.DEFINE_integer('samples', 64, 'Fresh responses of each policy to each prompt.')

STUDY = Path(__file__).resolve().parent
ANSWERS = STUDY / 'x2.json'


def reevaluated(workdir: Path) -> list[dict]:
    """Every re-evaluated group: its prompt, the step of the re-evaluation and k', the step at which it was
    last fresh and k.
    """
    last_fresh: dict[int, tuple[int, int]] = {}
    found = []
    for path in sorted((workdir / 'rollouts').glob('*.jsonl.zst')):
        rows = [json.loads(line) for line in zstandard.decompress(path.read_bytes()).decode().splitlines()]
        for row in rows:
            if row['use'] in ('x2', 'left_out'):
                then, k = last_fresh[row['prompt_id']]
                found.append({'id': row['prompt_id'], 'use': row['use'], 'then': then, 'k': k, 'now': row['step'],
                              'again': sum(row['rewards']), 'G': len(row['rewards'])})  # fmt: skip
        last_fresh |= {
            r['prompt_id']: (r['step'], sum(r['rewards'])) for r in rows if r['use'] in ('x1', 'discarded')
        }
    return found


def main(_) -> None:
    workdir = ROOT / 'runs' / 'first_proof' / f'x2_of_{FLAGS.base}'
    # v = 1 in the centre: the policy that answers at step t is the one after step t - 1. A delay would break
    # this.
    every_policy = {
        'log.rollouts_every': 1,
        'checkpoint.every': 1,
        'checkpoint.keep': 1000,
        'evaluate.track_prompts': 0,
    }
    setting = Setting(FLAGS.base, 'x2', '', 'bapo', BASES[FLAGS.base] | CENTRE['bapo'] | every_policy)
    train = commands(setting, 1, str(workdir))[0]
    subprocess.run([sys.executable, *train[1:]], cwd=ROOT, check=True)
    config = ConfigDict(settings_of(read_run_config(workdir / 'config.json')))
    read, learner = read_inputs(config), build_learner(config)
    prompts = {p.id: p for p in read.prompts}
    engine = JaxEngine(
        learner.graph,
        read.model,
        read.stop_tokens,
        Limits(config.rollout.rows, config.rollout.max_prompt_tokens),
    )
    checkpoints = Checkpoints(workdir / 'checkpoints', keep=None)
    groups = reevaluated(workdir)

    # Which prompts each policy answers: the one after step t - 1 re-evaluated at t, and likewise for the
    # fresh group.
    wanted: dict[int, set[int]] = defaultdict(set)
    for g in groups:
        wanted[g['now'] - 1].add(g['id'])
        wanted[g['then'] - 1].add(g['id'])
    right: dict[tuple[int, int], float] = {}
    for step in sorted(wanted):
        params = (
            learner.read_initial()
            if step == 0
            else checkpoints.restore(step, learner.shapes())[0].theta.params
        )
        engine.load(params, step)
        asked = [prompts[i] for i in sorted(wanted[step])]
        draws = [Draw(config.seed, step, TRACKING)] * len(asked)
        sampling = Sampling(config.rollout.temperature, config.rollout.max_response_tokens)
        answered = collect(engine, read.tokenizer, asked, FLAGS.samples, sampling, draws, None)
        right |= {(step, g.prompt.id): g.accuracy for g in answered}

    columns = ('k/G', 'p then', 'p now', "k'/G", 'luck of X2', 'progress', 'bad luck')
    table, answer = Table('group', 'number', *columns, title=f'From the {FLAGS.base} base, %, means'), {}
    for use in ('x2', 'left_out'):
        mine = [g for g in groups if g['use'] == use]
        k, again = (np.mean([g[key] / g['G'] for g in mine]) for key in ('k', 'again'))
        then, now = (np.mean([right[g[key] - 1, g['id']] for g in mine]) for key in ('then', 'now'))
        numbers = [round(100 * float(x), 1) for x in (k, then, now, again, again - now, now - then, then - k)]
        answer[use] = {'groups': len(mine), **dict(zip(columns, numbers, strict=True))}
        table.add_row(use, str(len(mine)), *map(str, numbers))
    terminal.console().print(table)
    answers = json.loads(ANSWERS.read_text('utf-8')) if ANSWERS.is_file() else {}
    command = f'python -m studies.first_proof.x2 --base={FLAGS.base} --samples={FLAGS.samples}'
    write_text(ANSWERS, json.dumps(answers | {FLAGS.base: {'command': command, **answer}}, indent=1) + '\n')


if __name__ == '__main__':
    app.run(main)
