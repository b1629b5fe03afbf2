"""Numbers of evaluations, against hand-made counts."""

import pytest
from making import evaluation, make_run, row

from bapo_jax.report import evaluations
from bapo_jax.report.records import read_run

EVALS = [
    evaluation(0, [0, 0, 0, 1, 2], 0.30, 0.40),
    evaluation(4, [0, 1, 0, 2, 2], 0.60, 0.50),
    evaluation(8, [0, 2, 1, 2, 1], 0.50, 0.45),
]


def run(tmp_path, evals=EVALS, steps=range(1, 9), name='run', **more):
    return read_run(make_run(tmp_path / name, [row(s) for s in steps], evals, **more))


def test_curves_are_the_evaluations(tmp_path):
    (panel,) = evaluations.curves(run(tmp_path)).panels
    mean, passed = panel.lines
    assert (panel.title, mean.label, passed.label) == ('cd4', 'mean@2', 'pass@2')
    assert mean.x.tolist() == passed.x.tolist() == [0, 4, 8]
    assert mean.y.tolist() == [0.30, 0.60, 0.50] and passed.y.tolist() == [0.40, 0.50, 0.45]


@pytest.mark.parametrize('mean, lost, steps, warns', [
    (0.4, 30, 20, True), (0.4, 5, 20, False), (0.2, 30, 20, False), (0.4, 0, 20, False), (0.4, 30, 19, False),
])  # fmt: skip
def test_a_pass_rate_that_falls_beyond_noise_while_the_mean_rises_warns(tmp_path, mean, lost, steps, warns):
    """Of 200 questions 93 were solved at first; at last `lost` of them are not, and 4 others are."""
    first, last = [1] * 93 + [0] * 107, [2] * (93 - lost) + [0] * (103 + lost) + [1] * 4
    evals = [evaluation(0, first, 0.3, 0.465), evaluation(steps, last, mean, sum(c > 0 for c in last) / 200)]
    warnings = evaluations.curves(run(tmp_path, evals, range(1, steps + 1))).warnings
    assert len(warnings) == warns
    if warns:
        assert warnings[0].startswith('cd4: pass@2 fell from 46.5% to 33.5% (95 % CI of the change: −18.5 to −7.5 points) while')


def test_no_warning_of_scores_whose_noise_is_unknown(tmp_path):
    rows = [row(s, **({'val-core/a/acc/mean@4': s / 50, 'val-core/a/acc/pass@4': 1 - s / 50} if s in (1, 25) else {})) for s in range(1, 26)]
    assert evaluations.curves(read_run(make_run(tmp_path / 'run', rows))).warnings == ()
    apart = [evaluation(0, [1] * 200, 0.3, 1.0), evaluation(25, [0] * 100, 0.4, 0.0)]
    assert evaluations.curves(run(tmp_path, apart, range(1, 26), 'apart')).warnings == ()  # other questions


def test_the_migration_counts_every_tracked_prompt(tmp_path):
    figure = evaluations.migration(run(tmp_path))
    assert figure.panels[0].matrix.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 0]]
    before, after = figure.panels[1].lines
    assert before.y.tolist() == [0.6, 0.2, 0.2] and after.y.tolist() == [0.2, 0.4, 0.4]
    assert figure.table.rows[0][1].startswith('66.7% (2 of 3)')


def test_the_migration_pairs_prompts_by_id(tmp_path):
    last = evaluation(8, [2, 0], 0.5, 0.5)
    last['tracked']['prompt_ids'] = [11, 99]
    assert evaluations.migration(run(tmp_path, [EVALS[0], last])).panels[0].matrix.sum() == 1


@pytest.mark.parametrize('evals', [[], EVALS[:1]])
def test_one_evaluation_shows_no_migration(tmp_path, evals):
    figure = evaluations.migration(run(tmp_path, evals))
    assert figure.panels == () and 'evals/STEP.json' in figure.missing[0]


def test_no_prompt_at_zero_has_no_share(tmp_path):
    evals = [evaluation(0, [1, 2], 0.7, 0.7), evaluation(8, [1, 2], 0.7, 0.7)]
    assert evaluations.migration(run(tmp_path, evals)).table.rows[0][1] == 'no tracked prompt was unsolved at first'


def test_the_cost_is_the_counter_at_the_step(tmp_path):
    table = evaluations.cost(run(tmp_path)).table
    assert table.head == ('', 'base (step 0)', 'best (step 4)', 'end (step 8)')
    assert table.rows == (
        ('rollouts', '0', '64', '128'),
        ('cd4 mean@2', '30.0%', '60.0%', '50.0%'),
        ('cd4 pass@2', '40.0%', '50.0%', '45.0%'),
    )


def test_the_cost_takes_the_last_row_before_a_gap(tmp_path):
    assert evaluations.cost(run(tmp_path, steps=[1, 3, 7, 8])).table.rows[0] == ('rollouts', '0', '48', '128')


def test_a_run_without_evaluations_has_its_cost_alone(tmp_path):
    figure = evaluations.cost(run(tmp_path, [], steps=[1]))
    assert figure.table.rows == (('rollouts', '0', '16'),) and figure.missing


def test_the_best_step_is_one_of_training(tmp_path):
    evals = [evaluation(0, [1], 0.9, 0.9), evaluation(4, [1], 0.2, 0.9), evaluation(8, [1], 0.1, 0.9)]
    assert evaluations.best_step(run(tmp_path, evals).scores) == 4
