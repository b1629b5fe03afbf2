"""The whole loop with a real vLLM process: overlap, waves, the probe. Servers that die: test_faults_servers.py."""

import signal
import subprocess
import sys

import jax
import pytest
from small_run import ROOT, metrics, rollouts, run, small_config

from bapo_jax.rollout.fidelity import PolicyMismatch
from bapo_jax.rollout.vllm.client import VllmEngine

pytestmark = pytest.mark.slow
STEPS = 6


def vllm_config(benchmark, *servers, **changes):
    """v = 3 and m = 2: re-evaluation falls between syncs, and with one."""
    small = {
        'rollout__engine': 'vllm', 'rollout__servers': tuple(s.url for s in servers), 'rollout__sync_every': 3,
        'rollout__deadline_s': 400.0, 'rollout__server__args': ('--enforce-eager',),
        'replay__use_x2': True, 'replay__reevaluate_every': 2,
    }  # fmt: skip
    return small_config('bapo_tuned', benchmark, **small | changes)


@pytest.fixture(scope='module')
def runs(tmp_path_factory, benchmark, server):
    """Directories of the same run without and with overlap."""
    paths = [tmp_path_factory.mktemp('runs') / name for name in ('in_turn', 'overlapping')]
    for path, overlap in zip(paths, (False, True), strict=True):
        run(vllm_config(benchmark, server, rollout__overlap=overlap), path)
    return paths


def fresh(workdir):
    """For every step, the fresh prompts in order, with the policies that answered and the number of responses."""
    return [
        [
            (r['prompt_id'], set(r['versions']), len(r['responses']))
            for r in rollouts(workdir, step)
            if r['use'] in ('x1', 'discarded')
        ]
        for step in range(1, STEPS + 1)
    ]


def test_overlap_changes_neither_order_nor_versions_nor_counts(runs):
    in_turn, overlapping = (fresh(workdir) for workdir in runs)
    assert in_turn == overlapping
    assert [members[0][1] for members in in_turn] == [{0}, {0}, {2}, {2}, {2}, {5}]
    assert all(len(step) == 8 and {n for _, _, n in step} == {4} for step in in_turn)


def test_hard_prompts_are_answered_by_theta_also_between_syncs(runs):
    for workdir in runs:
        again = {step: [r for r in rollouts(workdir, step) if r['use'] in ('x2', 'left_out')] for step in range(1, STEPS + 1)}
        assert all(set(r['versions']) == {step - 1} for step, rows in again.items() for r in rows)
        assert {step for step, rows in again.items() if rows} == {2, 4, 6}
        assert [row['bapo/reevaluated'] for row in metrics(workdir)[1:]] == [len(rows) for rows in again.values()]


def test_where_alpha_is_theta_hard_prompts_go_out_in_the_same_wave(runs):
    for workdir in runs:
        separately = [row['step'] for row in metrics(workdir, times=True) if 'timing_s/reevaluate' in row]
        assert separately == [2, 4]  # at step 6 the sync has just made α π_θ


def test_where_alpha_is_theta_a_step_says_how_far_the_server_is_from_the_trainer(runs):
    for workdir in runs:
        rows = metrics(workdir)[1:]
        told = [row for row in rows if 'mismatch/kl' in row]  # a first mini-batch may have no group of X1: a server's samples differ
        assert told and all(row['bapo/lag'] == 0 for row in told)
        silent = [row for row in rows if row['bapo/lag'] == 0 and row not in told]
        assert all(row['bapo/x1_groups'] <= row['bapo/batch_groups'] // 2 for row in silent)  # they fit into the second one
        assert not [row for row in rows if row.get('actor/skipped_updates')]
        for row in told:
            assert row['bapo/x1_groups'] > 0
            assert 0 < row['mismatch/logprob_abs_mean'] < row['mismatch/logprob_abs_max'] < 2e-4
            assert 0 <= row['mismatch/kl'] < 1e-6 and 1 - 1e-6 < row['mismatch/ess'] <= 1


def test_a_server_that_serves_other_weights_stops_the_run_at_the_sync(tmp_path, benchmark, server, monkeypatch):
    load = VllmEngine.load

    def load_others(self, params, version):
        load(self, jax.tree.map(lambda x: 1.01 * x, params) if version else params, version)

    monkeypatch.setattr(VllmEngine, 'load', load_others)
    with pytest.raises(PolicyMismatch, match='policy 2: .* rollout.probe_tolerance=0.001'):
        run(vllm_config(benchmark, server, replay__use_x2=False), tmp_path / 'run')


def ahead_config(benchmark, *servers):
    """A step is requested while the one before it is trained on, and the sync between them finds it under way."""
    ahead = {'rollout__sync_every': 1, 'rollout__overlap': True, 'rollout__most_behind': 1, 'replay__use_x2': False, 'evaluate__every': 0}
    return vllm_config(benchmark, *servers, **ahead)


def test_a_step_requested_before_a_sync_is_written_by_the_policies_from_its_request_to_its_step(tmp_path, benchmark, server):
    """The server completes a pending response with the policy that it is given, so that none is older than most_behind allows.

    The run is killed within a load, while the server is paused with those responses, and continued.
    """
    kill_while_loading('ahead_config', benchmark, server, tmp_path)
    run(ahead_config(benchmark, server), tmp_path)
    for step in range(1, STEPS + 1):
        rows = [row for row in rollouts(tmp_path, step) if row['use'] in ('x1', 'discarded')]
        assert [len(row['responses']) for row in rows] == [4] * 8
        wrote = [[version for _, version, _ in spans] for row in rows for spans in row['spans']]
        assert all(versions == sorted(versions) for versions in wrote)
        assert {version for versions in wrote for version in versions} <= {max(0, step - 2), step - 1}
    stale = [row['staleness/max'] for row in metrics(tmp_path)[1:]]
    assert max(stale) >= 1 and not [row for row in metrics(tmp_path) if row.get('actor/skipped_updates')]


def partial_config(benchmark, *servers):
    """Responses of up to 48 tokens, 20 of them a step, each step by another policy."""
    return vllm_config(
        benchmark, *servers, rollout__step_share=0.4, rollout__sync_every=1, replay__use_x2=False, replay__fresh_filter='none',
        evaluate__every=0,
    )  # fmt: skip


KILLED_WHILE_LOADING = """
import os, signal, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from types import SimpleNamespace
import test_train_vllm
from bapo_jax.rollout.vllm.loading import PolicyLoading
from small_run import run

told = PolicyLoading._told

async def struck(self, url, route, *others, **more):
    if route == '/reset_prefix_cache' and self.manifest.version == 3:  # the server is paused, and has the new weights
        os.kill(os.getpid(), signal.SIGKILL)
    return await told(self, url, route, *others, **more)

PolicyLoading._told = struck
config = test_train_vllm.{config}(Path({benchmark!r}), SimpleNamespace(url={url!r}))
run(config, Path({workdir!r}))
"""


def kill_while_loading(config, benchmark, server, workdir):
    """Runs the named config until policy 3 is loaded, after three steps."""
    script = KILLED_WHILE_LOADING.format(
        paths=[str(ROOT), str(ROOT / 'tests'), str(ROOT / 'tests' / 'helpers')], config=config, benchmark=str(benchmark),
        url=server.url, workdir=str(workdir),
    )  # fmt: skip
    killed = subprocess.run([sys.executable, '-c', script], stdout=subprocess.DEVNULL, timeout=500)
    assert killed.returncode == -signal.SIGKILL
    assert [row['step'] for row in metrics(workdir)] == [0, 1, 2, 3]


def test_a_run_killed_while_a_policy_is_loaded_continues_the_responses_that_were_unfinished(tmp_path, benchmark, server):
    """The ledger of the run checks that every prompt has one outcome. Of each response, a policy wrote at most 20 tokens, in order."""
    kill_while_loading('partial_config', benchmark, server, tmp_path)
    run(partial_config(benchmark, server), tmp_path)
    rows = metrics(tmp_path)
    assert [row['step'] for row in rows] == list(range(STEPS + 1))
    finished = [row for step in range(1, STEPS + 1) for row in rollouts(tmp_path, step) if row['use'] in ('x1', 'discarded')]
    waiting = rows[-1]['rollout/ready']
    assert 0 < len(finished) <= 8 * STEPS - waiting and all(len(row['responses']) == 4 for row in finished)
    wrote = [spans for row in finished for spans in row['spans']]
    for spans in wrote:
        versions = [version for _, version, _ in spans]
        assert versions == sorted(versions) and max(versions) < STEPS
        assert all(tokens <= 20 for _, _, tokens in spans) and sum(tokens for _, _, tokens in spans) <= 48
        assert all(tokens == 20 for _, _, tokens in spans[:-1])
    assert max(map(len, wrote)) > 1 and not [row for row in rows if row.get('actor/skipped_updates')]
