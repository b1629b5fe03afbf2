"""Mini-batches and packed rows: everything exactly once, in the right place."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bapo_jax.groups import Batch, Group, Prompt, Response, Verdict
from bapo_jax.learner.advantages import group_advantage
from bapo_jax.learner.packing import AGGREGATIONS, SOURCES, mini_batches, micro_batches, pack, pack_batch, token_weights


def make_group(prompt_id, prompt_length, lengths, right):
    """Every token is another number above 0, so that none can be mistaken for another or for padding."""
    start = 1 + 10_000 * prompt_id
    prompt = Prompt(prompt_id, 'countdown', np.arange(start, start + prompt_length, dtype=np.int32), {})
    responses = []
    for j, n in enumerate(lengths):
        tokens = start + 100 * (j + 1) + np.arange(n, dtype=np.int32)
        responses.append(Response(tokens, -tokens.astype(np.float32) / 7, 'stop', 0))
    verdicts = [Verdict.CORRECT if j < right else Verdict.WRONG for j in range(len(lengths))]
    return Group(prompt, tuple(responses), tuple(verdicts), 0)


some_groups = st.lists(
    st.tuples(
        st.integers(1, 12), st.lists(st.integers(1, 20), min_size=4, max_size=4), st.integers(0, 4), st.sampled_from(SOURCES)
    ),
    min_size=1, max_size=6,
)  # fmt: skip


@given(st.integers(0, 300), st.integers(1, 70), st.sampled_from(['rebalance', 'keep']))
def test_every_group_is_in_one_mini_batch(groups, size, partial):
    parts = mini_batches(groups, size, partial)
    assert np.array_equal(np.concatenate([*parts, np.zeros(0, int)]), np.arange(groups))
    assert all(len(part) for part in parts)


@given(st.integers(1, 300), st.integers(1, 70))
def test_rebalanced_sizes_are_equal_within_one_and_near_the_size_asked_for(groups, size):
    sizes = [len(part) for part in mini_batches(groups, size, 'rebalance')]
    assert max(sizes) - min(sizes) <= 1
    assert abs(len(sizes) - groups / size) <= 0.5 or len(sizes) == 1 and groups < size


@given(st.integers(1, 300), st.integers(1, 70))
def test_kept_sizes_are_full_but_for_the_last(groups, size):
    sizes = [len(part) for part in mini_batches(groups, size, 'keep')]
    assert all(n == size for n in sizes[:-1]) and 1 <= sizes[-1] <= size


@pytest.mark.parametrize(
    'groups, partial, sizes',
    [
        (33, 'rebalance', [17, 16]), (33, 'keep', [16, 16, 1]), (32, 'rebalance', [16, 16]), (32, 'keep', [16, 16]),
        (40, 'rebalance', [14, 13, 13]), (5, 'rebalance', [5]), (5, 'keep', [5]),
        (1, 'rebalance', [1]), (1, 'keep', [1]), (0, 'rebalance', []), (0, 'keep', []),
    ],
)  # fmt: skip
def test_mini_batches_of_sixteen(groups, partial, sizes):
    assert [len(part) for part in mini_batches(groups, 16, partial)] == sizes


def test_unknown_choices_are_errors_that_name_the_field():
    with pytest.raises(ValueError, match="learner.partial_mini_batch='drop'.*rebalance"):
        mini_batches(3, 2, 'drop')
    with pytest.raises(ValueError, match="learner.aggregation='sum'.*token_mean"):
        token_weights(np.array([1, 2]), 'sum')


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=64), st.sampled_from(AGGREGATIONS))
def test_the_weights_of_all_tokens_sum_to_one(lengths, aggregation):
    lengths = np.array(lengths)
    weights = token_weights(lengths, aggregation)
    assert weights.shape == lengths.shape and weights.dtype == np.float32
    assert (weights.astype(np.float64) * lengths).sum() == pytest.approx(1, abs=1e-6)


def test_token_weights_by_hand():
    np.testing.assert_allclose(token_weights(np.array([1, 3]), 'token_mean'), [1 / 4, 1 / 4], rtol=1e-6)
    np.testing.assert_allclose(token_weights(np.array([1, 3]), 'seq_mean_token_mean'), [1 / 2, 1 / 6], rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(some_groups, st.integers(32, 70), st.integers(1, 3), st.sampled_from(AGGREGATIONS))
def test_packed_rows_hold_every_sequence_once_and_nothing_else(described, row_tokens, rows, aggregation):
    groups = [make_group(i, *d[:3]) for i, d in enumerate(described)]
    sources = [d[3] for d in described]
    packed = pack(groups, sources, row_tokens=row_tokens, rows=rows, aggregation=aggregation, advantage='group_std')

    wanted = {}
    lengths = np.array([len(r.tokens) for g in groups for r in g.responses])
    weights = iter(token_weights(lengths, aggregation))
    for group, source in zip(groups, sources, strict=True):
        for response, advantage in zip(group.responses, group_advantage(group.rewards[None], 'group_std')[0], strict=True):
            blank, n = [0] * len(group.prompt.tokens), len(response.tokens)
            tokens = (*group.prompt.tokens.tolist(), *response.tokens.tolist())
            wanted[tokens] = {
                'position': np.arange(len(tokens)),
                'behaviour_logp': np.float32([*blank, *response.logp]),
                'advantage': np.float32([*blank, *[advantage] * n]),
                'weight': np.float32([*blank, *[next(weights)] * n]),
                'source': np.int8([*blank, *[1 + SOURCES.index(source)] * n]),
            }  # fmt: skip

    M, R, T = packed.tokens.shape
    assert (R, T) == (rows, row_tokens)
    assert M & (M - 1) == 0
    assert all(array.shape == (M, R, T) for array in packed)
    seen = []
    for m, r in np.ndindex(M, R):
        row = {name: array[m, r] for name, array in packed._asdict().items()}
        count = row['segment'].max()
        ends = 0
        for segment in range(1, count + 1):
            at = np.flatnonzero(row['segment'] == segment)
            assert np.array_equal(at, np.arange(ends, ends + len(at)))  # contiguous, in order, from the left
            ends += len(at)
            tokens = tuple(row['tokens'][at].tolist())
            seen.append(tokens)
            for name, values in wanted[tokens].items():
                np.testing.assert_array_equal(row[name][at], values, err_msg=name)
        for name, values in row.items():
            assert (values[ends:] == 0).all(), name
    assert sorted(seen) == sorted(wanted)
    filled = (packed.segment > 0).any(axis=(1, 2))
    assert micro_batches(packed) == filled.sum() and filled[: filled.sum()].all()
    assert M < 2 * filled.sum()
    assert packed.weight.sum(dtype=np.float64) == pytest.approx(1, abs=1e-5)


def test_short_sequences_share_a_row():
    groups = [make_group(0, 2, [2, 2, 4, 6], 1)]  # sequences of 4, 4, 6 and 8 tokens: 22 in rows of 12
    packed = pack(groups, ['x1'], row_tokens=12, rows=2, aggregation='token_mean', advantage='group_std')
    assert packed.segment.shape == (1, 2, 12)
    assert packed.segment.max() == 2


def test_a_sequence_that_does_not_fit_is_an_error_that_names_the_field():
    groups = [make_group(0, 5, [3, 3, 3, 8], 1)]
    pack(groups, ['x1'], row_tokens=13, rows=1, aggregation='token_mean', advantage='group_std')
    with pytest.raises(ValueError, match='13 tokens.*learner.row_tokens=12'):
        pack(groups, ['x1'], row_tokens=12, rows=1, aggregation='token_mean', advantage='group_std')


def test_a_batch_is_packed_in_the_order_given_with_sources_of_its_own():
    groups = [make_group(i, 3, [1, 2, 3, 4], 2) for i in range(5)]
    batch = Batch(tuple(groups), ('x1', 'x2', 'x3', 'x1', 'x2'))

    @dataclasses.dataclass
    class Config:
        mini_batch_groups: int = 2
        partial_mini_batch: str = 'keep'
        row_tokens: int = 16
        micro_batch_rows: int = 2
        aggregation: str = 'token_mean'
        advantage: str = 'group_std'

    parts = pack_batch(batch, np.array([4, 0, 2, 3, 1]), Config())
    found = []
    for part in parts:
        assert part.weight.sum(dtype=np.float64) == pytest.approx(1, abs=1e-6)
        ids = (part.tokens - 1) // 10_000
        of = {int(i): SOURCES[s - 1] for i, s in zip(ids[part.source > 0], part.source[part.source > 0])}
        assert all(batch.sources[i] == source for i, source in of.items())
        found.append(set(of))
    assert found == [{4, 0}, {2, 3}, {1}]


@pytest.mark.parametrize('aggregation', AGGREGATIONS)
def test_a_group_without_variance_has_advantage_exactly_zero(aggregation):
    groups = [make_group(0, 2, [3, 4, 5, 6], 4), make_group(1, 2, [3, 4, 5, 6], 0), make_group(2, 2, [3, 4, 5, 6], 1)]
    packed = pack(groups, ['x1'] * 3, row_tokens=16, rows=2, aggregation=aggregation, advantage='paper_eq2')
    varied = (packed.tokens - 1) // 10_000 == 2
    assert (packed.advantage[~varied] == 0).all()
    assert (packed.advantage[varied & (packed.source > 0)] != 0).all()
