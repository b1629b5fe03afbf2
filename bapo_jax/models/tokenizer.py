"""The tokenizer of a model directory, checked against its model, and the tokens that end a response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bapo_jax.models.decoder import ModelConfig

# Any of these holds a vocabulary.
_FILES = (('tokenizer.json',), ('vocab.json', 'merges.txt'), ('tokenizer.model',))
_NAMING_ENDS = ('generation_config.json', 'config.json')


def read_tokenizer(path: str | Path, model: ModelConfig) -> tuple[Any, tuple[int, ...]]:
    """Returns the tokenizer in `path` and the tokens that end a response, all of them tokens of `model`.

    Raises ValueError, naming the file, if no tokenizer loads, no token ends a response, a token has no
    embedding, or a named token is not in the vocabulary.
    """
    tokenizer = load_tokenizer(path)
    ends, known = stop_tokens(path, tokenizer), tokenizer.get_vocab()
    last = max(known, key=known.get)
    if known[last] >= model.vocab_size:
        raise ValueError(
            f'{tokenizer_file(path)}: {last!r} is token {known[last]}, but the model has {model.vocab_size} '
            'embeddings (vocab_size of config.json); the tokenizer belongs to another model: fetch the '
            'model directory again'
        )
    image = model.vision.image_token if model.vision else None
    for token, field in [(end, 'eos_token_id') for end in ends] + [(image, 'image_token_id')] * (
        image is not None
    ):
        if token not in known.values():
            raise ValueError(
                f'{_naming(Path(path), field, token)}: {field} {token} is not a token of '
                f'{tokenizer_file(path)}; the files '
                'belong to different models: fetch the model directory again'
            )
    return tokenizer, ends


def _naming(path: Path, field: str, token: int) -> Path:
    """Returns the file whose `field` names a token."""
    for file in (path / name for name in _NAMING_ENDS):
        named = json.loads(file.read_text('utf-8')).get(field) if file.is_file() else None
        if token == named or isinstance(named, list) and token in named:
            return file
    return path / 'config.json'


def tokenizer_file(path: str | Path) -> Path:
    """Returns the file with the vocabulary.

    Raises ValueError if it is missing: transformers would then make an empty tokenizer.
    """
    for files in _FILES:
        if all((Path(path) / name).is_file() for name in files):
            return Path(path) / files[0]
    raise ValueError(
        f'model.path={str(path)!r}: no tokenizer.json there, nor vocab.json with merges.txt, nor '
        'tokenizer.model; fetch the model directory again'
    )


def load_tokenizer(path: str | Path) -> Any:
    """Returns the Hugging Face tokenizer in `path`. Raises ValueError if it does not load."""
    tokenizer_file(path)
    from transformers import AutoTokenizer  # takes a second to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # malformed files raise errors of any kind
        said = _unreadable(Path(path)) or f'{type(e).__name__}: {str(e)[:300]}'
        raise ValueError(
            f'model.path={str(path)!r}: its tokenizer does not load ({said}); fetch the model directory again'
        ) from e
    if not tokenizer.encode('1 + 1', add_special_tokens=False):
        raise ValueError(
            f'{tokenizer_file(path)}: the vocabulary is empty, and so every question would be; fetch the '
            'model directory again'
        )
    return tokenizer


def _unreadable(path: Path) -> str:
    """Returns which of a tokenizer's files is not a JSON object, and why; '' if all are."""
    for name in (
        'tokenizer_config.json',
        'tokenizer.json',
        'special_tokens_map.json',
        'added_tokens.json',
        'vocab.json',
    ):
        file = path / name
        try:
            if file.is_file() and not isinstance(json.loads(file.read_text('utf-8')), dict):
                return f'{name} is not a JSON object'
        except (ValueError, RecursionError) as e:
            return f'{name} is not valid JSON: {str(e)[:200]}'
    return ''


def stop_tokens(path: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens that end a response: the tokenizer's own, and those named in the model's configs.

    The configs are generation_config.json and config.json. Raises ValueError if there are no such tokens.
    """
    ends = {tokenizer.eos_token_id} - {None}
    for name in _NAMING_ENDS:
        file = Path(path) / name
        named = _eos(file) if file.is_file() else None
        ends |= set(named if isinstance(named, list) else [named]) - {None}
    if not ends:
        raise ValueError(
            f'model.path={str(path)!r}: neither the tokenizer nor a config names an eos token, so no '
            'response could end; set eos_token in tokenizer_config.json'
        )
    return tuple(sorted(ends))


def _eos(file: Path) -> Any:
    """Returns the eos_token_id of a config: a token, a list of tokens, or None.

    Raises ValueError, naming the file, if it is anything else.
    """
    try:
        config = json.loads(file.read_text('utf-8'))
        if not isinstance(config, dict):
            raise ValueError('it is not a JSON object')
        named = config.get('eos_token_id')
        tokens = named if isinstance(named, list) else [] if named is None else [named]
        if not all(type(token) is int and token >= 0 for token in tokens):
            raise ValueError(f'eos_token_id={str(named)[:100]} must be a token or a list of tokens')
        return named
    except (ValueError, RecursionError) as e:
        raise ValueError(f'{file}: {str(e)[:200]}; correct it, or fetch the model directory again') from e


def character_tokenizer(chat_template: str | None = None) -> Any:
    """Returns a Qwen2 tokenizer of single bytes and a few tags, for small policies and text in any language.

    It has no merges. Qwen2's pre-tokenizer splits digits apart, and AutoTokenizer (so also vLLM) applies it
    whatever the files say.
    """
    from tokenizers import AddedToken
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = {symbol: i for i, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], chat_template=chat_template)
    tags = ('<think>', '</think>', '<answer>', '</answer>')
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return tokenizer
