"""Scores as people see them."""

import pytest

from bapo_jax.groups import Verdict
from bapo_jax.run.tables import percent, print_scores, print_table
from bapo_jax.scores import Question, summary

RIGHT, WRONG, NONE = Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSEABLE


@pytest.fixture
def summaries():
    def question(*verdicts):
        return Question(verdicts, tuple('7' if v == RIGHT else None for v in verdicts), (10, 20), (False, True))

    base, trained = ((RIGHT, WRONG), (NONE, WRONG)), ((RIGHT, RIGHT), (RIGHT, WRONG))
    return {
        name: summary([question(*v) for v in verdicts], votes=True) for name, verdicts in (('base', base), ('trained', trained))
    }


def test_policies_stand_side_by_side_in_percent(summaries, capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '200')
    print_table('a run, %', {name: {'cd3': s} for name, s in summaries.items()})
    out = capsys.readouterr().out
    [row] = [line for line in out.splitlines() if 'mean@2, 2 problems' in line]
    assert 'cd3' in row and row.index('25.0') < row.index('75.0')
    assert out.index('base') < out.index('trained') and 'pass@2' in out and 'maj@2' in out


def test_every_measure_of_one_policy(summaries, capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '200')
    print_scores('scores', {'data/cd3.jsonl': summaries['base']})
    lines = {line.split('│')[1].strip(): line.split('│')[2].strip() for line in capsys.readouterr().out.splitlines() if '│' in line}
    assert lines['problems'] == '2' and lines['mean@2'] == '25.0'
    assert (lines['cut at the limit'], lines['mean tokens'], lines['without an answer']) == ('50.0', '15', '25.0')
    assert 'not judged' not in lines


def test_a_share_that_is_not_known_is_a_question_mark():
    assert [percent(x) for x in (0.5, 0.0, None)] == ['50.0', '0.0', '?']
