"""Arms over seeds: t-intervals and paired differences as scipy has them, Holm's correction, and a sentence on each difference."""

import re

import pytest
from making import config, evaluation, make_run, row
from scipy import stats

from bapo_jax.report import contrast as contrast_lib
from bapo_jax.report.contrast import by_seed, contrast, holm
from bapo_jax.report.records import read_run


def arm(tmp_path, name, scores, steps=8, at=None, **more):
    """A run per seed, evaluated at steps 0, 4 and `steps`; `scores` has (mean, pass) by seed at the end."""
    return [
        read_run(
            make_run(
                tmp_path / f'{name}_{seed}',
                [row(s) for s in range(1, steps + 1)],
                [evaluation(s, [1], *(score if s == steps else (0.1, 0.2))) for s in (0, 4, steps)],
                settings=config(method=name, seed=seed, steps=at or steps, **more),
            )
        )
        for seed, score in scores.items()
    ]


GRPO = {0: (0.50, 0.80), 1: (0.52, 0.78), 2: (0.47, 0.79)}
BAPO = {0: (0.53, 0.81), 1: (0.51, 0.80), 2: (0.49, 0.77)}
BEST = {0: (0.63, 0.80), 1: (0.68, 0.78), 2: (0.57, 0.80)}


def test_means_and_paired_differences_are_scipys(tmp_path):
    found = contrast({'grpo': arm(tmp_path, 'grpo', GRPO), 'bapo': arm(tmp_path, 'bapo', BAPO)})
    assert found.table.head == ('', 'seeds', 'step', 'mean@2', 'pass@2')
    means = [100 * m for m, _ in GRPO.values()]
    low, high = stats.t.interval(0.95, 2, sum(means) / 3, stats.sem(means))
    assert found.table.rows[0][:4] == ('grpo', '3', '8', f'{sum(means) / 3:.1f} ({low:.1f} to {high:.1f})')
    test = stats.ttest_rel([100 * m for m, _ in BAPO.values()], means)
    low, high = (f'{x:.1f}'.replace('-', '−') for x in test.confidence_interval())
    assert found.differences.rows[0] == ('mean@2', 'bapo − grpo', '3', '+1.3', f'{low} to {high}', f'{test.pvalue:.2f}')
    assert found.verdict == (
        f'bapo and grpo do not differ significantly in mean@2 with three seeds (difference +1.3 points, 95 % CI {low} to {high}).',
        'bapo and grpo do not differ significantly in pass@2 with three seeds (difference +0.3 points, 95 % CI −4.8 to 5.5).',
    )


def test_p_values_are_corrected_over_the_arms_and_the_sentence_follows_them(tmp_path):
    groups = {'grpo': arm(tmp_path, 'grpo', GRPO), 'bapo': arm(tmp_path, 'bapo', BAPO), 'best': arm(tmp_path, 'best', BEST)}
    found = contrast(groups)
    p = [stats.ttest_rel([m for m, _ in of.values()], [m for m, _ in GRPO.values()]).pvalue for of in (BAPO, BEST)]
    assert 0.005 < p[1] < 0.025 and [r[5] for r in found.differences.rows[:2]] == [f'{p[0]:.2f}', f'{2 * p[1]:.3f}']
    assert found.verdict[1].startswith('best is significantly higher than grpo in mean@2 with three seeds (difference +13.0 points')
    assert found.verdict[1].endswith(f', p = {2 * p[1]:.3f} corrected for 2 arms).')
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5]) and holm([]) == []


def test_one_seed_or_one_difference_has_no_interval(tmp_path):
    one = contrast({'grpo': arm(tmp_path, 'grpo', {0: (0.5, 0.8)}), 'bapo': arm(tmp_path, 'bapo', {0: (0.6, 0.8)})})
    assert one.table.rows[1][3] == '60.0' and one.differences.rows[0][2:] == ('1', '+10.0', '–', '–')
    assert one.verdict == ('With one seed, no interval can be computed; train more seeds.',)
    of_two = {'grpo': arm(tmp_path, 'of_grpo', GRPO), 'bapo': arm(tmp_path, 'of_bapo', BAPO), 'one': arm(tmp_path, 'of_one', {0: (0.2, 0.3)})}
    assert contrast(of_two).verdict[1] == (
        'With one seed, no interval can be computed for one and grpo in mean@2 (difference −30.0 points); train more seeds.'
    )
    scores = {0: (0.5, 0.8), 1: (0.6, 0.8)}
    equal = contrast({'a': arm(tmp_path, 'a', scores), 'b': arm(tmp_path, 'b', {s: (m + 0.1, p) for s, (m, p) in scores.items()})})
    assert equal.verdict[0].startswith('With the same difference in both seeds, no interval can be computed for b and a')
    assert equal.verdict[1].startswith('b and a do not differ significantly in pass@2 with two seeds (difference +0.0 points')


def test_differences_are_paired_by_seed_and_by_nothing_else(tmp_path):
    grpo = arm(tmp_path, 'grpo', GRPO)
    assert contrast({'grpo': grpo, 'bapo': arm(tmp_path, 'bapo', BAPO)[::-1]}).verdict[0].count('+1.3 points')
    apart = contrast({'grpo': grpo, 'x': arm(tmp_path, 'x', {7: (0.5, 0.8), 8: (0.6, 0.8)})})
    assert apart.verdict[0].startswith('x and grpo have no seed in common with a score for mean@2; train and evaluate')
    assert apart.differences.rows[0][2:] == ('0', '–', '–', '–')


def test_runs_of_one_length_are_compared_at_the_last_step_that_all_have_evaluated(tmp_path):
    grpo = arm(tmp_path, 'grpo', GRPO)
    cut = arm(tmp_path, 'bapo', {0: (0.3, 0.3)}, steps=4, at=8)
    for groups in ({'grpo': grpo, 'bapo': cut}, {'bapo': cut, 'grpo': grpo}):
        assert {r[0]: r[2:4] for r in contrast(groups).table.rows} == {'grpo': ('4', '10.0 (10.0 to 10.0)'), 'bapo': ('4', '30.0')}
    short = arm(tmp_path, 'short', {0: (0.3, 0.3)}, steps=6)  # planned as such, and so compared at its end
    assert [r[2] for r in contrast({'grpo': grpo, 'short': short}).table.rows] == ['8', '6']


def test_a_sentence_has_at_most_thirty_words(tmp_path):
    groups = {
        f'grpo learning_rate={i}e-5': arm(tmp_path, f'm{i}', of) for i, of in enumerate((GRPO, BAPO, BEST, {0: (0.1, 0.2)}, {5: (1, 1)}))
    }
    assert max(len(re.split(r'\s+', sentence)) for sentence in contrast(groups).verdict) <= 30


def test_arms_are_named_by_the_fields_that_differ(tmp_path):
    def runs(*settings):
        return [
            read_run(make_run(tmp_path / f'{len(list(tmp_path.iterdir()))}', [row(1)], settings=x and config(**x)), f'r{i}')
            for i, x in enumerate(settings)
        ]

    def names(*settings):
        return {name: [r.name for r in of] for name, of in by_seed(runs(*settings)).items()}

    rate = [{'method': 'grpo', 'seed': s, 'learner': {'learning_rate': lr, 'clip': 1}} for lr in (5e-5, 1e-4) for s in (0, 1)]
    assert names(*rate) == {'learning_rate=5e-5': ['r0', 'r1'], 'learning_rate=1e-4': ['r2', 'r3']}
    bapo = {'method': 'bapo', 'seed': 0, 'learner': {}}
    assert [*names(*rate, bapo)] == ['grpo learning_rate=5e-5', 'grpo learning_rate=1e-4', 'bapo']
    assert names(rate[0], {'method': 'bapo', 'seed': 0, 'learner': {}}, rate[1]) == {'grpo': ['r0', 'r2'], 'bapo': ['r1']}
    own = {'starts': [{'version': '1'}], 'environment': {'jax': '1'}, 'hub': {'a': 'b'}, 'log': {'sinks': ['wandb']}}
    assert names({'seed': 1}, {'seed': 2, **own}) == {'bapo': ['r0', 'r1']}
    free = {'rollout': {'deadline_s': 5, 'rows': 8}, 'mesh': {'data': 2}, 'learner': {'micro_batch_rows': 1}}
    assert names({'seed': 1}, {'seed': 2, **free}, {'seed': 1, 'method': 'grpo', **free}) == {'bapo': ['r0', 'r1'], 'grpo': ['r2']}
    swept = [{'seed': s, 'rollout': {'rows': rows}} for rows in (8, 16) for s in (0, 1)]
    assert names(*swept) == {'rows=8': ['r0', 'r1'], 'rows=16': ['r2', 'r3']}
    for section, of in (('steps', (3, 4)), ('evaluate', ({'samples': 1}, {'samples': 2})), ('model', ({'path': 'x'}, {'path': 'y'}))):
        assert len(names(*({'seed': i, section: x} for i, x in enumerate(of)))) == 2
    many = {f'f{i}': 1 for i in range(4)}
    assert names({'seed': 1}, {'seed': 1, **many}, None, None) == {'r0': ['r0'], 'r1': ['r1'], 'r2': ['r2'], 'r3': ['r3']}
    # The fingerprint alone differs: other data of the same name.
    assert names({'fingerprints': {'dataset': 'a'}}, {'fingerprints': {'dataset': 'b'}}) == {'r0': ['r0'], 'r1': ['r1']}


def test_no_runs_with_a_score_have_a_table_without_one(tmp_path):
    runs = {name: [read_run(make_run(tmp_path / name, [row(1)], settings=config(method=name)))] for name in 'ab'}
    assert contrast(runs) == contrast_lib.Contrast(
        contrast_lib.Table(('', 'seeds', 'step'), (('a', '1', '–'), ('b', '1', '–'))),
        contrast_lib.Table(('score', 'difference', 'seeds', 'points', '95 % interval', "p (Holm's)"), ()),
        (),
    )
