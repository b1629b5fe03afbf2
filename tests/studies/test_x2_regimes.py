"""Where X2 can pay, built: runs in the plan's order that differ in X2 and the pool alone, and gains by hand."""

import shlex

import numpy as np
import pytest
from scipy import stats

from bapo_jax.replay.failures import LAGS
from studies.x2_map import regimes
from studies.x2_map.regimes import ARMS, POOLS, SEEDS, command, gains, late_commands, outcome_table, wanted
from studies.x2_map.simulate import PAPER, Policy, again, hard, mixed


def test_runs_differ_in_x2_and_the_pool_alone():
    assert len(wanted([])) == 24 and wanted([])[:6] == [(pool, arm, 401) for pool in POOLS for arm in ARMS]
    of = {(pool, arm): dict(x.split('=', 1) for x in command(pool, arm, 401, 'x')[4:]) for pool in POOLS for arm in ARMS}
    plain = of['solved', 'none']
    for (pool, arm), fields in of.items():
        changed = {name for name in fields if fields[name] != plain.get(name)} - {'--config.task.train', '--config.evaluate.benchmarks'}
        assert changed == {f'--config.{name}' for name in ARMS[arm]}
        assert pool in fields['--config.task.train'] and pool in fields['--config.evaluate.benchmarks']
    assert ARMS['delayed']['replay.reevaluate_every'] == regimes.WAIT == 20 and regimes.BASE in shlex.join(late_commands()[1])


def row(pool, arm, seed, x1, x2=0, reevaluated=0):
    responses = 8 * (64 * 120 + reevaluated)
    return {'pool': pool, 'arm': arm, 'seed': seed, 'x1': x1, 'x2': x2, 'reevaluated': reevaluated, 'responses': responses,
            'correct': [[8] * 4, [12] * 4]}  # fmt: skip


PREDICTION = """<!-- prediction -->
| pool | right | hopeless | spread | fresh mixed | enter X2 | FIFO | 20 steps |
|---|---|---|---|---|---|---|---|
| solved | 93 | 0 | 1.0 | 30 | 40/45 | 5.0 (-2.5…15.0) | 6.0 (1.0…17.0) |
| raw | 60 | 20 | 2.0 | 50 | 15/20 | -6.0 (-8.0…-4.0) | -5.0 (-7.0…-3.0) |

Policy 0123456789abcdef, pools 0123456789abcdef.
<!-- /prediction -->
"""


def test_a_gain_is_of_mixed_groups_a_response_and_paired_by_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(regimes, 'PLAN', tmp_path / 'plan.md')
    regimes.PLAN.write_text(PREDICTION, 'utf-8')
    assert regimes.predicted()['solved', 'fifo'] == (5.0, -2.5, 15.0) and regimes.predicted()['raw', 'delayed'] == (-5.0, -7.0, -3.0)
    rows = [row(pool, 'none', seed, 1000 + seed) for pool in POOLS for seed in SEEDS]
    rows += [row(pool, arm, seed, 980 + seed, 60 + seed % 3, 700) for pool in POOLS for arm in ('fifo', 'delayed') for seed in SEEDS]
    by_hand = [100 * ((1040 + seed + seed % 3) / (64 * 120 + 700) * (64 * 120) / (1000 + seed) - 1) for seed in SEEDS]
    np.testing.assert_allclose(gains(rows, 'raw', 'fifo'), by_hand)
    low, high = stats.t.interval(0.95, 3, np.mean(by_hand), stats.sem(by_hand))
    line = f'| raw | delayed | 50.0→75.0 | 100.0→100.0 | 9 | 8.4 | {np.mean(by_hand):.1f} ({low:.1f} to {high:.1f}) | -5.0 (-7.0…-3.0) | costs | holds |'
    assert line in outcome_table(rows) and '| raw | none | 50.0→75.0 | 100.0→100.0 |  |  |  |' in outcome_table(rows)
    assert regimes.verdicts(rows)['solved', 'fifo'] == ('costs', 'does not hold') and high < 0


def test_no_table_is_made_while_a_run_is_missing(monkeypatch):
    monkeypatch.setattr(regimes, 'rows_in', lambda file: [])
    monkeypatch.setattr('sys.argv', ['regimes'])
    with pytest.raises(SystemExit, match='24 runs are missing; run'):
        regimes.main()


def test_no_run_begins_before_its_prediction(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(regimes, 'PLAN', tmp_path / 'plan.md')
    regimes.PLAN.write_text(PREDICTION, 'utf-8')
    monkeypatch.setattr(regimes, 'ROOT', tmp_path)
    monkeypatch.setattr(regimes, 'hash_of', lambda policy: '0123456789abcdef')
    monkeypatch.setattr('sys.argv', ['regimes', 'run'])
    (tmp_path / regimes.RUNS).mkdir(parents=True)
    for pool in POOLS:
        for part in ('train', 'test'):
            (tmp_path / regimes.file_of(pool, part)).write_text(pool + part, 'utf-8')
    with pytest.raises(SystemExit):
        regimes.main()
    assert 'the plan predicts nothing of Policy 0123456789abcdef, pools ' in capsys.readouterr().err
    regimes.PLAN.write_text(PREDICTION.replace('Policy 0123456789abcdef, pools 0123456789abcdef.', regimes.made()), 'utf-8')
    begun = []
    monkeypatch.setattr(regimes, 'measure_all', lambda file, jobs, measure, last_start: begun.extend(jobs))
    monkeypatch.setattr(regimes, 'rows_in', lambda file: [])
    regimes.main()
    assert len(begun) == 24 and regimes.predicted()['raw', 'fifo'] == (-6.0, -8.0, -4.0)


def test_the_prediction_is_of_the_x2_that_runs():
    """Delayed asks all that failed 20 steps ago, each once, from step 21 on; FIFO what an epoch of 40 steps and the run's start leave."""
    policy = Policy(0.0, 2.0, 0.05)
    retry = regimes.retry_at(policy, 'delayed', 21)
    assert retry.asked == pytest.approx(hard(policy, PAPER)) and retry.asked > 0.1
    assert regimes.retry_at(policy, 'delayed', 20).asked == 0
    late = Policy(6.0, 2.0)
    for step, oldest in ((5, 4), (120, 40)):
        held = sum(hard(late, PAPER) for _ in range(oldest))
        assert regimes.retry_at(late, 'fifo', step).asked == pytest.approx(min(0.5, held) / 5)
    found = regimes.expected_of(policy, 'delayed')  # which stays as it is: by hand
    asked, enters = hard(policy, PAPER) * 100 / 120, again(policy, 20, PAPER)
    assert found.fresh == pytest.approx(mixed(policy)) and found.enters == pytest.approx(enters)
    assert found.gain == pytest.approx(100 * ((mixed(policy) + asked * enters) / (1 + asked) / mixed(policy) - 1))


def test_the_probe_of_a_pool_is_summed_over_its_runs():
    rows = [row(pool, arm, seed, 1000) | {'asked_again': {str(lag): [2, 1, 64, 32] for lag in LAGS}}
            for pool in POOLS for arm in ARMS for seed in SEEDS]  # fmt: skip
    [line] = [line for line in regimes.probe_table(rows).splitlines() if line.startswith('| raw |')]
    assert line.startswith('| raw | all | 50 of 24 (') and '50 of 768 (' in line
