"""Real vLLM servers: the trainer's log-probs, policies that change under way, what is refused, and what a death costs."""

import asyncio
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import numpy as np
import pytest
from group_builders import begun, version_of
from real_servers import BASE, TOKEN, ask, memory_bytes, metrics, tokens_written, trainer_logp

from bapo_jax.groups import Author
from bapo_jax.models.tokenizer import load_tokenizer
from bapo_jax.rollout.engine import FRESH, Draw, Sampling
from bapo_jax.rollout.episodes import Episodes
from bapo_jax.rollout.vllm import client, watch
from bapo_jax.rollout.vllm.gauges import read_fill
from bapo_jax.rollout.vllm.loading import PolicyLoading, PolicyRefused
from bapo_jax.rollout.vllm.replies import ROUTE, OtherPolicy, read_load, request
from bapo_jax.weights.manifest import MANIFEST, WEIGHTS, number_of, read_manifest
from bapo_jax.weights.publish import path_of, publish
from benchmarks.engine.replaying_server import Sampled, encode, reply

pytestmark = pytest.mark.slow
G = 4


def generate(engine, prompts, temperature=1.0, max_tokens=48):
    return engine.generate(prompts, G, Sampling(temperature, max_tokens), [Draw(0, 1, FRESH)] * len(prompts))


def name_of(engine, version):
    """By which servers know a policy that the engine has loaded."""
    return read_manifest(path_of(engine._policies, version)).name


def assert_log_probs_are_the_trainers(base, params, answers, prompts, temperature):
    asked = [p for p, responses in zip(prompts, answers, strict=True) for _ in responses]
    responses = [r for members in answers for r in members]
    want = trainer_logp(base, params, asked, [r.tokens for r in responses], temperature)
    for response, logp in zip(responses, want, strict=True):
        np.testing.assert_allclose(response.logp, logp, rtol=0, atol=2e-4)


def test_log_probs_are_the_trainers_before_and_after_ten_reloads_back_and_forth(base, server, connect):
    engine, prompts = connect(server), base.prompts[:4]
    for version in range(11):
        params = (base.params, base.moved)[version % 2]
        engine.load(params, version)
        for temperature in (1.0, 0.6):
            answers = generate(engine, prompts, temperature)
            assert {version_of(r) for members in answers for r in members} == {version}
            assert_log_probs_are_the_trainers(base, params, answers, prompts, temperature)


def test_turns_are_answered_while_a_policy_is_loaded_and_the_environments_tokens_are_read(base, server, connect):
    """Every turn has the log-probs of the policy that its span names; a tool says when the next one is loaded."""
    inner, tokenizer, loaded, called = connect(server), load_tokenizer(BASE), threading.Event(), threading.Event()

    def again(ground_truth, turn):
        called.set()
        assert loaded.wait(120)
        return ' no '

    engine, prompts = Episodes(inner, tokenizer, again, 1), base.prompts[:4]
    engine.load(base.params, 20)
    futures = engine.ask(begun(prompts), G, Sampling(1.0, 120), [Draw(0, 1, FRESH)] * len(prompts))
    assert called.wait(120)
    engine.load(base.moved, 21)
    loaded.set()
    answers = [future.result(120) for future in futures]
    said = [r for group in answers for r in group if len(r.spans) > 1]
    assert said and all(r.spans[-2].author == Author.ENVIRONMENT and tokenizer.decode(r.spans[-2].tokens) == ' no ' for r in said)
    assert {r.spans[-1].version for r in said} == {21} and 20 in {r.spans[0].version for r in said}
    asked = [p for p, group in zip(prompts, answers, strict=True) for _ in group]
    responses = [r for group in answers for r in group]
    of = {v: trainer_logp(base, params, asked, [r.tokens for r in responses], 1.0) for v, params in ((20, base.params), (21, base.moved))}
    for i, response in enumerate(responses):
        at = 0
        for span in response.spans:
            part = slice(at, at := at + len(span.tokens))
            if span.author == Author.POLICY:
                np.testing.assert_allclose(span.logp, of[span.version][i][part], rtol=0, atol=2e-4)


def test_a_reply_is_byte_for_byte_what_the_benchmarks_replay(base, server, connect):
    name = name_of(connect(server), 0)
    body = request(base.prompts[0], G, Sampling(1.0, 48), list(base.stop_tokens))
    headers = {'Authorization': f'Bearer {TOKEN}'}
    said = httpx.post(server.url + ROUTE, json=body, headers=headers, timeout=120, trust_env=False).content
    read = json.loads(said)
    group = []
    for choice in read['choices']:
        logp, rank = (np.array([entry[key] for entry in choice['logprobs']['content']]) for key in ('logprob', 'rank'))
        group.append(Sampled(np.array(choice['token_ids']), logp, rank, choice['finish_reason']))
    ours = reply(group, name, len(base.prompts[0].tokens))
    for choice, theirs in zip(ours['choices'], read['choices'], strict=True):
        choice['stop_reason'] = theirs['stop_reason']  # a token of stop_token_ids, which the replayed ones never have
    assert encode({**ours, 'request_id': read['request_id'], 'created': read['created']}) == said


def test_metrics_tell_what_runs_that_nothing_does_and_that_an_iteration_is_a_token_of_each(base, server, connect):
    """By these `rollout/vllm/watch.py` tells a lost reply from a slow one."""
    connect(server)
    before, seen, groups, end = read_load(metrics(server)), set(), 0, time.monotonic() + 120
    with ThreadPoolExecutor(1) as pool:
        while 8 not in seen and time.monotonic() < end:  # a busy machine may look only before and after a group
            asked, groups = pool.submit(ask, server, base.prompts[0], n=8, max_tokens=200, ignore_eos=True), groups + 1
            while not asked.done():
                seen.add(read_load(metrics(server)).sequences)
            assert len(asked.result()) == 8
    assert max(seen) == 8
    after = read_load(metrics(server))
    assert None not in read_fill(metrics(server))  # rollout/vllm/gauges.py
    assert before.sequences == after.sequences == 0 and after.tokens - before.tokens >= groups * 8 * 200
    assert groups * 200 <= after.iterations - before.iterations < watch._STAGES * groups * 200


def test_a_request_in_flight_across_a_reload_says_which_policy_wrote_which_token(base, server, connect):
    engine, prompt, loaded = connect(server), base.prompts[0], threading.Event()

    def ask_until_loaded(max_tokens):
        choices = []
        while not loaded.is_set():
            choices += ask(server, prompt, n=8, max_tokens=max_tokens, ignore_eos=True)
        return choices

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask_until_loaded, max_tokens) for max_tokens in (400, 280)]  # their ends seldom coincide
        try:
            for version in range(1, 6):  # on a busy machine a policy may come just when nothing is in flight, but not five times
                started, deadline = tokens_written(server) + 2 * 8 * 10, time.monotonic() + 100
                while tokens_written(server) < started:  # ten tokens of each
                    assert time.monotonic() < deadline
                engine.load((base.params, base.moved)[version % 2], version)
        finally:
            loaded.set()
    choices = [choice for answered in asking for choice in answered.result()]
    responses = [np.array(c['token_ids']) for c in choices]
    by_policy = [trainer_logp(base, p, [prompt] * len(choices), responses) for p in (base.params, base.moved)]
    for choice, response, *logp in zip(choices, responses, *by_policy, strict=True):
        spans = choice['weight_versions']
        assert [s['start'] for s in spans] == [0, *[s['end'] for s in spans[:-1]]] and spans[-1]['end'] == len(response)
        want = np.concatenate([logp[number_of(s['version']) % 2][s['start'] : s['end']] for s in spans])
        got = [entry['logprob'] for entry in choice['logprobs']['content']]
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)
    assert max(len(choice['weight_versions']) for choice in choices) > 1


def test_the_engine_loads_while_groups_are_under_way_and_each_token_has_the_log_prob_of_its_own_policy(base, server, connect):
    engine, prompts, version, deadline = connect(server), base.prompts * 8, 0, time.monotonic() + 120
    longest = 0
    while longest < 2:  # where most responses are short, a policy may come between them
        assert time.monotonic() < deadline
        asked = engine.ask(begun(prompts), G, Sampling(1.0, 400), [Draw(0, 1, FRESH)] * len(prompts))
        started, version = tokens_written(server), version + 1
        while tokens_written(server) < started + 100 and not asked[-1].done():
            time.sleep(0.01)
        engine.load((base.params, base.moved)[version % 2], version)
        responses = [r for group in asked for r in group.result(120)]
        longest = max(len(r.spans) for r in responses)
    of_response = [prompt for prompt in prompts for _ in range(G)]
    by_policy = [trainer_logp(base, p, of_response, [r.tokens for r in responses]) for p in (base.params, base.moved)]
    for response, *logp in zip(responses, *by_policy, strict=True):
        moved = np.repeat([s.version % 2 for s in response.spans], [len(s.tokens) for s in response.spans])
        np.testing.assert_allclose(response.logp, np.where(moved, logp[1], logp[0]), rtol=0, atol=2e-4)
        assert {s.version for s in response.spans} <= {version - 1, version} and sorted(response.versions) == response.versions.tolist()


def test_of_two_trainers_on_one_server_neither_takes_the_others_responses_for_its_own(base, server, connect, monkeypatch):
    """Their numbers meet. First one loads after the other; then in the middle of the other's load, before that names its policy."""
    ours, theirs = connect(server), connect(server)
    generate(ours, base.prompts[:2])  # both hold the base, so that this is sound
    ours.load(base.moved, 1)
    theirs.load(base.params, 1)
    with pytest.raises(OtherPolicy, match=f'instead of {name_of(ours, 1)}. Another trainer has loaded'):
        generate(ours, base.prompts[:2])
    assert_log_probs_are_the_trainers(base, base.params, generate(theirs, base.prompts[:2]), base.prompts[:2], 1.0)

    told = PolicyLoading._told

    async def in_between(self, url, route, *rest, **options):
        if self is ours._serving.loading and route == '/update_weight_version':
            await asyncio.to_thread(theirs.load, base.params, 2)
        return await told(self, url, route, *rest, **options)

    monkeypatch.setattr(PolicyLoading, '_told', in_between)
    with pytest.raises(PolicyRefused, match=r'refused policy 2-.*: it now holds 2-.*\. Another trainer has'):
        ours.load(base.moved, 2)
    with pytest.raises(OtherPolicy):  # the server has our name now
        generate(theirs, base.prompts[:2])


def test_fifty_reloads_leave_memory_where_it_was(base, server, connect):
    engine = connect(server)
    for version in range(1, 6):
        engine.load((base.params, base.moved)[version % 2], version)
        generate(engine, base.prompts)
    before = memory_bytes(server)
    assert before > 2**30
    for version in range(6, 56):
        engine.load((base.params, base.moved)[version % 2], version)
    generate(engine, base.prompts)
    assert memory_bytes(server) <= 1.05 * before


def missing(path):
    (path / MANIFEST).unlink()


def truncated(path):
    data = max((path / WEIGHTS).rglob('*'), key=lambda p: p.stat().st_size * p.is_file())
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])


def wrong_shape(path):
    manifest = json.loads((path / MANIFEST).read_text())
    manifest['tensors']['model.norm.weight'].update(shape=[64], part=[64])
    (path / MANIFEST).write_text(json.dumps(manifest))


def wrong_checksum(path):
    manifest = json.loads((path / MANIFEST).read_text())
    manifest['tensors']['model.norm.weight']['crc32']['0'] += 1
    (path / MANIFEST).write_text(json.dumps(manifest))


def other_model(path):
    manifest = json.loads((path / MANIFEST).read_text())
    manifest['model']['num_hidden_layers'] = 28
    (path / MANIFEST).write_text(json.dumps(manifest))


def damaged_by(damage):
    """`publish`, and then the damage."""

    def publish_and_damage(*args):
        path = publish(*args)
        damage(path)
        return path

    return publish_and_damage


def other_head(path):
    manifest = json.loads((path / MANIFEST).read_text())
    manifest['model']['head_dtype'] = 'bfloat16'
    (path / MANIFEST).write_text(json.dumps(manifest))


def test_the_workers_model_has_a_head_in_float32(base, server, connect, monkeypatch):
    """A worker that refuses a policy says what its own model's config has there, by which vLLM computes logits (`serve`)."""
    engine = connect(server)
    monkeypatch.setattr(client, 'publish', damaged_by(other_head))
    with pytest.raises(PolicyRefused, match=r"another model: head_dtype 'bfloat16' \(the server has 'float32'\)"):
        engine.load(base.moved, 1)


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (missing, r'manifest\.json is missing'),
        (truncated, r'bytes, but the manifest says'),
        (wrong_shape, r'model\.norm\.weight has shape \(64,\), but \(128,\) in '),
        (wrong_checksum, r'checksum of model\.norm\.weight'),
        (other_model, r'another model: num_hidden_layers 28 \(the server has 4\)'),
    ],
)
def test_a_policy_that_must_not_be_served_is_refused_and_the_old_one_stays(base, server, connect, monkeypatch, damage, message):
    engine = connect(server)
    name = name_of(engine, 0)
    monkeypatch.setattr(client, 'publish', damaged_by(damage))
    with pytest.raises(PolicyRefused, match=message):
        engine.load(base.moved, 1)
    [choice] = ask(server, base.prompts[0], max_tokens=16, ignore_eos=True)
    assert choice['weight_versions'] == [{'version': name, 'start': 0, 'end': 16}]
    [want] = trainer_logp(base, base.params, base.prompts[:1], [np.array(choice['token_ids'])])
    np.testing.assert_allclose([entry['logprob'] for entry in choice['logprobs']['content']], want, rtol=0, atol=2e-4)


def test_a_policy_of_other_tensors_is_refused_by_name(base, server, connect):
    longer = {**base.moved, 'norm': {'scale': np.ones(64, np.float32)}}
    with pytest.raises(PolicyRefused, match=r'model\.norm\.weight has shape \(64,\)'):
        connect(server).load(longer, 1)


@pytest.mark.parametrize(
    'route',
    ['/collective_rpc', '/pause', '/resume', '/sleep', '/update_weight_version', '/reset_prefix_cache', '/inference/v1/generate',
     '/v1/completions', '/v1/models', '/health', '/metrics', '/openapi.json', '/'],
)  # fmt: skip
def test_no_route_answers_without_the_token(server, route):
    for headers in ({}, {'Authorization': 'Bearer another'}):
        for method in ('GET', 'POST'):
            assert httpx.request(method, server.url + route, headers=headers, timeout=10, trust_env=False).status_code == 401


def test_of_two_servers_one_killed_in_mid_generation_the_other_answers_everything(base, two_servers, connect, monkeypatch):
    first, second = two_servers
    engine, answered = connect(first, second), []
    read_group = client.read_group

    def kill_at_its_second(body, asked, url):
        answered.append(url)
        if url == second.url and answered.count(url) == 2:
            os.killpg(second.pid, signal.SIGKILL)
        return read_group(body, asked, url)

    monkeypatch.setattr(client, 'read_group', kill_at_its_second)
    prompts = [p for p in base.prompts for _ in range(4)]
    answers = generate(engine, prompts)
    assert [len(members) for members in answers] == [G] * len(prompts)
    assert set(answered) == {first.url, second.url}
    assert_log_probs_are_the_trainers(base, base.params, answers, prompts, 1.0)
    engine.load(base.moved, 1)  # the dead one is left out
    assert_log_probs_are_the_trainers(base, base.moved, generate(engine, prompts[:4]), prompts[:4], 1.0)
