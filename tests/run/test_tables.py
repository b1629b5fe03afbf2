"""Scores on the terminal: shares in percent, '?' for what is unknown, and a row only for what was measured."""

import json
import math
import re

import numpy as np
import pytest

from bapo_jax.groups import Verdict
from bapo_jax.run.log.tables import percent, print_scores, print_table, scores_in
from bapo_jax.scores import Question, summary

RIGHT, WRONG, NONE = Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSEABLE


def summary_of(*verdicts, votes=False):
    """The summary of one question."""
    n = len(verdicts)
    return summary([Question(verdicts, ('7',) * n, (10,) * n, (False,) * n)], votes)


@pytest.fixture
def printed(monkeypatch, capsys):
    """A function that calls `show` and gives the rows it prints, as cells."""
    monkeypatch.setenv('COLUMNS', '200')

    def rows(show, *args):
        show(*args)
        lines = [line.replace('┃', '│') for line in capsys.readouterr().out.splitlines()]
        cells = [[cell.strip() for cell in line.strip('│').split('│')] for line in lines if '│' in line]
        return {name: others for name, *others in cells}

    return rows


def test_a_share_is_printed_in_percent():
    assert [percent(share) for share in (0.0, 0.12345, 1.0, None)] == ['0.0', '12.3', '100.0', '?']


def test_policies_stand_side_by_side_with_their_benchmarks_measures(printed):
    half, none = summary_of(Verdict.CORRECT, Verdict.WRONG), summary_of(Verdict.WRONG, Verdict.WRONG)
    table = printed(print_table, 'a title', {'base': {'cd4': none}, 'trained': {'cd4': half}})
    assert table[''] == ['base', 'trained']
    assert [cell.partition(' ')[0] for cell in table['cd4  mean@2, 1 problems']] == ['0.0', '50.0']
    assert [cell.partition(' ')[0] for cell in table['cd4  pass@2, 1 problems']] == ['0.0', '100.0']
    assert not any('maj@' in name for name in table)


def test_the_end_table_prints_the_interval_beside_each_score(printed):
    """8 samples of few problems say little of pass@8: who reads the table sees how little."""
    rng = np.random.default_rng(0)
    right = rng.random((200, 8)) < rng.choice([0.0, 0.2, 0.9], 200)[:, None]
    verdicts = [tuple(RIGHT if r else WRONG for r in row) for row in right.tolist()]
    s = summary([Question(v, ('7',) * 8, (10,) * 8, (False,) * 8) for v in verdicts], votes=True)
    table = printed(print_table, 'a run, %', {'base': {'cd4': s}})
    for measure, values in (('mean', right.mean(axis=1)), ('pass', right.any(axis=1))):
        [cell] = table[f'cd4  {measure}@8, 200 problems']
        mean, low, high = re.fullmatch(r'([\d.]+) \(([\d.]+) to ([\d.]+)\)', cell).groups()
        half = 1.96 * 100 * np.std(values) / math.sqrt(200)
        assert float(mean) == round(100 * np.mean(values), 1)
        np.testing.assert_allclose([float(low), float(high)], 100 * np.mean(values) + np.array([-half, half]), atol=0.8)
    assert re.fullmatch(r'[\d.]+ \([\d.]+ to [\d.]+\)', table['cd4  maj@8, 200 problems'][0])


def test_a_summary_of_an_earlier_version_has_a_score_without_an_interval(printed):
    s = summary_of(RIGHT, WRONG)
    del s['pass_interval']
    assert printed(print_table, 'a title', {'base': {'cd4': s}})['cd4  pass@2, 1 problems'] == ['100.0']


def test_one_policy_has_a_row_for_every_measure_and_no_row_for_what_was_not_measured(printed):
    half = summary_of(Verdict.CORRECT, Verdict.WRONG)
    table = printed(print_scores, 'a title', {'data/cd4.jsonl': half})
    assert table[''] == ['cd4']
    assert (table['problems'], table['mean@2'], table['pass@1'], table['pass@2']) == (['1'], ['50.0'], ['50.0'], ['100.0'])
    assert (table['mean tokens'], table['without an answer'], table['truncated']) == (['10'], ['0.0'], ['0.0'])
    assert not {'maj@2', 'not judged'} & table.keys()
    voted = printed(print_scores, 'a title', {'aime': summary_of(Verdict.CORRECT, Verdict.INFRA_ERROR, votes=True)})
    assert (voted['maj@2'], voted['not judged']) == (['100.0'], ['50.0'])


def test_a_benchmark_with_copies_shows_its_problems_and_rows(printed):
    rows = [Question((verdict,), ('7',), (10,), (False,)) for verdict in (RIGHT, WRONG, RIGHT, RIGHT)]
    of_copies = summary(rows, votes=False, problems=[0, 1, 0, 1])
    assert printed(print_scores, 'a title', {'aime': of_copies})['problems'] == ['2 in 4 rows']
    assert 'aime  mean@1, 2 in 4 rows' in printed(print_table, 'a title', {'base': {'aime': of_copies}})


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
    assert (lines['truncated'], lines['mean tokens'], lines['without an answer']) == ('50.0', '15', '25.0')
    assert 'not judged' not in lines


def test_a_share_that_is_not_known_is_a_question_mark():
    assert [percent(x) for x in (0.5, 0.0, None)] == ['50.0', '0.0', '?']


DAMAGED = (b'{"benchmarks": {"x', b'[1]', b'null', b'{}', b'{"benchmarks": {"x": 3}}', b'{"benchmarks": {"x": {}}}', b'\xff')


@pytest.mark.parametrize('spoiled', DAMAGED)
def test_a_cut_evaluation_is_left_out_of_the_last_table_and_told(tmp_path, spoiled, caplog, printed):
    sound = {'benchmarks': {'cd3': {'samples': 2, 'questions': 5, 'mean': 0.5, 'pass': 0.6}}}
    files = {name: tmp_path / f'{name}.json' for name in ('base', 'trained', 'none')}
    files['base'].write_bytes(spoiled)
    files['trained'].write_text(json.dumps(sound))
    assert scores_in(files) == {'trained': sound['benchmarks']}
    assert 'base.json cannot be read' in caplog.text and 'its scores are left out' in caplog.text
    assert printed(print_table, 'x', {}) == {}
    assert printed(print_table, 'x', {'trained': sound['benchmarks'], 'base': {}})['cd3  mean@2, 5 problems'] == ['50.0', '?']
