"""Several runs on one axis: seeds, bands and costs, against hand-made counts."""

import numpy as np
from making import config, evaluation, make_run, row

from bapo_jax.report.comparison import comparison
from bapo_jax.report.records import costs_of, read_run


def run(tmp_path, evals=(), steps=range(1, 9), name='run', **more):
    return read_run(make_run(tmp_path / name, [row(s) for s in steps], evals, **more))


def section(figures, name):
    return next(f for f in figures if f.name == name)


def three(tmp_path, **more):
    """Two seeds of one arm, whose second began at step 2, and one of another."""
    runs = [
        run(tmp_path, [evaluation(0, [1], 0, 0), evaluation(8, [1], x, x)], steps, f'r{seed}', settings=config(seed=seed))
        for seed, x, steps in ((1, 0.25, range(1, 9)), (2, 0.75, range(2, 9)))
    ]
    return [*runs, run(tmp_path, [evaluation(8, [1], 0.5, 0.5)], name='other', settings=config(method='grpo'), **more)]


def test_seeds_of_one_config_are_one_curve_with_a_band(tmp_path):
    figure = section(comparison(three(tmp_path)), 'comparison')
    mean, passed, reward, norm, _, _ = figure.panels
    assert norm.title == 'Gradient norm, before clipping' and len(norm.lines) == 2
    assert [x.label for x in reward.lines] == ['bapo', 'grpo']
    assert reward.lines[0].x.tolist() == list(range(2, 9))  # the steps that both have
    np.testing.assert_allclose(reward.lines[0].y, [0.1 + s / 100 for s in range(2, 9)], rtol=1e-12)
    band = mean.lines[0]
    assert (band.y.tolist(), band.low.tolist(), band.high.tolist()) == ([0, 0.5], [0, 0.25], [0, 0.75])
    assert mean.lines[1].low is None and passed.title == 'cd4, pass@2'


def test_curves_are_drawn_over_whatever_all_runs_record_the_cost_of(tmp_path):
    views = dict(section(comparison(three(tmp_path)), 'comparison').views)
    assert list(views) == ['training steps', 'responses generated', 'minutes of training']
    score, reward = views['responses generated'][0].lines[0], views['minutes of training'][2].lines[0]
    assert score.x.tolist() == [0, 8 * 16]  # before training, and at the counter of step 8
    np.testing.assert_allclose(reward.x, [((s + s - 1) / 2) * 2 / 60 for s in range(2, 9)])  # 2 s each; one run has a step less
    rows = [row(s, **{'actor/updates': 2}) for s in range(1, 9)]
    assert list(costs_of(read_run(make_run(tmp_path / 'updates', rows))))[2] == 'optimizer updates'


def minutes(tmp_path, starts, times):
    """The minutes after each step. A start is (its time, that of its end or None), in minutes since 1970; a step has 2 s of timings."""
    recorded = [{'time': 60 * begun} | ({} if ended is None else {'end': {'time': 60 * ended}}) for begun, ended in starts]
    rows = [row(s, time=time if isinstance(time, str) else 60 * time) for s, time in enumerate(times, 1)]
    return costs_of(read_run(make_run(tmp_path, rows, settings=config(starts=recorded))))['minutes of training'].tolist()


def test_minutes_are_those_that_the_starts_had_run(tmp_path):
    """The time between starts does not count; setup, and what a stopped start did after its last row, does."""
    assert minutes(tmp_path / 'a', [(10, None)], [13, 15, 16]) == [3, 5, 6]
    assert minutes(tmp_path / 'b', [(10, 17), (100, None)], [13, 15, 102, 103]) == [3, 5, 9, 10]  # stopped
    assert minutes(tmp_path / 'c', [(10, None), (100, 103)], [13, 15, 102, 103]) == [3, 5, 7, 8]  # crashed: until its last row
    assert minutes(tmp_path / 'd', [(10, 12), (20, None), (30, None)], [33, 35]) == [5, 7]  # two starts without a step


def test_the_timings_of_a_step_count_where_no_start_tells_of_it(tmp_path):
    two = 2 / 60
    old = minutes(tmp_path / 'a', [(100, None)], [13, 15, 102, 103])  # an earlier version began it
    np.testing.assert_allclose(old, [two, 2 * two, 3 * two, 3 * two + 1])
    np.testing.assert_allclose(minutes(tmp_path / 'b', [(0, None)], [3, 'no time', '1970-01-01T00:05:00+00:00']), [3, 3 + two, 3 + 2 * two])
    for name, starts in (('c', []), ('d', [(10, None), (float('nan'), None)])):
        np.testing.assert_allclose(minutes(tmp_path / name, starts, [13, 15]), [two, 2 * two])
    damaged = config(starts=[{'time': 'never'}, 3])
    assert costs_of(read_run(make_run(tmp_path / 'e', [row(1, time=9)], settings=damaged)))['minutes of training'].tolist() == [two]


def test_the_comparison_begins_with_the_scores_and_a_sentence_on_each_difference(tmp_path):
    scores, differences, *_ = comparison(three(tmp_path))
    assert [r[:2] for r in scores.table.rows] == [('bapo', '2'), ('grpo', '1')]
    assert len(differences.table.rows) == 2 and differences.title == 'Differences from bapo'
    assert differences.said == ('With one seed, no interval can be computed; train more seeds.',)


def test_a_table_says_what_each_method_cost_and_reached_at_its_best_and_at_its_end(tmp_path):
    def three(tracked, best, end):
        return [evaluation(0, [0, 0, 0, 0, 1], 0.1, 0.2), evaluation(4, [0] * 5, best, best), evaluation(8, tracked, end, end)]

    runs = [
        run(tmp_path, three([0, 1, 2, 2, 2], 0.6, 0.5), name='a', settings=config(seed=1)),
        run(tmp_path, three([0, 0, 0, 0, 2], 0.2, 0.4), name='b', settings=config(seed=2)),
        run(tmp_path, name='c', settings=config(method='grpo')),
    ]
    table = section(comparison(runs), 'costs').table
    assert table.head == ('', 'step', 'rollouts', 'cd4 mean@2', 'cd4 pass@2', 'solved of those unsolved at first')
    assert table.rows == (
        ('bapo, best', '6', '96', '50.0%', '50.0%', '–'),  # of .6 at step 4 and .4 at step 8; 16 rollouts a step
        ('bapo, end', '8', '128', '45.0%', '45.0%', '37.5%'),  # of 3 of 4 prompts, and of none
        ('grpo, best', '–', '–', '–', '–', '–'),
        ('grpo, end', '8', '128', '–', '–', '–'),
    )
