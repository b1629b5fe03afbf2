"""The client's benchmark at a small size: the engine receives what the replaying server sends."""

import numpy as np
import pytest
from rich.console import Console

from benchmarks.engine import client_load
from benchmarks.engine.replaying_server import encode, random_group, reply, unnamed


@pytest.mark.slow
def test_every_group_comes_out_as_it_was_sent_and_every_part_has_a_row():
    load = client_load.measure(groups=6, tokens=64, concurrency=2, repeats=1)
    sent = [random_group(i % client_load.REPLIES, client_load.GROUP_SIZE, 64, client_load.VOCABULARY) for i in range(6)]
    assert load.bytes == sum(len(encode(reply(group, unnamed(client_load.POLICY)))) for group in sent)
    for received, group in zip(load.groups, sent, strict=True):
        for response, sampled in zip(received, group, strict=True):
            np.testing.assert_array_equal(response.tokens, sampled.tokens)
            np.testing.assert_array_equal(response.logp, sampled.logp)
    console = Console(width=132, record=True)
    console.print(client_load.table(load))
    shown = console.export_text()
    assert '6 groups, 3,072 tokens' in shown
    assert all(f' {part} ' in shown for part in ('ask', 'sockets', 'reading', 'sockets + reading'))
