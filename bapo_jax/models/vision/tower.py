"""The vision tower of Qwen2.5-VL in Flax NNX: scanned blocks map patches to features of the decoder's width.

A tower block is attention and a gated MLP, each reading the normalised residual stream. Most blocks attend
within a window, some within the whole image; attention is bidirectional. Finally, m × m patches are merged
into one feature. patches.py lays out images in rows of windows.

Shapes:  R rows · P slots in a row, whole windows · S slots that see each other · Q query slots at once
         C numbers of a patch · D the tower's width · N heads · H head size · I features = R · P / m²

Videos are not supported.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bapo_jax.cluster.split import Split, matmul
from bapo_jax.models.attention import masked
from bapo_jax.models.layers import Linear, RMSNorm, Rope, rotate, swiglu
from bapo_jax.models.remat import ATTENTION, MLP_INPUT, REMAT, kept
from bapo_jax.models.vision.patches import VisionConfig

_EPS, _THETA = 1e-6, 10_000.0  # not stated in config.json
_QUERIES = 512  # most slots of a row whose scores exist at once


def rope_tables_2d(position_RxPx2: jax.Array, config: VisionConfig) -> Rope:
    """Returns rotary tables [R, P, 1, H / 2]: half of the angles follow the patch's row, half its column."""
    quarter = config.head_dim // 4
    frequency_q = _THETA ** (-jnp.arange(quarter, dtype=jnp.float32) / quarter)
    angle_RxPx2xq = position_RxPx2[..., None].astype(jnp.float32) * frequency_q[None, None, None]
    angle_RxPx1xh = angle_RxPx2xq.reshape(*position_RxPx2.shape[:2], 1, 2 * quarter)
    return Rope(jnp.cos(angle_RxPx1xh), jnp.sin(angle_RxPx1xh))


def attend_within(span: int, q_RxPxNxH, k_RxPxNxH, v_RxPxNxH, image_RxP) -> jax.Array:
    """Returns attention [R, P, N·H] among slots of one image within each `span` slots: a window or a row.

    Long spans are computed in blocks of queries, each recomputed in the backward pass.
    """
    q_MxSxNxH, k_MxSxNxH, v_MxSxNxH, image_MxS = (
        x.reshape(-1, span, *x.shape[2:]) for x in (q_RxPxNxH, k_RxPxNxH, v_RxPxNxH, image_RxP)
    )
    k_MxNxSxH, v_MxNxSxH = k_MxSxNxH.swapaxes(1, 2), v_MxSxNxH.swapaxes(1, 2)

    def one_block(queries):
        q_MxQxNxH, image_MxQ = queries
        return masked(q_MxQxNxH, k_MxNxSxH, v_MxNxSxH, image_MxQ[:, :, None] == image_MxS[:, None, :])

    if span <= _QUERIES:
        return one_block((q_MxSxNxH, image_MxS)).reshape(*q_RxPxNxH.shape[:2], -1)
    block = next(size for size in range(_QUERIES, 0, -1) if span % size == 0)
    queries = tuple(x.reshape(len(x), -1, block, *x.shape[2:]).swapaxes(0, 1) for x in (q_MxSxNxH, image_MxS))
    return jax.lax.map(jax.checkpoint(one_block), queries).swapaxes(0, 1).reshape(*q_RxPxNxH.shape[:2], -1)


class PatchEmbedding(nnx.Module):
    """Embeds patches by a matrix product: Hugging Face's convolution has a stride of its kernel size."""

    def __init__(self, config: VisionConfig, dtype: str, *, rngs: nnx.Rngs):
        c, self.dtype = config, dtype
        shape = (c.hidden_size, c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size)
        self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape, jnp.float32))

    def __call__(self, pixels_RxPxC: jax.Array, split: Split = Split()) -> jax.Array:
        kernel_DxC = self.kernel[...].reshape(-1, pixels_RxPxC.shape[-1])
        return matmul(pixels_RxPxC.astype(self.dtype), kernel_DxC.T, split, 1)


class VisionBlock(nnx.Module):
    def __init__(self, config: VisionConfig, dtype: str, *, rngs: nnx.Rngs):
        self.config, D, F = config, config.hidden_size, config.intermediate_size
        linear = functools.partial(Linear, dtype, bias=True, rngs=rngs)
        self.attention_norm, self.mlp_norm = RMSNorm(D, _EPS), RMSNorm(D, _EPS)
        self.qkv, self.o = linear(D, 3 * D), linear(D, D, width=1)
        self.gate, self.up, self.down = linear(D, F), linear(D, F), linear(F, D, width=1)

    def __call__(self, x_RxPxD, rope: Rope, is_full, image_RxP, split: Split = Split()):
        c, (R, P, _) = self.config, x_RxPxD.shape
        qkv_RxPx3xNxH = self.qkv(self.attention_norm(x_RxPxD), split).reshape(
            R, P, 3, c.num_heads, c.head_dim
        )
        q_RxPxNxH, k_RxPxNxH, v_RxPxNxH = (qkv_RxPx3xNxH[:, :, i] for i in range(3))
        within = (functools.partial(attend_within, span) for span in (P, c.window_slots))
        out_RxPxD = jax.lax.cond(
            is_full, *within, rotate(q_RxPxNxH, rope), rotate(k_RxPxNxH, rope), v_RxPxNxH, image_RxP
        )
        x_RxPxD = x_RxPxD + self.o(kept(out_RxPxD, ATTENTION), split)
        x_RxPxD = kept(x_RxPxD, MLP_INPUT)
        h_RxPxD = self.mlp_norm(x_RxPxD)
        return x_RxPxD + self.down(swiglu(self.gate(h_RxPxD, split), self.up(h_RxPxD, split)), split)


class VisionTower(nnx.Module):
    """Maps the pixels of patches to features; slots without a patch give meaningless features."""

    def __init__(self, config: VisionConfig, dtype: str, *, rngs: nnx.Rngs):
        self.config, merged = config, config.hidden_size * config.spatial_merge_size**2
        self.patches = PatchEmbedding(config, dtype, rngs=rngs)

        @nnx.split_rngs(splits=config.depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked_blocks(block_rngs: nnx.Rngs) -> VisionBlock:
            return VisionBlock(config, dtype, rngs=block_rngs)

        self.blocks = stacked_blocks(rngs)
        self.merge_norm = RMSNorm(config.hidden_size, _EPS)
        self.merge_in = Linear(dtype, merged, merged, bias=True, rngs=rngs)
        self.merge_out = Linear(dtype, merged, config.out_hidden_size, bias=True, width=1, rngs=rngs)

    def __call__(
        self, pixels_RxPxC, position_RxPx2, image_RxP, *, remat: str = 'none', split: Split = Split()
    ) -> jax.Array:
        """Returns features [I, D of the decoder].

        The arrays are those of patches.Pixels; `remat` is a key of REMAT. In a split model, each device reads
        its own rows; devices along 'tensor' read the same rows.
        """
        c, (graph, stacked), rope = (
            self.config,
            nnx.split(self.blocks),
            rope_tables_2d(position_RxPx2, self.config),
        )

        def block_step(x_RxPxD, block):
            weights, is_full = block
            return nnx.merge(graph, weights)(x_RxPxD, rope, is_full, image_RxP, split), None

        # In a scan XLA cannot merge recomputation with the forward pass, so CSE need not be prevented.
        step = (
            block_step
            if remat == 'none'
            else jax.checkpoint(block_step, policy=REMAT[remat], prevent_cse=False)
        )
        is_full = np.isin(np.arange(c.depth), c.fullatt_block_indexes)
        x_RxPxD, _ = jax.lax.scan(step, self.patches(pixels_RxPxC, split), (stacked, is_full))
        merged_IxM = self.merge_norm(x_RxPxD).reshape(-1, c.hidden_size * c.spatial_merge_size**2)
        return self.merge_out(jax.nn.gelu(self.merge_in(merged_IxM, split), approximate=False), split)
