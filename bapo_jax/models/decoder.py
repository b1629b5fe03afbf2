"""The decoder of the families in families.py, in Flax NNX with scanned layers.

Qwen2.5-VL's decoder is Qwen2's with three positions per token. Its vision tower (vision/tower.py) computes
the features that replace the embeddings of image tokens.

Shapes:  B rows · T tokens · D width · N query heads · K key/value heads · H head size · F MLP width
         V vocabulary · L layers · I image features · S experts that a token chooses.
         Parameters (listed in parameters.py) are float32; matrix products run in `config.dtype`.

Not supported, as no checkpoint trained by this project needs them: sliding windows, dropout, attention sinks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict

from bapo_jax.cluster.split import Split
from bapo_jax.models.experts import Experts, Routing, route
from bapo_jax.models.families import FAMILIES
from bapo_jax.models.layers import Adapter, Linear, RMSNorm, Rope, rotate, swiglu
from bapo_jax.models.parameters import (
    ADAPTER_PARAMETERS,
    PARAMETERS,
    VISION_PARAMETERS,
    Parameter,
    is_trained,
)
from bapo_jax.models.remat import MLP_INPUT, REMAT, kept
from bapo_jax.models.rotary import Rotation, frequencies
from bapo_jax.models.vision.patches import VisionConfig
from bapo_jax.models.vision.tower import VisionTower

# (q_BxTxNxH, k_BxKxTxH, v_BxKxTxH) -> [B, T, N·H]; the function applies the mask itself.
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The fields of a Hugging Face `config.json` that shape the decoder."""

    model_type: str  # a row of FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the MLP, or of each expert
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotation: Rotation
    rms_norm_eps: float
    tie_embeddings: bool
    dtype: str = 'float32'  # of the matrix products
    value_head: bool = False  # a critic, which has values and no logits
    max_positions: int = 0  # longest sequence that the model was made for, in tokens; 0: not stated
    mrope_section: tuple[int, ...] = ()  # rotary frequencies for each of three positions; (): one position
    routing: Routing | None = None  # None: each layer has one MLP, which every token passes
    vision: VisionConfig | None = None
    adapter: Adapter | None = None

    @property
    def routed(self) -> bool:
        return self.routing is not None

    @property
    def dense(self) -> bool:
        return self.routing is None

    @property
    def chosen_width(self) -> int:
        """The width of the MLP, or of the experts that a token chooses, together."""
        return self.intermediate_size * (self.routing.chosen if self.routing else 1)

    @property
    def adapts_attention(self) -> bool:
        return self.adapter is not None and self.adapter.targets in ('all', 'attention')

    @property
    def adapts_mlp(self) -> bool:
        return self.adapter is not None and self.adapter.targets in ('all', 'mlp')

    @property
    def qkv_bias(self) -> bool:
        return FAMILIES[self.model_type].qkv_bias

    @property
    def qk_norm(self) -> bool:
        return FAMILIES[self.model_type].qk_norm

    @property
    def untied_head(self) -> bool:
        return not (self.tie_embeddings or self.value_head)


def parameters_of(config: ModelConfig) -> tuple[Parameter, ...]:
    """Returns the rows of the parameter table that this model has, in table order."""
    rows = PARAMETERS + VISION_PARAMETERS + ADAPTER_PARAMETERS
    return tuple(p for p in rows if not p.needs or getattr(config, p.needs))


def trained_parameters(config: ModelConfig, vision: bool) -> dict[str, Any]:
    """Returns the rows of the parameters that a run trains, as a tree; `vision` is as in `is_trained`."""
    adapts = config.adapter is not None
    return unflatten_dict({p.path: p for p in parameters_of(config) if is_trained(p, adapts, vision)})


class ImageFeatures(NamedTuple):
    """The vision tower's features of some rows' images, and the tokens whose embeddings they replace."""

    values_IxD: jax.Array
    at_BxT: jax.Array  # int32: index of the feature at a token; -1: the token's own embedding


def rope_tables(positions: jax.Array, config: ModelConfig) -> Rope:
    """Returns the rotary tables of tokens at `positions`.

    `positions` are [B, T] or, for a model with `mrope_section`, [3, B, T]; for text, all three are equal.
    """
    frequency_h, scale = frequencies(config.rotation, config.head_dim), config.rotation.scale
    if positions.ndim == 2:
        position_Bx1xTxh = positions[:, None, :, None]
    else:
        which_h = np.repeat(np.arange(len(config.mrope_section)) % 3, config.mrope_section)
        position_Bx1xTxh = jnp.moveaxis(positions[which_h], 0, -1)[:, None]
    angle_Bx1xTxh = position_Bx1xTxh.astype(jnp.float32) * frequency_h[None, None, None, :]
    rope = Rope(jnp.cos(angle_Bx1xTxh), jnp.sin(angle_Bx1xTxh))
    return rope if scale == 1 else Rope(scale * rope.cos, scale * rope.sin)


class Block(nnx.Module):
    """A decoder layer: attention, then gated MLP or experts.

    Both read the normalised residual stream and add to it.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, self.config = config, config

        def linear(inputs: int, outputs: int, adapts: bool, bias: bool = False, width: int = 0) -> Linear:
            adapter = c.adapter if adapts else None
            return Linear(c.dtype, inputs, outputs, bias=bias, width=width, adapter=adapter, rngs=rngs)

        self.attention_norm, self.mlp_norm = (
            RMSNorm(c.hidden_size, c.rms_norm_eps),
            RMSNorm(c.hidden_size, c.rms_norm_eps),
        )
        self.q = linear(c.hidden_size, c.num_heads * c.head_dim, c.adapts_attention, bias=c.qkv_bias)
        self.k = linear(c.hidden_size, c.num_kv_heads * c.head_dim, c.adapts_attention, bias=c.qkv_bias)
        self.v = linear(c.hidden_size, c.num_kv_heads * c.head_dim, c.adapts_attention, bias=c.qkv_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.o = linear(c.num_heads * c.head_dim, c.hidden_size, c.adapts_attention, width=1)
        if c.routing:
            self.router = linear(c.hidden_size, c.routing.experts, adapts=False)
            self.experts = Experts(c.dtype, c.routing.experts, c.hidden_size, c.intermediate_size, rngs=rngs)
        else:
            self.gate = linear(c.hidden_size, c.intermediate_size, c.adapts_mlp)
            self.up = linear(c.hidden_size, c.intermediate_size, c.adapts_mlp)
            self.down = linear(c.intermediate_size, c.hidden_size, c.adapts_mlp, width=1)

    def __call__(self, x_BxTxD, rope: Rope, attend: Attend, split: Split = Split()):
        """Returns the residual stream [B, T, D]. If split, weights are this device's heads and MLP part."""
        c, (B, T, _) = self.config, x_BxTxD.shape
        h_BxTxD = split.enter(self.attention_norm(x_BxTxD))
        # Heads precede tokens from here on: on a TPU, rotating in the kernel's layout saves float32 copies.
        q_BxNxTxH = self.q(h_BxTxD, split).reshape(B, T, -1, c.head_dim).swapaxes(1, 2)
        k_BxKxTxH = self.k(h_BxTxD, split).reshape(B, T, -1, c.head_dim).swapaxes(1, 2)
        if c.qk_norm:
            q_BxNxTxH, k_BxKxTxH = self.q_norm(q_BxNxTxH, split), self.k_norm(k_BxKxTxH, split)
        q_BxTxNxH, k_BxKxTxH = rotate(q_BxNxTxH, rope).swapaxes(1, 2), rotate(k_BxKxTxH, rope)
        v_BxKxTxH = self.v(h_BxTxD, split).reshape(B, T, -1, c.head_dim).swapaxes(1, 2)
        x_BxTxD = x_BxTxD + split.leave(self.o(attend(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH), split))
        x_BxTxD = kept(x_BxTxD, MLP_INPUT)
        return x_BxTxD + split.leave(self._mlp(self.mlp_norm(x_BxTxD), split))

    def _mlp(self, h_BxTxD: jax.Array, split: Split) -> jax.Array:
        """Returns [B, T, D] of the MLP or the experts; if split, what this device's part of them adds."""
        if not self.config.routing:
            h_BxTxD = split.enter(h_BxTxD)
            return self.down(swiglu(self.gate(h_BxTxD, split), self.up(h_BxTxD, split)), split)
        # Every device of 'tensor' routes all of its tokens alike.
        weight_BxTxS, expert_BxTxS = route(self.router(h_BxTxD, split), self.config.routing)
        return self.experts(split.enter(h_BxTxD), split.enter(weight_BxTxS), expert_BxTxS, split)


class Decoder(nnx.Module):
    """Maps token ids to final hidden states. `logits` maps these to logits, a critic's `values` to values."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(
            config.vocab_size, config.hidden_size, embedding_init=nnx.initializers.normal(0.02), rngs=rngs
        )

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked_layers(layer_rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=layer_rngs)

        self.layers = stacked_layers(rngs)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.untied_head:
            self.head = Linear(config.dtype, config.hidden_size, config.vocab_size, rngs=rngs)
        if config.value_head:
            self.value = Linear(config.dtype, config.hidden_size, 1, std=0.0, rngs=rngs)
        if config.vision:
            self.vision = VisionTower(config.vision, config.dtype, rngs=rngs)

    def __call__(
        self,
        tokens_BxT,
        positions,
        attend: Attend,
        images: ImageFeatures | None = None,
        *,
        remat: str = 'none',
        split: Split = Split(),
    ):
        """Returns hidden states [B, T, D] after the final norm.

        `positions` are as for `rope_tables`. `remat` is a key of REMAT and selects what the backward pass
        recomputes. In a split model, `images` has all columns of its features.
        """
        (graph, stacked), rope = nnx.split(self.layers), rope_tables(positions, self.config)

        def layer_step(x_BxTxD, weights):
            return nnx.merge(graph, weights)(x_BxTxD, rope, attend, split), None

        # In a scan XLA cannot merge recomputation with the forward pass, so CSE need not be prevented.
        step = (
            layer_step
            if remat == 'none'
            else jax.checkpoint(layer_step, policy=REMAT[remat], prevent_cse=False)
        )
        x_BxTxD = self._embed(tokens_BxT, images, split)
        x_BxTxD, _ = jax.lax.scan(step, x_BxTxD, stacked)
        return self.norm(x_BxTxD)

    def unrolled(
        self,
        layers: Sequence[Any],
        tokens_BxT,
        positions,
        attend_in: Callable[[int], Attend],
        images: ImageFeatures | None = None,
    ):
        """Returns hidden states [B, T, D] as above, from unstacked layers; layer i uses `attend_in(i)`."""
        x_BxTxD = self._embed(tokens_BxT, images, Split())
        graph, rope = nnx.split(self.layers)[0], rope_tables(positions, self.config)
        for i, weights in enumerate(layers):
            x_BxTxD = nnx.merge(graph, weights)(x_BxTxD, rope, attend_in(i))
        return self.norm(x_BxTxD)

    def _embed(self, tokens_BxT, images: ImageFeatures | None, split: Split):
        x_BxTxD = split.look_up(self.embedding.embedding[...], tokens_BxT, self.config.dtype)
        if images is None:
            return x_BxTxD
        feature_BxTxD = jnp.take(images.values_IxD, jnp.maximum(images.at_BxT, 0), axis=0).astype(
            x_BxTxD.dtype
        )
        return jnp.where((images.at_BxT >= 0)[..., None], feature_BxTxD, x_BxTxD)

    @property
    def head_VxD(self) -> jax.Array:
        """The weights of the output head; in a split model, this device's shard."""
        return self.head.kernel[...].T if self.config.untied_head else self.embedding.embedding[...]

    def logits(self, hidden_xD: jax.Array) -> jax.Array:
        """Returns a whole model's float32 logits [..., V]; learner/head.py has log-probs without them."""
        return jnp.matmul(
            hidden_xD, self.head_VxD.T.astype(hidden_xD.dtype), preferred_element_type=jnp.float32
        )

    def values(self, hidden_xD: jax.Array, split: Split = Split()) -> jax.Array:
        """Returns the float32 value [...] of each state; the model must have a value head."""
        return jnp.matmul(hidden_xD.astype(jnp.float32), split.gather(self.value.kernel[...], 0))[..., 0]


@functools.cache  # a dry run calls it a hundred times
def abstract_params(config: ModelConfig) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """Returns the model's graph and the shapes of its parameters; allocates nothing."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)[:2]
    return graph, nnx.to_pure_dict(state)
