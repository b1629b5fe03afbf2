import numpy as np
import pytest
from group_builders import ids, make_group

from bapo_jax.replay.filters import FILTERS, KEEP_PROBABILITY, fresh_filter

LEVELS = [make_group(k, k) for k in range(9)]


def test_none_keeps_all_levels():
    assert ids(fresh_filter(LEVELS, 'none', np.random.default_rng(0))) == list(range(9))


def test_range_drops_all_wrong_and_all_right():
    assert ids(fresh_filter(LEVELS, 'range', np.random.default_rng(0))) == list(range(1, 8))
    singles = [make_group(0, 0, G=1), make_group(1, 1, G=1)]
    assert fresh_filter(singles, 'range', np.random.default_rng(0)) == []


@pytest.mark.parametrize(
    'kind, expected',
    [
        ('none', [1.0] * 9),
        ('range', [0.0] + [1.0] * 7 + [0.0]),
        ('gaussian', [0.044, 0.172, 0.458, 0.823, 1.0, 0.823, 0.458, 0.172, 0.044]),
        ('uniform', [0.6] * 9),
    ],
)
def test_keep_probabilities(kind, expected):
    assert [KEEP_PROBABILITY[kind](k, 8) for k in range(9)] == pytest.approx(expected, abs=5e-4)
    rng, trials = np.random.default_rng(1), 4000
    kept = np.zeros(9)
    for _ in range(trials):
        kept[ids(fresh_filter(LEVELS, kind, rng))] += 1
    # four standard errors of a fair coin
    np.testing.assert_allclose(kept / trials, expected, atol=4 * 0.5 / trials**0.5)


@pytest.mark.parametrize('kind', FILTERS)
def test_groups_come_through_whole_in_order_and_repeatably(kind):
    groups = [make_group(i, i % 9) for i in range(100)]
    kept = fresh_filter(groups, kind, np.random.default_rng(5))
    assert ids(kept) == sorted(ids(kept))
    assert all(g is groups[g.prompt.id] for g in kept)
    assert ids(kept) == ids(fresh_filter(groups, kind, np.random.default_rng(5)))
    assert fresh_filter([], kind, np.random.default_rng(5)) == []


@pytest.mark.parametrize('kind', FILTERS)
def test_a_group_with_an_infrastructure_error_is_never_kept_and_moves_no_other(kind):
    groups = [make_group(i, 4) for i in range(40)]
    broken = [make_group(i, 4, infra=i % 3 == 0) for i in range(40)]
    kept = ids(fresh_filter(groups, kind, np.random.default_rng(2)))
    assert ids(fresh_filter(broken, kind, np.random.default_rng(2))) == [i for i in kept if i % 3]


def test_unknown_kind_names_the_field():
    with pytest.raises(ValueError, match='replay.fresh_filter'):
        fresh_filter(LEVELS, 'gauss', np.random.default_rng(0))
