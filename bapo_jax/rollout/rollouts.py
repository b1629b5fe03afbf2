"""Which policy answers, and when: α answers fresh prompts, π_θ hard prompts and evaluations. α may answer later steps ahead.

One engine holds one policy. Where α is π_θ, fresh and hard prompts go out as one wave. Otherwise the engine switches to π_θ and
back. α does not change between two syncs, so all steps up to the next sync can be asked at once, the earlier first: while one trains
the next are answered, and no step waits for the last response of the one before. With T seconds to train and G to generate, a step
then costs max(T + G/v, G + T/v) on average instead of T + G. The first generation after a sync overlaps with no training. The prompts,
their order and what the selector knows stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from ml_collections import ConfigDict

from bapo_jax.groups import X1, Batch, Group, Prompt, Response, make_batch
from bapo_jax.prompts.selector import PromptSelector
from bapo_jax.rollout.collect import Collected, check_judged, collect, judge_as_they_come
from bapo_jax.rollout.continued import as_read
from bapo_jax.rollout.engine import FAILED, FRESH, PROBE, REEVALUATION, Draw, Engine, Sampling
from bapo_jax.rollout.fidelity import check_probe, tolerance_of
from bapo_jax.rollout.meter import Meter
from bapo_jax.rollout.schedule import Schedule
from bapo_jax.stopping import leaving_waits
from bapo_jax.tasks.custom_reward import Rewards
from bapo_jax.tasks.shaping import punish_overlong

_PROBE_TOKENS = 32  # most tokens of each answer to the probe


class Policies(Protocol):
    """The policies of a run: θ after `step` steps, and α."""

    step: int
    theta: Any  # its `params` are those of π_θ
    alpha: Any
    alpha_version: int
    recent: list[tuple[int, Any]]  # (version, parameters) of rollout policies before α, newest first


# Returns (log-probs as sampled, log-probs under α, and under the policy that was α before it, if any) of all response tokens of a batch,
# float32 [tokens] each, in one order.
LogProbs = Callable[[Batch], Iterable[np.ndarray]]


class Asked(NamedTuple):
    """A wave of prompts that the engine was asked, hard ones behind the fresh ones, and the selector's state after it named these."""

    fresh: list[Prompt]
    hard: list[Prompt]
    draws: list[Draw]
    answers: list[Future[tuple[Response, ...]]]
    selector: str


class Answered(NamedTuple):
    """A step's fresh groups, the hard prompts' groups of the same wave, and the selector's state after them."""

    fresh: list[Group]
    reevaluated: list[Group]
    generate_s: float
    verify_s: float
    measures: dict[str, float]  # the selector's metrics
    selector: str  # its state after it observed these groups: a run stopped after this step continues from there


class Rollouts:
    """Generates the groups of one step after the other, and judges them in a thread of its own."""

    def __init__(
        self, engine: Engine, tokenizer: Any, selector: PromptSelector, schedule: Schedule, config: ConfigDict,
        reward: Rewards | None, probe: Prompt,
    ):  # fmt: skip
        """`config` is resolved; `reward` replaces the verifier, or is None; `probe` is the prompt answered after every sync."""
        self._engine, self._probe = engine, probe
        self._tokenizer, self._selector, self._schedule, self._config, self._reward = tokenizer, selector, schedule, config, reward
        # Which prompts a step takes may depend on the results of the step before, or of its own first wave.
        self._in_turn = selector.learns or config.rollout.refill_batches > 1 or config.rollout.mixture > 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix='rollouts')
        self._begun: dict[int, Future[Answered]] = {}
        self._selector_state = selector.state()
        self._taken: dict[str, float] = {}  # metrics of the last step taken
        self._meter = Meter()

    def serve(self, policies: Policies, logprobs: LogProbs) -> None:
        """Loads α, and compares each server's log-probs of its answers to the probe with the trainer's. Raises PolicyMismatch."""
        with self._meter.handing_over():
            self._engine.load(policies.alpha, policies.alpha_version)
            if self._engine.servers:
                self._probe_servers(policies, logprobs)

    def begin_ahead(self, step: int) -> None:
        """Begins the later steps whose fresh prompts α can answer while `step` trains."""
        if self._config.rollout.overlap:
            for later in range(step + 1, self._schedule.last_ahead(step) + 1):
                self._begin(later)

    def take(self, step: int, hard: Sequence[Prompt], policies: Policies) -> tuple[list[Group], list[Group]]:
        """The fresh groups of `step`, sampled from α, and those of its hard prompts, from π_θ.

        Raises what the engine raised, and Stopped where a signal comes; then the state is still that of the step before.
        """
        with self._meter.waiting():
            return self._take(step, hard, policies)

    def ask_failed(self, step: int, prompts: Sequence[Prompt]) -> list[Group]:
        """α's groups of prompts that failed before, behind what was begun ahead. Nothing remembers them.

        A group that is lost is one without responses, however many are: only training needs most of them. A signal waits, since the
        step was taken already.
        """
        c = self._config
        sampling, draws = Sampling(c.rollout.temperature, c.rollout.max_response_tokens), [Draw(c.seed, step, FAILED)] * len(prompts)
        answers = self._engine.ask(prompts, c.rollout.group_size, sampling, draws)
        self._meter.asked(answers)
        with self._meter.waiting():
            return self._collected(Asked(list(prompts), [], draws, answers, self._selector_state)).groups

    @contextmanager
    def held_by_theta(self, policies: Policies) -> Iterator[Engine]:
        """The engine holds π_θ inside, and α again after. Steps that were begun must have been taken."""
        self._engine.load(policies.theta.params, policies.step)
        yield self._engine
        self._engine.load(policies.alpha, policies.alpha_version)

    def metrics(self, started: float) -> dict[str, float]:
        """Metrics of the last step taken, which began at `started`, by perf_counter: its seconds, the selector's, the engine's."""
        return self._taken | self._meter.read(started) | self._engine.metrics()

    def state(self) -> str:
        """The selector's state after the last step taken, for a checkpoint."""
        return self._selector_state

    def restore(self, state: str) -> None:
        """Puts the selector back into `state`."""
        self._selector.restore(state)
        self._selector_state = state

    def close(self) -> None:
        """Gives up the steps that were begun."""
        self._engine.close()  # so that no answer is waited for any more
        self._thread.shutdown(cancel_futures=True)

    def _take(self, step: int, hard: Sequence[Prompt], policies: Policies) -> tuple[list[Group], list[Group]]:
        one_wave = policies.alpha_version == step - 1  # α is π_θ
        self._begin(step, hard if one_wave else (), policies)
        if not hard or one_wave and not self._schedule.reevaluation_syncs:  # else the engine is to hold another policy before them
            self.begin_ahead(step)
        with leaving_waits():
            fresh, reevaluated, generate_s, verify_s, measures, selector = self._begun.pop(step).result()
        self._taken = {**measures, 'timing_s/gen': generate_s, 'timing_s/reward': verify_s}
        if hard and not one_wave:
            with self.held_by_theta(policies), leaving_waits():
                reevaluated, generate_s, verify_s = self._judged(self._ask(step, [], hard))
            self._taken['timing_s/reevaluate'] = generate_s + verify_s
        self._selector_state = selector  # now the step's groups are all there
        return fresh, reevaluated

    def _probe_servers(self, policies: Policies, logprobs: LogProbs) -> None:
        """Asks each server the probe. Raises PolicyMismatch."""
        c, prompts = self._config, [self._probe] * self._engine.servers
        sampling = Sampling(c.rollout.temperature, min(_PROBE_TOKENS, c.rollout.max_response_tokens))
        draws = [Draw(c.seed, policies.step, PROBE)] * len(prompts)
        groups = collect(self._engine, self._tokenizer, prompts, c.rollout.group_size, sampling, draws, self._reward)
        tolerance = tolerance_of(c.rollout.probe_tolerance, (c.rollout.dtype, c.model.dtype), jax.default_backend())
        for group in groups:  # one a server: among those of many, the tokens of one would be few
            served, trained, *before = logprobs(make_batch([group], [X1]))
            check_probe(served, trained, tolerance, policies.alpha_version, *before)

    def _begin(self, step: int, hard: Sequence[Prompt] = (), policies: Policies | None = None) -> None:
        if step in self._begun:
            if hard:
                raise RuntimeError(f'step {step} was begun without its hard prompts')
        elif self._in_turn:
            self._begun[step] = self._thread.submit(self._answer_in_turn, step, hard, policies)
        else:
            self._begun[step] = self._thread.submit(self._answer, self._ask(step, self._selector.next(), hard))

    def _answer(self, asked: Asked) -> Answered:
        groups, generate_s, verify_s = self._judged(asked)
        fresh, reevaluated = groups[: len(asked.fresh)], groups[len(asked.fresh) :]
        return Answered(fresh, reevaluated, generate_s, verify_s, self._selector.metrics(), asked.selector)

    def _answer_in_turn(self, step: int, hard: Sequence[Prompt], policies: Policies | None) -> Answered:
        """Asks once the step before is judged; hard prompts join the first wave.

        Further waves follow until B groups are mixed, up to rollout.refill_batches waves.
        """
        c, fresh, reevaluated, seconds = self._config, [], [], np.zeros(2)
        for _ in range(c.rollout.refill_batches):
            drawn = {g.prompt.id for g in fresh}
            prompts = [p for p in self._selector.next() if p.id not in drawn]
            if c.rollout.mixture:
                groups, *spent = self._ask_mixture(step, prompts, policies)
            else:
                groups, *spent = self._judged(self._ask(step, prompts, () if fresh else hard))
            self._selector.observe(groups[: len(prompts)])
            fresh, reevaluated, seconds = fresh + groups[: len(prompts)], reevaluated + groups[len(prompts) :], seconds + spent
            if sum(0 < g.correct < g.size and not g.infra_error for g in fresh) >= c.learner.batch_groups:
                break
        return Answered(fresh, reevaluated, *seconds.tolist(), self._selector.metrics(), self._selector.state())

    def _ask_mixture(self, step: int, prompts: Sequence[Prompt], policies: Policies) -> Collected:
        """Shares the prompts out among α and the rollout policies before it (ReMix). The policies answer one after the other."""
        ages = np.minimum(self._schedule.ages(step, len(prompts)), len(policies.recent))
        answered, seconds = {}, np.zeros(2)
        for age, (version, params) in enumerate([(policies.alpha_version, policies.alpha), *policies.recent]):
            of_age = np.flatnonzero(ages == age)
            if len(of_age):
                self._engine.load(params, version)
                groups, *spent = self._judged(self._ask(step, [prompts[i] for i in of_age], []))
                answered |= dict(zip(of_age.tolist(), groups, strict=True))
                seconds += spent
        self._engine.load(policies.alpha, policies.alpha_version)
        return Collected([answered[i] for i in range(len(prompts))], *seconds.tolist())

    def _ask(self, step: int, fresh: Sequence[Prompt], hard: Sequence[Prompt]) -> Asked:
        c = self._config
        draws = [Draw(c.seed, step, FRESH)] * len(fresh) + [Draw(c.seed, step, REEVALUATION)] * len(hard)
        sampling = Sampling(c.rollout.temperature, c.rollout.max_response_tokens)
        answers = self._engine.ask([*fresh, *map(as_read, hard)], c.rollout.group_size, sampling, draws)
        self._meter.asked(answers)
        return Asked(list(fresh), list(hard), draws, answers, self._selector.state())

    def _judged(self, asked: Asked) -> Collected:
        c, collected = self._config, self._collected(asked)
        check_judged(collected.groups, c.rollout.group_size)
        if c.task.overlong_share:
            shaped = [punish_overlong(g, c.rollout.max_response_tokens, c.task.overlong_share) for g in collected.groups]
            collected = collected._replace(groups=shaped)
        return collected

    def _collected(self, asked: Asked) -> Collected:
        c, prompts = self._config, asked.fresh + asked.hard
        return judge_as_they_come(
            asked.answers, self._tokenizer, prompts, asked.draws, self._reward, c.task.verify_s, c.rollout.max_response_tokens
        )
