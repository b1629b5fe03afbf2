"""What is post hoc in the second proof, computed again from the rows by other means, stands in its tables and in docs/evidence.md."""

import json
import math
import re

import numpy as np
import pytest
from scipy import stats
from small_run import ROOT

from studies.second_proof import page, posthoc
from studies.second_proof.rows import of_today, read_rows

EVIDENCE, STUDY = ((ROOT / name).read_text('utf-8') for name in ('docs/evidence.md', 'studies/second_proof/README.md'))
PAGE = page.sections(of_today(read_rows()))  # what the command prints; page.md is a part of it (test_second_proof_page.py)
FINALS = {'0.8M': ('final', '{}', range(201, 213)), '12.7M': ('large', 'large_{}', range(201, 209))}


@pytest.fixture(scope='module')
def rows():
    return of_today(read_rows())


def runs(rows, policy, arm):
    """By seed, the right answers of 32 to every problem, and the rate."""
    part, name, seeds = FINALS[policy]
    of = {r['seed']: r for r in rows if r['part'] == part and r['arm'] == name.format(arm)}
    assert list(sorted(of)) == list(seeds)
    return np.array([of[seed]['correct'] for seed in seeds]), {of[seed]['rate'] for seed in seeds}


def mean(right_SxP):
    return 100 * right_SxP.mean(axis=1) / 32


def solved(right_SxP):
    return 100 * (right_SxP > 0).mean(axis=1)


def words(differences, digits=2):
    test = stats.ttest_1samp(differences, 0)
    low, high = test.confidence_interval(0.95)
    return f'{np.mean(differences):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})'


@pytest.mark.parametrize(
    'policy, a, b, rate, seeds', [('0.8M', 'RX', 'G', 1e-4, 12), ('0.8M', 'RX', 'P', 1e-4, 12),
                                  ('12.7M', 'RX', 'G', 5e-5, 8), ('12.7M', 'RX', 'P', 5e-5, 8)],
)  # fmt: skip
def test_replay_beside_the_others_at_one_rate(rows, policy, a, b, rate, seeds):
    (x, of_x), (y, of_y) = runs(rows, policy, a), runs(rows, policy, b)
    assert of_x == of_y == {rate} and len(x) == seeds
    line = f'| {a} - {b}, {policy} parameters | {rate:g} | {seeds} | {words(mean(x) - mean(y))} | {words(solved(x) - solved(y))} |'
    assert line in PAGE


def first_study(base, a, b, benchmarks):
    file = ROOT / 'studies' / 'first_proof' / 'rows.jsonl'
    of = [r for r in map(json.loads, file.read_text('utf-8').splitlines()) if r['base'] == base and r['name'] in (a, b)]
    right = {
        (r['name'], r['seed']): np.array([np.concatenate([r['final'][name]['correct'] for name in benchmarks])]) for r in of
    }
    seeds = sorted({seed for _, seed in right if (a, seed) in right and (b, seed) in right})
    rates = {r['changes']['learner.learning_rate'] for r in of if r['seed'] in seeds}
    assert len(rates) == 1 and all(r['final'][name]['samples'] == 32 for r in of for name in benchmarks)
    found = [words([(f(right[a, s]) - f(right[b, s])).item() for s in seeds]) for f in (mean, solved)]
    return f'{len(seeds)} | {found[0]} | {found[1]} |'


def test_replay_with_as_many_updates_in_the_first_study():
    for base, benchmarks in (('weak_four', ('cd4', 'runs/first_proof/test_4.jsonl')), ('weak', ('cd34',))):
        told = first_study(base, 'wide', 'x1_only_four_updates', benchmarks)
        assert f' | {told}' in PAGE


def test_what_x3_costs_in_the_quickstart():
    for a, b in (('wide_no_x2', 'x1_only'), ('wide', 'no_x3')):
        for benchmark, words_of in (('cd34', 'CD-34'), ('cd4', 'CD-4')):
            assert f"| `{a}` - `{b}` | {words_of} | {first_study('quickstart', a, b, (benchmark,))}" in PAGE
    assert '-5.10 (-8.62 to -1.58)' in PAGE


def test_the_papers_percent_beside_ours(rows):
    arms = {(policy, arm): mean(runs(rows, policy, arm)[0]) for policy in FINALS for arm in ('G', 'R', 'RX')}
    for a, b in (('R', 'G'), ('RX', 'G'), ('R', 'RX')):
        small, larger = (words(100 * arms[policy, a] / arms[policy, b] - 100, 1) for policy in FINALS)
        assert f'| {a} / {b} - 1, % | {small} | {larger} |' in PAGE
        assert small.replace(' (', ' % (') in EVIDENCE or a == 'RX'
    for a, b, paper in (('R', 'G', 12.5), ('R', 'RX', -21.0)):
        low, high = stats.ttest_1samp(100 * arms['0.8M', a] / arms['0.8M', b] - 100, 0).confidence_interval(0.95)
        assert not low <= paper <= high


def test_the_dose_of_x2(rows):
    shares = []
    for policy, (part, name, _) in FINALS.items():
        of = [r for r in rows if r['part'] == part and r['arm'] == name.format('RX')]
        x1, x2, x3 = (sum(r[source] for r in of) for source in ('x1', 'x2', 'x3'))
        asked = [8 * r['reevaluated'] / r['responses'] for r in of]
        shares.append((f'{100 * x2 / (x1 + x2 + x3):.2f}', f'{100 * np.mean(asked):.1f}'))
    assert f'| {shares[0][0]} | {shares[1][0]} |' in PAGE and f'| {shares[0][1]} | {shares[1][1]} |' in PAGE
    assert f'{shares[0][0]} %' in EVIDENCE and f'{float(shares[0][1]):.0f} % of its responses' in EVIDENCE
    known = [m for r in rows if r['part'] == 'final' and r['arm'] == 'RX' for m in r.get('moves', ())]
    per_step = sum(m[4] for m in known if m[2] == 0 and m[3] in (0, 1)) / (2 * 218)  # two runs kept their rollouts
    assert f'| {per_step:.1f} | - |' in PAGE and f'| {64 / per_step:.1f} | - |' in PAGE and f'{64 / per_step:.1f} steps' in EVIDENCE


def test_what_the_ceiling_allows_of_x2(rows):
    r, _ = runs(rows, '0.8M', 'R')
    ceiling = {x['seed']: x for x in rows if x['part'] == 'ceiling'}
    above = np.array([mean(np.array([ceiling[s]['correct']]))[0] for s in range(201, 205)]) - mean(r[:4])

    def fresh(part, arm, seeds, steps):
        return steps * np.mean([x['x1'] for x in rows if x['part'] == part and x['arm'] == arm and x['seed'] in seeds])

    slope = np.mean(above) / math.log(fresh('ceiling', 'C', range(201, 205), 240) / fresh('final', 'R', range(201, 205), 240))
    x2 = 218 * np.mean([x['x2'] for x in rows if x['part'] == 'final' and x['arm'] == 'RX'])
    for worth in (0, 1, 5, 10):
        has = fresh('final', 'RX', range(201, 213), 218) + worth * x2
        allowed = slope * math.log(has / fresh('final', 'R', range(201, 213), 240))
        assert f'| {worth} | {allowed:.2f} (' in PAGE and abs(allowed) < 1, 'less than is relevant, whatever X2 did'


def test_what_failed_at_the_base_still_seldom_gives_a_mixed_group(rows):
    def none_of_8(right):  # by the product of the draws
        return math.prod((32 - right - i) / (32 - i) for i in range(8))

    for policy, part in (('0.8M', 'base'), ('12.7M', 'large')):
        base = [r['correct'] for r in rows if r['part'] == part and r['arm'] in ('base', 'large_base')]
        weights = np.mean([[none_of_8(c) for c in right] for right in base], axis=0)
        told = {'failed 8 of 8 at the base': [], 'any': []}
        for arm in ('G', 'P', 'R', 'RX'):
            right, _ = runs(rows, policy, arm)
            mixed = np.mean([[1 - none_of_8(c) - none_of_8(32 - c) for c in of] for of in right.tolist()], axis=0)
            told['failed 8 of 8 at the base'].append(f'{np.average(mixed, weights=weights):.2f}')
            told['any'].append(f'{np.mean(mixed):.2f}')
        for which, shares in told.items():
            assert f'| {policy} | {which} | {" | ".join(shares)} |' in PAGE
        failed, every = (of[2] for of in told.values())  # R's
        said = {'0.8M': f'{failed} even after training with R, against {every} for any problem', '12.7M': f'12.7M: {failed} and {every}'}
        assert said[policy] in ' '.join(EVIDENCE.split())


def test_the_sentences_tell_the_rate_of_the_larger_policy():
    """No lead of the larger policy is claimed without the rate."""
    [cells] = [line.split('|') for line in PAGE.splitlines() if line.startswith('| RX - G, 12.7M parameters |')]
    lead = re.sub(r'(\d\.\d)\d', lambda found: f'{float(found[0]):.1f}', cells[4].strip())
    assert f'RX − G is {lead}' in EVIDENCE


def test_what_was_made_once_or_twice_is_said_to_be(rows):
    """Two bases on one day; a score of the better of two seeds stands beside the other."""
    of = [r for r in rows if r['part'] == 'large' and r['arm'] in {f'large_{arm}' for arm in ('G', 'P', 'R', 'RX')}]
    assert len({r['base'] for r in of}) == 2 and {r['date'][:10] for r in of} == {'2026-11-26'}
    assert 'have two bases, made by one command that ran twice on one day' in ' '.join(STUDY.split())
    diagrams = (ROOT / 'docs' / 'reference' / 'tasks.md').read_text('utf-8')
    seeds = re.findall(r'^\| figures \| \d \| ([\d.]+ → [\d.]+) \|', diagrams, re.MULTILINE)
    [line] = [line for line in diagrams.splitlines() if '#diagrams' in line and '→' in line]
    assert len(seeds) == 2 and all(score in line for score in seeds)


def test_post_hoc_is_said_to_be_so(rows):
    assert 'Post hoc' in page.whole(rows)
    for title, tables in posthoc.TABLES.items():
        section = PAGE.partition(f'## {title}\n')[2].partition('\n## ')[0]
        assert title.startswith('Post hoc: ') and all(table(rows) in section for table in tables)
    with pytest.raises(ValueError, match='too many values'):
        posthoc.one_rate([{'rate': 1e-4}, {'rate': 5e-5}])
