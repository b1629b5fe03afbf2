"""Judges responses from standard input with a task's verifier.

    python -m bapo_jax.grade countdown < rows.jsonl > verdicts.jsonl

Each row {"response": str, "ground_truth": ...} gives one line {"verdict": "correct", "reward": 1.0, "answer":
str or null}, in the same order. The task's module defines the ground truth: an object for countdown; for math
and geometry an answer, a list of accepted answers, or an object that also says what the prompt demands. A
malformed row ends the program with exit code 2 after the rows before it are judged. A summary goes to stderr.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import sys
from collections.abc import Callable
from typing import Any

from bapo_jax.groups import Verdict, binary_rewards
from bapo_jax.machine import terminal
from bapo_jax.machine.help import CommandParser
from bapo_jax.machine.output import ends_with_its_reader, guard_streams
from bapo_jax.tasks import TASKS, get_task
from bapo_jax.tasks.verifier_pool import WorkersFailed

ROWS_AT_ONCE = 512  # enough to keep the task's workers busy, but the first verdicts come soon


def parse_row(line: bytes, check_ground_truth: Callable) -> tuple[str, Any]:
    """The response and the ground truth of one row.

    Raises ValueError, naming the field and what was expected, if the row is malformed.
    """
    try:
        row = json.loads(line.decode('utf-8'))
    except UnicodeDecodeError:
        raise ValueError('not UTF-8 text; save the file as UTF-8') from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f'expected a JSON object on one line ({error})') from None
    if not isinstance(row, dict):
        raise ValueError(f'expected an object with "response" and "ground_truth", got {type(row).__name__}')
    for field in ('response', 'ground_truth'):
        if field not in row:
            raise ValueError(f'"{field}" is missing; expected an object with "response" and "ground_truth"')
    if not isinstance(row['response'], str):
        raise ValueError(f'"response" must be a string, got {type(row["response"]).__name__}')
    check_ground_truth(row['ground_truth'])
    return row['response'], row['ground_truth']


def main() -> int:
    parser = CommandParser(__doc__)
    parser.add_argument(
        'task', metavar='TASK', help=f'{", ".join(TASKS)}, or your own module, such as my_tasks.chess'
    )
    try:
        task = get_task(parser.parse_args().task)
    except ValueError as error:
        parser.error(str(error))
    counts: collections.Counter[Verdict] = collections.Counter()
    lines = enumerate(sys.stdin.buffer, start=1)
    trouble = None
    while trouble is None and (some := list(itertools.islice(lines, ROWS_AT_ONCE))):
        rows = []
        for number, line in some:
            try:
                rows.append(parse_row(line, task.check_ground_truth))
            except ValueError as error:
                trouble = f'line {number}: {error}'
                break
        try:
            judged = task.verify_all(
                [response for response, _ in rows], [truth for _, truth in rows], math.inf
            )
        except WorkersFailed as error:
            sys.exit(f'error: {error}')
        for verdict, answer in judged:
            counts[verdict] += 1
            score = float(binary_rewards([verdict])[0])
            # JSON has no nan: if the verifier failed, the reward is null.
            print(
                json.dumps(
                    {
                        'verdict': verdict.name.lower(),
                        'reward': None if math.isnan(score) else score,
                        'answer': answer,
                    }
                )
            )
        print(end='', flush=True)
    if trouble:
        print(trouble, file=sys.stderr)
    tally = ', '.join(f'{counts[v]} {v.name.lower()}' for v in Verdict)
    print(f'graded {counts.total()} rows: {tally}', file=sys.stderr)
    return 2 if trouble else 0


def run() -> None:
    """The command: runs `main` on guarded streams."""
    guard_streams('stderr')  # the summary
    with ends_with_its_reader():
        terminal.guard()
        sys.exit(main())


if __name__ == '__main__':
    run()
