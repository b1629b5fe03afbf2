import pytest

from bapo_jax.config import default_config
from bapo_jax.methods import apply_method
from bapo_jax.replay.thresholds import in_range, levels_in_words, on_grid, threshold, update_r_tot

C2, C3 = (4 / 8, 1 / 8), (5 / 8, 2 / 8)


@pytest.mark.parametrize('r_tot, c2, c3', [(0.0, 4 / 8, 5 / 8), (0.5, 2.5 / 8, 3.5 / 8), (1.0, 1 / 8, 2 / 8)])
def test_eq8_easy_to_hard(r_tot, c2, c3):
    assert threshold(C2, r_tot, 'easy_to_hard') == c2
    assert threshold(C3, r_tot, 'easy_to_hard') == c3


@pytest.mark.parametrize('r_tot', [0.0, 0.25, 0.5, 1.0])
def test_eq8_literal_is_table_3_as_printed(r_tot):
    assert threshold(C2, r_tot, 'literal') == r_tot * (4 / 8 - 1 / 8) + 1 / 8
    assert threshold(C3, r_tot, 'literal') == r_tot * (5 / 8 - 2 / 8) + 2 / 8


@pytest.mark.parametrize('c', [0.375, (0.375,), [0.375], (0.375, 0.375)])
@pytest.mark.parametrize('direction', ['easy_to_hard', 'literal'])
def test_a_lone_number_is_fixed(c, direction):
    assert [threshold(c, r, direction) for r in (0.0, 0.5, 1.0)] == [0.375] * 3


def test_a_lone_integer_too():
    assert threshold(0, 0.7, 'easy_to_hard') == 0.0


def test_refusals():
    with pytest.raises(ValueError, match='replay.thresholds'):
        threshold(C2, 0.5, 'hard_to_easy')
    for c in [(), (0.1, 0.2, 0.3)]:
        with pytest.raises(ValueError, match='one number or'):
            threshold(c, 0.5, 'easy_to_hard')


def test_r_tot_is_an_average_that_starts_at_the_first_mean():
    r = update_r_tot(None, 0.4)
    assert r == 0.4
    r = update_r_tot(r, 0.8)
    assert r == pytest.approx(0.9 * 0.4 + 0.1 * 0.8)
    assert update_r_tot(r, 0.0, decay=0.5) == pytest.approx(r / 2)
    assert update_r_tot(r, float('nan')) == r
    assert update_r_tot(None, float('nan')) is None


@pytest.mark.parametrize('direction', ['easy_to_hard', 'literal'])
def test_width_one_eighth_holds_one_level_two_at_grid_endpoints(direction):
    for n in range(0, 1001):
        low, high = (threshold(c, n / 1000, direction) for c in (C2, C3))
        levels = [k for k in range(9) if in_range(k, 8, low, high)]
        on_grid = abs(low * 8 - round(low * 8)) < 1e-6
        assert len(levels) == (2 if on_grid else 1), (n, levels)


def test_bounds_on_the_grid_survive_rounding():
    for G in range(1, 65):
        for k in range(G + 1):
            for nearby in (k / G, k * (1 / G), (k / G) * (1 - 1e-12), (k / G) * (1 + 1e-12), 0.1 + k / G - 0.1):
                assert in_range(k, G, nearby, nearby)
                assert not in_range(k + 1, G, nearby, nearby)
                assert not in_range(k - 1, G, nearby, nearby)


def test_half_of_an_odd_group_is_no_level():
    assert [k for k in range(8) if in_range(k, 7, 0.5, 0.5)] == []
    assert [k for k in range(9) if in_range(k, 8, 0.5, 0.5)] == [4]


@pytest.mark.parametrize('direction', ['easy_to_hard', 'literal'])
def test_at_any_group_size_some_level_is_replayed_at_every_r_tot(direction):
    """Bounds that hold a level stay as they are, so for G = 8 all do; else the level nearest to their middle takes their place."""
    for G in range(2, 17):
        for n in range(241):
            low, high = (threshold(c, n / 240, direction) for c in (C2, C3))
            new_low, new_high = on_grid(low, high, G)
            levels = [k for k in range(1, G) if in_range(k, G, new_low, new_high)]
            assert levels
            if any(in_range(k, G, low, high) for k in range(1, G)):
                assert (new_low, new_high) == (low, high)
            else:
                assert G < 8 and max(abs(k / G - (low + high) / 2) for k in levels) <= 1 / G
    assert on_grid(0.5, 0.5, 8) == (0.5, 0.5)
    assert on_grid(0.5, 0.5, 5) == (2 / 5, 3 / 5)  # the Mini-test of an odd G: half lies between two levels
    assert on_grid(0.0, 0.05, 4) == (1 / 4, 1 / 4)  # never a group without a right answer
    assert on_grid(0.3, 0.4, 0) == (0.3, 0.4)  # a step without a group


@pytest.mark.parametrize(
    ('method', 'G', 'said'),
    [
        ('bapo', 8, 'X2 re-evaluates prompts with at most 1 of 8 correct\nX3 replays groups with 4 of 8 correct up to r_tot 0.33; '
         '3 of 8 correct up to r_tot 0.67; 2 of 8 correct up to r_tot 1.00'),
        ('bapo', 4, 'X2 re-evaluates prompts with at most 0 of 4 correct\nX3 replays groups with 2 of 4 correct up to r_tot 0.50; '
         '1 of 4 correct up to r_tot 1.00 (if no level is between replay.c2 and replay.c3, the nearest)'),
        ('bapo_mini', 5, 'X2 re-evaluates prompts with at most 0 of 5 correct\nX3 replays groups with 2, 3 of 5 correct (if '
         'no level is between replay.c2 and replay.c3, the nearest)'),
        ('bapo_tuned', 3, 'X3 replays groups with 1, 2 of 3 correct'),
        ('grpo', 8, ''),
    ],
)  # fmt: skip
def test_a_run_says_which_levels_it_asks_again_and_replays(method, G, said):
    c = default_config()
    apply_method(c, method)
    assert levels_in_words(c.replay, G) == said
