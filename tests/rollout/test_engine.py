"""A draw names one use of randomness."""

import itertools

import jax

from bapo_jax.rollout.engine import EVALUATION, FRESH, PROBE, REEVALUATION, TRACKING, Draw


def bits(draw):
    return tuple(jax.random.key_data(draw.key()).tolist())


def test_every_seed_step_and_purpose_has_a_key_of_its_own_that_comes_again():
    draws = [Draw(*d) for d in itertools.product((0, 1), (0, 1, 2), (FRESH, REEVALUATION, EVALUATION, TRACKING, PROBE))]
    keys = [bits(draw) for draw in draws]
    assert len(set(keys)) == len(draws)
    assert keys == [bits(draw) for draw in draws]
