"""Promises of the whole loop, on real prompts with the real quickstart policy: the GRPO identity, exact resumption, the schedule,
the batch's rules, and what is refused."""

import errno
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections import Counter

import jax
import numpy as np
import pytest
from group_builders import version_of
from launched import copy_runs
from small_run import ROOT, kill_after, metrics, rollouts, run, small_config

from bapo_jax.learner.learner import Learner
from bapo_jax.report import inspect_log, results
from bapo_jax.report.results import print_results, tell_end
from bapo_jax.rollout import start
from bapo_jax.run.state import RunState
from bapo_jax.show.lines import outcome_of
from bapo_jax.show.story import read_story
from bapo_jax.train import build


@pytest.fixture(scope='module')
def bapo_run(tmp_path_factory, benchmark):
    """(directory, batches, JAX's words on what it compiled) of BAPO with v = 3, m = 2: re-evaluation falls between syncs."""
    workdir, batches, update = tmp_path_factory.mktemp('runs') / 'bapo', [], Learner.update
    words, logger = io.StringIO(), logging.getLogger('jax')
    handler = logging.StreamHandler(words)

    def watched(self, state, batch, *rest):
        batches.append(batch)
        if len(batches) == 6:  # its last checkpoint is of step 4, its last row of step 5
            assert copy_runs(workdir, workdir.with_name('copies')).returncode == 0
        return update(self, state, batch, *rest)

    Learner.update = watched
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            run(bapo_config(benchmark), workdir)
    finally:
        Learner.update = update
        logger.removeHandler(handler)
    return workdir, batches, words.getvalue()


def bapo_config(benchmark, **changes):
    """The learning rate rises and falls and a moment is rounded, so that continuing has to find its place in both."""
    parts = {
        'rollout__sync_every': 3, 'replay__use_x2': True, 'replay__reevaluate_every': 2, 'replay__c2': (0.2,), 'replay__c3': (0.8,),
        'learner__schedule__kind': 'cosine', 'learner__schedule__warmup_updates': 2, 'learner__schedule__decay_updates': 8,
        'learner__adam__first_moment_dtype': 'bfloat16',
    }  # fmt: skip
    return small_config('bapo_tuned', benchmark, **parts | changes)


@pytest.mark.slow
def test_a_run_compiles_one_optimizer_step(bapo_run):
    """Whatever the number of groups in its batches."""
    _, batches, words = bapo_run
    assert len({len(batch.groups) for batch in batches if batch.groups}) > 1
    assert len(re.findall(r'^Compiling (?:jit\()?update\b', words, re.MULTILINE)) == 1


@pytest.mark.slow
def test_bapo_with_its_parts_off_is_grpo_bit_for_bit(tmp_path, benchmark):
    run(small_config('grpo', benchmark, steps=3), tmp_path / 'grpo')
    off = {
        'rollout__sync_every': 1, 'replay__fresh_filter': 'none', 'replay__use_x2': False, 'replay__use_x3': False,
        'learner__anchor': 'proximal', 'learner__kl_target': 'reference',
    }  # fmt: skip
    run(small_config('bapo', benchmark, steps=3, **off), tmp_path / 'bapo')
    grpo = metrics(tmp_path / 'grpo')
    assert grpo == metrics(tmp_path / 'bapo')
    assert max(row.get('actor/grad_norm', 0) for row in grpo) > 0  # and it did train


@pytest.fixture(scope='module')
def one_device_runs(tmp_path_factory, benchmark):
    """Directories of the same run without and with overlap."""
    paths = [tmp_path_factory.mktemp('runs') / name for name in ('in_turn', 'overlapping')]
    for path, overlap in zip(paths, (False, True), strict=True):
        run(bapo_config(benchmark, mesh__data=1, rollout__overlap=overlap), path)
    return paths


@pytest.mark.slow
def test_overlap_changes_no_metric(one_device_runs):
    in_turn, overlapping = (metrics(path) for path in one_device_runs)
    assert in_turn == overlapping
    assert [row['step'] for row in in_turn] == list(range(7))


@pytest.mark.slow
def test_each_step_says_how_fast_its_sides_were_and_who_waited(one_device_runs):
    in_turn, overlapping = (metrics(path, times=True)[1:] for path in one_device_runs)
    for row in in_turn + overlapping:
        assert row['perf/throughput/update'] > 0 and 'perf/mfu/actor' not in row  # on a CPU
        assert 0 < row['perf/idle/trainer'] <= row['timing_s/wait_rollouts'] / row['timing_s/step'] + 0.05
        assert 0 <= row['perf/idle/engine'] <= 1 - row['perf/idle/trainer'] + 1e-9
    assert min(row['perf/throughput/gen'] for row in in_turn) > 0
    rates = [row['perf/throughput/gen'] for row in overlapping if 'perf/throughput/gen' in row]  # a step's groups may end before it
    assert rates and min(rates) > 0
    # Nothing is sampled while the trainer works, but where they overlap.
    one_at_work = [[row['perf/idle/trainer'] + row['perf/idle/engine'] for row in rows] for rows in (in_turn, overlapping)]
    assert min(one_at_work[1]) < min(one_at_work[0])


@pytest.mark.slow
@pytest.mark.parametrize('stop_after', [3, 4])
def test_a_run_stopped_with_later_steps_under_way_repeats_every_metric(
    tmp_path, one_device_runs, benchmark, monkeypatch, stop_after
):
    update, updates = Learner.update, []

    def interrupted(self, *args):
        updates.append(1)
        if len(updates) == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, *args)

    config = bapo_config(benchmark, mesh__data=1, rollout__overlap=True)
    monkeypatch.setattr(Learner, 'update', interrupted)
    assert run(config, tmp_path).step == stop_after
    run(config, tmp_path)
    assert metrics(tmp_path) == metrics(one_device_runs[0])


@pytest.mark.slow
@pytest.mark.parametrize('stop_after', [1, 2, 3, 5])
def test_a_run_stopped_at_any_step_and_started_again_repeats_every_metric(tmp_path, bapo_run, benchmark, stop_after):
    workdir, _, _ = bapo_run
    run(bapo_config(benchmark, steps=stop_after), tmp_path)
    run(bapo_config(benchmark), tmp_path)
    rows, whole = metrics(tmp_path), metrics(workdir)
    for row in rows[1:-1]:  # the last step of the shorter run evaluates, which the longer one does not do there
        for name in [n for n in row if n.startswith('val-core/')]:
            del row[name]
    assert rows == whole
    assert [row['step'] for row in rows] == list(range(7))


@pytest.mark.slow
def test_a_killed_run_loses_only_what_no_checkpoint_holds(tmp_path, bapo_run, benchmark):
    workdir, _, _ = bapo_run

    def look():
        assert outcome_of(read_story(tmp_path / 'run')).startswith('running, after step ')

    kill_after(4, bapo_config, benchmark, tmp_path / 'run', look)  # steps 0..3: past the checkpoint of step 2
    assert re.fullmatch(r'crashed after step \d of 6, or copied while it ran; the same command continues after step \d', outcome_of(read_story(tmp_path / 'run')))
    run(bapo_config(benchmark), tmp_path / 'run')
    assert metrics(tmp_path / 'run') == metrics(workdir)
    told = read_story(tmp_path / 'run')
    assert outcome_of(told) == 'finished, 6 steps' and told.events == {'continued after a crash': 1}


@pytest.mark.slow
def test_a_copy_made_in_the_middle_of_a_step_continues(tmp_path, bapo_run, benchmark):
    workdir, _, _ = bapo_run
    assert copy_runs(tmp_path / 'run', workdir.with_name('copies')).returncode == 0
    assert [path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir()] == ['4']
    assert metrics(tmp_path / 'run') == metrics(workdir)[:6]
    run(bapo_config(benchmark), tmp_path / 'run')
    assert metrics(tmp_path / 'run') == metrics(workdir)


@pytest.mark.slow
def test_sigterm_stops_after_the_step_with_a_checkpoint(tmp_path, benchmark, monkeypatch):
    update = Learner.update

    def interrupted(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)
        return update(self, *args)

    monkeypatch.setattr(Learner, 'update', interrupted)
    assert run(bapo_config(benchmark), tmp_path).step == 1
    assert (tmp_path / 'checkpoints' / '1').is_dir()
    assert outcome_of(read_story(tmp_path)) == 'stopped after step 1 of 6; the same command continues'


@pytest.mark.slow
def test_prompts_that_failed_are_asked_again_and_change_nothing_else(tmp_path, bapo_run, benchmark):
    workdir, _, _ = bapo_run
    run(bapo_config(benchmark, log__failed_again__prompts=8, log__failed_again__every=2), tmp_path / 'probed')
    rows, asked = metrics(tmp_path / 'probed'), []
    for row, without in zip(rows, metrics(workdir), strict=True):
        added = {name: value for name, value in row.items() if name.startswith('failed_again/')}
        assert {name: value for name, value in row.items() if name not in added} == without
        asked.append(sum(value for name, value in added.items() if '/asked/' in name))
        assert bool(added) == (row['step'] > 0 and row['step'] % 2 == 0)
        assert all(row[name.replace('asked', 'mixed')] <= row[name] for name in added if '/asked/' in name)
    failures = {row['step']: row['accuracy_bins'][0] for row in rows if row['step']}
    assert asked == [0, 0, min(2, failures[1]), 0, min(2, failures[3]), 0, min(2, failures[5]) + min(2, failures[1])]
    assert sum(asked) >= 4


@pytest.mark.slow
def test_alpha_moves_only_at_syncs_and_hard_prompts_are_answered_by_theta(bapo_run):
    workdir, _, _ = bapo_run
    alpha = {1: 0, 2: 0, 3: 2, 4: 2, 5: 2, 6: 5}
    reevaluated = 0
    for step, version in alpha.items():
        for row in rollouts(workdir, step):
            if row['use'] == 'x3':
                assert set(row['versions']) == {alpha[row['step']]}
                continue
            fresh = row['use'] in ('x1', 'discarded')
            assert set(row['versions']) == {version if fresh else step - 1}
            reevaluated += not fresh
    assert reevaluated > 0
    assert [row['bapo/lag'] for row in metrics(workdir)[1:]] == [t - 1 - a for t, a in alpha.items()]


@pytest.mark.slow
def test_what_a_run_keeps_can_be_exported(bapo_run):
    """As logs for Inspect: every response of every step, and each evaluation."""
    workdir, _, _ = bapo_run
    logs = list(inspect_log.logs(workdir))
    sampled = [len(log['samples']) for log in logs if log['eval']['task'] == 'countdown-rollouts']
    assert sampled == [sum(len(row['responses']) for row in rollouts(workdir, step)) for step in range(1, 7)]
    assert [log['eval']['metadata']['step'] for log in logs if not log['samples']] == [0, 6]


@pytest.mark.slow
def test_every_drawn_prompt_has_exactly_one_fresh_outcome(bapo_run):
    workdir, _, _ = bapo_run
    drawn = []
    for row in metrics(workdir)[1:]:
        assert row['bapo/x1_groups'] + row['bapo/discarded/filtered'] + row['bapo/discarded/infra_error'] == 8
        fresh = [r['prompt_id'] for r in rollouts(workdir, row['step']) if r['use'] in ('x1', 'discarded')]
        assert len(fresh) == len(set(fresh)) == 8
        drawn += fresh
    assert len(set(drawn)) == 48  # one epoch of 60 prompts: none twice


@pytest.mark.slow
def test_the_batch_keeps_its_rules_through_the_real_trainer(bapo_run):
    workdir, batches, _ = bapo_run
    stored: dict[tuple[int, int], list] = {}  # what entered the buffer as a candidate for replay
    for step, batch in enumerate(batches, start=1):
        ids = [g.prompt.id for g in batch.groups]
        assert len(ids) == len(set(ids)) <= 8
        assert all(g.size == 4 for g in batch.groups)
        for group, origin in zip(batch.groups, batch.origins, strict=True):
            if origin == 'x1':
                assert group.step == step and 0 < group.correct < 4
            if origin == 'x2':
                assert group.step == step and 1 / 8 < group.accuracy < 1
                assert {version_of(r) for r in group.responses} == {step - 1}
            if origin == 'x3':
                assert step - 3 <= group.step <= step - 1 and 0.2 <= group.accuracy <= 0.8
                assert stored[group.prompt.id, group.step] == [r.tokens.tolist() for r in group.responses]
        stored |= {
            (g.prompt.id, step): [r.tokens.tolist() for r in g.responses]
            for g, origin in zip(batch.groups, batch.origins, strict=True) if origin == 'x1'
        }  # fmt: skip
    assert {o for b in batches for o in b.origins} >= {'x1', 'x3'}
    for row, batch in zip(metrics(workdir)[1:], batches, strict=True):
        assert [row[f'bapo/{o}_groups'] for o in ('x1', 'x2', 'x3')] == [batch.count(o) for o in ('x1', 'x2', 'x3')]


@pytest.mark.slow
def test_rollout_files_hold_what_was_asked_answered_and_judged(bapo_run):
    workdir, _, _ = bapo_run
    for row in rollouts(workdir, 1):
        truth = row['ground_truth']
        assert row['prompt'] == ' '.join(map(str, truth['numbers'])) + f'={truth["target"]}\n'
        assert len(row['responses']) == len(row['verdicts']) == len(row['rewards']) == 4
        assert [r == 1 for r in row['rewards']] == [v == 'correct' for v in row['verdicts']]
        for text, answer in zip(row['responses'], row['answers'], strict=True):
            assert answer is None or answer in text
        assert [''.join(p) for p in row['pieces']] == row['responses']


@pytest.mark.slow
def test_rollout_files_hold_what_was_trained_on_and_how_often(bapo_run):
    workdir, batches, _ = bapo_run
    times, moved = Counter(), []
    for step, batch in enumerate(batches, start=1):
        rows = {(row['use'], row['prompt_id']): row for row in rollouts(workdir, step)}
        times.update((g.prompt.id, g.step) for g in batch.groups)
        for origin, group in zip(batch.origins, batch.groups, strict=True):
            row = rows.pop((origin, group.prompt.id))
            assert (row['step'], row['trained']) == (group.step, times[group.prompt.id, group.step])
            for of_row, r in zip(row['logp'], group.responses, strict=True):
                assert np.abs(np.array(of_row) - r.logp).max() <= 0.0005001
            if all(version_of(r) == step - 1 for r in group.responses):
                assert row['ratio'] is None  # π_θ sampled it
            else:
                assert [len(ratios) for ratios in row['ratio']] == [len(r.tokens) for r in group.responses]
                moved.append(np.abs(np.log(np.concatenate(row['ratio']))).mean())
        assert {use for use, _ in rows} <= {'discarded', 'left_out'}
        assert all((row['trained'], row['ratio']) == (0, None) for row in rows.values())
    assert max(times.values()) > 1
    assert 0 < max(moved) < 0.5


@pytest.mark.slow
def test_the_learning_rate_follows_the_optimizer_steps_of_the_run(bapo_run):
    done = 0
    for row in metrics(bapo_run[0])[1:]:
        done += row.get('actor/updates', 0)
        u = min(max(done - 1 - 2, 0), 8)  # optimizer steps between the end of warm-up and the last one
        share = max(done - 1, 0) / 2 if done < 3 else 0.1 + 0.9 * (1 + np.cos(np.pi * u / 8)) / 2
        assert row['actor/lr'] == pytest.approx(5e-5 * share, rel=1e-5)
    assert done > 2 + 4  # well into the decay


@pytest.mark.slow
def test_tracked_prompts_are_the_same_ones_at_every_evaluation(bapo_run):
    workdir, _, _ = bapo_run
    first, last = (json.loads((workdir / 'evals' / f'{step:06d}.json').read_text())['tracked'] for step in (0, 6))
    assert first['prompt_ids'] == last['prompt_ids'] and len(first['prompt_ids']) == 4
    assert len(first['correct']) == len(last['correct']) == 4


@pytest.mark.slow
def test_the_run_ends_with_a_figure(bapo_run):
    print_results(bapo_run[0], 6)
    assert (bapo_run[0] / 'run.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'


@pytest.mark.slow
def test_a_run_directory_of_another_config_is_refused_with_the_fields_named(bapo_run, benchmark):
    workdir, _, _ = bapo_run
    with pytest.raises(ValueError, match=r'differ in learner\.clip_low, replay\.c1\. Give another --workdir'):
        build(bapo_config(benchmark, learner__clip_low=0.1, replay__c1=0.25), workdir)
    with pytest.raises(ValueError, match=r'differ in fingerprints\.answers, fingerprints\.dataset, task\.seed'):
        build(bapo_config(benchmark, task__seed=5), workdir)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'mesh__data': 3, 'mesh__fsdp': 1}, r'mesh\.data=3'),
        ({'model__attention': 'splash'}, r'model\.attention.*only runs on TPU, and the devices are CPU'),
    ],
)
def test_bad_input_is_refused_before_work_starts(tmp_path, benchmark, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        build(small_config('bapo_tuned', benchmark, **changes), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_servers_that_would_find_no_gpu_are_refused_before_the_directory_is_claimed(tmp_path, benchmark, monkeypatch):
    def taken(*_):
        raise ValueError('rollout.gpus names no GPU')

    monkeypatch.setattr(start, 'check_python', lambda *_: None)
    monkeypatch.setattr(start, 'check_gpus', taken)
    with pytest.raises(ValueError, match='names no GPU'):
        build(small_config('bapo_tuned', benchmark, rollout__engine='vllm'), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('changes, message', [
    ({'rollout__gpus': ('0,1,2',)}, '4 attention heads cannot be split over 3 GPUs'),
    ({'rollout__server__args': ('--hf-overrides', 'x=1')}, 'give a JSON object'),
])  # fmt: skip
def test_servers_that_would_not_start_are_refused_before_the_directory_is_claimed(tmp_path, benchmark, monkeypatch, changes, message):
    monkeypatch.setattr(start, 'check_python', lambda *_: None)
    with pytest.raises(ValueError, match=message):
        build(small_config('bapo_tuned', benchmark, rollout__engine='vllm', **changes), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(('step', 'unwritten', 'ended', 'told'), [
    (1, {}, False, 'stopped after step 1 of 2; the same command continues\n'),
    (2, {'loss': 1.0}, False, 'stopped in the evaluation after step 2 of 2; the same command continues\n'),
    (4, {}, True, 'run is at step 4 and has finished its 2 steps; set --config.steps to a larger number to continue\n'),
])  # fmt: skip
def test_a_run_that_has_had_its_steps_is_not_told_to_go_on(tmp_path, capsys, step, unwritten, ended, told):
    state = RunState(None, None, step=step, unwritten=unwritten)
    tell_end(tmp_path / 'run', state, 2)
    assert capsys.readouterr().out.endswith(told) and state.has_ended(2) == ended


def test_a_figure_that_cannot_be_written_does_not_fail_a_finished_run(tmp_path, monkeypatch, capsys):
    def full(_):
        raise OSError(errno.ENOSPC, 'No space left on device')

    (tmp_path / 'metrics.jsonl').write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    monkeypatch.setattr(results, 'draw_run', full)
    tell_end(tmp_path, RunState(None, None, step=2), 2)
    assert 'figure: not drawn ([Errno 28] No space left on device); make room, then run the same command' in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_line_says_what_is_wrong_in_one_message(tmp_path):
    command = [sys.executable, '-m', 'bapo_jax.train', '--config=configs/quickstart.py', f'--workdir={tmp_path}/run']
    bad = subprocess.run([*command, '--config.rollout.group_size=1'], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert bad.returncode == 1 and 'rollout.group_size=1' in bad.stderr and 'Traceback' not in bad.stderr
    unknown = subprocess.run([*command, '--config.replay.c4=1'], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert unknown.returncode != 0 and 'c4' in unknown.stderr
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_losses_and_rewards_are_finite_everywhere(bapo_run):
    for row in metrics(bapo_run[0]):
        assert all(np.isfinite(v) for v in row.values() if isinstance(v, float))
