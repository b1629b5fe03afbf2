"""The in-process engine: what it samples, what it says about it, and what a response depends on."""

import functools
from concurrent.futures import wait

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from group_builders import begun, version_of
from jax.sharding import Mesh
from tiny import QWEN3, STOP_TOKENS
from tiny_vl import seen_logp

from bapo_jax.groups import Author, Begun, Prompt, Span
from bapo_jax.models import hf
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.rotary import Rotation
from bapo_jax.rollout.engine import EVALUATION, FRESH, REEVALUATION, Draw, RolloutError, Sampling
from bapo_jax.rollout.inprocess import drawing, engine as module, gpu_decoding, gpu_drawing, room, slots
from bapo_jax.rollout.inprocess.engine import JaxEngine
from bapo_jax.rollout.inprocess.room import Limits, memory_of, room_for
from benchmarks.engine.sampling import drawn, logits_of, one_sum, total_variation

SAMPLING, DRAW = Sampling(1.0, 10), Draw(5, 2, FRESH)
G, ROWS, LONGEST = 4, 32, 24


def generate(engine, prompts, group_size, sampling, draw):
    return engine.generate(prompts, group_size, sampling, [draw] * len(prompts))


def make_engine(policy, rows=ROWS, stop_tokens=STOP_TOKENS, version=0):
    engine = JaxEngine(policy.graph, policy.config, stop_tokens, Limits(rows, LONGEST))
    engine.load(policy.params, version)
    return engine


@pytest.fixture(scope='module')
def answers(policy, prompts):
    return generate(make_engine(policy), prompts, G, SAMPLING, DRAW)


def assert_same(a, b, tolerance=0.0):
    """The same tokens and log-probs. Bit for bit, unless `tolerance` says otherwise."""
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert len(x) == len(y)
        for r, s in zip(x, y, strict=True):
            np.testing.assert_array_equal(r.tokens, s.tokens)
            np.testing.assert_allclose(r.logp, s.logp, rtol=0, atol=tolerance)
            assert (r.finish, version_of(r)) == (s.finish, version_of(s))


def tokens_of(answers):
    return [r.tokens.tolist() for responses in answers for r in responses]


def assert_log_probs_are_the_trainers(answers, prompts, score, policy, temperature=1.0):
    """Of the same tokens, parameters and temperature, within 2e-5 (float32)."""
    rows = [(p, r) for p, responses in zip(prompts, answers, strict=True) for r in responses]
    width = max(len(p.tokens) + len(r.tokens) for p, r in rows)
    tokens, segment = (np.zeros((len(rows), width), np.int32) for _ in range(2))
    for i, (p, r) in enumerate(rows):
        sequence = np.concatenate([p.tokens, r.tokens])
        tokens[i, : len(sequence)], segment[i, : len(sequence)] = sequence, 1
    position = np.tile(np.arange(width, dtype=np.int32), (len(rows), 1))
    logp, _ = score(policy.params, tokens, segment, position, temperature, graph=policy.graph)
    for i, (p, r) in enumerate(rows):
        n = len(p.tokens)
        np.testing.assert_allclose(r.logp[r.trained_on], logp[i, n : n + len(r.tokens)][r.trained_on], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    'family, temperature', [({}, 1.0), ({}, 0.6), pytest.param(QWEN3, 0.6, marks=pytest.mark.slow)]
)
def test_log_probs_are_the_trainers(family, temperature, make_policy, prompts, score):
    policy = make_policy(**family)
    answers = generate(make_engine(policy), prompts, G, Sampling(temperature, 10), DRAW)
    assert_log_probs_are_the_trainers(answers, prompts, score, policy, temperature)


@pytest.mark.slow
def test_the_ways_of_a_gpu_give_the_trainers_log_probs_in_any_company(policy, prompts, score, monkeypatch):
    """Their kernel runs in Pallas's interpreter."""
    ways, asked = slots.Ways(functools.partial(gpu_decoding.attend, interpret=True), gpu_drawing.choose), []
    monkeypatch.setattr(slots, 'ways_of', lambda mesh, *of: asked.append(of) or ways)
    slots.sample_responses.clear_cache()
    try:
        answers = generate(make_engine(policy), prompts, G, SAMPLING, DRAW)
        assert_log_probs_are_the_trainers(answers, prompts, score, policy)
        assert_same(generate(make_engine(policy), prompts[2:3], G, SAMPLING, DRAW), answers[2:3])
        assert set(asked) == {('auto', 4 * policy.config.head_dim)}
    finally:
        slots.sample_responses.clear_cache()


def test_what_continues_given_tokens_has_the_trainers_log_probs_of_the_whole_response(policy, prompts, score):
    """It is no longer than others, and it stops where the whole response is as long as the limit."""
    given = [Span(np.arange(3, 5 + i, dtype=np.int32), None, Author.PREFIX) for i in range(3)]
    asked = [Begun(prompt, (span,)) for prompt, span in zip(prompts[:3], given, strict=True)]
    engine = make_engine(policy)
    whole = [future.result(60) for future in engine.ask(asked, G, SAMPLING, [DRAW] * 3)]
    for span, responses in zip(given, whole, strict=True):
        for r in responses:
            assert r.spans[0] is span and r.spans[1].author == Author.POLICY
            assert r.trained_on.tolist() == [False] * len(span.tokens) + [True] * len(r.spans[1].tokens)
            assert r.finish == 'stop' or len(r.tokens) == SAMPLING.max_tokens
    assert {r.finish for responses in whole for r in responses} == {'stop', 'length'}
    assert_log_probs_are_the_trainers(whole, prompts[:3], score, policy)


def test_a_part_of_a_group_is_answered_as_in_the_whole_group(policy, prompts, answers):
    """Also in one call with whole groups of several sizes."""
    engine = make_engine(policy)
    asked = [([Begun(prompts[0], first=j)], 1) for j in range(G)] + [([Begun(prompts[1], first=1)], G - 1)]
    futures = [engine.ask(some, size, SAMPLING, [DRAW])[0] for some, size in [*asked, (begun(prompts[2:3]), G)]]
    *parts, rest, whole = [future.result(60) for future in futures]
    assert_same([tuple(r for part in parts for r in part)], answers[:1])
    assert_same([rest, whole], [answers[1][1:], answers[2]])


def test_a_response_that_is_cut_before_the_limit_is_unfinished_and_can_be_continued(policy, prompts, answers, score):
    engine, most = make_engine(policy), 4
    asked = [Begun(prompt, most=most) for prompt in prompts]
    cut = [future.result(60) for future in engine.ask(asked, G, SAMPLING, [DRAW] * len(prompts))]
    pairs = [(c, w) for some, whole in zip(cut, answers, strict=True) for c, w in zip(some, whole, strict=True)]
    for c, w in pairs:
        np.testing.assert_array_equal(c.tokens, w.tokens[:most])
        np.testing.assert_array_equal(c.logp, w.logp[:most])
        assert c.finish == ('unfinished' if len(w.tokens) > most or w.finish == 'length' else 'stop')
    assert {c.finish for c, _ in pairs} == {'stop', 'unfinished'}

    rest = [(i, j) for i, some in enumerate(cut) for j, r in enumerate(some) if r.finish == 'unfinished']
    engine.load(policy.params, 7)
    again = [Begun(prompts[i], cut[i][j].spans, first=j, most=SAMPLING.max_tokens - most) for i, j in rest]
    futures = engine.ask(again, 1, SAMPLING, [DRAW.again(1)] * len(rest))
    continued = [future.result(60)[0] for future in futures]
    for (i, j), r in zip(rest, continued, strict=True):
        assert r.spans[0] is cut[i][j].spans[0] and [s.version for s in r.spans] == [0, 7]
        assert r.finish == ('length' if len(r.tokens) == SAMPLING.max_tokens and r.tokens[-1] not in STOP_TOKENS else 'stop')
    assert_log_probs_are_the_trainers([(r,) for r in continued], [prompts[i] for i, _ in rest], score, policy)
    assert len({r.spans[1].tokens.tobytes() for r in continued}) > len(rest) // 2  # each is drawn for itself


def test_a_response_does_not_depend_on_the_company(policy, prompts, answers):
    engine = make_engine(policy)
    for i in (0, 4):
        assert_same(generate(engine, [prompts[i]], G, SAMPLING, DRAW), [answers[i]])
    rng = np.random.default_rng(9)
    others = [Prompt(1000 + i, 'countdown', rng.integers(15, 96, 20, dtype=np.int32), {}) for i in range(2)]
    assert_same(generate(engine, [others[0], prompts[2], others[1]], G, SAMPLING, DRAW)[1:2], [answers[2]])  # more padding


@pytest.fixture(scope='module')
def wide(make_policy):
    """With heads of 64 numbers, as real models have them."""
    return make_policy(model_type='qwen3', head_dim=64)


def drawn_prompts(*lengths):
    rng = np.random.default_rng(1)
    return [Prompt(i, 'countdown', rng.integers(15, 96, n, dtype=np.int32), {}) for i, n in enumerate(lengths)]


def engine_of(policy, limits):
    engine = JaxEngine(policy.graph, policy.config, (97,), limits)
    engine.load(policy.params, 0)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize('prompt_tokens, lengths, rows, fewer', [(120, (40, 3, 5, 7), 32, 8), (640, (600, 250, 3, 5), 32, 8), (12, (10, 3, 5, 7), 128, 32)])
def test_a_response_does_not_depend_on_how_much_memory_is_set_aside(prompt_tokens, lengths, rows, fewer, wide, monkeypatch):
    """Where all slots are set aside, a quarter of them, or as many as fit: the same bits, in caches of one block and of several."""
    drawn, sampling = drawn_prompts(*lengths), Sampling(1.0, 20)
    limits = Limits(rows, prompt_tokens)
    want = generate(engine_of(wide, limits), drawn, 2, sampling, DRAW)
    made = []
    monkeypatch.setattr(module, 'nothing_yet', lambda **of: made.append(of['cached']) or slots.nothing_yet(**of))
    monkeypatch.setattr(room, 'SMALL_CACHE', 0)
    few = engine_of(wide, limits)
    got = generate(few, drawn[2:], 2, sampling, DRAW) + generate(few, drawn[:2], 2, sampling, DRAW)
    assert_same(got, [*want[2:], *want[:2]])
    whole = room_for(wide.config, limits, rows, 2, prompt_tokens, 20).cache_bytes(wide.config)
    assert_same(generate(engine_of(wide, limits._replace(cache_bytes=whole * 11 // 32)), drawn * fewer, 2, sampling, DRAW)[: len(want)], want)
    assert made == [fewer, fewer, rows * 11 // 32]


@pytest.mark.slow
def test_what_comes_when_there_is_room_for_less_gets_more_room(wide, monkeypatch):
    """The rest is asked while the first group is sampled, which ends in its small room."""
    drawn, long = drawn_prompts(*[4] * 6), Sampling(1.0, 230)
    draws = [DRAW] * len(drawn)
    want = generate(engine_of(wide, Limits(32, 16)), drawn, G, long, DRAW)
    monkeypatch.setattr(room, 'SMALL_CACHE', 0)
    engine, made, rest = engine_of(wide, Limits(32, 16)), [], []

    def sample(*given, **settings):
        if not rest:
            rest.extend(engine.ask(begun(drawn[1:]), G, long, draws[1:]))
        return slots.sample_responses(*given, **settings)

    monkeypatch.setattr(module, 'nothing_yet', lambda **of: made.append(of['cached']) or slots.nothing_yet(**of))
    monkeypatch.setattr(module, 'sample_responses', sample)
    [first] = engine.ask(begun(drawn[:1]), G, long, draws[:1])
    assert_same([first.result(120), *(future.result(120) for future in rest)], want)
    assert made == [8, 32]


def test_a_response_that_waits_for_a_slot_is_not_taken_for_an_earlier_one_in_its_place(policy, prompts, answers, monkeypatch):
    """Looked at every two tokens, while most of a line's responses have not begun: one of the line before had their place."""
    monkeypatch.setattr(module, '_STEPS', 2)
    assert_same(generate(make_engine(policy, rows=4), prompts * 4, G, SAMPLING, DRAW), answers * 4, tolerance=1e-5)


def test_a_response_does_not_depend_on_the_order(policy, prompts, answers):
    assert_same(generate(make_engine(policy), prompts[::-1], G, SAMPLING, DRAW), answers[::-1])


@pytest.mark.parametrize('rows', [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 23))])
def test_a_response_does_not_depend_on_the_number_of_slots(rows, policy, prompts, answers):
    """Of another shape, a row's sums may be ordered otherwise."""
    assert_same(generate(make_engine(policy, rows=rows), prompts, G, SAMPLING, DRAW), answers, tolerance=1e-5)


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
        assert set(r.versions) == {7}
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
    """Prompts of one to 24 tokens, few or many, are one shape, whatever the draw, temperature and parameters."""
    engine = make_engine(policy)
    rng = np.random.default_rng(0)
    generate(engine, prompts, G, SAMPLING, DRAW)
    programs = (slots.lay_out_weights, slots.nothing_yet, slots.prefill_prompts, slots.sample_responses)
    before = [program._cache_size() for program in programs]
    for step, count in enumerate((5, 1, 30, 7)):
        engine.load(jax.tree.map(lambda x: x * 1.01, policy.params), step)
        lengths = rng.integers(1, LONGEST + 1, count)
        drawn = [Prompt(i, 'countdown', rng.integers(15, 96, n, dtype=np.int32), {}) for i, n in enumerate(lengths)]
        generate(engine, drawn, G, Sampling(0.5 + step, 10), Draw(0, step, FRESH))
    assert [program._cache_size() for program in programs] == before


def test_prompts_of_any_length_are_few_programs(make_policy):
    """Lengths up to 512 are three shapes: 128, 256 and 512."""
    policy, rng = make_policy(), np.random.default_rng(0)
    engine = JaxEngine(policy.graph, policy.config, STOP_TOKENS, Limits(2, 512))
    engine.load(policy.params, 0)
    before = slots.prefill_prompts._cache_size(), slots.sample_responses._cache_size()
    for i, length in enumerate((1, 40, 128, 129, 300, 500, 512)):
        prompt = Prompt(i, 'countdown', rng.integers(15, 96, length, dtype=np.int32), {})
        generate(engine, [prompt], 2, Sampling(1.0, 2), DRAW)
    assert (slots.prefill_prompts._cache_size() - before[0], slots.sample_responses._cache_size() - before[1]) == (3, 1)


def test_long_prompts_and_caches_of_several_blocks_give_the_trainers_log_probs(policy, score):
    """Keys of up to 620 tokens are summed in three blocks, and the company changes no bit."""
    rng = np.random.default_rng(1)
    drawn = [Prompt(i, 'countdown', rng.integers(15, 96, n, dtype=np.int32), {}) for i, n in enumerate((600, 250, 3))]
    engine = JaxEngine(policy.graph, policy.config, (97,), Limits(4, 640))
    engine.load(policy.params, 0)
    answers = generate(engine, drawn, 2, Sampling(1.0, 20), DRAW)
    assert_log_probs_are_the_trainers(answers, drawn, score, policy)
    assert_same(generate(engine, drawn[2:], 2, Sampling(1.0, 20), DRAW), answers[2:])


def test_slots_that_are_free_are_filled_again(policy):
    """Of 160 responses of 1 to 80 tokens in 8 slots, nobody waits for the longest: over 80 % of the slots' room is used."""
    rng = np.random.default_rng(2)
    drawn = [Prompt(i, 'countdown', rng.integers(15, 96, 5, dtype=np.int32), {}) for i in range(40)]
    engine = make_engine(policy, rows=8, stop_tokens=tuple(range(20, 26)))
    answers = generate(engine, drawn, G, Sampling(1.0, 80), DRAW)
    lengths = [len(r.tokens) for responses in answers for r in responses]
    assert max(lengths) > 2 * np.mean(lengths)  # in one wave after the other, less than half would be
    assert engine.sampled == sum(lengths) and engine.sampled > 0.8 * engine.room


def test_what_was_asked_first_is_answered_first_in_several_calls_as_in_one(policy, prompts):
    engine, order = make_engine(policy, rows=4), []
    draws = [[Draw(5, step, FRESH)] * len(prompts) for step in (2, 3, 4)]
    asked = [engine.ask(begun(prompts), G, SAMPLING, of_step) for of_step in draws]
    for step, futures in enumerate(asked):
        for future in futures:
            future.add_done_callback(lambda _, step=step: order.append(step))
    together = [[future.result(60) for future in futures] for futures in asked]
    assert order.index(2) > order.index(1) > order.index(0) and order[-1] == 2
    for of_step, answered in zip(draws, together, strict=True):
        assert_same(engine.generate(prompts, G, SAMPLING, of_step), answered)


def test_greedy_takes_the_likeliest_token_always(policy, prompts, score):
    """As a temperature near 0 does; log-probs are of the distribution at temperature 1."""
    answers = generate(make_engine(policy), prompts, G, Sampling(0.0, 10), DRAW)
    assert tokens_of(answers) == tokens_of(generate(make_engine(policy), prompts, G, Sampling(1e-4, 10), Draw(9, 9, FRESH)))
    for responses in answers:
        assert len({tuple(r.tokens.tolist()) for r in responses}) == 1
    assert_log_probs_are_the_trainers(answers, prompts, score, policy)


def test_top_p_draws_from_the_likeliest_tokens_that_make_up_this_share(make_policy):
    """Of 12 tokens, those that make up 0.7, in proportion to their probabilities: chi-square at the 0.1 % level."""
    V, N = 12, 4096
    policy = make_policy(vocab_size=V)
    prompt = Prompt(3, 'countdown', np.array([5, 1, 8], np.int32), {})
    engine = make_engine(policy, rows=N, stop_tokens=(V + 1,))
    whole, cut = (generate(engine, [prompt], N, Sampling(1.0, 1, top_p), DRAW)[0] for top_p in (1.0, 0.7))
    p = np.zeros(V)
    for r in whole:
        p[r.tokens[0]] = np.exp(r.logp[0])  # log-probs are of the whole distribution
    falling = np.argsort(-p)
    kept = falling[: np.searchsorted(np.cumsum(p[falling]), 0.7) + 1]
    assert 2 <= len(kept) < V
    seen = np.bincount([r.tokens[0] for r in cut], minlength=V)
    assert set(np.flatnonzero(seen)) == set(kept)
    assert scipy.stats.chisquare(seen[kept], N * p[kept] / p[kept].sum()).pvalue > 1e-3
    for r in cut[:50]:
        np.testing.assert_allclose(np.exp(r.logp[0]), p[r.tokens[0]], rtol=1e-5)


@pytest.mark.parametrize('kind', ['flat', 'Zipf', 'peaked'])
@pytest.mark.parametrize('V', [drawing.VOCABULARY_BLOCK, 151_936])
def test_a_large_vocabulary_is_drawn_from_as_exactly_as_one_block(V, kind):
    """Total variation of all that the draw's random numbers give to the float64 softmax; one sum over 151,936 words misses .0005 or more.

    A boundary between two words is off by at most 2^-23 of its sum, and a block has up to 1,024: in all at most 2^-13 = .00012.
    """
    logits = logits_of(kind, V)
    assert total_variation(logits, drawn) < 2**-13
    if V > drawing.VOCABULARY_BLOCK and kind == 'flat':
        assert total_variation(logits, one_sum) > 2**-13


def test_a_draw_in_two_steps_gives_words_of_all_blocks_in_proportion():
    """Four words in four blocks, one of them the last, and weights that do not sum to 1: chi-square at the 0.1 % level."""
    V, N = 3 * drawing.VOCABULARY_BLOCK + 17, 4096
    at, p = [5, drawing.VOCABULARY_BLOCK + 7, 2 * drawing.VOCABULARY_BLOCK, V - 1], np.array([0.1, 0.2, 0.3, 0.2])
    p_BxV = jnp.zeros((N, V)).at[:, jnp.array(at)].set(jnp.asarray(p, jnp.float32))
    words = np.asarray(jax.jit(drawing.draw)(p_BxV, jax.random.split(jax.random.key(0), N)))
    seen = np.array([(words == word).sum() for word in at])
    assert seen.sum() == N
    assert scipy.stats.chisquare(seen, N * p / p.sum()).pvalue > 1e-3


@pytest.mark.parametrize('vocabulary, A', [(1024, 32), (40_000, 32), pytest.param(1024, 16, marks=pytest.mark.slow)])
def test_the_memory_that_a_dry_run_counts_is_what_the_programs_need(vocabulary, A):
    """At least that, and at most a fifth more; in float32, since a CPU computes bfloat16 by way of wider copies. A slots have caches."""
    model = ModelConfig('qwen2', vocabulary, 256, 768, 2, 8, 2, 32, Rotation(1e4), 1e-6, True)
    graph, shapes = hf.abstract_params(model)
    mesh, B, G, L, T, Q = Mesh(jax.devices()[:1], 'rows'), 32, 8, 128, 384, 8
    P = 4 * A // G

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    weights = jax.eval_shape(lambda params: slots.lay_out_weights(params, model=model, mesh=mesh), shapes)
    state = jax.eval_shape(
        lambda: slots.nothing_yet(
            model=model, mesh=mesh, rows=B, places=A + P * G, line=P, prompt_tokens=L, response_tokens=T, cached=A,
            key_slots=512,
        )
    )
    asked = [array(jnp.int32, Q), array(jnp.int32, Q, L), *[array(jnp.int32, Q)] * 3, array(jnp.uint32, Q, 2)]
    read = slots.prefill_prompts.lower(weights, state[2], *asked, graph=graph, mesh=mesh)
    waiting = slots.Waiting(*[array(jnp.int32, P * G)] * 3)
    one, number, share = array(jnp.int32, 1), array(jnp.int32), array(jnp.float32)
    sample = slots.sample_responses.lower(
        weights, *state, waiting, one, one, number, share, share, graph=graph, mesh=mesh, stop_tokens=(3,), greedy=False, nucleus=False
    )

    def needed(program):
        m = program.compile().memory_analysis()
        return m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes

    needs = max(needed(sample), needed(read) + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state[:2])))
    limits = Limits(B, L, None if A == B else (A * 512 + P * L) * room.bytes_of_a_token(model))
    counted = memory_of(model, 4 * sum(x.size for x in jax.tree.leaves(shapes)), limits, group_size=G, response_tokens=T)
    assert needs <= counted <= 1.2 * needs


def test_nothing_is_kept_on_the_devices_once_all_is_answered(policy, prompts):
    engine = make_engine(policy)
    generate(engine, prompts, G, SAMPLING, DRAW)
    engine.close()
    before = sum(x.nbytes for x in jax.live_arrays())
    engine = make_engine(policy)
    generate(engine, prompts, G, SAMPLING, DRAW)
    engine._thread.shutdown()  # which ends behind the last answer
    assert sum(x.nbytes for x in jax.live_arrays()) == before


def test_an_error_while_sampling_reaches_everyone_who_waits(policy, prompts, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError('out of memory')

    engine = make_engine(policy)
    for program in ('prefill_prompts', 'sample_responses'):
        with monkeypatch.context() as patch:
            patch.setattr(module, program, fails)
            futures = engine.ask(begun(prompts), G, SAMPLING, [DRAW] * len(prompts))
            assert [str(future.exception(60)) for future in futures] == ['out of memory'] * len(prompts)
    assert len(generate(engine, prompts, G, SAMPLING, DRAW)) == len(prompts)


def test_load_replaces_the_policy(policy, prompts, answers):
    engine = make_engine(policy)
    engine.load(jax.tree.map(lambda x: 1.3 * x, policy.params), 4)
    other = generate(engine, prompts, G, SAMPLING, DRAW)
    assert other[0][0].versions[0] == 4
    assert tokens_of(other) != tokens_of(answers)
    engine.load(policy.params, 0)
    assert_same(generate(engine, prompts, G, SAMPLING, DRAW), answers)


def test_a_policy_loaded_right_after_the_last_answer_gives_the_next(policy, prompts, answers):
    engine, other = make_engine(policy), jax.tree.map(lambda x: 1.3 * x, policy.params)
    for version in range(10):
        engine.load((policy.params, other)[version % 2], version)
        given = generate(engine, prompts, G, SAMPLING, DRAW)
        assert (tokens_of(given) == tokens_of(answers)) == (version % 2 == 0) and given[0][0].versions[0] == version


def test_a_policy_loaded_while_groups_are_under_way_writes_what_is_asked_after_it(policy, prompts, answers):
    """Which policy writes a response depends on no clock, so that a run that resumes goes on as before."""
    engine, other = make_engine(policy, rows=4), jax.tree.map(lambda x: 1.3 * x, policy.params)
    engine.load(other, 3)
    want = generate(engine, prompts, G, SAMPLING, DRAW)
    asked = []
    for version in (4, 5, 6, 7):
        engine.load((policy.params, other)[version % 2], version)
        asked.append(engine.ask(begun(prompts), G, SAMPLING, [DRAW] * len(prompts)))
    for version, futures in zip((4, 5, 6, 7), asked, strict=True):
        given = [future.result(60) for future in futures]
        assert {version_of(r) for responses in given for r in responses} == {version}
        assert tokens_of(given) == tokens_of(want if version % 2 else answers)


def test_what_is_not_answered_when_the_engine_closes_is_an_error_or_cancelled(policy, prompts):
    engine = make_engine(policy, rows=4, stop_tokens=(97,))
    futures = engine.ask(begun(prompts), G, Sampling(1.0, 500), [DRAW] * len(prompts))
    engine.close()
    assert not wait(futures, timeout=10.0).not_done  # who waits for them goes on
    assert all(future.cancelled() or isinstance(future.exception(0), RolloutError) or future.result(0) for future in futures)
    assert any(future.cancelled() or future.exception(0) for future in futures)


def test_no_prompts_no_answers(policy):
    assert generate(make_engine(policy), [], G, SAMPLING, DRAW) == []


def test_generate_before_load_is_an_error(policy, prompts):
    with pytest.raises(RuntimeError, match='load'):
        generate(JaxEngine(policy.graph, policy.config, STOP_TOKENS, Limits(ROWS, LONGEST)), prompts, G, SAMPLING, DRAW)


# ---- questions with images


@pytest.fixture
def make_seeing(pictured):
    """A function: the engine that answered `pictured.groups`, of those parameters or others."""

    def make(params=pictured.policy.params):
        engine = JaxEngine(pictured.policy.graph, pictured.policy.config, (3,), Limits(32, 128), sight=pictured.sight)
        engine.load(params, 0)
        return engine

    return make


@pytest.mark.slow
def test_a_question_with_images_is_answered_alike_in_any_company(make_seeing, pictured):
    together, draw = [g.responses for g in pictured.groups], Draw(0, 0, FRESH)
    for chosen in ([5, 1], [2], [3, 0, 4]):
        answers = generate(make_seeing(), [pictured.prompts[i] for i in chosen], 4, Sampling(1.0, 10), draw)
        assert_same(answers, [together[i] for i in chosen])


@pytest.mark.slow
def test_a_question_with_images_is_answered_alike_in_a_smaller_room(make_seeing, pictured, monkeypatch):
    monkeypatch.setattr(room, 'SMALL_CACHE', 0)
    answers = generate(make_seeing(), pictured.prompts[:2], 4, Sampling(1.0, 10), Draw(0, 0, FRESH))
    assert_same(answers, [g.responses for g in pictured.groups[:2]], tolerance=1e-5)  # its heads are smaller than real ones


@pytest.mark.slow
def test_log_probs_with_images_are_the_trainers_and_a_sampled_image_token_is_a_word_that_is_not_trained_on(make_seeing, pictured):
    config, params = pictured.policy.config, jax.tree.map(np.array, pictured.policy.params)
    sampled = np.concatenate([r.tokens for g in pictured.groups for r in g.responses])
    mark, frequent = config.vision.image_token, np.bincount(sampled).argmax()
    params['embedding']['embedding'][mark] = params['embedding']['embedding'][frequent]  # as likely then
    answers = generate(make_seeing(params), pictured.prompts, 4, Sampling(1.0, 10), Draw(0, 0, FRESH))
    prompts, responses = zip(*[(p, r) for p, members in zip(pictured.prompts, answers, strict=True) for r in members], strict=True)
    assert any(mark in r.tokens[:-1] for r in responses)
    want = seen_logp(config, params, pictured.sight, prompts, [r.tokens for r in responses])
    for response, logp in zip(responses, want, strict=True):
        np.testing.assert_allclose(response.logp, logp, rtol=0, atol=2e-5)
        np.testing.assert_array_equal(response.trained_on, response.tokens != mark)
