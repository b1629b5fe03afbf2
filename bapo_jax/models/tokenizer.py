"""The tokenizer of a model directory, and the tokens that end a response."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def load_tokenizer(path: str | Path) -> Any:
    """The Hugging Face tokenizer in `path`. Raises ValueError where none loads."""
    os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')  # it would advise PyTorch, which the trainer does without
    from transformers import AutoTokenizer  # takes a second to import

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise ValueError(f'model.path={str(path)!r}: no tokenizer loads from there ({e}); fetch the model directory again') from e


def stop_tokens(path: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a response: the tokenizer's own, and those that generation_config.json or config.json names.

    Raises ValueError where there are none.
    """
    ends = {tokenizer.eos_token_id} - {None}
    for name in ('generation_config.json', 'config.json'):
        file = Path(path) / name
        named = json.loads(file.read_text('utf-8')).get('eos_token_id') if file.is_file() else None
        ends |= set(named if isinstance(named, list) else [named]) - {None}
    if not ends:
        raise ValueError(
            f'model.path={str(path)!r}: neither the tokenizer nor a config names an eos token, so no response could end'
        )
    return tuple(sorted(ends))


def character_tokenizer(chat_template: str | None = None) -> Any:
    """A Qwen2 tokenizer of single bytes and a few tags, for small policies. It represents text of any language.

    It has no merges. Qwen2's pre-tokenizer splits digits apart, and AutoTokenizer (so vLLM too) applies that one whatever the files
    say.
    """
    from tokenizers import AddedToken
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = {symbol: i for i, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], chat_template=chat_template)
    tags = ('<think>', '</think>', '<answer>', '</answer>')
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return tokenizer
