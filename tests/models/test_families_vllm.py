"""Families and rotations in a real vLLM: it loads what we write, and says what we say. Tolerance of float32 log-probs: 1e-4."""

import json
import os
import subprocess

import jax
import numpy as np
import pytest
from scored import forward
from small_run import ROOT

from bapo_jax.models import hf
from bapo_jax.rollout.serve import python_of

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
    directories = [str(tmp_path / name) for name in MODELS]
    command = [str(python_of()), str(ROOT / 'tests' / 'helpers' / 'vllm_logprobs.py'), json.dumps(tokens.tolist()), *directories]
    environment = os.environ | {'VLLM_CPU_KVCACHE_SPACE': '1', 'HF_HUB_OFFLINE': '1', 'VLLM_LOGGING_LEVEL': 'ERROR'}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    lines = [line for line in done.stdout.splitlines() if line.startswith('[[')]
    assert len(lines) == len(MODELS), done.stderr[-3000:]
    for (name, policy), line in zip(policies.items(), lines, strict=True):
        logp = np.asarray(jax.nn.log_softmax(forward(policy, tokens)))
        want = np.take_along_axis(logp[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        assert want.std() > 0.5
        np.testing.assert_allclose(json.loads(line), want, rtol=0, atol=1e-4, err_msg=name)
