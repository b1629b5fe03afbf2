"""Runs whose steps are requested before the sync that precedes them (rollout.most_behind), with the real quickstart policy."""

import os
import signal

import pytest
from small_run import kill_after, metrics, rollouts, run, small_config

from bapo_jax.learner.learner import Learner

pytestmark = pytest.mark.slow
BEHIND = 2


def stale_config(benchmark, **changes):
    """BAPO's replay, a sync at every step, and evaluations and re-evaluations only where nothing is under way."""
    parts = {'rollout__sync_every': 1, 'rollout__overlap': True, 'rollout__most_behind': BEHIND, 'mesh__data': 1, 'evaluate__every': 0}
    return small_config('bapo_tuned', benchmark, **parts | changes)


@pytest.fixture(scope='module')
def whole(tmp_path_factory, benchmark):
    workdir = tmp_path_factory.mktemp('runs') / 'stale'
    run(stale_config(benchmark), workdir)
    return workdir


def test_a_step_is_trained_on_groups_of_the_policy_that_was_rolled_out_when_it_was_requested(whole):
    """The first three are requested of the base. From then on, every step is as far behind as it may be."""
    for step, behind in enumerate((0, 1, 2, 2, 2, 2), 1):
        fresh = [row for row in rollouts(whole, step) if row['use'] in ('x1', 'discarded')]
        assert {version for row in fresh for version in row['versions']} == {step - 1 - behind}
        assert metrics(whole)[step]['staleness/max'] >= behind and metrics(whole)[step]['bapo/lag'] == 0


@pytest.mark.parametrize('stop_after', [1, 4])
def test_a_stopped_run_goes_on_with_the_steps_that_were_under_way(tmp_path, whole, benchmark, monkeypatch, stop_after):
    update, updates = Learner.update, []

    def interrupted(self, *args):
        updates.append(1)
        if len(updates) == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, *args)

    monkeypatch.setattr(Learner, 'update', interrupted)
    assert run(stale_config(benchmark), tmp_path).step == stop_after
    run(stale_config(benchmark), tmp_path)
    assert metrics(tmp_path) == metrics(whole)


def test_a_killed_run_repeats_every_metric(tmp_path, whole, benchmark):
    kill_after(4, stale_config, benchmark, tmp_path / 'run')  # steps 0..3: past the checkpoint of step 2
    run(stale_config(benchmark), tmp_path / 'run')
    assert metrics(tmp_path / 'run') == metrics(whole)
