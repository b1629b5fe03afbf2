r"""Mutation tests of mathematics' verifier: every accepted answer of the five benchmarks, changed and only
written differently.

    python -m benchmarks.host.mutate_golds BENCHMARKS [--each=N]

BENCHMARKS is a directory with the test sets. With --each only N answers of each set are tried. Prints for
each kind of change how many verdicts are as they must be, and then the others. Ends with status 1 where there
are others.

A changed answer must not be CORRECT: a digit is another, a sign is flipped, or a term of a sum or a member of
a list is dropped. A restyled one must be: other fractions and brackets, blanks, dollars, a full stop; members
of a list without order are reversed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from random import Random
from typing import NamedTuple

from rich.table import Table

from bapo_jax.groups import Verdict
from bapo_jax.machine import terminal
from bapo_jax.tasks.mathematics import task as mathematics
from bapo_jax.tasks.mathematics.text import split

CHANGED, RESTYLED = ('digit', 'sign', 'term'), ('fractions', 'brackets', 'blanks', 'marks', 'order')


class Mutant(NamedTuple):
    kind: str
    text: str
    accepted: list[str]


def mutants(accepted: list[str], random: Random) -> list[Mutant]:
    """One mutant of each kind that the first accepted answer allows."""
    gold = re.sub(r'(?<!\\)\$', '', accepted[0])
    made = {
        'digit': _other_digit(gold, random), 'sign': _flipped(gold, random), 'term': _dropped(gold),
        'fractions': gold.replace('\\frac', '\\dfrac'), 'brackets': _sized(gold), 'blanks': _spaced(gold),
        'marks': random.choice(['${}$', '\\({}\\)', '{}.', '\\displaystyle {}', '{{{}}}', '$${}$$']).format(gold),
        'order': _reversed(gold),
    }  # fmt: skip
    return [
        Mutant(kind, text, accepted) for kind, text in made.items() if text and text not in (gold, *accepted)
    ]


def _other_digit(gold: str, random: Random) -> str | None:
    """One digit is another one: not in a base's or a name's index, nor a leading zero."""
    places = [m.start() for m in re.finditer(r'(?<![_\d])(?<!_\{)\d', gold)]
    if not places:
        return None
    at = random.choice(places)
    return (
        gold[:at]
        + str((int(gold[at]) + random.randint(1, 8)) % 10 or 9 - int(gold[at]) or 5)
        + gold[at + 1 :]
    )


def _flipped(gold: str, random: Random) -> str | None:
    """One sign is the other one. A number without a sign gets one, but for 0."""
    signs = [m.start() for m in re.finditer(r'(?<=[\w)} ])[+-](?= ?[\w\\(])', gold)]
    if signs:
        at = random.choice(signs)
        return gold[:at] + ('-' if gold[at] == '+' else '+') + gold[at + 1 :]
    return f'-{gold}' if re.match(r'[1-9]|\\frac|\\sqrt', gold) and ',' not in gold else None


def _dropped(gold: str) -> str | None:
    """The last member of a list, or the last term of a sum, is missing."""
    members = split(gold, ',')
    if len(members) > 1 and not re.search('[a-z]{3}', gold):
        return ','.join(members[:-1])
    sum_ = re.fullmatch(r'(.*[\w)}]) ?[+-] ?[^+()\[\]{},=-]*[\w}]', gold)
    return sum_[1] if sum_ and _balanced(sum_[1]) else None


def _balanced(text: str) -> bool:
    return all(text.count(a) == text.count(b) for a, b in ('()', '[]', '{}'))


def _sized(gold: str) -> str:
    return re.sub(
        r'(?<!\\left)(?<!\\right)(?<!\\)([()\[\]])',
        lambda m: ('\\left' if m[1] in '([' else '\\right') + m[1],
        gold,
    )


def _spaced(gold: str) -> str:
    return (
        re.sub(r'(?<=[\w)}])([+=]|(?<!\^)-)(?=[\w\\(])', r' \1\\, ', gold) if '\\text' not in gold else gold
    )


def _reversed(gold: str) -> str | None:
    members = split(gold, ',')
    labels = {m.partition('=')[0].strip() for m in members if '=' in m}
    unordered = len(members) > 1 and len(labels) < 2 and _balanced(members[0]) and '\\!' not in gold
    return ', '.join(reversed(members)) if unordered else None


def try_all(problems: list[dict], seed: int) -> list[tuple[Mutant, Verdict]]:
    """Every mutant of the problems' accepted answers with its verdict."""
    random = Random(seed)
    made = [mutant for problem in problems for mutant in mutants(problem['answers'], random)]
    verdicts = mathematics.verify_all(
        [f'\\boxed{{{m.text}}}' for m in made], [{'answers': m.accepted, 'boxed': True} for m in made]
    )
    return [(mutant, verdict) for mutant, (verdict, _) in zip(made, verdicts, strict=True)]


def as_it_must(mutant: Mutant, verdict: Verdict) -> bool:
    return (verdict == Verdict.CORRECT) == (mutant.kind in RESTYLED)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.host.mutate_golds', description='Mutation tests of the verifier.'
    )
    parser.add_argument('benchmarks', help='directory with the test sets')
    parser.add_argument('--each', type=int, default=0, help='answers of each set; 0 for all')
    parser.add_argument('--seed', type=int, default=0)
    arguments = parser.parse_args()
    os.environ['BAPO_DATA'] = arguments.benchmarks
    table, others = Table('set', 'answers', *CHANGED, *RESTYLED), []
    for name in mathematics.BENCHMARKS:
        problems = mathematics.benchmark(name)
        problems = Random(arguments.seed).sample(
            problems, min(arguments.each or len(problems), len(problems))
        )
        tried = try_all(problems, arguments.seed)
        others += [(name, mutant, verdict) for mutant, verdict in tried if not as_it_must(mutant, verdict)]
        counts = []
        for kind in CHANGED + RESTYLED:
            rows = [as_it_must(mutant, verdict) for mutant, verdict in tried if mutant.kind == kind]
            counts.append(f'{sum(rows)}/{len(rows)}')
        table.add_row(name, str(len(problems)), *counts)
    console = terminal.console()
    console.print(table)
    for name, mutant, verdict in others:
        print(f'{name} {mutant.kind} {verdict.name}: {mutant.text!r} for {mutant.accepted!r}')
    return 1 if others else 0


if __name__ == '__main__':
    sys.exit(main())
