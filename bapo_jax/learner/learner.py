"""The learner: what is compiled, and the order of work on a batch: score, credit, pack, one optimizer step per mini-batch."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from bapo_jax import parallel
from bapo_jax.groups import X1, Batch, ByGroup, Prompt
from bapo_jax.hosts import Hosts
from bapo_jax.learner import credit
from bapo_jax.learner.critic import CRITIC, Critic, Targets, pack_targets, value_metrics
from bapo_jax.learner.logprobs import Compute
from bapo_jax.learner.objective import PROXIMAL, REFERENCE, ROLLOUT, BEFORE, numbers_of, objective_of, switched
from bapo_jax.learner.optimizer import clipped_adamw, learning_rate_of
from bapo_jax.learner.packed import Rows, Sequences, blank_rows
from bapo_jax.learner.packing import Part, capacity, cut, pack
from bapo_jax.learner.score import as_shipped, score
from bapo_jax.learner.speed import update_speed
from bapo_jax.learner.update import Program, TrainState, initial_state, mean_metrics, state_shapes, update
from bapo_jax.models import attention, hf
from bapo_jax.models.patches import Grid, Pixels, blank_pixels
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.split import Split
from bapo_jax.parallel import compiled_for, fetch, spread
from bapo_jax.seen import Seen, Sight, see, tower_rows


class Learner:
    """Holds what is compiled; every array it trains is in the TrainState that is passed through.

    Every host has one, and does the device work of each step at the same time as the others (hosts.py).
    """

    def __init__(
        self, config: ConfigDict, model: ModelConfig, mesh: Mesh, kernel: str, hosts: Hosts = Hosts(), sight: Sight | None = None
    ):
        """`config` is resolved; `kernel` is the attention's, as `choose_kernel` gives it. Allocates nothing.

        `sight` gives host 0 the images of prompts; None where they have none.
        """
        c = config.learner
        self.model, self.mesh, self.kernel = model, mesh, kernel
        self._config, self._hosts, self._response_limit = c, hosts, config.rollout.max_response_tokens
        self._sight, self._row_devices = sight, mesh.shape['data'] * mesh.shape['fsdp']
        self._shared = config.rollout.max_prompt_tokens if c.slot_tokens else 0
        self._micro_batches = capacity(c, config.rollout.group_size, self._shared)
        self._model_path, self._shipped_dtype = config.model.path, config.rollout.dtype
        self.graph, shapes = hf.abstract_params(model)
        self._sharding = parallel.parameter_sharding(mesh, shapes)
        self.parameters = parallel.with_sharding(shapes, self._sharding)  # shapes, and where each lives
        self.objective, self._temperature = objective_of(c), np.float32(config.rollout.temperature)
        self.learning_rate = learning_rate_of(c)
        self._optimizer = clipped_adamw(self.learning_rate, c, vision=model.vision is not None)
        split = Split(1 if config.mesh.gather_once else mesh.shape['fsdp'], mesh.shape['tensor'])
        compute = Compute(attention.packed(kernel, self._shared, c.slot_tokens), c.remat, split, shared=self._shared)
        program = Program(self.graph, self.objective, self._optimizer, mesh, compute, frozen_vision=c.vision_rate == 0)
        self._update = compiled_for(mesh, functools.partial(update, program=program), donate_argnames='state')
        self._score = compiled_for(mesh, functools.partial(score, graph=self.graph, mesh=mesh, compute=compute))
        self.critic = Critic(config, model, mesh, compute) if c.advantage == 'gae' else None
        self._gae = (config.critic.gamma, config.critic.gae_lambda)

    # ---- state

    def read_initial(self) -> Any:
        """θ_0 from model.path, on the mesh."""
        return hf.load_params(self._model_path, self.model, self._sharding)

    def shapes(self) -> TrainState:
        """The state's shapes and where each array lives, the moments as the parameters are."""
        return self._policy_shapes()._replace(critic=self.critic.shapes() if self.critic else None)

    def init(self, params: Any) -> TrainState:
        """θ_0 on the mesh, and zero moments; the critic, where the row has one, from model.path."""
        state = initial_state(self._optimizer, params, self._policy_shapes())
        return state._replace(critic=self.critic.init() if self.critic else None)

    def _policy_shapes(self) -> TrainState:
        return state_shapes(self._optimizer, self.parameters, self.mesh)

    # ---- the work on a batch

    def update(
        self, state: TrainState, batch: Batch, rng: np.random.Generator, policies: Mapping[str, Any] | None = None, step: int = 1
    ) -> tuple[TrainState, dict[str, float]]:
        """Passes of optimizer steps over the batch's mini-batches, in an order drawn from `rng`; then the critic's, over the same.

        `policies` are the parameters of the roles that the objective reads, but for the proximal policy, which is `state`'s.
        Returns the new state (the old one's buffers are donated) and metrics, means over the mini-batches.
        An update whose gradient is not finite is skipped. A batch without groups changes nothing.
        """
        seconds, started = {}, time.perf_counter()

        def lap(phase: str) -> None:
            nonlocal started
            seconds[f'timing_s/{phase}'], started = time.perf_counter() - started, time.perf_counter()

        c, groups = self._config, len(batch.groups)
        orders = [
            rng.permutation(groups) if c.shuffle else np.arange(groups)
            for _ in range(1 if switched(c, step) else c.passes_per_batch)
        ]  # fmt: skip
        passes = [self._cut(batch, order) for order in orders]
        lap('pack')
        # The proximal policy is the one before any of this step's updates, so everything is scored first, and once.
        policies = {**(policies or {}), PROXIMAL: state.params}
        scores = {
            role: self._score_once(role, policies.get(role), batch, orders[0]) if self._never_changes(role)
            else self.score(role, policies.get(role), passes[0])
            for role in self._scored(step)
        }  # fmt: skip
        lap('old_log_prob')
        parts = [part for parts in passes for part in parts]
        metrics = image_metrics([part.seen for part in parts if part.seen])
        if self.critic:
            values = self.score(CRITIC, state.critic.params, passes[0])
            lap('values')
            trained = [[r.trained_on for r in g.responses] for g in batch.groups]
            advantage, returns = credit.value_advantages(batch, values, *self._gae)
            advantage, metrics = credit.whitened(advantage, trained), metrics | value_metrics(values, returns, trained)
            targets = [pack_targets(part, values, returns) for part in parts]
        else:
            advantage = credit.advantages(batch, c.advantage)
        packed = [self._pack(part, advantage, scores) for part in parts] if self.trains_policy(step) else []
        counts, shapes = [part.layout.filled for part in parts], [part.layout.segment.shape for part in parts]
        seconds['timing_s/pack'] += time.perf_counter() - started
        self._hosts.tell('update', shapes=shapes, counts=counts, images=[pixel_shape(part) for part in parts], step=step)
        started = time.perf_counter()
        if self.trains_policy(step):
            state, of_policy = self.update_packed(state, packed, counts, map(pixels_of, parts), step)
            if any(g.responses[0].version < step - 1 for part in parts[:1] for g in part.batch.of_origin(X1)):  # α is older than π_θ
                of_policy = {name: x for name, x in of_policy.items() if not name.startswith('mismatch/')}
            metrics |= of_policy
            lap('update_actor')
            metrics |= update_speed(parts, self.model, self.mesh.devices, seconds['timing_s/update_actor'])
        if self.critic:
            state, of_critic = self.update_critic_packed(state, targets, counts, map(pixels_of, parts))
            metrics |= of_critic
            lap('update_critic')
        return state, {**metrics, **seconds}

    def trains_policy(self, step: int) -> bool:
        """False while the critic warms up alone."""
        return not (self.critic and step <= self.critic.warmup_steps)

    def update_packed(
        self, state: TrainState, packed: Sequence[Rows], counts: Sequence[int], pixels: Iterable[Pixels | None], step: int
    ):
        """One optimizer step per mini-batch. All hosts do this part.

        `packed[i]` has `counts[i]` non-empty micro-batches; `pixels` gives the mini-batches' images one after the other.
        """
        sharding, metrics, numbers = parallel.row_sharding(self.mesh, 1), [], numbers_of(self._config, self._temperature, step)
        critic, state = state.critic, state._replace(critic=None)  # the step donates what it is given
        for rows, n, images in zip(packed, counts, pixels, strict=True):
            images = spread(images, parallel.row_sharding(self.mesh))
            state, part_metrics = self._update(state, spread(rows, sharding), n, numbers, images)
            metrics.append(part_metrics)
        learning_rate = float(self.learning_rate(max(0, self._updates_done(state) - 1)))
        return state._replace(critic=critic), {**mean_metrics(jax.device_get(metrics)), 'actor/lr': learning_rate}

    def update_critic_packed(
        self, state: TrainState, targets: Sequence[Targets], counts: Sequence[int], pixels: Iterable[Pixels | None]
    ):
        """The critic's optimizer steps; arguments as of `update_packed`. All hosts do this part of `update`."""
        critic, metrics = self.critic.update_packed(state.critic, targets, counts, pixels)
        return state._replace(critic=critic), metrics

    def score(self, role: str, params: Any, parts: Sequence[Part]) -> ByGroup:
        """Log-probs (the critic's: values) of every response token under `params`, by group of the batch that `parts` come from.

        `role` is the name under which the other hosts know these parameters. Raises ValueError where there are none.
        """
        if params is None:
            raise ValueError(f'the objective reads the role {role!r}, and no such policy was given')
        sequences, counts = [part.sequences() for part in parts], [part.layout.filled for part in parts]
        shapes, images = [s.tokens.shape for s in sequences], [pixel_shape(part) for part in parts]
        self._hosts.tell('score', role=role, shapes=shapes, counts=counts, images=images)
        scored = self.score_packed(role, params, sequences, counts, map(pixels_of, parts))
        by_group: dict[int, list[np.ndarray]] = {}
        for part, packed in zip(parts, scored, strict=True):
            by_group |= dict(zip(part.indices.tolist(), part.of_responses(packed), strict=True))
        return [by_group[i] for i in range(len(by_group))]

    def score_packed(
        self, role: str, params: Any, sequences: Sequence[Sequences], counts: Sequence[int], pixels: Iterable[Pixels | None]
    ) -> list[np.ndarray]:
        """[M, R, T] for each of `sequences`, 0 but on response tokens; the rest as of `update_packed`. All hosts do this part."""
        of_rows, of_images = parallel.row_sharding(self.mesh, 1), parallel.row_sharding(self.mesh)
        of_batch = self.critic.score if role == CRITIC else functools.partial(self._score, temperature=self._temperature)
        params = parallel.on_device(params)
        if role in (ROLLOUT, BEFORE):
            params = as_shipped(params, self._shipped_dtype)
        scored = [
            of_batch(params, spread(s, of_rows), n, pixels=spread(images, of_images))
            for s, n, images in zip(sequences, counts, pixels, strict=True)
        ]
        return [fetch(values if role == CRITIC else values[0]) for values in scored]

    def _never_changes(self, role: str) -> bool:
        """A switch makes another policy the reference."""
        return role == REFERENCE and not self._config.switch_step

    def _score_once(self, role: str, params: Any, batch: Batch, order: np.ndarray) -> ByGroup:
        """`score` of a policy that never changes: responses keep what it says of them, so that replayed ones are not scored again.

        Only at this temperature: a run may go on at another (--amend).
        """
        name = f'{role}_at_{self._temperature:g}'.replace('.', '_')  # a checkpoint's arrays have names without dots
        new = batch.take([i for i in order if any(name not in r.scored for r in batch.groups[i].responses)])
        if new.groups:
            for group, of_group in zip(new.groups, self.score_batch(role, params, new), strict=True):
                for response, logp in zip(group.responses, of_group, strict=True):
                    response.scored.setdefault(name, logp.copy())  # a view would hold the whole mini-batch's array
        return [[r.scored[name] for r in g.responses] for g in batch.groups]

    def score_batch(self, role: str, params: Any, batch: Batch) -> ByGroup:
        """`score` of a batch in its own order."""
        return self.score(role, params, self._cut(batch, np.arange(len(batch.groups))))

    def logprobs(self, role: str, params: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(behaviour log-probs, log-probs under `params`) of all response tokens of a batch, float32 [tokens] each, in order."""
        scored = self.score_batch(role, params, batch)
        behaviour = [r.logp for g in batch.groups for r in g.responses]
        return np.concatenate(behaviour), np.concatenate([logp for of_group in scored for logp in of_group])

    def compile_update(self, grids: Sequence[Grid] = ()) -> jax.stages.Compiled:
        """The optimizer step, compiled from shapes: nothing is allocated. `grids` are those of a mini-batch's images."""
        shape = (self._micro_batches, self._config.micro_batch_rows, self._config.row_tokens)

        def abstract(x: np.ndarray, *axes: int) -> jax.ShapeDtypeStruct:
            """`x` with these axes in place of its first ones, its rows split; the last of them is that of rows' tokens or slots."""
            sharding = parallel.row_sharding(self.mesh, len(axes) - 2)
            return jax.ShapeDtypeStruct((*axes, *x.shape[len(axes) :]), x.dtype, sharding=sharding)

        rows = jax.tree.map(lambda x: abstract(x, *shape), blank_rows((0, 0, 0), self.objective.roles, bool(grids)))
        pixels = None
        if grids:
            of_tower = tower_rows(grids, self.model.vision, self._row_devices)
            pixels = jax.tree.map(lambda x: abstract(x, *of_tower), blank_pixels((0, 0, self.model.vision.patch_numbers)))
        numbers = numbers_of(self._config, self._temperature, 1)
        return self._update.lower(self._policy_shapes(), rows, self._micro_batches, numbers, pixels).compile()

    def _cut(self, batch: Batch, order: np.ndarray) -> list[Part]:
        """The mini-batches of one pass, and their images."""
        most = attention.KERNELS[self.kernel].most_segments
        parts = cut(batch, order, self._config, self._micro_batches, self._shared, most_segments=most)
        return [part._replace(seen=self._see([g.prompt for g in part.batch.groups])) for part in parts]

    def _see(self, prompts: Sequence[Prompt]) -> Seen | None:
        """The images of a mini-batch's prompts. All rows of the tower are as long as the largest image: few programs."""
        row_windows = self._sight.row_windows if self._sight else 0
        return see(prompts, self._sight, self.model.vision, row_windows, self._row_devices)

    def _scored(self, step: int) -> list[str]:
        """The policies that score a batch at `step`: not those whose only use is a KL term of share 0."""
        if not self.trains_policy(step):
            return []
        numbers = numbers_of(self._config, self._temperature, step)
        idle = {term.role for term in self.objective.kl if term.share and not numbers[term.share]}
        return [role for role in self.objective.roles if role not in idle - self.objective.ratio_roles]

    def _pack(self, part: Part, advantage: ByGroup, scores: Mapping[str, ByGroup]) -> Rows:
        lengths = [int(r.trained_on.sum()) for g in part.batch.groups for r in g.responses]
        weight = credit.token_weights(lengths, self._config.aggregation, self._response_limit)
        nothing = [[np.zeros(len(r.tokens), np.float32) for r in g.responses] for g in part.batch.groups]
        of_part = {role: [scores[role][i] for i in part.indices] if role in scores else nothing for role in self.objective.roles}
        return pack(part, [advantage[i] for i in part.indices], weight, of_part)

    def _updates_done(self, state: TrainState) -> int:
        return int(optax.tree.get(state.opt_state, 'count', filtering=lambda path, _: 'ScaleByAdamState' in str(path)))


def pixels_of(part: Part) -> Pixels | None:
    """The images of a mini-batch; reads their files."""
    return part.seen and part.seen.pixels()


def pixel_shape(part: Part) -> tuple[int, int, int] | None:
    """The shape of the patches of its images."""
    return part.seen and part.seen.pixel_shape


def image_metrics(seen: Sequence[Seen]) -> dict[str, int]:
    """What run/metric_table.py says of the images of a batch's mini-batches; {} where there are none."""
    if not seen:
        return {}
    return {
        'images/prompts': sum(len(s.distinct) for s in seen),
        'images/features': sum(len(s.layout.feature_I) for s in seen),
        'images/pixel_bytes': sum(4 * s.pixel_shape[-1] * int(np.count_nonzero(s.layout.image_RxP)) for s in seen),
        'perf/kept_pixel_bytes': seen[0].sight.kept_bytes(),
    }


def build_learner(config: ConfigDict, hosts: Hosts = Hosts(), sight: Sight | None = None) -> Learner:
    """What every host needs to do its part of the device work; nothing is allocated. `config` is resolved.

    `sight` is as of `Learner`. Raises ValueError or FileNotFoundError, naming the field and the remedy, where it cannot run on the
    devices here.
    """
    devices = parallel.present(config.mesh.platform)
    parallel.keep_programs()
    model = hf.read_config(config.model.path, config.model.dtype, hf.overrides(config.model))
    mesh = parallel.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices)
    check_engine(config, jax.process_count())
    kernel = choose_kernel(config, model, mesh, mesh.devices.flat[0].platform)
    return Learner(config, model, mesh, kernel, hosts, sight)


def check_engine(config: ConfigDict, hosts: int) -> None:
    """Raises ValueError if the engine cannot answer from that many hosts."""
    if config.rollout.engine == 'jax' and hosts > 1:
        raise ValueError('rollout.engine=jax answers from the devices of one process; with several hosts set rollout.engine=vllm')


def choose_kernel(
    config: ConfigDict, model: ModelConfig, mesh: Mesh | AbstractMesh, platform: str, capability: tuple[int, int] | None = None
) -> str:
    """The attention kernel for that mesh of 'cpu', 'gpu' or 'tpu' devices; `capability` is of GPUs that the mesh does not have.

    Raises ValueError where the config cannot run on it.
    """
    if config.rollout.overlap and config.rollout.engine == 'jax' and mesh.size > 1:
        raise ValueError(
            f'rollout.overlap with rollout.engine=jax on {mesh.size} devices: two programs that exchange data between the same '
            'devices at once may wait for each other for ever, and would be no faster; set rollout.overlap=False, or engine=vllm'
        )
    splits = mesh.shape['data'] * mesh.shape['fsdp']
    if config.learner.micro_batch_rows % splits:
        raise ValueError(
            f'learner.micro_batch_rows={config.learner.micro_batch_rows} is no multiple of mesh.data × mesh.fsdp = {splits}, over which '
            f'rows are split; set it to {max(1, config.learner.micro_batch_rows // splits) * splits}'
        )
    return attention.choose(
        config.model.attention, platform, model, row_tokens=config.learner.row_tokens, tensor=mesh.shape['tensor'],
        rows=config.learner.micro_batch_rows // splits, slot_tokens=config.learner.slot_tokens,
        capability=capability or parallel.capability(mesh),
    )
