"""The wire format: what a server states comes out exactly, and what cannot be trained on is refused by name."""

import email.utils
import json
import time

import numpy as np
import pytest
from group_builders import version_of
from hypothesis import given, strategies as st

from bapo_jax.groups import Prompt
from bapo_jax.rollout.engine import RolloutError, Sampling
from bapo_jax.rollout.vllm.replies import (
    Asked,
    BadResponse,
    Load,
    OtherPolicy,
    read_group,
    read_load,
    read_results,
    read_served,
    read_success,
    request,
    seconds_to_wait,
)  # fmt: skip
from benchmarks.engine.replaying_server import Sampled, encode, reply

SERVER = 'http://there:8000'
VOCABULARY, STOP, POLICY = 1000, 3, '7-0a1b2c3d'


def read(said, group_size=2, max_tokens=4):
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    return read_group(body, Asked(group_size, max_tokens, (POLICY,), VOCABULARY, (STOP, 4)), SERVER)


def test_a_request_asks_for_the_group_of_one_prompt_without_a_seed():
    prompt = Prompt(3, 'countdown', np.array([5, 6], np.int32), {})
    assert request(prompt, 8, Sampling(0.6, 128, 0.95), [2, 3]) == {
        'token_ids': [5, 6],
        'sampling_params': {
            'n': 8, 'temperature': 0.6, 'top_p': 0.95, 'max_tokens': 128, 'logprobs': 0, 'stop_token_ids': [2, 3], 'detokenize': False,
        },
    }  # fmt: skip


class Sees:
    """A stand-in for a sight: each image has three features, and its URL is its name."""

    def collapsed(self, tokens, images):
        return np.array([t for i, t in enumerate(tokens) if not (t == MARK and tokens[i - 1] == MARK)], np.int32)

    def data_url(self, image):
        return f'data:{image}'


MARK = 9
SEEN = Prompt(3, 'geometry', np.array([5, MARK, MARK, MARK, 6, MARK, MARK, MARK], np.int32), {'images': ['a', 'b']})


def test_a_request_with_images_has_one_token_in_the_place_of_each_and_asks_what_was_read():
    said = request(SEEN, 8, Sampling(0.6, 128), [2], Sees())
    text = request(Prompt(3, 'geometry', np.array([5, MARK, 6, MARK], np.int32), {}), 8, Sampling(0.6, 128), [2], Sees())
    assert said == text | {
        'content_parts': [{'type': 'image_url', 'url': 'data:a'}, {'type': 'image_url', 'url': 'data:b'}], 'return_token_ids': True,
    }  # fmt: skip
    assert list(text) == ['token_ids', 'sampling_params'] and text['token_ids'] == [5, MARK, 6, MARK]


# Above -9999, which stands for nan and -inf.
LOGPROBS = st.floats(min_value=-9998, max_value=0, width=32)


@st.composite
def sampled(draw):
    pairs = draw(st.lists(st.tuples(st.integers(STOP + 2, VOCABULARY - 1), LOGPROBS), min_size=1, max_size=40))
    tokens, logp = map(list, zip(*pairs, strict=True))
    finish = 'length' if len(tokens) == 40 else 'stop'
    if finish == 'stop':
        tokens[-1] = STOP
    return Sampled(np.array(tokens, np.int32), np.array(logp, np.float32), np.ones(len(pairs), np.int32), finish)


@given(st.lists(sampled(), min_size=1, max_size=5), st.randoms())
def test_what_a_server_states_comes_out_exactly(group, random):
    """Bit for bit, whatever the order in which the responses stand."""
    said = reply(group, POLICY)
    random.shuffle(said['choices'])
    responses = read_group(encode(said), Asked(len(group), 40, (POLICY,), VOCABULARY, (STOP, 4)), SERVER)
    for response, stated in zip(responses, group, strict=True):
        assert (response.tokens.dtype, response.logp.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(response.tokens, stated.tokens)
        np.testing.assert_array_equal(response.logp.view(np.int32), stated.logp.view(np.int32))
        assert (response.finish, version_of(response)) == (stated.finish, 7)


def choice(index, **changes):
    """A sound member of a group."""
    sound = {
        'index': index, 'token_ids': [5, 6, 3], 'logprobs': {'content': [{'logprob': -0.5}] * 3}, 'finish_reason': 'stop',
        'weight_versions': [{'version': POLICY, 'start': 0, 'end': 3}],
    }  # fmt: skip
    return sound | changes


@pytest.mark.parametrize(
    'spoiled, message',
    [
        ({'weight_versions': [{'version': '6', 'start': 0, 'end': 3}]}, r"is of policy \['6'\] instead of 7-0a1b2c3d"),
        ({'weight_versions': [{'version': v, 'start': 0, 'end': 3} for v in ('6', POLICY)]}, r"is of policy \['6', '7-0a1b2c3d'\]"),
        ({'weight_versions': None}, r'is of policy \[\]'),
        ({'token_ids': [], 'logprobs': {'content': []}}, 'has 0 tokens instead of 1 to 4'),
        ({'token_ids': [5] * 5, 'logprobs': {'content': [{'logprob': -1.0}] * 5}}, 'has 5 tokens instead of 1 to 4'),
        ({'token_ids': [5, 3]}, 'has 2 tokens but 3 log-probs'),
        ({'token_ids': [5, 1000, 3]}, 'has a token outside the vocabulary'),
        ({'token_ids': [5, -1, 3]}, 'has a token outside the vocabulary'),
        ({'logprobs': {'content': [{'logprob': 0.1}] * 3}}, 'has a log-prob that is not finite or is above 0'),
        # What vLLM writes in place of nan and -inf.
        ({'logprobs': {'content': [{'logprob': -9999.0}] * 3}}, 'has a log-prob that is not finite or is above 0'),
        ({'finish_reason': 'abort'}, "has finish_reason 'abort' instead of"),
        ({'logprobs': {'content': [{'logprob': -1e30}] * 3}}, 'has a log-prob that is not finite or is above 0'),
        ({'logprobs': {'content': [{'logprob': -1e300}] * 3}}, 'has a log-prob that is not finite or is above 0'),
        ({'weight_versions': [{'version': POLICY, 'start': 0, 'end': 1}]}, r'has 3 tokens, .* the policy only for the spans \[\(0, 1\)\]'),
        ({'weight_versions': [{'version': POLICY, 'start': 1, 'end': 3}]}, r'has 3 tokens, .* the policy only for the spans \[\(1, 3\)\]'),
        ({'token_ids': [5, 6, 8]}, r"of 3 tokens has finish_reason 'stop', stop tokens \(3, 4\) at \[\]; serve the model"),
        ({'token_ids': [5, 4, 3]}, r"of 3 tokens has finish_reason 'stop', stop tokens \(3, 4\) at \[1, 2\]"),
        ({'finish_reason': 'length'}, r"of 3 tokens has finish_reason 'length', stop tokens \(3, 4\) at \[2\]"),
        ({'token_ids': [5, 6, 8], 'finish_reason': 'length'}, "has finish_reason 'length' after 3 of 4 tokens"),
        ({'index': 0}, r'group has the indices \[0, 0\]'),
        ({'index': 2}, r'group has the indices \[0, 2\]'),
    ],
)
def test_a_response_that_cannot_be_trained_on_is_refused(spoiled, message):
    with pytest.raises(BadResponse, match=f'{SERVER}: a response {message}'):
        read({'choices': [choice(0), choice(1) | spoiled]})


@pytest.mark.parametrize('others', [['7-0b1b2c3d'], ['6-0a1b2c3d'], [POLICY, '7-0b1b2c3d']])
def test_a_response_of_another_trainers_policy_is_an_error_at_once(others):
    """Also where its number is ours."""
    spans = [{'version': name, 'start': i, 'end': i + 1} for i, name in enumerate(others)]
    with pytest.raises(OtherPolicy, match='instead of 7-0a1b2c3d. Another trainer has loaded .*; give each') as raised:
        read({'choices': [choice(0), choice(1, weight_versions=spans)]})
    assert not isinstance(raised.value, BadResponse)  # which would be asked again


NEXT = '8-0b1b2c3d'


def read_of_both(*spans):
    """A reply to a request during which the policy NEXT was loaded, [(name, start, end), …] of its tokens."""
    said = {'choices': [choice(0, weight_versions=[dict(zip(('version', 'start', 'end'), span, strict=True)) for span in spans])]}
    [response] = read_group(json.dumps(said).encode(), Asked(1, 4, (POLICY, NEXT), VOCABULARY, (STOP,)), SERVER)
    return response


@pytest.mark.parametrize('spans', [[(POLICY, 0, 3)], [(NEXT, 0, 3)], [(POLICY, 0, 1), (NEXT, 1, 3)], [(NEXT, 0, 2), (POLICY, 2, 3)]])
def test_a_response_that_several_policies_wrote_has_a_span_of_each(spans):
    response = read_of_both(*spans)
    assert [(s.version, len(s.tokens)) for s in response.spans] == [(int(name[0]), end - start) for name, start, end in spans]
    assert response.tokens.tolist() == [5, 6, 3] and response.logp.tolist() == [-0.5] * 3 and response.trained_on.all()


@pytest.mark.parametrize('spans', [
    [(POLICY, 0, 1), (NEXT, 2, 3)], [(POLICY, 0, 2), (NEXT, 1, 3)], [(POLICY, 0, 1), (NEXT, 1, 2)], [(POLICY, 1, 2), (NEXT, 2, 3)],
    [(POLICY, 0, 0), (NEXT, 0, 3)], [(POLICY, 0, 3), (NEXT, 3, 3)], [(POLICY, 0, 3), (NEXT, 3, 4)],
])  # fmt: skip
def test_spans_that_are_not_all_tokens_each_once_are_refused(spans):
    with pytest.raises(BadResponse, match='has 3 tokens, but states the policy only for the spans'):
        read_of_both(*spans)


def test_a_policy_that_was_not_loaded_meanwhile_is_another_trainers():
    with pytest.raises(OtherPolicy, match=f'instead of {POLICY} or {NEXT}. Another trainer'):
        read_of_both((POLICY, 0, 1), ('9-0b1b2c3d', 1, 3))


def test_a_group_that_is_not_whole_is_refused():
    with pytest.raises(BadResponse, match=f'{SERVER}: a response group has 1 responses instead of 2'):
        read({'choices': [choice(0)]})


def without(field):
    return {name: value for name, value in choice(1).items() if name != field}


@pytest.mark.parametrize(
    'said, message',
    [
        (b'', 'truncated'),
        (b'<html>no</html>', 'JSON is malformed'),
        (b'{"choices":[{"index":0,"finish_reason":"\xff"}]}', "can't decode byte 0xff"),
        ([], 'Expected `object`, got `array`'),
        ({'error': 'none'}, 'missing required field `choices`'),
        *(({'choices': [choice(0), without(field)]}, rf'missing required field `{field}` - at `\$.choices') for field in choice(0)),
        ({'choices': [choice(0, logprobs=None)]}, r'Expected `object`, got `null` - at `\$.choices'),
        ({'choices': [choice(0, logprobs={'content': [{}]})]}, 'missing required field `logprob`'),
        ({'choices': [choice(0, logprobs={'content': [{'logprob': float('nan')}] * 3})]}, 'JSON is malformed'),
        ({'choices': [choice(0, token_ids=[5, 2**31, 3])]}, 'Expected `int` <= 2147483647'),
        ({'choices': [choice(0, token_ids=[5, 6.0, 3])]}, 'Expected `int`, got `float`'),
        ({'choices': [choice(0, token_ids=[5, [6], 3])]}, 'Expected `int`, got `array`'),
        (b'{"of no field of ours":' + b'[' * 10**5 + b']' * 10**5 + b'}', 'recursion depth'),
    ],
)
def test_a_malformed_reply_is_refused(said, message):
    with pytest.raises(BadResponse, match=f'{SERVER}: a reply cannot be read; serve with vLLM 0.32 or later: .*{message}'):
        read(said)


@pytest.mark.parametrize('read', [read_results, read_success, read_served])
@pytest.mark.parametrize('said', [b'', b'<html>', b'null', b'[]', b'{}', b'{"results":[],"data":[],"success":null}', b'[' * 10**5])
def test_a_control_reply_that_says_nothing_is_refused(read, said):
    with pytest.raises(BadResponse, match=f'{SERVER}: a reply cannot be read'):
        read(said, SERVER)


METRICS = """# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
vllm:prompt_tokens_total{engine="0",model_name="policy"} 748.0
vllm:prompt_tokens_created{engine="0",model_name="policy"} 1.795e+09
vllm:generation_tokens_total{engine="0",model_name="policy"} 1.5e+03
vllm:request_generation_tokens_count{engine="0",model_name="policy"} 99.0
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 5.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="policy"} 2.0
vllm:iteration_tokens_total_count{engine="0",model_name="policy"} 61.0
vllm:iteration_tokens_total_sum{engine="0",model_name="policy"} 2248.0
"""


def test_a_servers_load_is_that_of_all_its_engines_and_iterations_are_counted_of_one_alone():
    assert read_load(METRICS.encode()) == Load(sequences=8, tokens=748 + 1500, iterations=61)
    second = METRICS.replace('engine="0"', 'engine="1"')
    assert read_load((METRICS + second).encode()) == Load(sequences=16, tokens=2 * (748 + 1500), iterations=None)
    assert read_load(b'\xff no metrics') == read_load(b'vllm:num_requests_running 0.0\n') == Load(None, 0, None)


def test_a_server_says_how_long_to_wait_in_seconds_or_by_a_date():
    assert seconds_to_wait('7') == 7
    assert 50 < seconds_to_wait(email.utils.formatdate(time.time() + 60, usegmt=True)) <= 60
    for nothing in ('', '-7', 'soon', email.utils.formatdate(0), '\u0663x', 'Mon, 99 Xxx 9999 99:99:99 GMT'):
        assert seconds_to_wait(nothing) == 0


def read_seen(tokens):
    said = {'choices': [choice(0, token_ids=[5, MARK, 3])], 'prompt_token_ids': tokens}
    return read_group(json.dumps(said).encode(), Asked(1, 4, (POLICY,), VOCABULARY, (STOP,), MARK, SEEN.tokens), SERVER)


def test_of_a_prompt_that_was_read_as_it_is_the_responses_image_tokens_are_masked():
    [response] = read_seen(SEEN.tokens.tolist())
    assert response.tokens.tolist() == [5, MARK, 3] and response.trained_on.tolist() == [True, False, True]
    assert all(r.trained_on.all() for r in read({'choices': [choice(0, token_ids=[5, MARK, 3]), choice(1)]}))  # a model of text


@pytest.mark.parametrize(
    'tokens, message',
    [
        ([5, MARK, MARK, 6, MARK, MARK, MARK, MARK], r'images have \[2, 4\] features on the server and \[3, 3\] in the trainer.*model\.pixels'),
        ([5, MARK, 6, MARK], r'images have \[1, 1\] features on the server and \[3, 3\] in the trainer'),
        ([5, MARK, MARK, MARK, 8, MARK, MARK, MARK], 'token 4 of a prompt is 8 on the server and 6 in the trainer; serve the model directory'),
        ([5, MARK, MARK, MARK, 6, MARK, MARK, MARK, 6], 'token 8 of a prompt is 6 on the server and None in the trainer'),
        (None, 'lacks the tokens of the prompt; serve with vLLM'),
    ],
)
def test_a_prompt_that_was_read_otherwise_is_an_error_at_once(tokens, message):
    with pytest.raises(RolloutError, match=f'{SERVER}: .*{message}') as raised:
        read_seen(tokens)
    assert not isinstance(raised.value, BadResponse)  # which would be asked again
