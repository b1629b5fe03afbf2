"""X2: how much of a re-evaluated prompt's rise is progress, and how much regression to the mean?

    python benchmarks/first_proof_x2.py                   # from the weak base of first_proof.py, which makes it; 3 minutes
    python benchmarks/first_proof_x2.py --base=quickstart

A hard prompt enters the buffer because k of G responses (k <= 1) were right, and enters X2 because k' (1 < k' < G) later were: both
are chosen for their luck. So both policies, that of the step it entered at and the one asked again, answer it 64 times more, and

    k'/G - k/G  =  (k'/G - p_now)  +  (p_now - p_then)  +  (p_then - k/G)
                    luck of X2        progress             bad luck that made it hard

with p the share right of the fresh responses. One table, means over the groups, which also goes to docs/first_proof_x2.json.
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
from first_proof_grid import BASES, CENTRE, Setting, commands
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from bapo_jax.checkpoint import Checkpoints
from bapo_jax.hosts import Hosts
from bapo_jax.metrics import write_text
from bapo_jax.models.tokenizer import load_tokenizer, stop_tokens
from bapo_jax.rollout.collect import collect
from bapo_jax.rollout.engine import TRACKING, Draw, Sampling
from bapo_jax.rollout.jax_engine import JaxEngine
from bapo_jax.setup import build_policy, read_inputs

FLAGS = flags.FLAGS
flags.DEFINE_enum('base', 'weak', sorted(BASES), 'Of first_proof_grid.py: where the run starts, and its steps and rate.')
flags.DEFINE_integer('samples', 64, 'Fresh responses of each policy to each prompt.')

ROOT = Path(__file__).resolve().parents[1]
ANSWERS = ROOT / 'docs' / 'first_proof_x2.json'


def asked_again(workdir: Path) -> list[dict]:
    """Every re-evaluated group: its prompt, the step it was asked again at and k', the step it was last fresh at and k."""
    last_fresh: dict[int, tuple[int, int]] = {}
    found = []
    for path in sorted((workdir / 'rollouts').glob('*.jsonl.zst')):
        rows = [json.loads(line) for line in zstandard.decompress(path.read_bytes()).decode().splitlines()]
        for row in rows:
            if row['use'] in ('x2', 'not_improved'):
                then, k = last_fresh[row['prompt_id']]
                found.append({'id': row['prompt_id'], 'use': row['use'], 'then': then, 'k': k, 'now': row['step'],
                              'again': sum(row['rewards']), 'G': len(row['rewards'])})  # fmt: skip
        last_fresh |= {r['prompt_id']: (r['step'], sum(r['rewards'])) for r in rows if r['use'] in ('x1', 'discarded')}
    return found


def main(_) -> None:
    workdir = ROOT / 'runs' / 'first_proof' / f'x2_of_{FLAGS.base}'
    # With a delay, v > 1, who answered at a step would not be the policy of the step before.
    every_policy = {'rollouts.every': 1, 'checkpoint.every': 1, 'checkpoint.keep': 1000, 'evaluate.track_prompts': 0}
    setting = Setting(FLAGS.base, 'x2', '', 'bapo', BASES[FLAGS.base] | CENTRE['bapo'] | every_policy)
    train = commands(setting, 1, str(workdir))[0]
    subprocess.run([sys.executable, *train[1:]], cwd=ROOT, check=True)
    config = ConfigDict(json.loads((workdir / 'config.json').read_text('utf-8')))
    prompts = {p.id: p for p in read_inputs(config).prompts}
    policy, tokenizer = build_policy(config, Hosts()), load_tokenizer(config.model.path)
    engine = JaxEngine(policy.graph, stop_tokens(config.model.path, tokenizer), config.rollout.rows)
    checkpoints = Checkpoints(workdir / 'checkpoints', keep=None)
    groups = asked_again(workdir)

    # What has to be asked of whom: the policy after step t - 1 answered again at t; α of step s answered when it was fresh.
    wanted: dict[int, set[int]] = defaultdict(set)
    for g in groups:
        wanted[g['now'] - 1].add(g['id'])
        wanted[g['then'] - 1].add(g['id'])
    right: dict[tuple[int, int], float] = {}
    for step in sorted(wanted):
        params = (
            policy.read_initial()
            if step == 0
            else checkpoints.restore(step, policy.learner.shapes(policy.shapes))[0].learner.params
        )
        engine.load(params, step)
        asked = [prompts[i] for i in sorted(wanted[step])]
        draws = [Draw(config.seed, step, TRACKING)] * len(asked)
        sampling = Sampling(config.rollout.temperature, config.rollout.max_response_tokens)
        answered = collect(engine, tokenizer, asked, FLAGS.samples, sampling, draws, None).groups
        right |= {(step, g.prompt.id): g.mean_reward for g in answered}

    columns = ('k/G', 'p then', 'p now', "k'/G", 'luck of X2', 'progress', 'bad luck')
    table, answer = Table('group', 'number', *columns, title=f'From the {FLAGS.base} base, %, means'), {}
    for use in ('x2', 'not_improved'):
        mine = [g for g in groups if g['use'] == use]
        k, again = (np.mean([g[key] / g['G'] for g in mine]) for key in ('k', 'again'))
        then, now = (np.mean([right[g[key] - 1, g['id']] for g in mine]) for key in ('then', 'now'))
        numbers = [round(100 * float(x), 1) for x in (k, then, now, again, again - now, now - then, then - k)]
        answer[use] = {'groups': len(mine), **dict(zip(columns, numbers, strict=True))}
        table.add_row(use, str(len(mine)), *map(str, numbers))
    Console().print(table)
    answers = json.loads(ANSWERS.read_text('utf-8')) if ANSWERS.is_file() else {}
    command = f'python benchmarks/first_proof_x2.py --base={FLAGS.base} --samples={FLAGS.samples}'
    write_text(ANSWERS, json.dumps(answers | {FLAGS.base: {'command': command, **answer}}, indent=1) + '\n')


if __name__ == '__main__':
    app.run(main)
