"""What a config names: read without weights and devices, and refused with field or file."""

import json
import shutil

import numpy as np
import pytest
from small_run import ROOT, small_config

from bapo_jax.evaluate import load_for_evaluation
from bapo_jax.inputs import benchmark_prompts, check_turn_end, embedder, read_inputs
from bapo_jax.models import hf
from bapo_jax.models.embedding import mean_states
from bapo_jax.models.tokenizer import character_tokenizer, load_tokenizer
from bapo_jax.prompts.ngrams import ngram_embeddings

LOAD = hf.load_params


@pytest.fixture(autouse=True)
def no_weights_are_read(monkeypatch):
    monkeypatch.setattr(hf, 'load_params', lambda *_: pytest.fail('weights were read'))


def test_a_model_may_be_taken_for_more_positions_than_it_was_made_for(benchmark):
    longer = {'rollout__max_response_tokens': 5000, 'learner__slot_tokens': 0, 'learner__row_tokens': 0}
    stated = {'model__max_positions': 8192, 'model__rope_theta': 40_000.0, **longer}
    model = read_inputs(small_config('bapo_tuned', benchmark, **stated)).model
    assert (model.max_positions, model.rotation.rope_theta) == (8192, 40_000.0)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'model__path': 'nowhere'}, r'model\.path=.nowhere. is not a directory'),
        ({'task__train': 'missing.parquet'}, r'missing\.parquet'),
        ({'task__limit': 7}, r'7 training prompts are fewer than learner\.batch_groups=8'),
        ({'rollout__max_prompt_tokens': 5}, r'rollout\.max_prompt_tokens'),
        ({'evaluate__benchmarks': ('cd5',)}, r'cd5'),
        ({'rollout__max_response_tokens': 5000, 'learner__slot_tokens': 0, 'learner__row_tokens': 0},
         r'rollout\.max_prompt_tokens=16 \+ rollout\.max_response_tokens=5000 = 5016 tokens, '
         r'but max_position_embeddings of .*config\.json is 4096; .*model\.max_positions=16384'),
        ({'evaluate__max_response_tokens': 4081}, r'evaluate\.max_response_tokens=4081 = 4097 tokens'),
        ({'evaluate__track_prompts': 61}, r'evaluate\.track_prompts=61 exceeds the 60 training prompts'),
    ],
)
def test_bad_input_is_refused(benchmark, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_inputs(small_config('bapo_tuned', benchmark, **changes))


def test_steps_are_those_of_the_config_or_whole_batches_of_its_epochs(benchmark):
    assert read_inputs(small_config('bapo_tuned', benchmark)).steps == 6
    assert read_inputs(small_config('bapo_tuned', benchmark, steps=0, epochs=3)).steps == 3 * (60 // 8)


def test_training_prompts_count_from_0_and_no_benchmark_shares_their_ids(benchmark, tmp_path):
    (tmp_path / 'other.jsonl').write_bytes(benchmark.read_bytes())
    names = (str(benchmark), str(tmp_path / 'other.jsonl'))
    read = read_inputs(small_config('bapo_tuned', benchmark, evaluate__benchmarks=names))
    assert [p.id for p in read.prompts] == list(range(60))
    assert {name: [p.id for p in prompts] for name, prompts in read.benchmarks.items()} == {
        name: [(1 + i << 24) + j for j in range(4)] for i, name in enumerate(names)
    }


def test_copies_are_no_other_problems(benchmark, tmp_path, caplog):
    """Training asks each problem once, under one id; a benchmark keeps its rows and says how many problems they are."""
    lines = benchmark.read_bytes().splitlines(keepends=True)
    train, test = tmp_path / 'train.jsonl', tmp_path / 'test.jsonl'
    train.write_bytes(b''.join(f'{{"nums": [{i}, 2], "target": {i + 2}}}\n'.encode() for i in range(1, 31)) * 2)
    test.write_bytes(b''.join(lines) * 3)
    with caplog.at_level('WARNING'):
        changes = {'task__train': str(train), 'task__limit': 20, 'evaluate__benchmarks': (str(test),)}
        read = read_inputs(small_config('bapo_tuned', benchmark, **changes))
    assert [p.id for p in read.prompts] == list(range(20)) and len(read.benchmarks[str(test)]) == 12
    assert '30 of 60 rows repeat an earlier problem and are left out of training; 30 distinct problems' in caplog.text
    assert 'test.jsonl: 12 rows have only 4 distinct problems; all rows are scored, and the confidence interval is over problems' in caplog.text


def test_copies_of_a_task_of_the_users_are_no_other_problems_either(benchmark, tmp_path, monkeypatch):
    (tmp_path / 'own').mkdir()
    (tmp_path / 'own' / 'with_copies.py').write_text(
        'from bapo_jax.tasks.countdown import task\nfrom bapo_jax.tasks.countdown.task import *\n'
        'def training_problems(source, *, limit, seed): return 2 * task.training_problems(source, limit=limit, seed=seed)\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    read = read_inputs(small_config('bapo_tuned', benchmark, task__name='own.with_copies'))
    assert [p.id for p in read.prompts] == list(range(60))


def test_weights_are_checked_unless_they_are_not_wanted(benchmark, monkeypatch):
    checked = []
    monkeypatch.setattr(hf, 'check_weights', lambda path, model: checked.append(path))
    config = small_config('bapo_tuned', benchmark)
    read_inputs(config, weights=False)
    assert checked == []
    read_inputs(config)
    assert checked == [config.model.path]


def test_a_small_config_is_read_whole(benchmark):
    read = read_inputs(small_config('bapo_tuned', benchmark))
    assert read.config.replay.bad_capacity == 8  # resolved
    assert len(read.prompts) == 60 and [p.id for p in read.prompts] == list(range(60))
    assert list(read.benchmarks) == [str(benchmark)] and len(read.benchmarks[str(benchmark)]) == 4
    assert read.model.num_layers == 4 and read.steps == 6
    assert [p.id for p in read.selector.next()] != [p.id for p in read.selector.next()]
    assert all(isinstance(end, int) for end in read.stop_tokens) and read.stop_tokens


def test_a_model_embeds_the_text_of_prompts_and_without_one_their_n_grams_do(benchmark, monkeypatch):
    config = small_config('dots', benchmark)
    read = read_inputs(config)
    np.testing.assert_array_equal(embedder(read.config, read.tokenizer)(read.prompts), ngram_embeddings(read.prompts))
    config.prompts.dots.embeddings = config.model.path  # the policy itself, whose tokenizer reads the prompts
    read = read_inputs(config)
    monkeypatch.setattr(hf, 'load_params', LOAD)
    found = embedder(read.config, read.tokenizer)(read.prompts[:5])
    want = mean_states(config.model.path, read.model, [p.tokens for p in read.prompts[:5]])
    np.testing.assert_allclose(found, want, atol=1e-5)
    config.prompts.dots.embeddings = 'nowhere'
    with pytest.raises(FileNotFoundError, match=r"prompts\.dots\.embeddings='nowhere' is not a directory"):
        read_inputs(config)


def test_a_step_of_rollout_replay_has_half_as_many_prompts(benchmark):
    read = read_inputs(small_config('dots', benchmark, steps=0, epochs=2, prompts__selector='shuffled'))
    assert read.steps == 2 * (60 // 4) and len(read.selector.next()) == 4


def test_no_steps_means_whole_epochs_of_full_batches(benchmark):
    config = small_config('bapo_tuned', benchmark, steps=0, epochs=2)
    assert read_inputs(config).steps == 2 * (60 // 8)


def test_no_two_questions_share_an_id_and_so_random_keys(benchmark, tmp_path):
    other = tmp_path / 'other.jsonl'
    other.write_text(json.dumps({'nums': [3, 5, 2], 'target': 30}) + '\n')
    config = small_config('bapo_tuned', benchmark, evaluate__benchmarks=(str(benchmark), str(other)))
    read = read_inputs(config)
    ids = [p.id for prompts in (read.prompts, *read.benchmarks.values()) for p in prompts]
    assert len(set(ids)) == len(ids) == 60 + 4 + 1
    # A benchmark's ids are by its place, so its samples do not depend on the training prompts.
    for name, again in benchmark_prompts(read.config, read.tokenizer).items():
        assert [p.id for p in again] == [p.id for p in read.benchmarks[name]]


def test_weights_are_not_needed_where_none_are_asked_for(benchmark, tmp_path):
    base = tmp_path / 'base'
    base.mkdir()
    config = small_config('bapo_tuned', benchmark)
    for name in ('config.json', 'tokenizer.json', 'tokenizer_config.json'):
        (base / name).write_bytes((type(tmp_path)(config.model.path) / name).read_bytes())
    config.model.path = str(base)
    assert read_inputs(config, weights=False).model.num_layers == 4
    with pytest.raises((ValueError, FileNotFoundError), match='safetensors'):
        read_inputs(config)


def test_more_tracked_prompts_than_there_are_is_refused(benchmark):
    with pytest.raises(ValueError, match=r'evaluate\.track_prompts=61 exceeds the 60 training prompts'):
        read_inputs(small_config('bapo_tuned', benchmark, evaluate__track_prompts=61))


# ---- a tokenizer that says what the questions say ---------------------------------------------------------------------

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</answer>{% endfor %}"  # in place of a mark: a token that the base has


@pytest.fixture
def asked(tmp_path, benchmark):
    """A function of questions, a task's template and a chat template: the config that asks them of a copy of the base, to spoil."""
    base = shutil.copytree(ROOT / 'configs' / 'quickstart_base', tmp_path / 'model')

    def make(*questions, template='text', chat_template=None):
        if chat_template:
            character_tokenizer(chat_template).save_pretrained(base)
        rows = [{'question': question, 'answer': '5'} for question in questions]
        (tmp_path / 'asked.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
        (tmp_path / 'held_out.jsonl').write_text(json.dumps({'question': 'one?', 'answer': '5'}) + '\n')
        return small_config(
            'grpo', benchmark, model__path=str(base), task__name='questions', task__template=template,
            task__train=str(tmp_path / 'asked.jsonl'), evaluate__benchmarks=(str(tmp_path / 'held_out.jsonl'),),
            task__limit=0, evaluate__track_prompts=0, rollout__max_prompt_tokens=200, learner__row_tokens=0,
        )  # fmt: skip

    return make


def without(config, letter):
    """A tokenizer that leaves a letter out, as one whose file is cut or edited does."""
    file = ROOT / config.model.path / 'tokenizer.json'
    content = json.loads(file.read_text())
    content['model']['vocab'].pop(letter, None)
    file.write_text(json.dumps(content))
    return config


def test_equal_questions_and_the_two_ways_to_write_a_letter_are_fine(asked):
    config = asked('one?', 'one?', 'caf\u00e9', 'cafe\u0301', *'3456', ' \u6570 \U0001f642\t\r\n')
    prompts = read_inputs(config).prompts
    assert len({p.tokens.tobytes() for p in prompts}) == 7 and len(prompts) == 8  # of a question and its answer one is kept


def test_held_out_questions_that_are_trained_on_and_contradictory_answers_are_noted(asked, tmp_path, caplog):
    config = asked('one?', 'two?', *'345678')
    with open(config.task.train, 'a') as rows:
        rows.write(json.dumps({'question': 'two?', 'answer': '6'}) + '\n')
    held_out, apart = tmp_path / 'held_out.jsonl', tmp_path / 'apart.jsonl'
    held_out.write_text(''.join(json.dumps({'question': q, 'answer': '7'}) + '\n' for q in ('new?', 'two?', 'one?')))
    apart.write_text(json.dumps({'question': 'new?', 'answer': '7'}) + '\n')
    config.evaluate.benchmarks = (str(held_out), str(apart))
    assert len(read_inputs(config).prompts) == 9
    assert [record.getMessage() for record in caplog.records] == [
        f"{config.task.train}: questions that are asked again with another answer, and all trained on: 1; the first is 'two?', with '5' and '6'",
        f'{held_out}: training also asks 2 of its 3 questions; the first is question 2. Its scores are not those of held-out questions',
    ]


def test_questions_that_the_tokenizer_does_not_tell_apart(asked):
    with pytest.raises(ValueError, match=r"model/tokenizer\.json: the tokens of the question zoo\?0 decode to oo\?0; .*another model"):
        read_inputs(without(asked(*(f'zoo?{i}' for i in range(9))), 'z'))
    many = [f'{i} oo?' for i in range(1000)]
    many[501] = 'z500 oo?'  # not in the sample of those that are read back
    with pytest.raises(ValueError, match=r"model/tokenizer\.json: the questions 500 oo\? and z500 oo\? have the same tokens"):
        read_inputs(without(asked(*many), 'z'))


def test_a_benchmark_is_read_back_too(asked):
    config = without(asked('zoo?'), 'z')
    config.evaluate.benchmarks = (config.task.train,)
    with pytest.raises(ValueError, match='model/tokenizer.json: the tokens of the question zoo'):
        benchmark_prompts(config, load_tokenizer(config.model.path))


@pytest.mark.parametrize('spoil, message', [
    (lambda model: (model / 'tokenizer.json').unlink(), 'no tokenizer.json there'),
    (lambda model: (model / 'generation_config.json').write_text('{"eos_token_id": 999}'), 'generation_config.json: eos_token_id 999'),
    (lambda model: None, None),
])  # fmt: skip
def test_training_and_evaluation_refuse_a_tokenizer_alike(spoil, message, asked, tmp_path):
    config = asked(*(f'one{i}?' for i in range(9)))
    spoil(tmp_path / 'model')
    for read in (read_inputs, lambda c: load_for_evaluation(tmp_path / 'model', c, None, None)):
        if message is None:
            read(config)
        else:
            with pytest.raises(ValueError, match=message):
                read(config)


@pytest.mark.parametrize('ends', [None, [256, 260]])
@pytest.mark.parametrize('template, chats', [('chat', True), ('text', False)])
def test_a_stop_token_ends_an_answer_where_the_questions_are_chats(template, chats, ends, asked, tmp_path):
    config = asked(*(f'one{i}?' for i in range(9)), template=template, chat_template=CHAT)
    if ends:
        (tmp_path / 'model' / 'generation_config.json').write_text(json.dumps({'eos_token_id': ends}))
    if chats and not ends:
        with pytest.raises(ValueError, match=r"generation_config\.json: the chat template ends an answer with '</answer>' \(token 260"):
            read_inputs(config)
    else:
        read = read_inputs(config)
        for prompts in (read.prompts, *read.benchmarks.values()):  # as evaluation does
            check_turn_end(read.config, prompts, read.tokenizer, read.stop_tokens)


def test_a_special_token_in_a_question_is_refused_before_anything_is_written(asked):
    said = r"task\.train=.*\.jsonl: a question has '<\|endoftext\|>', which the tokenizer reads as a special token"
    with pytest.raises(ValueError, match=said):
        read_inputs(asked('five?', 'five<|endoftext|>six', template='chat', chat_template='{{ messages[0].content }}'))
