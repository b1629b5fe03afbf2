"""Verdicts for rows on stdin.

    python -m bapo_jax.grade countdown < rows.jsonl > verdicts.jsonl

A row is {"response": str, "ground_truth": {...}} and gets one line {"verdict": "correct", "reward": 1.0, "answer": str or null}.
A malformed row stops the program with exit code 2; the rows before it have been answered. A summary goes to stderr.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import sys
from collections.abc import Callable

from bapo_jax.groups import Verdict, reward
from bapo_jax.tasks import TASKS, get_task


def grade_line(line: bytes, verify: Callable) -> tuple[Verdict, str | None]:
    """The verdict on one row of input and the answer found. ValueError says which field is wrong and what was expected."""
    try:
        row = json.loads(line.decode('utf-8'))
    except UnicodeDecodeError:
        raise ValueError('expected UTF-8 text') from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f'expected a JSON object on one line ({error})') from None
    if not isinstance(row, dict):
        raise ValueError(f'expected an object with "response" and "ground_truth", got {type(row).__name__}')
    for field in ('response', 'ground_truth'):
        if field not in row:
            raise ValueError(f'"{field}" is missing; expected an object with "response" and "ground_truth"')
    if not isinstance(row['response'], str):
        raise ValueError(f'"response" must be a string, got {type(row["response"]).__name__}')
    return verify(row['response'], row['ground_truth'])


def main() -> int:
    parser = argparse.ArgumentParser(prog='python -m bapo_jax.grade', description='Verdicts for rows on stdin, one JSON a line.')
    parser.add_argument('task', choices=TASKS)
    verify = get_task(parser.parse_args().task).verify
    counts: collections.Counter[Verdict] = collections.Counter()
    status = 0
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            verdict, answer = grade_line(line, verify)
        except ValueError as error:
            print(f'line {number}: {error}', file=sys.stderr)
            status = 2
            break
        counts[verdict] += 1
        score = reward(verdict)
        # JSON has no nan: a row whose verifier failed has no reward
        print(json.dumps({'verdict': verdict.name.lower(), 'reward': None if math.isnan(score) else score, 'answer': answer}))
    sys.stdout.flush()
    tally = ', '.join(f'{counts[v]} {v.name.lower()}' for v in Verdict)
    print(f'graded {counts.total()} rows: {tally}', file=sys.stderr)
    return status


if __name__ == '__main__':
    sys.exit(main())
