"""Embeddings of texts by a Hugging Face model: the mean of a decoder's last hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bapo_jax.models import delta, hf
from bapo_jax.models.decoder import ModelConfig, abstract_params
from bapo_jax.models.kernels import packed

_ROWS = 32  # texts computed at once
_SHORTEST = 16  # rows are padded to a power of two of tokens, so that few programs are compiled


def mean_states(path: str | Path, config: ModelConfig, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Each text's mean hidden state after the final norm, over its tokens; float32 [texts, D].

    `texts` are token ids; a text without any has zeros. The weights in `path` are read onto the first device,
    and freed afterwards. Raises the errors of `hf.load_params`.
    """
    params, graph, attention = hf.load_params(path, config), abstract_params(config)[0], packed('xla')

    @jax.jit
    def means(params, tokens_BxT, length_B):
        at_BxT = jnp.broadcast_to(jnp.arange(tokens_BxT.shape[1]), tokens_BxT.shape)
        is_text_BxT = at_BxT < length_B[:, None]
        segment_BxT = is_text_BxT.astype(jnp.int32)

        def attend(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH):
            return attention(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT)

        recur = delta.of_segments(segment_BxT) if config.hybrid else None
        state_BxTxD = nnx.merge(graph, params)(tokens_BxT, at_BxT, attend, recur=recur).astype(jnp.float32)
        total_BxD = jnp.sum(jnp.where(is_text_BxT[..., None], state_BxTxD, 0.0), axis=1)
        return total_BxD / jnp.maximum(length_B, 1)[:, None].astype(jnp.float32)

    result = np.zeros((len(texts), config.hidden_size), np.float32)
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for first in range(0, len(texts), _ROWS):
        of_batch = by_length[first : first + _ROWS]
        longest = max(_SHORTEST, *(len(texts[i]) for i in of_batch))
        tokens = np.zeros((_ROWS, 1 << (longest - 1).bit_length()), np.int32)
        lengths = np.zeros(_ROWS, np.int32)
        for row, i in enumerate(of_batch):
            tokens[row, : len(texts[i])], lengths[row] = texts[i], len(texts[i])
        result[of_batch] = np.asarray(means(params, tokens, lengths))[: len(of_batch)]
    return result
