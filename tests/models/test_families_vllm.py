"""Families and rotations in a real vLLM: it loads what we write, and says what we say. Tolerance of float32 log-probs: 1e-4."""

import json
import os
import subprocess

import jax
import numpy as np
import pytest
from scored import forward
from small_run import ROOT
from tiny import QWEN3_5

from bapo_jax.models import hf
from bapo_jax.rollout.serve import python_of
from bapo_jax.weights.publish import publish

pytestmark = pytest.mark.slow
WIDE = {'hidden_size': 128, 'head_dim': 32, 'max_position_embeddings': 64}  # vLLM's attention on CPU has no narrower heads
STRETCHED = {'rope_theta': 1e4, 'factor': 4.0, 'original_max_position_embeddings': 16}
MODELS = {
    'qwen3, yarn': {'model_type': 'qwen3', 'tie_word_embeddings': False, 'rope_parameters': {'rope_type': 'yarn', **STRETCHED}},
    'llama, llama3': {'model_type': 'llama', 'rope_parameters': {
        'rope_type': 'llama3', **STRETCHED, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}},
    'qwen2, linear': {'model_type': 'qwen2', 'rope_parameters': {'rope_type': 'linear', 'rope_theta': 1e4, 'factor': 3.0}},
    'llama, yarn, all stated': {'model_type': 'llama', 'rms_norm_eps': 1e-5, 'rope_parameters': {
        'rope_type': 'yarn', **STRETCHED, 'beta_fast': 8.0, 'beta_slow': 0.5, 'truncate': False, 'attention_factor': 0.7}},
}  # fmt: skip


def test_vllm_loads_the_export_of_every_family_and_says_what_we_say(make_policy, tmp_path):
    tokens = np.random.default_rng(3).integers(0, 96, (3, 24))
    policies = {name: make_policy(**WIDE, **changes) for name, changes in MODELS.items()}
    for name, policy in policies.items():
        hf.save(tmp_path / name, hf.to_hf(policy.config, policy.params), like=policy.path)
    said = by_vllm('float32', tokens, [tmp_path / name for name in MODELS])
    for (name, policy), got in zip(policies.items(), said, strict=True):
        want = by_us(policy, tokens)
        assert want.std() > 0.5
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4, err_msg=name)


def by_vllm(dtype, tokens, directories):
    """vLLM's log-probs [B, T - 1] of the tokens, for each directory of a model, or of a policy to load into the one before."""
    helper = ROOT / 'tests' / 'helpers' / 'vllm_logprobs.py'
    command = [str(python_of()), str(helper), json.dumps(tokens.tolist()), dtype, *map(str, directories)]
    environment = os.environ | {'VLLM_CPU_KVCACHE_SPACE': '1', 'HF_HUB_OFFLINE': '1', 'VLLM_LOGGING_LEVEL': 'ERROR'}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    lines = [line for line in done.stdout.splitlines() if line.startswith('[[')]
    assert len(lines) == len(directories), done.stderr[-3000:]
    return [np.array(json.loads(line)) for line in lines]


def by_us(policy, tokens):
    logp = np.asarray(jax.nn.log_softmax(forward(policy, tokens)))
    return np.take_along_axis(logp[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]


def test_vllm_serves_a_hybrid_model_as_exactly_as_our_bfloat16_before_and_after_a_policy_is_loaded(make_policy, tmp_path):
    """On a CPU, vLLM (0.32) has linear attention in bfloat16 alone, and of heads of 128. Mean errors of log-probs, of size 1."""
    fields = {**QWEN3_5, **WIDE, 'head_dim': 64, 'linear_key_head_dim': 128, 'linear_value_head_dim': 128}
    tokens, rng = np.random.default_rng(3).integers(0, 96, (3, 24)), np.random.default_rng(0)
    exact, rounded = make_policy(**fields), make_policy('bfloat16', **fields)
    first = jax.tree.map(lambda x: 0.5 * x, exact.params)  # smaller logits, which are rounded less
    moved = jax.tree.map(lambda x: x + 0.05 * rng.standard_normal(x.shape).astype(np.float32), first)
    hf.save(tmp_path / 'model', hf.to_hf(exact.config, first), like=exact.path)
    published = publish(tmp_path / 'policy', 1, moved, exact.config, 'bfloat16')
    said, wants = by_vllm('bfloat16', tokens, [tmp_path / 'model', published]), []
    for got, params in zip(said, (first, moved), strict=True):
        want, ours = (by_us(policy._replace(params=params), tokens) for policy in (exact, rounded))
        assert np.abs(got - want).mean() < 2 * np.abs(ours - want).mean() < 0.2
        wants.append(want)
    assert np.abs(wants[0] - wants[1]).mean() > 0.5
