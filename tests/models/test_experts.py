"""Mixture of experts: Hugging Face's, a plain sum over all experts, and what a learner and an engine make of it.

Tolerances, float32: logits 5e-5; gradients 5e-5 of the largest entry of a tensor.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from group_builders import graded, right, with_logp
from jax.sharding import AbstractMesh
from learners import BARE, assert_same_update, batch_of, gradient, learner_config, make_learner, unscored, updated
from safetensors.numpy import load_file
from scored import forward, logits_in
from small_run import ROOT, assert_goes_on
from tiny import QWEN3_MOE, STOP_TOKENS, expert_files

from bapo_jax.cluster import grouped
from bapo_jax.cluster.mesh import MESH_AXES
from bapo_jax.dry_run.memory import matrix_sizes, numbers_idle
from bapo_jax.groups import make_batch
from bapo_jax.learner.build import choose_kernel
from bapo_jax.learner.speed import model_flops
from bapo_jax.models import hf
from bapo_jax.models.adapters import model_of
from bapo_jax.models.experts import Counted, Experts, Routing, imbalance, loads, route
from bapo_jax.models.sharding import parameter_sharding
from bapo_jax.rollout.engine import FRESH, Draw, Sampling
from bapo_jax.rollout.inprocess.engine import JaxEngine
from bapo_jax.rollout.inprocess.room import Limits
from bapo_jax.run.opening import open_run

SHAPES = {
    'normalised, tied': {},
    'not normalised, untied, three of five': {'norm_topk_prob': False, 'num_experts': 5, 'num_experts_per_tok': 3, 'tie_word_embeddings': False},
}


@pytest.fixture(scope='module')
def tokens():
    return np.random.default_rng(1).integers(0, 96, (3, 20))


@pytest.fixture(scope='module')
def sampled(make_policy, prompts):
    """The model, and groups that the engine sampled from it."""
    policy = make_policy(**QWEN3_MOE)
    engine = JaxEngine(policy.graph, policy.config, STOP_TOKENS, Limits(32, 16))
    engine.load(policy.params, 0)
    answers = engine.generate(prompts, 4, Sampling(1.0, 10), [Draw(0, 0, FRESH)] * len(prompts))
    return policy, [graded(p, r, right(k, 4)) for p, r, k in zip(prompts, answers, (1, 2, 3, 2, 1, 3), strict=True)]


def names_in_files(theirs):
    """Hugging Face's tensors as in its files: in memory it holds a layer's experts, gate and up, as one."""
    tensors = {}
    for name, x in theirs.items():
        if name.endswith('gate_up_proj'):
            parts = {part: half for part, half in zip(('gate_proj', 'up_proj'), np.split(x, 2, axis=1), strict=True)}
        elif name.endswith('experts.down_proj'):
            parts = {'down_proj': x}
        else:
            tensors[name] = x
            continue
        tensors |= {f'{name.rpartition(".")[0]}.{i}.{part}.weight': one for part, all_ in parts.items() for i, one in enumerate(all_)}
    return tensors


@pytest.mark.parametrize('shape', SHAPES)
def test_logits_and_gradients_are_hugging_faces(shape, make_policy, tokens):
    """The gradients of the mean of sin(logits), for each tensor by its name."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = make_policy(**QWEN3_MOE | SHAPES[shape])
    theirs = AutoModelForCausalLM.from_pretrained(policy.path)
    logits = theirs(torch.tensor(tokens)).logits
    assert logits.std() > 0.5
    np.testing.assert_allclose(forward(policy, tokens), logits.detach().numpy(), rtol=0, atol=5e-5)
    torch.sin(logits).mean().backward()
    want = names_in_files({name: x.grad.numpy() for name, x in theirs.named_parameters()})
    got = dict(hf.to_hf(policy.config, jax.jit(jax.grad(lambda p: jnp.sin(logits_in(policy.graph, p, tokens)).mean()))(policy.params)))
    assert got.keys() == want.keys() and len(got) > 2 * 3 * policy.config.routing.experts
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=0, atol=5e-5 * np.abs(x).max(), err_msg=name)
    # An expert without a token has no gradient.
    assert np.mean([np.abs(x).max() > 0 for name, x in got.items()]) > 0.8 and np.abs(got['model.layers.0.mlp.gate.weight']).max() > 0


def test_transformers_loads_what_is_written_with_equal_logits(make_policy, tokens, tmp_path):
    """Files have an expert's matrices by its number, as published ones do."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = make_policy(**QWEN3_MOE)
    hf.save(tmp_path / 'out', hf.to_hf(policy.config, policy.params), like=policy.path)
    with torch.no_grad():
        a, b = (AutoModelForCausalLM.from_pretrained(p)(torch.tensor(tokens)).logits for p in (policy.path, tmp_path / 'out'))
    assert torch.equal(a, b)
    written = load_file(tmp_path / 'out' / 'model.safetensors')
    assert written['model.layers.1.mlp.experts.5.down_proj.weight'].shape == (32, 24)
    assert written['model.layers.0.mlp.experts.0.gate_proj.weight'].shape == (24, 32)
    assert written['model.layers.0.mlp.gate.weight'].shape == (6, 32)
    assert json.loads((tmp_path / 'out' / 'config.json').read_text())['num_experts'] == 6  # transformers 4 knows no other name


@pytest.mark.parametrize('routed', ['at random', 'all to one expert'])
def test_every_pair_of_a_token_and_its_expert_is_computed(routed):
    """Σ over all experts of weight · W_down (silu(W_gate x) · W_up x), with its gradients: 1e-5 of the largest."""
    B, T, D, E, S, F = 2, 9, 8, 4, 2, 5
    rng = np.random.default_rng(0)
    experts = Experts('float32', E, D, F, rngs=nnx.Rngs(0))
    graph, params = nnx.split(experts, nnx.Param)
    params = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), params)
    h, by = (jnp.asarray(rng.standard_normal((B, T, D)), jnp.float32) for _ in range(2))
    weight = jnp.asarray(rng.random((B, T, S)), jnp.float32)
    expert = jnp.asarray(np.argsort(rng.random((B, T, E)))[..., :S] if routed == 'at random' else np.full((B, T, S), 2), jnp.int32)

    def ours(params, h, weight):
        return nnx.merge(graph, params)(h, weight, expert)

    def plain(params, h, weight):
        of = nnx.to_pure_dict(params)
        share_BxTxE = jnp.einsum('bts,btse->bte', weight, jax.nn.one_hot(expert, E))
        gate, up = (jnp.einsum('btd,edf->btef', h, of[name]['kernel']) for name in ('gate', 'up'))
        return jnp.einsum('bte,btef,efd->btd', share_BxTxE, jax.nn.silu(gate) * up, of['down']['kernel'])

    (value, pullback), (want, want_pullback) = (jax.vjp(f, params, h, weight) for f in (ours, plain))
    np.testing.assert_allclose(value, want, rtol=0, atol=1e-5 * np.abs(want).max())
    for got, x in zip(jax.tree.leaves(pullback(by)), jax.tree.leaves(want_pullback(by)), strict=True):
        assert np.abs(x).max() > 0
        np.testing.assert_allclose(got, x, rtol=0, atol=1e-5 * np.abs(x).max())


def test_the_tpus_kernel_multiplies_the_rows_of_each_expert():
    """x.T @ y of each expert's rows, also of experts that have none; interpreted, since no TPU is here."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((256, 40), np.float32), rng.standard_normal((256, 24), np.float32)
    sizes = np.array([0, 100, 1, 0, 155, 0], np.int32)
    want = [a.T @ b for a, b in zip(np.split(x, np.cumsum(sizes)[:-1]), np.split(y, np.cumsum(sizes)[:-1]), strict=True)]
    x, y, sizes = map(jnp.asarray, (x, y, sizes))
    for got in (grouped.outer_on_tpu(x, y, sizes, jnp.float32, interpret=True), grouped.outer(x, y, sizes, jnp.float32)):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_tpu_multiplies_each_row_once_whatever_the_number_of_experts():
    """As its compiler counts: XLA's own instruction for a product over rows would multiply each by all experts.

    In a process of its own: libtpu stays loaded.
    """
    script = (
        'import jax, jax.numpy as jnp\n'
        'from bapo_jax.cluster import grouped\n'
        'from bapo_jax.dry_run.targets import tpu_devices\n'
        "[device] = tpu_devices('v6e:1x1')\n"
        'at = jax.sharding.SingleDeviceSharding(device)\n'
        'x, y = (jax.ShapeDtypeStruct((1024, n), jnp.bfloat16, sharding=at) for n in (256, 128))\n'
        'sizes = jax.ShapeDtypeStruct((64,), jnp.int32, sharding=at)\n'
        'outer = jax.jit(lambda x, y, sizes: grouped.outer(x, y, sizes, jnp.float32)).lower(x, y, sizes).compile()\n'
        "print(outer.cost_analysis()['flops'] / (2 * 1024 * 256 * 128))\n"
    )
    path = {'PYTHONPATH': f'{ROOT / ".tpu-compiler"}:{ROOT}'}
    done = subprocess.run([sys.executable, '-c', script], env=os.environ | path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 1 <= float(done.stdout) < 1.1


def test_a_router_chooses_the_most_probable_experts_by_hand():
    logits = jnp.log(jnp.asarray([[[0.1, 0.4, 0.2, 0.3]]], jnp.float32))
    for normalised, want in ((False, [0.4, 0.3]), (True, [4 / 7, 3 / 7])):
        weight, expert, probability = route(logits, Routing(4, 2, normalised))
        np.testing.assert_allclose(probability, jnp.exp(logits), rtol=1e-6)
        np.testing.assert_array_equal(expert[0, 0], [1, 3])
        np.testing.assert_allclose(weight[0, 0], want, atol=1e-6)


def test_loads_count_every_pair_of_a_real_token_and_its_expert():
    rng = np.random.default_rng(0)
    expert_LxBxTxS, counts_BxT = np.argsort(rng.random((3, 2, 7, 5)))[..., :2], rng.random((2, 7)) < 0.6
    got_LxE = loads(jnp.asarray(expert_LxBxTxS), jnp.asarray(counts_BxT), 5)
    want_LxE = [[(layer[counts_BxT] == e).sum() for e in range(5)] for layer in expert_LxBxTxS]
    np.testing.assert_array_equal(got_LxE, want_LxE)
    assert (got_LxE.sum(axis=1) == 2 * counts_BxT.sum()).all()


def test_the_imbalance_is_deepseeks_of_each_response_value_and_gradient():
    """w E / S Σ_e f_e P_e with f and P of a response's tokens; f has no gradient. 1 if even, E / S if all is one expert's."""
    rng, (B, T, E, S) = np.random.default_rng(0), (2, 12, 6, 2)
    response_BxT = np.array([[0, 1, 1, 1, 0, 2, 2, 0, 0, 3, 3, 0], [0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]], np.int32)
    logits_BxTxE = rng.standard_normal((B, T, E)).astype(np.float32)
    expert_BxTxS = np.argsort(-logits_BxTxE)[..., :S]
    weights, weight_BxT = {(0, 1): 0.3, (0, 2): 0.25, (0, 3): 0.2, (1, 1): 0.25}, np.zeros((B, T), np.float32)
    want, gradient_BxTxE = 0.0, np.zeros((B, T, E))
    p_BxTxE = np.exp(logits_BxTxE) / np.exp(logits_BxTxE).sum(axis=-1, keepdims=True)
    for (b, number), w in weights.items():
        at = np.flatnonzero(response_BxT[b] == number)
        weight_BxT[b, at] = w / len(at)
        f = np.array([(expert_BxTxS[b, at] == e).any(axis=-1).mean() for e in range(E)])
        want += w * E / S * f @ p_BxTxE[b, at].mean(axis=0)
        gradient_BxTxE[b, at] = w * E / S * f / len(at)
    counted = Counted(jnp.asarray(response_BxT), jnp.asarray(weight_BxT))
    value, gradient = jax.value_and_grad(lambda p: imbalance(p, jnp.asarray(expert_BxTxS), counted))(jnp.asarray(p_BxTxE))
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(gradient, gradient_BxTxE, rtol=1e-5, atol=1e-7)
    even = imbalance(jnp.full((B, T, E), 1 / E), jnp.asarray(expert_BxTxS), counted)
    one_BxTxE = jnp.zeros((B, T, E)).at[..., 0].set(1.0)
    two_BxTxS = jnp.broadcast_to(jnp.arange(S), (B, T, S))
    np.testing.assert_allclose([even, imbalance(one_BxTxE, two_BxTxS, counted)], [1, E / S], rtol=1e-5)


def test_the_imbalance_is_added_to_the_loss_whatever_the_micro_batches(sampled):
    """It moves the routers; its value is a metric. Without the coefficient, nothing is computed."""
    policy, groups = sampled
    batch = make_batch(groups, ['x1'] * len(groups))
    both = [updated(make_learner(policy, BARE, mini_batch_groups=6, balance_coef=0.5, micro_batch_rows=rows), policy, batch) for rows in (2, 8)]
    assert_same_update(*both, policy)
    plain, measured = updated(make_learner(policy, BARE, mini_batch_groups=6), policy, batch)
    assert 'experts/imbalance' not in measured and 1 < both[0][1]['experts/imbalance'] < 3
    moved = [gradient(state)['layers']['router']['kernel'] for state in (both[0][0], plain)]
    assert np.abs(moved[0] - moved[1]).max() > 0.01 * np.abs(moved[1]).max()


def test_a_model_without_experts_has_no_loads_to_even_out(policy):
    config = learner_config(balance_coef=0.01)
    with pytest.raises(ValueError, match='learner.balance_coef=0.01 evens out the loads of experts, and model.path has none; set it to 0'):
        choose_kernel(config, policy.config, AbstractMesh((1, 1, 1), MESH_AXES), 'cpu')


@pytest.mark.parametrize('skewed', [False, True])
def test_an_updates_loads_are_those_of_all_its_tokens(skewed, sampled):
    """Padding counts nowhere; every token has two of six experts. Biased routers choose the first two."""
    policy, groups = sampled
    batch = make_batch(groups, ['x1'] * len(groups))
    params = policy.params
    if skewed:  # a router of zeros chooses experts 0 and 1 for every token
        params = jax.tree_util.tree_map_with_path(lambda path, x: 0 * x if path[1].key == 'router' else x, params)
    _, measured = updated(make_learner(policy, BARE, mini_batch_groups=6), policy._replace(params=params), batch)
    if skewed:
        assert measured['experts/load_max'] == 3 and measured['experts/idle'] == pytest.approx(4 / 6)
    else:
        assert measured['experts/idle'] < 0.2


def test_a_row_that_decodes_is_the_learners_and_does_not_depend_on_the_others(sampled, prompts):
    policy, groups = sampled
    learner = make_learner(policy, BARE)
    _, measured = updated(learner, policy, make_batch(groups, ['x1'] * len(groups)))
    assert measured['actor/updates'] == 2 and measured['mismatch/logprob_abs_max'] < 1e-4
    assert 1 < measured['experts/load_max'] < 3 and 0 <= measured['experts/idle'] < 0.5  # of six, two a token: 3 is all of the tokens
    engine = JaxEngine(policy.graph, policy.config, STOP_TOKENS, Limits(8, 16))
    engine.load(policy.params, 0)
    [alone] = engine.generate(prompts[:1], 4, Sampling(1.0, 10), [Draw(0, 0, FRESH)])
    for one, other in zip(alone, groups[0].responses, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logp, other.logp, rtol=0, atol=1e-5)


@pytest.mark.parametrize('dtype, remat', [('float32', 'matrix_products'), ('bfloat16', 'full'), ('bfloat16', 'attention_and_mlp_inputs')])
def test_an_update_of_the_policy_that_was_scored_begins_at_a_ratio_of_one(dtype, remat, sampled, make_policy):
    """So both route alike; rows are packed. In float32, a CPU's products of experts are fused in two ways, which round apart."""
    policy, groups = make_policy(dtype, **QWEN3_MOE), sampled[1]
    learner = make_learner(policy, BARE, mini_batch_groups=6, anchor='proximal', remat=remat)
    scores = learner.score_batch('proximal', policy.params, make_batch(groups, ['x1'] * 6))
    scored = [
        dataclasses.replace(g, responses=tuple(with_logp(r, x) for r, x in zip(g.responses, of_group, strict=True)))
        for g, of_group in zip(groups, scores, strict=True)
    ]
    state, measured = updated(learner, policy, make_batch(scored, ['x1'] * 6))
    assert measured['actor/updates'] == 1
    assert measured['actor/pg_clipfrac'] == 0
    assert measured['mismatch/logprob_abs_max'] <= {'float32': 1e-5, 'bfloat16': 0}[dtype] >= abs(measured['actor/ppo_kl'])
    of_layers = gradient(state)['layers']
    assert min(np.abs(x).max() for x in (of_layers['router']['kernel'], *(m['kernel'] for m in of_layers['experts'].values()))) > 0


def test_training_goes_on_bit_for_bit_from_a_checkpoint(sampled, tmp_path):
    policy, groups = sampled
    config, learner = learner_config(**BARE), make_learner(policy, BARE)
    config.model.path = str(policy.path)
    state, _, checkpoints = open_run(learner, config, tmp_path)

    def step(theta):
        return learner.update(theta, unscored(batch_of(groups[:3])), np.random.default_rng(0))

    state.theta, _ = step(state.theta)
    state.trained()
    checkpoints.save(state, {'empty': np.zeros(1)}, 'selector')
    checkpoints.close()
    again, _, _ = open_run(learner, config, tmp_path)
    (one, want), (other, got) = step(state.theta), step(again.theta)
    assert want['actor/grad_norm'] == got['actor/grad_norm'] > 0
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(s.trained) for s in (one, other)))


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_and_its_export_is_its_policy(tmp_path):
    """Two steps of GRPO on a small random base; the second again from the checkpoint of the first."""
    base = expert_files(tmp_path / 'base')
    model = hf.read_config(base)
    assert_goes_on(base, tmp_path)
    first, last = (dict(hf.to_hf(model, hf.load_params(path, model))) for path in (base, tmp_path / 'exported'))
    moved = {name for name in first if (first[name] != last[name]).any()}
    assert {name for name in first if 'experts' in name or name.endswith('mlp.gate.weight')} <= moved


def edited(policy, path, **fields):
    """A copy of its directory with other fields in config.json."""
    shutil.copytree(policy.path, path)
    config = json.loads((path / 'config.json').read_text())
    (path / 'config.json').write_text(json.dumps({k: v for k, v in (config | fields).items() if v is not ...}))
    return path


@pytest.mark.parametrize('fields, named', [
    ({'decoder_sparse_step': 2}, 'decoder_sparse_step=2 is not supported; supported: 1'),
    ({'mlp_only_layers': [0]}, r'mlp_only_layers=\[0\] is not supported; supported: \[\]'),
    ({'num_experts_per_tok': 7}, 'num_experts_per_tok=7 is not supported; supported: at most num_experts'),
    ({'num_experts': 5}, 'num_local_experts=6 is not supported; supported: the number of num_experts'),
    ({'num_local_experts': ...}, "'num_experts' is missing"),
    ({'norm_topk_prob': ...}, "'norm_topk_prob' is missing"),
    ({'norm_topk_prob': 1}, 'norm_topk_prob=1 must be true or false'),
    ({'moe_intermediate_size': 0}, 'moe_intermediate_size=0 must be an integer of at least 1'),
])  # fmt: skip
def test_what_the_decoder_does_not_compute_is_refused(fields, named, make_policy, tmp_path):
    with pytest.raises(ValueError, match=f'config.json: .*{named}'):
        hf.read_config(edited(make_policy(**QWEN3_MOE), tmp_path / 'model', **fields))


def test_the_published_name_of_the_number_of_experts_is_read(make_policy, tmp_path):
    policy = make_policy(**QWEN3_MOE)
    assert hf.read_config(edited(policy, tmp_path / 'model', num_local_experts=..., num_experts=6)) == policy.config


def test_adapters_are_of_attention_alone(make_policy):
    section = {'path': str(make_policy(**QWEN3_MOE).path), 'dtype': 'float32', 'adapter': {'rank': 2, 'alpha': 4.0, 'targets': 'attention'}}
    model = model_of(section)
    adapted = {p[1].key for p, x in jax.tree_util.tree_flatten_with_path(hf.abstract_params(model)[1])[0] if p[-1].key == 'a'}
    assert adapted == {'q', 'k', 'v', 'o'}
    for targets in ('mlp', 'all'):
        section['adapter']['targets'] = targets
        with pytest.raises(ValueError, match="model.adapter.targets='.*': the experts of qwen3_moe .*; set model.adapter.targets='attention'"):
            model_of(section)


def test_a_width_that_the_mesh_does_not_divide_is_an_error_that_names_both(make_policy):
    mesh = jax.sharding.AbstractMesh((1, 1, 16), MESH_AXES)
    with pytest.raises(ValueError, match=r'mesh.tensor=16 does not divide 24, a dimension of layers\.experts'):
        parameter_sharding(mesh, hf.abstract_params(make_policy(**QWEN3_MOE).config)[1])


def test_a_tokens_arithmetic_is_that_of_its_experts_and_memory_that_of_all(make_policy):
    """D 32, four query and two key heads of 16, six experts of 24, of which a token passes two."""
    model = make_policy(**QWEN3_MOE).config
    attention, router, expert = 2 * 32 * (64 + 32), 32 * 6, 3 * 32 * 24
    layer = matrix_sizes(model)[2]
    assert (layer, numbers_idle(model)) == (attention + router + 6 * expert, 4 * expert)
    assert model_flops(model, 1, 0, 0) == 6 * 2 * (attention + router + 2 * expert) == 6 * 2 * (layer - numbers_idle(model))
