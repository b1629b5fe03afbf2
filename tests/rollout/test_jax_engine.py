"""The in-process engine: what it samples, what it says about it, and what a response depends on."""

import jax
import numpy as np
import pytest
import scipy.stats
from tiny import QWEN3, STOP_TOKENS

from bapo_jax.groups import Prompt
from bapo_jax.rollout.engine import EVALUATION, FRESH, REEVALUATION, Draw, Sampling
from bapo_jax.rollout.jax_engine import JaxEngine, _sample

SAMPLING, DRAW = Sampling(1.0, 10), Draw(5, 2, FRESH)
G, ROWS = 4, 32  # eight prompts a chunk


def generate(engine, prompts, group_size, sampling, draw):
    return engine.generate(prompts, group_size, sampling, [draw] * len(prompts))


def make_engine(policy, rows=ROWS, stop_tokens=STOP_TOKENS, version=0):
    engine = JaxEngine(policy.graph, stop_tokens, rows)
    engine.load(policy.params, version)
    return engine


@pytest.fixture(scope='module')
def answers(policy, prompts):
    return generate(make_engine(policy), prompts, G, SAMPLING, DRAW)


def assert_same(a, b):
    """The same tokens; log-probs within 1e-5, since a row's sums may be ordered otherwise in another shape."""
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert len(x) == len(y)
        for r, s in zip(x, y, strict=True):
            np.testing.assert_array_equal(r.tokens, s.tokens)
            np.testing.assert_allclose(r.logp, s.logp, rtol=0, atol=1e-5)
            assert (r.finish, r.version) == (s.finish, s.version)


def tokens_of(answers):
    return [r.tokens.tolist() for responses in answers for r in responses]


@pytest.mark.parametrize('family, temperature', [({}, 1.0), ({}, 0.6), (QWEN3, 0.6)])
def test_log_probs_are_the_trainers(family, temperature, make_policy, prompts, score):
    """Of the same tokens, parameters and temperature, within 2e-5 (float32)."""
    policy = make_policy(**family)
    answers = generate(make_engine(policy), prompts, G, Sampling(temperature, 10), DRAW)
    tokens, segment = (np.zeros((len(prompts) * G, 16), np.int32) for _ in range(2))
    rows = [(p, r) for p, responses in zip(prompts, answers, strict=True) for r in responses]
    for i, (p, r) in enumerate(rows):
        sequence = np.concatenate([p.tokens, r.tokens])
        tokens[i, : len(sequence)], segment[i, : len(sequence)] = sequence, 1
    position = np.tile(np.arange(16, dtype=np.int32), (len(rows), 1))
    logp, _ = score(policy.params, tokens, segment, position, temperature, graph=policy.graph)
    for i, (p, r) in enumerate(rows):
        n = len(p.tokens)
        np.testing.assert_allclose(r.logp, logp[i, n : n + len(r.tokens)], rtol=0, atol=2e-5)


def test_a_response_does_not_depend_on_the_company(policy, prompts, answers):
    engine = make_engine(policy)
    for i in (0, 4):
        assert_same(generate(engine, [prompts[i]], G, SAMPLING, DRAW), [answers[i]])
    rng = np.random.default_rng(9)
    others = [Prompt(1000 + i, 'countdown', rng.integers(15, 96, 20, dtype=np.int32), {}) for i in range(2)]
    assert_same(generate(engine, [others[0], prompts[2], others[1]], G, SAMPLING, DRAW)[1:2], [answers[2]])  # more padding


def test_a_response_does_not_depend_on_the_order(policy, prompts, answers):
    assert_same(generate(make_engine(policy), prompts[::-1], G, SAMPLING, DRAW), answers[::-1])


@pytest.mark.parametrize('rows', [1, 8, 23])
def test_a_response_does_not_depend_on_how_many_are_sampled_at_once(rows, policy, prompts, answers):
    """One, two and four prompts a chunk; the last chunk is not full."""
    assert_same(generate(make_engine(policy, rows=rows), prompts, G, SAMPLING, DRAW), answers)


def test_a_response_does_not_depend_on_the_size_of_its_group(policy, prompts, answers):
    assert_same(generate(make_engine(policy), prompts, 2, SAMPLING, DRAW), [responses[:2] for responses in answers])


def test_other_draws_give_other_responses(policy, prompts, answers):
    engine = make_engine(policy)
    draws = [DRAW, Draw(6, 2, FRESH), Draw(5, 3, FRESH), Draw(5, 2, REEVALUATION), Draw(5, 2, EVALUATION), Draw(2, 5, FRESH)]
    samples = [tokens_of(generate(engine, prompts, G, SAMPLING, draw)) for draw in draws]
    assert samples[0] == tokens_of(answers)
    for i in range(len(samples)):
        for j in range(i):
            assert sum(a == b for a, b in zip(samples[i], samples[j])) <= 2  # of 24; short ones may agree by chance


def test_the_same_text_under_another_id_and_each_response_of_a_group_is_drawn_anew(policy, prompts, answers):
    twin = Prompt(999, 'countdown', prompts[0].tokens, {})
    responses = tokens_of(generate(make_engine(policy), [twin], G, SAMPLING, DRAW)) + tokens_of(answers[:1])
    assert len({tuple(r) for r in responses}) == 2 * G


def test_lengths_and_finish_reasons(policy, prompts):
    answers = [r for responses in generate(make_engine(policy, version=7), prompts, G, SAMPLING, DRAW) for r in responses]
    for r in answers:
        assert r.tokens.dtype == np.int32 and r.logp.dtype == np.float32
        assert 1 <= len(r.tokens) == len(r.logp) <= 10
        assert (r.logp < 0).all()
        assert not set(r.tokens[:-1].tolist()) & set(STOP_TOKENS)
        ended = int(r.tokens[-1]) in STOP_TOKENS
        assert r.finish == ('stop' if ended else 'length')
        assert ended or len(r.tokens) == 10
        assert r.version == 7
    assert {r.finish for r in answers} == {'stop', 'length'}


def test_a_lower_limit_cuts_the_same_responses(policy, prompts, answers):
    cut = generate(make_engine(policy), prompts, G, Sampling(1.0, 3), DRAW)
    for whole, part in zip(tokens_of(answers), tokens_of(cut), strict=True):
        assert part == whole[:3]
    for responses, short in zip(answers, cut, strict=True):
        for r, s in zip(responses, short, strict=True):
            assert s.finish == ('stop' if len(r.tokens) <= 3 and r.finish == 'stop' else 'length')


@pytest.mark.parametrize('temperature', [1.0, 0.6])
def test_samples_follow_softmax_of_logits_over_temperature(temperature, make_policy):
    """First and second token jointly: 12 × 12 cells, 8192 rows, chi-square at the 0.1 % level (the seed is fixed)."""
    V, N = 12, 8192
    policy = make_policy(vocab_size=V)
    prompt = Prompt(3, 'countdown', np.array([5, 1, 8], np.int32), {})
    answers = generate(make_engine(policy, rows=N, stop_tokens=(V + 1,)), [prompt], N, Sampling(temperature, 2), DRAW)[0]
    pairs = np.array([r.tokens for r in answers])

    def probabilities(text):
        import torch
        from transformers import AutoModelForCausalLM

        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(policy.path)(torch.tensor(text)).logits[:, -1].double()
        return torch.softmax(logits / temperature, dim=-1).numpy()

    first = probabilities([[5, 1, 8]])[0]
    second = probabilities([[5, 1, 8, i] for i in range(V)])
    expected = N * first[:, None] * second
    assert first.max() < 0.9  # something to tell apart
    seen = np.zeros((V, V))
    np.add.at(seen, tuple(pairs.T), 1)
    common = expected >= 5
    seen, expected = (np.array([*x[common], x[~common].sum()]) for x in (seen, expected))
    assert scipy.stats.chisquare(seen[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_nothing_is_compiled_anew_from_step_to_step(policy, prompts):
    """Five to eight prompts of one to sixteen tokens are one shape, whatever the draw, temperature and parameters."""
    engine = make_engine(policy)
    rng = np.random.default_rng(0)
    generate(engine, prompts, G, SAMPLING, DRAW)
    before = _sample._cache_size()
    for step, count in enumerate((5, 8, 6, 7)):
        engine.load(jax.tree.map(lambda x: x * 1.01, policy.params), step)
        lengths = rng.integers(1, 17, count)
        drawn = [Prompt(i, 'countdown', rng.integers(15, 96, n, dtype=np.int32), {}) for i, n in enumerate(lengths)]
        generate(engine, drawn, G, Sampling(0.5 + step, 10), Draw(0, step, FRESH))
    assert _sample._cache_size() == before


def test_load_replaces_the_policy(policy, prompts, answers):
    engine = make_engine(policy)
    engine.load(jax.tree.map(lambda x: 1.3 * x, policy.params), 4)
    other = generate(engine, prompts, G, SAMPLING, DRAW)
    assert other[0][0].version == 4
    assert tokens_of(other) != tokens_of(answers)
    engine.load(policy.params, 0)
    assert_same(generate(engine, prompts, G, SAMPLING, DRAW), answers)


def test_no_prompts_no_answers(policy):
    assert generate(make_engine(policy), [], G, SAMPLING, DRAW) == []


def test_generate_before_load_is_an_error(policy, prompts):
    with pytest.raises(RuntimeError, match='load'):
        generate(JaxEngine(policy.graph, STOP_TOKENS, ROWS), prompts, G, SAMPLING, DRAW)
