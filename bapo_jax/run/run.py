"""The training run: its steps, their metrics, and the evaluation, logging and checkpoints due after each."""

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

from bapo_jax.cluster.hosts import HostError, Hosts
from bapo_jax.groups import Batch, Group
from bapo_jax.machine import events, stopping
from bapo_jax.machine.ending import Ending
from bapo_jax.machine.files import is_of_disk
from bapo_jax.machine.stopping import Stopped
from bapo_jax.replay import PURPOSES
from bapo_jax.rollout.schedule import is_due
from bapo_jax.run.checkpoint import Checkpoints, NotSaved
from bapo_jax.run.ledger import Ledger
from bapo_jax.run.log.measures import batch_metrics, batch_tokens, discarded_metrics, fresh_metrics
from bapo_jax.run.log.metrics import MetricsLog, read_metrics
from bapo_jax.run.log.progress import ProgressBar
from bapo_jax.run.log.responses import logged, two_responses, write_rollouts
from bapo_jax.run.remains import drop_later, look_for_first
from bapo_jax.run.state import RunState

SKIP_LIMIT = 5  # the run ends after this many consecutive steps with a skipped update


class Diverged(Ending, RuntimeError):
    """Too many consecutive steps had an update without a finite gradient."""


class Step:
    """One training step: its random generators, timings, metrics and groups."""

    fresh: Sequence[Group]
    reevaluated: Sequence[Group]
    batch: Batch
    trained: Sequence[int | None]
    # Log-probs of the batch's groups under π_θ before the update; None if not scored.
    logp: Sequence[Sequence[np.ndarray] | None]
    writes_rollouts = False  # whether its groups are written to a file

    def __init__(self, seed: int, number: int, seconds: Counter[str]):
        """`seconds` holds the time spent since the previous step, by phase; the step adds its own."""
        self.number, self._seed, self.seconds, self.metrics = number, seed, seconds, {}
        self.started = time.perf_counter()

    def rng(self, purpose: str) -> np.random.Generator:
        """Returns the generator keyed by (seed, step, purpose); `purpose` is one of replay.PURPOSES."""
        return np.random.default_rng([self._seed, self.number, PURPOSES.index(purpose)])

    @contextlib.contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Adds the duration of the block to timing_s/phase."""
        started = time.perf_counter()
        yield
        self.seconds[f'timing_s/{phase}'] += time.perf_counter() - started

    def record(self, *metrics: dict[str, Any]) -> None:
        """Adds metrics to the step's row."""
        for part in metrics:
            self.metrics |= part

    def took(
        self,
        fresh: Sequence[Group],
        reevaluated: Sequence[Group],
        batch: Batch,
        trained: Sequence[int | None],
    ) -> None:
        """Records the groups generated, the batch, and how many times each of its groups was trained on."""
        self.fresh, self.reevaluated, self.batch, self.trained = fresh, reevaluated, batch, trained


class Run:
    """The state of a run and the writers of its directory.

    A signal (stopping.py) ends the run after the current step, with a checkpoint. If that step still waits
    for responses, it is abandoned, and the checkpoint is of the previous step. A resumed run finishes an
    evaluation that a signal interrupted. After a kill it does so only if a checkpoint was due at that step,
    since the checkpoint is saved first.
    """

    def __init__(
        self, config: ConfigDict, workdir: Path, steps: int, state: RunState, checkpoints: Checkpoints,
        hosts: Hosts, tokenizer: Any, diagnostics: Any, *,
        evaluate: Callable[[Callable[[str], None]], dict[str, Any]],
        to_save: Callable[[], tuple[dict[str, np.ndarray], str]], ended: Callable[[int, bool, str], None],
        ledger: Ledger | None = None,
    ):  # fmt: skip
        """`diagnostics` (diagnostics.py) wrap each update; `evaluate` scores π_θ and reports its progress.

        `to_save` returns the replay's arrays and the selector's state. `ended` records the last step,
        whether the run has finished, and the error that ended it, if any; a crash does not call it. `ledger`
        checks each step.
        """
        if state.unwritten and any(row['step'] == state.step for row in read_metrics(workdir)):
            state.unwritten = {}  # its evaluation finished after the checkpoint was saved
        written = state.step - 1 if state.unwritten else state.step
        drop_later(workdir, state.step)
        look_for_first(workdir)
        self.state, self.diagnostics, self.evaluate = state, diagnostics, evaluate
        self._log = MetricsLog(workdir, written if state.step else -1, config.log.sinks)
        self._there = os.stat(workdir)
        self.config, self._workdir, self._steps, self._checkpoints, self._hosts = (
            config,
            workdir,
            steps,
            checkpoints,
            hosts,
        )
        self._tokenizer, self._to_save, self._ended = tokenizer, to_save, ended
        self._progress = ProgressBar(steps, state.step)
        self._of_save: Counter[str] = Counter()  # cost of the last checkpoint, logged in the next step's row
        self._ledger = ledger

    def steps_left(self) -> Iterator[int]:
        """Yields the remaining steps until a signal arrives.

        First evaluates θ_0, or finishes an interrupted evaluation.
        """
        state = self.state
        try:
            with self._broken_off():
                if state.unwritten:
                    self._write(
                        Step(self.config.seed, state.step, Counter()),
                        state.unwritten,
                        self.evaluate(self._say),
                    )
                elif state.step == 0 and self.config.evaluate.at_start:
                    self._write(Step(self.config.seed, 0, Counter()), {}, self.evaluate(self._say))
        except Stopped:
            return
        if state.step < self._steps:
            self._progress.note(f'step {state.step + 1}: sampling, then compiling the update')
        while state.step < self._steps and not stopping.requested():
            yield state.step + 1

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[Step]:
        """Times step `number`, then evaluates, logs and saves if each is due."""
        now, every = Step(self.config.seed, number, self._of_save), self.config.log.rollouts_every
        now.writes_rollouts = is_due(every, number) or every > 0 and number in (1, self._steps)
        with self._broken_off():
            try:
                with now.timer('step'):
                    yield now
            except Stopped:  # while waiting for responses: the state is still that of the previous step
                self._save()
                return
            self._after(now)

    def close(self) -> None:
        """Closes the progress bar and the writers, and records the end."""
        self._progress.stop()
        self._log.close()
        self._checkpoints.close()
        look_for_first(self._workdir)
        self.end()

    def end(self, error: str = '') -> None:
        """Records how the run ends: it has finished, a signal stopped it, or `error`, one line, ended it."""
        if self._is_there():
            self._ended(self.state.step, self.state.has_ended(self._steps), error)

    def _is_there(self) -> bool:
        """Whether the directory is still the one that the run began in."""
        return self._workdir.is_dir() and os.path.samestat(os.stat(self._workdir), self._there)

    @contextlib.contextmanager
    def _broken_off(self) -> Iterator[None]:
        """On an error, restores the terminal; unless the disk failed, records the error.

        Waits for a pending checkpoint before, unless disk or host failed.
        """
        try:
            yield
        except Stopped:
            raise
        except Exception as e:
            self._progress.stop()
            of_disk = isinstance(e, NotSaved) or isinstance(e, OSError) and is_of_disk(e)
            if not of_disk and not isinstance(e, HostError):
                self._checkpoints.finish(self.config.checkpoint.grace_s)
            if not of_disk:
                self.end(str(e).partition('\n')[0] or type(e).__name__)
            raise

    def _after(self, now: Step) -> None:
        c, step, self._of_save = self.config, now.number, Counter()
        if not self._is_there():
            raise NotSaved(
                f'{self._workdir} was removed or renamed, and another directory now has its name; put it back'
            )
        look_for_first(self._workdir)  # the checkpoint of an earlier step may be complete by now
        self.state.count(now.fresh, now.reevaluated, now.batch)
        now.record(
            fresh_metrics(now.fresh), batch_metrics(now.batch, step), discarded_metrics(now.fresh, now.batch)
        )
        now.record(self.state.metrics())
        if self._ledger:
            self._ledger.check(step, now.fresh, now.reevaluated, now.batch)
        if now.writes_rollouts:
            path = self._workdir / 'rollouts' / f'{step:06d}.jsonl.zst'
            with now.timer('rollouts'):
                write_rollouts(
                    path,
                    self._tokenizer,
                    logged(now.fresh, now.reevaluated, now.batch, now.trained, now.logp),
                )
            self._progress.show(two_responses(step, self._tokenizer, now.fresh))
        self._look_at_skipped(now)
        now.record({'perf/throughput': batch_tokens(now.batch) / now.seconds['timing_s/step']})
        scores, saves = {}, step == self._steps or is_due(c.checkpoint.every, step)
        if step == self._steps or is_due(c.evaluate.every, step):
            self.state.unwritten = now.metrics | dict(now.seconds)
            if saves:
                self._save()
            try:
                with now.timer('testing'):
                    scores = self.evaluate(self._say)
            except Stopped:
                self._save()
                return
        self._write(now, now.metrics, scores)
        if saves or stopping.requested():
            self._save()

    def _write(self, now: Step, metrics: dict[str, Any], scores: dict[str, Any]) -> None:
        """Writes the step's row once it is complete."""
        row = {**metrics, **scores, **now.seconds}
        self._log.write(now.number, row)
        if now.number:
            self._progress.update(now.number, row)
        self.state.unwritten = {}

    def _say(self, text: str) -> None:
        """Reports an evaluation's progress to the terminal and the other hosts."""
        self._progress.note(text)
        self._hosts.progress(text)

    def _save(self) -> None:
        """Saves the state, unless no step is done or this step is already saved."""
        if self.state.step in (0, self._checkpoints.latest_step()):
            return
        with Step(self.config.seed, self.state.step, self._of_save).timer('save_checkpoint'):
            self._hosts.tell('save')
            self._of_save['perf/checkpoint_bytes'] = self._checkpoints.save(self.state, *self._to_save())

    def _look_at_skipped(self, now: Step) -> None:
        """Writes the batch of a step with a skipped update to a file.

        Raises Diverged after SKIP_LIMIT such steps in a row.
        """
        state, limit = self.state, SKIP_LIMIT
        skipped = now.metrics.get('actor/skipped_updates', 0) + now.metrics.get('critic/skipped_updates', 0)
        if not skipped:
            state.skipped_in_a_row = 0
            return
        state.skipped_in_a_row += 1
        path = self._workdir / 'skipped' / f'{now.number:06d}.jsonl.zst'
        write_rollouts(path, self._tokenizer, logged((), (), now.batch, now.trained, now.logp))
        message = (
            f'step {now.number}: {skipped} updates were skipped because the gradient was not finite; '
            f'their batch is in {path}'
        )
        events.report('update skipped', message, step=now.number)
        if state.skipped_in_a_row >= limit:
            raise Diverged(
                f'{limit} steps in a row had an update whose gradient was not finite; their batches are in '
                f'{path.parent}. Lower learner.learning_rate or learner.grad_clip, and continue with --amend'
            )
