"""A proxy that the environment names for everything, and that records who comes."""

import pytest
from http_stub import HttpStub

NAMES = [name for kind in ('http', 'https', 'all', 'ws', 'grpc') for name in (f'{kind}_proxy', f'{kind}_proxy'.upper())]


def name_proxy(url, monkeypatch):
    """The environment's proxy is `url`, for every address."""
    for name in NAMES:
        monkeypatch.setenv(name, url)
    for name in ('no_proxy', 'NO_PROXY'):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def proxy(monkeypatch):
    """What the environment's proxy was asked for and what token it was given; it answers 502."""
    asked = []
    stub = HttpStub(lambda path, headers, _: asked.append((path, headers['Authorization'])) or (502, {}))
    name_proxy(stub.url, monkeypatch)
    yield asked
    stub.stop()
