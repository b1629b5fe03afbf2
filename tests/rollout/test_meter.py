"""Who waited for whom, by hand: spells that overlap, futures that end, and clocks that are told the time."""

from concurrent.futures import Future

import numpy as np
import pytest

from bapo_jax.groups import Author, Response, Span, sampled
from bapo_jax.rollout import meter as module
from bapo_jax.rollout.meter import Meter, covered, shares


def test_seconds_are_those_of_the_union_within_the_limits():
    spells = [(8.0, 12.0), (1.0, 3.0), (2.0, 5.0), (4.0, 4.5), (20.0, 30.0)]
    assert covered(spells, 0.0, 100.0) == 4 + 4 + 10
    assert covered(spells, 2.0, 9.0) == 3 + 1
    assert covered(spells, 12.0, 20.0) == covered([], 0.0, 1.0) == 0
    assert covered([(0.0, 9.0), (1.0, 2.0)], 0.0, 10.0) == 9  # one within another


def test_the_engine_is_idle_where_the_trainer_works_and_nobody_hands_over():
    """10 s: 1 s of handing over, 3 s of waiting of which the last was judging, 6 s of training, 2 of them beside sampling."""
    sampling, waiting, handing = [(1.0, 3.0), (4.0, 6.0)], [(1.0, 4.0)], [(0.0, 1.0)]
    assert shares(sampling, waiting, handing, 0.0, 10.0) == pytest.approx({'perf/idle/trainer': 0.3, 'perf/idle/engine': 0.4})
    assert shares([(0.0, 9.0)], [], [], 2.0, 4.0) == {'perf/idle/trainer': 0, 'perf/idle/engine': 0}


@pytest.fixture
def clock(monkeypatch):
    """A list whose last number is the time."""
    times = [0.0]
    monkeypatch.setattr(module.time, 'perf_counter', lambda: times[-1])
    return times


def group(*lengths):
    return tuple(sampled(np.ones(n, np.int32), np.zeros(n, np.float32), 'stop', 0) for n in lengths)


def test_a_step_has_the_tokens_of_groups_that_ended_by_the_seconds_in_which_any_was_asked(clock):
    meter, (first, second, lost, given_up) = Meter(), [Future() for _ in range(4)]
    clock.append(1.0)
    meter.asked([first, second])
    clock.append(3.0)
    with meter.waiting():
        first.set_result(group(30, 10))
        clock.append(5.0)
    clock.append(9.0)
    assert meter.read(1.0) == {'perf/idle/trainer': 2 / 8, 'perf/idle/engine': 0, 'perf/throughput/gen': 40 / 8}

    clock.append(10.0)  # a second between the steps, in which the second group is still sampled
    step = clock[-1]
    meter.asked([lost, given_up])
    clock.append(12.0)
    second.set_result(group(100))
    lost.set_exception(ValueError('lost'))
    given_up.cancel()
    clock.append(15.0)
    with meter.handing_over():
        clock.append(16.0)
    assert meter.read(step) == {'perf/idle/trainer': 0, 'perf/idle/engine': 3 / 6, 'perf/throughput/gen': 100 / 3}

    clock.append(20.0)
    assert meter.read(16.0) == {'perf/idle/trainer': 0, 'perf/idle/engine': 1}  # and no rate, since nothing was asked


def test_tokens_that_the_engine_did_not_sample_now_do_not_count(clock):
    """Of a group of two that is continued: what was there, and a tool's reply."""
    meter, (continued, fresh) = Meter(), [Future() for _ in range(2)]
    meter.asked([continued, fresh], [25])
    clock.append(2.0)
    whole, cut = group(10, 15)
    reply, more = Span(np.ones(40, np.int32), None, Author.ENVIRONMENT), group(6)[0].spans
    continued.set_result((whole, Response((*cut.spans, reply, *more), 'stop')))
    fresh.set_result(group(4))
    assert meter.read(0.0)['perf/throughput/gen'] == (6 + 4) / 2
