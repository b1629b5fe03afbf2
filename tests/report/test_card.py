"""The model card: a run's records, and nothing of the machine; its settings make the run's config again."""

import re

import pytest
from huggingface_hub import ModelCard
from small_run import small_config

from bapo_jax.config import fields_that, resolve, value
from bapo_jax.config.field import AMEND, HELD
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.report.card import Exported, OfAdapter, model_card
from bapo_jax.tasks import get_task

COMMITS = {'Qwen/Tiny@v1': 'a' * 40, 'datasets/owner/cd': 'b' * 40}


def exported(tmp_path, **changes):
    c = resolve(small_config('dapo', tmp_path / 'few.jsonl'))
    c.model.path, c.task.train = 'Qwen/Tiny@v1', 'owner/cd/main:train'
    known = {**c.to_dict(), 'hub': COMMITS, 'environment': {'devices': '2 cpu', 'jax': '0.10.2'}}
    e = Exported('me/mine', 1200, 'bfloat16', False, known, {}, {}, 'c0ffee')
    return e._replace(**changes)


def settings_in(card):
    """The config that the card's own file returns."""
    names = {}
    exec(re.findall(r'^```python\n(.*?)^```', card, re.MULTILINE | re.DOTALL)[1], names)
    return names['get_config']()


def test_a_card_says_what_the_run_recorded(tmp_path):
    e = exported(tmp_path)
    e.run_config['task']['reward'] = 'my_rewards:one_word'
    card = model_card(e)
    for row in (
        f'| base model | Qwen/Tiny@v1, commit {"a" * 40} |',
        f'| training data | owner/cd/main:train, commit {"b" * 40}, 60 questions at most |',
        '| task | countdown, template compact |',
        '| reward | my_rewards:one_word |',
        '| steps | 1,200, each on 8 prompts × 4 responses |',
        '| learning rate | 5e-05, constant |',
        '| trained on | devices 2 cpu, jax 0.10.2 |',
        '| weights | bfloat16 |',
    ):
        assert row in card.splitlines()
    assert '| method | dapo: DAPO' in card and ', commit c0ffee.' in card
    data = ModelCard(card).data
    assert (data.base_model, data.datasets, data.library_name, data.license) == ('Qwen/Tiny', ['owner/cd'], 'transformers', None)
    assert data.pipeline_tag == 'text-generation' and data.tags == ['bapo_jax', 'rlvr', 'dapo']


def test_the_settings_of_a_card_make_the_config_of_the_run_again(tmp_path):
    e = exported(tmp_path)
    again = resolve(settings_in(model_card(e)))
    for name in (*fields_that(HELD), *fields_that(AMEND), 'model.path', 'steps', 'evaluate.samples', 'evaluate.temperature'):
        want = e.run_config
        for part in name.split('.'):
            want = want[part]
        assert value(again, name) == want, name


def test_a_card_names_no_folder_of_the_machine(tmp_path):
    e = exported(tmp_path)
    e.run_config['model']['path'] = str(tmp_path / 'base')
    e.run_config['task']['train'] = str(tmp_path / 'questions.jsonl')
    e.run_config['rollout']['server']['python'] = str(tmp_path / 'python')
    card = model_card(e)
    assert '| base model | base |' in card and '| training data | questions.jsonl,' in card and 'few.jsonl' in card
    assert str(tmp_path) not in card and 'base_model' not in card and 'datasets:' not in card


def test_the_card_of_an_adapter_reads_its_base_first(tmp_path):
    adapter = OfAdapter(12, 'Qwen/Tiny', 'a' * 40, on_hub=True)
    e = exported(tmp_path, adapter=adapter)
    e.run_config['model']['adapter'].update(rank=12, start=str(tmp_path / 'first'))
    card = model_card(e)
    data, base = ModelCard(card).data, f"from_pretrained('Qwen/Tiny', revision='{'a' * 40}')"
    assert (data.base_model, data.library_name, data.pipeline_tag) == ('Qwen/Tiny', 'peft', 'text-generation')
    assert '\nA LoRA adapter of rank 12 for Qwen/Tiny after 1,200 steps' in card
    read = f"tokenizer = AutoTokenizer.{base}\nbase = AutoModelForCausalLM.{base}\nmodel = PeftModel.from_pretrained(base, 'me/mine')\n"
    assert f'\n{read}' in card
    serve = f'vllm serve Qwen/Tiny --revision {"a" * 40} --enable-lora --max-lora-rank 16 --lora-modules mine=me/mine'
    assert f'\nWith vLLM: `{serve}`, where requests name the model `mine`.\n' in card
    assert value(settings_in(card), 'model.adapter.start') == 'first' and str(tmp_path) not in card
    assert all(compile(code, 'card', 'exec') for code in re.findall(r'^```python\n(.*?)^```', card, re.MULTILINE | re.DOTALL))


def test_the_card_of_an_adapter_says_only_what_can_read_it(tmp_path):
    adapter = OfAdapter(12, 'base', '', on_hub=False)
    card = model_card(exported(tmp_path, adapter=adapter, run_config=None))
    assert 'A LoRA adapter of rank 12 for base, exported by bapo_jax. No run' in card and ModelCard(card).data.base_model is None
    assert '`vllm serve base --enable-lora --max-lora-rank 16 --lora-modules mine=me/mine`' in card
    assert 'vllm' not in model_card(exported(tmp_path, adapter=adapter._replace(rank=513)))  # vLLM serves 512 at most
    images = model_card(exported(tmp_path, adapter=adapter, sees_images=True))
    assert 'vllm' not in images and 'from_pretrained' not in images and 'bapo-export --checkpoint=DIR --base=BASE' in images


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>{% if enable_thinking is false %}</think>{% endif %}"


def text_of(card, tokenizer):
    """The prompt that the card's own lines make."""
    use = re.search(r'^```python\n(.*?)^```', card, re.MULTILINE | re.DOTALL)[1]
    [lines] = re.findall(r'^((?:messages|text) = .*)^prompt = ', use, re.MULTILINE | re.DOTALL)
    names = {'tokenizer': tokenizer}
    exec(lines, names)
    return names['text']


@pytest.mark.parametrize(('task', 'template', 'truth'), [
    ('questions', 'chat', {'question': 'A question?'}),
    ('questions', 'no_thinking', {'question': 'A question?'}),
    ('questions', 'text', {'question': 'A question?'}),
    ('math', 'qwen2.5_math', {'problem': 'A question?', 'answers': ['1']}),
    ('math', 'qwen3_no_thinking', {'problem': 'A question?', 'answers': ['1']}),
    ('math', 'r1', {'problem': 'A question?', 'answers': ['1']}),
    ('countdown', 'examples', {'numbers': [25, 4, 2], 'target': 54}),
    ('countdown', 'compact', {'numbers': [25, 4, 2], 'target': 54}),
    ('arithmetic', 'chat', {'a': 12, 'b': 34, 'sign': '+'}),
])  # fmt: skip
def test_a_card_asks_as_the_run_did(task, template, truth, tmp_path):
    tokenizer = character_tokenizer(CHAT)
    e = exported(tmp_path, tokenizer=tokenizer)
    e.run_config['task'].update(name=task, template=template)
    card = model_card(e)
    assert text_of(card, tokenizer) == get_task(task).prompt_text(truth, template, tokenizer)
    # Not as a text that the reader could not change.
    assert ('tokenizer.apply_chat_template(messages, ' in card) == (template not in ('text', 'compact'))


def test_a_card_of_an_unknown_task_asks_in_the_chat_template_if_there_is_one(tmp_path):
    for e in (exported(tmp_path), exported(tmp_path, run_config=None)):
        (e.run_config or {}).get('task', {}).update(name='my_tasks.chess', template='x')
        assert text_of(model_card(e._replace(tokenizer=(chats := character_tokenizer(CHAT)))), chats) == '<user>A question?<assistant>'
        assert text_of(model_card(e), None) == 'A question?'


def test_scores_stand_side_by_side_with_their_intervals(tmp_path):
    few = {'samples': 4, 'questions': 9, 'mean': 0.25, 'interval': [0.2, 0.3], 'pass': 0.5, 'pass_interval': [0.4, 0.6]}
    scores = {'base': {'/data/few.jsonl': few}, 'trained': {'/data/few.jsonl': few | {'mean': 0.5}, 'other': few}}
    lines = model_card(exported(tmp_path, scores=scores)).splitlines()
    assert '| few, mean@4, 9 problems | 25.0 (20.0 to 30.0) | 50.0 (20.0 to 30.0) |' in lines
    assert '| other, pass@4, 9 problems | – | 50.0 (40.0 to 60.0) |' in lines
    scores = {policy: {f'/data/{name}/few.jsonl': few | {'mean': mean} for name, mean in (('a', 0.25), ('b', 0.75))} for policy in ('base', 'trained')}
    scores['trained'] |= {'few.jsonl': few, 'owner/few:test': few}
    card = model_card(exported(tmp_path, scores=scores))
    assert '| a/few.jsonl, mean@4, 9 problems | 25.0 (20.0 to 30.0) | 25.0 (20.0 to 30.0) |' in card.splitlines()
    assert '| b/few.jsonl, mean@4, 9 problems | 75.0 (20.0 to 30.0) | 75.0 (20.0 to 30.0) |' in card.splitlines()
    assert '\n| few.jsonl, mean@4, ' in card and '\n| few:test, mean@4, ' in card and '/data' not in card
    assert 'The run did not evaluate this policy.' in model_card(exported(tmp_path))


def test_what_a_config_says_does_not_break_the_tables(tmp_path):
    e = exported(tmp_path, name="it's me")
    e.run_config['task']['reward'] = 'a|b\nc'
    card = model_card(e)
    assert '| reward | a\\|b c |' in card and "vllm serve 'it'\"'\"'s me'" in card
    assert all(compile(code, 'card', 'exec') for code in re.findall(r'^```python\n(.*?)^```', card, re.MULTILINE | re.DOTALL))


def test_a_policy_of_no_known_run_says_so(tmp_path):
    card = model_card(exported(tmp_path, run_config=None, sees_images=True, license={'license': 'mit'}))
    assert 'this card does not say how' in card and 'AutoModelForImageTextToText' in card and 'bapo-train' not in card
    assert 'Its config and tokenizer' not in card
    assert 'Its config and tokenizer are those of tiny.\n' in model_card(exported(tmp_path, run_config=None, base='tiny'))
    assert ModelCard(card).data.license == 'mit' and ModelCard(card).data.pipeline_tag == 'image-text-to-text'


def test_a_damaged_record_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match='task of config.json is not a section; restore that file'):
        model_card(exported(tmp_path, run_config={'task': 'x'}))
    for damaged in ('x', [1], None):
        with pytest.raises(ValueError, match='environment of config.json is not a section; restore that file'):
            model_card(exported(tmp_path, run_config={'environment': damaged}))
