"""Embeddings of prompts without a model: counts of their token n-grams, hashed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bapo_jax.groups import Prompt

_BITS = 9  # of a dimension's index
_LONGEST = 3  # tokens of an n-gram
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio (Knuth's multiplicative hashing)


def ngram_embeddings(prompts: Sequence[Prompt]) -> np.ndarray:
    """Float32 [prompts, 512]: signed counts of each prompt's 1-, 2- and 3-grams of tokens, by their hash.

    A bit of the hash is the sign, so that n-grams with the same index cancel on average.
    """
    rows = np.zeros((len(prompts), 1 << _BITS), np.float32)
    for row, prompt in zip(rows, prompts, strict=True):
        tokens, hashed = prompt.tokens.astype(np.uint64), np.zeros(len(prompt.tokens), np.uint64)
        for n in range(min(_LONGEST, len(tokens))):
            hashed = hashed[: len(tokens) - n] + tokens[n:] + np.uint64(1)
            hashed = (hashed ^ hashed >> np.uint64(32)) * _MULTIPLIER  # modulo 2^64
            sign = np.where(hashed >> np.uint64(63), 1, -1)
            np.add.at(row, (hashed >> np.uint64(63 - _BITS)).astype(int) % (1 << _BITS), sign)
    return rows
