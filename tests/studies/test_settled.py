"""What the studies of replay publish: tables of whole parts alone, and a figure with their panels."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats
from test_second_proof_matched import row as matched_row, rows as matched_rows  # noqa: F401
from test_six_ways import curves

from studies import settled
from studies.second_proof import matched
from studies.second_proof.analysis import trained
from studies.second_proof.rows import of_today, passed, read_rows
from studies.six_ways import analysis, ways
from studies.x2_map import regimes


@pytest.fixture(scope='module')
def runs():
    slopes = {'G': 0.04, 'mixed': 0.08, 'exgrpo': 0.001}
    return {cell: [curves(slopes.get(cell, 0.05) + 0.001 * seed, 7) for seed in range(4)] for cell in ways.OWN}


def test_a_part_that_misses_a_run_is_left_out(monkeypatch, matched_rows):  # noqa: F811
    monkeypatch.setattr(settled, 'read_rows', lambda: [*matched_rows[:-2], matched_rows[-1]])
    monkeypatch.setattr(settled, 'rows_in', lambda file: [])
    monkeypatch.setattr(settled.replay, 'read_rows', list)
    monkeypatch.setattr(matched, 'opened', lambda row: pytest.fail('answers were read') if 'sealed' in row else row)
    assert [table() for table in settled.TABLES.values()] == [None] * 4


def test_the_rates_in_a_line_a_contrast(matched_rows):  # noqa: F811
    lines = matched.summary_table(matched_rows).splitlines()
    assert len(lines) == 2 + len(matched.CONTRASTS) and lines[-1].startswith('| M - R at 5e-05 |')
    [line] = [line for line in lines if line.startswith('| S - R at 5e-05 |')]
    both = {k: found for name, k, found, _ in matched.contrasts(matched_rows) if name == 'S - R at 5e-05'}
    cells = [f'{both[k].mean:.1f} ({both[k].interval95[0]:.1f} to {both[k].interval95[1]:.1f})' for k in (1, 32)]
    assert line == f'| S - R at 5e-05 | {cells[0]} | 0.9 | helps | {cells[1]} | falls | open |'


def test_what_was_predicted_stands_in_the_plans():
    plan = (settled.ROOT / 'studies' / 'six_ways' / 'plan.md').read_text('utf-8')
    for cell, predicted in analysis.PREDICTED.items():
        assert f'| {ways.CELLS[cell].way} | {" | ".join(predicted)} |' in plan
    plan = (settled.ROOT / 'studies' / 'second_proof' / 'plan_8.md').read_text('utf-8')
    assert '| G − R, both at 5e-5 | −1 | +1 to +2 |' in plan and matched.PREDICTED['R', 'G', 5e-5] == ('1', '-2 to -1')
    assert '| G − R, both at 1e-4 | −1 | +1 ' in plan and matched.PREDICTED['R', 'G', 1e-4] == ('1', '-1')
    for arm, points in (('S', '0.9'), ('M', '0.5')):
        assert f'| {arm} − R | +{points[1:]} | falls |' in plan and matched.PREDICTED[arm, 'R', 5e-5] == (points, 'falls')


def test_the_ways_in_a_line_each(runs):
    found = analysis.contrasts(runs)
    lines = {line.split(' | ')[0][2:]: line for line in analysis.summary_table(found, runs).splitlines()[2:]}
    assert list(lines) == [ways.CELLS[cell].way for cell in ways.OWN if cell != 'G']
    [logs] = [c.logs for c in found if (c.cell, c.cost) == ('mixed', 'tokens')]
    low, high = np.exp(stats.t.interval(0.95, 3, np.mean(logs), stats.sem(logs)))
    assert f' | {np.exp(np.mean(logs)):.2f} ({low:.2f} to {high:.2f}), cheaper | .65 | ' in lines['S']
    assert 'dearer, 0 of 4 reach s | 1.1 |' in lines['ExGRPO'] and lines['ExGRPO'].endswith(' |  | −2 |')
    passed = analysis.at_aim(runs)
    assert lines['S'].split(' | ')[-2].startswith(f'{(passed["mixed"] - passed["G"]).mean():.1f} (')


def test_the_figure_has_what_is_whole(tmp_path, monkeypatch, runs, matched_rows):  # noqa: F811
    drawn = []
    monkeypatch.setattr(Figure, 'savefig', lambda self, path, dpi: drawn.append(self))
    monkeypatch.setattr(settled.x2_map, 'all_fits', dict)
    monkeypatch.setattr(settled, 'read_rows', list)
    monkeypatch.setattr(settled, 'runs_at_best', lambda: None)
    settled.draw(tmp_path / 'one.png')
    base = [matched_row('base', 'base', 0.0, seed, 0.1) for seed in (1, 2)]
    monkeypatch.setattr(settled, 'read_rows', lambda: [*base, *matched_rows])
    monkeypatch.setattr(settled, 'runs_at_best', lambda: runs)
    monkeypatch.setattr(settled, 'rows_in', lambda file: [
        {'pool': pool, 'arm': arm, 'seed': seed, 'x1': 1000 + 3 * seed + 5 * len(arm), 'x2': 0, 'responses': 10_000, 'correct': [[8] * 4, [12] * 4]}
        for pool in regimes.POOLS for arm in regimes.ARMS for seed in regimes.SEEDS
    ])  # fmt: skip
    settled.draw(tmp_path / 'all.png')
    names = [[axes.get_xlabel() for axes in figure.axes] for figure in drawn]
    assert names[0] == ['right, %'] and names[1] == [*settled.AXES.values(), 'mean@16, %', 'mean@32, %', 'right, %']
    curves_of = {line.get_label(): line for line in drawn[1].axes[0].get_lines()}
    np.testing.assert_allclose(curves_of['S'].get_ydata(), np.mean([run.mean() for run in runs['mixed']], axis=0))
    arm = {line.get_label(): line for line in drawn[1].axes[4].get_lines()}
    np.testing.assert_allclose(arm['G'].get_xydata(), [matched.frontier(matched_rows)['G', rate] for rate in (5e-5, 1e-4)])
    assert 'measured: raw, delayed' in {line.get_label() for line in drawn[1].axes[5].get_lines()}


EVIDENCE, README = ((settled.ROOT / name).read_text('utf-8') for name in ('docs/evidence.md', 'README.md'))


def test_what_is_published_is_what_the_rows_say():
    """Tables of whole parts stand in the page, and those of others do not; it has at most 150 lines."""
    for name, table in settled.TABLES.items():
        text = table()
        assert (f'<!-- {name} -->' in EVIDENCE) == (text is not None)
        assert text is None or f'<!-- {name} -->\n{text}\n<!-- /{name} -->' in EVIDENCE
    assert len(EVIDENCE.splitlines()) <= 150


def test_the_verdicts_of_matched_rates_are_the_rows():
    rows = of_today(read_rows())
    told = {(name, k): both for name, k, both, _ in matched.contrasts(rows)}
    verdicts = EVIDENCE.partition('## Verdicts')[2].partition('## The planned')[0]
    for name, k, signs in (
        ('R - G at 5e-05', 1, 1), ('R - G at 0.0001', 1, 1), ('R - G at 5e-05', 32, 1), ('R - G at 0.0001', 32, 1),
        ('R - P at 5e-05', 1, 1), ('R - P at 0.0001', 1, 1), ('S - R at 5e-05', 32, -1), ('M - R at 5e-05', 32, -1),
    ):  # fmt: skip
        low, high = sorted(signs * x for x in told[name, k].interval95)
        assert f'{signs * told[name, k].mean:.1f} ({low:.1f} to {high:.1f})' in verdicts.partition('<!-- rates')[0]
    [cells] = [line.split(' | ') for line in matched.interaction_table(rows).splitlines() if line.startswith('| R - P | mean@32 |')]
    low, high = map(float, cells[3].rstrip(' |').split(' to '))
    assert f'The two differ by {float(cells[2]):.1f} ({low:.1f} to {high:.1f}), post hoc' in verdicts
    gain, loss = told['R - G at 5e-05', 1], told['R - G at 5e-05', 32]
    for c, sign in ((gain, 1), (loss, -1)):
        low, high = sorted(sign * x for x in c.interval95)
        assert f'{sign * c.mean:.1f} ({low:.1f} to {high:.1f})' in README
    assert matched.repeats(rows) and 'made again, gave the same answers' in verdicts
    assert matched.dominated(rows) == {(arm, 1e-4): ('RX', 5e-5) for arm in 'GP'} and 'G and P at 1e-4 are dominated: RX at 5e-5' in verdicts
    ends = matched.frontier(rows)
    base = np.mean([passed(row, 32) for row in rows if row['part'] == 'base'])
    assert [cell for cell, (_, solved) in ends.items() if solved > base] == [('G', 5e-5)]
    assert f'{ends["G", 5e-5][1]:.1f} to {base:.1f}.' in verdicts
    mixed = {arm: np.mean([row['x1'] for row in matched.of_cell(rows, (arm, 5e-5))]) for arm in 'RSM'}
    assert f'S and M make {mixed["S"] / mixed["R"]:.1f} and {mixed["M"] / mixed["R"]:.1f} times' in verdicts
    tokens = {arm: float(trained(matched.of_cell(rows, (arm, 5e-5)))) for arm in 'RP'}
    assert f'{100 - 100 * tokens["R"] / tokens["P"]:.0f} % fewer' in verdicts
