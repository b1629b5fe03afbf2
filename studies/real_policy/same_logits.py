"""Does an export say the same in three libraries? Our forward pass, Hugging Face's in torch, and vLLM's, all
in float32.

    python -m studies.real_policy.same_logits EXPORT --questions=runs/map/math_1_2.jsonl

Prints the largest difference of logits (ours and torch's) and of the log-probs of given tokens (ours and
vLLM's, ours and torch's).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.append(os.path.join(sys.prefix, 'torch'))  # see the Makefile

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_jax.models.attention import xla
from bapo_jax.models import hf
from bapo_jax.rollout.serve import python_of

OF_VLLM = Path(__file__).resolve().parents[2] / 'tests' / 'helpers' / 'vllm_logprobs.py'
TOKENS = 60  # of a question: that script's model has 64


def questions(export: Path, file: Path, count: int) -> list[list[int]]:
    """The first tokens of the first questions, whole or not, that have so many."""
    tokenizer = AutoTokenizer.from_pretrained(export)
    rows = [json.loads(line)['problem'] for line in file.read_text('utf-8').splitlines()]
    return [ids[:TOKENS] for ids in map(tokenizer.encode, rows) if len(ids) >= TOKENS][:count]


def our_logits(export: Path, tokens_BxT: np.ndarray) -> np.ndarray:
    config = hf.read_config(export)
    policy = nnx.merge(hf.abstract_params(config)[0], hf.load_params(export, config))
    positions = np.tile(np.arange(tokens_BxT.shape[1]), (len(tokens_BxT), 1))
    hidden = policy(
        jnp.array(tokens_BxT),
        jnp.array(positions),
        functools.partial(xla, segment_BxT=jnp.ones(tokens_BxT.shape)),
    )
    return np.asarray(policy.logits(hidden))


def logits_of_torch(export: Path, tokens_BxT: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)(
            torch.tensor(tokens_BxT)
        ).logits.numpy()


def logp_of_vllm(export: Path, tokens_BxT: np.ndarray) -> np.ndarray:
    """Of each token after the first."""
    command = [str(python_of()), str(OF_VLLM), json.dumps(tokens_BxT.tolist()), 'float32', str(export)]
    own = {'VLLM_CPU_KVCACHE_SPACE': '1', 'HF_HUB_OFFLINE': '1', 'VLLM_LOGGING_LEVEL': 'ERROR'}
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith('[[')]
    if not lines:
        raise RuntimeError(f'vLLM ended with status {done.returncode}: {done.stderr[-2000:]}')
    return np.array(json.loads(lines[0]))


def logp_of(logits_BxTxV: np.ndarray, tokens_BxT: np.ndarray) -> np.ndarray:
    logp = np.asarray(jax.nn.log_softmax(jnp.asarray(logits_BxTxV)))
    return np.take_along_axis(logp[:, :-1], tokens_BxT[:, 1:, None], axis=-1)[..., 0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('export', type=Path)
    parser.add_argument('--questions', type=Path, required=True)
    parser.add_argument('--count', type=int, default=4)
    given = parser.parse_args()
    tokens = np.array(questions(given.export, given.questions, given.count))
    if len(tokens) < given.count:
        parser.error(
            f'{given.questions} has {len(tokens)} questions of {TOKENS} tokens or more; --count={given.count}'
        )
    ours, theirs = our_logits(given.export, tokens), logits_of_torch(given.export, tokens)
    logp = logp_of(ours, tokens)
    print(
        f'{len(tokens)} questions of {TOKENS} tokens; |logit| up to {abs(ours).max():.1f}, log-probs '
        f'{logp.mean():.2f} on average'
    )
    print(f'logits, ours and torch:      largest difference {abs(ours - theirs).max():.1e}')
    print(f'log-probs, ours and torch:   largest difference {abs(logp - logp_of(theirs, tokens)).max():.1e}')
    print(
        'log-probs, ours and vLLM:    largest difference '
        f'{abs(logp - logp_of_vllm(given.export, tokens)).max():.1e}'
    )


if __name__ == '__main__':
    main()
