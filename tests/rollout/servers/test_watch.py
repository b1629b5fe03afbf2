"""A reply that is lost on the way is told from one that is slow, and its group alone is asked for again."""

import json
import threading
import time
from collections import Counter

import pytest
from between import Proxy
from stand_in import DRAWS, SAMPLING, StandIn, connecting, good

from bapo_jax.machine import events
from bapo_jax.rollout.vllm import watch
from bapo_jax.rollout.vllm.gauges import Gauges

pytestmark = pytest.mark.slow
LOOKS = 6  # so many are enough to find a lost reply
COUNTED = 'num_requests_running', 'num_requests_waiting', 'iteration_tokens_total_count', 'generation_tokens_total'


@pytest.fixture
def connect(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, '_LONG_S', 0.05)
    monkeypatch.setattr(watch, '_EVERY_S', 0.05)
    monkeypatch.setattr(Gauges, 'look', lambda *_, **__: None)  # only the watch's looks are counted here
    yield from connecting(policy, tmp_path)


class Counting(StandIn):
    """A stand-in that counts its work as vLLM does, and says so at its /metrics: two sequences for each group that it answers.

    `reply` is called with a prompt's tokens and how often they were asked. `a_look` is called at each look, and changes `counts`.
    """

    def __init__(self, reply, a_look=lambda counts: None):
        self.counts = Counter(dict.fromkeys(COUNTED, 0))
        self._counted, self.looks = threading.Lock(), 0

        def metrics():
            self.looks += 1
            a_look(self.counts)
            with self._counted:
                return 200, ''.join(f'vllm:{name}{{engine="0"}} {n}.0\n' for name, n in self.counts.items()).encode()

        def answer(number):
            tokens = self.asked[number - 1]
            self._count(num_requests_running=2, iteration_tokens_total_count=1)
            said = reply(tokens, self.asked[:number].count(tokens)) or good(number)
            self._count(num_requests_running=-2, generation_tokens_total=5)
            return said

        super().__init__(answer, {'/metrics': metrics})

    def _count(self, **by):
        with self._counted:
            self.counts.update(by)

    def times(self, prompts):
        """How often each of the prompts was asked."""
        return [self.asked.count(prompt.tokens.tolist()) for prompt in prompts]


def request_of(prompt):
    """What the request for a prompt's group has and no other."""
    return f'"token_ids": {json.dumps(prompt.tokens.tolist())}'.encode()


@pytest.fixture
def unhurried(connect, monkeypatch):
    """Between two looks even a busy machine's server takes up every request that has arrived."""
    monkeypatch.setattr(watch, '_EVERY_S', 0.5)


@pytest.mark.usefixtures('unhurried')
def test_the_group_of_a_reply_that_was_swallowed_is_asked_again_and_no_other(connect, prompts, tmp_path):
    server = Counting(lambda *_: None)
    proxy = Proxy(server.url)
    engine = connect(proxy)
    proxy.swallow(request_of(prompts[1]))
    with events.recorded(tmp_path) as said:
        assert [len(group) for group in engine.generate(prompts, 2, SAMPLING, DRAWS)] == [2] * 6
    assert server.times(prompts) == [1, 2, 1, 1, 1, 1]
    assert said == {'reply lost': 1} and engine.asked_again == 1  # the server is not left out
    proxy.close()


@pytest.mark.usefixtures('unhurried')
def test_a_lost_reply_is_found_while_the_server_goes_on_with_other_groups(connect, prompts, tmp_path):
    again = threading.Event()

    def reply(tokens, times):
        if tokens == prompts[3].tokens.tolist():  # is under way all the time
            assert again.wait(30)
        if tokens == prompts[1].tokens.tolist() and times == 2:
            again.set()

    server = Counting(reply, lambda counts: counts.update(iteration_tokens_total_count=5))
    proxy = Proxy(server.url)
    engine = connect(proxy, deadline_s=30.0)
    proxy.swallow(request_of(prompts[1]))
    with events.recorded(tmp_path) as said:
        assert [len(group) for group in engine.generate(prompts[:4], 2, SAMPLING, DRAWS)] == [2] * 4
    assert server.times(prompts[:4]) == [1, 2, 1, 1] and said == {'reply lost': 1}
    proxy.close()


def stalled(counts):
    """It runs a group, and writes nothing from look to look."""


def in_stages(counts):
    """A pipeline's other stages have made more iterations than a response has tokens."""
    counts['iteration_tokens_total_count'] = min(counts['iteration_tokens_total_count'] + 2, 3 * SAMPLING.max_tokens)


def idle_and_at_work(counts):
    """It says that it runs nothing, and has written more: what it says is of different moments."""
    counts['num_requests_running'] = 0
    counts['generation_tokens_total'] += 1


def of_two_engines(counts):
    """How many iterations the one has made that runs the group is not known."""
    counts['iteration_tokens_total_count'] += 100
    counts['iteration_tokens_total_count{engine="1"} 0.0\nvllm:iteration_tokens_total_count'] = 0


def without_counts(counts):
    counts.clear()


@pytest.mark.parametrize('a_look', [stalled, in_stages, idle_and_at_work, of_two_engines, without_counts])
def test_a_slow_group_is_asked_once_also_where_a_later_one_was_answered(a_look, connect, prompts):
    """What its /metrics say is none of it a sign that the group has ended."""
    begun, looked = threading.Event(), threading.Event()

    def look(counts):
        assert begun.wait(30)
        a_look(counts)
        if server.looks > LOOKS:
            looked.set()
            counts.clear()  # however long the reply now takes, no look says that nothing runs

    def reply(tokens, _):
        if tokens == prompts[0].tokens.tolist():
            begun.set()
            assert looked.wait(30)

    server = Counting(reply, look)
    engine = connect(server, deadline_s=30.0)
    assert [len(group) for group in engine.generate(prompts[:2], 2, SAMPLING, DRAWS)] == [2, 2]
    assert server.times(prompts[:2]) == [1, 1] and server.looks > LOOKS


@pytest.mark.parametrize('later', ['is written after it', 'is answered'])
def test_neither_a_reply_that_is_being_written_is_lost_nor_one_behind_it(later, connect, prompts):
    """The server has ended the requests. It writes one reply, and from look to look a part of it comes."""
    looked, part = threading.Event(), threading.Semaphore(0)

    def slowly():
        while not looked.is_set():
            yield b' '
            part.release()
            time.sleep(0.01)
        yield json.dumps(good(None)[1]).replace('null', f'"{server.name}"').encode()

    def look(counts):
        counts.update(num_requests_running=-counts['num_requests_running'])
        counts.update(iteration_tokens_total_count=100 * (later == 'is answered'))
        if server.looks > LOOKS:
            looked.set()
            counts.clear()
        while part.acquire(blocking=False):
            pass
        assert looked.is_set() or part.acquire(timeout=30)

    def reply(tokens, _):
        if tokens == prompts[0].tokens.tolist():
            return 200, slowly()
        assert later == 'is answered' or looked.wait(30)

    server = Counting(reply, look)
    engine = connect(server, deadline_s=30.0)
    assert [len(group) for group in engine.generate(prompts[:2], 2, SAMPLING, DRAWS)] == [2, 2]
    assert server.times(prompts[:2]) == [1, 1] and server.looks > LOOKS


def test_a_group_is_asked_three_times_at_most_whatever_the_server_says(connect, prompts, tmp_path):
    answered = threading.Event()

    def reply(_, times):
        if times < 3:  # never answered
            assert answered.wait(30)
        else:  # nobody looks at the last one: it waits for as many looks as ended those, and as many again
            time.sleep(2 * LOOKS * watch._EVERY_S)
            answered.set()

    server = Counting(reply, lambda counts: counts.subtract(counts))
    with events.recorded(tmp_path) as said:
        [group] = connect(server, deadline_s=30.0).generate(prompts[:1], 2, SAMPLING, DRAWS)
    assert len(group) == 2 and server.times(prompts[:1]) == [3] and said == {'reply lost': 2}


def test_ordinary_replies_make_no_look(connect, prompts, monkeypatch):
    monkeypatch.setattr(watch, '_LONG_S', 60.0)
    server = Counting(lambda *_: time.sleep(0.3))
    connect(server).generate(prompts, 2, SAMPLING, DRAWS)
    assert server.looks == 0
