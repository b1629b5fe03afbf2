"""Stand-ins for a rollout server, which inject one fault each, and engines for them."""

import copy
import threading

from http_stub import HttpStub

from bapo_jax.rollout.engine import FRESH, Draw, Sampling
from bapo_jax.rollout.vllm.client import VllmEngine
from bapo_jax.rollout.vllm.supervise import SupervisedServer
from bapo_jax.weights.manifest import read_manifest

SAMPLING, DRAWS = Sampling(1.0, 4), [Draw(0, 1, FRESH)] * 6  # one a prompt


def choice(index, version=None, tokens=(5, 6, 3), logprob=-0.5):
    """A sound member of a group; of the policy that the server was told, unless there is a `version`."""
    return {
        'index': index, 'token_ids': tokens, 'logprobs': {'content': [{'logprob': logprob}] * len(tokens)}, 'finish_reason': 'stop',
        'weight_versions': [{'version': version, 'start': 0, 'end': len(tokens)}],
    }  # fmt: skip


def named(answer, name):
    """The answer, where it has choices without a policy, with that one's name."""
    said = copy.deepcopy(answer[1]) if isinstance(answer[1], dict) else {}
    for span in (span for member in said.get('choices', ()) for span in member['weight_versions']):
        span['version'] = span['version'] or name
    return (answer[0], said, *answer[2:]) if said else answer


class StandIn(HttpStub):
    """An HTTP server that takes every control call and answers generate with `reply(number of the request)`.

    `asked` has the prompts that it was sent. `says` has its answers on other routes. `loaded` overrides what it says of a policy
    that it was told to load.
    """

    def __init__(self, reply, says=None, **loaded):
        self.calls, self.asked, self.says, lock = [], [], says or {}, threading.Lock()

        def answer(path, headers, body):
            self.calls.append((path, headers['Authorization']))
            if path in self.says:
                return self.says[path]() if callable(self.says[path]) else self.says[path]
            if path == '/inference/v1/generate':
                with lock:
                    self.asked.append(body['token_ids'])
                    number = len(self.asked)
                return named(reply(number), self.name)
            if path == '/collective_rpc':
                manifest = read_manifest(body['kwargs']['path'])
                return 200, {'results': [{'version': manifest.version, 'checksum': manifest.checksum, **loaded}]}
            if path == '/update_weight_version':
                self.name = body['new_version']
            return 200, {'success': True, 'data': [{'max_model_len': 512}]}

        super().__init__(answer)

    def paths(self):
        return [path for path, _ in self.calls]


def good(_):
    return 200, {'choices': [choice(1), choice(0, tokens=[9, 3], logprob=-1.0)]}


def connecting(policy, tmp_path):
    """Of a fixture: a function that makes an engine for these stand-ins, holding policy 7."""
    engines = []

    def make(*servers, load=True, policies='policy', **options):
        engine = VllmEngine(
            [s if isinstance(s, SupervisedServer) else s.url for s in servers], tmp_path / policies, policy.config, token='secret',
            dtype='float32', stop_tokens=(3,),
            **{'concurrency': 4, 'deadline_s': 5.0, **options},
        )  # fmt: skip
        engines.append(engine)
        if load:
            engine.load(policy.params, 7)
        return engine

    yield make
    for engine in engines:
        engine.close()
