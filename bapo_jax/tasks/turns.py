"""Chat templates: what messages may contain, what ends a turn and opens the next, whether a task uses one."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bapo_jax.tasks.jsonl import short

_TEXTS = ('Turn 0.', 'Turn 1.', 'Turn 2.')  # a probe chat, to see what templates write around it


def chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], **switch: Any) -> str:
    """Renders messages with the tokenizer's chat template and opens the assistant's turn.

    Raises ValueError as `refuse_markers` does.
    """
    for message in messages:
        refuse_markers(tokenizer, message['role'], message['content'])
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **switch)


def refuse_markers(tokenizer: Any, *texts: str) -> None:
    """Raises ValueError if a text contains what the tokenizer reads as a special token or a turn marker.

    Such a question would end its own turn, and answer itself or speak as the system.
    """
    marker = _markers(tokenizer)
    for text in texts:
        if marker and (found := marker.search(text)):
            around = text[max(0, found.start() - 40) : found.end() + 40]
            raise ValueError(
                f'a question has {found[0]!r}, which the tokenizer reads as a special token, so it could end '
                f'its own turn: …{short(around)}…; spell it differently, or drop the row'
            )


def turn_end(tokenizer: Any) -> str:
    """Returns what the chat template puts after an assistant's message; '' if nothing, or no such message."""
    _, found, after = _conversation(tokenizer, 2).rpartition(_TEXTS[1])
    return after.strip() if found else ''


def reply_text(tokenizer: Any, prompt: str, turn_token: str, reply: str) -> str:
    """Returns what follows a turn that ended with `turn_token`: the reply, and the opening of the next turn.

    If that token ends an assistant's message in the chat template, the reply is the user's next message. Then
    the assistant's turn is opened as `prompt` opened it, perhaps with a <think>. After any other token the
    policy continues behind the bare reply. A reply cannot end its own turn: it loses its special tokens.
    """
    marker = _markers(tokenizer)
    while marker and marker.search(reply):  # removing one may join the parts of another
        reply = marker.sub('', reply)
    if not turn_end(tokenizer).startswith(turn_token):
        return reply
    messages = [
        {'role': role, 'content': text}
        for role, text in zip(('user', 'assistant', 'user'), (*_TEXTS[:2], reply))
    ]
    asked = tokenizer.apply_chat_template(messages, tokenize=False)
    opened = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    opening = opened.removeprefix(asked)
    own = prompt.rpartition(opening)[2] if opening else ''
    return opened.partition(_TEXTS[1])[2].lstrip().removeprefix(turn_token) + own


def asks_in_chat(task: Any, ground_truth: Any, template: str, tokenizer: Any) -> bool:
    """Whether a task renders its `template` with the tokenizer's chat template."""
    other = copy.copy(tokenizer)
    other.chat_template = '{# enable_thinking #}'  # renders to nothing; tasks look for this word
    texts = [task.prompt_text(ground_truth, template, each) for each in (tokenizer, other)]
    return texts[0] != texts[1]


def as_chat(
    task: Any, ground_truth: Any, template: str, tokenizer: Any
) -> tuple[list[dict[str, str]], dict[str, Any], str] | None:
    """How a task renders a question by the chat template: messages, keywords, and the text that follows.

    None if it does not use the chat template. Raises ValueError as the task does.
    """
    calls: list[tuple[list[dict[str, str]], dict[str, Any]]] = []
    spy = copy.copy(tokenizer)
    spy.apply_chat_template = lambda messages, **keywords: calls.append((messages, keywords)) or ''
    task.prompt_text(ground_truth, template, spy)
    prompts = [call for call in calls if call[1].get('add_generation_prompt')]  # the others are probes
    if not prompts:
        return None
    [(messages, keywords)] = prompts
    text = task.prompt_text(ground_truth, template, tokenizer)
    return messages, keywords, text.removeprefix(tokenizer.apply_chat_template(messages, **keywords))


@functools.lru_cache(maxsize=4)
def _markers(tokenizer: Any) -> re.Pattern | None:
    """Matches special tokens, and other added tokens around messages: R1's <｜User｜> is not special."""
    added = getattr(tokenizer, 'added_tokens_decoder', {}).values()
    around = _conversation(tokenizer, 3) if added else ''
    found = [
        token.content
        for token in added
        if token.special or token.content in around and not _is_word(token.content)
    ]
    return re.compile('|'.join(map(re.escape, sorted(found, key=len, reverse=True)))) if found else None


def _is_word(token: str) -> bool:
    return not token.strip() or token.strip().isalnum()


def _conversation(tokenizer: Any, turns: int) -> str:
    """Renders a chat of user, assistant and user; '' without a chat template or if it refuses such a chat."""
    messages = [{'role': role, 'content': text} for role, text in zip(('user', 'assistant', 'user'), _TEXTS)][
        :turns
    ]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False) if tokenizer.chat_template else ''
    except TimeoutError:  # from a caller's timeout on rendering
        raise
    except Exception:  # a template may raise anything; rendering the prompts reports one that always does
        return ''
