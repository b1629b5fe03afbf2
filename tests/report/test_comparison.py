"""Several runs on one axis: seeds, bands and costs, against hand-made counts."""

import numpy as np
from making import config, evaluation, make_run, row

from bapo_jax.report.comparison import comparison
from bapo_jax.report.records import read_run


def run(tmp_path, evals=(), steps=range(1, 9), name='run', **more):
    return read_run(make_run(tmp_path / name, [row(s) for s in steps], evals, **more))


def test_seeds_of_one_config_are_one_curve_with_a_band(tmp_path):
    runs = [
        run(tmp_path, [evaluation(8, [1], x, x)], steps, f'r{seed}', settings=config(seed=seed))
        for seed, x, steps in ((1, 0.25, range(1, 9)), (2, 0.75, range(2, 9)))
    ]
    other = run(tmp_path, [evaluation(8, [1], 0.5, 0.5)], name='other', settings=config(method='grpo'))
    figure = comparison([*runs, other])
    reward, norm, _, _, mean, passed = figure.panels
    assert norm.title.startswith('Gradient norm') and len(norm.lines) == 2
    assert [x.label for x in reward.lines] == ['bapo', 'grpo']
    assert reward.lines[0].x.tolist() == list(range(2, 9))  # the steps that both have
    np.testing.assert_allclose(reward.lines[0].y, [0.1 + s / 100 for s in range(2, 9)], rtol=1e-12)
    band = mean.lines[0]
    assert (band.y.tolist(), band.low.tolist(), band.high.tolist()) == ([0.5], [0.25], [0.75])
    assert mean.lines[1].low is None and passed.title == 'cd4, pass@2'


def test_a_table_says_what_each_method_cost_and_reached_at_its_best_and_at_its_end(tmp_path):
    def three(tracked, best, end):
        return [evaluation(0, [0, 0, 0, 0, 1], 0.1, 0.2), evaluation(4, [0] * 5, best, best), evaluation(8, tracked, end, end)]

    runs = [
        run(tmp_path, three([0, 1, 2, 2, 2], 0.6, 0.5), name='a', settings=config(seed=1)),
        run(tmp_path, three([0, 0, 0, 0, 2], 0.2, 0.4), name='b', settings=config(seed=2)),
        run(tmp_path, name='c', settings=config(method='grpo')),
    ]
    table = comparison(runs).table
    assert table.head == ('', 'step', 'rollouts', 'cd4 mean@2', 'cd4 pass@2', 'solved of those unsolved at first')
    assert table.rows == (
        ('bapo, best', '6', '96', '50.0%', '50.0%', '–'),  # of .6 at step 4 and .4 at step 8; 16 rollouts a step
        ('bapo, end', '8', '128', '45.0%', '45.0%', '37.5%'),  # of 3 of 4 prompts, and of none
        ('grpo, best', '–', '–', '–', '–', '–'),
        ('grpo, end', '8', '128', '–', '–', '–'),
    )
