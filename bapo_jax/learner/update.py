"""The jitted update: one optimizer step on one mini-batch, accumulated over micro-batches. Line 18 of Algorithm 1.

Shapes:  M micro-batches (a power of two, the last ones may be empty) · R rows · T tokens in a row.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from bapo_jax import parallel
from bapo_jax.groups import Batch
from bapo_jax.hosts import Hosts
from bapo_jax.learner.logprobs import token_logprobs
from bapo_jax.learner.losses import policy_loss, total_variation, truncated_weight
from bapo_jax.learner.packing import SOURCES, Rows, blank_rows, micro_batches, pack_batch
from bapo_jax.models.attention import Attention, packed
from bapo_jax.parallel import fetch, spread

ANCHORS = ('behaviour', 'proximal', 'decoupled')
KL_TARGETS = ('behaviour', 'reference', 'none')
_BY_SOURCE = ('clipped_by_source', 'tv_by_source', 'ratio_by_source', 'squared_ratio_by_source', 'tokens_by_source')


class TrainState(NamedTuple):
    """θ (float32 master copy) and the optimizer's moments."""

    params: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """The choices of the 'learning' axis that the compiled step is specialised to."""

    anchor: str
    kl_target: str
    kl_coef: float
    entropy_coef: float
    clip_low: float
    clip_high: float
    dual_clip: float | None
    importance_cap: float
    chunk: int
    remat: bool
    attention: Attention


class Learner:
    """Holds what is compiled; every array it trains is in the TrainState that is passed through."""

    def __init__(self, graph: nnx.GraphDef, config: Any, temperature: float, mesh: Mesh, kernel: str, hosts: Hosts = Hosts()):
        """`config` is the learner's part of the run's config; `temperature` that of the rollouts; `kernel` the attention's."""
        self.kernel = kernel
        self._config, self._temperature, self._mesh, self._hosts = config, np.float32(temperature), mesh, hosts
        self._spec = LossSpec(
            anchor=config.anchor,
            kl_target=config.kl_target,
            kl_coef=config.kl_coef,
            entropy_coef=config.entropy_coef,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip or None,
            importance_cap=config.importance_cap,
            chunk=config.logprob_chunk,
            remat=config.remat,
            attention=packed(kernel, mesh),
        )
        self.learning_rate = optax.linear_schedule(0.0, config.learning_rate, config.warmup_updates) if config.warmup_updates else (
            optax.constant_schedule(config.learning_rate)
        )  # fmt: skip
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(config.grad_clip),
            optax.adamw(self.learning_rate, weight_decay=config.weight_decay),
        )
        self._update = jax.jit(
            functools.partial(_update, graph=graph, spec=self._spec, optimizer=self._optimizer, mesh=mesh), donate_argnames='state'
        )
        self._score = jax.jit(functools.partial(_score, graph=graph, attention=self._spec.attention, chunk=config.logprob_chunk))

    def shapes(self, params: Any) -> TrainState:
        """The state for `params` (arrays or shapes) without the arrays: where each lives, the moments as the parameters are."""
        moments = jax.eval_shape(self._optimizer.init, params)
        sharding = parallel.parameter_sharding(self._mesh, params)
        moments_sharding = optax.tree.map_params(
            self._optimizer, lambda _, s: s, moments, sharding, transform_non_params=lambda _: parallel.replicated(self._mesh)
        )
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            TrainState(params, moments),
            TrainState(sharding, moments_sharding),
        )

    def init(self, params: Any) -> TrainState:
        """θ_0 on the mesh, and zero moments."""
        sharding = jax.tree.map(lambda x: x.sharding, self.shapes(params))
        params = jax.device_put(params, sharding.params)
        return TrainState(params, jax.jit(self._optimizer.init, out_shardings=sharding.opt_state)(params))

    def compile_update(self, params: Any, micro_batches: int) -> jax.stages.Compiled:
        """The optimizer step on a mini-batch of up to `micro_batches`, compiled from shapes: nothing is allocated."""
        shape, sharding = (micro_batches, self._config.micro_batch_rows, self._config.row_tokens), parallel.row_sharding(self._mesh, 1)
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding), blank_rows((0, 0, 0)))
        proximal = None if self._spec.anchor == 'behaviour' else rows.behaviour_logp
        reference = rows.behaviour_logp if self._spec.kl_target == 'reference' else None
        return self._update.lower(self.shapes(params), rows, micro_batches, proximal, reference, self._temperature).compile()

    def update(self, state: TrainState, batch: Batch, rng: np.random.Generator, reference: Any = None):
        """One pass of optimizer steps over the batch's mini-batches, in an order drawn from `rng`.

        Returns the new state (the old one's buffers are donated) and metrics, means over the mini-batches.
        Raises FloatingPointError where the gradient is not finite. A batch without groups changes nothing.
        """
        started = time.perf_counter()
        orders = [rng.permutation(len(batch.groups)) for _ in range(self._config.passes_per_batch)]
        packed = [rows for order in orders for rows in pack_batch(batch, order, self._config)]
        counts = [micro_batches(rows) for rows in packed]
        packing_s = time.perf_counter() - started
        self._hosts.tell('update', shapes=[rows.tokens.shape for rows in packed], counts=counts)
        state, metrics = self.update_packed(state, packed, counts, reference)
        return state, {**metrics, 'timing_s/pack': packing_s}

    def update_packed(self, state: TrainState, packed: list[Rows], counts: list[int], reference: Any = None):
        """The part of `update` that all hosts do: an optimizer step on each of `packed`, of whose micro-batches so many hold tokens."""
        started = time.perf_counter()
        sharding = parallel.row_sharding(self._mesh, 1)
        parts = [(spread(rows, sharding), n) for rows, n in zip(packed, counts, strict=True)]
        # The anchor is the policy before any of this step's updates, so every part of every pass is scored first.
        scoring_started = time.perf_counter()
        scored = [(self._proximal(state, *part), self._reference(reference, *part)) for part in parts]
        jax.block_until_ready(scored)
        scoring_s = time.perf_counter() - scoring_started
        metrics = []
        for part, anchors in zip(parts, scored, strict=True):
            state, part_metrics = self._update(state, *part, *anchors, self._temperature)
            metrics.append(part_metrics)
        return state, {
            **_mean_metrics(jax.device_get(metrics)),
            'actor/lr': float(self.learning_rate(max(0, self._updates_done(state) - 1))),
            'timing_s/old_log_prob': scoring_s,
            'timing_s/update_actor': time.perf_counter() - started - scoring_s,
        }

    def logprobs(self, params: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(behaviour log-probs, log-probs under `params`) of all response tokens of a batch, float32 [tokens] each, in one order."""
        packed = pack_batch(batch, np.arange(len(batch.groups)), self._config)
        counts = [micro_batches(rows) for rows in packed]
        self._hosts.tell('logprobs', shapes=[rows.tokens.shape for rows in packed], counts=counts)
        scored = self.logprobs_packed(params, packed, counts)
        responses = [rows.source > 0 for rows in packed]
        behaviour = np.concatenate([rows.behaviour_logp[r] for rows, r in zip(packed, responses, strict=True)])
        return behaviour, np.concatenate([logp[r] for logp, r in zip(scored, responses, strict=True)])

    def logprobs_packed(self, params: Any, packed: list[Rows], counts: list[int]) -> list[np.ndarray]:
        """The part of `logprobs` that all hosts do: [M, R, T] for each of `packed`, 0 but on response tokens."""
        sharding = parallel.row_sharding(self._mesh, 1)
        return [
            fetch(self._score(params, spread(rows, sharding), n, self._temperature)) for rows, n in zip(packed, counts, strict=True)
        ]

    def _proximal(self, state: TrainState, rows: Rows, n: int):
        return None if self._spec.anchor == 'behaviour' else self._score(state.params, rows, n, self._temperature)

    def _reference(self, reference: Any, rows: Rows, n: int):
        if self._spec.kl_target != 'reference':
            return None
        return self._score(reference, rows, n, self._temperature)

    def _updates_done(self, state: TrainState) -> int:
        return int(optax.tree.get(state.opt_state, 'count', filtering=lambda path, _: 'ScaleByAdamState' in str(path)))


def _mean_metrics(parts: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """Means over the mini-batches; by source, over that source's tokens, what compares π_θ with the policy that answered, ρ being the
    ratio of the two: clipped share, TV, mean of ρ, and effective sample size (Σρ)² / (n Σρ²). Empty without a mini-batch."""
    if not parts:
        return {}
    bad = [i for i, part in enumerate(parts) if not np.isfinite(part['actor/grad_norm'])]
    if bad:
        raise FloatingPointError(
            f'the gradient of mini-batch {bad[0]} is not finite; lower learner.learning_rate or learner.grad_clip, '
            'and continue from the last checkpoint'
        )
    sums = [sum(part.pop(name) for part in parts) for name in _BY_SOURCE]
    metrics = {name: float(np.mean([part[name] for part in parts], dtype=np.float64)) for name in parts[0]}
    for source, clipped, tv, ratio, squared_ratio, tokens in zip(SOURCES, *sums, strict=True):
        if tokens:
            metrics |= {
                f'actor/pg_clipfrac/{source}': float(clipped / tokens),
                f'staleness/tv/{source}': float(tv / tokens),
                f'staleness/ratio/{source}': float(ratio / tokens),
                f'staleness/ess/{source}': float(ratio**2 / (tokens * squared_ratio)),
            }
    return {**metrics, 'actor/updates': len(parts)}


def _micro_loss(params, rows: Rows, proximal, reference, temperature, graph, spec: LossSpec):
    """Σ weight · (policy + β KL - entropy bonus) over one micro-batch [R, T], and sums for the metrics."""
    model = nnx.merge(graph, params)
    logp_RxT, entropy_RxT = token_logprobs(
        model, rows.tokens, rows.segment, rows.position, temperature,
        attention=spec.attention, chunk=spec.chunk, remat=spec.remat,
    )  # fmt: skip
    response_RxT = rows.source > 0
    logp_RxT = jnp.where(response_RxT, logp_RxT, 0.0)
    ones_RxT = jnp.ones_like(logp_RxT)
    anchor_RxT = rows.behaviour_logp if spec.anchor == 'behaviour' else proximal
    weight_RxT = truncated_weight(proximal, rows.behaviour_logp, spec.importance_cap) if spec.anchor == 'decoupled' else ones_RxT
    kl_logp_RxT = {'behaviour': rows.behaviour_logp, 'reference': reference, 'none': jax.lax.stop_gradient(logp_RxT)}[spec.kl_target]
    loss = policy_loss(
        logp_RxT, anchor_RxT, weight_RxT, ones_RxT, kl_logp_RxT, rows.advantage,
        clip_low=spec.clip_low, clip_high=spec.clip_high, dual_clip=spec.dual_clip,
    )  # fmt: skip
    total_RxT = loss.policy_T + spec.kl_coef * loss.kl_T - spec.entropy_coef * entropy_RxT
    ratio_RxT = jnp.exp(jnp.where(response_RxT, logp_RxT - rows.behaviour_logp, 0.0))
    source_RxTxX = rows.source[..., None] == 1 + jnp.arange(len(SOURCES))

    def weighted(x_RxT):
        return jnp.sum(rows.weight * x_RxT)

    def by_source(x_RxT):
        return jnp.sum(x_RxT[..., None] * source_RxTxX, axis=(0, 1), dtype=jnp.float32)

    return weighted(total_RxT), {
        'actor/pg_loss': weighted(loss.policy_T),
        'actor/kl_loss': weighted(loss.kl_T),
        'actor/entropy': weighted(entropy_RxT),
        'actor/pg_clipfrac': weighted(loss.clipped_T),
        'actor/ppo_kl': weighted(anchor_RxT - logp_RxT),
        'clipped_by_source': by_source(loss.clipped_T),
        'tv_by_source': by_source(total_variation(logp_RxT, rows.behaviour_logp)),
        'ratio_by_source': by_source(ratio_RxT),
        'squared_ratio_by_source': by_source(ratio_RxT**2),
        'tokens_by_source': by_source(ones_RxT),
    }


def _update(state: TrainState, rows: Rows, n_micro, proximal, reference, temperature, *, graph, spec, optimizer, mesh):
    """Gradients of the first `n_micro` micro-batches, summed; then one clipped AdamW step."""

    def add_micro_batch(i, carry):
        micro = jax.tree.map(lambda x: x[i], (rows, proximal, reference))
        (_, sums), gradient = jax.value_and_grad(_micro_loss, has_aux=True)(state.params, *micro, temperature, graph, spec)
        # Split as the parameters are; left to itself, XLA may keep a whole sum of gradients on every device.
        gradient = jax.lax.with_sharding_constraint(gradient, parallel.parameter_sharding(mesh, gradient))
        return jax.tree.map(jnp.add, carry, (gradient, sums))

    micro_shapes = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], (rows, proximal, reference)))
    _, sum_shapes = jax.eval_shape(lambda p, m: _micro_loss(p, *m, temperature, graph, spec), state.params, micro_shapes)
    zeros = (jax.tree.map(jnp.zeros_like, state.params), jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sum_shapes))
    # The trip count is a runtime value: mini-batches of many sizes share a program and pay for no empty micro-batch.
    gradient, metrics = jax.lax.fori_loop(0, n_micro, add_micro_batch, zeros)
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    metrics['actor/grad_norm'] = optax.tree.norm(gradient)
    return TrainState(optax.apply_updates(state.params, updates), opt_state), metrics


def _score(params, rows: Rows, n_micro, temperature, *, graph, attention, chunk):
    """Log-probs [M, R, T] of the response tokens under `params`, 0 elsewhere."""

    def score_micro_batch(i, logp_MxRxT):
        micro = jax.tree.map(lambda x: x[i], rows)
        logp_RxT, _ = token_logprobs(
            nnx.merge(graph, params), micro.tokens, micro.segment, micro.position, temperature,
            attention=attention, chunk=chunk, remat=False,
        )  # fmt: skip
        return logp_MxRxT.at[i].set(jnp.where(micro.source > 0, logp_RxT, 0.0))

    return jax.lax.fori_loop(0, n_micro, score_micro_batch, jnp.zeros(rows.tokens.shape, jnp.float32))
