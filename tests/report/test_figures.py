"""Each figure's numbers equal a direct computation from the rows; warnings appear where the run shows them, and only there."""

import numpy as np
import pytest
from making import config, make_run, row

from bapo_jax.report import figures, panels
from bapo_jax.report.records import read_run

STEPS = [*range(1, 8), *range(11, 41)]  # with a gap
LINES = {
    figures.reward: {'each step': 'critic/score/mean'},
    figures.rollouts: {
        'generated': 'rollout/responses_total', 'discarded': 'rollout/discarded_total',
        're-evaluation': 'rollout/reevaluated_total', 'replayed': 'rollout/reused_total',
    },
    figures.gradient: {'gradient norm': 'actor/grad_norm', 'score': 'critic/score/mean'},
    figures.dynamics: {
        'Reward': 'critic/score/mean', 'Entropy': 'actor/entropy', 'Response length': 'response_length/mean',
        'Responses cut at the limit': 'response_length/clip_ratio',
    },
    figures.thresholds: {'lower bound (c2)': 'bapo/c2', 'upper bound (c3)': 'bapo/c3', 'average accuracy (r_tot)': 'bapo/r_tot'},
    figures.composition: {'fresh (X1)': 'bapo/x1_groups', 're-evaluated (X2)': 'bapo/x2_groups', 'replayed (X3)': 'bapo/x3_groups'},
    figures.seconds: {'whole step': 'timing_s/step'},
    figures.staleness: {'mean': 'staleness/mean', 'largest': 'staleness/max'},
}  # fmt: skip
ALL = (*LINES, figures.bins)


def of(tmp_path, rows, **more):
    return read_run(make_run(tmp_path / 'run', rows, **more))


def drawn(figure):
    return {x.label: x for panel in figure.panels for x in panel.lines}


@pytest.mark.parametrize('figure', LINES)
@pytest.mark.parametrize('steps', [STEPS, [1]])
def test_lines_are_the_rows(tmp_path, figure, steps):
    rows = [row(step) for step in steps]
    lines = drawn(figure(of(tmp_path, rows)))
    for label, metric in LINES[figure].items():
        assert lines[label].x.tolist() == steps
        assert lines[label].y.tolist() == [r[metric] for r in rows]


def test_a_metric_of_some_steps_is_drawn_at_those(tmp_path):
    rows = [row(s, **({'staleness/ess/x2': 0.9 + s / 1000} if s % 5 == 0 else {})) for s in STEPS]
    lines = [p for p in figures.staleness(of(tmp_path, rows)).panels if p.title == 'Effective sample size'][0].lines
    x2 = {x.label: x for x in lines}['re-evaluated (X2)']
    assert x2.x.tolist() == [s for s in STEPS if s % 5 == 0]
    assert x2.y.tolist() == [0.9 + s / 1000 for s in STEPS if s % 5 == 0]


def test_the_reward_is_smoothed_over_a_twentieth(tmp_path):
    rows = [row(s, **{'critic/score/mean': float('nan') if s == 3 else s**0.5}) for s in range(1, 61)]
    mean = drawn(figures.reward(of(tmp_path, rows)))['mean of 3 steps']
    by_hand = [np.nanmean([r['critic/score/mean'] for r in rows[i - 2 : i + 1]]) for i in range(2, 60)]
    np.testing.assert_allclose(mean.y, by_hand, rtol=1e-12)
    assert mean.x.tolist() == list(range(3, 61))


def test_bins_are_shares_of_the_first_and_last_tenth(tmp_path):
    rows = [row(s, accuracy_bins=[s, 1, 40 - s]) for s in range(1, 31)]
    first, last = figures.bins(of(tmp_path, rows)).panels[0].lines
    for x, some in ((first, rows[:3]), (last, rows[-3:])):
        by_hand = np.mean([np.array(r['accuracy_bins']) / sum(r['accuracy_bins']) for r in some], axis=0)
        np.testing.assert_allclose(x.y, by_hand, rtol=1e-12)


def test_bins_leave_out_a_step_without_a_judged_group(tmp_path):
    rows = [row(1, accuracy_bins=[1, 1, 2]), row(2, accuracy_bins=[0, 0, 0]), *(row(s) for s in range(3, 21))]
    assert figures.bins(of(tmp_path, rows)).panels[0].lines[0].y.tolist() == [0.25, 0.25, 0.5]


def test_phases_are_means_over_all_steps_that_add_up(tmp_path):
    """A step takes 2 s, of which 1.25 s are the update; an evaluation of 3 s comes after one of four steps."""
    rows = [row(s, **({'timing_s/testing': 3.0} if s == 2 else {})) for s in range(1, 5)]
    figure = figures.seconds(of(tmp_path, rows))
    bars = figure.panels[0]
    assert dict(zip(bars.ticks, bars.lines[0].x, strict=True)) == {'other': 0.75, 'testing': 0.75, 'update_actor': 1.25}
    assert figure.table.rows == (
        ('update_actor', '1.25', '45.5%'), ('testing', '0.75', '27.3%'), ('other', '0.75', '27.3%'), ('all of these', '2.75', '100.0%'),
        ('gen', '0.5', 'beside or inside other phases'),
    )  # fmt: skip


def test_long_series_are_means_of_equal_bins():
    most = panels.MOST_POINTS
    x, y = panels.binned(np.arange(10 * most), np.arange(10.0 * most) ** 2)
    np.testing.assert_allclose(y, (np.arange(10.0 * most) ** 2).reshape(most, 10).mean(axis=1), rtol=1e-12)
    np.testing.assert_allclose(x, np.arange(10 * most).reshape(most, 10).mean(axis=1), rtol=1e-12)
    assert len(panels.binned(np.arange(most), np.ones(most))[0]) == most
    assert len(panels.binned(np.arange(most + 1), np.ones(most + 1))[0]) == most // 2 + 1


@pytest.mark.parametrize('figure', ALL)
def test_a_figure_without_its_metrics_names_them(tmp_path, figure):
    without = figure(of(tmp_path, [{'step': 1, 'other': 1}]))
    assert without.panels == () and without.missing and without.warnings == ()


WARNED = {
    'all-wrong': (figures.bins, [row(s, accuracy_bins=[s, 30, 10]) for s in range(1, 21)]),
    'Entropy is near 0': (figures.dynamics, [row(s, **{'actor/entropy': 0.5 / s}) for s in range(1, 21)]),
    'effective sample size of X3': (figures.staleness, [row(s, **{'staleness/ess/x3': 1 - s / 30}) for s in range(1, 21)]),
    'X2 is empty': (figures.composition, [row(s, **{'bapo/x2_groups': 0}) for s in range(1, 21)]),
    'X3 is empty': (figures.composition, [row(s, **{'bapo/x3_groups': 0}) for s in range(1, 21)]),
}


@pytest.mark.parametrize('words', WARNED)
def test_a_warning_where_the_run_shows_it(tmp_path, words):
    figure, rows = WARNED[words]
    assert [words in warning for warning in figure(of(tmp_path, rows, settings=config())).warnings] == [True]


@pytest.mark.parametrize('figure', ALL)
def test_no_warning_where_it_does_not(tmp_path, figure):
    assert figure(of(tmp_path, [row(s) for s in STEPS], settings=config())).warnings == ()


@pytest.mark.parametrize('words', WARNED)
def test_a_run_of_fewer_than_twenty_steps_warns_of_nothing(tmp_path, words):
    figure, rows = WARNED[words]
    assert figure(of(tmp_path, rows[1:], settings=config())).warnings == ()


def test_a_change_within_noise_does_not_warn(tmp_path):
    """8 of 40 groups all wrong, then 10; and one step of 30 with a small effective sample size."""
    rows = [row(s, accuracy_bins=[4 + (s > 20), 14, 2]) for s in range(1, 31)]
    assert figures.bins(of(tmp_path / 'bins', rows)).warnings == ()
    rows = [row(s, **{'staleness/ess/x1': 0.4 if s == 3 else 0.9}) for s in range(1, 31)]
    assert figures.staleness(of(tmp_path / 'ess', rows)).warnings == ()


def test_a_run_without_a_correct_response_is_told_what_the_command_says_at_its_end(tmp_path):
    (said,) = figures.bins(of(tmp_path, [row(s, accuracy_bins=[8, 0, 0]) for s in range(1, 4)])).warnings
    assert said.startswith('No response of the run was correct, so no group was mixed') and said.endswith('another model.')


def test_a_legend_names_no_origin_that_no_batch_had(tmp_path):
    rows = [row(s, **{'bapo/x2_groups': 0, 'rollout/reevaluated_total': 0}) for s in STEPS]
    assert [x.label for x in figures.composition(of(tmp_path / 'a', rows)).panels[0].lines] == ['fresh (X1)', 'replayed (X3)']
    assert 're-evaluation' not in drawn(figures.rollouts(of(tmp_path / 'b', rows)))
    assert list(drawn(figures.reward(of(tmp_path / 'c', rows[:30])))) == ['each step']  # a mean of 1 step is the step


@pytest.mark.parametrize('settings', [None, config(replay={'use_x2': False, 'use_x3': False})])
def test_an_origin_that_the_config_does_not_use_may_be_empty(tmp_path, settings):
    rows = [row(s, **{'bapo/x2_groups': 0, 'bapo/x3_groups': 0}) for s in STEPS]
    assert figures.composition(of(tmp_path, rows, settings=settings)).warnings == ()


def test_the_lowest_effective_sample_size_is_named(tmp_path):
    rows = [row(s, **{'staleness/ess/x1': 0.4 if s == 3 else 0.45 if s == 5 else 0.9}) for s in STEPS]
    (warning,) = figures.staleness(of(tmp_path, rows)).warnings
    assert 'X1' in warning and 'at 2 of 37 steps' in warning and '0.40' in warning


def test_failed_prompts_that_are_mixed_now_stand_beside_fresh_ones(tmp_path):
    rows = [
        row(s, accuracy_bins=[2, 1, 0, 1, 4 + s], **{f'failed_again/{part}/{lag}': n for lag in (1, 5, 20, 60) for part, n in (
            ('asked', 4 * (s > lag)), ('mixed', lag % 3 * (s > lag)))})
        for s in (5, 10, 30)
    ]  # fmt: skip
    figure = figures.failed_again(of(tmp_path, rows))
    assert [line[:3] for line in figure.table.rows] == [
        ('failed 1 step ago', '12', '3'), ('fresh, same steps', '69', '6'), ('failed 5 steps ago', '8', '4'),
        ('fresh, same steps', '56', '4'), ('failed 20 steps ago', '4', '2'), ('fresh, same steps', '38', '2'),
        ('failed 60 steps ago', '0', '0'),
    ]  # fmt: skip
    assert figure.table.rows[0][3] == '0.250 (0.089 to 0.532)' and figure.table.rows[-1][3] == ''  # Wilson's of 3 in 12
    [bars] = figure.panels[0].lines
    assert bars.x[::-1][:3].tolist() == [0.25, 6 / 69, 0.5] and figure.panels[0].ticks[-1] == 'failed 1 step ago'
    assert figures.failed_again(of(tmp_path / 'without', [row(1)])).missing[0] == 'failed_again/asked/1'
