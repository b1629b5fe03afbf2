"""A rollout server that replays recorded responses, so that runs on different processes train on the same ones.

It takes the routes that the trainer calls of vLLM's. What it says to a prompt was sampled once, by the in-process engine from the
quickstart's policy; it depends on the version it serves, and is the same for whoever asks.
"""

import threading

import numpy as np
from http_stub import HttpStub
from small_run import ROOT

from bapo_jax.groups import Prompt
from bapo_jax.models import hf
from bapo_jax.models.tokenizer import load_tokenizer, stop_tokens
from bapo_jax.rollout.engine import FRESH, Draw, Sampling
from bapo_jax.rollout.inprocess.engine import JaxEngine
from bapo_jax.rollout.inprocess.room import Limits
from bapo_jax.weights.manifest import check_bytes, read_manifest, read_tensors

BASE = ROOT / 'configs' / 'quickstart_base'


class RecordedServer(HttpStub):
    """`loaded` keeps the checked tensors of every policy it was told to load, by version."""

    def __init__(self):
        config = hf.read_config(BASE)
        ends = stop_tokens(BASE, load_tokenizer(BASE))
        self._engine = JaxEngine(hf.abstract_params(config)[0], config, ends, Limits(16, 32))
        self._engine.load(hf.load_params(BASE, config), 0)
        self._recorded, self._lock, self._version, self.loaded = {}, threading.Lock(), None, {}
        super().__init__(lambda path, _, body: (200, self._answer(path, body)))

    def _answer(self, path, body):
        if path == '/collective_rpc':
            manifest = read_manifest(body['kwargs']['path'])
            if body['method'] == 'check_policy':
                check_bytes(body['kwargs']['path'], manifest)
            if body['method'] == 'load_policy':
                read = read_tensors(body['kwargs']['path'], manifest)
                self.loaded[manifest.version] = {name: np.array(array) for name, array in read}
                self._version, self._name = manifest.version, manifest.name
            return {'results': [{'version': manifest.version, 'checksum': manifest.checksum}]}
        if path == '/inference/v1/generate':
            return {'choices': self._choices(tuple(body['token_ids']), body['sampling_params'])}
        if path == '/v1/models':
            return {'data': [{'max_model_len': 512}]}
        return {'success': True}

    def _choices(self, tokens, sampling):
        key = (tokens, self._version, sampling['n'], sampling['max_tokens'])
        with self._lock:
            if key not in self._recorded:
                prompt = Prompt(sum(tokens), 'countdown', np.array(tokens, np.int32), {})
                draw = Draw(0, self._version, FRESH)
                settings = Sampling(1.0, sampling['max_tokens'])
                self._recorded[key] = self._engine.generate([prompt], sampling['n'], settings, [draw])[0]
        return [
            {
                'index': i, 'token_ids': r.tokens.tolist(), 'logprobs': {'content': [{'logprob': float(x)} for x in r.logp]},
                'finish_reason': r.finish, 'weight_versions': [{'version': self._name, 'start': 0, 'end': len(r.tokens)}],
            }
            for i, r in enumerate(self._recorded[key])
        ]  # fmt: skip
