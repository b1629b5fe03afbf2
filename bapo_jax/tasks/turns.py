"""Chat templates: what messages may hold, what ends an answer's turn, and whether a task's template is one at all."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bapo_jax.tasks.jsonl import short

_TEXTS = ('Turn 0.', 'Turn 1.', 'Turn 2.')  # of a conversation that shows what a chat template writes around them


def chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], **switch: Any) -> str:
    """The messages through the tokenizer's chat template, the assistant's turn opened. Raises ValueError as `refuse_markers`."""
    for message in messages:
        refuse_markers(tokenizer, message['role'], message['content'])
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **switch)


def refuse_markers(tokenizer: Any, *texts: str) -> None:
    """Raises ValueError where a text of the data holds what the tokenizer reads as a special token or as the mark of a turn.

    Such a question would end its own turn, and answer itself or speak as the system.
    """
    marker = _markers(tokenizer)
    for text in texts:
        if marker and (found := marker.search(text)):
            around = text[max(0, found.start() - 40) : found.end() + 40]
            raise ValueError(
                f'a question has {found[0]!r}, which the tokenizer reads as a special token that only the chat template may write: '
                f'…{short(around)}…; spell it otherwise, or drop the row'
            )


def turn_end(tokenizer: Any) -> str:
    """What the chat template writes behind an assistant's message; '' where it writes nothing, or no such message."""
    _, found, after = _conversation(tokenizer, 2).rpartition(_TEXTS[1])
    return after.strip() if found else ''


def asks_in_chat(task: Any, ground_truth: Any, template: str, tokenizer: Any) -> bool:
    """Whether a task renders its `template` through the tokenizer's chat template."""
    other = copy.copy(tokenizer)
    other.chat_template = '{# enable_thinking #}'  # writes nothing; the word is what tasks look for
    texts = [task.prompt_text(ground_truth, template, each) for each in (tokenizer, other)]
    return texts[0] != texts[1]


@functools.lru_cache(maxsize=4)
def _markers(tokenizer: Any) -> re.Pattern | None:
    """Matches the special tokens, and the other added ones that stand around messages: R1's <｜User｜> is no special one."""
    added = getattr(tokenizer, 'added_tokens_decoder', {}).values()
    around = _conversation(tokenizer, 3) if added else ''
    found = [token.content for token in added if token.special or token.content in around and not _is_word(token.content)]
    return re.compile('|'.join(map(re.escape, sorted(found, key=len, reverse=True)))) if found else None


def _is_word(token: str) -> bool:
    return not token.strip() or token.strip().isalnum()


def _conversation(tokenizer: Any, turns: int) -> str:
    """A chat of user, assistant and user through the chat template; '' without one, and where it takes no such chat."""
    messages = [{'role': role, 'content': text} for role, text in zip(('user', 'assistant', 'user'), _TEXTS)][:turns]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False) if tokenizer.chat_template else ''
    except TimeoutError:  # of whoever bounds the rendering
        raise
    except Exception:  # a template may raise anything; the prompts' own rendering says what is wrong with one that always does
        return ''
