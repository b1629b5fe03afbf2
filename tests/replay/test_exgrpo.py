"""ExGRPO: what is stored, retired and drawn, against a plain model of it; the leading success is a trace; an exact restore."""

import dataclasses

import numpy as np
import pytest
from group_builders import assert_same_arrays, assert_same_groups, graded, make_group, right
from ml_collections import ConfigDict

from bapo_jax.groups import NO_VERSION, REPLAY, X1, Author, Begun, Prompt, Verdict, sampled
from bapo_jax.replay import PURPOSES
from bapo_jax.replay.exgrpo import Exgrpo, as_trace, dealt, led_groups, most_likely

G, B = 4, 6


def make(share=0.5, start_above=0.35, per_prompt=32, batch_groups=B) -> Exgrpo:
    return Exgrpo(ConfigDict({'exgrpo': {'share': share, 'start_above': start_above, 'per_prompt': per_prompt}}), batch_groups)


def rng_of(step, seed=0):
    return lambda purpose: np.random.default_rng([seed, step, PURPOSES.index(purpose)])


def score(batch):
    """Log-probs that depend on the tokens alone."""
    return [[-(r.tokens % 7) / 7.0 - 0.1 for r in g.responses] for g in batch.groups]


def drawn(prompt_id, k, step, kind):
    """k of G right, of at most 30 possible responses a prompt, so that some tokens come again."""
    rng = np.random.default_rng([prompt_id, k, step, kind])
    responses = []
    for _ in range(G):
        tokens = np.array([prompt_id, *rng.integers(0, 5, 2)], np.int32)
        responses.append(sampled(tokens, -rng.random(3, np.float32), 'stop', step - 1))
    return graded(Prompt(prompt_id, 'countdown', np.arange(2, dtype=np.int32), {}), responses, right(k, G)[::-1], step)


def fresh_of(step):
    """Six of twelve prompts. From step 4 on some are solved; one could not be judged at every fifth step."""
    groups = []
    for i in range(B):
        prompt_id = (i + 6 * step) % 12
        k = int(np.random.default_rng([step, i]).integers(0, 4)) if (step, i) != (6, 1) else G
        groups.append(drawn(prompt_id, k, step, 0))
    if step % 5 == 0:
        groups[0] = make_group((6 * step) % 12, 2, G, step, infra=True)
    return groups


def answers(begun, step):
    """What π_θ answers: one group is solved, one fails, one could not be judged."""
    of_step = []
    for j, one in enumerate(begun):
        k = int(np.random.default_rng([step, j, 1]).integers(0, 3)) if (step, j) != (9, 0) else G
        group = drawn(one.prompt.id, k, step, 1)
        of_step.append(make_group(one.prompt.id, 1, G, step, infra=True) if (step, j) == (8, 1) else group)
    return of_step


def step_of(exgrpo, step):
    begun = exgrpo.hard_prompts(step, rng_of(step))
    again = answers(begun, step)
    batch = exgrpo.compose(step, fresh_of(step), again, rng_of(step), score)
    told = exgrpo.times_trained(batch)
    exgrpo.add(step, fresh_of(step), batch)
    return begun, again, batch, told


def successes(group, first=0):
    return [r.tokens.tolist() for r, v in list(zip(group.responses, group.verdicts))[first:] if v == Verdict.CORRECT]


def test_it_stores_successes_of_mixed_groups_asks_their_prompts_and_retires_the_solved():
    exgrpo, store, latest, retired, started, led = make(), {}, {}, set(), False, 0
    for step in range(1, 25):
        begun, again, batch, told = step_of(exgrpo, step)
        asked = [b.prompt.id for b in begun]
        assert all(isinstance(b, Begun) and b.spans == () for b in begun)
        assert len(set(asked)) == len(asked) == min(B, len(store)) and set(asked) <= store.keys()
        fresh = [g for g in fresh_of(step) if not g.infra_error]
        answered = [g for g in again if not g.infra_error]
        assert batch.origins == (X1,) * len(fresh) + (REPLAY,) * len(answered)
        assert told == [1] * len(fresh) + [None] * len(answered)
        for mixed, g in zip(batch.of_origin(REPLAY), answered, strict=True):
            led += 1
            assert mixed.size == G and mixed.step == step and mixed.verdicts == (Verdict.CORRECT, *g.verdicts[1:])
            assert mixed.rewards.tolist() == [1.0, *g.rewards[1:]]
            assert all(a.tokens.tolist() == b.tokens.tolist() for a, b in zip(mixed.responses[1:], g.responses[1:], strict=True))
            nll = {tuple(tokens): -np.mean(-(np.array(tokens) % 7) / 7 - 0.1) for tokens in store[mixed.prompt.id]}
            assert nll[tuple(mixed.responses[0].tokens.tolist())] == pytest.approx(min(nll.values()))
            assert [s.author for s in mixed.responses[0].spans] == [Author.TRACE] and mixed.responses[0].spans[0].version != NO_VERSION
            assert {s.author for r in mixed.responses[1:] for s in r.spans} == {Author.POLICY}
        # The plain model: fresh ones first, then those led by a success, whose own count includes it.
        seen = [*((g, 0) for g in fresh), *((g, 1) for g in batch.of_origin(REPLAY))]
        for g, first in seen:
            if started and 0 < g.correct < G and g.prompt.id not in retired:
                latest[g.prompt.id] = g.correct
                for tokens in successes(g, first):
                    if tokens not in store.setdefault(g.prompt.id, []):
                        store[g.prompt.id].append(tokens)
        retired |= {g.prompt.id for g, _ in seen if g.correct == G}
        store = {i: tokens for i, tokens in store.items() if i not in retired}
        responses = [v for g in batch.groups for v in g.verdicts]
        started |= np.mean([v == Verdict.CORRECT for v in responses]) > 0.35
        assert {i: [r.tokens.tolist() for r in g.responses] for i, g in exgrpo.history.items()} == store
        assert {s.author for g in exgrpo.history.values() for r in g.responses for s in r.spans} <= {Author.POLICY}
        assert {i: k for i, (k, _) in exgrpo._latest.items()} == {i: latest[i] for i in store}
        metrics = exgrpo.metrics(step)
        assert (metrics['buffer/exgrpo/started'], metrics['buffer/exgrpo/retired']) == (started, len(retired))
        assert metrics['buffer/exgrpo/responses'] == sum(map(len, store.values())) and metrics['bapo/reevaluated'] == len(begun)
    assert started and led > 20 and len(retired) >= 2 and store


def test_it_starts_above_the_share_and_not_at_it_and_stays_on():
    exgrpo = make(start_above=0.5, batch_groups=2)

    def add(*ks):
        groups = [make_group(i, k, G, step=len(ks)) for i, k in enumerate(ks)]
        exgrpo.add(1, groups, exgrpo.compose(1, groups, [], rng_of(1), score))
        return bool(exgrpo.metrics(1)['buffer/exgrpo/started'])

    assert not add(2, 2) and not exgrpo.history  # 4 of 8
    assert add(3, 2) and not exgrpo.history  # it stores from the next step on
    assert add(1, 0) and list(exgrpo.history) == [0]
    assert exgrpo.history[0].size == 1


def test_a_solved_prompt_is_retired_before_the_start_too():
    exgrpo = make(start_above=0.1)
    solved = make_group(1, G, G, step=1)
    exgrpo.add(1, [solved], exgrpo.compose(1, [solved], [], rng_of(1), score))
    mixed = [make_group(1, 2, G, step=2), make_group(2, 2, G, step=2)]
    exgrpo.add(2, mixed, exgrpo.compose(2, mixed, [], rng_of(2), score))
    assert list(exgrpo.history) == [2]


def test_a_leading_success_is_not_stored_again():
    """The one stored success leads a group in the step in which a fresh group of its prompt pushes it out."""
    exgrpo = make(start_above=0.0, per_prompt=1)
    for step in (1, 2):
        groups = [drawn(1, 1, step, 0)]
        exgrpo.add(step, groups, exgrpo.compose(step, groups, [], rng_of(step), score))
    [begun], fresh = exgrpo.hard_prompts(3, rng_of(3)), drawn(1, 1, 3, 0)
    batch = exgrpo.compose(3, [fresh], [drawn(begun.prompt.id, 0, 3, 1)], rng_of(3), score)
    assert batch.origins == (X1, REPLAY) and batch.groups[1].correct == 1
    exgrpo.add(3, [fresh], batch)
    assert exgrpo.history[1].responses == fresh.responses[-1:] and exgrpo._latest[1] == (1, G)


def test_a_bucket_is_drawn_by_the_normal_density_of_its_count():
    """7 buckets of ample size, G = 8: the chance of k is proportional to exp(-(k - 4)² / 2)."""
    k = np.arange(1, 8)
    weight = np.exp(-((k - 4.0) ** 2) / 2)
    rng = np.random.default_rng(0)
    counts = sum(dealt(10, weight, np.full(7, 10), rng) for _ in range(2000))
    expected = 20_000 * weight / weight.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 22.5  # 6 degrees of freedom, p = 0.001


@pytest.mark.parametrize('seed', range(20))
def test_what_a_bucket_cannot_hold_is_dealt_to_those_with_room(seed):
    rng = np.random.default_rng(seed)
    sizes, weight = rng.integers(1, 6, 5), rng.random(5) + 1e-3
    for count in (0, int(sizes.sum()) // 2, int(sizes.sum())):
        counts = dealt(count, weight, sizes, rng)
        assert counts.sum() == count and (0 <= counts).all() and (counts <= sizes).all()


def test_prompts_of_medium_difficulty_are_asked_most():
    """One prompt asked of three with k = 1, 2 and 3 of 4: chances e^(-1/2), 1 and e^(-1/2)."""
    exgrpo = make(start_above=0.0, share=0.25, batch_groups=3)
    groups = [make_group(i, i, G, step=1) for i in (1, 2, 3)]
    for step in (1, 2):
        exgrpo.add(step, groups, exgrpo.compose(step, groups, [], rng_of(step), score))
    asked = [exgrpo.hard_prompts(3, rng_of(3, seed))[0].prompt.id for seed in range(1000)]
    weight = np.exp([-0.5, 0.0, -0.5])
    expected = 1000 * weight / weight.sum()
    assert ((np.bincount(asked)[1:] - expected) ** 2 / expected).sum() < 13.9  # 2 degrees of freedom, p = 0.001


def test_groups_so_large_that_densities_underflow_are_drawn_nearest_first():
    """G = 256: exp(-(k - 128)² / 2) is 0 in float64 for k = 1, 2 and 3. The nearest, k = 3, is certain, then any that is left."""
    exgrpo = make(start_above=0.0, share=0.25, batch_groups=3)
    groups = [make_group(i, i, 256, step=1) for i in (1, 2, 3)]
    for step in (1, 2):
        exgrpo.add(step, groups, exgrpo.compose(step, groups, [], rng_of(step), score))
    assert [b.prompt.id for b in exgrpo.hard_prompts(3, rng_of(3))] == [3]
    exgrpo = make(start_above=0.0, share=0.5, batch_groups=3)
    for step in (1, 2):
        exgrpo.add(step, groups, exgrpo.compose(step, groups, [], rng_of(step), score))
    assert sorted(b.prompt.id for b in exgrpo.hard_prompts(3, rng_of(3))) == [1, 2, 3]


@pytest.mark.parametrize('share, groups', [(0.0, 0), (0.25, 2), (0.5, 6), (0.75, 18)])
def test_the_share_is_of_all_groups(share, groups):
    assert led_groups(B, share) == groups and groups / (groups + B) == share


def test_the_most_likely_response_per_token_is_chosen_and_ties_go_to_the_oldest():
    def group(*rows):
        responses = [sampled(np.array(row, np.int32), np.zeros(len(row), np.float32), 'stop', 0) for row in rows]
        return graded(Prompt(1, 'countdown', np.arange(2, dtype=np.int32), {}), responses, right(len(rows), len(rows)))

    longer_is_likelier, tied = group([6], [1, 1, 1, 1, 1, 1, 1, 1]), group([2], [1, 3], [3, 1])
    for size in (1, 2, 4):  # of the pieces that are scored
        one, other = most_likely([longer_is_likelier, tied], size, score)
        assert one.responses == longer_is_likelier.responses[1:] and other.responses == tied.responses[:1]


def test_a_trace_is_a_new_response_with_its_log_probs_and_version():
    [response, *_] = make_group(1, 1, G, step=3).responses
    placeholder = dataclasses.replace(response.spans[0], author=Author.PLACEHOLDER)
    response = dataclasses.replace(response, spans=(*response.spans, placeholder))
    trace = as_trace(response)
    assert [s.author for s in trace.spans] == [Author.TRACE, Author.PLACEHOLDER] and response.spans[0].author == Author.POLICY
    assert trace.spans[0].version == 3 and trace.finish == response.finish
    np.testing.assert_array_equal(trace.logp, response.logp)
    assert len(trace.versions) == 0  # it is no response of a stale policy


@pytest.mark.parametrize('steps', [0, 2, 9])
def test_a_restored_memory_goes_on_bit_for_bit(steps):
    exgrpo, again = make(per_prompt=5), make(per_prompt=5)
    for step in range(1, steps + 1):
        step_of(exgrpo, step)
    for step in range(1, 5):
        step_of(again, step)  # what it held before is forgotten
    saved = exgrpo.state()
    assert all(a.size and a.dtype.kind in 'biuf' for a in saved.values())
    again.restore({name: a.copy() for name, a in saved.items()})
    assert_same_arrays(again.state(), saved)
    for step in range(steps + 1, steps + 12):
        (*_, a, _), (*_, b, _) = step_of(exgrpo, step), step_of(again, step)
        assert a.origins == b.origins and exgrpo.metrics(step) == again.metrics(step)
        assert_same_groups(a.groups, b.groups)
        assert_same_arrays(again.state(), exgrpo.state())
    assert max(g.size for g in exgrpo.history.values()) == 5
    with pytest.raises(ValueError, match=r'holds 5 responses, more than replay\.exgrpo\.per_prompt=4'):
        make(per_prompt=4).restore(exgrpo.state())
