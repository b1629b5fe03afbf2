"""What the in-process engine sets aside: room for what waits, in few sizes, within its share of memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from bapo_jax.models import hf
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.experts import Routing
from bapo_jax.models.rotary import Rotation
from bapo_jax.rollout.inprocess.decoding import decode, empty_cache, prefill, unstacked
from bapo_jax.rollout.inprocess.room import SMALL_CACHE, Limits, Room, bytes_of_a_layer, bytes_of_a_token, memory_of, room_for

# Qwen2.5-0.5B: 24 layers, two heads of 64 for keys and values. 24,576 bytes a token in float32.
QWEN = ModelConfig('qwen2', 151_936, 896, 4864, 24, 14, 2, 64, Rotation(1e6), 1e-6, True)
LIMITS = Limits(256, 1024)
# 16 experts, of which a token chooses four.
EXPERTS = ModelConfig('qwen3_moe', 1024, 256, 128, 2, 8, 2, 32, Rotation(1e4), 1e-6, True, routing=Routing(16, 4, True))


def room(groups, longest, size=8, limits=LIMITS, model=QWEN, tokens=384):
    return room_for(model, limits, groups, size, longest, tokens)


def test_a_token_has_a_key_and_a_value_in_each_layer():
    assert bytes_of_a_token(QWEN) == 2 * 24 * 2 * 64 * 4
    assert bytes_of_a_token(dataclasses.replace(QWEN, dtype='bfloat16')) == 2 * 24 * 2 * 64 * 2
    assert Room(4, 2, 128, 512, 2).cache_bytes(QWEN) == (4 * 512 + 2 * 128) * bytes_of_a_token(QWEN)


@pytest.mark.parametrize('groups, slots', [(1, 16), (2, 16), (3, 64), (8, 64), (9, 256), (500, 256)])
def test_slots_are_all_or_a_quarter_or_a_sixteenth(groups, slots):
    """The fewest of these that hold what waits; one group of eight leaves half of sixteen empty, and four would not hold it."""
    assert room(groups, 1024).slots == slots


@pytest.mark.parametrize('heads, prompt_tokens, of, slots', [(14, 40, 256, 16), (9, 28, 128, 32), (9, 84, 128, 8), (2, 28, 256, 64), (1, 4, 200, 200)])
def test_slots_are_never_so_few_that_a_response_loses_its_bits(heads, prompt_tokens, of, slots):
    """A block has at least 4,096 scores, of all slots and heads; 12 tokens of a response join those of the prompt."""
    model, limits = dataclasses.replace(QWEN, num_layers=2000, num_heads=heads), Limits(of, prompt_tokens)  # caches above SMALL
    assert room(1, 3, limits=limits, model=model, tokens=12).slots == slots
    assert slots == of or slots * heads * (prompt_tokens + 12) >= 4096


@pytest.mark.parametrize('longest, prompt_tokens, key_slots', [(3, 128, 512), (128, 128, 512), (129, 256, 768), (900, 1024, 1536)])
def test_prompts_and_keys_are_as_long_as_what_waits(longest, prompt_tokens, key_slots):
    assert room(9, longest)[2:4] == (prompt_tokens, key_slots)


def test_as_many_prompts_are_read_at_once_whatever_waits():
    """A product of fewer rows would round otherwise."""
    assert {room(groups, 1024).at_once for groups in (1, 9, 500)} == {8}
    assert room(1, 3, size=64, limits=Limits(32, 1024)).at_once == 2


def test_a_single_block_of_keys_is_as_long_as_the_longest_sequence():
    """It is summed at once, so its length would change a last bit."""
    limits = Limits(100_000, 100)
    assert {room(1, n, limits=limits, tokens=60).key_slots for n in (3, 100)} == {160}


def test_slots_that_exceed_the_share_of_memory_are_none_and_one_there_is():
    whole = room(500, 1024)
    for share in (2, 3, 7):
        limits = LIMITS._replace(cache_bytes=whole.cache_bytes(QWEN) // share)
        assert room(500, 1024, limits=limits).slots == 256 // share
        assert room(500, 1024, limits=limits).cache_bytes(QWEN) <= limits.cache_bytes
    assert room(500, 1024, limits=LIMITS._replace(cache_bytes=1)).slots == 1
    large_groups = Limits(32, 512)
    of_two = room(500, 512, size=16, limits=large_groups).cache_bytes(QWEN) // 16
    limits = large_groups._replace(cache_bytes=of_two)  # for two slots and half a prompt; a line has one at least
    assert room(500, 512, size=16, limits=limits).slots == 1
    assert room(500, 512, size=16, limits=limits).cache_bytes(QWEN) <= of_two


def test_where_it_was_not_tried_slots_do_not_depend_on_what_waits():
    assert {room(groups, 1024, limits=LIMITS._replace(fewer=False)).slots for groups in (1, 9, 500)} == {256}


def test_small_caches_have_one_size_whatever_waits():
    few = Limits(4, 1024)
    assert room(500, 1024, limits=few).cache_bytes(QWEN) <= SMALL_CACHE
    assert room(1, 3, limits=few) == room(500, 1024, limits=few)


def test_48_responses_of_half_a_billion_parameters_take_a_fifth_of_the_caches_for_all_slots():
    asked, most = room(6, 300), room(500, 1024)
    assert asked.slots == 64 and asked.cache_bytes(QWEN) < most.cache_bytes(QWEN) / 5


def test_what_a_dry_run_counts_is_bounded_by_the_share():
    unbounded, bounded = (
        memory_of(QWEN, 4 * 494_000_000, LIMITS._replace(cache_bytes=n), group_size=8, response_tokens=384) for n in (None, 2 * 10**9)
    )
    whole = room(500, 1024).cache_bytes(QWEN)
    assert bounded < 6 * 10**9 < unbounded and unbounded - bounded > whole - 2 * 10**9


def test_experts_work_on_tiles_that_have_their_matrices_but_for_tpus():
    """A token has four rows, of 3 F + 2 D numbers; those of 1,024 tokens fill 16 tiles of 256, and each expert may have one partly empty."""
    of_tokens = 1024 * (4 * 256 + 2 * 8 * 32)
    in_tiles, on_tpu = (bytes_of_a_layer(EXPERTS, 1024, platform) for platform in ('gpu', 'tpu'))
    assert in_tiles == 4 * (of_tokens + 32 * 256 * (3 * 128 + 2 * 256) + 3 * 32 * 256 * 128)
    assert on_tpu == 4 * (of_tokens + 4 * 1024 * (3 * 128 + 2 * 256))
    dense = dataclasses.replace(EXPERTS, routing=None, model_type='qwen3')
    assert {bytes_of_a_layer(dense, 1024, platform) for platform in ('gpu', 'tpu')} == {4 * (of_tokens + 1024 * 3 * 128)}


@pytest.mark.parametrize('decodes', [False, True])
def test_what_is_counted_of_a_layer_with_experts_is_what_xla_allocates(decodes):
    """At least that, and at most a fifth more, of eight prompts of 128 tokens, and of a token of each of 32 rows, with their keys."""
    graph, shapes = hf.abstract_params(EXPERTS)
    weights = jax.eval_shape(lambda params: unstacked(params, EXPERTS), shapes)
    numbers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    if decodes:
        cache = jax.eval_shape(lambda: empty_cache(EXPERTS, 32, 128))
        lowered = jax.jit(functools.partial(decode, graph), donate_argnums=3).lower(weights, numbers((32,)), numbers((32,)), cache, numbers(()))
    else:
        lowered = jax.jit(functools.partial(prefill, graph)).lower(weights, numbers((8, 128)), numbers((8,)))
    needs = lowered.compile().memory_analysis().temp_size_in_bytes
    assert needs <= bytes_of_a_layer(EXPERTS, 32 if decodes else 1024, 'cpu') <= 1.2 * needs


def test_a_decode_step_counts_if_it_takes_more_than_short_prompts():
    """With experts, 1,024 slots have more tiles than a prompt of one token."""
    limits = Limits(1024, 1)
    counted = memory_of(EXPERTS, 0, limits, group_size=8192, response_tokens=8)
    kept = room(1024, 1, size=8192, limits=limits, model=EXPERTS, tokens=8).cache_bytes(EXPERTS) + 8 * (1024 + 8192) * 8
    assert counted - kept == bytes_of_a_layer(EXPERTS, 1024, 'gpu') > 16 * 1024 * 1024
