"""A run under way: its steps, what each step records, and what is due after it: evaluate, log, save."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from bapo_jax import events, stopping
from bapo_jax.files import is_of_disk
from bapo_jax.groups import Batch, Group
from bapo_jax.hosts import HostError, Hosts
from bapo_jax.replay import PURPOSES
from bapo_jax.rollout.schedule import is_due
from bapo_jax.run.checkpoint import Checkpoints, NotSaved, RunState
from bapo_jax.run.ledger import Ledger
from bapo_jax.run.log import MetricsLog, ProgressBar, read_metrics
from bapo_jax.run.measures import trained_tokens
from bapo_jax.run.remains import drop_later, look_for_first
from bapo_jax.run.rollouts import logged, two_responses, write_rollouts
from bapo_jax.stopping import Stopped


class Diverged(RuntimeError):
    """No update is finite any more."""


class Step:
    """One step: its random numbers, its seconds by phase, its row of metrics, its groups."""

    fresh: Sequence[Group]
    reevaluated: Sequence[Group]
    batch: Batch
    trained: Sequence[int | None]
    logp: Sequence[Sequence[np.ndarray] | None]  # of the batch's groups under π_θ before the update; None where not scored
    writes_rollouts = False  # whether its groups go into a file

    def __init__(self, seed: int, number: int, seconds: Counter[str]):
        """`seconds` holds the time spent since the step before, by phase; the step adds its own."""
        self.number, self._seed, self.seconds, self.metrics = number, seed, seconds, {}
        self.started = time.perf_counter()

    def rng(self, purpose: str) -> np.random.Generator:
        """The generator keyed by (seed, step, purpose); a purpose is one of replay.PURPOSES."""
        return np.random.default_rng([self._seed, self.number, PURPOSES.index(purpose)])

    @contextlib.contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Adds the seconds inside to timing_s/phase."""
        started = time.perf_counter()
        yield
        self.seconds[f'timing_s/{phase}'] += time.perf_counter() - started

    def record(self, *metrics: dict[str, Any]) -> None:
        """Adds to the step's row of metrics."""
        for part in metrics:
            self.metrics |= part

    def took(
        self, fresh: Sequence[Group], reevaluated: Sequence[Group], batch: Batch, trained: Sequence[int | None]
    ) -> None:
        """What the step generated, what it trained on, and how many times each of its batch's groups has been."""
        self.fresh, self.reevaluated, self.batch, self.trained = fresh, reevaluated, batch, trained


class Run:
    """The state of a run, and its directory's writers.

    A signal (stopping.py) ends it after the step under way, with a checkpoint. If that step still waits for responses it is given
    up, and the checkpoint is of the step before. An evaluation that is cut short is finished when the run goes on: by a signal, or
    by a kill where a checkpoint is due at its step. That checkpoint comes first.
    """

    def __init__(
        self, config: ConfigDict, workdir: Path, steps: int, state: RunState, checkpoints: Checkpoints, hosts: Hosts,
        tokenizer: Any, *,
        evaluate: Callable[[Callable[[str], None]], dict[str, Any]], to_save: Callable[[], tuple[dict[str, np.ndarray], str]],
        ledger: Ledger | None = None,
    ):  # fmt: skip
        """`evaluate` scores π_θ, and says how far it is; `to_save` returns the replay's arrays and the selector's state; `ledger` checks each step."""
        if state.unwritten and any(row['step'] == state.step for row in read_metrics(workdir)):
            state.unwritten = {}  # its evaluation has ended since the checkpoint
        written = state.step - 1 if state.unwritten else state.step
        drop_later(workdir, state.step)
        look_for_first(workdir)
        self.state, self._log = state, MetricsLog(workdir, written if state.step else -1, config.log.sinks)
        self._there = os.stat(workdir)
        self._config, self._workdir, self._steps, self._checkpoints, self._hosts = config, workdir, steps, checkpoints, hosts
        self._tokenizer, self._evaluate, self._to_save = tokenizer, evaluate, to_save
        self._progress = ProgressBar(steps, state.step)
        self._of_save: Counter[str] = Counter()  # what the last checkpoint cost: the next step's row has it
        self._ledger = ledger

    def steps_left(self) -> Iterator[int]:
        """Each step that is left, until a signal comes. Before the first one evaluates θ_0, or what a signal cut short."""
        state = self.state
        try:
            with self._broken_off():
                if state.unwritten:
                    self._write(Step(self._config.seed, state.step, Counter()), state.unwritten, self._evaluate(self._say))
                elif state.step == 0 and self._config.evaluate.at_start:
                    self._write(Step(self._config.seed, 0, Counter()), {}, self._evaluate(self._say))
        except Stopped:
            return
        while state.step < self._steps and not stopping.requested():
            yield state.step + 1

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[Step]:
        """The step `number`; counts the seconds inside. Then evaluates, logs and saves, each by its period."""
        now, every = Step(self._config.seed, number, self._of_save), self._config.rollouts.every
        now.writes_rollouts = is_due(every, number) or every > 0 and number in (1, self._steps)
        with self._broken_off():
            try:
                with now.timer('step'):
                    yield now
            except Stopped:  # in a wait for responses: the state is still that of the step before
                self._save()
                return
            self._after(now)

    def sync(self) -> None:
        """Lines 3-5 on every host: α becomes π_θ. Does nothing where a checkpoint within this step has it already."""
        if self.state.synced_after != self.state.step:
            self._hosts.tell('sync')
            self.state.sync()

    def close(self) -> None:
        """Closes the writers and the progress bar."""
        self._progress.stop()
        self._log.close()
        self._checkpoints.close()
        look_for_first(self._workdir)

    @contextlib.contextmanager
    def _broken_off(self) -> Iterator[None]:
        """Inside, an error gives the terminal back, and waits for a checkpoint that is being written, unless its disk is at fault."""
        try:
            yield
        except Stopped:
            raise
        except Exception as e:
            self._progress.stop()
            if not isinstance(e, (NotSaved, HostError)) and not (isinstance(e, OSError) and is_of_disk(e)):
                self._checkpoints.finish(self._config.checkpoint.grace_s)
            raise

    def _after(self, now: Step) -> None:
        c, step, self._of_save = self._config, now.number, Counter()
        if not os.path.samestat(os.stat(self._workdir), self._there):
            raise NotSaved(f'{self._workdir} was removed or renamed, and another directory has its name; put it back')
        look_for_first(self._workdir)  # that of a step before may be whole now
        if self._ledger:
            self._ledger.check(step, now.fresh, now.reevaluated, now.batch)
        if now.writes_rollouts:
            path = self._workdir / 'rollouts' / f'{step:06d}.jsonl.zst'
            with now.timer('rollouts'):
                write_rollouts(path, self._tokenizer, logged(now.fresh, now.reevaluated, now.batch, now.trained, now.logp))
            self._progress.show(two_responses(step, self._tokenizer, now.fresh))
        self._look_at_skipped(now)
        now.record({'perf/throughput': trained_tokens(now.batch) / now.seconds['timing_s/step']})
        scores, saves = {}, step == self._steps or is_due(c.checkpoint.every, step)
        if step == self._steps or is_due(c.evaluate.every, step):
            self.state.unwritten = now.metrics | dict(now.seconds)
            if saves:
                self._save()
            try:
                with now.timer('testing'):
                    scores = self._evaluate(self._say)
            except Stopped:
                self._save()
                return
        self._write(now, now.metrics, scores)
        if saves or stopping.requested():
            self._save()

    def _write(self, now: Step, metrics: dict[str, Any], scores: dict[str, Any]) -> None:
        """The step's row, when all of it is there."""
        row = {**metrics, **scores, **now.seconds}
        self._log.write(now.number, row)
        if now.number:
            self._progress.update(now.number, row)
        else:
            self._progress.note('compiling …')
        self.state.unwritten = {}

    def _say(self, text: str) -> None:
        """Tells the terminal and the other hosts how far an evaluation is."""
        self._progress.note(text)
        self._hosts.progress(text)

    def _save(self) -> None:
        """Saves the state, unless there is nothing to save, or the same is saved already."""
        if self.state.step in (0, self._checkpoints.latest_step()):
            return
        with Step(self._config.seed, self.state.step, self._of_save).timer('save_checkpoint'):
            self._hosts.tell('save')
            self._of_save['perf/checkpoint_bytes'] = self._checkpoints.save(self.state, *self._to_save())

    def _look_at_skipped(self, now: Step) -> None:
        """Keeps the batch of a step with an update that was skipped. Raises Diverged after too many such steps in a row."""
        state, limit = self.state, self._config.learner.skip_limit
        skipped = now.metrics.get('actor/skipped_updates', 0) + now.metrics.get('critic/skipped_updates', 0)
        if not skipped:
            state.skipped_in_a_row = 0
            return
        state.skipped_in_a_row += 1
        path = self._workdir / 'skipped' / f'{now.number:06d}.jsonl.zst'
        write_rollouts(path, self._tokenizer, logged((), (), now.batch, now.trained, now.logp))
        message = f'step {now.number}: {skipped} updates without a finite gradient were skipped; their batch is in {path}'
        events.report('update skipped', message, step=now.number)
        if state.skipped_in_a_row >= limit:
            raise Diverged(
                f'{limit} steps in a row had an update without a finite gradient (learner.skip_limit); their batches are in '
                f'{path.parent}. Continue with a lower learner.learning_rate or learner.grad_clip and --amend'
            )
