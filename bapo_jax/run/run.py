"""A run under way: its steps, what each step records, and what is due after it: evaluate, log, save, stop."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from bapo_jax.groups import Batch, Group
from bapo_jax.hosts import Hosts
from bapo_jax.replay import PURPOSES
from bapo_jax.rollout.schedule import is_due
from bapo_jax.run.checkpoint import Checkpoints, RunState
from bapo_jax.run.log import MetricsLog, ProgressBar
from bapo_jax.run.measures import trained_tokens
from bapo_jax.run.rollouts import uses, write_rollouts


class Step:
    """One step: its random numbers, its seconds by phase, its row of metrics."""

    def __init__(self, seed: int, number: int, seconds: Counter[str]):
        """`seconds` holds the time spent since the step before, by phase; the step adds its own."""
        self.number, self._seed, self.seconds, self.metrics = number, seed, seconds, {}

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


class Run:
    """The state of a run, and its directory's writers. SIGTERM and SIGINT end it after the step under way, with a checkpoint."""

    def __init__(
        self, config: ConfigDict, workdir: Path, steps: int, state: RunState, checkpoints: Checkpoints, hosts: Hosts,
        tokenizer: Any, *,
        evaluate: Callable[[], dict[str, Any]], to_save: Callable[[], tuple[dict[str, np.ndarray], str]],
    ):  # fmt: skip
        """`evaluate` scores π_θ; `to_save` returns the replay's arrays and the selector's state."""
        self.state, self.log = state, MetricsLog(workdir, state.step if state.step else -1)
        self._config, self._workdir, self._steps, self._checkpoints, self._hosts = config, workdir, steps, checkpoints, hosts
        self._tokenizer, self._evaluate, self._to_save = tokenizer, evaluate, to_save
        self._progress, self._signalled = ProgressBar(steps, state.step), stop_on_signal()
        self._of_save: Counter[str] = Counter()  # what the last checkpoint cost: the next step's row has it

    def steps_left(self) -> range:
        return range(self.state.step + 1, self._steps + 1)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[Step]:
        """The step `number`; counts the seconds inside."""
        now = Step(self._config.seed, number, self._of_save)
        with now.timer('step'):
            yield now

    def sync(self) -> None:
        """Lines 3-5 on every host: α becomes π_θ."""
        self._hosts.tell('sync')
        self.state.sync()

    def due(self, now: Step, batch: Batch, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> bool:
        """Evaluates, logs the step and saves, each by its period. Returns whether the run is to stop."""
        c, step = self._config, now.number
        stopping = self._signalled() or step == self._steps
        if step == self._steps or is_due(c.evaluate.every, step):
            with now.timer('testing'):
                now.record(self._evaluate())
        if is_due(c.rollouts.every, step):
            path = self._workdir / 'rollouts' / f'{step:06d}.jsonl.zst'
            write_rollouts(path, self._tokenizer, uses(fresh, reevaluated, batch))
        now.record(now.seconds, {'perf/throughput': trained_tokens(batch) / now.seconds['timing_s/step']})
        self.log.write(step, now.metrics)
        self._progress.update(step, now.metrics)
        self._of_save = Counter()
        if stopping or is_due(c.checkpoint.every, step):
            with Step(c.seed, step, self._of_save).timer('save_checkpoint'):
                self._hosts.tell('save')
                self._of_save['perf/checkpoint_bytes'] = self._checkpoints.save(self.state, *self._to_save())
        return stopping

    def close(self) -> None:
        """Closes the writers and the progress bar."""
        self._progress.stop()
        self.log.close()
        self._checkpoints.close()


def stop_on_signal() -> Callable[[], bool]:
    """Returns a function that says whether SIGTERM or SIGINT came. The run first finishes and saves the step under way."""
    received = []

    def remember(signum, frame):
        received.append(signum)
        print(f'\n{signal.Signals(signum).name}: stopping after this step, with a checkpoint', flush=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, remember)
    return lambda: bool(received)
