"""Part 8 of the second proof: the runs in the plan's order, sealed answers, and an interval by seeds and problems."""

import json

import numpy as np
import pytest
from scipy import stats
from scipy.special import comb

from studies.lib.contrasts import paired_both
from studies.second_proof import matched
from studies.lib.rows import Job, opened, sealed
from studies.second_proof.arms import ARMS, SECOND_BASE, SEEDS, commands
from studies.second_proof.matched import CELLS, CONTRASTS, NEW, contrasts, dominated, frontier, repeats, wanted_matched
from studies.second_proof.rows import of_today, read_rows

LEVELS = {('G', 5e-5): 0.3, ('G', 1e-4): 0.3, ('P', 5e-5): 0.2, ('P', 1e-4): 0.2, ('R', 5e-5): 0.32, ('R', 1e-4): 0.36,
          ('RX', 5e-5): 0.32, ('RX', 1e-4): 0.36, ('S', 5e-5): 0.45, ('M', 5e-5): 0.32}  # fmt: skip


def row(part, arm, rate, seed, level):
    rng = np.random.default_rng([seed, int(1e6 * rate), *arm.encode()])
    correct = rng.binomial(32, level * np.linspace(0, 1, 40)).tolist()
    costs = {'updates': 960, 'tokens': 6_700_000, 'seconds': 1_000 if seed == 201 else 400, 'x1': 19.0, 'entropy': [0.2, 0.1], 'cpu': 'AMD EPYC'}
    return {'part': part, 'arm': arm, 'rate': rate, 'seed': seed, 'changes': ARMS[arm].changes, 'samples': 32, 'correct': correct, **costs}


@pytest.fixture(scope='module')
def rows():
    parts = {cell: 'matched' if cell in NEW.items() else 'final' for cell in CELLS}
    made = [row(part, *cell, seed, LEVELS[cell]) for cell, part in parts.items() for seed in SEEDS]
    made.append(row('repeat', 'R', 5e-5, 201, LEVELS['R', 5e-5]))
    return [r if r['part'] == 'final' else sealed(r) for r in made]


def test_the_runs_are_those_of_the_plan_in_its_order():
    jobs = wanted_matched([])
    assert len(jobs) == 1 + 72 + 20 and jobs[0] == Job('repeat', 'R', 5e-5, 201)
    first = [(job.arm, job.rate) for job in jobs[1:7]]
    assert first == [('G', 5e-5), ('P', 5e-5), ('R', 1e-4), ('RX', 5e-5), ('S', 5e-5), ('M', 5e-5)] and {j.seed for j in jobs[1:7]} == {201}
    assert [(job.arm, job.rate) for job in jobs[-5:]] == [
        ('second_G', 5e-5), ('second_G', 1e-4), ('second_R', 5e-5), ('second_R', 1e-4), ('second_S', 5e-5)
    ]  # fmt: skip
    assert f'--config.model.path={SECOND_BASE}' in commands(jobs[-1], 'x')[0] and ARMS['S'].changes == {'prompts.selector': 'mixed'}
    assert len(CELLS) == len(set(CELLS)) == 10 and len(CONTRASTS) == 8


def test_the_runs_of_part_1_are_there_under_the_same_names():
    there = {(r['arm'], r['rate']) for r in of_today(read_rows()) if r['part'] == 'final'}
    assert there == set(matched.PART_1.items())


def test_sealed_answers_cannot_be_read_and_come_back_whole():
    plain = row('matched', 'S', 5e-5, 201, 0.4)
    closed = sealed(plain)
    assert 'correct' not in closed and json.dumps(plain['correct'])[1:-1] not in json.dumps(closed)
    assert {k: v for k, v in opened(closed).items() if k not in ('sealed', 'sha256')} == plain
    with pytest.raises(ValueError, match='another hash'):
        opened(closed | {'sha256': 'x'})


def test_no_answer_is_read_while_a_run_is_missing(rows, monkeypatch, capsys):
    """That part 1 repeats is seen by a hash."""
    *others, last, again = rows
    monkeypatch.setattr(matched, 'opened', lambda row: pytest.fail('answers were read') if 'sealed' in row else row)
    changed = sealed(row('repeat', 'R', 5e-5, 201, 0.33))
    for there, said in (([*others, again], 'run repeats.'), ([*others, changed], 'does not repeat.'), ([*others, last], '')):
        monkeypatch.setattr(matched, 'read_rows', lambda: there)
        with pytest.raises(SystemExit, match='1 runs are missing'):
            matched.main()
        assert said in (out := capsys.readouterr().out) and bool(out) == bool(said)


def test_an_interval_by_seeds_and_problems_by_hand():
    d = np.array([[1.0, 3.0, 2.0], [2.0, 6.0, 1.0]])
    seeds, problems = d.mean(axis=1), d.mean(axis=0)
    error = np.sqrt(seeds.var(ddof=1) / 2 + problems.var(ddof=1) / 3 - d.var(ddof=1) / 6)
    both = paired_both('x', d)
    assert both.mean == pytest.approx(2.5) and both.p == pytest.approx(2 * stats.t.sf(2.5 / error, 1))
    for ends, level in ((both.interval90, 0.9), (both.interval95, 0.95)):
        np.testing.assert_allclose(ends, stats.t.interval(level, 1, 2.5, error))
    alike = np.broadcast_to(seeds[:, None], (2, 3)) + np.array([[0.1, -0.1, 0.0]] * 2)
    assert paired_both('x', alike).interval95 == pytest.approx(stats.t.interval(0.95, 1, alike.mean(), alike.mean(axis=1).std(ddof=1) / 2**0.5))


def test_it_covers_where_seeds_and_problems_both_vary():
    """Crossed effects of seeds and problems, 12 x 60: 95 % of 400 intervals should have 0; the error of that share is 1.1 %."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(400):
        d = rng.normal(0, 1, (12, 1)) + rng.normal(0, 2, (1, 60)) + rng.normal(0, 4, (12, 60))
        low, high = paired_both('x', d).interval95
        hits += low < 0 < high
    assert 0.92 < hits / 400 < 0.985


def test_contrasts_and_frontier_are_those_of_the_answers(rows):
    found = {(name, k): (both, seeds) for name, k, both, seeds in contrasts(rows)}
    assert len(found) == 16
    s, r = (np.array([x['correct'] for x in matched.of_cell(rows, (a, 5e-5))]) for a in 'SR')
    assert found['S - R at 5e-05', 1][0].mean == pytest.approx(100 * (s - r).mean() / 32)
    solved = [100 * (1 - comb(32 - x, 32) / comb(32, 32)) for x in (s, r)]
    assert found['S - R at 5e-05', 32][1].mean == pytest.approx((solved[0] - solved[1]).mean())
    assert frontier(rows)['S', 5e-5][0] == pytest.approx(100 * s.mean() / 32)
    over = dominated(rows)
    assert over['P', 5e-5] in CELLS and ('S', 5e-5) not in over
    assert repeats(rows)
    assert matched.contrasts_table(rows).count('\n') >= 17 - 1
    d = [np.array([x['correct'] for x in matched.of_cell(rows, (arm, rate))]) for arm in 'RG' for rate in (1e-4, 5e-5)]
    assert f'| R - G | mean@32 | {100 * (d[0] - d[2] - d[1] + d[3]).mean() / 32:.2f} |' in matched.interaction_table(rows)


def test_a_cell_of_another_processor_is_marked(rows):
    """And its seconds are the median, as some sessions were slow."""
    other = [r | {'cpu': 'Xeon'} if (r['arm'], r['seed']) == ('S', 203) else r for r in rows]
    told = {line.split(' | ')[0][2:]: line for line in matched.cells_table(other).splitlines()[2:]}
    assert 'S†' in told and 'S' not in told and 'M' in told and '| 960 | 6.7 | 400 | 19.0 | 0.200 → 0.100 |' in told['S†']
    second = [row('second', *cell, seed, 0.3) for cell in matched.ON_SECOND for seed in matched.SECOND_SEEDS]
    assert [line.split(' | ')[:2] for line in matched.second_table(second).splitlines()[2:]] == [
        ['| G', '5e-05'], ['| G', '0.0001'], ['| R', '5e-05'], ['| R', '0.0001'], ['| S', '5e-05']
    ]  # fmt: skip
