"""Scores of packed rows against scores of one response after the other. Tolerance, float32: 2e-5."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from group_builders import masked, with_logp
from learners import BARE, batch_of, learner_config, make_learner, updated, with_responses

from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.groups import make_batch
from bapo_jax.learner.logprobs import Compute
from bapo_jax.learner.packing import cut
from bapo_jax.learner.policy import policy_scores
from bapo_jax.learner.score import score as score_rows
from bapo_jax.models.remat import REMAT


@pytest.fixture(scope='module')
def parts(groups):
    """Two mini-batches; every second token of the second group's responses is not the policy's own."""
    partly = with_responses([groups[1]], lambda r: masked(r, np.arange(len(r.tokens)) % 2 == 0))
    config = learner_config(mini_batch_groups=3, row_tokens=32, micro_batch_rows=2).learner
    return cut(batch_of([groups[0], *partly, *groups[2:]]), np.arange(6), config)


@pytest.fixture(scope='module')
def scored(policy):
    """A function of sequences, the number of micro-batches and the temperature: log-probs [M, R, T]."""
    run = jax.jit(functools.partial(
        score_rows, of_tokens=policy_scores(Compute()), graph=policy.graph, mesh=make_mesh(1, 1, 1), compute=Compute(),
    ))
    return lambda sequences, n, temperature=1.0: np.asarray(run(policy.params, sequences, n, np.float32(temperature))[0])


def alone(score, policy, prompt, response, temperature):
    """The log-probs of one response by itself, on a row of 32 tokens."""
    tokens, segment = np.zeros((1, 32), np.int32), np.zeros((1, 32), np.int32)
    n, m = len(prompt.tokens), len(response.tokens)
    tokens[0, : n + m], segment[0, : n + m] = np.concatenate([prompt.tokens, response.tokens]), 1
    logp, _ = score(policy.params, tokens, segment, np.arange(32, dtype=np.int32)[None], np.float32(temperature))
    return np.asarray(logp[0, n : n + m])


@pytest.mark.parametrize('temperature', [1.0, 0.6])
def test_packed_scores_are_those_of_each_response_alone(temperature, parts, scored, score, policy):
    """A token that is not trained on is read like any other, and gets 0."""
    for part in parts:
        packed = scored(part.sequences(), part.layout.filled, temperature)
        assert packed.dtype == np.float32
        for group, of_group in zip(part.batch.groups, part.of_responses(packed), strict=True):
            for response, got in zip(group.responses, of_group, strict=True):
                want = alone(score, policy, group.prompt, response, temperature)
                np.testing.assert_allclose(got, np.where(response.trained_on, want, 0), rtol=0, atol=2e-5)


def test_everything_but_response_tokens_is_zero(parts, scored):
    for part in parts:
        sequences = part.sequences()
        packed = scored(sequences, part.layout.filled)
        assert (packed[sequences.response == 0] == 0).all()
        assert (packed[sequences.response > 0] < 0).all()
        assert (sequences.response[sequences.segment > 0] == 0).any()  # prompts, and what is not trained on


def test_only_the_micro_batches_that_are_asked_for_are_scored(parts, scored):
    sequences = parts[0].sequences()
    whole, one = scored(sequences, parts[0].layout.filled), scored(sequences, 1)
    assert parts[0].layout.filled > 1
    np.testing.assert_array_equal(one[0], whole[0])
    assert whole[1].any() and not one[1:].any()
    assert not scored(sequences, 0).any()


ROUNDED = [('bfloat16', 'matrix_products')]  # by JAX, of what is kept; attention_and_mlp_inputs likewise


@pytest.mark.parametrize(
    'dtype, remat',
    ROUNDED
    + [
        pytest.param(dtype, remat, marks=pytest.mark.slow)
        for dtype in ('float32', 'bfloat16')
        for remat in REMAT
        if (dtype, remat) not in ROUNDED
    ],
)
def test_an_update_of_the_policy_that_was_scored_begins_at_a_ratio_of_exactly_one(dtype, remat, groups, make_policy):
    """The update's log-probs are the score's, bit for bit: also GSPO's narrow trust region holds no token back."""
    policy = make_policy(dtype)
    learner = make_learner(
        policy, BARE, mini_batch_groups=6, mini_batches='released', anchor='proximal', remat=remat, ratio_level='sequence', clip_low=3e-4,
        clip_high=4e-4,
    )  # fmt: skip
    scores = learner.score_batch('proximal', policy.params, make_batch(groups, ['x1'] * 6))
    scored = [
        dataclasses.replace(g, responses=tuple(with_logp(r, x) for r, x in zip(g.responses, of_group, strict=True)))
        for g, of_group in zip(groups, scores, strict=True)
    ]
    _, metrics = updated(learner, policy, make_batch(scored, ['x1'] * 6))
    assert metrics['actor/updates'] == 1 and metrics['actor/grad_norm'] > 0
    assert metrics['mismatch/logprob_abs_max'] == metrics['actor/ppo_kl'] == metrics['actor/pg_clipfrac'] == 0
