"""Linear attention of the hybrid families: the gated delta rule (Gated DeltaNet, arXiv 2412.06464).

Each head keeps a matrix S [H, W], which maps keys to values. A token decays it, corrects what it says of the
token's key by a share β of the error, and reads it with the token's query:

    S_t = e^(g_t) S_(t-1)
    S_t += k_t (β_t (v_t - S_tᵀ k_t))ᵀ
    o_t = S_tᵀ q_t                        q and k of length 1, q scaled by H^-½

Before that, queries, keys and values pass a causal convolution over the last few tokens. S and the
convolution begin anew where a segment of a packed row begins, so that sequences do not see each other.

Shapes:  B rows · T tokens · D width · N value heads · K key heads, each for N / K value heads
         H size of a key head · W size of a value head · C = 2 K H + N W channels
         S tokens of the convolution · M chunks · Q tokens of a chunk
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bapo_jax.cluster.split import Split, matmul
from bapo_jax.models.layers import Linear, RMSNorm
from bapo_jax.models.remat import ATTENTION, PRODUCT, kept

CHUNK = 64  # tokens that are computed by matrix products at once


class DeltaShape(NamedTuple):
    """The linear attention of a model, and which of its layers have it."""

    period: int  # every so many layers, the last of them has full attention in its place
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int  # tokens that the convolution sees, the newest included

    @property
    def channels(self) -> int:
        """The width of queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def kinds(self, layers: int) -> list[str]:
        """Returns config.json's `layer_types` of a model with whole periods of layers."""
        return (['linear_attention'] * (self.period - 1) + ['full_attention']) * (layers // self.period)


class Recur(NamedTuple):
    """What a layer needs to know of the tokens before: two functions that keep sequences apart themselves."""

    conv: Callable[[jax.Array, jax.Array], jax.Array]  # (x_BxTxC, kernel_CxS) -> [B, T, C]
    # (q_BxTxNxH, k_BxTxNxH, v_BxTxNxW, log_decay_BxTxN, beta_BxTxN), all float32 -> [B, T, N, W]
    rule: Callable[..., jax.Array]


def of_segments(segment_BxT: jax.Array) -> Recur:
    """Returns the functions for rows of segments; successive tokens of one number are a sequence."""
    return Recur(
        lambda x_BxTxC, kernel_CxS: convolved(x_BxTxC, kernel_CxS, segment_BxT),
        lambda *inputs: delta_rule(*inputs, segment_BxT)[0],
    )


def convolved(x_BxTxC: jax.Array, kernel_CxS: jax.Array, segment_BxT: jax.Array) -> jax.Array:
    """Returns Σ_s kernel_s x_(t-S+1+s) over the tokens of t's segment, float32 [B, T, C]."""
    (_, T, _), S = x_BxTxC.shape, kernel_CxS.shape[1]
    x_BxTxC, kernel_CxS = x_BxTxC.astype(jnp.float32), kernel_CxS.astype(jnp.float32)
    total_BxTxC = x_BxTxC * kernel_CxS[None, None, :, -1]
    for back in range(1, min(S, T)):
        there_BxTx1 = (_shifted(segment_BxT, back) == segment_BxT)[..., None]
        before_BxTxC = jnp.where(there_BxTx1, _shifted(x_BxTxC, back), 0.0)
        total_BxTxC += before_BxTxC * kernel_CxS[None, None, :, -1 - back]
    return total_BxTxC


def _shifted(x_BxT: jax.Array, back: int) -> jax.Array:
    """Returns the values of the tokens `back` before; -1 before a row begins, which is no segment."""
    start = jnp.full_like(x_BxT[:, :back], -1)
    return jnp.concatenate([start, x_BxT[:, :-back]], axis=1)


def delta_rule(
    q_BxTxNxH: jax.Array, k_BxTxNxH: jax.Array, v_BxTxNxW: jax.Array, log_decay_BxTxN: jax.Array,
    beta_BxTxN: jax.Array, segment_BxT: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns o [B, T, N, W], and the last S of each row, [B, N, H, W]; all float32.

    Within a chunk, the corrections are the solution of a triangular system (the paper's section 3.3); between
    chunks, S goes through a scan. A token with β = 0 and g = 0 leaves S as it is.
    """
    B, T, N, H = q_BxTxNxH.shape
    W, Q, M = v_BxTxNxW.shape[-1], min(CHUNK, T), -(-T // min(CHUNK, T))

    def in_chunks(x_BxTxN, mode='constant'):
        padded = jnp.pad(x_BxTxN, [(0, 0), (0, M * Q - T), *[(0, 0)] * (x_BxTxN.ndim - 2)], mode=mode)
        return padded.reshape(B, M, Q, *padded.shape[2:])

    q, k, v, log_decay, beta = (
        jnp.moveaxis(in_chunks(x), 3, 2)  # [B, M, N, Q, …]
        for x in (q_BxTxNxH, k_BxTxNxH, v_BxTxNxW, log_decay_BxTxN, beta_BxTxN)
    )
    segment_BxMxQ = in_chunks(segment_BxT, 'edge')  # tokens that are added leave the last S as it is
    own_BxMxQxQ = jnp.tril(segment_BxMxQ[..., :, None] == segment_BxMxQ[..., None, :])
    # Of a token's own segment alone: others in the row leave not even a rounding error.
    total_BxMxNxQ = jnp.einsum(
        'bmij,bmnj->bmni', own_BxMxQxQ.astype(jnp.float32), log_decay, precision='highest'
    )

    def faded(log_BxMxNx, there_BxMx):
        """Returns e^log where `there`, else 0; a positive log elsewhere would be infinite."""
        return jnp.exp(jnp.where(there_BxMx[:, :, None], log_BxMxNx, -jnp.inf))

    last_BxM = segment_BxMxQ[..., -1]
    before_BxM = jnp.concatenate([jnp.full((B, 1), -1, last_BxM.dtype), last_BxM[:, :-1]], axis=1)
    since_BxMxNxQ = faded(total_BxMxNxQ, segment_BxMxQ == before_BxM[..., None])  # of S before the chunk
    until_BxMxNxQ = faded(total_BxMxNxQ[..., -1:] - total_BxMxNxQ, segment_BxMxQ == last_BxM[..., None])
    between_BxMxNxQxQ = faded(total_BxMxNxQ[..., :, None] - total_BxMxNxQ[..., None, :], own_BxMxQxQ)
    system_BxMxNxQxQ = jnp.einsum('bmnih,bmnjh->bmnij', k * beta[..., None], k) * between_BxMxNxQxQ
    # Of each correction, the part that the chunk's values make, and the factor of S before the chunk.
    made = jax.lax.linalg.triangular_solve(
        system_BxMxNxQxQ, jnp.concatenate([v, k * since_BxMxNxQ[..., None]], axis=-1) * beta[..., None],
        left_side=True, lower=True, unit_diagonal=True,
    )  # fmt: skip
    own = jnp.einsum('bmnih,bmnjh->bmnij', q, k) * between_BxMxNxQxQ
    decay_BxMxN = since_BxMxNxQ[..., -1]
    inputs = made[..., :W], made[..., W:], q * since_BxMxNxQ[..., None], own, k * until_BxMxNxQ[..., None]

    def chunk_step(s_BxNxHxW, chunk):
        made_BxNxQxW, by_s_BxNxQxH, q_BxNxQxH, own_BxNxQxQ, k_BxNxQxH, decay_BxN = chunk
        new_BxNxQxW = made_BxNxQxW - by_s_BxNxQxH @ s_BxNxHxW
        out_BxNxQxW = q_BxNxQxH @ s_BxNxHxW + own_BxNxQxQ @ new_BxNxQxW
        return s_BxNxHxW * decay_BxN[..., None, None] + k_BxNxQxH.swapaxes(-1, -2) @ new_BxNxQxW, out_BxNxQxW

    s_BxNxHxW, out_MxBxNxQxW = jax.lax.scan(
        chunk_step,
        jnp.zeros((B, N, H, W), jnp.float32),
        jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (*inputs, decay_BxMxN)),
    )
    out_BxTxNxW = out_MxBxNxQxW.transpose(1, 0, 3, 2, 4).reshape(B, M * Q, N, W)[:, :T]
    return out_BxTxNxW, s_BxNxHxW


def next_token(
    q_BxNxH: jax.Array, k_BxNxH: jax.Array, v_BxNxW: jax.Array, log_decay_BxN: jax.Array, beta_BxN: jax.Array,
    s_BxNxHxW: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns o [B, N, W] of one more token of each row, and S [B, N, H, W]; all float32.

    Sums, not matrix products: a CPU's products round by the number of rows.
    """
    s_BxNxHxW = s_BxNxHxW * jnp.exp(log_decay_BxN)[..., None, None]
    said_BxNxW = jnp.sum(s_BxNxHxW * k_BxNxH[..., None], axis=2)
    new_BxNxW = beta_BxN[..., None] * (v_BxNxW - said_BxNxW)
    s_BxNxHxW += k_BxNxH[..., None] * new_BxNxW[:, :, None]
    return jnp.sum(s_BxNxHxW * q_BxNxH[..., None], axis=2), s_BxNxHxW


class GatedDelta(nnx.Module):
    """Linear attention in place of a layer's attention."""

    def __init__(self, shape: DeltaShape, dtype: str, width: int, eps: float, *, rngs: nnx.Rngs):
        s, self.shape, self.dtype = shape, shape, dtype
        N, values = s.value_heads, s.value_heads * s.value_dim
        self.qkv = Linear(dtype, width, s.channels, rngs=rngs)
        self.gate = Linear(dtype, width, values, rngs=rngs)
        self.beta = Linear(dtype, width, N, rngs=rngs)
        self.decay = Linear(dtype, width, N, rngs=rngs)
        bound = s.conv**-0.5
        # As in the file, [channel, 1, token].
        self.conv = nnx.Param(
            jax.random.uniform(rngs.params(), (s.channels, 1, s.conv), jnp.float32, -bound, bound)
        )
        self.a_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (N,), jnp.float32, 0.01, 16.0)))
        self.dt_bias = nnx.Param(jnp.ones(N, jnp.float32))
        self.norm = RMSNorm(s.value_dim, eps)
        self.out = Linear(dtype, values, width, width=1, rngs=rngs)

    def __call__(self, h_BxTxD: jax.Array, recur: Recur, split: Split = Split()) -> jax.Array:
        """Returns [B, T, D]: if split, what this device's heads add to it."""
        s, (B, T, _) = self.shape, h_BxTxD.shape
        K, N = s.key_heads // split.tensor, s.value_heads // split.tensor
        h_BxTxD = h_BxTxD.astype(self.dtype)
        x_BxTxC = kept(matmul(h_BxTxD, self._own(self.qkv.kernel[...], 1, split), split, 0), PRODUCT)
        kernel_CxS = self._own(self.conv[...], 0, split)[:, 0].astype(self.dtype)
        x_BxTxC = jax.nn.silu(recur.conv(x_BxTxC, kernel_CxS))
        q, k, v = jnp.split(x_BxTxC, (K * s.key_dim, 2 * K * s.key_dim), axis=-1)
        q_BxTxNxH, k_BxTxNxH = (
            jnp.repeat(_of_length_one(x.reshape(B, T, K, s.key_dim)), N // K, axis=2) for x in (q, k)
        )
        beta_BxTxN = jax.nn.sigmoid(self.beta(h_BxTxD, split).astype(jnp.float32))
        rate_N, bias_N = jnp.exp(self.a_log[...]), self.dt_bias[...]
        step_BxTxN = jax.nn.softplus(self.decay(h_BxTxD, split).astype(jnp.float32) + bias_N[None, None])
        v_BxTxNxW = v.reshape(B, T, N, s.value_dim)
        out_BxTxNxW = recur.rule(
            q_BxTxNxH * s.key_dim**-0.5, k_BxTxNxH, v_BxTxNxW, -rate_N[None, None] * step_BxTxN, beta_BxTxN
        )
        out_BxTxNxW = self.norm(kept(out_BxTxNxW.astype(self.dtype), ATTENTION), split)
        gate_BxTxV = jax.nn.silu(self.gate(h_BxTxD, split).astype(jnp.float32))
        return self.out(out_BxTxNxW.reshape(B, T, -1).astype(jnp.float32) * gate_BxTxV, split)

    def _own(self, x: jax.Array, axis: int, split: Split) -> jax.Array:
        """Returns the channels of this device's heads, along `axis` of an array that 'tensor' does not split.

        A file has queries, keys and values as one tensor, so equal parts of it are not parts of each.
        """
        if split.tensor == 1:
            return x
        keys = self.shape.key_heads * self.shape.key_dim
        parts = jnp.split(split.enter(x), (keys, 2 * keys), axis=axis)
        sizes = [part.shape[axis] // split.tensor for part in parts]
        device = jax.lax.axis_index('tensor')
        return jnp.concatenate(
            [
                jax.lax.dynamic_slice_in_dim(part, device * size, size, axis)
                for part, size in zip(parts, sizes, strict=True)
            ],
            axis=axis,
        )


def _of_length_one(x_BxTxKxH: jax.Array) -> jax.Array:
    return x_BxTxKxH * jax.lax.rsqrt(jnp.sum(jnp.square(x_BxTxKxH), axis=-1, keepdims=True) + 1e-6)
