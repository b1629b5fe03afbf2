"""Sends the rows of metrics.jsonl to trackio or Weights & Biases, from a process of its own that training never waits for.

    python -m bapo_jax.run.sinks wandb RUN_DIRECTORY < /dev/null    # after a run: sends what W&B lacks of it

The process reads metrics.jsonl as it grows, until its standard input closes: at the end of the run, however that ends. It sends the
steps behind the last that the sink holds, so each step once and in order, also after a resume or a time without the sink. A step
that the sink holds stays as it was first sent, though the run went back to a checkpoint and made it again. W&B offline cannot be
asked what it holds: each start writes a directory with the whole run, so the newest alone is to be synced.

A row's numbers are sent under their names, and those of a list as NAME/0, NAME/1, … What is missing (null) is left out. The config
is sent once, at the start. What the packages print is in sinks/NAME.log of the run directory.
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

from bapo_jax import events
from bapo_jax.files import write_text
from bapo_jax.rollout.token_guard import TOKEN_VARIABLE

START_S = 60.0  # most seconds for W&B's server to answer, and for the process of the run before to end
FINISH_S = 60.0  # most seconds that the end of a run waits for the last rows to be sent
_LOOK_S = 0.5  # between looks at metrics.jsonl
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])

Row = tuple[int, dict[str, float]]  # a step and its numbers


def check_sinks(names: Sequence[str], directory: Path | None = None) -> None:
    """Raises ValueError where a sink's package is not installed, or a used run directory has a damaged sinks/run.json."""
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as e:
            raise ValueError(f'log.sinks has {name!r}, which is not installed; `pip install {name}`, or leave it out') from e
    if names and directory and (directory / 'sinks' / 'run.json').exists():
        names_of(directory)


def names_of(directory: Path) -> dict[str, str]:
    """The run's project, name and id among the sinks: of its directory and the one above, and random. They stay where it moves.

    Raises ValueError where sinks/run.json is damaged.
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
        raise ValueError(f'{path} is damaged ({str(e)[:200]}); restore it, or remove it: the sinks then begin a new run') from e
    return kept


def start_sinks(names: Sequence[str], directory: Path) -> dict[str, subprocess.Popen]:
    """Starts the process of each sink. The run directory holds config.json, and metrics.jsonl without the rows that are void."""
    if not names:
        return {}
    names_of(directory)
    path = os.pathsep.join(filter(None, (_PACKAGE_PARENT, os.environ.get('PYTHONPATH'))))
    # The token of the rollout servers is not for packages that send to others.
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE} | {'PYTHONPATH': path}
    running = {}
    for name in names:
        with (directory / 'sinks' / f'{name}.log').open('ab') as log:
            running[name] = subprocess.Popen(
                [sys.executable, '-m', 'bapo_jax.run.sinks', name, str(directory)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment,
                start_new_session=True,  # Ctrl-C is the trainer's to handle
            )  # fmt: skip
    return running


def drop_lost(running: dict[str, subprocess.Popen], directory: Path) -> None:
    """Reports each sink whose process has ended by itself, and takes it out of `running`."""
    for name, process in tuple(running.items()):
        if process.poll() is not None:
            _report_lost(name, f'its process ended with status {process.returncode}: {_last_line(name, directory)}', directory)
            del running[name]


def finish_sinks(running: dict[str, subprocess.Popen], directory: Path) -> None:
    """Waits until the last rows are sent, FINISH_S at most. Reports each sink that has not taken them."""
    until = time.monotonic() + FINISH_S
    for process in running.values():
        process.stdin.close()
    for name, process in running.items():
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # W&B's own process with it
            process.wait(FINISH_S)
            _report_lost(name, f'it had not taken the last rows after {FINISH_S:.0f} s', directory)
        else:
            if process.returncode:
                reason = f'its process ended with status {process.returncode}: {_last_line(name, directory)}'
                _report_lost(name, reason, directory)
    running.clear()


def send_to_wandb(names: dict[str, str], config: dict[str, Any], directory: Path, rows: Iterator[Row]) -> None:
    """WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY and the rest of W&B's environment count. Raises where W&B does not take the rows."""
    import wandb

    run = wandb.init(
        project=os.environ.get('WANDB_PROJECT') or names['project'], name=names['name'], id=names['id'], resume='allow',
        config=config, dir=directory / 'sinks',
        settings=wandb.Settings(
            console='off', quiet=True, init_timeout=START_S, finish_timeout=FINISH_S / 2, finish_timeout_raises=True,
            x_stats_pid=os.getppid(),  # the processor and memory that it shows are the trainer's
        ),
    )  # fmt: skip
    behind = run.step  # W&B ignores a step below it, with a warning
    for step, numbers in rows:
        if step >= behind:
            run.log(numbers, step=step, commit=True)  # or the step would wait for the next one
    run.finish()


def send_to_trackio(names: dict[str, str], config: dict[str, Any], directory: Path, rows: Iterator[Row]) -> None:
    """TRACKIO_DIR, TRACKIO_SPACE_ID and the rest of trackio's environment count. Raises where trackio does not take the rows."""
    import trackio

    with warnings.catch_warnings(record=True) as told:  # it says what it could not store in a warning, and goes on
        warnings.simplefilter('always', UserWarning)
        # trackio knows a run by its name, which directories of several machines may share.
        run = trackio.init(names['project'], name=f'{names["name"]}-{names["id"]}', resume='allow', config=config, embed=False)
        behind = run._next_step  # the one number that says it of a local store and of a server
        for step, numbers in rows:
            if step >= behind:
                run.log(numbers, step=step)
            _raise_first(told)
        run.finish()
        _raise_first(told)


SENDERS: dict[str, Callable] = {'trackio': send_to_trackio, 'wandb': send_to_wandb}


def rows_as_they_come(path: Path, ended: Callable[[float], bool]) -> Iterator[Row]:
    """Each row of metrics.jsonl once it is whole. `ended(seconds)` waits so long at most, and says whether no more will come."""
    line = b''
    with path.open('rb') as file:
        last_look = False
        while True:
            line += file.readline()
            if line.endswith(b'\n'):
                row, line = json.loads(line), b''
                yield row.pop('step'), numbers_of(row)
            elif last_look:
                return
            else:
                last_look = ended(_LOOK_S)


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """{'a': 1, 'b': [2, 3], 'c': None} -> {'a': 1, 'b/0': 2, 'b/1': 3}."""
    flat = {}
    for name, value in row.items():
        flat |= {f'{name}/{i}': x for i, x in enumerate(value)} if isinstance(value, list) else {name: value}
    return {name: x for name, x in flat.items() if isinstance(x, (int, float))}


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m bapo_jax.run.sinks')
    parser.add_argument('sink', choices=SENDERS)
    parser.add_argument('run_directory', type=Path)
    said = parser.parse_args()
    name, directory = said.sink, said.run_directory
    config, names = json.loads((directory / 'config.json').read_text('utf-8')), names_of(directory)
    with (directory / 'sinks' / f'{name}.lock').open('wb') as lock:
        try:
            _wait_for(lock)
            SENDERS[name](names, config, directory, rows_as_they_come(directory / 'metrics.jsonl', _input_closed))
        except Exception:
            sys.stdout.flush()
            traceback.print_exc()
            os._exit(1)  # what the packages do at exit may wait for ever, and would come behind the last line


def _wait_for(lock: Any) -> None:
    """Takes the lock, which the process of the run before holds while it sends its last rows."""
    until = time.monotonic() + START_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(f'another process still sends this run after {START_S:.0f} s; end it') from None
            time.sleep(_LOOK_S)


def _input_closed(seconds: float) -> bool:
    """Nobody writes to the input, so it is only ready to be read once it is closed."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _raise_first(told: list[warnings.WarningMessage]) -> None:
    for warning in told:
        if issubclass(warning.category, UserWarning) and Path(warning.filename).parent.name == 'trackio':
            raise RuntimeError(str(warning.message))


def _report_lost(name: str, reason: str, directory: Path) -> None:
    message = (
        f'{name} is left out from here on: {reason}. metrics.jsonl has every row, and what {name} lacks is sent when the run goes '
        f'on. See {directory / "sinks" / name}.log'
    )
    events.report('sink lost', message, sink=name)


def _last_line(name: str, directory: Path) -> str:
    """What a process said last, where an exception's kind and message stand."""
    lines = (directory / 'sinks' / f'{name}.log').read_text('utf-8', errors='replace').strip().splitlines()
    return lines[-1][:300].rstrip('.') if lines else 'it said nothing'


def _plain(name: str) -> str:
    """A name that both packages allow."""
    return re.sub(r'[^\w.-]+', '-', name)[:100].strip('-') or 'bapo_jax'


if __name__ == '__main__':
    main()
