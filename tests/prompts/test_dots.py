"""DOTS: the prediction against a statement in plain loops, the draw, the cycle, and a state that survives a restart."""

import math

import numpy as np
import pytest
from group_builders import make_group

from bapo_jax.groups import Prompt
from bapo_jax.prompts.dots import Dots, normalised, predicted_success
from bapo_jax.prompts.ngrams import ngram_embeddings

PROMPTS = [Prompt(100 + i, 'countdown', np.array([i, i // 8], np.int32), None) for i in range(40)]


def embed(prompts):
    """Five clusters of eight prompts, with some noise."""
    rng = np.random.default_rng(3)
    centres = rng.normal(size=(5, 32))
    return np.float32([centres[p.tokens[1]] + 0.2 * rng.normal(size=32) for p in prompts])


def make(batch=4, seed=7, references=10, cycle=2, tau=1e-3, prompts=PROMPTS, embed=embed) -> Dots:
    return Dots(prompts, batch, seed, embed=embed, references=references, cycle=cycle, tau=tau)


def ids(prompts) -> list[int]:
    return [p.id for p in prompts]


def answered(prompts, k):
    return [make_group(p.id, k(p)) for p in prompts]


def of_cluster(p):
    """Right of 8: 0, 2, 4, 6 or 8."""
    return 2 * int(p.tokens[1])


def visit(selector, k=of_cluster):
    """One step, as the loop takes it: the references and the chosen prompts."""
    references = selector.references()
    if references:
        selector.observe(answered(references, k))
    chosen = selector.next()
    selector.observe(answered(chosen, k))
    return ids(references), ids(chosen)


@pytest.mark.parametrize('rises', [False, True])
def test_a_prediction_is_the_affine_fit_of_attention_over_the_references(rises):
    """With random embeddings, and with those of which the solved references have others than the failed ones."""
    rng = np.random.default_rng(0)
    e, refs, y = rng.normal(size=(9, 6)) + rises * np.outer([0, -1, 0, 0, 1, -1, 0, 1, 0], np.ones(6)), [1, 4, 5, 7], np.array([0.125, 0.5, 0.25, 1.0])
    e = np.float64(normalised(np.float32(e)))

    def attended(q, others):
        weight = [math.exp(sum(e[q] * e[refs[j]]) / math.sqrt(6)) for j in others]
        return sum(w * y[j] for w, j in zip(weight, others)) / sum(weight)

    b = [attended(refs[j], [i for i in range(4) if i != j]) for j in range(4)]
    slope, intercept = np.linalg.lstsq(np.stack([b, np.ones(4)], 1), y, rcond=None)[0]
    assert (slope > 0) == rises
    found = predicted_success(np.float32(e), np.array(refs), y)
    want = [max(slope, 0.0) * attended(q, range(4)) + (intercept if slope > 0 else y.mean()) for q in range(9)]
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_a_negative_slope_counts_as_none():
    """If all embeddings are alike, b of a reference is the mean of the others, which is low where its y is high."""
    y = np.random.default_rng(0).random(12)
    np.testing.assert_allclose(predicted_success(np.zeros((30, 4), np.float32), np.arange(12), y), y.mean())


def test_few_references_predict_their_mean_or_one_half():
    e = normalised(embed(PROMPTS))
    np.testing.assert_array_equal(predicted_success(e, np.zeros(0, int), np.zeros(0)), np.full(40, 0.5))
    np.testing.assert_allclose(predicted_success(e, np.array([3]), np.array([0.25])), np.full(40, 0.25))


def test_embeddings_are_centred_and_of_norm_root_d():
    e = normalised(embed(PROMPTS) + 100)
    raw = embed(PROMPTS).astype(np.float64)
    raw -= raw.mean(axis=0)
    np.testing.assert_allclose(e, raw / np.linalg.norm(raw, axis=1, keepdims=True) * 32**0.5, atol=2e-3)
    assert not normalised(np.ones((3, 4), np.float32)).any()


def test_prompts_like_the_half_solved_references_are_chosen():
    """Of five clusters with success 0, 1/4, 1/2, 3/4 and 1; the third has eight prompts, all that a cycle takes."""
    selector = make(references=20)
    for _ in range(4):
        _, first = visit(selector)
        assert selector.metrics()['prompts/predicted'] == pytest.approx(0.5, abs=0.1)
        _, second = visit(selector)
        assert {(i - 100) // 8 for i in first + second} == {2}
        assert selector.metrics()['prompts/prediction_error'] < 0.1


def test_a_high_tau_draws_uniformly():
    counts = np.zeros(40)
    selector = make(tau=1e6, references=2)
    for _ in range(500):
        counts[np.array(visit(selector)[1]) - 100] += 1
    assert abs(counts / 2000 - 1 / 40).max() < 0.015


def test_a_cycle_asks_references_once_and_no_prompt_twice():
    selector = make(references=10, cycle=3)
    for _ in range(4):
        steps = [visit(selector) for _ in range(3)]
        assert [len(set(references)) for references, _ in steps] == [10, 0, 0]
        assert len({i for _, chosen in steps for i in chosen}) == 12


def test_a_cycle_with_its_references_unjudged_is_drawn_from_all():
    selector = make(prompts=PROMPTS[:8])
    selector.observe([make_group(p.id, 3, infra=True) for p in selector.references()])
    assert sorted(ids(selector.next()) + ids(selector.next())) == ids(PROMPTS[:8])
    assert selector.metrics() == {'prompts/references': 8, 'prompts/predicted': 0.5}


def test_the_prompts_depend_on_the_seed_and_the_results_alone():
    first = [visit(make_) for make_ in [make()] for _ in range(6)]
    assert [visit(make_) for make_ in [make()] for _ in range(6)] == first
    assert [visit(make_) for make_ in [make(seed=8)] for _ in range(6)] != first
    assert [visit(make_, lambda p: 4) for make_ in [make()] for _ in range(6)] != first


@pytest.mark.parametrize('consumed', [0, 1, 2, 5])
def test_a_restored_choice_goes_on_where_it_stood(consumed):
    selector, again = make(), make()
    for _ in range(consumed):
        visit(selector)
    saved = selector.state()
    visit(again)  # what it held before is forgotten
    again.restore(saved)
    assert again.state() == saved and again.metrics() == selector.metrics()
    assert [visit(again) for _ in range(7)] == [visit(selector) for _ in range(7)]
    assert again.state() == selector.state()


def test_a_state_saved_while_the_references_are_answered_is_exact():
    selector, again = make(), make()
    references = selector.references()
    again.restore(selector.state())
    for s in (selector, again):
        s.observe(answered(references, of_cluster))
    assert ids(again.next()) == ids(selector.next())


def test_fewer_prompts_than_a_cycle_are_refused_with_the_fields_named():
    with pytest.raises(ValueError, match=r'40 training prompts.*prompts\.dots\.cycle=11 steps with 4 prompts.*learner\.batch_groups.*task\.limit'):
        make(cycle=11)


def ngrams(*rows):
    return ngram_embeddings([Prompt(i, 'countdown', np.array(row, np.int32), None) for i, row in enumerate(rows)])


def test_an_n_gram_embedding_counts_n_grams_of_one_to_three_tokens():
    """Every n-gram adds 1 or -1 in its own place: few of them collide, and order matters."""
    e = ngrams([5, 6, 7, 8], [5, 6, 7, 8], [8, 7, 6, 5], [5], [6], [5, 6], [])
    np.testing.assert_array_equal(e[0], e[1])
    assert np.abs(e[0]).sum() == 4 + 3 + 2 and not e[6].any()
    assert (e[0] != e[2]).any()
    rest = e[5] - e[3] - e[4]  # the bigram
    assert np.abs(rest).sum() == 1


def test_prompts_that_share_n_grams_are_near_each_other():
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 1000, 30) for _ in range(20)]
    e = ngrams(*rows, *(np.append(row[:20], rng.integers(0, 1000, 10)) for row in rows))
    e = normalised(e)
    likeness = e[:20] @ e[20:].T / e.shape[1]
    assert (likeness.argmax(axis=1) == np.arange(20)).all() and likeness.diagonal().min() > 0.3


def test_an_n_gram_is_hashed_as_by_exact_integers():
    """h ← (h + token + 1), then (h ⊕ ⌊h / 2^32⌋) × 2^64/φ, modulo 2^64; the first bit is the sign, the next nine the place."""
    tokens, want = [7, 151_000, 7, 0, 42], np.zeros(512)
    for n in (1, 2, 3):
        for i in range(len(tokens) - n + 1):
            h = 0
            for token in tokens[i : i + n]:
                h = (h + token + 1) % 2**64
                h = (h ^ h >> 32) * 0x9E3779B97F4A7C15 % 2**64
            want[h >> 54 & 511] += 1 if h >> 63 else -1
    np.testing.assert_array_equal(ngrams(tokens)[0], want)
