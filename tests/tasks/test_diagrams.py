"""Generated diagrams: answers follow from what is drawn, pictures are what their references say, and the control shows nothing."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bapo_jax.groups import Verdict
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.tasks import encode_prompts, get_task
from bapo_jax.tasks.diagrams import pictures, problems as diagram_problems, task as diagrams
from bapo_jax.tasks.diagrams.problems import ASKED, DIAGRAM_KINDS, generate, missing_number, problem_key
from bapo_jax.tasks.images import open_image

TRUTH = {'answer': 59}
FIGURE = {'kind': 'angles', 'corners': [[7, 87], [88, 87], [48, 7]], 'labels': ['57', '64', '?']}


@pytest.fixture(scope='module')
def problems():
    return diagrams.training_problems('generated', limit=600, seed=3)


def figure_of(problem):
    return problem['images'][0]['figure']


def test_the_missing_number_makes_the_rule_hold(problems):
    for problem in problems:
        figure, answer = figure_of(problem), problem['answer']
        numbers = [answer if label == ASKED else int(label) for label in figure['labels']]
        assert figure['labels'].count(ASKED) == 1 and all(0 < n < 100 for n in numbers)
        if figure['kind'] == 'angles':
            assert sum(numbers) == 180
        elif figure['kind'] == 'right':
            assert numbers[0] ** 2 + numbers[2] ** 2 == numbers[1] ** 2
        else:
            small, other, large, other_large = numbers
            assert small * other_large == other * large and large % small == 0 and 2 <= large // small <= 5
        assert missing_number(figure) == answer


def test_a_right_angle_is_right_and_its_hypotenuse_lies_opposite(problems):
    for figure in (figure_of(p) for p in problems if figure_of(p)['kind'] == 'right'):
        corner, one, other = np.array(figure['corners'])
        assert np.dot(one - corner, other - corner) == 0 and min(np.abs(one - corner).max(), np.abs(other - corner).max()) > 30


def test_kinds_come_equally_often_and_every_number_can_be_asked(problems):
    kinds = [figure_of(p)['kind'] for p in problems]
    assert [kinds.count(kind) for kind in DIAGRAM_KINDS] == [200, 200, 200]
    places = {(figure_of(p)['kind'], figure_of(p)['labels'].index(ASKED)) for p in problems}
    assert len(places) == 3 + 3 + 4


def test_who_does_not_see_can_hardly_guess():
    """The commonest answer is that of fewer than 2 in 100 problems, and of no more than 2 in 100 test problems."""
    answers = [missing_number(figure) for figure in generate(6_000, seed=1)]
    assert np.bincount(answers).max() < 0.02 * len(answers)
    assert np.bincount([p['answer'] for p in diagrams.benchmark('diagrams')]).max() <= 4


def test_equal_descriptions_give_equal_pictures_and_labels_show(problems):
    for problem in problems[:60]:
        figure, reference = figure_of(problem), problem['images'][0]
        picture = open_image(json.loads(json.dumps(reference)))  # as a checkpoint holds it
        assert picture.mode == 'RGB' and picture.size == (reference['width'], reference['height'])
        assert picture.tobytes() == pictures.draw_diagram(figure).tobytes()
        for i, label in enumerate(figure['labels']):
            other = [*figure['labels'][:i], '7' if label != '7' else '8', *figure['labels'][i + 1 :]]
            assert pictures.pixels_hash(pictures.draw_diagram({**figure, 'labels': other})) != reference['sha256']


def test_every_label_has_room(problems):
    """No label is cut off at the edge, and none covers another: the picture has the ink of all of them, drawn apart."""

    def ink(labels, figure):
        black = (np.asarray(pictures.draw_diagram({**figure, 'labels': labels})) < 60).all(axis=-1)
        assert not (black[0].any() or black[-1].any() or black[:, 0].any() or black[:, -1].any())
        return black.sum()

    for figure in map(figure_of, problems[:90]):
        labels = figure['labels']
        alone = [ink([label if i == j else '' for j, label in enumerate(labels)], figure) for i in range(len(labels))]
        assert ink(labels, figure) == sum(alone)


def test_the_sheet_in_the_docs_is_what_is_drawn():
    shown = Image.open(Path(__file__).resolve().parents[2] / 'docs' / 'diagrams.png')
    assert shown.convert('RGB').tobytes() == diagrams.sample_sheet().tobytes()


def test_a_changed_drawing_is_noticed(problems, monkeypatch):
    reference = problems[0]['images'][0]
    open_image(reference)
    monkeypatch.setattr(pictures, '_LINE', (70, 120, 211))
    with pytest.raises(ValueError, match='drawn differently than when the problems were made'):
        open_image(reference)


@pytest.mark.parametrize(
    'change, message',
    [
        ({'kind': 'circle'}, 'figure.kind must be one of'),
        ({'corners': [[1, 2]]}, 'figure.corners must be 3'),
        ({'corners': [[1, 2], [3, 4], [5, 96]]}, 'figure.corners must be 3'),
        ({'labels': ['1', '2']}, 'figure.labels must be 3'),
        ({'labels': ['1', '2', 3]}, 'figure.labels must be 3'),
    ],
)
def test_what_is_no_description_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        pictures.draw_diagram(FIGURE | change)


def test_test_problems_are_never_trained_on():
    test = diagrams.benchmark('diagrams')
    held_out = {problem_key(figure_of(p)) for p in test}
    pictures = {p['images'][0]['sha256'] for p in test}
    assert len(test) == len(held_out) == len(pictures) == 200
    kinds = [figure_of(p)['kind'] for p in test]
    assert [kinds.count(kind) for kind in DIAGRAM_KINDS] == [67, 67, 66]
    for problem in diagrams.training_problems('generated', limit=1_000, seed=1001):  # the seed of the test problems
        assert problem_key(figure_of(problem)) not in held_out and problem['images'][0]['sha256'] not in pictures


def test_the_held_out_numbers_of_angles_are_new_in_any_order():
    figure = next(figure_of(p) for p in diagrams.benchmark('diagrams') if figure_of(p)['kind'] == 'angles')
    turned = {**figure, 'labels': figure['labels'][::-1], 'corners': [[9, 87], [88, 85], [48, 9]]}
    assert problem_key(turned) == problem_key(figure)


def test_blanked_problems_have_the_answers_and_nothing_to_see(problems):
    blanked = diagrams.training_problems('blanked', limit=600, seed=3)
    assert [p['answer'] for p in blanked] == [p['answer'] for p in problems]
    tests = diagrams.benchmark('diagrams'), diagrams.benchmark('diagrams_blanked')
    assert [p['answer'] for p in tests[0]] == [p['answer'] for p in tests[1]]
    references = {json.dumps(p['images']) for p in [*blanked, *tests[1]]}
    assert len(references) == 1  # so nothing beside the pixels tells problems apart either
    assert set(open_image(blanked[0]['images'][0]).tobytes()) == {255}
    sizes = {(p['images'][0]['width'], p['images'][0]['height']) for p in [*blanked, *problems]}
    assert len(sizes) == 1


@pytest.mark.parametrize('template', diagrams.TEMPLATES)
def test_the_prompt_says_nothing_of_the_numbers(template, problems):
    tokenizer = character_tokenizer()
    texts = {diagrams.prompt_text(problem, template, tokenizer) for problem in problems}
    assert len(texts) == 1 and not re.search(r'\d', texts.pop())


def test_words_go_through_the_chat_template():
    tokenizer = character_tokenizer(chat_template='{% for m in messages %}<user>{{ m.content }}</user>{% endfor %}')
    text = diagrams.prompt_text(TRUTH, 'words', tokenizer)
    assert text.startswith('<user><|vision_start|><|image_pad|><|vision_end|>Find') and text.endswith('</user>')
    with pytest.raises(ValueError, match="task.template is 'base'"):
        diagrams.prompt_text(TRUTH, 'base', tokenizer)


@pytest.mark.parametrize(
    'response, verdict, answer',
    [
        ('57+64=121 180-121<answer>59</answer>', Verdict.CORRECT, '59'),
        ('<answer> 59\n</answer>', Verdict.CORRECT, '59'),
        ('<answer>59°</answer>.', Verdict.CORRECT, '59'),
        ('<answer>059</answer>', Verdict.CORRECT, '59'),
        ('<answer>1</answer> no: <answer>59</answer>', Verdict.CORRECT, '59'),
        ('57+64=121 180-121<answer>58</answer>', Verdict.WRONG, '58'),
        ('57+64=121 180-121=59<answer>121</answer>', Verdict.WRONG, '121'),  # the right number at the wrong place
        ('<answer>59</answer><answer>60</answer>', Verdict.WRONG, '60'),
        ('<answer>590</answer>', Verdict.WRONG, '590'),
        ('59', Verdict.UNPARSEABLE, None),
        ('180-121=59', Verdict.UNPARSEABLE, None),
        ('<answer>59', Verdict.UNPARSEABLE, None),
        ('59</answer>', Verdict.UNPARSEABLE, None),
        ('</answer>59<answer>', Verdict.UNPARSEABLE, None),
        ('<answer></answer>', Verdict.UNPARSEABLE, None),
        ('<answer>59.0</answer>', Verdict.UNPARSEABLE, None),
        ('<answer>-59</answer>', Verdict.UNPARSEABLE, None),
        ('<answer>180-121</answer>', Verdict.UNPARSEABLE, None),
        ('<answer>59 60</answer>', Verdict.UNPARSEABLE, None),
        ('<answer>٥٩</answer>', Verdict.UNPARSEABLE, None),
        ('<answer>' + '9' * 5000 + '</answer>', Verdict.UNPARSEABLE, None),
        ('<answer>' * 5000, Verdict.UNPARSEABLE, None),
        ('', Verdict.UNPARSEABLE, None),
    ],
)
def test_the_last_answer_counts_and_must_be_a_whole_number(response, verdict, answer):
    assert diagrams.verify(response, TRUTH) == (verdict, answer)
    assert diagrams.verify_all([response], [TRUTH]) == [(verdict, answer)]


@pytest.mark.parametrize('opening', ['', '<think>\n'])
def test_an_answer_within_a_think_that_is_not_closed_does_not_count(opening):
    truth, thought = diagrams.with_demands(TRUTH, f'?<assistant>{opening}'), '' if opening else '<think>'
    right = f'<answer>{TRUTH["answer"]}</answer>'
    assert diagrams.verify(f'{thought}It is {right}', truth) == (Verdict.UNPARSEABLE, None)
    assert diagrams.verify(f'{thought}So.</think>{right}', truth)[0] == Verdict.CORRECT


def test_a_worked_solution_is_right_and_of_true_steps(problems):
    for problem in problems:
        solution = diagrams.worked_diagram(problem)
        assert diagrams.verify(solution, problem)[0] == Verdict.CORRECT
        steps, answer = solution.removesuffix('</answer>').split('<answer>')
        *whole, last = steps.split(' ')
        for step in whole:
            left, right = step.split('=')
            assert value(left) == int(right)
        shown = int(answer) ** 2 if figure_of(problem)['kind'] == 'right' else int(answer)
        assert value(last) == shown
        read = {int(label) for label in figure_of(problem)['labels'] if label != ASKED}
        assert read <= {int(n) for n in re.findall(r'\d+', steps)}


def value(text):
    """Of two products, or two numbers, joined by + or -; or of a product or quotient."""
    total, sign = 0, 1
    for part in re.split('([+-])', text):
        if part in '+-':
            sign = 1 if part == '+' else -1
            continue
        first, *rest = re.split('([*/])', part)
        result = int(first)
        for operator, number in zip(rest[::2], rest[1::2], strict=True):
            assert operator == '*' or result % int(number) == 0
            result = result * int(number) if operator == '*' else result // int(number)
        total += sign * result
    return total


@pytest.mark.parametrize(
    'truth, message',
    [
        (59, 'ground_truth.answer'),
        ({}, 'ground_truth.answer'),
        ({'answer': '59'}, 'ground_truth.answer'),
        ({'answer': True}, 'ground_truth.answer'),
        ({'answer': 59, 'images': []}, 'ground_truth.images'),
        ({'answer': 59, 'images': [{'file': 'x.png'}]}, 'ground_truth.images'),
        ({'answer': 59, 'images': ['x.png']}, 'ground_truth.images'),
    ],
)
def test_a_ground_truth_that_cannot_judge_is_named(truth, message):
    with pytest.raises(ValueError, match=message):
        diagrams.verify('', truth)


def test_other_sources_and_benchmarks_are_named():
    with pytest.raises(ValueError, match="task.train is 'x.jsonl'"):
        diagrams.training_problems('x.jsonl', limit=1, seed=1)
    with pytest.raises(ValueError, match='task.limit is 0'):
        diagrams.training_problems('blanked', limit=0, seed=1)
    with pytest.raises(ValueError, match="unknown diagrams benchmark 'cd34'"):
        diagrams.benchmark('cd34')


def test_seeds_differ_and_repeat(problems):
    assert problems == diagrams.training_problems('generated', limit=600, seed=3)
    assert problems[:10] != diagrams.training_problems('generated', limit=10, seed=4)
    assert problems[:10] == diagrams.training_problems('generated', limit=10, seed=3)


def test_it_is_a_task_with_one_image_a_prompt(problems):
    class Eyes:
        def expanded(self, tokens, images):
            return np.repeat(tokens, np.where(tokens == mark, 36 * len(images), 1))

    tokenizer = character_tokenizer()
    tokenizer.add_tokens(['<|vision_start|>', '<|image_pad|>', '<|vision_end|>'], special_tokens=True)
    mark = tokenizer.convert_tokens_to_ids('<|image_pad|>')
    assert get_task('diagrams') is diagrams and diagrams.VOTES is True and diagram_problems.SOURCES[1] == 'blanked'
    prompts = encode_prompts('diagrams', problems[:2], tokenizer, template='compact', sight=Eyes())
    assert [len(p.tokens) for p in prompts] == [40, 40] and [p.ground_truth for p in prompts] == problems[:2]
