"""What many tests share: a tiny random Qwen2 as transformers writes it, the same as our parameters, and groups it sampled."""

import os

# The tests' tolerances are those of float32 on CPU. Set before JAX and transformers are imported; nothing is fetched.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('JAX_NUM_CPU_DEVICES', '1')  # whatever this machine's cores are; a test that wants more says so
# No array changes its dtype or gains an axis unless the code says so. Set in the environment for the processes that tests start.
os.environ['JAX_NUMPY_DTYPE_PROMOTION'] = 'strict'
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'

import functools
import gc
import json
import logging
import signal
import sys
import tempfile
from pathlib import Path

sys.path.append(os.path.join(sys.prefix, 'torch'))  # see the Makefile
# Under nohup, or in a script's background, these are ignored, and so they would be in what tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One cache of compiled programs for the whole suite: its workers read it, and so does every process that a test starts.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    PROGRAMS = tempfile.TemporaryDirectory(prefix='bapo-programs-', ignore_cleanup_errors=True)
    os.environ['JAX_COMPILATION_CACHE_DIR'] = PROGRAMS.name
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from group_builders import graded, right
from hub_stub import hub_stub  # noqa: F401  (a fixture)
from hypothesis import HealthCheck, settings
from learners import make_learner, make_stale
from pictured import pictured  # noqa: F401  (a fixture)
from real_servers import base, connect, connect_seeing, seeing, seeing_server, server, two_servers  # noqa: F401  (fixtures)
from tiny import STOP_TOKENS, TINY, Policy
from tiny_vl import vl_directory  # noqa: F401  (a fixture)

from bapo_jax.groups import Prompt
from bapo_jax.learner.logprobs import Compute, token_logprobs
from bapo_jax.learner.mini_batch import Sequences
from bapo_jax.models import hf
from bapo_jax.rollout.engine import FRESH, Draw, Sampling
from bapo_jax.rollout.inprocess.engine import JaxEngine
from bapo_jax.rollout.inprocess.room import Limits

# A busy machine is no fault of the code: hypothesis would fail an example that takes 200 ms.
settings.register_profile('untimed', deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile('untimed')


# The files of tests that vLLM answers, by the fixture that starts its servers.
SERVED = {
    'two_servers': ('rollout/servers/test_real_server.py', 'test_evaluate.py', 'test_faults_servers.py', 'test_train_vllm.py'),
    'seeing_server': ('rollout/servers/test_real_server_images.py', 'test_geometry_run.py'),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """For two workers (-n 2): a file's tests stay together, and so do all that need the same servers, which start once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition('::')[0]
            return next((fixture for fixture, files in SERVED.items() if file.endswith(files)), file)

    return ByFile(config, log)


def pytest_collection_modifyitems(items):
    """What takes long begins first."""
    long = {item.path for item in items if item.get_closest_marker('slow')}
    items.sort(key=lambda item: item.path not in long)
    missing = {(f, str(i.path)) for i in items for f in SERVED if f in i.fixturenames and not str(i.path).endswith(SERVED[f])}
    assert not missing, f'files to add to SERVED: {missing}'


@pytest.fixture(autouse=True)
def level_of_logs():
    """A command that runs within a test may have made absl quieter for those that follow."""
    before = logging.getLogger('absl').level
    yield
    logging.getLogger('absl').setLevel(before)


@pytest.fixture(autouse=True, scope='module')
def room_for_programs():
    """Programs keep memory, and memory maps, of which Linux gives a process 65,530; one that needs more crashes."""
    yield
    if len(Path('/proc/self/maps').read_bytes().splitlines()) > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope='session')
def tiny_hf(tmp_path_factory):
    """A function of overrides of TINY: a Hugging Face directory of that model, no parameter at its initial value."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = {}

    def make(**overrides):
        key = repr(overrides)
        if key in made:
            return made[key]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY, **overrides}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.3))
                parameter.add_(1.0 if parameter.ndim == 1 else 0.0)
                if model.config.model_type == 'qwen3_5_text' and name.endswith('norm.weight') and 'linear_attn' not in name:
                    parameter.sub_(1.0)  # factors are 1 + weight
                if name.endswith('dt_bias'):  # linear attention that forgets within a token would show nothing
                    parameter.sub_(4.0)
        path = tmp_path_factory.mktemp('hf') / 'model'
        model.save_pretrained(path)
        made[key] = path
        return path

    return make


@pytest.fixture(scope='session')
def make_policy(tiny_hf):
    """A function of overrides of TINY: that model as this package reads it."""

    def make(dtype='float32', **overrides):
        path = tiny_hf(**overrides)
        config = hf.read_config(path, dtype)
        return Policy(path, config, hf.abstract_params(config)[0], jax.tree.map(np.array, hf.load_params(path, config)))

    return make


@pytest.fixture(scope='session')
def policy(make_policy):
    return make_policy()


@pytest.fixture(scope='session')
def prompts(policy):
    """Six prompts of different lengths; ids are no row numbers."""
    rng = np.random.default_rng(0)
    return [Prompt(10 + 7 * i, 'countdown', rng.integers(15, 96, 2 + i % 5, dtype=np.int32), {}) for i in range(6)]


@pytest.fixture(scope='session')
def groups(policy, prompts):
    """Six groups of four responses sampled from `policy` at temperature 1, each with right and wrong ones; up to 16 tokens."""
    engine = JaxEngine(policy.graph, policy.config, STOP_TOKENS, Limits(32, 16))
    engine.load(policy.params, 0)
    answers = engine.generate(prompts, 4, Sampling(1.0, 10), [Draw(0, 0, FRESH)] * len(prompts))
    return [graded(p, r, right(k, 4)) for p, r, k in zip(prompts, answers, (1, 2, 3, 2, 1, 3), strict=True)]


@pytest.fixture(scope='session')
def stale(groups):
    """The groups as if an older policy had sampled them."""
    return make_stale(groups)


@pytest.fixture(scope='session')
def learner(policy):
    """A function of a config and changes to it: that Learner of `policy`, compiled once."""
    return functools.partial(make_learner, policy)


@pytest.fixture(scope='session')
def score(policy):
    """The trainer's log-probs and entropy, compiled: (params, tokens, segment, position, temperature) -> two arrays [B, T].

    Every token counts as a response's, but for the first of a segment.
    """

    @functools.partial(jax.jit, static_argnames=('compute', 'graph'))
    def run(params, tokens, segment, position, temperature, *, compute=Compute(), graph=policy.graph):
        sequences = Sequences(tokens, segment, position, response=jnp.where(position > 0, segment, 0))
        return token_logprobs(nnx.merge(graph, params), sequences, temperature, compute)[:2]

    return run


@pytest.fixture(scope='session')
def benchmark(tmp_path_factory):
    """A file of four problems."""
    path = tmp_path_factory.mktemp('benchmark') / 'few.jsonl'
    rows = [([3, 5, 2], 30), ([44, 19, 35], 98), ([7, 2, 9], 18), ([8, 4, 6, 2], 20)]
    path.write_text(''.join(json.dumps({'nums': n, 'target': t}) + '\n' for n, t in rows))
    return path
