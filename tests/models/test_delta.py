"""Hybrid models: the gated delta rule token by token, Hugging Face's logits, and rows of several sequences.

Tolerances, float32: gradients 5e-5 of the largest entry of a tensor; logits 5e-5, but 1e-4 against torch, which differs from its float64
by 3e-5 and we by 6e-5: four layers of a recurrence add up their rounding, and machines round differently.
"""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from group_builders import graded, right, with_logp
from jax.sharding import AbstractMesh
from learners import BARE, gradient, learner_config, make_learner, updated
from safetensors.numpy import load_file, save_file
from scored import logits_in
from small_run import assert_goes_on
from tiny import QWEN3_5, STOP_TOKENS, hybrid_files

from bapo_jax.cluster.mesh import MESH_AXES
from bapo_jax.dry_run.memory import matrix_sizes
from bapo_jax.groups import make_batch
from bapo_jax.learner.build import choose_kernel
from bapo_jax.learner.speed import model_flops
from bapo_jax.models import delta, hf
from bapo_jax.models.adapters import model_of
from bapo_jax.models.attention import xla
from bapo_jax.models.remat import REMAT
from bapo_jax.rollout.engine import FRESH, Draw, Sampling
from bapo_jax.rollout.inprocess.decoding import empty_cache
from bapo_jax.rollout.inprocess.engine import JaxEngine
from bapo_jax.rollout.inprocess.room import Limits, Room, bytes_of_a_state, bytes_of_a_token

SHAPES = {
    'two periods of two, tied': {},
    'a period of four, untied, as many key heads': {
        'tie_word_embeddings': False, 'full_attention_interval': 4, 'linear_num_key_heads': 4, 'linear_conv_kernel_dim': 3,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e6, 'partial_rotary_factor': 0.25, 'mrope_section': [1, 1, 0]},
    },
}  # fmt: skip


@pytest.fixture(scope='module')
def tokens():
    """Rows of more than one chunk."""
    return np.random.default_rng(1).integers(0, 96, (2, 80))


@pytest.mark.parametrize('shape', [pytest.param(shape, marks=[pytest.mark.slow] * (not shape.startswith('a period'))) for shape in SHAPES])
def test_logits_and_gradients_are_hugging_faces(shape, make_policy, tokens):
    """The gradients of the mean of sin(logits), for each tensor by its name."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = make_policy(**QWEN3_5 | SHAPES[shape])
    theirs = AutoModelForCausalLM.from_pretrained(policy.path)
    logits = theirs(torch.tensor(tokens)).logits
    assert logits.std() > 0.5
    torch.sin(logits).mean().backward()
    want = {name: x.grad.numpy() for name, x in theirs.named_parameters()}

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(params):
        ours = logits_in(policy.graph, params, tokens)
        return jnp.sin(ours).mean(), ours

    gradients, ours = gradient(policy.params)
    np.testing.assert_allclose(ours, logits.detach().numpy(), rtol=0, atol=1e-4)
    got = dict(hf.to_hf(policy.config, gradients))
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert np.abs(x).max() > 0
        np.testing.assert_allclose(got[name], x, rtol=0, atol=5e-5 * np.abs(x).max(), err_msg=name)


def token_by_token(q, k, v, log_decay, beta, segment):
    """The equations of delta.py, with S of zeros where a segment begins."""
    first = jnp.concatenate([jnp.ones_like(segment[:, :1], bool), segment[:, 1:] != segment[:, :-1]], axis=1)

    def step(s, token):
        q, k, v, log_decay, beta, first = token
        s = s * jnp.where(first[:, None], 0.0, jnp.exp(log_decay))[..., None, None]
        s += k[..., None] * (beta[..., None] * (v - jnp.einsum('bnhw,bnh->bnw', s, k)))[..., None, :]
        return s, jnp.einsum('bnhw,bnh->bnw', s, q)

    (B, _, N, H), W = q.shape, v.shape[-1]
    inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, log_decay, beta, first))
    last, out = jax.lax.scan(step, jnp.zeros((B, N, H, W)), inputs)
    return jnp.moveaxis(out, 0, 1), last


def rule_inputs(rng, B, T, N=3, H=8, W=5):
    """Keys of length 1; heads that remember for 2, 10 and 100 tokens, whose decays vary from token to token."""
    q, k, v = (rng.standard_normal((B, T, N, n)) for n in (H, H, W))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -rng.exponential(1 / np.array([2, 10, 100]), (B, T, N))
    return [jnp.asarray(x, jnp.float32) for x in (q, k, v, log_decay, rng.random((B, T, N)))]


def test_chunks_are_the_rule_token_by_token_in_every_segment_value_and_gradient():
    """Borders within a chunk, between chunks, and a segment of one token; padding at the end of a row. 1e-5 of the largest."""
    lengths = [[1, 20, 43, 64, 22], [150], [100, 30]]
    rng, T = np.random.default_rng(0), 150
    segment = np.zeros((3, T), np.int32)
    for row, of_row in zip(segment, lengths, strict=True):
        row[: sum(of_row)] = np.repeat(np.arange(1, len(of_row) + 1), of_row)
    inputs, segment = rule_inputs(rng, 3, T), jnp.asarray(segment)
    by = jnp.asarray(rng.standard_normal((3, T, 3, 5)), jnp.float32)
    by_last = jnp.asarray(rng.standard_normal((3, 3, 8, 5)), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradient(rule, *inputs):
        value, pull = jax.vjp(lambda *a: rule(*a, segment), *inputs)
        return *value, *pull((by, by_last))

    for ours, theirs in zip(*(value_and_gradient(rule, *inputs) for rule in (delta.delta_rule, token_by_token)), strict=True):
        assert jnp.abs(theirs).max() > 0.1
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * float(jnp.abs(theirs).max()))


def test_a_token_that_writes_nothing_and_decays_nothing_leaves_the_state_as_it_is():
    """So a prompt may be padded: bit for bit."""
    q, k, v, log_decay, beta = rule_inputs(np.random.default_rng(0), 2, 70)
    counts = jnp.arange(70) < 50
    log_decay, beta = (jnp.where(counts[None, :, None], x, 0.0) for x in (log_decay, beta))
    segment = jnp.ones((2, 70), jnp.int32)
    rule = jax.jit(delta.delta_rule)
    _, padded = rule(q, k, v, log_decay, beta, segment)
    _, other = rule(*(jnp.where(counts.reshape(1, 70, *[1] * (x.ndim - 2)), x, 1.0) for x in (q, k, v)), log_decay, beta, segment)
    _, short = token_by_token(*(x[:, :50] for x in (q, k, v, log_decay, beta)), segment[:, :50])
    np.testing.assert_array_equal(padded, other)
    np.testing.assert_allclose(padded, short, rtol=0, atol=1e-5)


def test_the_convolution_is_a_sum_over_the_last_tokens_of_the_segment():
    rng = np.random.default_rng(0)
    x, kernel = rng.standard_normal((2, 9, 3)).astype(np.float32), rng.standard_normal((3, 4)).astype(np.float32)
    segment = np.array([[1] * 9, [1, 1, 2, 3, 3, 3, 3, 3, 0]], np.int32)
    want = np.zeros_like(x)
    for b in range(2):
        for t in range(9):
            for back in range(4):
                if t >= back and segment[b, t - back] == segment[b, t]:
                    want[b, t] += kernel[:, 3 - back] * x[b, t - back]
    np.testing.assert_allclose(delta.convolved(jnp.asarray(x), jnp.asarray(kernel), jnp.asarray(segment)), want, rtol=0, atol=1e-6)


@functools.partial(jax.jit, static_argnums=0)
def in_segments(graph, params, tokens, segment, position):
    model = nnx.merge(graph, params)
    return model.logits(model(tokens, position, lambda *qkv: xla(*qkv, segment), recur=delta.of_segments(segment)))


def packed_logits(policy, tokens, lengths):
    """Logits of a row of sequences; the rest of the row is padding."""
    segment, position = np.zeros(tokens.shape, np.int32), np.zeros(tokens.shape, np.int32)
    of_row = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    segment[:, : len(of_row)], position[:, : len(of_row)] = of_row, np.concatenate([np.arange(n) for n in lengths])
    return np.asarray(in_segments(policy.graph, policy.params, tokens, segment, position))


def test_a_sequence_does_not_depend_on_what_shares_its_row(make_policy, tokens):
    """Other tokens beside it change no bit; another place in the row, rounding: 5e-5."""
    policy, row = make_policy(**QWEN3_5), tokens[:1]
    lengths, own = (5, 66, 3), slice(5, 71)
    changed = (row + 1) % 96
    changed[:, own] = row[:, own]
    one, other = packed_logits(policy, row, lengths), packed_logits(policy, changed, lengths)
    np.testing.assert_array_equal(one[:, own], other[:, own])
    assert (np.abs(one - other)[:, 71:74].max(axis=-1) > 1e-3).all()
    alone = packed_logits(policy, np.roll(row, -5, axis=1), (66,))
    np.testing.assert_allclose(one[:, own], alone[:, :66], rtol=0, atol=5e-5)


def loss_in(policy, tokens, remat):
    return jax.jit(jax.value_and_grad(lambda p: jnp.sin(logits_in(policy.graph, p, tokens, remat=remat)).mean()))(policy.params)


@pytest.mark.slow
@pytest.mark.parametrize('remat', sorted(REMAT.keys() - {'none'}))
def test_rematerialised_is_the_same_value_and_gradient(remat, make_policy, tokens):
    policy = make_policy(**QWEN3_5)
    (value, gradient), (want, want_gradient) = (loss_in(policy, tokens, x) for x in (remat, 'none'))
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(want_gradient), strict=True):
        assert jnp.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.fixture(scope='module')
def sampled(make_policy, prompts):
    """The model, and groups that the engine sampled from it."""
    policy = make_policy(**QWEN3_5)
    engine = JaxEngine(policy.graph, policy.config, STOP_TOKENS, Limits(32, 16))
    engine.load(policy.params, 0)
    answers = engine.generate(prompts, 4, Sampling(1.0, 10), [Draw(0, 0, FRESH)] * len(prompts))
    return policy, [graded(p, r, right(k, 4)) for p, r, k in zip(prompts, answers, (1, 2, 3, 2, 1, 3), strict=True)]


def test_a_row_that_decodes_is_the_learners_and_does_not_depend_on_the_others(sampled, prompts):
    """Bit for bit whatever shares the batch; slots are refilled, so states of earlier responses are gone."""
    policy, groups = sampled
    for group in groups:
        response, prompt = group.responses[-1], group.prompt.tokens
        row, n = np.zeros((1, 80), np.int64), len(prompt) + len(response.tokens)
        row[0, :n] = *prompt, *response.tokens
        logp = np.asarray(jax.nn.log_softmax(packed_logits(policy, row, (n,))[0, len(prompt) - 1 : n - 1]))
        np.testing.assert_allclose(response.logp, logp[np.arange(len(logp)), response.tokens], rtol=0, atol=5e-5)
    engine = JaxEngine(policy.graph, policy.config, STOP_TOKENS, Limits(8, 16))
    engine.load(policy.params, 0)
    for asked, wanted in ((prompts[:1], groups[:1]), (prompts[::-1], groups[::-1])):
        answers = engine.generate(asked, 4, Sampling(1.0, 10), [Draw(0, 0, FRESH)] * len(asked))
        for one, other in zip(sum(map(list, answers), []), [r for g in wanted for r in g.responses], strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.logp, other.logp)


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_and_its_export_is_its_policy(tmp_path):
    """Two steps of GRPO on a small random base; the second again from the checkpoint of the first."""
    base = hybrid_files(tmp_path / 'base')
    assert_goes_on(base, tmp_path)
    first, last = (load_file(path / 'model.safetensors') for path in (base, tmp_path / 'exported'))
    assert first.keys() == last.keys()
    # A norm's scale of 0 with a gradient near 0 may stay.
    assert {name for name in first if (first[name] == last[name]).all()} <= {name for name in first if name.endswith('norm.weight')}


def test_a_tokens_arithmetic_and_memory_are_those_of_both_kinds_of_layer(make_policy):
    """D 32, F 48: two layers of attention (four query heads with gates and two key heads of 16), two of linear attention."""
    model = make_policy(**QWEN3_5).config
    mlp, attention, qkv, values = 3 * 32 * 48, 32 * (3 * 64 + 2 * 32), 2 * 2 * 16 + 4 * 16, 4 * 16
    linear = 32 * (qkv + 2 * values + 2 * 4)
    assert matrix_sizes(model)[2] == mlp + (attention + linear) // 2
    assert model_flops(model, 1, 0, 0) == 6 * (4 * mlp + 2 * (attention + linear + 3 * values * 16))
    assert model_flops(model, 0, 0, 1) == 12 * 2 * 64
    assert bytes_of_a_token(model) == 2 * 2 * 2 * 16 * 4
    assert bytes_of_a_state(model) == 2 * 4 * (3 * qkv + values * 16)
    assert Room(4, 2, 128, 512, 2).cache_bytes(model) == (4 * 512 + 2 * 128) * bytes_of_a_token(model) + 6 * bytes_of_a_state(model)
    cache = empty_cache(model, 1, 1)
    assert sum(x.nbytes for x in jax.tree.leaves(cache)) == bytes_of_a_token(model) + bytes_of_a_state(model)


@pytest.mark.slow
def test_an_update_of_the_policy_that_was_scored_begins_at_a_ratio_of_one(sampled, make_policy):
    """In bfloat16 and rows of several sequences: exactly, though one program keeps what the other does not."""
    policy, groups = make_policy('bfloat16', **QWEN3_5), sampled[1]
    learner = make_learner(policy, BARE, mini_batch_groups=6, anchor='proximal', remat='attention_and_mlp_inputs')
    scores = learner.score_batch('proximal', policy.params, make_batch(groups, ['x1'] * 6))
    scored = [
        dataclasses.replace(g, responses=tuple(with_logp(r, x) for r, x in zip(g.responses, of_group, strict=True)))
        for g, of_group in zip(groups, scores, strict=True)
    ]
    state, measured = updated(learner, policy, make_batch(scored, ['x1'] * 6))
    assert measured['actor/updates'] == 1 and measured['actor/pg_clipfrac'] == measured['mismatch/logprob_abs_max'] == 0
    assert min(np.abs(x).max() for x in jax.tree.leaves(gradient(state)['delta_layers'])) > 0


@pytest.mark.parametrize('sizes, changes, message', [
    ((1, 1, 1), {'slot_tokens': 512}, 'learner.slot_tokens=512 lets responses share a prompt, which the linear attention of '
     'qwen3_5_text does not support; set it to 0'),
    ((1, 4, 1), {'micro_batch_rows': 2}, 'learner.micro_batch_rows=2 splits the tokens of a row over mesh.fsdp=4, which the linear '
     'attention of qwen3_5_text does not support; set learner.micro_batch_rows=4, to split rows'),
    ((1, 1, 4), {}, r'mesh.tensor=4 does not divide the 2 key heads of the linear attention \(linear_num_key_heads in config.json\); '
     'lower it to a divisor'),
])  # fmt: skip
def test_a_learner_that_linear_attention_does_not_support_is_refused(sizes, changes, message, make_policy):
    config = learner_config(**changes)
    with pytest.raises(ValueError, match=message):
        choose_kernel(config, make_policy(**QWEN3_5).config, AbstractMesh(sizes, MESH_AXES), 'cpu')


def test_an_adapter_is_refused(make_policy):
    model = {'path': str(make_policy(**QWEN3_5).path), 'dtype': 'float32', 'adapter': {'rank': 2, 'alpha': 4.0, 'targets': 'mlp'}}
    with pytest.raises(ValueError, match='model.adapter.rank=2: qwen3_5_text has no adapters, .*; set model.adapter.rank=0'):
        model_of(model)


def edited(path, to, **fields):
    """A copy of a model directory with other fields in config.json; ... removes one."""
    shutil.copytree(path, to)
    config = json.loads((to / 'config.json').read_text()) | fields
    (to / 'config.json').write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return to


ROPE = {'rope_type': 'default', 'rope_theta': 1e4}


@pytest.mark.parametrize('fields, named', [
    ({'layer_types': ['full_attention'] * 4}, 'layer_types=.* is not supported; supported: layers of linear_attention and one of full'),
    ({'layer_types': ['full_attention', 'linear_attention'] * 2}, 'layer_types='),
    ({'layer_types': ['linear_attention'] * 2 + ['full_attention'] + ['linear_attention']}, 'layer_types='),
    ({'layer_types': ['linear_attention'] * 4}, 'layer_types='),
    ({'layer_types': ['linear_attention', 'sliding_attention'] * 2}, "supported: 'full_attention' or 'linear_attention' in every layer"),
    ({'linear_num_key_heads': 3}, 'linear_num_value_heads=4 must be a multiple of linear_num_key_heads=3'),
    ({'linear_key_head_dim': ...}, "'linear_key_head_dim' is missing"),
    ({'linear_conv_kernel_dim': 0}, 'linear_conv_kernel_dim=0 must be an integer of at least 1'),
    ({'attn_output_gate': False}, 'attn_output_gate=False is not supported; supported: True'),
    ({'attention_bias': True}, 'attention_bias=True is not supported; supported: False'),
    ({'rope_parameters': {**ROPE, 'partial_rotary_factor': 2.0}}, r'partial_rotary_factor=2.0 must be a number in \(0, 1\]'),
    ({'rope_parameters': {**ROPE, 'partial_rotary_factor': 0.2}}, 'head_dim · partial_rotary_factor=3.2'),
    ({'rope_parameters': {**ROPE, 'rope_type': 'yarn', 'factor': 2.0}}, "supported: rope_type 'default'$"),
    ({'model_type': 'qwen3_5'}, r"model_type='qwen3_5' has a vision tower, which is not supported. .* then set model.path=TEXT"),
])  # fmt: skip
def test_what_the_decoder_does_not_compute_is_refused(fields, named, make_policy, tmp_path):
    with pytest.raises(ValueError, match=f'config.json: .*{named}'):
        hf.read_config(edited(make_policy(**QWEN3_5).path, tmp_path / 'model', **fields))


def test_a_stated_theta_leaves_the_share_of_a_head_that_is_turned(make_policy):
    read = hf.read_config(make_policy(**QWEN3_5).path, stated=hf.overrides({'rope_theta': 5e5}))
    assert (read.rotation.rope_theta, read.rotation.partial_rotary_factor) == (5e5, 0.5)


def test_the_text_part_of_a_published_model_is_written_as_the_refusal_says(make_policy, tmp_path):
    """A vision tower and multi-token prediction are refused; transformers leaves both out, and the tensors are the same."""
    from transformers import AutoConfig, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

    text = json.loads((make_policy(**QWEN3_5).path / 'config.json').read_text())
    tower = {'depth': 1, 'hidden_size': 16, 'intermediate_size': 16, 'num_heads': 2, 'out_hidden_size': 32, 'patch_size': 4}
    config = AutoConfig.for_model('qwen3_5', text_config=text, vision_config=tower, tie_word_embeddings=True)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / 'whole')
    published = load_file(tmp_path / 'whole' / 'model.safetensors') | {'mtp.fc.weight': np.zeros((2, 2), np.float32)}
    save_file(published, tmp_path / 'whole' / 'model.safetensors', metadata={'format': 'pt'})
    with pytest.raises(ValueError, match='save_original_format=False'):
        hf.read_config(tmp_path / 'whole')
    Qwen3_5ForCausalLM.from_pretrained(tmp_path / 'whole').save_pretrained(tmp_path / 'text', save_original_format=False)
    model = hf.read_config(tmp_path / 'text')
    tensors = dict(hf.to_hf(model, hf.load_params(tmp_path / 'text', model)))
    assert len(tensors) == sum('.visual.' not in name and 'mtp' not in name for name in published)
    for name, x in tensors.items():
        np.testing.assert_array_equal(x, published[name.replace('model.', 'model.language_model.', 1)])
    save_file(tensors | {'mtp.fc.weight': published['mtp.fc.weight']}, tmp_path / 'text' / 'model.safetensors', metadata={'format': 'pt'})
    with pytest.raises(ValueError, match='mtp.fc.weight is of multi-token prediction, which is not supported. .* set model.path=TEXT'):
        hf.check_weights(tmp_path / 'text', model)
