"""Judges responses from standard input with a task's verifier, or with your reward function.

    python -m bapo_jax.grade countdown < rows.jsonl > verdicts.jsonl
    python -m bapo_jax.grade --reward=my_rewards:exact < rows.jsonl > verdicts.jsonl

Each row {"response": str, "ground_truth": ...} gives one line {"verdict": "correct", "reward": 1.0, "answer":
str or null}, in the same order. The task's module defines the ground truth: an object for countdown; for math
and geometry an answer, a list of accepted answers, or an object that also says what the prompt demands. A
malformed row ends the program with exit code 2 after the rows before it are judged. A summary goes to stderr.

A reward function (task.reward of a run, tasks/custom_reward.py) gets the row's ground truth as it is. It also
gets the row's "data_source", and its "extra" or "extra_info" (verl's name), if the row has them, else '' and
{}: no policy wrote the response.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from bapo_jax.config import section_defaults
from bapo_jax.groups import Verdict, binary_rewards
from bapo_jax.machine import terminal
from bapo_jax.machine.help import CommandParser
from bapo_jax.machine.output import ends_with_its_reader, guard_streams
from bapo_jax.tasks import TASKS, get_task
from bapo_jax.tasks.custom_reward import BadReward, Outcome, rewards_of
from bapo_jax.tasks.jsonl import flaw
from bapo_jax.tasks.verifier_pool import WorkersFailed

ROWS_AT_ONCE = 512  # enough to keep the task's workers busy, but the first verdicts come soon

# Columns that a reward function gets beside the response and the ground truth. null is as if absent.
_COLUMNS = (('data_source', str, 'a string'), ('extra', dict, 'an object'), ('extra_info', dict, 'an object'))

GradedRow = dict[str, Any]  # 'response', 'ground_truth' and what else a line has
Judge = Callable[[Sequence[GradedRow]], list[Outcome]]


def parse_row(line: bytes, check: Callable[[GradedRow], None]) -> GradedRow:
    """The row of a line. `check` raises ValueError for what the task or the reward function cannot read.

    Raises ValueError, naming the field and what was expected, if the row is malformed.
    """
    try:
        row = json.loads(line.decode('utf-8').rstrip())
    except UnicodeDecodeError:
        raise ValueError('not UTF-8 text; save the file as UTF-8') from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f'expected a JSON object on one line ({flaw(error)})') from None
    if not isinstance(row, dict):
        raise ValueError(f'expected an object with "response" and "ground_truth", got {type(row).__name__}')
    for field in ('response', 'ground_truth'):
        if field not in row:
            raise ValueError(f'"{field}" is missing; expected an object with "response" and "ground_truth"')
    if not isinstance(row['response'], str):
        raise ValueError(f'"response" must be a string, got {type(row["response"]).__name__}')
    check(row)
    return row


def check_columns(row: GradedRow) -> None:
    """Raises ValueError, naming the column, if one that a reward function gets has another type."""
    for name, kind, words in _COLUMNS:
        if not isinstance(value := row.get(name), (kind, type(None))):
            raise ValueError(f'"{name}" must be {words}, got {type(value).__name__}; correct or remove it')


def task_judge(task: ModuleType) -> Judge:
    """Judges by a task's verifier; the reward of a correct response is 1."""

    def judge(rows: Sequence[GradedRow]) -> list[Outcome]:
        judged = task.verify_all(
            [row['response'] for row in rows], [row['ground_truth'] for row in rows], math.inf
        )
        return [(verdict, float(binary_rewards([verdict])[0]), answer) for verdict, answer in judged]

    return judge


def reward_judge(name: str) -> Judge:
    """Judges by the user's reward function 'module:function', in processes as in a run.

    Raises ValueError if the function is missing or takes other arguments.
    """
    config = section_defaults('task')
    config.reward = name
    rewards = rewards_of(config)

    def judge(rows: Sequence[GradedRow]) -> list[Outcome]:
        return rewards(
            [
                (
                    row.get('data_source') or '',
                    row['response'],
                    row['ground_truth'],
                    {**(row.get('extra') or {}), **(row.get('extra_info') or {})},
                )
                for row in rows
            ],
            math.inf,
        )

    return judge


def main() -> int:
    parser = CommandParser(__doc__)
    parser.add_argument(
        'task',
        nargs='?',
        metavar='TASK',
        help=f'{", ".join(TASKS)}, or your own module, such as my_tasks.chess',
    )
    parser.add_argument(
        '--reward', metavar='MODULE:FUNCTION', help='judge by your reward function in place of a task'
    )
    arguments = parser.parse_args()
    if bool(arguments.task) == bool(arguments.reward):
        parser.error('give either a task or --reward=MODULE:FUNCTION')
    try:
        if arguments.reward:
            check, judge = check_columns, reward_judge(arguments.reward)
        else:
            task = get_task(arguments.task)
            check, judge = lambda row: task.check_ground_truth(row['ground_truth']), task_judge(task)
    except ValueError as error:
        parser.error(str(error))
    counts: collections.Counter[Verdict] = collections.Counter()
    lines = enumerate(sys.stdin.buffer, start=1)
    trouble = None
    while trouble is None and (some := list(itertools.islice(lines, ROWS_AT_ONCE))):
        rows = []
        for number, line in some:
            try:
                rows.append(parse_row(line, check))
            except ValueError as error:
                trouble = f'line {number}: {error}'
                break
        try:
            judged = judge(rows)
        except (WorkersFailed, BadReward) as error:
            sys.exit(f'error: {error}')
        for verdict, reward, answer in judged:
            counts[verdict] += 1
            # JSON has no nan: if the verifier failed, the reward is null.
            print(
                json.dumps(
                    {
                        'verdict': verdict.name.lower(),
                        'reward': None if math.isnan(reward) else reward,
                        'answer': answer,
                    }
                )
            )
        print(end='', flush=True)
    if trouble:
        print(trouble, file=sys.stderr)
    tally = ', '.join(f'{counts[v]} {v.name.lower()}' for v in Verdict)
    print(f'graded {(n := counts.total())} row{"s" * (n != 1)}: {tally}', file=sys.stderr)
    return 2 if trouble else 0


def run() -> None:
    """The command: runs `main` on guarded streams."""
    guard_streams('stderr')  # the summary
    with ends_with_its_reader():
        terminal.guard()
        sys.exit(main())


if __name__ == '__main__':
    run()
