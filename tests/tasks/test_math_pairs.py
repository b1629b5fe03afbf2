"""Pairs of an answer and an accepted one, right and wrong in equal parts, kind by kind: `math_pairs.tsv`.

They were written down before any of them was judged. Those of the kind 'without a box' are whole responses.
What is 'undecided' says why graders may differ on it.
"""

import csv
from pathlib import Path

import pytest

from bapo_jax.groups import Verdict
from bapo_jax.tasks.mathematics.answers import quick_verdict
from bapo_jax.tasks.mathematics.text import last_box
from bapo_jax.tasks.mathematics.worker import slow_verdict

with open(Path(__file__).with_name('math_pairs.tsv'), encoding='utf-8', newline='') as file:
    PAIRS = list(csv.DictReader(file, delimiter='\t', quoting=csv.QUOTE_NONE))
KINDS = sorted({pair['kind'] for pair in PAIRS})
VERDICTS = {'right': {Verdict.CORRECT}, 'wrong': {Verdict.WRONG, Verdict.UNPARSEABLE}}


def judge(answer: str, gold: str, *, boxed: bool = True) -> Verdict:
    """As the task judges an answer in a box, or a response without one, but in this process and without a deadline."""
    if not boxed:
        stated = last_box(answer, stated=True)
        return slow_verdict(answer, [gold], boxed=False)[0] if stated is None else judge(stated, gold)
    verdict = quick_verdict(answer, [gold])
    return slow_verdict(answer, [gold], boxed=True)[0] if verdict is None else verdict


@pytest.mark.parametrize('kind', KINDS)
def test_every_pair_that_is_decided_is_judged_so(kind):
    boxed = kind != 'without a box'
    judged = [(p, judge(p['answer'], p['accepted answer'], boxed=boxed)) for p in PAIRS if p['kind'] == kind]
    assert [(p, v) for p, v in judged if p['expected'] in VERDICTS and v not in VERDICTS[p['expected']]] == []


def test_few_pairs_are_undecided_and_as_many_are_right_as_wrong():
    expected = [pair['expected'] for pair in PAIRS]
    undecided = [e for e in expected if e not in VERDICTS]
    assert all(e.startswith('undecided: ') for e in undecided) and len(undecided) <= len(PAIRS) // 50
    assert 0.9 < expected.count('right') / expected.count('wrong') < 1.1
