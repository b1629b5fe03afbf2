r"""The geometry task: prompts with one <|image_pad|> an image, answers in every form seen, and none accepted that is wrong."""

import gzip
import json
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bapo_jax.groups import Verdict
from bapo_jax.tasks import TASKS, encode_prompts, get_task
from bapo_jax.tasks.custom_reward import find_reward, judge_one
from bapo_jax.tasks.geometry.answers import accepted_statement, is_no_value, stated_quantity
from bapo_jax.tasks.geometry import task
from bapo_jax.tasks.mathematics.text import last_box
from bapo_jax.tasks.sight import Sight

SHARED = Path(__file__).resolve().parents[3] / 'shared' / 'data'
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason='the shared data directory is absent')

CORRECT, WRONG, UNPARSEABLE, INFRA_ERROR = Verdict
IMAGE = {'file': '/data/a.parquet', 'row': 0, 'number': 0, 'sha256': '00', 'width': 60, 'height': 40}
TRUTH = {'problem': '<image>Find $x$.', 'answers': ['5'], 'images': [IMAGE]}
VISION = '<|vision_start|><|image_pad|><|vision_end|>'
PAPER = (
    VISION + 'Find $x$. You FIRST think about the reasoning process as an internal monologue and then provide the final answer. '
    'The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}.'
)


# ---- prompts ----------------------------------------------------------------------------------------------------------


class Tokenizer:
    def __init__(self, chat_template='messages', opens=False):
        self.chat_template, self._end = chat_template, '<assistant>' + '<think>\n' * opens

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt is True and tokenize is False
        return ''.join(f'<{m["role"]}>{m["content"]}' for m in messages) + self._end


def test_the_papers_prompt():
    assert task.prompt_text(TRUTH, 'paper', Tokenizer()) == f'<user>{PAPER}<assistant>'
    assert task.prompt_text(TRUTH, 'paper', Tokenizer(chat_template=None)) == PAPER
    assert task.prompt_text(TRUTH, 'plain', Tokenizer()) == f'{VISION}Find $x$. Put the final answer in \\boxed{{}}.\n'


def test_a_question_asked_as_it_is_is_judged_by_its_own_demand():
    words = 'Find $x$. Write it in <answer> </answer> tags.'
    truth = {**TRUTH, 'problem': f'<image>{words}', 'before': [{'role': 'system', 'content': 'Be brief.'}]}
    text = task.prompt_text(truth, 'as_is', Tokenizer())
    assert text == f'<system>Be brief.<user>{VISION}{words}<assistant>'
    asked = task.with_demands(truth, text)
    assert task.verify('<answer>5</answer>', asked) == (Verdict.CORRECT, '5')
    assert task.verify('\\boxed{5}', asked) == (Verdict.UNPARSEABLE, None)
    with pytest.raises(ValueError, match="'paper' asks for .*, but a question itself asks for <answer>"):
        task.prompt_text(truth, 'paper', Tokenizer())
    with pytest.raises(ValueError, match="'as_is': a row has several messages, which need a chat template"):
        task.prompt_text(truth, 'as_is', Tokenizer(chat_template=None))


def test_every_image_has_one_pad_where_the_problem_has_it():
    truth = {'problem': 'Is <image> like <image>?', 'answers': ['yes'], 'images': [IMAGE, IMAGE]}
    for template in task.TEMPLATES:
        assert f'Is {VISION} like {VISION}?' in task.prompt_text(truth, template, Tokenizer())
        with pytest.raises(ValueError, match=r'ground_truth\.problem has 2 <image> but 1 images'):
            task.prompt_text({**truth, 'images': [IMAGE]}, template, Tokenizer())
    with pytest.raises(ValueError, match=r"task\.template is 'r1'; choose one of paper, plain, as_is"):
        task.prompt_text(TRUTH, 'r1', Tokenizer())


@needs_shared
def test_prompts_with_a_real_tokenizer(tmp_path):
    """Qwen3's has the vision tokens of Qwen2.5-VL."""
    (tmp_path / 'tokenizer.json').write_bytes(gzip.decompress((SHARED / 'tokenizer_qwen3' / 'tokenizer.json.gz').read_bytes()))
    (tmp_path / 'tokenizer_config.json').write_bytes((SHARED / 'tokenizer_qwen3' / 'tokenizer_config.json').read_bytes())
    (tmp_path / 'preprocessor_config.json').write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    mark = tokenizer.convert_tokens_to_ids('<|image_pad|>')
    sight = Sight(tmp_path, mark)
    for template in task.TEMPLATES:
        [prompt] = encode_prompts('geometry', [TRUTH], tokenizer, template=template, first_id=7, sight=sight)
        assert prompt.tokens.tolist().count(mark) == sight.features(IMAGE) > 1
        assert tokenizer.decode(sight.collapsed(prompt.tokens, [IMAGE])) == task.prompt_text(TRUTH, template, tokenizer)
        assert (prompt.id, prompt.task, prompt.ground_truth) == (7, 'geometry', {**TRUTH, 'thinking': False})
    assert PAPER in task.prompt_text(TRUTH, 'paper', tokenizer)


def test_a_prompt_that_opens_the_thinking_demands_its_end():
    text = task.prompt_text(TRUTH, 'paper', Tokenizer(opens=True))
    truth = task.with_demands(TRUTH, text)
    assert truth == {**TRUTH, 'thinking': True} and task.with_demands(TRUTH, PAPER) == {**TRUTH, 'thinking': False}
    assert task.verify('so \\boxed{5}', truth) == (UNPARSEABLE, None)
    assert task.verify('so 4.</think> \\boxed{5}', truth) == (CORRECT, '5')
    assert task.verify('so \\boxed{5}', TRUTH) == (CORRECT, '5')


def test_ground_truths_that_cannot_judge_are_refused():
    for truth, message in [
        ({'problem': 'p'}, r'ground_truth\.answers is missing'),
        ({'answers': []}, r'ground_truth\.answers must be'),
        ({'answers': ['5'], 'images': IMAGE}, r'ground_truth\.images must be a list of references'),
        ({'answers': ['5'], 'images': [{'file': 'a.png'}]}, r'ground_truth\.images must be a list of references'),
        ({'answers': ['5'], 'thinking': 1}, r'ground_truth\.thinking must be'),
    ]:
        with pytest.raises(ValueError, match=message):
            task.verify('\\boxed{5}', truth)


def test_the_interface_is_whole():
    assert 'geometry' in TASKS and get_task('geometry') is task and task.VOTES is True
    assert list(task.BENCHMARKS) == ['geo3k_val', 'geo3k_test'] and all(name in dir(task) for name in task.__all__)


# ---- verdicts ---------------------------------------------------------------------------------------------------------

# accepted answer: forms that equal it, forms that do not; most accepted answers are Geometry3K's own
FORMS = {
    '30': (
        ['30', '$30$', '30.0', '30^\\circ', '30^{\\circ}', '30°', '30\\degree', '30 degrees', '30\\text{ degrees}', 'x = 30',
         '\\text{30 degrees}', 'x=30^\\circ', 'x \\approx 30', '\\approx 30', 'AB = 30', '\\overline{AB} = 30', 'x_1 = 30',
         'm\\angle ABC = 30^\\circ', 'm∠1 = 30°', 'm\\widehat{AB} = 30^\\circ', '\\text{Area} = 30\\text{ cm}^2',
         'S_{\\triangle ABC} = 30', '30 cm', '30cm', '30\\,\\text{cm}', '30 in.', '30 in^2', '30\\text{ in}^2', '30 m',
         '30 \\text{ in}^{2}', '30\\;\\mathrm{m}', '30 ft²', '30 square units', '30\\text{ square units}', '30 units^2',
         '30\\text{ sq. ft}', '30 yards', '30 miles', '\\text{30 cm}', '30\\ \\text{units}'],
        ['31', '30.1', '3', '-30', '300', 'x = 31', '30x', '30 + c', '30 or 150', 'x = 30 or x = 150', 'x = 150 or x = 30',
         'x=30, y=4', 'x=4\\quad y=30', '2x = 30', 'x + 5 = 30', 'x^2 = 30', 'AB + BC = 30', 'm\\angle A - 5 = 30', 'x <= 30',
         '30\\sqrt{2}', '30\\pi', '30^2', '\\sqrt{30}', '31 cm'],
    ),
    '2 \\sqrt { 221 }': (
        ['2\\sqrt{221}', '2√221', '2 √(221)', '2√{221}', '2sqrt(221)', '2*sqrt(221)', '2sqrt221', '2 \\cdot \\sqrt{221}',
         '\\sqrt{884}', '2\\sqrt(221)', '2\\sqrt{221}\\text{ cm}', 'x = 2\\sqrt{221}', '29.7321', '\\frac{442}{\\sqrt{221}}'],
        ['2\\sqrt{211}', '√221', '4\\sqrt{221}', '29.73', '30', '221'],
    ),
    '6 \\sqrt 2': (['6\\sqrt{2}', '6√2', '\\frac{12}{\\sqrt{2}}', '6\\sqrt2 units'], ['6', '12', '2\\sqrt{6}', '8.5']),
    '10 \\pi': (['10π', '10pi', '10\\pi\\text{ cm}', '10\\pi cm', '31.4159', 'C = 10\\pi'], ['10', '31.4', '20\\pi', '10\\pi^2']),
    '4 \\frac { 4 } { 11 }': (['\\frac{48}{11}', '48/11', '4\\frac{4}{11}'], ['\\frac{16}{11}', '4.36', '4']),
    '\\frac { 5 \\sqrt { 2 } } { 2 }': (['\\frac{5\\sqrt{2}}{2}', '2.5√2', '\\frac{5}{\\sqrt{2}}'], ['5\\sqrt{2}', '3.5']),
    '18.8': (['18.8', '18.80', '18.8 cm', '\\approx 18.8'], ['18.79', '18.75', '18.9', '19', '188']),
    '13.0': (['13', '13.0', 'x = 13'], ['13.02', '1.3']),
    '0.96': (['0.96', '\\frac{24}{25}', '\\cos A = 0.96'], ['0.28', '0.95']),
    'A D and B E': (
        ['AD and BE', 'BE, AD', '\\overline{AD} \\text{ and } \\overline{BE}', 'AD, and BE'], ['AE and BC', 'AD', 'AD and BC'],
    ),
    '\\angle 3 \\cong \\angle Z': (
        ['\\angle 3 \\cong \\angle Z', '∠Z ≅ ∠3', '$\\angle 3 \\cong \\angle Z$'],
        ['\\angle 1 \\cong \\angle Z', '\\angle 3 \\parallel \\angle Z', '\\angle 3, \\angle Z', '3', '\\angle 3 = \\angle Z'],
    ),
    'angles 2,3, 6, and 7': (
        ['2, 3, 6, 7', '\\angle 2, \\angle 3, \\angle 6, \\text{ and } \\angle 7', 'angles 2, 3, 6 and 7', '7,6,3,2'],
        ['2, 3, 6', 'angles 2, 3, and 4', '2,3,6,7,8', '2367'],
    ),
    # accepted answers beyond the test set's
    'x = 5': (['5', 'x=5'], ['y=5', '6']),
    '30 cm': (['30', '30 cm', '30\\text{ centimeters}'], ['30 m', '30 in', '30 cm^2', '30 sq. cm']),
    '9 cm^2': (['9\\text{ square centimeters}', '9 sq. cm', '9\\text{ cm}^2'], ['9 cm', '9 square inches']),
    '(2, 3)': (['(x, y) = (2, 3)', '(2,3)'], ['(3, 2)']),
    '3, 4': (['x = 3, 4', '4, 3'], ['3', 'x = 3, 5']),
    'y = 2x + 3': (['y = 2x + 3', 'y=3+2x'], ['y = 2x', '2x = 3']),
    'Yes': (['yes', '\\text{Yes}'], ['no']),
}  # fmt: skip


def test_forms_of_answers():
    cases = [(gold, form, verdict) for gold, forms in FORMS.items() for verdict in (0, 1) for form in forms[verdict]]
    responses = [f'<think>\\boxed{{1}}</think> \\boxed{{{form}}}' for _, form, _ in cases]
    outcomes = task.verify_all(responses, [gold for gold, _, _ in cases])
    unexpected = [
        (gold, form, verdict.name)
        for (gold, form, wrong), (verdict, _) in zip(cases, outcomes, strict=True)
        if (verdict == CORRECT) == bool(wrong) or verdict == INFRA_ERROR
    ]
    assert not unexpected


def test_the_answer_is_shown_without_name_degrees_and_unit():
    """Equal answers then have equal texts, and maj@n counts them together."""
    for form in ('30', 'x = 30', '30^\\circ', 'm\\angle A = 30°', '30\\text{ cm}'):
        assert task.verify(f'\\boxed{{{form}}}', '30') == (CORRECT, '30')


def test_what_is_no_answer():
    for response in ('30', 'the answer is $30$', '\\boxed{30', '\\boxed{}', '<think> \\boxed{30}', ''):
        assert task.verify(response, '30') == (UNPARSEABLE, None)
    assert task.verify('\\boxed{1} no, \\boxed{30}', '30') == (CORRECT, '30')
    assert task.verify('\\boxed{30} no, \\boxed{1}', '30') == (WRONG, '1')
    assert task.verify('\\boxed{\\frac{60}{2}}', ['31', '30'])[0] == CORRECT


def test_no_text_takes_long_or_raises():
    boxes = ['text' * 90 + '#=30', '(' * 190 + '=30', '\\text{' * 60 + '}' * 60, 'x' * 100_000, '30 ' + 'sq. ' * 90, '√(' * 150]
    began = time.perf_counter()
    for box in [*boxes, 'sqrt' * 99, 'ab ' * 50_000 + '=30']:
        assert task.verify(f'\\boxed{{{box}}}', '30')[0] in (WRONG, UNPARSEABLE)
    assert stated_quantity('x = ' + '1' * 400) == ('x = ' + '1' * 400, '')  # the pool keeps time over what is long
    closing = '<think>' + '</think>\\boxed{' * 20_000
    assert not task.has_form(closing) and task.has_form(closing + '}')
    assert time.perf_counter() - began < 8


@pytest.fixture(scope='module')
def real():
    if not SHARED.is_dir():
        pytest.skip('the shared data directory is absent')
    with gzip.open(SHARED / 'geometry3k_test_text.jsonl.gz') as file:
        return [json.loads(line) for line in file]


def test_all_601_answers_are_read_and_their_alternatives_refused(real):
    assert len(real) == 601
    right = task.verify_all([f'\\boxed{{{row["answer"]}}}' for row in real], [row['answer'] for row in real])
    assert all(verdict == CORRECT for verdict, _ in right)
    others = [(row['answer'], choice) for row in real for choice in row['choices'] if choice != row['answer']]
    outcomes = task.verify_all([f'\\boxed{{{choice}}}' for _, choice in others], [gold for gold, _ in others])
    assert len(others) > 1800 and all(verdict == WRONG for verdict, _ in outcomes)


def test_which_of_the_601_are_statements(real):
    assert [row['answer'] for row in real if accepted_statement(row['answer'])] == [
        'A D and B E', '\\angle 3 \\cong \\angle Z', 'angles 2,3, 6, and 7'
    ]  # fmt: skip


@needs_shared
def test_mathematics_own_cases_keep_their_verdicts():
    """What geometry takes off an answer changes one verdict of 540: '10m' is ten metres here."""
    with gzip.open(SHARED / 'grader_cases.jsonl.gz') as file:
        cases = [json.loads(line) for line in file]
    boxes = [c['pred'] if c['form'] == 'answer' else last_box(c['pred']) or '' for c in cases]
    texts = zip(cases, boxes, (str(c['gold']) for c in cases), strict=True)
    cases = [  # the others reach mathematics' judge as they are
        c
        for c, box, gold in texts
        if {stated_quantity(box), stated_quantity(gold, named=False)} != {(box, ''), (gold, '')} or is_no_value(box) or accepted_statement(gold)
    ]
    assert len(cases) > 40
    golds = [{'answers': c['gold'] if isinstance(c['gold'], list) else [c['gold']], 'boxed': True} for c in cases]
    texts = [f'\\boxed{{{c["pred"]}}}' if c['form'] == 'answer' else c['pred'] for c in cases]
    both = zip(cases, task.verify_all(texts, golds), get_task('math').verify_all(texts, golds), strict=True)
    assert [(c['gold'], c['pred']) for c, ours, maths in both if (ours[0] == CORRECT) != (maths[0] == CORRECT)] == [('10', '10m')]


# ---- rewards ----------------------------------------------------------------------------------------------------------


def test_verls_reward_is_found_by_its_name():
    reward = find_reward('bapo_jax.tasks.geometry.task:accuracy_and_format')
    opened = {**TRUTH, 'thinking': True}
    for response, truth, verdict, score, answer in [
        ('<think>a</think> so \\boxed{5}.', TRUTH, CORRECT, 1.0, '5'),
        ('<think>a\nb</think>\n\\boxed{x=5}', TRUTH, CORRECT, 1.0, '5'),
        ('so \\boxed{5}', TRUTH, CORRECT, 0.9, '5'),
        (' <think>a</think> \\boxed{5}', TRUTH, CORRECT, 0.9, '5'),  # the whole response must have the form
        ('<think>a</think> \\boxed{6}', TRUTH, WRONG, 0.1, '6'),
        ('<think>a</think> 5', TRUTH, WRONG, 0.0, None),
        ('<think>\\boxed{5}</think> 5', TRUTH, WRONG, 0.0, None),
        ('a</think> \\boxed{5}', opened, CORRECT, 1.0, '5'),
        ('a</think> \\boxed{5}', TRUTH, CORRECT, 0.9, '5'),
    ]:
        got = judge_one(reward, 'geometry', response, truth, {})
        assert (got[0], got[2]) == (verdict, answer) and got[1] == pytest.approx(score)


def test_a_failure_of_the_verifier_is_no_reward():
    """An accepted answer that cannot be read is not the response's fault."""
    truth = '\\begin{cases} 1 \\\\'
    assert task.verify('\\boxed{5}', truth)[0] == INFRA_ERROR
    with pytest.raises(RuntimeError, match='the verifier failed'):
        judge_one(task.accuracy_and_format, 'geometry', '\\boxed{5}', truth, {})
