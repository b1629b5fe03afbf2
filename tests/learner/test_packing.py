"""Mini-batches and packed rows: everything exactly once, in the right place."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from group_builders import graded, masked as with_others, right as first_right
from hypothesis import given, settings, strategies as st

from bapo_jax.groups import Author, Prompt, make_batch, sampled
from bapo_jax.learner.credit import AGGREGATIONS, advantages, token_weights, weights as credit_weights
from bapo_jax.learner.mini_batch import blank_rows
from bapo_jax.learner.packing import capacity, cut, first_fit, lay_out, mini_batches, pack, rows_end_to_end, rows_of_slots

LANES_OF_TESTS = ('x1', 'x2', 'x3', 'replay')


def make_group(prompt_id, prompt_length, lengths, right, masked=None):
    """Every token is another number above 0, so that none can be mistaken for another or for padding.

    `masked` draws loss masks that leave at least one token in: of every second response, the others have none.
    """
    start = 1 + 10_000 * prompt_id
    prompt = Prompt(prompt_id, 'countdown', np.arange(start, start + prompt_length, dtype=np.int32), {})
    responses = []
    for j, n in enumerate(lengths):
        tokens = start + 100 * (j + 1) + np.arange(n, dtype=np.int32)
        mask = None
        if masked is not None and j % 2:
            mask = masked.random(n) < 0.5
            mask[masked.integers(n)] = True
        response = sampled(tokens, -tokens.astype(np.float32) / 7, 'stop', 0)
        responses.append(response if mask is None else with_others(response, mask))
    return graded(prompt, responses, first_right(right, len(lengths)))


def one_part(groups, origins, *, row_tokens, rows):
    """All groups as one mini-batch, in their order."""
    config = SimpleNamespace(
        mini_batch_groups=len(groups), mini_batches='released', row_tokens=row_tokens, micro_batch_rows=rows
    )
    [part] = cut(make_batch(groups, origins), np.arange(len(groups)), config)
    return part


def packed(part, kind='group_std', aggregation='token_mean', roles=None):
    """The part's rows with the advantages and token weights that the learner gives it, over the tokens that are trained on."""
    weight = {'rl': credit_weights(part.batch, Author.POLICY, (), aggregation, 100)}
    return pack(part, LANES_OF_TESTS, advantages(part.batch, kind), weight, roles or {})


some_groups = st.lists(
    st.tuples(
        st.integers(1, 12), st.lists(st.integers(1, 20), min_size=4, max_size=4), st.integers(0, 4), st.sampled_from(LANES_OF_TESTS)
    ),
    min_size=1, max_size=6,
)  # fmt: skip


@given(st.integers(0, 300), st.integers(1, 70), st.sampled_from(['even', 'released']))
def test_every_group_is_in_one_mini_batch(groups, size, partial):
    parts = mini_batches(groups, size, partial)
    assert np.array_equal(np.concatenate([*parts, np.zeros(0, int)]), np.arange(groups))
    assert all(len(part) for part in parts)


@given(st.integers(1, 300), st.integers(1, 70))
def test_rebalanced_sizes_are_equal_within_one_and_near_the_size_asked_for(groups, size):
    sizes = [len(part) for part in mini_batches(groups, size, 'even')]
    assert max(sizes) - min(sizes) <= 1
    assert abs(len(sizes) - groups / size) <= 0.5 or len(sizes) == 1 and groups < size


@given(st.integers(1, 300), st.integers(1, 70))
def test_kept_sizes_are_full_but_for_the_last(groups, size):
    sizes = [len(part) for part in mini_batches(groups, size, 'released')]
    assert all(n == size for n in sizes[:-1]) and 1 <= sizes[-1] <= size


@pytest.mark.parametrize(
    'groups, partial, sizes',
    [
        (33, 'even', [17, 16]), (33, 'released', [16, 16, 1]), (32, 'even', [16, 16]), (32, 'released', [16, 16]),
        (40, 'even', [14, 13, 13]), (5, 'even', [5]), (5, 'released', [5]),
        (1, 'even', [1]), (1, 'released', [1]), (0, 'even', []), (0, 'released', []),
    ],
)  # fmt: skip
def test_mini_batches_of_sixteen(groups, partial, sizes):
    assert [len(part) for part in mini_batches(groups, 16, partial)] == sizes


def test_unknown_choices_are_errors_that_name_the_field():
    """Those of aggregation and advantage: test_config.py."""
    with pytest.raises(ValueError, match="learner.mini_batches='drop'.*even"):
        mini_batches(3, 2, 'drop')


@settings(deadline=None, max_examples=40)
@given(some_groups, st.integers(32, 70), st.integers(1, 3), st.sampled_from(sorted(AGGREGATIONS)), st.none() | st.integers(0, 99))
def test_packed_rows_hold_every_sequence_once_and_nothing_else(described, row_tokens, rows, aggregation, mask_seed):
    masked = None if mask_seed is None else np.random.default_rng(mask_seed)
    groups = [make_group(i, *d[:3], masked) for i, d in enumerate(described)]
    origins = [d[3] for d in described]
    part = one_part(groups, origins, row_tokens=row_tokens, rows=rows)
    scores = [[np.float32(r.logp * 2) for r in g.responses] for g in groups]
    result = packed(part, aggregation=aggregation, roles={'reference': scores})

    wanted = {}
    lengths = [int(r.trained_on.sum()) for g in groups for r in g.responses]
    weights = iter(token_weights(lengths, aggregation, 100))
    for group, origin, advantage in zip(groups, origins, advantages(part.batch, 'group_std'), strict=True):
        for response, a in zip(group.responses, advantage, strict=True):  # a: one number a token
            blank, on = [0] * len(group.prompt.tokens), response.trained_on
            tokens = (*group.prompt.tokens.tolist(), *response.tokens.tolist())
            wanted[tokens] = {
                'position': np.arange(len(tokens)),
                'behaviour': np.float32([*blank, *(response.logp * on)]),
                'advantage': np.float32([*blank, *(a * on)]),
                'weight': np.float32([*blank, *(next(weights) * on)]),
                'origin': np.int8([*blank, *((1 + LANES_OF_TESTS.index(origin)) * on)]),
                'reference': np.float32([*blank, *(2 * response.logp)]),
                'trained_on': np.array([*blank, *on], bool),
            }  # fmt: skip

    fields = {**result.sequences._asdict(), **result._asdict(), **result.roles, 'weight': result.weight['rl']}
    del fields['sequences'], fields['roles'], fields['factors']
    assert fields.pop('rope') is fields.pop('feature') is None  # no images
    M, R, T = result.sequences.tokens.shape
    assert (R, T) == (rows, row_tokens)
    assert all(array.shape == (M, R, T) for array in fields.values())
    seen = []
    for m, r in np.ndindex(M, R):
        row = {name: array[m, r] for name, array in fields.items()}
        count = row['segment'].max()
        ends = 0
        for segment in range(1, count + 1):
            at = np.flatnonzero(row['segment'] == segment)
            assert np.array_equal(at, np.arange(ends, ends + len(at)))  # contiguous, in order, from the left
            ends += len(at)
            tokens = tuple(row['tokens'][at].tolist())
            seen.append(tokens)
            want = dict(wanted[tokens])
            np.testing.assert_array_equal(row['response'][at], segment * want.pop('trained_on'))
            for name, values in want.items():
                np.testing.assert_array_equal(row[name][at], values, err_msg=name)
        for name, values in row.items():
            assert (values[ends:] == 0).all(), name
    assert sorted(seen) == sorted(wanted)
    filled = (result.sequences.segment > 0).any(axis=(1, 2))
    assert part.layout.filled == filled.sum() and filled[: filled.sum()].all()
    assert M == filled.sum()
    total = np.mean(lengths) / 100 if aggregation == 'seq_mean_token_sum' else 1
    assert result.weight['rl'].sum(dtype=np.float64) == pytest.approx(total, abs=1e-5)


def test_a_token_that_is_not_trained_on_is_read_and_nothing_else():
    """Masked: tokens 1 and 2 of the second response. They stay in the sequence; response, weight, advantage, behaviour are 0."""
    [group] = [make_group(0, 2, [3, 4], 1)]
    mask = np.array([True, False, False, True])
    responses = (group.responses[0], with_others(group.responses[1], mask))
    part = one_part([dataclasses.replace(group, responses=responses)], ['x2'], row_tokens=6, rows=1)
    result = packed(part)
    m = int(np.flatnonzero(result.sequences.tokens[:, 0, 2] == responses[1].tokens[0])[0])
    row = {name: array[m, 0].tolist() for name, array in {**result.sequences._asdict(), **result._asdict(), 'weight': result.weight['rl']}.items()
           if name not in ('sequences', 'roles', 'factors') and array is not None}  # fmt: skip
    assert row['tokens'] == [*group.prompt.tokens.tolist(), *responses[1].tokens.tolist()]
    assert row['segment'] == [1] * 6 and row['position'] == list(range(6))
    assert row['response'] == [0, 0, 1, 0, 0, 1]
    assert row['origin'] == [0, 0, 2, 0, 0, 2]
    for name in ('weight', 'advantage', 'behaviour'):
        assert [x != 0 for x in row[name]] == [False, False, True, False, False, True], name
    assert row['weight'][2] == pytest.approx(1 / 5)  # 3 tokens of the first response, 2 of this one


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(20, 40), st.integers(1, 3), st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_pick_is_the_inverse_of_place(lengths, row_tokens, rows, seed):
    layout = lay_out(rows_end_to_end(lengths, row_tokens), row_tokens=row_tokens, rows=rows)
    rng = np.random.default_rng(seed)
    for dtype in (np.float32, np.int8, bool):
        values = [rng.integers(0, 2 if dtype is bool else 100, n).astype(dtype) for n in lengths]
        placed = layout.place(values)
        assert placed.dtype == dtype and placed.shape == layout.segment.shape
        assert not placed[layout.segment == 0].any()
        back = layout.pick(placed, lengths)
        assert [x.dtype for x in back] == [np.dtype(dtype)] * len(lengths)
        for x, y in zip(back, values, strict=True):
            np.testing.assert_array_equal(x, y)
    anywhere = rng.standard_normal(layout.segment.shape)
    again = layout.place(layout.pick(anywhere, lengths))
    np.testing.assert_array_equal(again, np.where(layout.segment > 0, anywhere, 0))  # what lies on padding does not come along


@given(some_groups, st.integers(0, 99))
@settings(deadline=None, max_examples=20)
def test_scores_come_back_by_group_and_response(described, seed):
    groups, rng = [make_group(i, *d[:3]) for i, d in enumerate(described)], np.random.default_rng(seed)
    part = one_part(groups, ['x1'] * len(groups), row_tokens=40, rows=2)
    values = [[rng.standard_normal(len(r.tokens), dtype=np.float32) for r in g.responses] for g in groups]
    back = part.of_responses(part.on_responses(values, np.float32))
    assert [len(of_group) for of_group in back] == [4] * len(groups)
    jax.tree.map(np.testing.assert_array_equal, back, values)


def test_short_sequences_share_a_row():
    layout = lay_out(rows_end_to_end([4, 4, 6, 8], 12), row_tokens=12, rows=2)  # 22 tokens in rows of 12
    assert layout.segment.shape == (1, 2, 12)
    assert layout.segment.max() == 2


def test_a_row_has_no_more_sequences_than_the_kernel_takes():
    rows = rows_end_to_end([2] * 7, 12, 3)
    assert [row.segment.max() for row in rows] == [3, 3, 1]
    assert sorted(np.concatenate([row.token[row.segment > 0] for row in rows])) == list(range(14))


def test_a_sequence_that_does_not_fit_is_an_error_that_names_the_field():
    lengths = [8, 8, 8, 13]
    rows_end_to_end(lengths, 13)
    with pytest.raises(ValueError, match='13 tokens.*learner.row_tokens=12'):
        rows_end_to_end(lengths, 12)


def test_a_batch_is_cut_in_the_order_given_with_origins_of_its_own():
    groups = [make_group(i, 3, [1, 2, 3, 4], 2) for i in range(5)]
    batch = make_batch(groups, ('x1', 'x2', 'x3', 'x1', 'x2'))
    config = SimpleNamespace(mini_batch_groups=2, mini_batches='released', row_tokens=16, micro_batch_rows=2)

    parts = cut(batch, np.array([4, 0, 2, 3, 1]), config)
    found = []
    for part in parts:
        rows = packed(part)
        assert rows.weight['rl'].sum(dtype=np.float64) == pytest.approx(1, abs=1e-6)
        ids = (rows.sequences.tokens - 1) // 10_000
        of = {int(i): LANES_OF_TESTS[o - 1] for i, o in zip(ids[rows.origin > 0], rows.origin[rows.origin > 0])}
        assert all(batch.origins[i] == origin for i, origin in of.items())
        assert set(of) == set(part.indices.tolist())
        found.append(set(of))
    assert found == [{4, 0}, {2, 3}, {1}]
    assert [part.indices.tolist() for part in parts] == [[4, 0], [2, 3], [1]]


@pytest.mark.parametrize('aggregation', AGGREGATIONS)
def test_a_group_without_variance_has_advantage_exactly_zero(aggregation):
    groups = [make_group(0, 2, [3, 4, 5, 6], 4), make_group(1, 2, [3, 4, 5, 6], 0), make_group(2, 2, [3, 4, 5, 6], 1)]
    rows = packed(one_part(groups, ['x1'] * 3, row_tokens=16, rows=2), 'paper_eq2', aggregation)
    varied = (rows.sequences.tokens - 1) // 10_000 == 2
    assert (rows.advantage[~varied] == 0).all()
    assert (rows.advantage[varied & (rows.origin > 0)] != 0).all()


def test_blank_rows_have_the_shapes_and_dtypes_of_packed_ones():
    """Other hosts give them in place of what host 0 packs."""
    part = one_part([make_group(0, 2, [3, 4], 1)], ['x1'], row_tokens=16, rows=2)
    rows = packed(part, roles={'proximal': [[np.zeros(n, np.float32) for n in (3, 4)]]})
    blank = blank_rows(rows.origin.shape, roles=['proximal'])
    assert jax.tree.structure(blank) == jax.tree.structure(rows)
    for a, b in zip(jax.tree.leaves(blank), jax.tree.leaves(rows), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype) and not a.any()


# ---- rows of one prompt and slots of its responses

grouped_lengths = st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=7)), min_size=1, max_size=5)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(9, 20))
def test_first_fit_puts_everything_somewhere_once_and_opens_no_bin_too_many(lengths, size):
    bins = first_fit(lengths, size)
    assert sorted(j for of_bin in bins for j in of_bin) == list(range(len(lengths)))
    filled = [sum(lengths[j] for j in of_bin) for of_bin in bins]
    assert max(filled) <= size
    assert all(filled[b] + lengths[of_bin[0]] > size for i, of_bin in enumerate(bins) for b in range(i))


@given(grouped_lengths, st.integers(9, 12), st.integers(1, 4), st.integers(1, 3))
def test_a_row_of_slots_holds_one_prompt_and_every_response_once(groups, slot, slots, rows):
    row_tokens = 6 + slots * slot
    layout = lay_out(rows_of_slots(groups, shared=6, slot=slot, row_tokens=row_tokens), row_tokens=row_tokens, rows=rows)
    ends = np.cumsum([p + n for p, lengths in groups for n in lengths])
    starts, seen = ends - [p + n for p, lengths in groups for n in lengths], []
    for segment, position, token in zip(*(x.reshape(-1, row_tokens) for x in layout[:3]), strict=True):
        if not segment.any():
            continue
        there = segment[:6] > 0
        first = np.searchsorted(starts, token[0], 'right') - 1  # the sequence that the prompt's tokens are of
        group = next(g for g in range(len(groups)) if first < sum(len(n) for _, n in groups[: g + 1]))
        prompt = groups[group][0]
        assert there.sum() == prompt and there[:prompt].all()
        np.testing.assert_array_equal(token[:prompt], starts[first] + np.arange(prompt))
        np.testing.assert_array_equal(position[:prompt], np.arange(prompt))
        for number in range(2, segment.max() + 1):
            at = np.flatnonzero(segment == number)
            assert (np.diff(at) == 1).all() and len(set((at - 6) // slot)) == 1  # in one piece, in one slot
            j = np.searchsorted(starts, token[at[0]], 'right') - 1
            np.testing.assert_array_equal(token[at], np.arange(starts[j] + prompt, ends[j]))
            np.testing.assert_array_equal(position[at], prompt + np.arange(len(at)))
            seen.append(j)
    assert sorted(seen) == list(range(len(ends)))


def test_a_prompt_or_response_that_does_not_fit_is_an_error_that_names_the_field():
    with pytest.raises(ValueError, match='prompt of 7 tokens.*rollout.max_prompt_tokens=6'):
        rows_of_slots([(7, [3])], shared=6, slot=9, row_tokens=15)
    with pytest.raises(ValueError, match='response of 10 tokens.*learner.slot_tokens=9'):
        rows_of_slots([(5, [3, 10])], shared=6, slot=9, row_tokens=15)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.sampled_from(['released', 'even']), st.sampled_from([0, 6]))
@settings(deadline=None, max_examples=40)
def test_every_mini_batch_has_the_capacity_and_fits_it(groups, mini, rows, rule, shared):
    """Responses of the greatest length, so none shares a row or slot."""
    config = SimpleNamespace(
        mini_batch_groups=mini, batch_groups=9, mini_batches=rule, micro_batch_rows=rows, slot_tokens=9 if shared else 0,
        row_tokens=24 if shared else 15,
    )  # fmt: skip
    batch = make_batch([make_group(i, 6, [9] * 3, 1) for i in range(groups)], ['x1'] * groups)
    most = capacity(config, 3, shared)
    for part in cut(batch, np.arange(groups), config, most, shared):
        assert part.layout.segment.shape[0] == most and part.layout.filled <= most


@pytest.mark.parametrize('shared', [0, 6])
def test_a_mini_batch_above_the_capacity_has_whole_further_arrays(shared):
    """As with demonstrations beside a batch that is one mini-batch: a second compiled program, and the same tokens."""
    config = SimpleNamespace(
        mini_batch_groups=8, batch_groups=8, mini_batches='even', micro_batch_rows=4, slot_tokens=9 if shared else 0,
        row_tokens=24 if shared else 15,
    )  # fmt: skip
    groups = [make_group(i, 6, [9] * 4, 1) for i in range(8)] + [make_group(8 + i, 6, [9], 1) for i in range(3)]
    most = capacity(config, 4, shared)
    [part] = cut(make_batch(groups, ['x1'] * 8 + ['demonstrations'] * 3), np.arange(11), config, most, shared)
    assert part.layout.filled == most + 1 and part.layout.segment.shape[0] == 2 * most
    given, tokens = [[r.tokens for r in g.responses] for g in groups], part.sequences().tokens
    for of_group, packed_group in zip(given, part.of_responses(tokens), strict=True):
        for want, got in zip(of_group, packed_group, strict=True):
            np.testing.assert_array_equal(got, want)
