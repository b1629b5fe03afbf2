"""Traces: rows of a file are checked, each text ends with one stop token, and what is too long is left out."""

import json

import numpy as np
import pytest
from small_run import small_config

from bapo_jax.config import resolve
from bapo_jax.groups import NO_VERSION, Author, Prompt, Verdict
from bapo_jax.models.tokenizer import character_tokenizer, load_tokenizer
from bapo_jax.tasks import get_task, solver_of
from bapo_jax.tasks.traces import read_traces, solved, traces_of

CHAT = '{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}'


def written(path, *rows):
    path.write_text(''.join((row if isinstance(row, str) else json.dumps(row)) + '\n' for row in rows))
    return str(path)


def row(prompt_id, text='1+1=2'):
    return {'prompt_id': prompt_id, 'text': text}


@pytest.fixture
def config(benchmark):
    return lambda **changes: resolve(small_config('luffy', benchmark, **changes))


@pytest.fixture
def tokenizer(config):
    return load_tokenizer(config().model.path)


def prompts(*prompt_ids):
    return [Prompt(i, 'countdown', np.arange(3, dtype=np.int32), {'numbers': [1, 1 + i], 'target': 2 + i}) for i in prompt_ids]


@pytest.mark.parametrize(
    ('rows', 'message'),
    [
        ([row(0), 'not json'], r'file\.jsonl, row 2: not a line of JSON'),
        ([row(0), ['a']], r'file\.jsonl, row 2: expected an object with "prompt_id" \(a whole number\) and "text"'),
        ([row('one')], r'row 1: "prompt_id" must be a whole number, the place of a problem in task\.train from 0, got \'one\''),
        ([row(True)], r'row 1: "prompt_id" must be a whole number'),
        ([{'text': 'a'}], r'row 1: "prompt_id" must be a whole number.*got None'),
        ([row(0), {'prompt_id': 1}], r'row 2: "text" must be the text of a response, got None'),
        ([row(0, ' \n')], r"row 1: \"text\" must be the text of a response, got ' \\n'; correct the row, or remove it"),
        ([row(5)], r'row 1: "prompt_id" is 5, but task\.train has 5 problems, from 0 to 4; remove the row, or train on all problems \(task\.limit=0\)'),
        ([row(-1)], r'row 1: "prompt_id" is -1'),
        ([row(2), row(3), row(2)], r'row 3: "prompt_id" 2 has a trace already, in .*row 1; keep one of the two'),
        ([], r'file\.jsonl: no rows; expected columns "prompt_id"'),
    ],
)
def test_a_bad_row_is_an_error_that_names_field_file_row_and_remedy(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        read_traces(written(tmp_path / 'file.jsonl', *rows), 5)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'none\.jsonl: no such file; check the path'):
        read_traces(str(tmp_path / 'none.jsonl'), 5)


def test_a_trace_is_one_span_of_another_author_that_ends_with_the_stop_token(tmp_path, config, tokenizer):
    stop = tokenizer.eos_token_id
    texts = {1: '1+1=2', 2: '1+2=3' + tokenizer.decode([stop])}  # the second has its stop token already
    file = written(tmp_path / 'file.jsonl', *(row(i, text) for i, text in texts.items()))
    traces = traces_of(config(replay__traces__file=file), prompts(0, 1, 2), 3, tokenizer, (stop,))
    assert list(traces.responses) == [1, 2]
    for i, response in traces.responses.items():
        [span] = response.spans
        assert (span.author, span.logp, span.version, response.finish) == (Author.TRACE, None, NO_VERSION, 'stop')
        assert span.tokens.dtype == np.int32 and span.tokens[-1] == stop and (span.tokens[:-1] != stop).all()
        assert tokenizer.decode(span.tokens, skip_special_tokens=True) == texts[i][:5]


def test_a_stop_token_within_a_text_is_an_error(tmp_path, config, tokenizer):
    stop = tokenizer.decode([tokenizer.eos_token_id])
    file = written(tmp_path / 'file.jsonl', row(0), row(1, f'1+1{stop}=2'))
    with pytest.raises(ValueError, match=r'file\.jsonl, row 2: "text" has a stop token before its end.*remove what follows it'):
        traces_of(config(replay__traces__file=file), prompts(0, 1), 2, tokenizer, (tokenizer.eos_token_id,))


def test_a_trace_of_more_tokens_than_a_response_may_have_is_left_out(tmp_path, config, tokenizer, caplog):
    """48 tokens with the stop token fit, 49 do not. What is left out is still part of the fingerprint."""
    fits, longer = '1' * 47, '1' * 48
    assert len(tokenizer.encode(fits)) == 47
    both = written(tmp_path / 'both.jsonl', row(0, fits), row(1, longer))
    one = written(tmp_path / 'one.jsonl', row(0, fits))
    ends = (tokenizer.eos_token_id,)
    of_both, of_one = (traces_of(config(replay__traces__file=f), prompts(0, 1), 2, tokenizer, ends) for f in (both, one))
    assert list(of_both.responses) == [0] and len(of_both.responses[0].tokens) == 48
    assert '1 of 2 traces are longer than rollout.max_response_tokens=48 and are left out; raise it to keep them (the longest has 49' in caplog.text
    assert of_both.fingerprint != of_one.fingerprint
    none = written(tmp_path / 'none.jsonl', row(1, longer))
    with pytest.raises(ValueError, match=r'none of its 1 traces has at most rollout\.max_response_tokens=48 tokens'):
        traces_of(config(replay__traces__file=none), prompts(0, 1), 2, tokenizer, ends)


def test_a_trace_of_a_prompt_that_is_too_long_to_be_asked_is_not_used(tmp_path, config, tokenizer):
    file = written(tmp_path / 'file.jsonl', row(0), row(1))
    traces = traces_of(config(replay__traces__file=file), prompts(1, 2), 3, tokenizer, (tokenizer.eos_token_id,))
    assert list(traces.responses) == [1]


def test_the_fingerprint_is_of_prompts_and_texts_and_not_of_their_order_or_the_path(tmp_path, config, tokenizer):
    def fingerprint(name, *rows):
        file = written(tmp_path / name, *rows)
        return traces_of(config(replay__traces__file=file), prompts(0, 1, 2), 3, tokenizer, (tokenizer.eos_token_id,)).fingerprint

    first = fingerprint('a.jsonl', row(0), row(1, 'x'))
    assert first == fingerprint('b.jsonl', row(1, 'x'), row(0))
    assert len({first, fingerprint('c.jsonl', row(0), row(1, 'y')), fingerprint('d.jsonl', row(0), row(2, 'x'))}) == 3


def test_without_a_file_the_solver_writes_correct_traces_the_same_ones_for_a_seed(config, tokenizer):
    c, stop = config(), tokenizer.eos_token_id
    assert c.replay.given_by == 'solver' and not c.replay.traces.file
    asked = prompts(0, 1, 2)
    traces = traces_of(c, asked, 3, tokenizer, (stop,))
    again = traces_of(c, asked[1:], 3, tokenizer, (stop,))
    assert list(traces.responses) == [0, 1, 2]
    for i, response in again.responses.items():
        np.testing.assert_array_equal(response.tokens, traces.responses[i].tokens)
    for prompt in asked:
        text = tokenizer.decode(traces.responses[prompt.id].tokens, skip_special_tokens=True)
        assert get_task('countdown').verify(text, prompt.ground_truth)[0] == Verdict.CORRECT
    unsolvable = Prompt(3, 'countdown', asked[0].tokens, {'numbers': [1, 1], 'target': 99})
    assert list(solved([*asked, unsolvable], solver_of(c, tokenizer), 1, stop)) == [0, 1, 2]


def test_without_a_source_of_traces_the_message_names_both(config, tokenizer):
    c = config(replay__given_by='policy')
    with pytest.raises(ValueError, match=r'replay\.kind=luffy learns from traces.*set replay\.traces\.file .*or replay\.given_by=solver'):
        traces_of(c, prompts(0), 1, tokenizer, (tokenizer.eos_token_id,))


def test_a_task_without_solutions_in_the_prompts_style_is_refused_with_the_remedy(config, tokenizer):
    with pytest.raises(ValueError, match=r'replay\.given_by=solver: task\.name=countdown only has solutions for the templates compact, .*set replay\.traces\.file'):
        traces_of(config(task__template='tinyzero'), prompts(0), 1, tokenizer, (tokenizer.eos_token_id,))


def test_a_trace_of_a_chat_ends_as_the_template_ends_a_turn(tmp_path, config):
    tokenizer = character_tokenizer(CHAT)
    tokenizer.add_special_tokens({'additional_special_tokens': ['<|im_start|>', '<|im_end|>']})
    ends = (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids('<|im_end|>'))
    file = written(tmp_path / 'file.jsonl', row(0))
    c = config(replay__traces__file=file, task__name='arithmetic', task__template='chat', evaluate__benchmarks=())
    sums = [Prompt(0, 'arithmetic', np.arange(3, dtype=np.int32), {'a': 1, 'sign': '+', 'b': 1})]
    assert traces_of(c, sums, 1, tokenizer, ends).responses[0].tokens[-1] == ends[1]
    # A template that is not a chat, or an end that is no stop token: the tokenizer's own.
    assert traces_of(config(replay__traces__file=file), prompts(0), 1, tokenizer, ends).responses[0].tokens[-1] == ends[0]
    assert traces_of(c, sums, 1, tokenizer, ends[:1]).responses[0].tokens[-1] == ends[0]
