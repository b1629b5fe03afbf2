"""The learner: score a batch, compute its advantages, pack it, and take one optimizer step per mini-batch."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from bapo_jax.cluster.hosts import Hosts
from bapo_jax.cluster.mesh import on_device, row_sharding
from bapo_jax.cluster.split import split_of
from bapo_jax.groups import X1, Batch, ByGroup, Prompt, lanes_of
from bapo_jax.learner import credit
from bapo_jax.learner.critic import CRITIC, critic_loss, critic_scores, pack_targets, value_metrics
from bapo_jax.learner.logprobs import Compute
from bapo_jax.learner.mini_batch import MiniBatch, Rows
from bapo_jax.learner.objective import (
    BEFORE,
    PROXIMAL,
    REFERENCE,
    ROLLOUT,
    numbers_of,
    objective_of,
    switched,
    weights_of,
)
from bapo_jax.learner.optimizer import clipped_adamw, learning_rate_of, without_moments
from bapo_jax.learner.packing import Part, capacity, cut, pack
from bapo_jax.learner.policy import policy_loss, policy_metrics, policy_scores
from bapo_jax.learner.shipped import as_shipped
from bapo_jax.learner.speed import update_speed
from bapo_jax.learner.sums import means
from bapo_jax.learner.trainee import Trainee
from bapo_jax.learner.trust import factors_of
from bapo_jax.learner.update import TrainState, with_frozen
from bapo_jax.models import kernels
from bapo_jax.models.adapters import put_adapter
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.vision.layout import ImageSource, Seen, image_metrics, see, tower_rows
from bapo_jax.models.vision.patches import Grid, blank_pixels
from bapo_jax.own.method import advantage_of


class Learner:
    """Holds the compiled programs. All arrays that it trains are in the TrainState that callers pass in.

    Every host has a learner, and all hosts do the device work of a step at the same time (hosts.py).
    """

    def __init__(
        self,
        config: ConfigDict,
        model: ModelConfig,
        mesh: Mesh,
        kernel: str,
        hosts: Hosts = Hosts(),
        sight: ImageSource | None = None,
    ):
        """`config` must be resolved; `kernel` is the attention kernel (build.py). Allocates nothing.

        `sight` gives host 0 the images of prompts; None if the prompts have no images.
        """
        c = config.learner
        self.model, self.mesh, self.kernel = model, mesh, kernel
        self._config, self._hosts, self._response_limit = c, hosts, config.rollout.max_response_tokens
        self._sight, self._row_devices = sight, mesh.shape['data'] * mesh.shape['fsdp']
        self._shared = config.rollout.max_prompt_tokens if c.slot_tokens else 0
        self._micro_batches = capacity(c, config.rollout.group_size, self._shared)
        self._shipped_dtype, self._adapter = config.rollout.dtype, config.model.adapter.start
        self.objective, self._temperature = objective_of(c), np.float32(config.rollout.temperature)
        self.learning_rate = learning_rate_of(c)
        split = split_of(mesh.shape, c.micro_batch_rows, config.mesh.gather_once)
        compute = Compute(
            kernels.packed(kernel, self._shared, c.slot_tokens), c.remat, split, shared=self._shared
        )
        vision = model.vision is not None and c.vision_rate > 0
        beside = {
            'model_path': config.model.path, 'seed': config.seed, 'vision': vision,
            'moments_on_host': config.learner.adam.on_host,
        }  # fmt: skip
        self.policy = Trainee(
            model, mesh, clipped_adamw(self.learning_rate, c, vision=vision), compute,
            loss=policy_loss(self.objective, compute),
            of_tokens=policy_scores(compute), **beside,
        )  # fmt: skip
        self.critic = None
        if c.advantage == 'gae':
            k = self._critic = config.critic
            self.critic = Trainee(
                dataclasses.replace(model, value_head=True), mesh,
                clipped_adamw(k.learning_rate, c, vision=vision), compute,
                loss=critic_loss(k.value_clip, compute), of_tokens=critic_scores(compute), **beside,
            )  # fmt: skip
        self.graph, self.parameters = self.policy.graph, self.policy.parameters

    # ---- state

    def read_initial(self) -> Any:
        """Reads θ_0 from model.path, and its adapter from model.adapter.start, onto the mesh."""
        params = self.policy.read_initial()
        if self._adapter:
            put_adapter(params, Path(self._adapter), self.model)
        return params

    def shapes(self) -> TrainState:
        """Returns the state's shapes with shardings; the moments are sharded like the parameters."""
        return self.policy.shapes()._replace(critic=self.critic.shapes() if self.critic else None)

    def init(self, params: Any) -> TrainState:
        """Returns the first state: θ_0 on the mesh and zero moments.

        If the row has a critic, it starts from the decoder of model.path with a value head of 0.
        """
        state = self.policy.init(params)
        critic = self.critic.init(self.critic.read_initial()) if self.critic else None
        return state._replace(critic=critic and with_frozen(critic, state.frozen))

    # ---- the work on a batch

    def update(
        self,
        state: TrainState,
        batch: Batch,
        rng: np.random.Generator,
        policies: Mapping[str, Any] | None = None,
        step: int = 1,
    ) -> tuple[TrainState, dict[str, float]]:
        """Trains the policy, then the critic, in passes over the mini-batches, in an order drawn from `rng`.

        `policies` maps each role that the objective reads to its parameters; the proximal policy is that of
        `state`. Returns the new state (the old state's buffers are donated) and metrics, means over the
        mini-batches. An update with a non-finite gradient is skipped. Without groups nothing changes.
        """
        seconds, started = {}, time.perf_counter()

        def lap(phase: str) -> None:
            nonlocal started
            seconds[f'timing_s/{phase}'], started = time.perf_counter() - started, time.perf_counter()

        c, groups, lanes = self._config, len(batch.groups), lanes_of(batch)
        orders = [
            rng.permutation(groups) if c.mini_batches == 'even' else np.arange(groups)
            for _ in range(1 if switched(c, step) else c.passes_per_batch)
        ]
        passes = [self._cut(batch, order) for order in orders]
        lap('pack')
        # The proximal policy is the policy before this step's updates, so all scoring comes first, and once.
        policies = {**(policies or {}), PROXIMAL: state.params}
        scores = {
            role: self._score_once(role, policies.get(role), batch, orders[0])
            if self._never_changes(role)
            else self.score(role, policies.get(role), passes[0])
            for role in self._scored(step)
        }
        lap('old_log_prob')
        parts = [part for parts in passes for part in parts]
        metrics = image_metrics([part.seen for part in parts if part.seen])
        if self.critic:
            values = self.score(CRITIC, state.critic.params, passes[0])
            lap('values')
            trained = [[r.trained_on for r in g.responses] for g in batch.groups]
            advantage, returns = credit.value_advantages(batch, values, *self._critic.gae)
            advantage, metrics = (
                credit.whitened(advantage, trained),
                metrics | value_metrics(values, returns, trained),
            )
            targets = [part.mini_batch(pack_targets(part, values, returns)) for part in parts]
        else:
            advantage = credit.advantages(batch, advantage_of(c.advantage))
        packed = (
            [part.mini_batch(self._pack(part, lanes, advantage, scores)) for part in parts]
            if self.trains_policy(step)
            else []
        )
        seconds['timing_s/pack'] += time.perf_counter() - started
        self._hosts.tell('update', shapes=[part.shape() for part in parts], step=step)
        started = time.perf_counter()
        if self.trains_policy(step):
            state, actor_metrics = self.update_policy(state, packed, step, lanes)
            # If α is older than π_θ, these metrics would measure its staleness too.
            if any(g.older_than(step - 1) for part in parts[:1] for g in part.batch.of_origin(X1)):
                actor_metrics = {
                    name: x for name, x in actor_metrics.items() if not name.startswith('mismatch/')
                }
            metrics |= actor_metrics
            lap('update_actor')
            metrics |= update_speed(parts, self.model, self.mesh.devices, seconds['timing_s/update_actor'])
        if self.critic:
            state, critic_metrics = self.update_critic(state, targets)
            metrics |= critic_metrics
            lap('update_critic')
        return state, {**metrics, **seconds}

    def trains_policy(self, step: int) -> bool:
        """Returns False during the critic's warm-up, when only the critic is trained."""
        return not (self.critic and step <= self._critic.warmup_steps)

    def update_policy(
        self, state: TrainState, batches: Sequence[MiniBatch], step: int, lanes: Sequence[str] = ()
    ) -> tuple[TrainState, dict[str, float]]:
        """Takes one optimizer step per mini-batch; `lanes` names the origins. All hosts call this."""
        critic, state = state.critic, state._replace(critic=None)  # the step donates its input
        if self._config.reset_every and step % self._config.reset_every == 0:
            state = state._replace(opt_state=without_moments(state.opt_state))
        state, updates = self.policy.train(state, batches, numbers_of(self._config, self._temperature, step))
        learning_rate = float(self.learning_rate(max(0, self.policy.updates_done(state) - 1)))
        return state._replace(critic=critic), {**policy_metrics(updates, lanes), 'actor/lr': learning_rate}

    def update_critic(
        self, state: TrainState, batches: Sequence[MiniBatch]
    ) -> tuple[TrainState, dict[str, float]]:
        """Takes one optimizer step of the critic per mini-batch. All hosts call this."""
        critic, updates = self.critic.train(state.critic, batches)
        return state._replace(critic=critic), means(updates, 'critic')

    def score(self, role: str, params: Any, parts: Sequence[Part]) -> ByGroup:
        """Returns log-probs of every response token under `params`, by group of the batch that `parts` cover.

        For the critic they are values. `role` is the name under which the other hosts know these parameters.
        Raises ValueError if `params` is None.
        """
        if params is None:
            raise ValueError(f'the objective reads the role {role!r}, and no such policy was given')
        self._hosts.tell('score', role=role, shapes=[part.shape() for part in parts])
        scored = self.score_packed(role, params, [part.mini_batch(part.sequences()) for part in parts])
        by_group: dict[int, list[np.ndarray]] = {}
        for part, packed in zip(parts, scored, strict=True):
            by_group |= dict(zip(part.indices.tolist(), part.of_responses(packed), strict=True))
        return [by_group[i] for i in range(len(by_group))]

    def score_packed(self, role: str, params: Any, batches: Sequence[MiniBatch]) -> list[np.ndarray]:
        """Returns [M, R, T] per mini-batch of sequences, 0 except on response tokens. All hosts call this."""
        params = on_device(params)
        if role == CRITIC:
            return self.critic.score(params, batches)
        if role in (ROLLOUT, BEFORE):
            params = as_shipped(params, self._shipped_dtype, self.model)
        return self.policy.score(params, batches, self._temperature)

    def _never_changes(self, role: str) -> bool:
        """Returns whether the role is a fixed reference policy. A switch replaces the reference."""
        return role == REFERENCE and not self._config.switch_step

    def _score_once(self, role: str, params: Any, batch: Batch, order: np.ndarray) -> ByGroup:
        """Scores under a policy that never changes, and caches the result on each response.

        Replayed responses are thus not scored again. The cache is per temperature: a run may continue at
        another one (--amend).
        """
        # Array names in a checkpoint have no dots.
        name = f'{role}_at_{self._temperature:g}'.replace('.', '_')
        new = batch.take([i for i in order if any(name not in r.scored for r in batch.groups[i].responses)])
        if new.groups:
            for group, group_values in zip(new.groups, self.score_batch(role, params, new), strict=True):
                for response, logp in zip(group.responses, group_values, strict=True):
                    # A view would keep the whole mini-batch's array alive.
                    response.scored.setdefault(name, logp.copy())
        return [[r.scored[name] for r in g.responses] for g in batch.groups]

    def score_batch(self, role: str, params: Any, batch: Batch) -> ByGroup:
        """Returns the result of `score` for a whole batch, its groups in their own order."""
        return self.score(role, params, self._cut(batch, np.arange(len(batch.groups))))

    def scorer(self, state: TrainState) -> Callable[[Batch], ByGroup]:
        """Returns a function that maps a batch to the log-probs of its response tokens under π_θ."""
        return functools.partial(self.score_batch, PROXIMAL, state.params)

    def served_logprobs(self, policies: Mapping[str, Any], batch: Batch) -> Iterator[np.ndarray]:
        """Yields log-probs of all trained tokens: as sampled, under α, and under the previous α, if any.

        Each array is float32 [tokens], in the same order. `policies` maps roles to parameters.
        """
        yield from self.logprobs(ROLLOUT, policies[ROLLOUT], batch)
        if policies[BEFORE] is not None:
            yield self.logprobs(BEFORE, policies[BEFORE], batch)[1]

    def logprobs(self, role: str, params: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Returns (behaviour log-probs, log-probs under `params`) of a batch's trained tokens, float32
        [tokens].
        """
        scored = self.score_batch(role, params, batch)
        pairs = [
            (r.logp[r.trained_on], logp[r.trained_on])
            for g, group_values in zip(batch.groups, scored, strict=True)
            for r, logp in zip(g.responses, group_values, strict=True)
        ]
        return tuple(map(np.concatenate, zip(*pairs, strict=True)))

    def compile_update(self, grids: Sequence[Grid] = ()) -> jax.stages.Compiled:
        """Compiles the optimizer step without allocation; `grids` are those of a mini-batch's images."""
        shape = (self._micro_batches, self._config.micro_batch_rows, self._config.row_tokens)

        def abstract(arrays: Any, axes: tuple[int, ...], sharding: NamedSharding) -> Any:
            """Returns the shapes of the arrays with leading `axes`."""
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((*axes, *x.shape[len(axes) :]), x.dtype, sharding=sharding),
                arrays,
            )

        blank = self.objective.blank_rows((0, 0, 0), bool(grids))
        rows, pixels = abstract(blank, shape, self.policy.rows), None
        if grids:
            of_tower = tower_rows(grids, self.model.vision, self._row_devices)
            blank = blank_pixels((0, 0, self.model.vision.patch_numbers))
            pixels = abstract(blank, of_tower, row_sharding(self.mesh))
        numbers = numbers_of(self._config, self._temperature, 1)
        state = self.policy.shapes()
        return self.policy.step.lower(
            state._replace(frozen=None), rows, self._micro_batches, numbers, pixels, state.frozen
        ).compile()

    def _cut(self, batch: Batch, order: np.ndarray) -> list[Part]:
        """Returns the mini-batches of one pass, with their images."""
        most = kernels.KERNELS[self.kernel].most_segments
        parts = cut(batch, order, self._config, self._micro_batches, self._shared, most_segments=most)
        return [part._replace(seen=self._see([g.prompt for g in part.batch.groups])) for part in parts]

    def _see(self, prompts: Sequence[Prompt]) -> Seen | None:
        """Returns the images of a mini-batch's prompts. Tower rows fit the largest image: few programs."""
        row_windows = self._sight.row_windows if self._sight else 0
        return see(prompts, self._sight, self.model.vision, row_windows, self._row_devices)

    def _scored(self, step: int) -> list[str]:
        """Returns the policies that score a batch at `step`, except any used only in KL terms of share 0."""
        if not self.trains_policy(step):
            return []
        numbers = numbers_of(self._config, self._temperature, step)
        idle = {term.role for term in self.objective.kl if term.share and not numbers[term.share]}
        return [role for role in self.objective.roles if role not in idle - self.objective.ratio_roles]

    def _pack(
        self, part: Part, lanes: Sequence[str], advantage: ByGroup, scores: Mapping[str, ByGroup]
    ) -> Rows:
        weight = weights_of(self.objective, self._config, part.batch, self._response_limit)
        nothing = [[np.zeros(len(r.tokens), np.float32) for r in g.responses] for g in part.batch.groups]
        role_scores = {
            role: [scores[role][i] for i in part.indices] if role in scores else nothing
            for role in self.objective.roles
        }
        advantage = [advantage[i] for i in part.indices]
        factors = factors_of(self._config, part.batch, advantage, role_scores.get(PROXIMAL))
        return pack(part, lanes, advantage, weight, role_scores, factors)
