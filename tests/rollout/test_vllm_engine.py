"""What the client does with servers that fail or answer nonsense: stand-ins that inject one fault each.

Real servers: test_real_server.py.
"""

import numpy as np
import pytest
from http_stub import HttpStub

from bapo_jax.rollout.engine import FRESH, Draw, Sampling
from bapo_jax.rollout.published import read_manifest
from bapo_jax.rollout.vllm_engine import BadResponse, PolicyRefused, RolloutError, Unreachable, VllmEngine

pytestmark = pytest.mark.slow
SAMPLING, DRAWS = Sampling(1.0, 4), [Draw(0, 1, FRESH)] * 6  # one a prompt


def choice(index, version='7', **changes):
    """A sound member of a group."""
    sound = {
        'index': index, 'token_ids': [5, 6, 3], 'logprobs': {'content': [{'logprob': -0.5}] * 3}, 'finish_reason': 'stop',
        'weight_versions': [{'version': version, 'start': 0, 'end': 3}],
    }  # fmt: skip
    return sound | changes


class StandIn(HttpStub):
    """An HTTP server that takes every control call and answers generate with `reply(number of the request)`.

    `loaded` overrides what it says of a policy that it was told to load.
    """

    def __init__(self, reply, **loaded):
        self.calls = []

        def answer(path, headers, body):
            self.calls.append((path, headers['Authorization']))
            if path == '/inference/v1/generate':
                return reply(self.paths().count(path))
            if path == '/collective_rpc':
                manifest = read_manifest(body['kwargs']['path'])
                return 200, {'results': [{'version': manifest.version, 'checksum': manifest.checksum, **loaded}]}
            return 200, {'success': True}

        super().__init__(answer)

    def paths(self):
        return [path for path, _ in self.calls]


@pytest.fixture
def connect(policy, tmp_path):
    """A function: an engine for these stand-ins, holding policy 7."""
    engines = []

    def make(*servers, load=True):
        engine = VllmEngine(
            [s.url for s in servers], tmp_path / 'policy', policy.config, token='secret', dtype='float32', stop_tokens=(3,),
            concurrency=4, deadline_s=5.0,
        )  # fmt: skip
        engines.append(engine)
        if load:
            engine.load(policy.params, 7)
        return engine

    yield make
    for engine in engines:
        engine.close()


def good(_):
    return 200, {'choices': [choice(1), choice(0, token_ids=[9, 3], logprobs={'content': [{'logprob': -1.0}] * 2})]}


def test_sound_responses_come_in_order_with_the_token_on_every_call(connect, prompts):
    server = StandIn(good)
    answers = connect(server).generate(prompts[:3], 2, SAMPLING, DRAWS)
    assert [len(group) for group in answers] == [2, 2, 2]
    first, second = answers[0]
    np.testing.assert_array_equal(first.tokens, [9, 3])
    np.testing.assert_array_equal(second.logp, np.float32([-0.5] * 3))
    assert (first.finish, first.version) == ('stop', 7)
    assert {header for _, header in server.calls} == {'Bearer secret'}


def test_a_policy_is_loaded_while_paused_and_caches_are_dropped_before_it_is_named(connect):
    server = StandIn(good)
    connect(server)
    assert server.paths() == [
        '/collective_rpc', '/pause?mode=keep', '/collective_rpc', '/reset_prefix_cache', '/reset_mm_cache',
        '/update_weight_version', '/resume',
    ]  # fmt: skip


def test_a_server_that_reads_another_directory_under_the_same_path_is_found_out(connect):
    with pytest.raises(PolicyRefused, match='must see the same directory'):
        connect(StandIn(good, checksum='00000000'))


def test_a_refused_policy_is_an_error_and_the_server_is_not_paused(connect):
    server = StandIn(good, refused='checksum of model.norm.weight')
    with pytest.raises(PolicyRefused, match='refused policy 7: checksum of model.norm.weight'):
        connect(server)
    assert server.paths() == ['/collective_rpc']


def test_a_server_that_fails_while_it_loads_is_left_out_and_the_last_ones_reason_is_told(connect, prompts):
    sound, broken = StandIn(good), StandIn(good, broken='RefusedPolicy: model.norm.weight/0 cannot be read')
    assert len(connect(sound, broken).generate(prompts, 2, SAMPLING, DRAWS)) == len(prompts)
    assert '/inference/v1/generate' not in broken.paths()
    with pytest.raises(Unreachable, match='no rollout server answers.*failed while it loaded policy 7.*norm.weight/0 cannot'):
        connect(broken)


@pytest.mark.parametrize(
    'spoiled, message',
    [
        ({'weight_versions': [{'version': '6', 'start': 0, 'end': 3}]}, r"is of policy \['6'\] where 7 was asked for"),
        ({'weight_versions': [{'version': v, 'start': 0, 'end': 3} for v in '67']}, r"is of policy \['6', '7'\]"),
        ({'weight_versions': None}, r'is of policy \[\]'),
        ({'token_ids': [], 'logprobs': {'content': []}}, 'has 0 tokens where 1 to 4'),
        ({'token_ids': [5] * 5, 'logprobs': {'content': [{'logprob': -1.0}] * 5}}, 'has 5 tokens where 1 to 4'),
        ({'token_ids': [5, 3]}, 'has 2 tokens and 3 log-probs'),
        ({'token_ids': [5, 1000, 3]}, 'has a token outside the vocabulary'),
        ({'token_ids': [5, -1, 3]}, 'has a token outside the vocabulary'),
        ({'logprobs': {'content': [{'logprob': 0.1}] * 3}}, 'has a log-prob that is not finite or above 0'),
        ({'logprobs': {'content': [{'logprob': float('nan')}] * 3}}, 'has a log-prob that is not finite or above 0'),
        ({'finish_reason': 'abort'}, "ended with 'abort'"),
    ],
)
def test_a_response_that_cannot_be_trained_on_is_an_error_that_names_the_server(spoiled, message, connect, prompts):
    server = StandIn(lambda _: (200, {'choices': [choice(0), choice(1, **spoiled)]}))
    with pytest.raises(BadResponse, match=f'{server.url}: a response {message}'):
        connect(server).generate(prompts[:1], 2, SAMPLING, DRAWS)


def test_a_group_that_is_not_whole_is_an_error(connect, prompts):
    with pytest.raises(BadResponse, match='has 1 members where 2'):
        connect(StandIn(lambda _: (200, {'choices': [choice(0)]}))).generate(prompts[:1], 2, SAMPLING, DRAWS)


def test_requests_of_a_broken_server_go_to_the_other_and_none_is_lost_or_doubled(connect, prompts):
    broken, sound = StandIn(lambda _: (500, {'error': 'engine dead'})), StandIn(good)
    answers = connect(broken, sound).generate(prompts, 2, SAMPLING, DRAWS)
    assert [len(group) for group in answers] == [2] * len(prompts)
    assert sound.paths().count('/inference/v1/generate') == len(prompts)


def test_a_server_that_is_gone_is_left_out_until_the_next_policy(connect, policy, prompts):
    gone, sound = StandIn(good), StandIn(lambda _: (200, {'choices': [choice(0, '8'), choice(1, '8')]}))
    engine = connect(gone, sound)
    gone.stop()
    engine.load(policy.params, 8)
    assert len(engine.generate(prompts, 2, SAMPLING, DRAWS)) == len(prompts)


def test_with_no_server_left_the_error_says_so(connect, prompts):
    server = StandIn(good)
    engine = connect(server)
    server.stop()
    with pytest.raises(Unreachable, match='no rollout server answers'):
        engine.generate(prompts, 2, SAMPLING, DRAWS)


def test_a_request_that_is_wrong_is_not_tried_again(connect, prompts):
    server = StandIn(lambda _: (400, {'error': 'no such thing'}))
    with pytest.raises(RolloutError, match='status 400.*no such thing'):
        connect(server).generate(prompts[:1], 2, SAMPLING, DRAWS)
    assert server.paths().count('/inference/v1/generate') == 1


def test_generate_before_load_is_an_error(connect, prompts):
    with pytest.raises(RuntimeError, match='no policy yet'):
        connect(StandIn(good), load=False).generate(prompts[:1], 2, SAMPLING, DRAWS)
