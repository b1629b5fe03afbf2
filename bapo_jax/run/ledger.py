"""Checks that every drawn prompt has one outcome and every buffer entry one history, at each step.

Enabled by log.ledger. ledger.jsonl has a row per step: the drawn prompts by outcome, and the entries that
entered or left the buffer's high part. An entry is a prompt id and the step at whose end it was stored.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bapo_jax.config import fresh_prompts
from bapo_jax.groups import X1, Batch, Group
from bapo_jax.machine.files import write_text
from bapo_jax.replay.bapo import X2, X3
from bapo_jax.replay.buffer import ReplayBuffer
from bapo_jax.replay.protocol import Replay
from bapo_jax.run.log.metrics import read_rows


class Unbalanced(RuntimeError):
    """A prompt or a buffer entry was lost or duplicated."""


class Ledger:
    """The rows up to a run's current step, and the check of the next step."""

    def __init__(
        self, directory: Path, continue_after: int, steps_an_epoch: int, buffer: ReplayBuffer | None
    ):
        """`steps_an_epoch` is 0 if prompts may repeat in an epoch; `buffer` is None for other buffers."""
        self._path, self._steps_an_epoch, self._buffer = directory / 'ledger.jsonl', steps_an_epoch, buffer
        self._rows = [row for row in read_rows(self._path) if row['step'] <= continue_after]
        write_text(self._path, ''.join(json.dumps(row) + '\n' for row in self._rows))

    def check(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group], batch: Batch) -> None:
        """Checks `step` after the buffer has stored its groups, and adds its row.

        Raises Unbalanced, naming the step and the prompts, if a check fails.
        """
        # A group of X1 may have a trace beside its fresh responses.
        trained, drawn_for = batch.of_origin(X1), {id(r): g.prompt.id for g in fresh for r in g.responses}
        used = {id(r) for g in trained for r in g.responses}
        stored, gone = self._history()
        row = {
            'step': step,
            'trained': _ids(trained),
            'infra_error': _ids(g for g in fresh if g.infra_error),
            'filtered': _ids(g for g in fresh if not g.infra_error and used.isdisjoint(map(id, g.responses))),
        }
        strangers = [
            g.prompt.id for g in trained if all(drawn_for.get(id(r)) != g.prompt.id for r in g.responses)
        ]
        _need(not strangers, step, 'X1 has prompts that were not drawn', strangers)
        drawn = _ids(fresh)
        outcomes, wanted = Counter(row['trained'] + row['infra_error'] + row['filtered']), Counter(drawn)
        _need(
            outcomes == wanted,
            step,
            'prompts without exactly one outcome',
            (outcomes - wanted) + (wanted - outcomes),
        )
        _need(len(set(drawn)) == len(drawn), step, 'prompts drawn twice', drawn)
        if self._rows:
            _need(
                self._rows[-1]['step'] == step - 1,
                step,
                f'the previous row is not of step {step - 1}',
                [self._rows[-1]['step']],
            )
        epoch = self._drawn_in_epoch_of(step) & set(drawn)
        _need(not epoch, step, 'prompts already drawn in this epoch', epoch)
        # Pooled groups also hold older responses.
        asked = {r for g in reevaluated for r in map(id, g.responses)}
        strangers = [g.prompt.id for g in batch.of_origin(X2) if asked.isdisjoint(map(id, g.responses))]
        _need(not strangers, step, 'X2 has prompts that were not re-evaluated', strangers)
        if self._buffer:
            strangers = [g.prompt.id for g in batch.of_origin(X3) if (g.prompt.id, g.step) not in stored]
            _need(not strangers, step, 'X3 has groups that the buffer did not hold', strangers)
            live = {(prompt_id, entry.stored) for prompt_id, entry in self._buffer.high.items()}
            new = live - stored
            back = new & gone
            _need(not back, step, 'entries that returned after they were evicted', back)
            unknown = {entry for entry in new if entry[0] not in drawn or entry[1] != step}
            _need(not unknown, step, 'new entries of groups that were not drawn', unknown)
            row |= {'stored': sorted(new), 'evicted': sorted(stored - live)}
        self._rows.append(row)
        with self._path.open('a', encoding='utf-8') as f:
            f.write(json.dumps(row) + '\n')

    def _drawn_in_epoch_of(self, step: int) -> set[int]:
        if not self._steps_an_epoch:
            return set()
        rows = (
            row
            for row in self._rows
            if (row['step'] - 1) // self._steps_an_epoch == (step - 1) // self._steps_an_epoch
        )
        return {i for row in rows for i in row['trained'] + row['infra_error'] + row['filtered']}

    def _history(self) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """Returns the entries that the buffer must hold, and those that have left it."""
        came, gone = (
            {tuple(e) for row in self._rows for e in row.get(name, ())} for name in ('stored', 'evicted')
        )
        return came - gone, gone


def open_ledger(
    config: ConfigDict, directory: Path, step: int, prompts: int, replay: Replay
) -> Ledger | None:
    """Opens the ledger of a run after `step`, with `prompts` training prompts; None if it is disabled."""
    if not config.log.ledger:
        return None
    r = config.rollout
    each_once = config.prompts.selector == 'shuffled' and r.refill_batches == 1 and r.step_share == 1
    steps_an_epoch = prompts // fresh_prompts(config) if each_once else 0
    return Ledger(directory, step, steps_an_epoch, replay.buffer)


def _ids(groups: Iterable[Group]) -> list[int]:
    return [int(g.prompt.id) for g in groups]


def _need(condition: bool, step: int, what: str, which: Any) -> None:
    if not condition:
        raise Unbalanced(f'step {step}: {what}: {sorted(which)[:20]}')
