"""Sends rows of metrics.jsonl to trackio or Weights & Biases from a process that training never waits for.

    python -m bapo_jax.run.log.sinks wandb RUN_DIRECTORY < /dev/null    # after a run: sends missing rows

The process follows metrics.jsonl until its standard input closes, which happens however the run ends. It
sends the steps after the last one that the sink has. Each step is thus sent once and in order, even after a
resume or a period without the sink. If a run repeats steps from a checkpoint, the sink keeps those first
sent. W&B offline cannot report what it has, so each start writes the whole run to a directory: sync only the
newest.

Numbers are sent under their names, and the elements of a list as NAME/0, NAME/1, … Missing values (null) are
omitted. The config is sent once, at the start. The packages' output is in the run directory's sinks/NAME.log.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bapo_jax.machine import events
from bapo_jax.machine.files import write_text
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE

SERVER_START_S = 60.0  # timeout for W&B's server to answer, and for the previous run's process to end
FINISH_S = 60.0  # timeout at the end of a run for sending the last rows
_LOOK_S = 0.5  # seconds between polls of metrics.jsonl
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])

LoggedRow = tuple[int, dict[str, float]]  # a step and its numbers


def check_sinks(names: Sequence[str], directory: Path | None = None) -> None:
    """Raises ValueError if a sink's package is not installed, or `directory`/sinks/run.json is damaged."""
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as e:
            raise ValueError(
                f'log.sinks has {name!r}, which is not installed; run `pip install {name}`, or leave it out'
            ) from e
    if names and directory and (directory / 'sinks' / 'run.json').exists():
        names_of(directory)


def names_of(directory: Path) -> dict[str, str]:
    """Returns the run's project, name and id for the sinks, which stay the same if the directory moves.

    The project is the name of the parent directory, the name that of the run directory, and the id is random.
    Raises ValueError if sinks/run.json is damaged.
    """
    path = directory / 'sinks' / 'run.json'
    if not path.exists():
        *_, project, name = ('', '', *directory.resolve().parts)
        made = {'project': _plain(project), 'name': _plain(name), 'id': secrets.token_hex(4)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(made) + '\n')
    try:
        kept = json.loads(path.read_text('utf-8'))
        if not all(isinstance(kept[key], str) and kept[key] for key in ('project', 'name', 'id')):
            raise ValueError('it lacks project, name or id')
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ValueError(
            f'{path} is damaged ({str(e)[:200]}); restore it, or remove it to start a new run in the sinks'
        ) from e
    return kept


def start_sinks(names: Sequence[str], directory: Path) -> dict[str, subprocess.Popen]:
    """Starts a process per sink.

    The directory must hold config.json, and metrics.jsonl without discarded rows.
    """
    if not names:
        return {}
    names_of(directory)
    path = os.pathsep.join(filter(None, (_PACKAGE_PARENT, os.environ.get('PYTHONPATH'))))
    # Third-party packages must not see the rollout servers' token.
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE} | {
        'PYTHONPATH': path
    }
    running = {}
    for name in names:
        with (directory / 'sinks' / f'{name}.log').open('ab') as log:
            running[name] = subprocess.Popen(
                [sys.executable, '-m', 'bapo_jax.run.log.sinks', name, str(directory)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment,
                start_new_session=True,  # only the trainer handles Ctrl-C
            )  # fmt: skip
    return running


def drop_lost(running: dict[str, subprocess.Popen], directory: Path) -> None:
    """Reports each sink whose process has exited, and removes it from `running`."""
    for name, process in tuple(running.items()):
        if process.poll() is not None:
            _report_lost(
                name,
                f'its process ended with status {process.returncode}: {_last_line(name, directory)}',
                directory,
            )
            del running[name]


def finish_sinks(running: dict[str, subprocess.Popen], directory: Path) -> None:
    """Waits up to FINISH_S until the last rows are sent. Reports each sink that has not accepted them."""
    until = time.monotonic() + FINISH_S
    for process in running.values():
        process.stdin.close()
    for name, process in running.items():
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # includes W&B's own process
            process.wait(FINISH_S)
            _report_lost(name, f'it had not accepted the last rows after {FINISH_S:.0f} s', directory)
        else:
            if process.returncode:
                reason = f'its process ended with status {process.returncode}: {_last_line(name, directory)}'
                _report_lost(name, reason, directory)
    running.clear()


def send_to_wandb(
    names: dict[str, str], config: dict[str, Any], directory: Path, rows: Iterator[LoggedRow]
) -> None:
    """Sends rows to W&B. Its environment variables apply: WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY and others.

    Raises W&B's exception if it does not accept the rows.
    """
    import wandb

    run = wandb.init(
        project=os.environ.get('WANDB_PROJECT') or names['project'], name=names['name'], id=names['id'],
        resume='allow', config=config, dir=directory / 'sinks',
        settings=wandb.Settings(
            console='off', quiet=True, init_timeout=SERVER_START_S,
            finish_timeout=FINISH_S / 2, finish_timeout_raises=True,
            x_stats_pid=os.getppid(),  # monitor the trainer's CPU and memory, not this process's
        ),
    )  # fmt: skip
    behind = run.step  # W&B ignores earlier steps with a warning
    for step, numbers in rows:
        if step >= behind:
            run.log(numbers, step=step, commit=True)  # otherwise W&B holds the step until the next one
    run.finish()


def send_to_trackio(
    names: dict[str, str], config: dict[str, Any], directory: Path, rows: Iterator[LoggedRow]
) -> None:
    """Sends rows to trackio. Its environment variables apply: TRACKIO_DIR, TRACKIO_SPACE_ID and others.

    Raises RuntimeError or trackio's exception if it does not accept the rows.
    """
    import trackio

    with warnings.catch_warnings(record=True) as told:  # trackio only warns about what it could not store
        warnings.simplefilter('always', UserWarning)
        # trackio identifies a run by its name, which directories on several machines may share.
        run = trackio.init(
            names['project'],
            name=f'{names["name"]}-{names["id"]}',
            resume='allow',
            config=config,
            embed=False,
        )
        behind = run._next_step  # the only attribute that works for both a local store and a server
        for step, numbers in rows:
            if step >= behind:
                run.log(numbers, step=step)
            _raise_first(told)
        run.finish()
        _raise_first(told)


SENDERS: dict[str, Callable] = {'trackio': send_to_trackio, 'wandb': send_to_wandb}


def rows_as_they_come(path: Path, ended: Callable[[float], bool]) -> Iterator[LoggedRow]:
    """Yields each row of metrics.jsonl once it is complete.

    `ended(seconds)` waits up to `seconds` and returns whether no more rows will come.
    """
    line = b''
    with path.open('rb') as file:
        last_look = False
        while True:
            line += file.readline()
            if line.endswith(b'\n'):
                row, line = json.loads(line), b''
                yield row.pop('step'), numbers_in_row(row)
            elif last_look:
                return
            else:
                last_look = ended(_LOOK_S)


def numbers_in_row(row: dict[str, Any]) -> dict[str, float]:
    """{'a': 1, 'b': [2, 3], 'c': None} -> {'a': 1, 'b/0': 2, 'b/1': 3}."""
    flat = {}
    for name, value in row.items():
        flat |= {f'{name}/{i}': x for i, x in enumerate(value)} if isinstance(value, list) else {name: value}
    return {name: x for name, x in flat.items() if isinstance(x, (int, float))}


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m bapo_jax.run.log.sinks')
    parser.add_argument('sink', choices=SENDERS)
    parser.add_argument('run_directory', type=Path)
    said = parser.parse_args()
    name, directory = said.sink, said.run_directory
    config, names = json.loads((directory / 'config.json').read_text('utf-8')), names_of(directory)
    config.pop('starts', None)  # each start adds one, and a sink keeps the config of the first
    with (directory / 'sinks' / f'{name}.lock').open('wb') as lock:
        try:
            _wait_for(lock)
            SENDERS[name](
                names, config, directory, rows_as_they_come(directory / 'metrics.jsonl', _input_closed)
            )
        except Exception:
            sys.stdout.flush()
            traceback.print_exc()
            os._exit(1)  # the packages' exit handlers may hang, and would print after the last line


def _wait_for(lock: Any) -> None:
    """Acquires the lock, which the previous run's process holds while it sends its last rows.

    Raises TimeoutError after SERVER_START_S.
    """
    until = time.monotonic() + SERVER_START_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(
                    f'another process still sends this run after {SERVER_START_S:.0f} s; stop it'
                ) from None
            time.sleep(_LOOK_S)


def _input_closed(seconds: float) -> bool:
    """Whether standard input is closed. Nothing is written to it, so it becomes readable only then."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _raise_first(told: list[warnings.WarningMessage]) -> None:
    for warning in told:
        if issubclass(warning.category, UserWarning) and Path(warning.filename).parent.name == 'trackio':
            raise RuntimeError(str(warning.message))


def _report_lost(name: str, reason: str, directory: Path) -> None:
    message = (
        f'{name} is left out from here on: {reason}. metrics.jsonl has every row; those that {name} lacks '
        f'are sent when the run continues. See {directory / "sinks" / name}.log'
    )
    events.report('sink lost', message, sink=name)


def _last_line(name: str, directory: Path) -> str:
    """The last line of a process's log, which holds an exception's type and message."""
    lines = (directory / 'sinks' / f'{name}.log').read_text('utf-8', errors='replace').strip().splitlines()
    return lines[-1][:300].rstrip('.') if lines else 'its log is empty'


def _plain(name: str) -> str:
    """Makes a name valid for both packages."""
    return re.sub(r'[^\w.-]+', '-', name)[:100].strip('-') or 'bapo_jax'


if __name__ == '__main__':
    main()
