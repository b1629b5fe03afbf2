"""What a run is told of its two sides: shares of its time by hand, and one sentence for each case that is clear."""

import pytest
from making import config, evaluation, make_run, row

from bapo_jax.report import results
from bapo_jax.report.records import read_run
from bapo_jax.report.waiting import Work, advice, speed, who_waits, work_of

IN_TURN = {'engine': 'vllm', 'overlap': False, 'sync_every': 5, 'mixture': {'share': 0.0, 'policies': 2}, 'refill_batches': 1}
OVERLAP = {**IN_TURN, 'overlap': True}
FEW = {**OVERLAP, 'concurrency': 20}  # of 40 groups, at one server


def measured(step, trainer, engine, seconds=2.0, **servers):
    return row(
        step,
        **{
            'timing_s/step': seconds, 'perf/idle/trainer': trainer, 'perf/idle/engine': engine, 'perf/throughput/update': 100.0 + step,
            'perf/throughput/gen': 300.0 - step, **{f'perf/servers/{name}': value for name, value in servers.items()},
        },
    )  # fmt: skip


def of(tmp_path, rows, rollout=OVERLAP):
    return read_run(make_run(tmp_path / 'run', rows, settings=config(rollout=rollout, learner={'batch_groups': 8})))


@pytest.mark.parametrize(
    'work, rollout, said',
    [
        (Work(0.4, 0.1), OVERLAP, 'The trainer is idle 40% of the time: give the servers another GPU.'),
        (Work(0.4, 0.1, 0.5, 0), OVERLAP, 'give the servers another GPU'),
        (Work(0.4, 0.1, 0.3, 2), OVERLAP, 'give the servers another GPU'),
        (Work(0.4, 0.1, 0.3, 0), FEW, 'the servers use at most 30% of their KV cache: raise rollout.concurrency'),
        (Work(0.4, 0.1, 0.3, 0), {**FEW, 'concurrency': 40}, 'give the servers another GPU'),  # all that is asked is under way
        (Work(0.4, 0.1, 0.3, 0), {**FEW, 'servers': ('a', 'b')}, 'give the servers another GPU'),
        (Work(0.1, 0.25), OVERLAP, 'The servers are idle 25% of the time: give the trainer more'),
        (Work(0.6, 0.2), IN_TURN, 'are idle 60% and 20% of the time: set rollout.overlap=True to train and sample at the same time'),
        (Work(0.6, 0.2), {**IN_TURN, 'sync_every': 1}, 'set rollout.sync_every above 1 and rollout.overlap=True to train'),
        (Work(0.6, 0.2), {**IN_TURN, 'engine': 'jax'}, 'rollout.overlap=True (in-process: on one device) to train'),
        (Work(0.4, 0.1, 1.0, 5, 0.1), OVERLAP, 'cache was full in 10% of the steps, so responses were preempted and recomputed: lower'),
        (Work(0.6, 0.3, 1.0, 5, 0.5), IN_TURN, 'lower rollout.concurrency, or give the servers more memory'),
    ],
)
def test_what_is_clear_is_said(work, rollout, said):
    assert said in advice(work, {'rollout': rollout, 'learner': {'batch_groups': 8}})


@pytest.mark.parametrize(
    'work, rollout',
    [
        (Work(0.24, 0.24, 0.1, 0, 0.09), OVERLAP),
        (Work(0.4, 0.4), OVERLAP),  # each waits at times: neither has too much
        (Work(0.4, 0.1), {**OVERLAP, 'engine': 'jax'}),
        (Work(0.8, 0.19), IN_TURN),
        (Work(0.5, 0.5), {**IN_TURN, 'mixture': {'share': 0.4, 'policies': 2}}),
        (Work(0.5, 0.5), {**IN_TURN, 'refill_batches': 4}),
    ],
)
def test_nothing_is_said_where_nothing_is_clear(work, rollout):
    assert advice(work, {'rollout': rollout, 'learner': {'batch_groups': 8}}) == ''


def test_shares_are_of_the_time_of_all_steps_but_the_first(tmp_path):
    """The first takes 100 s. Of the rest ten take 1 s, and ten 3 s."""
    rows = [measured(1, 0.0, 1.0, 100.0, cache_used=1.0, waiting=9, preemptions=1)]
    rows += [measured(s, 0.2, 0.1, 1.0, cache_used=0.5, waiting=1, preemptions=int(s < 4)) for s in range(2, 12)]
    rows += [measured(s, 0.4, 0.0, 3.0, cache_used=0.25) for s in range(12, 22)]
    work = work_of(of(tmp_path, rows))
    assert work == pytest.approx(Work((2 + 12) / 40, 1 / 40, 0.5, 1, 2 / 20))
    assert who_waits(tmp_path / 'run').startswith("The servers' KV cache was full in 10% of the steps")


def test_a_short_run_is_told_nothing(tmp_path):
    rows = [measured(s, 0.4, 0.1) for s in range(1, 22)]
    assert who_waits(make_run(tmp_path / 'long', rows, settings=config(rollout=OVERLAP))).endswith('give the servers another GPU.')
    assert who_waits(make_run(tmp_path / 'short', rows[:20], settings=config(rollout=OVERLAP))) == ''
    assert who_waits(make_run(tmp_path / 'old', [row(s) for s in range(1, 22)], settings=config(rollout=OVERLAP))) == ''


def test_the_figure_has_what_was_measured_and_the_advice(tmp_path):
    rows = [measured(s, 0.4, 0.1, cache_used=s / 100) for s in range(1, 22)]
    figure = speed(of(tmp_path, rows, {**OVERLAP, 'concurrency': 1}))
    lines = {x.label: x.y.tolist() for panel in figure.panels for x in panel.lines}
    assert lines == {
        'update': [100.0 + s for s in range(1, 22)], 'generation': [300.0 - s for s in range(1, 22)],
        'trainer': [0.4] * 21, 'engine': [0.1] * 21, 'cache': [s / 100 for s in range(1, 22)],
    }  # fmt: skip
    assert figure.table.rows == (
        ('update, tokens/s', '111', '121'), ('generation, tokens/s', '289', '299'), ('trainer idle, share of the step', '40.0%', '40.0%'),
        ('engine idle, share of the step', '10.0%', '10.0%'), ("servers' KV cache in use", '11.0%', '21.0%'),
    )  # fmt: skip
    assert len(figure.warnings) == 1 and 'The trainer is idle 40% of the time, and the servers use at most 21%' in figure.warnings[0]
    assert speed(of(tmp_path / 'old', [row(1)])).missing == ('perf/idle/trainer', 'perf/idle/engine')


def test_a_run_ends_with_the_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(results, 'draw_run', lambda directory: directory / 'run.png')
    rows = [measured(s, 0.4, 0.1) for s in range(1, 22)]
    scores = [evaluation(0, [1, 0], 0.25, 0.5), evaluation(21, [2, 1], 0.75, 1.0)]
    results.print_results(make_run(tmp_path / 'run', rows, scores, settings=config(rollout=OVERLAP)), 21)
    assert capsys.readouterr().out.splitlines()[-1] == 'The trainer is idle 40% of the time: give the servers another GPU.'
