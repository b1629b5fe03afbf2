"""Runs of the rows with a critic on real prompts with the quickstart's policy: what they log, keep, continue from and export."""

import numpy as np
import pytest
from small_run import metrics, run, small_config

from bapo_jax.models import hf
from bapo_jax.policies import find_policy

pytestmark = pytest.mark.slow  # whole runs


@pytest.fixture(scope='module')
def ppo_run(tmp_path_factory, benchmark):
    workdir = tmp_path_factory.mktemp('runs') / 'ppo'
    run(small_config('ppo', benchmark, steps=3), workdir)
    return workdir


def test_a_run_stopped_and_started_again_repeats_every_metric_the_critics_too(tmp_path, ppo_run, benchmark):
    """The third step's values depend on the critic's parameters after the second, and those on its moments after the first."""
    run(small_config('ppo', benchmark, steps=1), tmp_path)
    run(small_config('ppo', benchmark, steps=3), tmp_path)
    rows, whole = metrics(tmp_path), metrics(ppo_run)
    for name in [n for n in rows[1] if n.startswith('val-core/')]:  # the shorter run evaluates after its last step
        del rows[1][name]
    assert rows == whole
    assert {'critic/value_loss', 'critic/grad_norm', 'critic/value_mean', 'critic/explained_variance'} <= whole[3].keys()
    assert whole[1]['critic/value_mean'] == 0 != whole[3]['critic/value_mean']


def test_evaluation_and_export_see_the_policy_alone(ppo_run):
    stored = find_policy(ppo_run)
    model = hf.read_config(stored.base)
    assert stored.step == 3
    assert [name for name, _ in stored.tensors(model, stored.base)] == [t.name for t in hf.layout(model)]


def test_ba_ppo_trains_on_the_adaptive_batch_after_a_warm_up(tmp_path, benchmark):
    """Re-evaluated and replayed groups are valued as the fresh ones are."""
    changes = {
        'critic__warmup_steps': 1, 'rollout__sync_every': 2, 'replay__reevaluate_every': 2,
        'replay__c2': (0.2,), 'replay__c3': (0.8,),
    }  # fmt: skip
    run(small_config('ba_ppo', benchmark, steps=3, **changes), tmp_path)
    rows = metrics(tmp_path)[1:]
    assert not [name for name in rows[0] if name.startswith('actor/')]
    assert all('actor/pg_loss' in row for row in rows[1:]) and sum(row['bapo/x3_groups'] for row in rows) > 0
    assert all(np.isfinite(row['critic/value_loss']) for row in rows)
