"""The character tokenizer as AutoTokenizer reads it back, which tokens end a response, and files of two models in one directory."""

import dataclasses
import json
import re
import shutil
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest

from bapo_jax.models.configs import read_config
from bapo_jax.models.tokenizer import character_tokenizer, load_tokenizer, read_tokenizer, stop_tokens

BASES = Path(__file__).parents[2] / 'configs'

TEXTS = (
    'Use [44, 19, 35] to make 98.\n\n<think> 44 + 19 = 63 </think>\n<answer> (44+19)+35 </answer>',
    ' leading and trailing  ',
    'naïve 数字 🙂 e\u0301\t\r\n',
    '<answer>1</answer><answer>2</answer>',
)
TAGS = ('<think>', '</think>', '<answer>', '</answer>')


@pytest.fixture(scope='module')
def made():
    return character_tokenizer('{% for m in messages %}{{ m.content }}{% endfor %}')


@pytest.fixture(scope='module')
def loaded(made, tmp_path_factory):
    path = tmp_path_factory.mktemp('tokenizer')
    made.save_pretrained(path)
    return load_tokenizer(path)


@pytest.mark.parametrize('text', TEXTS)
def test_saved_and_loaded_it_gives_the_same_ids_and_the_text_back(text, made, loaded):
    ids = made.encode(text, add_special_tokens=False)
    assert loaded.encode(text, add_special_tokens=False) == ids
    # Qwen2 normalises to NFC; apart from that every character survives.
    assert loaded.decode(ids, skip_special_tokens=True) == unicodedata.normalize('NFC', text)


def test_every_byte_is_one_token(loaded):
    assert len(loaded.encode('1 234+x', add_special_tokens=False)) == 7
    assert len(loaded.encode('é', add_special_tokens=False)) == 2


@pytest.mark.parametrize('tag', TAGS)
def test_a_tag_is_one_token_and_is_no_special_one(tag, loaded):
    ids = loaded.encode(f'a{tag}b', add_special_tokens=False)
    assert len(ids) == 3
    assert loaded.decode(ids, skip_special_tokens=True) == f'a{tag}b'


def test_the_end_token_is_special_and_in_the_vocabulary(loaded):
    assert loaded.eos_token_id is not None and loaded.eos_token_id < len(loaded)
    assert loaded.decode([*loaded.encode('ab'), loaded.eos_token_id], skip_special_tokens=True) == 'ab'


def test_the_chat_template_is_kept(loaded):
    assert loaded.apply_chat_template([{'role': 'user', 'content': 'hi'}], tokenize=False) == 'hi'


def test_no_tokenizer_is_an_error_that_names_the_field(tmp_path):
    with pytest.raises(ValueError, match='model.path=.*no tokenizer'):
        load_tokenizer(tmp_path / 'nowhere')


@pytest.mark.parametrize(
    'own, generation, model, want',
    [
        (7, None, None, (7,)),
        (None, {'eos_token_id': 5}, None, (5,)),
        (None, None, {'eos_token_id': 0}, (0,)),
        (7, {'eos_token_id': [9, 5]}, {'eos_token_id': 5}, (5, 7, 9)),
        (None, {'eos_token_id': None}, {'eos_token_id': [2]}, (2,)),
        (4, {}, {'eos_token_id': None}, (4,)),
    ],
)
def test_stop_tokens_are_all_that_anyone_names(own, generation, model, want, tmp_path):
    for name, fields in (('generation_config.json', generation), ('config.json', model)):
        if fields is not None:
            (tmp_path / name).write_text(json.dumps(fields))
    assert stop_tokens(tmp_path, SimpleNamespace(eos_token_id=own)) == want


def test_nothing_that_ends_a_response_is_an_error(tmp_path):
    (tmp_path / 'config.json').write_text('{"eos_token_id": null}')
    with pytest.raises(ValueError, match='model.path=.*eos'):
        stop_tokens(tmp_path, SimpleNamespace(eos_token_id=None))


@pytest.fixture
def model(tmp_path):
    """A copy of the base that sees, to spoil: config.json and tokenizer. Its tokens are 0 to 264."""
    base = BASES / 'diagrams_base'
    return shutil.copytree(base, tmp_path / 'model', ignore=shutil.ignore_patterns('*.safetensors'))


@pytest.mark.parametrize('base', ['quickstart_base', 'diagrams_base'])
def test_the_projects_bases_are_whole(base):
    tokenizer, ends = read_tokenizer(BASES / base, read_config(BASES / base))
    assert ends == (tokenizer.eos_token_id,) == (256,)


def vocabulary_in_two_files(path, merges=True):
    vocabulary = json.loads((path / 'tokenizer.json').read_text())['model']['vocab']
    (path / 'tokenizer.json').unlink()
    (path / 'vocab.json').write_text(json.dumps(vocabulary))
    if merges:
        (path / 'merges.txt').write_text('#version: 0.2\n')


def test_the_older_two_files_are_a_tokenizer_too(made, tmp_path):
    made.save_pretrained(tmp_path)
    vocabulary_in_two_files(tmp_path)
    assert load_tokenizer(tmp_path).encode(TEXTS[1]) == made.encode(TEXTS[1])


@pytest.mark.parametrize('spoil', [lambda path: (path / 'tokenizer.json').unlink(), lambda path: vocabulary_in_two_files(path, False)])
def test_without_its_file_no_tokenizer_is_made_up(spoil, model):
    """transformers makes an empty one, so that a run would train on empty prompts."""
    spoil(model)
    with pytest.raises(ValueError, match=r"model\.path=.*: no tokenizer\.json there, nor vocab\.json with merges\.txt"):
        load_tokenizer(model)


def test_a_tokenizer_without_words(model):
    content = json.loads((model / 'tokenizer.json').read_text())
    content['model']['vocab'], content['added_tokens'] = {'a': 0}, []
    (model / 'tokenizer.json').write_text(json.dumps(content))
    with pytest.raises(ValueError, match='tokenizer.json: the vocabulary is empty'):
        load_tokenizer(model)


def test_a_tokenizer_of_a_larger_model(model):
    config = read_config(model)
    read_tokenizer(model, dataclasses.replace(config, vocab_size=265))
    with pytest.raises(ValueError, match="tokenizer.json: '<.video_pad.>' is token 264, but the model has 264 embeddings"):
        read_tokenizer(model, dataclasses.replace(config, vocab_size=264))


@pytest.mark.parametrize('end', [999, [256, 999]])
@pytest.mark.parametrize('file', ['generation_config.json', 'config.json'])
def test_an_end_that_is_no_token(file, end, model):
    (model / file).write_text(json.dumps({'eos_token_id': end, 'model_type': 'qwen2'}))
    named = 'model/' + file.replace('.', r'\.')
    with pytest.raises(ValueError, match=rf'{named}: eos_token_id 999 is not a token of .*tokenizer\.json'):
        read_tokenizer(model, read_config(BASES / 'diagrams_base'))


def test_an_image_mark_that_is_no_token(model):
    (model / 'config.json').write_text((model / 'config.json').read_text().replace('"image_token_id": 262', '"image_token_id": 280'))
    with pytest.raises(ValueError, match=r'model/config\.json: image_token_id 280 is not a token of'):
        read_tokenizer(model, dataclasses.replace(read_config(model), vocab_size=300))


@pytest.mark.parametrize('file', ['generation_config.json', 'config.json'])
@pytest.mark.parametrize('text', ['[1]', 'null', '3', '{', '{"eos_token_id": "3"}', '{"eos_token_id": [3, null]}', '{"eos_token_id": {}}',
                                  '{"eos_token_id": true}', '{"eos_token_id": 3.0}', '{"eos_token_id": -1}'])  # fmt: skip
def test_a_config_of_another_shape_is_refused_by_name(file, text, tmp_path):
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=f'{file}: .*; correct it, or fetch the model directory again'):
        stop_tokens(tmp_path, SimpleNamespace(eos_token_id=1))


@pytest.mark.parametrize('file', ['tokenizer.json', 'tokenizer_config.json'])
@pytest.mark.parametrize('text', ['[1]', 'null', '"x"', '{', '{"model": 3}', '{"chat_template": 3, "added_tokens_decoder": [1]}', '\0'])
def test_tokenizer_files_of_any_shape_load_or_are_refused_by_the_field(file, text, made, tmp_path):
    made.save_pretrained(tmp_path)
    (tmp_path / file).write_text(text)
    try:
        load_tokenizer(tmp_path)
    except ValueError as error:
        assert re.match(r"model\.path='.*': its tokenizer does not load .*; fetch the model directory again|.*tokenizer\.json: the vocabulary is empty", str(error), re.DOTALL)


@pytest.mark.parametrize('file, text, said', [
    ('tokenizer_config.json', '[1]', 'tokenizer_config.json is not a JSON object'),
    ('tokenizer_config.json', '{"eos_token": "x', 'tokenizer_config.json is not valid JSON: Unterminated'),
    ('tokenizer.json', '{"version": ', 'tokenizer.json is not valid JSON: Expecting value'),
])  # fmt: skip
def test_the_damaged_file_of_a_tokenizer_is_named(file, text, said, made, tmp_path):
    made.save_pretrained(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=rf'its tokenizer does not load \({re.escape(said)}.*fetch the model directory again'):
        load_tokenizer(tmp_path)
