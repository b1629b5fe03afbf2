"""The study's intervals, over problems and seeds and of differences; its page and argument; and that the default is a row of it."""

import json

import numpy as np
import pytest
from scipy import stats
from small_run import ROOT

from bapo_jax.run.directory import differences
from bapo_jax.replay.thresholds import in_range
from configs import quickstart
from studies.first_proof import argument, restated
from studies.first_proof.answer import TOGETHER
from studies.first_proof.grid import WEAK_BASE_COMMAND, settings
from studies.first_proof.page import every_table, page_text, write_page
from studies.first_proof.rows import less, percent, read_off, spread_of

STUDY = ROOT / 'studies' / 'first_proof'
EVIDENCE = (ROOT / 'docs' / 'evidence.md').read_text('utf-8').partition('## The first study, restated')[2]
README = (STUDY / 'README.md').read_text('utf-8')
RNG = np.random.default_rng(0)


def test_seeds_that_agree_leave_the_spread_of_the_problems():
    """Of P problems with accuracies a, the mean has standard error std(a) / √P; the interval is 1.96 of them either way."""
    problems = RNG.random(200)
    mean, low, high = spread_of(np.tile(problems, (3, 1)))
    error = 1.96 * problems.std() / np.sqrt(200)
    assert mean == pytest.approx(problems.mean())
    assert (low, high) == pytest.approx((mean - error, mean + error), abs=0.005)


def test_problems_that_agree_leave_the_spread_of_the_seeds():
    seeds = np.array([0.2, 0.3, 0.4, 0.5, 0.6])
    mean, low, high = spread_of(np.tile(seeds[:, None], (1, 200)))
    error = 1.96 * seeds.std() / np.sqrt(5)
    assert mean == pytest.approx(0.4)
    assert (low, high) == pytest.approx((mean - error, mean + error), abs=0.01)


def test_a_difference_is_taken_on_the_same_problems_and_seeds():
    """Two settings that differ by 5 of 100 on every problem differ by 0.05, however the problems vary; seed 3 has no partner."""
    right = RNG.integers(0, 90, (3, 200))
    rows = [
        {'base': 'weak', 'name': name, 'seed': seed, 'final': {'cd34': {'correct': list(right[seed - 1] + more), 'samples': 100}}}
        for name, more, seeds in (('a', 5, (2, 1)), ('b', 0, (1, 2, 3)))
        for seed in seeds
    ]
    assert less(rows, 'a', 'b') == pytest.approx((0.05, 0.05, 0.05))


def test_a_curve_is_read_off_between_its_points_for_every_problem():
    points = [{'responses': r, 'cd34/samples': 10, 'cd34/correct': k} for r, k in ((0, [2, 0]), (1000, [0, 0]))]
    final = {'cd34': {'samples': 100, 'correct': [30, 100]}}  # of the same policy as the last point, with more samples
    rows = [{'name': 'x', 'seed': seed, 'curve': points, 'final': final} for seed in (1, 2)]
    for responses, shares in ((0, [0.2, 0]), (250, [0.225, 0.25]), (1000, [0.3, 1]), (5000, [0.3, 1])):
        np.testing.assert_allclose(read_off(rows, 'x', 'responses', responses, ['cd34']), [shares, shares])


def test_a_slow_machine_changes_nothing_at_equal_seconds():
    """Undisturbed, a takes 20 s for the steps that take b 10: at equal seconds it has done half of them."""
    rows = [
        {
            'base': 'weak', 'name': name, 'seed': seed, 'final': {'cd34': {'samples': 100, 'correct': [80]}},
            'curve': [{'seconds': s, 'cd34/samples': 10, 'cd34/correct': [k]} for s, k in ((0, 0), (seconds, 8))],
        }
        for name, seed, seconds in (('a', 1, 20), ('a', 2, 50), ('b', 1, 33), ('b', 2, 10))
    ]  # fmt: skip
    assert less(rows, 'a', 'b', 'seconds') == pytest.approx((-0.4, -0.4, -0.4))


def test_bapo_tuned_trains_as_a_row_of_the_study_did():
    """Every field is the same, but those that X2 alone reads and the bounds of X3, which admit the same groups."""
    tuned, row = quickstart.get_config('bapo_tuned'), quickstart.get_config('bapo')
    (setting,) = (s for s in settings() if (s.base, s.name) == ('quickstart', 'wide_no_x2'))
    row.update_from_flattened_dict(
        {k: float(v) if isinstance(v, str) and v[0].isdigit() else v for k, v in setting.changes.items()}
    )
    apart = set(differences(json.loads(tuned.to_json()), json.loads(row.to_json())))
    assert apart == {'method', 'replay.c2', 'replay.c3'}
    for k in range(1, 8):
        assert in_range(k, 8, *tuned.replay.c2, *tuned.replay.c3) and in_range(k, 8, *row.replay.c2, *row.replay.c3)


@pytest.fixture(scope='module')
def rows():
    return [json.loads(line) for line in (STUDY / 'rows.jsonl').read_text('utf-8').splitlines()]


@pytest.mark.parametrize('so_far', [1, 2])
def test_a_page_can_be_made_of_the_first_rows(tmp_path, rows, so_far):
    write_page(rows[:so_far], tmp_path, 'the command')
    page = (tmp_path / 'page.md').read_text('utf-8')
    assert f'{so_far} rows' in page and 'Too few rows yet' in page
    assert ('## From the quickstart base' in every_table(rows[:so_far])) == (so_far > 1)  # one of GRPO and one of BAPO


def test_the_page_is_what_the_argument_and_the_rows_say(rows):
    page = (STUDY / 'page.md').read_text('utf-8')
    assert page == page_text(rows, STUDY / 'x2.json', WEAK_BASE_COMMAND)
    assert '{' not in page


def test_a_share_rounds_alike_whatever_its_last_bits():
    assert {percent(x) for x in (np.nextafter(0.0195, 0), 0.0195, np.nextafter(0.0195, 1))} == {percent(0.0195)}
    assert percent(-1e-17) == percent(1e-17) == '0.0'


def test_the_rows_of_a_base_stand_among_the_tables(rows):
    """A setting that the page does not show is printed, with its scores and what was logged."""
    printed = every_table([row for row in rows if row['base'] == 'weak_g4'])
    table, _, diagnostics = printed.partition('## Diagnostics')
    for name in {row['name'] for row in rows if row['base'] == 'weak_g4'}:
        right = np.array([row['final']['cd34']['correct'] for row in rows if (row['base'], row['name']) == ('weak_g4', name)])
        [line] = [line for line in table.splitlines() if f' | {name} | ' in line]
        assert line.split(' | ')[2] == str(len(right)) and f' | {right.mean() / 0.32:.1f} (' in line
        assert f'\n| {name} | ' in diagnostics


def test_what_the_argument_compares_is_in_the_grid():
    grid = {(s.base, s.name) for s in settings()}
    sets = {'together': TOGETHER, 'weak_four_later': ('weak_four',), 'weak_and_quickstart': ('weak', 'quickstart')}
    braces = [brace for section in argument.sections() for brace in argument.PLACEHOLDER.findall(section)]
    compared = [found for brace in braces if (found := argument.COMPARISON.fullmatch(brace))]
    assert len(compared) == sum(' less ' in brace for brace in braces) > 25
    for found in compared:
        for base in sets.get(found['of'], (found['of'],)):
            assert {(base, found['name']), (base, found['other'])} <= grid


def test_a_number_that_nothing_computes_is_named():
    with pytest.raises(KeyError, match='core_minutes'):
        argument.fill('{core_minutes} of work', {}, {'core_hours': '19.3'})


def test_the_table_of_claims_is_that_of_the_rows(rows):
    """Eight claims, a seed one observation; the figures are those of a paired t computed here from the rows."""
    assert f'<!-- claims -->\n{restated.table(rows)}\n<!-- /claims -->' in README
    for contrast, seeds, survives in restated.restated(rows):
        told = '{:.1f} ({:.1f} to {:.1f})'.format(contrast.mean, *contrast.interval95)
        assert f'| {contrast.name} | {seeds} | {told} | {contrast.p:.4f} | {"yes" if survives else "no"} |' in README
    failed = [contrast.name for contrast, _, survives in restated.restated(rows) if not survives]
    assert failed == ['X1 + X2 + X3 less GRPO, three bases', 'what X2 adds, three bases', 'v = 5 less v = 1, weak base']
    said = ' '.join(EVIDENCE.split())
    assert 'Five of its' in said and 'Three do not: that X1 + X2 + X3 beats GRPO from three bases, that X2 adds' in said
    assert 'and that v = 1 beats 5.' in said
    [(_, seeds, survives)] = [x for x in restated.restated(rows) if 'one update' in x[0].name]

    def mean(name, seed):
        [row] = [r for r in rows if (r['base'], r['name'], r['seed']) == ('weak', name, seed)]
        return 100 * np.mean(row['final']['cd34']['correct']) / row['final']['cd34']['samples']

    have = [{r['seed'] for r in rows if r['base'] == 'weak' and r['name'] == name} for name in ('grpo_one_update_lr2e-4', 'grpo')]
    common = sorted(have[0] & have[1])
    want = stats.ttest_rel(*([mean(name, seed) for seed in common] for name in ('grpo_one_update_lr2e-4', 'grpo')))
    [(contrast, *_)] = [x for x in restated.restated(rows) if 'one update' in x[0].name]
    assert contrast.p == pytest.approx(want.pvalue) and seeds == len(common) == 3 and survives



def test_the_decisions_have_intervals_by_t(rows):
    """A bootstrap over problems and seeds together is too narrow for three seeds: it excludes 0 where these include it."""
    assert f'<!-- decisions -->\n{restated.decisions_table(rows)}\n<!-- /decisions -->' in README

    def of(base, name, score):
        return {
            r['seed']: 100 * score(np.array(r['final']['cd34']['correct'])) for r in rows if (r['base'], r['name']) == (base, name)
        }

    for default, instead, base, name, other in restated.DECISIONS:
        cells = []
        for score in (lambda right: right.mean() / 32, lambda right: (right > 0).mean()):
            a, b = of(base, name, score), of(base, other, score)
            seeds = sorted(a.keys() & b.keys())
            d = [a[seed] - b[seed] for seed in seeds]
            low, high = stats.t.interval(0.95, len(d) - 1, np.mean(d), stats.sem(d))
            cells.append(f'{np.mean(d):.1f} ({low:.1f} to {high:.1f})')
        assert f'| {default} | {instead} | {base} | {len(seeds)} | {cells[0]} | {cells[1]} |' in README
    assert '(-2.0 to 6.2)' in README and 'Three seeds separate neither v = 1 from 5 nor the anchors' in ' '.join(EVIDENCE.split())
