"""Decides which policy answers which prompts, and when.

α answers fresh prompts, possibly several steps ahead; π_θ answers hard prompts and evaluations. If α is π_θ,
fresh and hard prompts are sent as one wave. Otherwise the engine switches to π_θ and back: at once if it
holds several policies, else when α has answered.

α does not change between two syncs, so all steps up to the next sync can be requested at once, earlier steps
first. While one step trains, the next are generated, and no step waits for the last response of the step
before. With T seconds to train and G to generate, a step then costs max(T + G/v, G + T/v) on average instead
of T + G. The first generation after a sync overlaps with no training. The prompts, their order and the
selector's knowledge stay the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from bapo_jax.cluster.hosts import Hosts
from bapo_jax.groups import X1, Begun, Group, Prompt, make_batch
from bapo_jax.machine import stopping
from bapo_jax.machine.stopping import leaving_waits
from bapo_jax.prompts.protocol import PromptSelector
from bapo_jax.rollout.answered import Answered, LogProbs, Pending, Policies, Wave
from bapo_jax.rollout.collect import Collected, check_judged, judge, judge_as_they_come
from bapo_jax.rollout.engine import FAILED, FRESH, PROBE, REEVALUATION, Draw, Engine, Sampling
from bapo_jax.rollout.fidelity import check_probe, tolerance_of
from bapo_jax.rollout.meter import Meter, tokens_sampled
from bapo_jax.rollout.schedule import Schedule
from bapo_jax.rollout.unfinished import Unfinished, ask_rest, budget_of, first_of
from bapo_jax.tasks.custom_reward import Rewards
from bapo_jax.tasks.shaping import shaped_rewards

_PROBE_TOKENS = 32  # most tokens of each answer to the probe


class Rollouts:
    """Generates groups, step by step, and judges them in its own thread."""

    def __init__(
        self, engine: Engine, tokenizer: Any, selector: PromptSelector, schedule: Schedule,
        config: ConfigDict, reward: Rewards | None, policies: Policies, hosts: Hosts, logprobs: LogProbs,
        probe: Prompt,
    ):  # fmt: skip
        """`config` is resolved. `reward` replaces the verifier unless it is None. `probe` follows a sync.

        `logprobs` computes the trainer's log-probs, with which the servers' are compared.
        """
        self._engine, self._policies, self._hosts = engine, policies, hosts
        self._logprobs, self._probe, self._tokenizer = logprobs, probe, tokenizer
        self._selector, self._schedule, self._config, self._reward = selector, schedule, config, reward
        # A step's prompts may depend on the results of the step before, or of its own first wave.
        self._in_turn = (
            selector.learns or config.rollout.refill_batches > 1 or config.rollout.mixture.share > 0
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix='rollouts')
        self._begun: dict[int, Future[Answered]] = {}
        self._budget = budget_of(config.rollout)
        self._unfinished: list[Unfinished] = []  # to be continued by the next step that begins
        self._continued: dict[int, list[Unfinished]] = {}  # by the steps that have begun
        self._ready: list[Group] = []
        self._selector_state = selector.state()
        self._taken: dict[str, float] = {}  # metrics of the last step taken
        self._meter = Meter()

    def sync(self) -> None:
        """Lines 3-5 on every host: sets α to π_θ and loads it into the engine.

        If a checkpoint taken within this step already includes this sync, α is only loaded.
        """
        p = self._policies
        if p.synced_after != p.step:
            self._hosts.tell('sync')
            p.sync()
        self.serve()

    def serve(self) -> None:
        """Loads α and probes each server. Raises PolicyMismatch if its log-probs are wrong."""
        with self._meter.handing_over():
            self._hold_alpha()
            if self._engine.servers:
                self._probe_servers()
        self._policies.before = None

    def begin_ahead(self, step: int) -> None:
        """Starts the later steps whose fresh prompts α can answer while `step` trains."""
        if self._config.rollout.overlap:
            for later in range(step + 1, self._schedule.last_ahead(step) + 1):
                self._begin(later)

    def take(self, step: int, hard: Sequence[Begun]) -> tuple[list[Group], list[Group]]:
        """The fresh groups of `step`, sampled from α, and those of its hard prompts, sampled from π_θ.

        With `reevaluation_syncs`, α is π_θ after re-evaluation. Raises the engine's errors, and Stopped if a
        signal comes; the state is then still that of the step before.
        """
        with self._meter.waiting():
            taken = self._take(step, hard)
        if hard and self._schedule.reevaluation_syncs:
            self.sync()
        return taken

    def ask_failed(self, step: int, prompts: Sequence[Prompt]) -> list[Group]:
        """α's groups for previously failed prompts, sampled after the steps started ahead and stored nowhere.

        A lost group has no responses. Any number may be lost, since only training needs most of them. A
        signal waits, since the step has already been taken.
        """
        c = self._config
        sampling, draws = (
            Sampling(c.rollout.temperature, c.rollout.max_response_tokens),
            [Draw(c.seed, step, FAILED)] * len(prompts),
        )
        answers = self._engine.ask(list(map(Begun, prompts)), c.rollout.group_size, sampling, draws)
        self._meter.asked(answers)
        with self._meter.waiting():
            return self._collected(Wave(list(prompts), 0, draws, answers, self._selector_state)).groups

    @contextlib.contextmanager
    def held_by_theta(self) -> Iterator[Engine]:
        """Loads π_θ into the engine, and α again on exit.

        All started steps must have been taken, unless the engine holds several policies.
        """
        self._engine.load(self._policies.theta.params, self._policies.step)
        yield self._engine
        self._hold_alpha()

    def metrics(self, started: float) -> dict[str, float]:
        """Metrics of the last step, which began at `started` (perf_counter), the selector and the engine."""
        return self._taken | self._meter.read(started) | self._engine.metrics()

    def state(self) -> tuple[Pending, str]:
        """For a checkpoint: what is pending, and the selector's state after the last step taken.

        Waits for the steps requested ahead, if the policy that answers them is not saved, or if they continue
        what an earlier one left unfinished. Otherwise α answers them again. So it does from the first step on
        that fails, whose error is raised when it is taken, or that keeps a stopping run waiting too long.
        """
        kept = self._schedule.most_behind or self._budget and self._config.rollout.overlap
        answered = {}
        for step, answer in sorted(self._begun.items()) if kept else ():
            try:
                answered[step] = stopping.result_in_time(answer)
            except Exception as error:
                logging.warning(
                    'the checkpoint is without the responses of step %d and later (%s); a run that continues '
                    'from it asks for them again',
                    step,
                    str(error).partition('\n')[0] or type(error).__name__,
                )
                break
        continued = [
            group for step in sorted(self._continued.keys() - answered) for group in self._continued[step]
        ]
        return Pending(answered, continued + self._unfinished, self._ready), self._selector_state

    def restore(self, pending: Pending, state: str) -> None:
        """Restores what `state` returned."""
        self._selector_state = state
        self._unfinished, self._ready = list(pending.unfinished), list(pending.ready)
        for step, answered in sorted(pending.ahead.items()):
            self._begun[step] = Future()
            self._begun[step].set_result(answered)
            state = answered.selector
        self._selector.restore(state)

    def close(self) -> None:
        """Cancels the steps that were started."""
        self._engine.close()  # so that nothing waits for an answer any more
        self._thread.shutdown(cancel_futures=True)

    def _hold_alpha(self) -> None:
        self._engine.load(self._policies.alpha, self._policies.alpha_version)

    def _take(self, step: int, hard: Sequence[Begun]) -> tuple[list[Group], list[Group]]:
        ahead = step in self._begun  # requested before the last sync, without its hard prompts
        one_wave = not ahead and self._policies.alpha_version == step - 1  # α is π_θ
        self._begin(step, hard if one_wave else ())
        # A step in turn asks from a thread of its own, which must not find π_θ in the engine.
        at_once = self._engine.holds_several and not self._in_turn
        asked = None
        if hard and not one_wave and at_once:
            with self.held_by_theta():
                asked = self._ask(step, [], hard)
        # Otherwise the engine must hold another policy before the later steps start.
        if not hard or (one_wave or at_once) and not self._schedule.reevaluation_syncs:
            self.begin_ahead(step)
        with leaving_waits():
            answered = self._begun[step].result()
        self._taken = {
            **answered.measures,
            'timing_s/gen': answered.generate_s,
            'timing_s/reward': answered.verify_s,
        }
        reevaluated = answered.reevaluated
        if hard and not one_wave:
            with contextlib.nullcontext() if asked else self.held_by_theta(), leaving_waits():
                reevaluated, generate_s, verify_s, _ = self._judged(asked or self._ask(step, [], hard))
            self._taken['timing_s/reevaluate'] = generate_s + verify_s
        # All groups of the step have arrived. Had a signal stopped the wait, it would still be to be taken.
        del self._begun[step]
        self._continued.pop(step, None)
        self._selector_state = answered.selector
        return self._finished(step, answered), reevaluated

    def _finished(self, step: int, answered: Answered) -> list[Group]:
        """The fresh groups of a step. With a budget of tokens, those beyond B wait for a later step."""
        if not (self._budget or self._ready):
            return answered.fresh
        self._unfinished += answered.unfinished
        taken, self._ready = first_of(self._ready + answered.fresh, self._config.learner.batch_groups)
        self._taken['rollout/unfinished'] = sum(len(group.rest()) for group in self._unfinished)
        self._taken['rollout/ready'] = len(self._ready)
        return [dataclasses.replace(group, step=step) for group in taken]

    def _probe_servers(self) -> None:
        """Sends the probe to each server. Raises PolicyMismatch if log-probs differ too much."""
        c, policies = self._config, self._policies
        sampling = Sampling(c.rollout.temperature, min(_PROBE_TOKENS, c.rollout.max_response_tokens))
        draw = Draw(c.seed, policies.step, PROBE)
        answers = self._engine.probe(self._probe, c.rollout.group_size, sampling, draw)
        prompts, draws = [self._probe] * len(answers), [draw] * len(answers)
        groups = judge(self._tokenizer, prompts, answers, draws, self._reward)
        tolerance = tolerance_of(
            c.rollout.probe_tolerance, (c.rollout.dtype, c.model.dtype), jax.default_backend()
        )
        for group in groups:  # one per server: among the tokens of many, those of one would be few
            served, trained, *before = self._logprobs(policies.policies(), make_batch([group], [X1]))
            check_probe(served, trained, tolerance, policies.alpha_version, *before)

    def _begin(self, step: int, hard: Sequence[Begun] = ()) -> None:
        if step in self._begun:
            return
        rest, self._unfinished = self._unfinished, []
        if rest:
            self._continued[step] = rest
        if self._in_turn:
            self._begun[step] = self._thread.submit(self._answer_in_turn, step, hard, rest)
        else:
            self._begun[step] = self._thread.submit(
                self._answer, self._ask(step, self._selector.next(), hard, rest)
            )

    def _answer(self, asked: Wave) -> Answered:
        groups, generate_s, verify_s, unfinished = self._judged(asked)
        fresh, reevaluated = _apart(groups, asked.hard)
        metrics = self._selector.metrics()
        return Answered(fresh, reevaluated, generate_s, verify_s, metrics, asked.selector, unfinished)

    def _answer_in_turn(self, step: int, hard: Sequence[Begun], rest: Sequence[Unfinished]) -> Answered:
        """Generates a step once the previous one has been judged; all other groups join its first wave.

        Further waves follow until B groups are mixed, up to rollout.refill_batches waves. The selector's
        references are asked first. Those that it then does not choose are the last of the fresh groups.
        """
        c, fresh, reevaluated, unfinished, seconds = self._config, [], [], [], np.zeros(2)
        references = {}
        if prompts := self._selector.references():
            groups, *spent, _ = self._judged(self._ask(step, prompts, []))
            self._selector.observe(groups)
            references, seconds = {g.prompt.id: g for g in groups}, seconds + spent
        for wave in range(c.rollout.refill_batches):
            first = wave == 0
            drawn = {g.prompt.id for g in fresh}
            chosen = [p for p in self._selector.next() if p.id not in drawn]
            known = [references.pop(p.id) for p in chosen if p.id in references]
            prompts = [p for p in chosen if all(p.id != g.prompt.id for g in known)]
            if c.rollout.mixture.share:
                groups, *spent, cut = self._ask_mixture(step, prompts)
            else:
                asked = self._ask(step, prompts, hard if first else (), rest if first else ())
                groups, *spent, cut = self._judged(asked)
            new, again = _apart(groups, len(hard) if first else 0)
            new = known + new
            self._selector.observe(new)
            fresh, reevaluated, unfinished, seconds = (
                fresh + new, reevaluated + again, unfinished + cut, seconds + spent
            )  # fmt: skip
            if sum(0 < g.correct < g.size and not g.infra_error for g in fresh) >= c.learner.batch_groups:
                break
        fresh += references.values()
        measures, state = self._selector.metrics(), self._selector.state()
        return Answered(fresh, reevaluated, *seconds.tolist(), measures, state, unfinished)

    def _ask_mixture(self, step: int, prompts: Sequence[Prompt]) -> Collected:
        """Divides the prompts among α and earlier rollout policies (ReMix).

        They answer side by side if the engine holds several policies, else one by one.
        """
        policies = self._policies
        ages = np.minimum(self._schedule.ages(step, len(prompts)), len(policies.recent))
        waves, answered, seconds = [], {}, np.zeros(2)
        for age, (version, params) in enumerate([(policies.alpha_version, policies.alpha), *policies.recent]):
            aged = np.flatnonzero(ages == age)
            if len(aged):
                self._engine.load(params, version)
                wave = self._ask(step, [prompts[i] for i in aged], [])
                waves.append((aged, wave, None if self._engine.holds_several else self._judged(wave)))
        for aged, wave, collected in waves:
            groups, *spent, _ = collected or self._judged(wave)
            answered |= dict(zip(aged.tolist(), groups, strict=True))
            seconds += spent
        self._hold_alpha()
        return Collected([answered[i] for i in range(len(prompts))], *seconds.tolist())

    def _ask(
        self, step: int, fresh: Sequence[Prompt], hard: Sequence[Begun], rest: Sequence[Unfinished] = ()
    ) -> Wave:
        c, most = self._config, self._budget
        draw, again = Draw(c.seed, step, FRESH), Draw(c.seed, step, REEVALUATION)
        sampling = Sampling(c.rollout.temperature, c.rollout.max_response_tokens)
        begun = [*(one._replace(most=most) for one in self._selector.begin(fresh)), *hard]
        draws = [draw] * len(fresh) + [again] * len(hard)
        # Whole groups first: the in-process engine reserves room for the size of the first in line.
        answers = self._engine.ask(begun, c.rollout.group_size, sampling, draws)
        if rest:
            answers = ask_rest(self._engine, rest, most, sampling, draw) + answers
        self._meter.asked(answers, [tokens_sampled(group.responses) for group in rest])
        prompts = [one.prompt for one in (*rest, *begun)]
        return Wave(prompts, len(hard), [draw] * len(rest) + draws, answers, self._selector.state())

    def _judged(self, asked: Wave) -> Collected:
        c, collected = self._config, self._collected(asked)
        check_judged(collected.groups, c.rollout.group_size, len(collected.unfinished))
        shaping = c.rollout.max_response_tokens, c.task.overlong_share, c.task.length_weight
        return collected._replace(groups=[shaped_rewards(group, *shaping) for group in collected.groups])

    def _collected(self, asked: Wave) -> Collected:
        return judge_as_they_come(
            asked.answers,
            self._tokenizer,
            asked.prompts,
            asked.draws,
            self._reward,
            self._config.task.judging.step_s,
        )


def _apart(groups: list[Group], hard: int) -> tuple[list[Group], list[Group]]:
    """The fresh groups, and the last `hard` groups."""
    return groups[: len(groups) - hard], groups[len(groups) - hard :]
