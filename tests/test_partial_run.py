"""Runs with partial rollouts (rollout.step_share): responses are continued by later policies, with the real quickstart policy."""

import os
import signal

import pytest
from small_run import kill_after, metrics, rollouts, run, small_config

from bapo_jax.learner.learner import Learner

pytestmark = pytest.mark.slow
STEPS = 6
KINDS = {
    'in_turn': {'rollout__sync_every': 1},
    'behind': {'rollout__sync_every': 1, 'rollout__overlap': True, 'rollout__most_behind': 1, 'mesh__data': 1},
    'ahead': {'rollout__sync_every': 3, 'rollout__overlap': True, 'mesh__data': 1},
}


def partial_config(benchmark, kind='in_turn', **changes):
    parts = {'rollout__step_share': 0.4, 'replay__fresh_filter': 'none', 'evaluate__every': 0, 'steps': STEPS, 'log__rollouts_every': 1}
    return small_config('bapo_tuned', benchmark, **parts | KINDS[kind] | changes)


@pytest.fixture(scope='module', params=KINDS)
def whole(request, tmp_path_factory, benchmark):
    workdir = tmp_path_factory.mktemp('runs') / request.param
    run(partial_config(benchmark, request.param), workdir)
    return request.param, workdir


def test_responses_have_tokens_of_several_policies_and_none_is_lost(whole, benchmark):
    kind, workdir = whole
    config, rows = partial_config(benchmark, kind), metrics(workdir)[1:]
    B, G = config.learner.batch_groups, config.rollout.group_size
    trained = 0
    for step, row in enumerate(rows, 1):
        fresh = [r for r in rollouts(workdir, step) if r['use'] in ('x1', 'discarded')]
        trained += len(fresh)
        assert len(fresh) == row['bapo/x1_groups'] <= B
        assert all(finish != 'unfinished' for r in fresh for finish in r['finish'])
        in_flight = step * B - trained - row['rollout/ready']  # groups with a response that is not finished
        begun_ahead = 0 if kind == 'in_turn' else None
        assert begun_ahead is None or in_flight * G >= row['rollout/unfinished'] >= in_flight >= 0
    versions = [{*r['versions']} for step in range(1, STEPS + 1) for r in rollouts(workdir, step)]
    assert max(row['rollout/unfinished'] for row in rows) > 0 and max(map(len, versions)) > 1
    assert max(row['staleness/max'] for row in rows) >= 1


def test_a_stopped_run_continues_its_responses(whole, tmp_path, benchmark, monkeypatch):
    kind, workdir = whole
    update, updates = Learner.update, []

    def interrupted(self, *args):
        updates.append(1)
        if len(updates) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, *args)

    monkeypatch.setattr(Learner, 'update', interrupted)
    assert run(partial_config(benchmark, kind), tmp_path).step == 3
    run(partial_config(benchmark, kind), tmp_path)
    assert metrics(tmp_path) == metrics(workdir)


@pytest.mark.parametrize('whole', ['in_turn'], indirect=True)
def test_a_killed_run_repeats_every_metric(tmp_path, whole, benchmark):
    """It is killed past the checkpoint of step 2, which holds unfinished responses."""
    kill_after(4, partial_config, benchmark, tmp_path / 'run')
    run(partial_config(benchmark), tmp_path / 'run')
    assert metrics(tmp_path / 'run') == metrics(whole[1])
