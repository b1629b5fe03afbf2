"""What the client does with servers that fail or answer nonsense: stand-ins that inject one fault each.

Real servers: test_real_server.py.
"""

import dataclasses
import gzip
import itertools
import threading
import time

import numpy as np
import pytest
from group_builders import begun, version_of
from http_stub import HttpStub
from proxied import proxy  # noqa: F401  (a fixture)
from stand_in import DRAWS, SAMPLING, StandIn, choice, connecting, good, named

from bapo_jax.groups import Author, Begun, Span
from bapo_jax.rollout.engine import results_of
from bapo_jax.rollout.vllm import client
from bapo_jax.rollout.vllm.client import RolloutError, Unreachable
from bapo_jax.rollout.vllm.loading import PolicyRefused
from bapo_jax.rollout.vllm.replies import ROUTE, BadResponse, OtherPolicy
from bapo_jax.rollout.vllm.supervise import SupervisedServer
from bapo_jax.weights.manifest import read_manifest

pytestmark = pytest.mark.slow


@pytest.fixture
def connect(policy, tmp_path):
    yield from connecting(policy, tmp_path)


def test_sound_responses_come_in_order_with_the_token_on_every_call_and_no_proxy_is_asked(connect, prompts, proxy):  # noqa: F811
    server = StandIn(good)
    answers = connect(server).generate(prompts[:3], 2, SAMPLING, DRAWS)
    assert [len(group) for group in answers] == [2, 2, 2]
    first, second = answers[0]
    np.testing.assert_array_equal(first.tokens, [9, 3])
    np.testing.assert_array_equal(second.logp, np.float32([-0.5] * 3))
    assert (first.finish, version_of(first)) == ('stop', 7)
    assert {header for _, header in server.calls} == {'Bearer secret'} and proxy == []


def test_a_policy_may_be_loaded_while_a_group_is_under_way_and_each_token_says_whose_it_is(connect, prompts, policy):
    """The server pauses, and goes on with the new policy. What is asked then is of that one alone."""
    asked, loaded = threading.Event(), threading.Event()

    def reply(number):
        if number > 1:
            return good(number)
        before = server.name
        asked.set()
        assert loaded.wait(30)
        spans = [{'version': before, 'start': 0, 'end': 1}, {'version': server.name, 'start': 1, 'end': 3}]
        return 200, {'choices': [choice(0) | {'weight_versions': spans}, choice(1)]}

    server = StandIn(reply)
    engine = connect(server)
    [under_way] = engine.ask(begun(prompts[:1]), 2, SAMPLING, DRAWS[:1])
    assert asked.wait(30)
    engine.load(policy.params, 8)
    loaded.set()
    assert [[(s.version, len(s.tokens)) for s in r.spans] for r in under_way.result(30)] == [[(7, 1), (8, 2)], [(8, 3)]]
    [next_] = engine.generate(prompts[:1], 2, SAMPLING, DRAWS[:1])
    assert [version_of(r) for r in next_] == [8, 8] and len(server.asked) == 2


def test_the_probe_asks_each_server_though_others_are_busy_and_waits_for_nobodys_group(connect, prompts, policy):
    working, released = threading.Event(), threading.Event()

    def busy(number):
        working.set()
        assert number > 1 or released.wait(30)
        return good(number)

    one, other = StandIn(busy), StandIn(good)
    engine = connect(one, other, concurrency=1, deadline_s=30.0)
    asked = engine.ask(begun(prompts[:4]), 2, SAMPLING, DRAWS[:4])
    assert working.wait(30)
    answers = engine.probe(prompts[5], 2, SAMPLING, DRAWS[0])
    released.set()
    assert [len(group) for group in answers] == [2, 2]
    probe = prompts[5].tokens.tolist()
    assert one.asked.count(probe) == other.asked.count(probe) == 1
    assert all(len(group.result(10)) == 2 for group in asked)


def test_given_tokens_are_read_behind_the_prompt_and_leave_the_policy_fewer(connect, prompts):
    """Of four tokens two are given: a reply of two is as long as it may be, and one of three is bad."""
    prefix = Span(np.array([7, 8], np.int32), None, Author.PREFIX)

    def asked(*tokens):
        cut = {'finish_reason': 'length'} if 3 not in tokens else {}
        server = StandIn(lambda _: (200, {'choices': [choice(i, tokens=tokens) | cut for i in range(2)]}))
        [group] = connect(server).ask([Begun(prompts[0], (prefix,))], 2, SAMPLING, DRAWS[:1])
        return server, group

    server, group = asked(5, 6)
    for response in group.result(10):
        assert response.tokens.tolist() == [7, 8, 5, 6] and response.trained_on.tolist() == [False, False, True, True]
        assert response.spans[0] is prefix and (version_of(response), response.finish) == (7, 'length')
    assert server.asked == [[*prompts[0].tokens.tolist(), 7, 8]]
    with pytest.raises(BadResponse, match='has 3 tokens instead of 1 to 2'):
        asked(5, 6, 3)[1].result(10)


def test_a_policy_is_loaded_while_paused_and_caches_are_dropped_before_it_is_named(connect):
    server = StandIn(good)
    connect(server)
    assert server.paths() == [
        '/v1/models', '/collective_rpc', '/pause?mode=keep', '/collective_rpc', '/reset_prefix_cache', '/reset_mm_cache',
        '/reset_encoder_cache', '/update_weight_version', '/collective_rpc', '/resume',
    ]  # fmt: skip


def test_a_server_that_reads_another_directory_under_the_same_path_is_found_out(connect):
    with pytest.raises(PolicyRefused, match='mount the same directory'):
        connect(StandIn(good, checksum='00000000'))


def test_a_refused_policy_is_an_error_and_the_server_is_not_paused(connect):
    server = StandIn(good, refused='checksum of model.norm.weight')
    with pytest.raises(PolicyRefused, match='refused policy 7-[0-9a-f]{8}: checksum of model.norm.weight'):
        connect(server)
    assert server.paths() == ['/v1/models', '/collective_rpc']


def test_a_server_that_fails_while_it_loads_is_left_out_and_the_last_ones_reason_is_told(connect, prompts):
    sound, broken = StandIn(good), StandIn(good, broken='RefusedPolicy: model.norm.weight/0 cannot be read')
    assert len(connect(sound, broken).generate(prompts, 2, SAMPLING, DRAWS)) == len(prompts)
    assert '/inference/v1/generate' not in broken.paths()
    with pytest.raises(Unreachable, match='no rollout server answers.*failed while loading policy 7-.*norm.weight/0 cannot'):
        connect(broken)


OF_ANOTHER_POLICY = 200, {'choices': [choice(0), choice(1, '6')]}


@pytest.mark.parametrize('spoiled', [OF_ANOTHER_POLICY, (200, b'{"choices": [')], ids=['of another policy', 'cut off'])
def test_a_group_that_is_no_good_is_asked_for_again_alone(spoiled, connect, prompts):
    server = StandIn(lambda number: spoiled if number == 2 else good(number))
    engine = connect(server, concurrency=1)
    answers = engine.generate(prompts[:3], 2, SAMPLING, DRAWS)
    assert [len(group) for group in answers] == [2, 2, 2]
    assert server.asked == [prompts[i].tokens.tolist() for i in (0, 1, 1, 2)]
    assert engine.asked_again == 1


def test_a_group_that_stays_no_good_is_an_error_that_names_the_server_and_leaves_the_others_alone(connect, prompts):
    server = StandIn(lambda number: OF_ANOTHER_POLICY if server.asked[-1] == prompts[0].tokens.tolist() else good(number))
    engine = connect(server, concurrency=1)
    first, *others = engine.ask(begun(prompts[:4]), 2, SAMPLING, DRAWS)
    with pytest.raises(BadResponse, match=rf"{server.url}: a response is of policy \['6'\] instead of 7-[0-9a-f]{{8}}"):
        first.result()
    assert [len(other.result()) for other in others] == [2, 2, 2]
    assert server.asked == [prompts[i].tokens.tolist() for i in (0, 0, 0, 1, 2, 3)]
    assert engine.asked_again == 2


def moved(policy):
    """Other weights of the same model."""
    return {**policy.params, 'norm': {'scale': policy.params['norm']['scale'] * np.float32(1.0001)}}


def test_of_two_trainers_on_a_server_whose_numbers_meet_the_first_ends(connect, policy, prompts):
    server = StandIn(good)
    ours, theirs = connect(server), connect(server, load=False, policies='theirs')
    assert len(ours.generate(prompts, 2, SAMPLING, DRAWS)) == len(prompts)
    theirs.load(moved(policy), 7)
    with pytest.raises(OtherPolicy, match=rf"{server.url}: a response is of policy \['7-.*'\] instead of 7-.* Another trainer has loaded"):
        ours.generate(prompts, 2, SAMPLING, DRAWS)
    assert ours.asked_again == 0 and len(theirs.generate(prompts, 2, SAMPLING, DRAWS)) == len(prompts)


def test_what_was_asked_first_goes_out_first(connect, prompts):
    server = StandIn(good)
    engine = connect(server, concurrency=1)
    steps = [engine.ask(begun(prompts[i : i + 2]), 2, SAMPLING, DRAWS) for i in (0, 2, 4)]
    for group in [group for step in steps for group in step]:
        group.result()
    assert server.asked == [prompt.tokens.tolist() for prompt in prompts[:6]]


class Sees:
    """A stand-in for a sight of images that have one feature. It notes which image was read, and in which thread."""

    def __init__(self):
        self.read = []

    def collapsed(self, tokens, images):
        return tokens

    def data_url(self, image):
        self.read.append((image, threading.current_thread().name))
        if image == 'gone':
            raise FileNotFoundError('/data/a.png: the image cannot be read')
        return 'data:'


def with_images(prompts, *images):
    """Prompts of the same tokens, which `reads` says were read."""
    return [dataclasses.replace(prompts[0], id=i, ground_truth={'images': [image]}) for i, image in enumerate(images)]


def reads(prompts):
    return 200, {**good(None)[1], 'prompt_token_ids': prompts[0].tokens.tolist()}


def test_images_are_read_when_their_prompts_turn_comes_and_in_a_thread_of_their_own(connect, prompts):
    sees, answered = Sees(), threading.Semaphore(0)

    def answer(number):
        assert answered.acquire(timeout=60)
        return reads(prompts)

    server = StandIn(answer)
    engine = connect(server, concurrency=2, sight=sees, deadline_s=60.0)
    groups = engine.ask(begun(with_images(prompts, *'abcdef')), 2, SAMPLING, DRAWS)
    for count in (2, 3, 4, 5, 6):
        deadline = time.monotonic() + 30
        while len(server.asked) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(sees.read) == count
        answered.release()
    answered.release()
    assert [len(group) for group in results_of(groups)] == [2] * 6
    assert sorted(image for image, _ in sees.read) == list('abcdef')
    assert all(thread.startswith('images') for _, thread in sees.read)


def test_an_image_that_cannot_be_read_is_an_error_that_names_prompt_and_file_and_leaves_the_others_alone(connect, prompts):
    engine = connect(StandIn(lambda _: reads(prompts)), concurrency=1, sight=Sees())
    first, gone, text = engine.ask(begun([*with_images(prompts, 'a', 'gone'), prompts[2]]), 2, SAMPLING, DRAWS)
    with pytest.raises(RolloutError, match=rf'prompt 1: /data/a\.png: the image cannot be read'):
        gone.result()
    assert len(first.result()) == len(text.result()) == 2


def test_a_server_without_room_for_the_longest_response_may_cut_it_earlier_and_nowhere_else(connect, prompts):
    """vLLM ends a response with 'length' where prompt and response fill its model length."""
    room = {'/v1/models': (200, {'data': [{'max_model_len': len(prompts[0].tokens) + 2}]})}
    cut = [{**choice(i, tokens=[5, 6]), 'finish_reason': 'length'} for i in range(2)]
    [group] = connect(StandIn(lambda _: (200, {'choices': cut}), room)).generate(prompts[:1], 2, SAMPLING, DRAWS)
    assert [response.finish for response in group] == ['length'] * 2
    with pytest.raises(BadResponse, match="has finish_reason 'length' after 2 of 4 tokens"):
        connect(StandIn(lambda _: (200, {'choices': cut}))).generate(prompts[:1], 2, SAMPLING, DRAWS)


def test_a_group_that_is_no_good_is_asked_for_again_at_another_server(connect, prompts):
    spoils, sound = StandIn(lambda _: OF_ANOTHER_POLICY), StandIn(good)
    engine = connect(spoils, sound, concurrency=1)
    assert [len(group) for group in engine.generate(prompts, 2, SAMPLING, DRAWS)] == [2] * len(prompts)
    assert len(sound.asked) == len(prompts) and engine.asked_again == len(spoils.asked) > 0


@pytest.mark.parametrize(
    'route, said',
    [
        ('/v1/models', b'{"data": [{"max_model_len": null}]}'),
        ('/collective_rpc', b'{"results": []}'),
        ('/reset_prefix_cache', b''),
        ('/update_weight_version', b'[]'),
    ],
)
def test_a_server_that_confirms_no_load_is_left_out_and_named_by_its_route(route, said, connect, prompts):
    confirms, other = StandIn(good), StandIn(good, {route: (200, said)})
    assert len(connect(confirms, other).generate(prompts, 2, SAMPLING, DRAWS)) == len(prompts)
    assert other.asked == [] and (other.paths()[-1] == '/resume') == ('/pause?mode=keep' in other.paths())
    with pytest.raises(Unreachable, match=f'no rollout server answers; see their logs. The last error: {other.url}{route}: a reply cannot be read'):
        connect(other)


@pytest.mark.parametrize('route, message', [('/reset_prefix_cache', 'not reset'), ('/update_weight_version', 'did not accept')])
def test_a_server_that_says_it_failed_to_load_is_an_error(route, message, connect):
    with pytest.raises(RolloutError, match=message):
        connect(StandIn(good, {route: (200, {'success': False})}))


def test_a_busy_server_is_asked_again_and_none_else(connect, prompts, monkeypatch):
    monkeypatch.setattr(client, '_BACKOFF_S', 0.01)
    busy = {1: (429, {'error': 'later'}), 2: (503, {'error': 'no room'}), 3: (429, b'', {'Retry-After': '0'})}
    server, other = StandIn(lambda number: busy.get(number, good(number))), StandIn(good)
    engine = connect(server, other, concurrency=1)
    assert [len(group) for group in engine.generate(prompts[:2], 2, SAMPLING, DRAWS)] == [2, 2]
    assert len(server.asked) == 4 and len(other.asked) == 1 and engine.asked_again == 0


@pytest.mark.parametrize('headers', [{}, {'Retry-After': '3600'}])
def test_a_server_that_stays_busy_has_its_deadline(headers, connect, prompts, monkeypatch):
    monkeypatch.setattr(client, '_BACKOFF_S', 0.01)
    server = StandIn(lambda _: (429, {'error': 'later'}, headers))
    with pytest.raises(Unreachable, match=r'status 429: .*later.* raise rollout\.deadline_s=3, or lower'):
        connect(server, deadline_s=3.0).generate(prompts[:1], 2, SAMPLING, DRAWS)
    assert len(server.asked) == 1 if headers else len(server.asked) > 2


def endless():
    """A reply that goes on for as long as it is read."""
    while True:
        yield b' ' * 2**16


@pytest.mark.parametrize(
    ('reply', 'message'),
    [
        (lambda: (200, endless()), r'/generate: a reply has more than 1,0[\d,]+ bytes, the limit here'),
        (lambda: (200, gzip.compress(b' ' * 2**20), {'Content-Encoding': 'gzip'}), "a reply is compressed .'gzip'.; disable compression"),
    ],
)
def test_a_reply_is_read_no_further_than_what_was_asked_for_can_take(reply, message, connect, prompts):
    server = StandIn(lambda _: reply())
    with pytest.raises(BadResponse, match=message):
        connect(server).generate(prompts[:1], 2, SAMPLING, DRAWS)
    assert len(server.asked) == 3  # as for any reply that is no good
    server = StandIn(good, {'/reset_mm_cache': lambda: (200, endless())})
    with pytest.raises(Unreachable, match='/reset_mm_cache: a reply has more than 16,777,216 bytes'):
        connect(server)


def counting(step):
    """What /metrics says of a server that has written `step` more tokens each time that it is asked."""
    counted = itertools.count(0, step)
    return {'/metrics': lambda: (200, f'vllm:generation_tokens_total{{engine="0"}} {next(counted)}.0\n'.encode())}


def test_a_slow_server_is_waited_for_while_it_makes_progress(connect, prompts):
    asked_metrics, counted = threading.Semaphore(0), counting(1)['/metrics']

    def slow(number):
        for _ in range(3):  # one at each deadline
            assert asked_metrics.acquire(timeout=60)
        return good(number)

    server = StandIn(slow, {'/metrics': lambda: asked_metrics.release() or counted()})
    assert len(connect(server, deadline_s=0.5).generate(prompts[:1], 2, SAMPLING, DRAWS)) == 1
    assert len(server.asked) == 1 and 3 <= server.paths().count('/health') <= server.paths().count('/metrics')


@pytest.fixture
def trickle():
    """A function: a reply whose body comes byte by byte, and does not end before the test does."""
    ended = threading.Event()
    yield lambda *_: (200, iter(lambda: b'' if ended.wait(0.01) else b' ', b''))
    ended.set()


def test_a_reply_that_trickles_in_is_no_progress(trickle, connect, prompts):
    with pytest.raises(Unreachable, match=r'no reply to a group in 2 × 0\.5 s \(rollout\.deadline_s; .*\); /health answers, and /metrics'):
        connect(StandIn(trickle, counting(0)), deadline_s=0.5).generate(prompts[:1], 2, SAMPLING, DRAWS)


SLOW = '(rollout.deadline_s; raise it if the server is slow)'


@pytest.mark.parametrize(
    'says, message',
    [
        (counting(0), f'in 2 × 0.5 s {SLOW}; /health answers, and /metrics counts 0 tokens'),
        (counting(1), f'in 3 × 0.5 s {SLOW}; /health answers, and /metrics counts 2 tokens'),
        ({'/metrics': (200, b'')}, f'in 2 × 0.5 s {SLOW}; /health answers, and /metrics counts 0 tokens'),
        ({'/health': (503, b'')}, f'in 1 × 0.5 s {SLOW}; http.*/health: status 503'),
    ],
    ids=['stands still', 'never ends', 'counts nothing', 'is dead'],
)
def test_a_reply_that_does_not_come_is_an_error_that_says_what_the_server_did(says, message, silent, connect, prompts, monkeypatch):
    monkeypatch.setattr(client, '_PATIENCE', 3)
    silent.says.update(says)
    with pytest.raises(Unreachable, match='no reply to a group ' + message.replace('(', r'\(').replace(')', r'\)')):
        connect(silent, deadline_s=0.5).generate(prompts[:1], 2, SAMPLING, DRAWS)


def test_a_control_reply_that_trickles_in_has_its_deadline(trickle, connect):
    with pytest.raises(Unreachable, match=r'/collective_rpc: no answer in 0\.5 s \(rollout\.deadline_s=0\.5\)'):
        connect(StandIn(good, {'/collective_rpc': trickle}), deadline_s=0.5)


@pytest.fixture
def silent():
    """A stand-in that answers no prompt before the test ends."""
    ended = threading.Event()

    def wait(number):
        ended.wait(60)
        return good(number)

    yield StandIn(wait)
    ended.set()


def test_close_gives_up_what_is_pending(silent, connect, prompts):
    engine = connect(silent)
    groups = engine.ask(begun(prompts[:6]), 2, SAMPLING, DRAWS)  # more than go out at once
    engine.close()
    assert all(group.cancelled() for group in groups)
    engine.close()  # again: nothing happens


def test_requests_of_a_broken_server_go_to_the_other_and_none_is_lost_or_doubled(connect, prompts):
    broken, sound = StandIn(lambda _: (500, {'error': 'engine dead'})), StandIn(good)
    answers = connect(broken, sound).generate(prompts, 2, SAMPLING, DRAWS)
    assert [len(group) for group in answers] == [2] * len(prompts)
    assert sound.paths().count('/inference/v1/generate') == len(prompts)


def test_a_server_that_is_gone_is_left_out_until_the_next_policy(connect, policy, prompts):
    gone, sound = StandIn(good), StandIn(good)
    engine = connect(gone, sound)
    gone.stop()
    engine.load(policy.params, 8)
    assert len(engine.generate(prompts, 2, SAMPLING, DRAWS)) == len(prompts)


class Supervised(SupervisedServer):
    """A stand-in that the engine may start again: until then it fails at everything once it has `ended`."""

    def __init__(self):
        self.ended, self.starts, self.asked = False, 0, 0

        def answer(path, headers, body):
            if self.ended:
                return 500, {'error': 'engine dead'}
            if path == ROUTE:
                self.asked += 1
                return named(good(None), self.name)
            if path == '/update_weight_version':
                self.name = body['new_version']
            if path == '/collective_rpc':
                manifest = read_manifest(body['kwargs']['path'])
                return 200, {'results': [{'version': manifest.version, 'checksum': manifest.checksum}]}
            return 200, {'success': True, 'data': [{'max_model_len': 512}]}

        self.url = HttpStub(answer).url

    def restart(self):
        self.ended, self.starts = False, self.starts + 1

    def stop(self):
        self.ended = True


def test_of_several_supervised_servers_each_is_started_again_when_it_is_needed(connect, policy, prompts):
    """One that ends leaves its requests to the other until the next policy, or until the other has ended too."""
    first, second = Supervised(), Supervised()
    engine = connect(first, second)
    first.ended = True
    assert len(engine.generate(prompts, 2, SAMPLING, DRAWS)) == len(prompts)
    assert (first.starts, second.starts, second.asked) == (0, 0, len(prompts))
    engine.load(policy.params, 8)
    assert (first.starts, second.starts) == (1, 0)
    engine.load(policy.params, 7)
    first.ended = second.ended = True
    assert len(engine.generate(prompts, 2, SAMPLING, DRAWS)) == len(prompts)
    assert (first.starts, second.starts) == (2, 1)
    engine.close()
    assert first.ended and second.ended


def dropping(numbers):
    """A stand-in that closes the connection of these requests without an answer."""

    def reply(number):
        if number in numbers:
            raise ConnectionResetError
        return good(number)

    return StandIn(reply)


def test_a_server_alone_that_drops_a_connection_takes_the_policy_again_and_answers(connect, prompts):
    server = dropping({2})
    answers = connect(server, concurrency=1).generate(prompts, 2, SAMPLING, DRAWS)
    assert [len(group) for group in answers] == [2] * len(prompts) and len(server.asked) == len(prompts) + 1
    assert server.paths().count('/update_weight_version') == 2


def test_a_server_that_drops_every_connection_is_an_error_in_the_end(connect, prompts):
    server = dropping(range(100))
    with pytest.raises(Unreachable, match='no answer'):
        connect(server).generate(prompts[:1], 2, SAMPLING, DRAWS)
    assert len(server.asked) == 3


def test_with_no_server_left_every_group_says_so_and_why(connect, prompts):
    server = StandIn(good)
    engine = connect(server, concurrency=1)
    server.stop()
    for group in engine.ask(begun(prompts), 2, SAMPLING, DRAWS):
        with pytest.raises(Unreachable, match=f'no rollout server answers; see their logs. The last error: {server.url}.*: no answer'):
            group.result()


def test_a_request_that_is_wrong_is_not_tried_again(connect, prompts):
    server = StandIn(lambda _: (400, {'error': 'no such thing'}))
    with pytest.raises(RolloutError, match='status 400.*no such thing'):
        connect(server).generate(prompts[:1], 2, SAMPLING, DRAWS)
    assert server.paths().count('/inference/v1/generate') == 1


def test_generate_before_load_is_an_error(connect, prompts):
    with pytest.raises(RuntimeError, match='no policy yet'):
        connect(StandIn(good), load=False).generate(prompts[:1], 2, SAMPLING, DRAWS)
