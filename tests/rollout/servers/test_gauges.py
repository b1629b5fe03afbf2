"""How full servers are: what their metrics say, largest numbers of a step, and looks that never fail a step."""

import asyncio
import time

import pytest
from stand_in import DRAWS, SAMPLING, StandIn, connecting, good

from bapo_jax.rollout.vllm.gauges import Fill, Gauges, read_fill

METRICS = """# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 9.5e-05
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.75
vllm:num_requests_waiting{engine="0",model_name="policy"} 5.0
vllm:num_requests_waiting{engine="1",model_name="policy"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 5.0
vllm:num_preemptions_total{engine="0",model_name="policy"} 1.0
vllm:num_preemptions_total{engine="1",model_name="policy"} 3.0
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.795e+09
"""


def test_a_servers_fill_is_that_of_its_fullest_engine_and_the_sum_of_what_waits():
    assert read_fill(METRICS.encode()) == Fill(0.75, 7, 4)
    assert read_fill(METRICS.encode().replace(b'0.75', b'1.2e-05')) == Fill(9.5e-05, 7, 4)
    assert read_fill(b'\xff no metrics') == Fill(None, None, None)


def test_a_step_has_the_largest_of_its_looks_and_the_preemptions_since_the_step_before():
    gauges = Gauges(None)
    assert gauges.taken() == {}
    for url, fill in (('a', Fill(0.5, 3, 100)), ('b', Fill(0.9, 0, 7)), ('a', Fill(0.1, 4, 102)), ('b', Fill(None, None, 8))):
        gauges.found(url, fill)
    assert gauges.taken() == {'perf/servers/cache_used': 0.9, 'perf/servers/waiting': 4, 'perf/servers/preemptions': 3}
    assert gauges.taken() == {}
    gauges.found('a', Fill(None, None, 2))  # it was started again
    gauges.found('b', Fill(None, None, 8))
    assert gauges.taken() == {'perf/servers/preemptions': 2}


@pytest.fixture
def connect(policy, tmp_path):
    yield from connecting(policy, tmp_path)


def looked(engine, server, looks):
    """The engine's metrics once the server was looked at so often; within 20 s."""
    deadline = time.monotonic() + 20
    while server.paths().count('/metrics') < looks and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.paths().count('/metrics') == looks
    asyncio.run_coroutine_threadsafe(ended(engine), engine._loop).result(60)
    return engine.metrics()


async def ended(engine):
    await asyncio.gather(*engine._gauges._looks.values(), return_exceptions=True)


@pytest.mark.slow
def test_a_server_is_looked_at_with_its_last_reply(connect, prompts):
    server = StandIn(good, {'/metrics': (200, METRICS.encode())})
    engine = connect(server)
    engine.generate(prompts[:1], 2, SAMPLING, DRAWS)
    assert looked(engine, server, 1) == {'perf/servers/cache_used': 0.75, 'perf/servers/waiting': 7, 'perf/servers/preemptions': 0}


@pytest.mark.slow
@pytest.mark.parametrize('says', [(500, b''), (200, b'no metrics')])
def test_a_look_that_finds_nothing_leaves_the_group_alone(says, connect, prompts):
    server = StandIn(good, {'/metrics': says})
    engine = connect(server)
    for looks in (1, 2):  # the second comes sooner than one is due, with the last reply
        assert len(engine.generate(prompts[:1], 2, SAMPLING, DRAWS)) == 1
        assert looked(engine, server, looks) == {}
    assert not [look.exception() for look in engine._gauges._looks.values() if look.exception()]
