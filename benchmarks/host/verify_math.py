"""What verifying mathematics costs: seconds for one answer, and for a batch as a training step has it.

    python -m benchmarks.host.verify_math CASES [BENCHMARKS]

CASES is a file of grading cases (.jsonl.gz), a line each: {"gold", "pred", "form": "answer" or "response",
"convention", "expected"}. Prints how many verdicts are as expected, and the spread of times of single
answers, workers running.

BENCHMARKS is a directory with the test sets. With it, also verifies 2,048 boxed answers to questions of all
sets, as 256 groups of 8. Half of each group is right, and half of those are spelled with blanks and display
fractions. A quarter is another question's answer, a quarter an expression of its own. Two answers never end.
"""

import gzip
import json
import os
import sys
import time

import numpy as np
from rich.table import Table

from bapo_jax.groups import Verdict
from bapo_jax.machine import terminal
from bapo_jax.tasks.mathematics import task as mathematics


def single_answers(path: str) -> Table:
    with gzip.open(path, 'rt', encoding='utf-8') as file:
        cases = [json.loads(line) for line in file]
    responses = [c['pred'] if c['form'] == 'response' else f'\\boxed{{{c["pred"]}}}' for c in cases]
    mathematics.verify(r'\boxed{x^2}', 'x+1')  # starts a worker
    seconds, right = [], []
    for case, response in zip(cases, responses, strict=True):
        started = time.perf_counter()
        verdict, _ = mathematics.verify(response, case['gold'])
        seconds.append(time.perf_counter() - started)
        right.append((verdict == Verdict.CORRECT) == case['expected'])
    plain = np.array(['adversarial' not in c['categories'] for c in cases])
    agreed = np.array([c['convention'] is None for c in cases])
    seconds, right = np.array(seconds), np.array(right)
    table = Table('cases', 'number', 'as expected', 'p50 s', 'p99 s', 'max s')
    for name, rows in (
        ('all', agreed | True),
        ('no convention', agreed),
        ('honest', plain),
        ('hostile', ~plain),
    ):
        p50, p99 = np.quantile(seconds[rows], (0.5, 0.99))
        share = f'{right[rows].sum()} ({right[rows].mean():.2%})'
        table.add_row(name, str(rows.sum()), share, f'{p50:.4f}', f'{p99:.3f}', f'{seconds[rows].max():.2f}')
    return table


def batch() -> Table:
    problems = [p for name in mathematics.BENCHMARKS for p in mathematics.benchmark(name)]
    rng = np.random.default_rng(0)
    responses, truths = [], []
    for i in rng.choice(len(problems), 256, replace=False):
        answer = problems[i]['answers'][0].strip('$')
        other = problems[rng.integers(len(problems))]['answers'][0].strip('$')
        spelled = answer.replace('\\frac', '\\dfrac').replace('+', ' + ').replace('{', '{ ')
        own = [
            f'{rng.integers(2, 99)}\\sqrt{{{rng.integers(2, 99)}}}',
            f'\\frac{{n+{rng.integers(2, 99)}}}{{2}}',
        ]
        responses += [
            f'So it is \\boxed{{{a}}}.' for a in (answer, answer, spelled, spelled, other, other, *own)
        ]
        truths += [problems[i]] * 8
    responses[100], responses[1000] = r'\boxed{2^{3^{100000000}}-1}', r'\boxed{(((99999!)!)-1)!}'
    table = Table('answers', 'cores', 'workers', 'seconds', 'correct', 'wrong', 'unparseable', 'infra error')
    for name in ('2,048, workers to start', '2,048 again'):
        started = time.perf_counter()
        verdicts = [v for v, _ in mathematics.verify_all(responses, truths)]
        spent = time.perf_counter() - started
        cores = len(os.sched_getaffinity(0))
        table.add_row(
            name,
            str(cores),
            str(min(cores, mathematics.MAX_WORKERS)),
            f'{spent:.1f}',
            *(str(verdicts.count(v)) for v in Verdict),
        )
    return table


if __name__ == '__main__':
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if len(sys.argv) > 2:
        os.environ['BAPO_DATA'] = sys.argv[2]
        terminal.console().print(batch())
    terminal.console().print(single_answers(sys.argv[1]))
