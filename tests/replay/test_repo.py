"""RePO: each way to retrieve against all subsets, histories that are first in first out, and what a batch is composed of."""

from collections import deque
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from group_builders import masked
from hypothesis import given, settings, strategies as st
from ml_collections import ConfigDict

from bapo_jax.groups import X1, Group, Prompt, Verdict, sampled
from bapo_jax.learner.credit import ADVANTAGES, group_advantages, token_weights
from bapo_jax.replay.arrays import groups_to_arrays
from bapo_jax.replay.repo import REPLAY, RETRIEVE, Repo


def make(retrieve='recent', per_prompt=16, normalisation='split', batch_groups=8) -> Repo:
    fields = {'retrieve': retrieve, 'per_prompt': per_prompt, 'normalisation': normalisation}
    return Repo(ConfigDict({'repo': fields}), batch_groups)


def group(prompt_id: int, step: int, rewards, infra=False) -> Group:
    """A group whose tokens are drawn from (prompt, step). A reward of 1 is correct; some first tokens are of another author."""
    rng = np.random.default_rng([prompt_id, step])
    responses = []
    for i in range(len(rewards)):
        n = int(rng.integers(1, 6))
        mask = np.arange(n) > 0 if n > 1 and i % 3 == 0 else None
        tokens, logp = rng.integers(0, 99, n).astype(np.int32), -rng.random(n, np.float32)
        response = sampled(tokens, logp, ('stop', 'length')[i % 2], step - 1)
        responses.append(response if mask is None else masked(response, mask))
    verdicts = [Verdict.CORRECT if r == 1 else Verdict.WRONG for r in rewards]
    rewards = np.array(rewards, np.float32)
    if infra:
        verdicts[-1], rewards[-1] = Verdict.INFRA_ERROR, np.nan
    prompt = Prompt(prompt_id, 'countdown', np.arange(1 + prompt_id % 3, dtype=np.int32), {'target': prompt_id})
    return Group(prompt, tuple(responses), tuple(verdicts), rewards, step, tuple(f'{step}, {i}' for i in range(len(verdicts))))


def no_rng(purpose):
    raise AssertionError('RePO draws nothing')


def no_score(batch):
    raise AssertionError('RePO scores nothing here')


def step_of(repo: Repo, step: int, fresh):
    assert repo.hard_prompts(step, no_rng) == []
    batch = repo.compose(step, fresh, [], no_rng, no_score)
    repo.add(step, fresh, batch)
    return batch


def binary(prompt_id: int, step: int, G: int = 8) -> list[float]:
    return np.random.default_rng([7, prompt_id, step]).integers(0, 2, G).astype(float).tolist()


# ---- which responses are retrieved

LEVELS = [st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5, 1.0, -1.0]), st.floats(-10, 10, width=32)]
some_rewards = st.sampled_from(LEVELS).flatmap(lambda level: st.lists(level, min_size=1, max_size=9))
retrieval = some_rewards.flatmap(lambda rewards: st.tuples(st.just(rewards), st.integers(1, len(rewards))))


def first_best(rewards, count, worth):
    """The authors' loop: of all subsets in lexicographic order, the first whose worth no other exceeds. Rewards are exact."""
    exact, best = [Fraction(float(np.float32(r))) for r in rewards], None
    for subset in combinations(range(len(rewards)), count):
        value = worth([exact[i] for i in subset])
        if best is None or value > best[0]:
            best = value, subset
    return list(best[1])


def variance_then_sum(x):
    mean = sum(x) / Fraction(len(x))
    return sum((value - mean) ** 2 for value in x) / len(x), sum(x)


@settings(max_examples=300, deadline=None)
@given(retrieval)
def test_variance_takes_the_subset_that_no_other_exceeds(drawn):
    rewards, count = drawn
    assert RETRIEVE['variance'](np.array(rewards, np.float32), count) == first_best(rewards, count, variance_then_sum)


@settings(max_examples=200, deadline=None)
@given(retrieval)
def test_reward_takes_the_subset_of_the_largest_sum(drawn):
    rewards, count = drawn
    assert RETRIEVE['reward'](np.array(rewards, np.float32), count) == first_best(rewards, count, sum)


@given(retrieval)
def test_recent_and_all(drawn):
    rewards, count = drawn
    newest = list(deque(range(len(rewards)), maxlen=count))
    assert RETRIEVE['recent'](rewards, count) == newest
    assert RETRIEVE['all'](rewards, count) == list(range(len(rewards)))


def test_variance_of_binary_rewards_is_as_even_as_can_be():
    # Of 16 rewards with 3, 12 and 8 right ones: all three, then four of eight, then four of seven since ties go to the larger sum.
    assert sum(np.float32([1] * 3 + [0] * 13)[RETRIEVE['variance']([1] * 3 + [0] * 13, 8)]) == 3
    assert sum(np.float32([1] * 12 + [0] * 4)[RETRIEVE['variance']([1] * 12 + [0] * 4, 8)]) == 4
    assert sum(np.float32([0, 1] * 8)[RETRIEVE['variance']([0, 1] * 8, 7)]) == 4
    assert RETRIEVE['variance']([1.0] * 16, 8) == list(range(8))


# ---- histories

visits = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.booleans()), max_size=25)


@settings(max_examples=100, deadline=None)
@given(visits, st.integers(1, 9))
def test_a_history_is_the_last_responses_of_its_prompt(history, capacity):
    repo, expected = make('all', per_prompt=capacity), {}
    for step, (prompt_id, G, infra) in enumerate(history, 1):
        g = group(prompt_id, step, binary(prompt_id, step, G), infra)
        step_of(repo, step, [g])
        if not infra:
            expected.setdefault(prompt_id, deque(maxlen=capacity)).extend(zip(g.responses, g.verdicts, g.answers, g.rewards.tolist()))
    nbytes = sum(4 * (len(r.tokens) + int(r.trained_on.sum())) for queue in expected.values() for r, *_ in queue)
    assert repo.metrics(len(history)) == {
        'buffer/repo/prompts': len(expected),
        'buffer/repo/responses': sum(map(len, expected.values())),
        'buffer/repo/bytes': nbytes + sum(4 * (1 + prompt_id % 3) for prompt_id in expected),
    }
    batch = repo.compose(99, [group(i, 99, [0, 1]) for i in range(4)], [], no_rng, no_score)
    full = [i for i in range(4) if len(expected.get(i, ())) == capacity]
    assert [g.prompt.id for g in batch.of_origin(REPLAY)] == full
    for g in batch.of_origin(REPLAY):
        queue = list(expected[g.prompt.id])
        assert [id(r) for r in g.responses] == [id(r) for r, *_ in queue]  # the very objects: versions, log-probs, masks, authors
        assert list(g.verdicts) == [v for _, v, *_ in queue] and list(g.answers) == [a for *_, a, _ in queue]
        assert g.rewards.tolist() == [r for *_, r in queue]
        assert g.rewards.dtype == np.float32


@pytest.mark.parametrize('retrieve', RETRIEVE)
def test_the_first_replay_is_at_the_third_visit_and_never_of_the_steps_own_responses(retrieve):
    repo = make(retrieve)
    for step in range(1, 8):
        fresh = [group(i, step, binary(i, step)) for i in range(3)]
        batch = step_of(repo, step, fresh)
        replayed = batch.of_origin(REPLAY)
        assert batch.groups[:3] == tuple(fresh) and batch.origins == (X1,) * 3 + (REPLAY,) * len(replayed)
        assert [g.prompt.id for g in replayed] == ([0, 1, 2] if step >= 3 else [])
        own = {id(r) for g in fresh for r in g.responses}
        for g in replayed:
            assert not own & {id(r) for r in g.responses}
            assert {v for r in g.responses for v in r.versions.tolist()} <= {step - 2, step - 3}
            assert g.step == step - 1  # of its newest visit
            assert g.size == (16 if retrieve == 'all' else 8)


def test_a_group_with_an_infrastructure_error_neither_enters_nor_counts_as_a_visit():
    repo = make()
    for step in (1, 2, 3, 4):
        fresh = [group(0, step, binary(0, step), infra=step == 2), group(1, step, binary(1, step), infra=step >= 3)]
        batch = step_of(repo, step, fresh)
        assert [g.prompt.id for g in batch.of_origin(X1)] == {1: [0, 1], 2: [1], 3: [0], 4: [0]}[step]
        # Prompt 1 has a full history from step 3 on, but nothing fresh for it to stand beside.
        assert [g.prompt.id for g in batch.of_origin(REPLAY)] == ([0] if step == 4 else [])
        assert not any(g.infra_error for g in batch.groups)
    assert {v for r in batch.of_origin(REPLAY)[0].responses for v in r.versions.tolist()} == {2}  # the newest eight: those of step 3


def test_a_batch_may_hold_twice_the_fresh_groups_but_no_more_fresh_ones_than_b():
    repo = make(batch_groups=3)
    for step in (1, 2, 3):
        batch = step_of(repo, step, [group(i, step, binary(i, step)) for i in range(3)])
    assert len(batch.groups) == 6
    with pytest.raises(ValueError, match=r'4 fresh groups of step 4 exceed learner\.batch_groups=3; pass fewer'):
        repo.compose(4, [group(i, 4, [0, 1]) for i in range(4)], [], no_rng, no_score)


# ---- normalisation and weights


@pytest.mark.parametrize('normalisation', ['split', 'mixed'])
@pytest.mark.parametrize('retrieve', RETRIEVE)
def test_split_normalises_each_group_and_mixed_both_of_a_prompt(normalisation, retrieve):
    repo = make(retrieve, normalisation=normalisation)
    for step in (1, 2):
        step_of(repo, step, [group(i, step, binary(i, step)) for i in (4, 2)])
    fresh = [group(i, 3, binary(i, 3)) for i in (1, 2, 3, 4)]  # 1 and 3 have no history
    batch = repo.compose(3, fresh, [], no_rng, no_score)
    assert [g.prompt.id for g in batch.groups] == [1, 2, 3, 4, 2, 4]
    assert [len(n) for n in batch.normalisation] == [g.size for g in batch.groups]
    assert {n.dtype for n in batch.normalisation} == {np.dtype(np.int32)}
    together = [[0], [1], [2], [3], [4], [5]] if normalisation == 'split' else [[0], [1, 4], [2], [3, 5]]
    for kind, function in ADVANTAGES.items():
        found = group_advantages(batch, kind)
        for members in together:
            rewards = np.concatenate([batch.groups[i].rewards for i in members]).astype(np.float64)
            expected = function(rewards) if np.ptp(rewards) else np.zeros_like(rewards)
            np.testing.assert_array_equal(np.concatenate([found[i] for i in members]), expected.astype(np.float32))


def test_the_sequence_mean_over_a_batch_divides_both_terms_by_all_responses():
    """Beside the authors' loss: each term is the mean over all rows, the other's counted as zeros, and the terms are added."""
    repo = make()
    for step in (1, 2, 3):
        batch = step_of(repo, step, [group(i, step, binary(i, step)) for i in range(2)])
    responses = [r for g in batch.groups for r in g.responses]
    online = np.repeat([o == X1 for o in batch.origins], 8)
    loss = [np.random.default_rng(i).standard_normal(len(r.tokens)) for i, r in enumerate(responses)]
    means = np.array([x.mean() for x in loss])
    weight = token_weights([len(x) for x in loss], 'seq_mean_token_mean', 16)
    assert np.isclose(sum(w * x.sum() for w, x in zip(weight, loss)), np.mean(means * online) + np.mean(means * ~online), rtol=1e-6)


# ---- checkpoints


def same(a, b) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize('steps', [0, 1, 2, 5])
@pytest.mark.parametrize('retrieve', RETRIEVE)
def test_a_restored_history_goes_on_bit_for_bit(steps, retrieve):
    def fresh(step):
        return [group(i, step, np.random.default_rng([i, step]).random(8).tolist(), infra=i == step) for i in range(step % 3, 5)]

    repo, again = make(retrieve), make(retrieve)
    for step in range(1, steps + 1):
        step_of(repo, step, fresh(step))
    step_of(again, 1, [group(9, 1, binary(9, 1))])  # what it held before is forgotten
    saved = repo.state()
    assert all(a.size for a in saved.values())
    again.restore({name: a.copy() for name, a in saved.items()})
    same(again.state(), saved)
    assert again.metrics(steps) == repo.metrics(steps)
    for step in range(steps + 1, steps + 7):
        a, b = step_of(repo, step, fresh(step)), step_of(again, step, fresh(step))
        assert a.origins == b.origins
        same(groups_to_arrays(a.groups), groups_to_arrays(b.groups))
        for x, y in zip(a.normalisation, b.normalisation, strict=True):
            np.testing.assert_array_equal(x, y)
    same(again.state(), repo.state())


def test_a_history_longer_than_per_prompt_is_refused():
    repo = make(per_prompt=16)
    for step in (1, 2):
        step_of(repo, step, [group(0, step, binary(0, step))])
    with pytest.raises(ValueError, match=r'16 responses, more than replay\.repo\.per_prompt=8'):
        make(per_prompt=8).restore(repo.state())
