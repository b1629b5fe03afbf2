"""The character tokenizer as AutoTokenizer reads it back, and which tokens end a response."""

import json
import unicodedata
from types import SimpleNamespace

import pytest

from bapo_jax.models.tokenizer import character_tokenizer, load_tokenizer, stop_tokens

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
