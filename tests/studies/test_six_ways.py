"""Six ways to use old experience: the runs in the plan's order, costs where a curve crosses a score, and contrasts by hand."""

import numpy as np
import pytest
from scipy import stats

from bapo_jax.config import resolve, value
from configs import quickstart
from studies.lib.rows import Job
from studies.six_ways import analysis, page, ways
from studies.six_ways.analysis import Run, aim, at_aim_table, contrasts, contrasts_table, crossing
from studies.six_ways.ways import CELLS, COMMON, OWN, RATES, SEEDS, STEPS, fields, wanted


def test_the_runs_are_those_of_the_plan_in_its_order():
    jobs = wanted([])
    assert [job.part for job in jobs] == ['base', *['common'] * 68, *['scan'] * 24]
    assert [job.arm for job in jobs[1:18]] == list(CELLS) and {job.seed for job in jobs[1:18]} == {302}
    ends = {rate: 10 * i for i, rate in enumerate(RATES)}  # the highest rate is best, for G the common one
    scanned = [
        {**job._asdict(), 'correct': {str(STEPS): [-ends[job.rate] if job.arm == 'G' else ends[job.rate]]}} for job in jobs if job.part == 'scan'
    ]
    best = [job for job in wanted(scanned) if job.part == 'best']
    assert len(best) == 7 * len(SEEDS) and {(job.arm, job.rate) for job in best} == {(cell, 2e-4) for cell in OWN if cell != 'G'}
    assert not [job for job in wanted(scanned[1:]) if job.part == 'best']  # while one of the scan is missing


@pytest.mark.parametrize('cell', CELLS)
def test_cells_differ_in_what_is_trained_on(cell):
    c = quickstart.get_config(CELLS[cell].method)
    given = fields(Job('common', cell, COMMON, SEEDS[0])) | {'model.path': 'configs/quickstart_base', 'evaluate.benchmarks': ()}
    c.update_from_flattened_dict(given)
    c = resolve(c)
    learner = [value(c, f'learner.{name}') for name in ('anchor', 'kl_target', 'aggregation', 'advantage', 'surrogate', 'kl_coef')]
    if cell != 'exgrpo':
        assert learner == ['behaviour', 'behaviour', 'token_mean', 'group_std', 'clip', 0.001]
    assert (c.steps, c.learner.batch_groups, c.learner.mini_batch_groups, c.rollout.sync_every) == (120, 64, 16, 1)


def test_a_cost_is_where_the_curve_first_crosses_the_score():
    costs = np.array([0.0, 10, 20, 30])
    assert crossing(costs, np.array([4.0, 8, 6, 12]), 7.0) == (7.5, True)
    assert crossing(costs, np.array([4.0, 5, 6, 12]), 9.0) == (25.0, True)
    assert crossing(costs, np.array([4.0, 5, 6, 8]), 9.0) == (30.0, False)


def curves(slope, seed, problems=60):
    """A run whose share of right answers rises evenly, and whose costs are 100 responses a step, 2 tokens each, .5 s."""
    steps = np.arange(0, STEPS + 1, ways.EVALUATED)
    rng = np.random.default_rng(seed)
    ease = rng.uniform(0.5, 1.5, problems)
    correct = np.minimum(16, np.round((1 + slope * steps[:, None]) * ease[None])).astype(int)
    return Run({'responses': 100.0 * steps, 'tokens': 200.0 * steps, 'seconds': 0.5 * steps}, correct)


def test_contrasts_are_log_ratios_of_costs_by_seed():
    runs = {'G': [curves(0.04 + 0.001 * i, 7) for i in range(4)], 'x3': [curves(0.08 + 0.002 * i, 7) for i in range(4)]}
    found = contrasts(runs)
    s = aim(runs['G'])
    assert s == pytest.approx(np.mean([run.mean()[4] for run in runs['G']]))
    for contrast in found:
        by_hand = [
            np.log(crossing(x.costs[contrast.cost], x.mean(), s)[0] / crossing(g.costs[contrast.cost], g.mean(), s)[0])
            for x, g in zip(runs['x3'], runs['G'])
        ]
        np.testing.assert_allclose(contrast.logs, by_hand)
        assert contrast.reached == 4 and contrast.by_problems[0] < contrast.logs.mean() < contrast.by_problems[1] < 0
        low, high = np.exp(stats.t.interval(0.95, 3, np.mean(by_hand), stats.sem(by_hand)))
        assert f'| X3 | {contrast.cost} | {np.exp(np.mean(by_hand)):.2f} | {low:.2f} to {high:.2f} |' in contrasts_table(found)
    assert contrasts_table(found).count('cheaper') == 3 and '0.5' in contrasts_table(found)


def test_a_run_that_never_reaches_the_score_counts_whole_and_is_marked():
    runs = {'G': [curves(0.05, i) for i in range(4)], 'repo': [curves(0.001, i) for i in range(4)]}
    found = contrasts(runs)
    assert {c.reached for c in found} == {0} and '| 0 of 4 |' in contrasts_table(found)
    assert found[0].logs == pytest.approx([np.log(12_000 / crossing(g.costs['responses'], g.mean(), aim(runs['G']))[0]) for g in runs['G']])
    assert '| RePO |  |  |  |' in at_aim_table(runs)


def test_no_table_is_made_while_a_run_is_missing(monkeypatch):
    monkeypatch.setattr(analysis, 'rows_in', lambda file: [])
    monkeypatch.setattr(analysis, 'opened', lambda row: pytest.fail('answers were read'))
    with pytest.raises(SystemExit, match='93 runs are missing; run'):
        analysis.main()


def test_the_problems_are_new(tmp_path, monkeypatch):
    """In no set of the second proof, and in no shipped one."""
    from studies.second_proof import arms

    for module in (ways, arms):
        monkeypatch.setattr(module, 'ROOT', tmp_path)
    ways.write_problems()
    lines = (tmp_path / ways.TEST).read_text('utf-8').splitlines()
    others = {line for name in arms.PROBLEMS for line in (tmp_path / arms.problems_file(name)).read_text('utf-8').splitlines()}
    assert len(set(lines)) == 500 and not set(lines) & others


def test_a_lower_bound_shows_one_word_alone():
    """A way that does not reach s may only be dearer, and may only be cheaper where G does not."""
    logs = np.array([-0.5, -0.52, -0.48, -0.5])
    for sign, reached, of_g, word in (
        (1, 4, 4, 'cheaper'), (1, 3, 4, 'open'), (1, 4, 3, 'cheaper'), (-1, 3, 4, 'dearer'), (-1, 4, 3, 'open'),
    ):  # fmt: skip
        found = analysis.Contrast('x3', 'tokens', sign * logs, reached, of_g, tuple(sorted((-0.6 * sign, -0.4 * sign))))
        assert analysis.verdict(found, rejected=True) == word and analysis.verdict(found, rejected=False) == 'open'


def test_seconds_are_divided_by_those_of_a_step_of_g():
    steps = range(ways.EVALUATED, STEPS + 1, ways.EVALUATED)
    row = {name: [10.0 * step for step in steps] for name in analysis.COSTS}
    row |= {'correct': {str(step): [1, 2] for step in steps}, 'a_step': 2.0, 'updates': 480, 'groups': {'x1': 16.0, 'x2': 0, 'x3': 48.0, 'replay': 0}}
    run = analysis.run_of(row, {'correct': {'0': [0, 1]}})
    assert run.costs['seconds'].tolist() == [0, *(5.0 * step for step in steps)] and run.costs['tokens'][-1] == 10 * STEPS
    assert run.old == 0.75 and run.mean()[0] == 100 / 32
    assert '| x3_half | 9.4 | ' in analysis.ends_table({'x3_half': [run]}) and '| 480 | 0.75 |' in analysis.ends_table({'x3_half': [run]})
    assert analysis.name_of('x3_half') == 'x3_half' and analysis.name_of('x3') == 'X3'


@pytest.fixture(scope='module')
def common():
    slopes = {'G': 0.05, 'x3_2_steps': 0.08, 'exgrpo': 0.001}
    return {cell: [curves(slopes.get(cell, 0.06) + 0.001 * seed, 7) for seed in range(4)] for cell in CELLS}


def test_every_cell_has_a_line_beside_g(common):
    found = contrasts({cell: common[cell] for cell in ('G', 'x3_2_steps', 'exgrpo')})
    table = page.cells_table({cell: common[cell] for cell in ('G', 'x3_2_steps', 'exgrpo')}, found)
    lines = {line.split(' | ')[0][2:]: line for line in table.splitlines()[2:]}
    [logs] = [c.logs for c in found if (c.cell, c.cost) == ('x3_2_steps', 'tokens')]
    low, high = np.exp(stats.t.interval(0.95, 3, np.mean(logs), stats.sem(logs)))
    assert f' | {np.exp(np.mean(logs)):.2f} ({low:.2f} to {high:.2f}) | ' in lines['`x3_2_steps`'] and '†' not in lines['`x3_2_steps`']
    assert lines['`exgrpo`'].count('†') == 3 and lines['`exgrpo`'].endswith(' |  |') and lines['`G`'].endswith(' |  |  |  |  |')
    less = analysis.at_aim(common)['x3_2_steps'] - analysis.at_aim(common)['G']
    assert f' | {less.mean():.1f} (' in lines['`x3_2_steps`']


def test_the_figure_has_every_curve(common, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(page.Figure, 'savefig', lambda self, path, dpi: drawn.append(self))
    page.draw(common, tmp_path / 'page.png')
    [figure] = drawn
    shown = [line.get_label() for axes in figure.axes for line in axes.get_lines() if line.get_label() in CELLS]
    assert {axes.get_title() for axes in figure.axes} == set(page.WAYS) and set(shown) == set(CELLS) and len(shown) == 16 + 7
    means = {line.get_label(): line.get_ydata() for axes in figure.axes for line in axes.get_lines()}
    np.testing.assert_allclose(means['x3_2_steps'], np.mean([run.mean() for run in common['x3_2_steps']], axis=0))


def test_no_page_is_written_while_a_run_is_missing(monkeypatch):
    monkeypatch.setattr(page, 'rows_in', lambda file: [])
    monkeypatch.setattr(page, 'replace_part', lambda *given: pytest.fail('the page was written'))
    with pytest.raises(SystemExit, match='93 runs are missing; run'):
        page.main()
