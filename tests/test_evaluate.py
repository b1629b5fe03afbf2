"""Scores: of θ rather than α, of a run and of a Hugging Face directory, with every sample written down."""

import json
import subprocess
import sys

import numpy as np
from small_run import ROOT, metrics, run, small_config
from test_groups import make_group



def evaluate(*flags: str) -> None:
    command = [sys.executable, '-m', 'bapo_jax.evaluate', *flags]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert 'mean@2' in result.stdout


def test_the_command_scores_a_run_as_its_own_last_evaluation_did_and_a_base_as_step_0(tmp_path):
    problems = tmp_path / 'problems.jsonl'
    problems.write_text(''.join(json.dumps({'nums': [a, 4, 2], 'target': a + 6}) + '\n' for a in range(5, 25)))
    # v = 4 and two steps: α is still θ_0, so scoring α would repeat step 0.
    config = small_config('bapo', problems, steps=2, rollout__sync_every=4, learner__learning_rate=3e-3)
    run(config, tmp_path / 'run')
    name = f'val-core/{problems}/acc/mean@2'
    base, trained = metrics(tmp_path / 'run')[0][name], metrics(tmp_path / 'run')[-1][name]
    assert base != trained

    evaluate(f'--checkpoint={tmp_path}/run', f'--output={tmp_path}/of_run')
    result = json.loads((tmp_path / 'of_run' / 'summary.json').read_text())
    assert (result['step'], result['benchmarks'][str(problems)]['mean']) == (2, trained)
    rows = [json.loads(line) for line in (tmp_path / 'of_run' / 'problems.jsonl').read_text().splitlines()]
    assert len(rows) == 20 * 2 and np.mean([row['verdict'] == 'correct' for row in rows]) == trained

    evaluate(f'--checkpoint={config.model.path}', '--config=configs/quickstart.py', f'--benchmarks={problems}', '--samples=2',
             f'--output={tmp_path}/of_base')  # fmt: skip
    result = json.loads((tmp_path / 'of_base' / 'summary.json').read_text())
    assert result['benchmarks'][str(problems)]['mean'] == base


def test_a_directory_that_is_no_run_needs_a_config(tmp_path):
    command = [sys.executable, '-m', 'bapo_jax.evaluate', f'--checkpoint={tmp_path}']
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode != 0 and '--config=FILE' in result.stderr
