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
from flax import nnx
from flax.traverse_util import unflatten_dict

from bapo_jax.cluster.split import Split
from bapo_jax.models.delta import DeltaShape, GatedDelta, Recur
from bapo_jax.models.experts import Counted, Experts, Routed, Routing, imbalance, route
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
from bapo_jax.models.rotary import Rotation, rope_tables
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
    delta: DeltaShape | None = None  # of a hybrid model, most of whose layers have linear attention
    vision: VisionConfig | None = None
    adapter: Adapter | None = None

    @property
    def routed(self) -> bool:
        return self.routing is not None

    @property
    def dense(self) -> bool:
        return self.routing is None

    @property
    def hybrid(self) -> bool:
        return self.delta is not None

    @property
    def period(self) -> int:
        """Every so many layers, one has full attention."""
        return self.delta.period if self.delta else 1

    def stack_of(self, layer: int) -> tuple[str, int]:
        """Returns the name of the stack of parameters that a layer belongs to, and its place there."""
        before = layer // self.period
        return ('delta_layers', layer - before) if (layer + 1) % self.period else ('layers', before)

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


class Block(nnx.Module):
    """A decoder layer: attention, or linear attention if `delta`, then gated MLP or experts.

    Both read the normalised residual stream and add to it.
    """

    def __init__(self, config: ModelConfig, *, delta: bool = False, rngs: nnx.Rngs):
        c, self.config = config, config

        def linear(inputs: int, outputs: int, adapts: bool, bias: bool = False, width: int = 0) -> Linear:
            adapter = c.adapter if adapts else None
            return Linear(c.dtype, inputs, outputs, bias=bias, width=width, adapter=adapter, rngs=rngs)

        self.attention_norm, self.mlp_norm = (
            RMSNorm(c.hidden_size, c.rms_norm_eps, c.hybrid),
            RMSNorm(c.hidden_size, c.rms_norm_eps, c.hybrid),
        )
        self.delta = GatedDelta(c.delta, c.dtype, c.hidden_size, c.rms_norm_eps, rngs=rngs) if delta else None
        if not delta:
            queries = c.num_heads * c.head_dim * (2 if c.hybrid else 1)  # with each head's, its gates
            self.q = linear(c.hidden_size, queries, c.adapts_attention, bias=c.qkv_bias)
            self.k = linear(c.hidden_size, c.num_kv_heads * c.head_dim, c.adapts_attention, bias=c.qkv_bias)
            self.v = linear(c.hidden_size, c.num_kv_heads * c.head_dim, c.adapts_attention, bias=c.qkv_bias)
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, c.hybrid) if c.qk_norm else None
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, c.hybrid) if c.qk_norm else None
            self.o = linear(c.num_heads * c.head_dim, c.hidden_size, c.adapts_attention, width=1)
        if c.routing:
            self.router = linear(c.hidden_size, c.routing.experts, adapts=False)
            self.experts = Experts(c.dtype, c.routing.experts, c.hidden_size, c.intermediate_size, rngs=rngs)
        else:
            self.gate = linear(c.hidden_size, c.intermediate_size, c.adapts_mlp)
            self.up = linear(c.hidden_size, c.intermediate_size, c.adapts_mlp)
            self.down = linear(c.intermediate_size, c.hidden_size, c.adapts_mlp, width=1)

    def __call__(
        self, x_BxTxD, rope: Rope, attend: Attend | Recur, split: Split = Split(),
        counted: Counted | None = None,
    ) -> tuple[jax.Array, Routed | None]:  # fmt: skip
        """Returns the residual stream [B, T, D], and what was routed, if there are experts.

        If split, weights are this device's heads and MLP part. `counted` asks for the experts' imbalance.
        A layer with linear attention takes a Recur in place of `attend`.
        """
        h_BxTxD = split.enter(self.attention_norm(x_BxTxD))
        if self.delta:
            seen_BxTxD = self.delta(h_BxTxD, attend, split)
        else:
            seen_BxTxD = self._attention(h_BxTxD, rope, attend, split)
        x_BxTxD = x_BxTxD + split.leave(seen_BxTxD)
        x_BxTxD = kept(x_BxTxD, MLP_INPUT)
        y_BxTxD, routed = self._mlp(self.mlp_norm(x_BxTxD), split, counted)
        return x_BxTxD + split.leave(y_BxTxD), routed

    def _attention(self, h_BxTxD: jax.Array, rope: Rope, attend: Attend, split: Split) -> jax.Array:
        """Returns [B, T, D] of the attention: if split, what this device's heads add."""
        c, (B, T, _) = self.config, h_BxTxD.shape
        # Heads precede tokens from here on: on a TPU, rotating in the kernel's layout saves float32 copies.
        q_BxTxNxH = self.q(h_BxTxD, split).reshape(B, T, -1, c.head_dim * (2 if c.hybrid else 1))
        if c.hybrid:
            q_BxTxNxH, gate_BxTxNxH = jnp.split(q_BxTxNxH, 2, axis=-1)
        q_BxNxTxH = q_BxTxNxH.swapaxes(1, 2)
        k_BxKxTxH = self.k(h_BxTxD, split).reshape(B, T, -1, c.head_dim).swapaxes(1, 2)
        if c.qk_norm:
            q_BxNxTxH, k_BxKxTxH = self.q_norm(q_BxNxTxH, split), self.k_norm(k_BxKxTxH, split)
        q_BxTxNxH, k_BxKxTxH = rotate(q_BxNxTxH, rope).swapaxes(1, 2), rotate(k_BxKxTxH, rope)
        v_BxKxTxH = self.v(h_BxTxD, split).reshape(B, T, -1, c.head_dim).swapaxes(1, 2)
        seen_BxTxNH = attend(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH)
        if c.hybrid:
            seen_BxTxNH *= jax.nn.sigmoid(gate_BxTxNxH.reshape(B, T, -1))
        return self.o(seen_BxTxNH, split)

    def _mlp(
        self, h_BxTxD: jax.Array, split: Split, counted: Counted | None
    ) -> tuple[jax.Array, Routed | None]:
        """Returns [B, T, D] of the MLP or the experts: if split, what this device's part adds."""
        if not self.config.routing:
            h_BxTxD = split.enter(h_BxTxD)
            return self.down(swiglu(self.gate(h_BxTxD, split), self.up(h_BxTxD, split)), split), None
        # Every device of 'tensor' routes all of its tokens alike.
        weight_BxTxS, expert_BxTxS, probability_BxTxE = route(
            self.router(h_BxTxD, split), self.config.routing
        )
        y_BxTxD = self.experts(split.enter(h_BxTxD), split.enter(weight_BxTxS), expert_BxTxS, split)
        uneven = imbalance(probability_BxTxE, expert_BxTxS, counted, split) if counted else None
        return y_BxTxD, Routed(expert_BxTxS, uneven)


class Decoder(nnx.Module):
    """Maps token ids to final hidden states. `logits` maps these to logits, a critic's `values` to values."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(
            config.vocab_size, config.hidden_size, embedding_init=nnx.initializers.normal(0.02), rngs=rngs
        )

        def stacked_layers(layers: int, delta: bool) -> Block:
            @nnx.split_rngs(splits=layers)
            @nnx.vmap(in_axes=0, out_axes=0)
            def blocks(layer_rngs: nnx.Rngs) -> Block:
                return Block(config, delta=delta, rngs=layer_rngs)

            return blocks(rngs)

        full = config.num_layers // config.period
        self.layers = stacked_layers(full, delta=False)
        if config.hybrid:
            self.delta_layers = stacked_layers(config.num_layers - full, delta=True)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.hybrid)
        if config.untied_head:
            self.head = Linear(config.dtype, config.hidden_size, config.vocab_size, rngs=rngs)
        if config.value_head:
            self.value = Linear(config.dtype, config.hidden_size, 1, std=0.0, rngs=rngs)
        if config.vision:
            self.vision = VisionTower(config.vision, config.dtype, rngs=rngs)

    def __call__(self, *inputs: Any, **options: Any) -> jax.Array:
        """Returns the hidden states of `and_routed` alone."""
        return self.and_routed(*inputs, **options)[0]

    def and_routed(
        self,
        tokens_BxT,
        positions,
        attend: Attend,
        images: ImageFeatures | None = None,
        *,
        recur: Recur | None = None,
        remat: str = 'none',
        split: Split = Split(),
        counted: Counted | None = None,
    ) -> tuple[jax.Array, Routed | None]:
        """Returns hidden states [B, T, D] after the final norm, and what all layers routed.

        The latter is None for a model without experts. `positions` are as for `rope_tables`. `remat` is a key
        of REMAT and selects what the backward pass recomputes. In a split model, `images` has all columns of
        its features. `counted` is as for a block. A hybrid model needs `recur`.
        """
        rope = rope_tables(positions, self.config)

        def step_of(graph, attend):
            def layer_step(x_BxTxD, weights):
                return nnx.merge(graph, weights)(x_BxTxD, rope, attend, split, counted)

            # In a scan XLA cannot merge recomputation with the forward pass, so CSE need not be prevented.
            if remat == 'none':
                return layer_step
            return jax.checkpoint(layer_step, policy=REMAT[remat], prevent_cse=False)

        graph, stacked = nnx.split(self.layers)
        step = step_of(graph, attend)
        if self.config.hybrid:
            graph, of_delta = nnx.split(self.delta_layers)
            delta_step, full_step, before = step_of(graph, recur), step, self.config.period - 1
            periods = jax.tree.map(lambda w: w.reshape(-1, before, *w.shape[1:]), of_delta)
            stacked = (periods, stacked)

            def step(x_BxTxD, weights):
                return full_step(jax.lax.scan(delta_step, x_BxTxD, weights[0])[0], weights[1])

        x_BxTxD = self._embed(tokens_BxT, images, split)
        x_BxTxD, routed = jax.lax.scan(step, x_BxTxD, stacked)
        return self.norm(x_BxTxD), routed

    def unrolled(
        self,
        layers: Sequence[Any],
        tokens_BxT,
        positions,
        attend_in: Callable[[str, int], Attend | Recur],
        images: ImageFeatures | None = None,
    ):
        """Returns hidden states [B, T, D] as above, from unstacked layers.

        The layer at a place in a stack (`stack_of`) uses `attend_in(stack, place)`.
        """
        x_BxTxD, rope = self._embed(tokens_BxT, images, Split()), rope_tables(positions, self.config)
        stacks = {'layers': self.layers} | ({'delta_layers': self.delta_layers} if self.config.hybrid else {})
        graphs = {name: nnx.split(stack)[0] for name, stack in stacks.items()}
        for i, weights in enumerate(layers):
            stack, place = self.config.stack_of(i)
            x_BxTxD, _ = nnx.merge(graphs[stack], weights)(x_BxTxD, rope, attend_in(stack, place))
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
