"""The directory of one evaluation: what belongs into it, and what an interrupted one has done before."""

import dataclasses
import json

import numpy as np
import pytest
from group_builders import graded, judged_group, make_group

from bapo_jax.config import default_config
from bapo_jax.groups import Prompt, Verdict
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.run.samples import done_before, fingerprint_questions, open_evaluation, sample_files, sample_rows, evaluation_settings
from bapo_jax.scores import question

RIGHT, WRONG, NONE = Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSEABLE


def sample_lines(questions, samples=2):
    """Lines of the rows of so many questions, as a file of samples holds them."""
    row = {'verdict': 'correct', 'answer': '7', 'tokens': 3, 'finish': 'stop'}
    return [json.dumps({'question': q, 'sample': j, **row}).encode() + b'\n' for q in range(questions) for j in range(samples)]


def test_a_file_with_rows_out_of_place_is_refused(tmp_path):
    lines = sample_lines(21)
    file = tmp_path / 'x.jsonl'
    for changed, message in (
        ([*lines[:5], *lines[6:]], r'x\.jsonl, line 6: question 3, sample 0 is out of place; remove the file'),
        ([*lines, lines[0]], r'x\.jsonl, line 43: question 0, sample 0 is out of place'),
        ([*lines[:2], b'{"question": 1\n', *lines[3:]], r'x\.jsonl, line 3: not valid JSON .*; remove the file'),
    ):
        file.write_bytes(b''.join(changed))
        with pytest.raises(ValueError, match=message):
            done_before(file, 21, 2, 8)
        assert file.read_bytes() == b''.join(changed)


def test_other_questions_and_files_of_unknown_origin_are_refused(tmp_path):
    open_evaluation(tmp_path, {'samples': 2, 'questions': {'a': '1'}}, [])
    with pytest.raises(ValueError, match=r"differ in questions \(\{'a': '1'\} there, \{'a': '2'\} now\)\. Give another --output"):
        open_evaluation(tmp_path, {'samples': 2, 'questions': {'a': '2'}}, [])
    open_evaluation(tmp_path, {'samples': 2, 'questions': {'a': '1'}, 'code': {'my.rewards': '1'}}, [])  # an old one has no code
    (tmp_path / 'settings.json').write_text(json.dumps({'samples': 2, 'code': {'my.rewards': '1'}}))
    with pytest.raises(ValueError, match=r'differ in code \('):
        open_evaluation(tmp_path, {'samples': 2, 'code': {'my.rewards': '2'}}, [])
    (tmp_path / 'settings.json').unlink()
    (tmp_path / 'a.jsonl').write_text('')
    with pytest.raises(ValueError, match=r'holds a\.jsonl, but no settings\.json'):
        open_evaluation(tmp_path, {'samples': 2}, [tmp_path / 'a.jsonl', tmp_path / 'b.jsonl'])
    with pytest.raises(ValueError, match=r'x/a\.jsonl and y/a\.jsonl would share a\.jsonl'):
        sample_files(tmp_path, ['x/a.jsonl', 'b', 'y/a.jsonl'])


def test_what_is_left_of_a_chunk_is_cut_off(tmp_path):
    """Of 5 questions × 2 samples in chunks of 2 questions, 7 rows hold one whole chunk; all rows are the last, smaller one too."""
    file, lines = tmp_path / 'x.jsonl', sample_lines(5)
    assert done_before(file, 5, 2, 2) == []
    for count, kept in ((7, 4), (9, 8), (10, 10)):
        file.write_bytes(b''.join(lines[:count]) + b'{"ques')
        assert len(done_before(file, 5, 2, 2)) == kept // 2
        assert file.read_bytes() == b''.join(lines[:kept])


def test_rows_give_back_the_questions_they_were_made_of(tmp_path):
    tokenizer, rng = character_tokenizer(), np.random.default_rng(0)
    groups = [judged_group(i, verdicts, rng) for i, verdicts in enumerate([list(Verdict), list(Verdict)[::-1]])]
    answers = [('1', None, '2', None), (None, '3', None, '4')]
    groups = [dataclasses.replace(g, answers=a) for g, a in zip(groups, answers, strict=True)]
    rows = sample_rows('cd', 0, groups, tokenizer)
    assert [(row['question'], row['sample']) for row in rows] == [(i, j) for i in range(2) for j in range(4)]
    assert {row['benchmark'] for row in rows} == {'cd'}
    assert rows[5]['response'] == tokenizer.decode(groups[1].responses[1].tokens)
    file = tmp_path / 'cd.jsonl'
    file.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    assert done_before(file, 2, 4, 1) == [question(g) for g in groups]


def test_the_settings_tell_two_evaluations_of_other_questions_or_another_seed_apart(tmp_path):
    def of(seed=0, tokens=(1, 2), target=3):
        config = default_config()
        config.seed = seed
        prompts = [Prompt(0, 'countdown', np.array(tokens, np.int32), {'target': target})]
        return evaluation_settings(tmp_path, 7, config, {'cd': prompts})

    assert of() == of()
    for changed, name in ((of(seed=1), 'config.seed'), (of(tokens=(1, 3)), 'questions'), (of(target=4), 'questions')):
        assert [n for n in of() if of()[n] != changed[n]] == [name]


class Spelling:
    """A tokenizer whose texts are the token numbers."""

    def batch_decode(self, rows):
        return [' '.join(map(str, tokens)) for tokens in rows]


def judged(questions, first=0):
    """Two responses to each question, with verdicts and answers that differ from question to question."""
    groups = []
    for i in range(first, first + questions):
        g = make_group(i, 0, G=2)
        groups.append(graded(g.prompt, g.responses, [(RIGHT, WRONG), (NONE, RIGHT), (WRONG, WRONG)][i % 3], answers=(str(i), None)))
    return groups


def written(questions):
    """Every sample of so many questions, as `evaluate` writes them."""
    return [json.dumps(row) + '\n' for row in sample_rows('x', 0, judged(questions), Spelling())]


def test_rows_say_where_they_belong_what_was_judged_and_how_long_it_was():
    of_second_chunk = sample_rows('x', 4, judged(2, first=4), Spelling())
    places = [(row['benchmark'], row['question'], row['sample']) for row in of_second_chunk]
    assert places == [('x', 4, 0), ('x', 4, 1), ('x', 5, 0), ('x', 5, 1)]
    group = judged(1, first=4)[0]
    assert of_second_chunk[0] == {
        'benchmark': 'x', 'question': 4, 'sample': 0, 'ground_truth': {'target': 4}, 'verdict': 'unparseable', 'answer': '4',
        'response': ' '.join(map(str, group.responses[0].tokens)), 'finish': group.responses[0].finish,
        'tokens': len(group.responses[0].tokens),
    }  # fmt: skip


def test_what_is_read_back_is_what_was_judged(tmp_path):
    (tmp_path / 'x.jsonl').write_text(''.join(written(6)))
    questions = done_before(tmp_path / 'x.jsonl', 6, 2, 2)
    want = judged(6)
    assert [q.verdicts for q in questions] == [g.verdicts for g in want]
    assert [q.answers for q in questions] == [g.answers for g in want]
    assert [(q.lengths, q.truncated) for q in questions] == [
        (tuple(len(r.tokens) for r in g.responses), tuple(r.finish == 'length' for r in g.responses)) for g in want
    ]


@pytest.mark.parametrize('lines, kept', [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (9, 8), (10, 10)])
def test_an_interrupted_file_is_cut_back_to_whole_chunks(lines, kept, tmp_path):
    """Five questions, two samples each, in chunks of two questions: the last chunk is one question."""
    rows, file = written(5), tmp_path / 'x.jsonl'
    file.write_text(''.join(rows[:lines]) + '{"bench')
    assert len(done_before(file, 5, 2, 2)) == kept // 2
    assert file.read_text() == ''.join(rows[:kept])
    assert done_before(tmp_path / 'absent.jsonl', 5, 2, 2) == []


def test_rows_out_of_place_are_refused_and_left_as_they_are(tmp_path):
    rows, file = written(4), tmp_path / 'x.jsonl'
    for changed, message in (
        ([*rows[:3], *rows[4:]], r'x\.jsonl, line 4: question 2, sample 0 is out of place; remove the file'),
        ([*rows, rows[0]], r'x\.jsonl, line 9: question 0, sample 0 is out of place'),
        ([*rows[:2], '{"question": 1\n', *rows[3:]], r'x\.jsonl, line 3: not valid JSON .*; remove the file'),
    ):
        file.write_text(''.join(changed))
        with pytest.raises(ValueError, match=message):
            done_before(file, 4, 2, 2)
        assert file.read_text() == ''.join(changed)


def test_the_same_evaluation_may_open_its_directory_again_and_another_is_named(tmp_path):
    c = default_config()
    prompts = {'cd3': [make_group(i, 0).prompt for i in range(3)]}
    new = evaluation_settings(tmp_path, 7, c, prompts)
    for _ in range(2):
        open_evaluation(tmp_path / 'out', new, [])
    c.seed, c.evaluate.samples = 5, c.evaluate.samples + 1
    with pytest.raises(ValueError, match=r'differ in config\.seed \(42 there, 5 now\), samples \(8 there, 9 now\)\. Give another'):
        open_evaluation(tmp_path / 'out', evaluation_settings(tmp_path, 7, c, prompts), [])
    assert json.loads((tmp_path / 'out' / 'settings.json').read_text()) == new


def test_settings_name_what_the_engine_depends_on(tmp_path):
    c = default_config()
    in_process = evaluation_settings(tmp_path, 7, c, {})
    c.rollout.engine = 'vllm'
    served = evaluation_settings(tmp_path, 7, c, {})
    assert 'config.rollout.rows' in in_process and 'config.rollout.dtype' not in in_process
    assert 'config.rollout.dtype' in served and 'config.rollout.rows' not in served


def test_questions_have_a_fingerprint_of_tokens_and_ground_truths_in_order():
    prompts = [make_group(i, 0).prompt for i in range(3)]
    other = dataclasses.replace(prompts[0], ground_truth={'target': 99})
    longer = dataclasses.replace(prompts[0], tokens=np.append(prompts[0].tokens, 1).astype(np.int32))
    variants = [prompts, prompts[::-1], prompts[:2], [other, *prompts[1:]], [longer, *prompts[1:]]]
    assert len({fingerprint_questions(v) for v in variants}) == 5
    assert fingerprint_questions(prompts) == fingerprint_questions(list(prompts))


def test_each_benchmark_has_a_file_of_its_own(tmp_path):
    files = sample_files(tmp_path, ['cd3', 'data/few.jsonl'])
    assert files == {'cd3': tmp_path / 'cd3.jsonl', 'data/few.jsonl': tmp_path / 'few.jsonl'}
    with pytest.raises(ValueError, match=r'x/a\.jsonl and y/a\.jsonl would share a\.jsonl'):
        sample_files(tmp_path, ['x/a.jsonl', 'b', 'y/a.jsonl'])
