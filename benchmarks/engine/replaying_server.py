"""Stands in for a vLLM 0.32 server, in a process of its own: it answers with replies made beforehand, byte
for byte as vLLM writes.

    python -m benchmarks.engine.replaying_server PORT REPLIES GROUP_SIZE TOKENS VOCABULARY VERSION

Prompt p, whose first token is p, gets reply p modulo REPLIES. The tokens of reply i are `random_group(i, …)`.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.rollout.vllm.replies import ROUTE
from bapo_jax.rollout.vllm.supervise import free_port
from bapo_jax.weights.manifest import read_manifest

START_S = 120.0  # making four replies of 65,536 tokens takes some seconds


class Sampled(NamedTuple):
    """One response as the server's sampler gives it."""

    tokens: np.ndarray  # int32 [tokens]
    logp: np.ndarray  # float32 [tokens]
    rank: np.ndarray  # int32 [tokens], 1 for the likeliest token
    finish: str = 'length'


def random_group(seed: int, group_size: int, tokens: int, vocabulary: int) -> list[Sampled]:
    rng = np.random.default_rng(seed)

    def response() -> Sampled:
        logp = -rng.exponential(0.5, tokens).astype(np.float32)
        return Sampled(
            rng.integers(0, vocabulary, tokens, np.int32), logp, rng.integers(1, 9, tokens, np.int32)
        )

    return [response() for _ in range(group_size)]


def unnamed(version: int) -> str:
    """A policy's name before its checksum is known; names of one version have one length."""
    return f'{version}-{0:08x}'


def reply(group: Sequence[Sampled], version: str, prompt_tokens: int = 4) -> dict[str, Any]:
    """What POST /inference/v1/generate says to logprobs=0: every field that vLLM 0.32 sends, in its order."""
    written = sum(len(s.tokens) for s in group)
    usage = {
        'prompt_tokens': prompt_tokens,
        'total_tokens': prompt_tokens + written,
        'completion_tokens': written,
    }
    return {
        'request_id': 'generate-tokens-97254d82c0d42d15', 'model': 'policy', 'created': 1795419194,
        'usage': {**usage, 'prompt_tokens_details': None, 'completion_tokens_details': None},
        'prompt_logprobs': None, 'prompt_token_id_logprobs': None, 'prompt_token_ids': None, 'mm_placeholders': None,
        'metrics': None, 'kv_transfer_params': None, 'ec_transfer_params': None, 'output_mode': 'tokens',
        'choices': [choice(i, sampled, version) for i, sampled in enumerate(group)],
    }  # fmt: skip


def choice(index: int, sampled: Sampled, version: str) -> dict[str, Any]:
    """A response within a reply. A token's log-prob stands there twice, the second time as the likeliest that
    was asked for.
    """
    rows = zip(sampled.tokens.tolist(), sampled.logp.tolist(), sampled.rank.tolist(), strict=True)
    entries = [{'token_id': token, 'logprob': logp, 'rank': rank} for token, logp, rank in rows]
    return {
        'index': index, 'finish_reason': sampled.finish, 'stop_reason': None, 'token_ids': sampled.tokens.tolist(),
        'routed_experts': None, 'sampling_mask': None,
        'weight_versions': [{'version': version, 'start': 0, 'end': len(sampled.tokens)}],
        'logprobs': {'content': [{**entry, 'top_logprobs': [entry]} for entry in entries]},
    }  # fmt: skip


def encode(said: Any) -> bytes:
    """JSON as vLLM's web framework writes it."""
    return json.dumps(said, ensure_ascii=False, allow_nan=False, separators=(',', ':')).encode()


@contextmanager
def running(replies: int, group_size: int, tokens: int, vocabulary: int, version: int) -> Iterator[str]:
    """A server's URL. Raises RuntimeError where it is not ready in `START_S` seconds."""
    port, give_up = free_port(), time.monotonic() + START_S
    words = [str(n) for n in (port, replies, group_size, tokens, vocabulary, version)]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen([sys.executable, '-m', 'benchmarks.engine.replaying_server', *words], cwd=root)
    try:
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(
                    f'the replaying server on port {port} ended, or was not ready in {START_S:.0f} s'
                )
            time.sleep(0.05)
        yield f'http://127.0.0.1:{port}'
    finally:
        process.kill()
        process.wait(timeout=10)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(('127.0.0.1', port), timeout=1.0).close()
    except ConnectionRefusedError:
        return False
    return True


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024  # connections that open at once


def serve(port: int, bodies: Sequence[bytes], named: str) -> None:
    """Replays the `bodies`, which state the policy `named`, under the name that the server is given."""
    bodies = list(bodies)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'  # connections stay open

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers['Content-Length'] or 0)) or 'null')
            if self.path == ROUTE:
                said = bodies[asked['token_ids'][0] % len(bodies)]
            elif self.path == '/v1/models':
                said = encode({'data': [{'max_model_len': 2**20}]})
            elif self.path == '/collective_rpc':
                manifest = read_manifest(asked['kwargs']['path'])
                said = encode({'results': [{'version': manifest.version, 'checksum': manifest.checksum}]})
            elif self.path == '/update_weight_version':
                bodies[:] = [body.replace(encode(named), encode(asked['new_version'])) for body in bodies]
                said = encode({'success': True})
            else:
                said = encode({'success': True})
            self.send_response(200)
            self.send_header('content-length', str(len(said)))
            self.send_header('content-type', 'application/json')
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_POST

        def log_message(self, *_) -> None:
            pass

    _Server(('127.0.0.1', port), Handler).serve_forever()


def main() -> None:
    port, replies, group_size, tokens, vocabulary, version = map(int, sys.argv[1:])
    groups = [random_group(i, group_size, tokens, vocabulary) for i in range(replies)]
    serve(port, [encode(reply(group, unnamed(version))) for group in groups], unnamed(version))


if __name__ == '__main__':
    main()
