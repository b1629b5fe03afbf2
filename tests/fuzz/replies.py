"""What servers say: groups of responses, control routes, metrics, and how long to wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from mutations import damaged, other_text

from bapo_jax.rollout.engine import RolloutError
from bapo_jax.rollout.vllm.replies import (
    Asked,
    BadResponse,
    read_group,
    read_load,
    read_results,
    read_served,
    read_success,
    seconds_to_wait,
)  # fmt: skip
from benchmarks.engine.replaying_server import random_group, reply
from tests.fuzz.feed import Target, parsing

SERVER = 'http://there:8000'
VOCABULARY, STOPS, MARK, POLICY = 1000, (3, 4), 9, '7-0a1b2c3d'
PROMPT = [5, MARK, MARK, 6]  # with an image of two features
CONTROL = {'results': [{'version': 7, 'checksum': 'ab'}], 'success': True, 'data': [{'id': 'policy', 'max_model_len': 512}]}
METRICS = '\n'.join(
    f'vllm:{kind}_tokens_total{{engine="{engine}",model_name="policy"}} {value}'
    for engine in (0, 1) for kind, value in (('prompt', '748.0'), ('generation', '1.5e+03'))
)  # fmt: skip


def recorded() -> dict[str, Any]:
    """What vLLM says, byte for byte but for its names (rollout/servers/test_real_server.py): a response that stops, and one that is cut."""
    stops, cut = random_group(0, 2, 4, VOCABULARY)
    stops = stops._replace(tokens=np.array([5, 999, 8, STOPS[0]], np.int32), finish='stop')
    said = reply([stops, cut._replace(tokens=np.array([7, 7, 0, MARK], np.int32))], POLICY)
    return said | {'prompt_token_ids': PROMPT}


def read_sound_group(body: bytes, *seen: Any) -> None:
    """Reads a group; what comes out is what could be trained on."""
    responses = read_group(body, Asked(2, 4, (POLICY,), VOCABULARY, STOPS, *seen), SERVER)
    assert len(responses) == 2
    for r in responses:
        assert r.tokens.shape == r.logp.shape and 1 <= len(r.tokens) <= 4 and set(r.versions) == {7}
        assert np.isfinite(r.logp).all() and (r.logp <= 0).all() and (r.tokens >= 0).all() and (r.tokens < VOCABULARY).all()
        stops = np.isin(r.tokens, STOPS)
        assert not stops[:-1].any() and stops[-1] == (r.finish == 'stop') and (r.finish == 'stop' or len(r.tokens) == 4)


def _read(said: dict[str, str]) -> None:
    body, route = said['text'].encode('latin-1'), said['route']
    if route in ('group', 'seen'):
        read_sound_group(body, *((MARK, np.array(PROMPT, np.int32)) if route == 'seen' else ()))
    elif route == 'metrics':
        assert read_load(body).tokens >= 0
    elif route == 'wait':
        assert 0 <= seconds_to_wait(said['text']) < 1e12
    elif route == 'models':
        served = read_served(body, SERVER)
        assert isinstance(served.model_length, int) and all(isinstance(name, str) for name in served.names)
    else:
        value = {'results': read_results, 'success': read_success}[route](body, SERVER)
        assert isinstance(value, bool) or value and all(isinstance(worker, dict) for worker in value)


def _make(rng: Random) -> dict[str, str]:
    route = rng.choice(('group', 'group', 'group', 'seen', 'results', 'success', 'models', 'metrics', 'wait'))
    if route == 'metrics':
        return {'route': route, 'text': damaged(METRICS, rng)}
    if route == 'wait':
        return {'route': route, 'text': damaged(rng.choice(('17', 'Tue, 24 Nov 2026 02:00:00 GMT', '-1', '1e9')), rng)}
    return {'route': route, 'text': other_text(recorded() if route in ('group', 'seen') else CONTROL, rng)}


@contextmanager
def replies(_: Path) -> Iterator[Target]:
    yield parsing(_make, _read, 10.0, BadResponse, RolloutError, naming=f'^{SERVER}')
