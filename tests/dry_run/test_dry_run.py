"""What a dry run says: arithmetic by hand, the step it compiles is the step that trains, and nothing is left behind."""

import dataclasses
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from in_dry_runs import MODEL, config
from learners import batch_of
from small_run import ROOT, small_config

from bapo_jax.cluster.devices import POOL
from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.config import resolve
from bapo_jax.dry_run import command as dry_run, targets  # noqa: F401  (targets: of the processes below)
from bapo_jax.dry_run.command import Result, measure
from bapo_jax.dry_run.memory import gpu_memory, matrix_sizes
from bapo_jax.dry_run.targets import Target
from bapo_jax.learner.learner import Learner
from bapo_jax.models import hf
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.experts import Routing
from bapo_jax.models.layers import Adapter
from bapo_jax.models.rotary import Rotation
from bapo_jax.rollout.inprocess.room import Limits, memory_of
from bapo_jax.run.state import copy_params
from benchmarks.compiled.fits import OTHER, prepared
from benchmarks.compiled.hlo import collectives, parse  # noqa: F401  (of the processes below)

TPU_COMPILER = ROOT / '.tpu-compiler'


def parameters(model):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(hf.abstract_params(model)[1]))


def test_the_gpu_model_by_hand():
    """2 rows of 512 tokens on each of 4 devices, bfloat16: D 128, 4·128 query and 2·128 key channels, F 384, V 1,000, L 3."""
    memory = gpu_memory(MODEL, config(4).learner, {'data': 1, 'fsdp': 4, 'tensor': 1}, 1_000_000)
    tokens = 1024
    kept = tokens * 2 * (4 * 128 + 4 * 512 + 4 * 256 + 3 * 384)
    logits = 12 * tokens * 1000
    assert logits > kept  # of a vocabulary as small as this
    # The vocabulary is one block of the head; the embedding has a gradient of its own.
    weights = 1000 * 128 * (4 + 2) + (2 * 2 + 4) * (2 * 128 * (512 + 256) + 3 * 128 * 384) + 4 * 1000 * 128
    assert memory == {
        'θ and the moments': 3_000_000,
        'gradients': 2_000_000,
        'residual stream': 3 * tokens * 128 * 2,
        'a tile of logits': logits,
        'weights gathered or cast': weights,
        'fragmentation': (3 * tokens * 128 * 2 + logits + weights) // 20,
    }
    rounded = gpu_memory(MODEL, config(4, adam__first_moment_dtype='bfloat16').learner, {'data': 1, 'fsdp': 4, 'tensor': 1}, 1_000_000)
    assert rounded == memory | {'θ and the moments': 2_500_000}
    without = gpu_memory(MODEL, config(4, remat='none').learner, {'data': 1, 'fsdp': 4, 'tensor': 1}, 1_000_000)
    assert without['residual stream'] == 3 * (kept * 5 // 4)
    on_host = config(4, adam__on_host=True).learner
    assert gpu_memory(MODEL, on_host, {'data': 1, 'fsdp': 4, 'tensor': 1}, 1_000_000) == memory  # XLA's plan is no smaller
    assert gpu_memory(MODEL, on_host, {'data': 1, 'fsdp': 1, 'tensor': 1}, 1_000_000)['θ and the moments'] == 1_000_000
    once = gpu_memory(MODEL, config(4).learner, {'data': 1, 'fsdp': 4, 'tensor': 1}, 1_000_000, gather_once=True)
    assert once['gradients and weights, whole'] == 12_000_000 and 'gradients' not in once
    assert once['weights gathered or cast'] == 1000 * 128 * (4 + 2)
    beside = gpu_memory(MODEL, config(4).learner, {'data': 1, 'fsdp': 4, 'tensor': 1}, 1_000_000, 50_000, gather_once=True)
    assert beside == once | {'gradients and weights, whole': 12_200_000}
    alone = gpu_memory(MODEL, config(4).learner, {'data': 4, 'fsdp': 1, 'tensor': 1}, 1_000_000, 50_000, gather_once=True)
    assert alone['gradients'] == 2_000_000  # nothing is gathered
    some = gpu_memory(MODEL, config(4, remat='attention_and_mlp_inputs').learner, {'data': 1, 'fsdp': 4, 'tensor': 1}, 1_000_000)
    assert some['residual stream'] == 3 * tokens * 2 * (2 * 128 + 512)
    many_words = dataclasses.replace(MODEL, vocab_size=30_000)
    wide = gpu_memory(many_words, config(4).learner, {'data': 1, 'fsdp': 2, 'tensor': 2}, 1_000_000)
    assert wide['a tile of logits'] == 3 * 4 * 2048 * 15_000 > kept


def test_gathering_once_also_gathers_what_is_not_trained_as_it_is_kept():
    """The base of an adapter: a shard in bfloat16 but for scales, of which each device has all, and then all of it."""
    c, model = config(4), dataclasses.replace(MODEL, adapter=Adapter(4, 8.0, 'all'))
    each = measure(c, model, '4x80GB')
    c.mesh.gather_once = True
    once = measure(c, model, '4x80GB').memory
    small = 3 * (512 + 2 * 256 + 2 * 128) + 128  # biases and scales
    shard = 2 * ((parameters(MODEL) - small) // 4 + small) + 2 * (3 * 2 * 128 + 128)
    assert once['weights that are not trained'] == each.memory['weights that are not trained'] == shard
    trained = each.memory['gradients'] // 2
    assert once['gradients and weights, whole'] == 4 * (3 * trained + shard)
    assert each.gathered_once == once['gradients and weights, whole'] - each.memory['gradients']


def test_the_base_of_30b_gathered_once_is_too_large_for_h100s(monkeypatch):
    """61 GB beside a shard. XLA's plan has 88.2 GB, and 27.7 without: jax and jax-cuda13-pjrt 0.10.2, 2026-12-01."""
    monkeypatch.setenv(POOL, '.93')
    total = {}
    for once in (False, True):
        changes = OTHER['LoRA of attention'] | {'mesh.gather_once': once}
        c, model = prepared('30B-A3B', (1, 8, 1), 8, 'full', changes)
        total[once] = measure(c, model, '8xH100', compiles=False)
    assert total[False].fits and not total[True].fits
    assert 0.9 < total[True].total / 88.2e9 < 1.1


def test_a_tied_head_is_the_embedding_and_only_matrices_count():
    layer = 2 * 128 * (512 + 256) + 3 * 128 * 384
    qwen3 = dataclasses.replace(MODEL, model_type='qwen3', tie_embeddings=True)
    assert matrix_sizes(MODEL) == matrix_sizes(qwen3) == (1000 * 128, 1000 * 128, layer)
    biases_and_scales = 3 * (512 + 2 * 256 + 2 * 128) + 128
    assert parameters(MODEL) == 2 * 1000 * 128 + 3 * layer + biases_and_scales


def test_state_on_gpus_is_exact_and_split():
    whole, split = (measure(config(n), MODEL, f'{n}x80GB') for n in (1, 4))
    scales = MODEL.num_layers * 2 * 128 + 128  # of norms, which stay float32 in a copy that computes in bfloat16
    frozen = 2 * parameters(MODEL) + 2 * scales
    assert whole.parameters == parameters(MODEL)
    assert whole.memory['θ and the moments'] == 12 * parameters(MODEL)
    assert whole.memory['α, the rollout policy'] == frozen
    # Biases and scales are on every device, everything else a quarter.
    small = MODEL.num_layers * (512 + 2 * 256 + 2 * 128) + 128
    assert split.memory['α, the rollout policy'] == (parameters(MODEL) - small) // 2 + 2 * small + 2 * scales
    on_host = config(1)
    on_host.mesh.frozen_on_host = True
    assert measure(on_host, MODEL, '1x80GB').memory['α, the rollout policy'] == 0
    assert 'θ_0, the reference policy' not in whole.memory
    assert measure(config(1, kl_target='reference'), MODEL, '1x80GB').memory['θ_0, the reference policy'] == frozen
    mixed = config(1, kl_target='convex')
    mixed.rollout.mixture.share = 0.4
    mixed = measure(mixed, MODEL, '1x80GB').memory
    assert mixed['θ_0, the reference policy'] == frozen and mixed['rollout policies before α'] == 2 * frozen
    # A critic has a value head in place of the untied head of 1,000 × 128.
    critic = measure(config(1, advantage='gae'), MODEL, '1x80GB').memory['the critic and its moments']
    assert critic == 12 * (parameters(MODEL) - 1000 * 128 + 128)
    rounded = measure(config(1, advantage='gae', adam__first_moment_dtype='bfloat16'), MODEL, '1x80GB').memory
    assert rounded['the critic and its moments'] == critic * 10 / 12
    assert rounded['θ and the moments'] == 10 * parameters(MODEL)
    assert 'the critic and its moments' not in whole.memory
    assert (whole.kernel, whole.compile_s) == ('triton', None)


def test_the_in_process_engine_takes_what_the_update_leaves_unless_both_work_at_once(monkeypatch):
    monkeypatch.setenv(POOL, '.75')
    c = config(1)
    c.rollout.engine, c.rollout.rows = 'jax', 100_000
    alone = measure(c, MODEL, '1x80GB')
    c.rollout.overlap = True
    both = measure(c, MODEL, '1x80GB')
    of_update = sum(n for what, n in both.memory.items() if what[0] not in 'θα' and 'engine' not in what)
    engine = both.memory['the in-process engine']
    assert both.total - alone.total == of_update > 0
    limits = Limits(100_000, c.rollout.max_prompt_tokens, int(c.rollout.cache_memory * 0.75 * 80e9))  # JAX's pool
    assert engine == memory_of(
        MODEL, 4 * parameters(MODEL), limits, group_size=c.rollout.group_size, response_tokens=c.rollout.max_response_tokens
    )
    based = dataclasses.replace(MODEL, adapter=Adapter(4, 8.0, 'all'))  # its base stays where it is
    both = measure(c, based, '1x80GB')
    c.rollout.overlap = False
    alone = measure(c, based, '1x80GB')
    of_update = sum(n for what, n in both.memory.items() if what[0] not in 'θα' and 'engine' not in what and 'not trained' not in what)
    assert both.total - alone.total == of_update
    c.rollout.overlap = True
    c.rollout.sync_every, c.rollout.most_behind = 2, 3  # steps may wait for the two policies before α
    behind = measure(c, MODEL, '1x80GB').memory['the in-process engine']
    assert behind - engine == 2 * parameters(MODEL) * jax.numpy.dtype(MODEL.dtype).itemsize


@pytest.mark.parametrize('platform', ['gpu', 'tpu'])
def test_the_in_process_engine_is_counted_for_its_platform(platform, monkeypatch):
    """Experts have tiles off TPUs. TPUs go by the formula here, which has the engine's bytes too."""
    c = config(1)
    c.rollout.engine, c.rollout.overlap = 'jax', True
    target = dry_run.find_target('1x80GB', c)._replace(platform=platform)
    monkeypatch.setattr(dry_run, 'find_target', lambda *_: target)
    model = dataclasses.replace(MODEL, model_type='qwen3_moe', routing=Routing(16, 4, True))
    engine = measure(c, model, '1x80GB').memory['the in-process engine']
    limits = Limits(c.rollout.rows, c.rollout.max_prompt_tokens, int(c.rollout.cache_memory * target.device_bytes))
    assert engine == memory_of(
        model, 4 * parameters(model), limits, group_size=c.rollout.group_size, response_tokens=c.rollout.max_response_tokens,
        platform=platform,
    )  # fmt: skip


def test_the_papers_settings_fit_one_card():
    """configs/math.py as it stands, with the shape of DeepSeek-R1-Distill-Qwen-1.5B."""
    c = importlib.import_module('configs.math').get_config()
    qwen = ModelConfig('qwen2', 151936, 1536, 8960, 28, 12, 2, 128, Rotation(1e4), 1e-6, False, 'bfloat16')
    assert measure(resolve(c), qwen, '1x80GB').fits
    c.learner.micro_batch_rows = 32
    assert not measure(resolve(c), qwen, '1x80GB').fits


def test_fits_is_a_comparison():
    mesh = make_mesh(1, 1, 1)
    for size, refused, fits, says in (
        (100, '', True, '^fits: '),
        (99, '', False, '^does NOT fit: 0.0 of'),
        (None, '', None, 'unknown'),
        (1000, 'Used 17G of 15G hbm', False, 'NOT fit: Used 17G'),
    ):
        result = Result(Target('x', 'gpu', mesh, size), 'xla', 1, {'a': 60, 'b': 40}, None, refused)
        assert result.fits is fits
        assert re.search(says, dry_run.verdict(result))


@pytest.mark.slow
def test_the_compiled_step_is_the_step_that_trains(policy, groups, monkeypatch):
    c = config(1, mini_batch_groups=6, row_tokens=32, anchor='decoupled')
    learner = Learner(c, policy.config, make_mesh(1, 1, 1), 'xla')
    arguments, step = [], learner.policy.step
    monkeypatch.setattr(learner.policy, 'step', lambda state, *rest: arguments.append(rest) or step(state, *rest))
    learner.update(learner.init(copy_params(policy.params)), batch_of(groups), np.random.default_rng(0))
    monkeypatch.undo()
    [(rows, n_micro, numbers, pixels, frozen)] = arguments
    assert pixels is None and frozen is None
    compiled = learner.compile_update()
    want = step(learner.init(copy_params(policy.params)), rows, n_micro, numbers, pixels, frozen)
    got = compiled(learner.init(copy_params(policy.params)), rows, n_micro, numbers, pixels, frozen)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    memory = measure(config(1, micro_batch_rows=16, row_tokens=32), policy.config, '').memory
    assert memory['θ, the moments and the mini-batch'] > 12 * parameters(policy.config)
    saved = memory['α, the rollout policy'] + 12 * parameters(policy.config)
    assert memory['a checkpoint that is written meanwhile'] == 2 * saved  # a copy is less than a gigabyte
    with_critic = measure(config(1, micro_batch_rows=16, row_tokens=32, advantage='gae'), policy.config, '').memory
    saved += with_critic['the critic and its moments']
    assert with_critic['a checkpoint that is written meanwhile'] == 2 * saved


def command(*flags):
    train = [sys.executable, '-m', 'bapo_jax.train', '--config=configs/quickstart.py', '--config.task.limit=300']
    return subprocess.run([*train, '--dry_run', *flags], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_command_needs_no_weights_and_leaves_nothing(tmp_path):
    model = tmp_path / 'model'
    shutil.copytree(ROOT / 'configs' / 'quickstart_base', model)
    (model / 'model.safetensors').unlink()
    before = sorted(tmp_path.rglob('*')), sorted(p for p in ROOT.glob('*'))
    split = ('--config.mesh.data=1', '--config.mesh.fsdp=8', '--config.learner.micro_batch_rows=8')
    for topology, mesh, says in (('', (), '1 cpu; attention xla'), ('8x80GB', split, '8 GPUs of 80 GB; attention xla')):
        done = command(f'--config.model.path={model}', f'--topology={topology}', '--config.rollout.engine=vllm', *mesh)
        assert done.returncode == 0, done.stderr
        assert '822,016 parameters' in done.stdout and says in done.stdout and '\nfits: ' in done.stdout
        assert '300 prompts, 200 steps' in done.stdout and '= 32,768 tokens, ' in done.stdout
        assert ' rows of 208 tokens\n' in done.stdout
        assert re.search(r'\nprompt     the first has \d+ tokens: .\d', done.stdout)
        assert ('compile    skipped' in done.stdout) == ('mesh.gather_once=True should also fit' in done.stdout) == (topology != '')
    assert (sorted(tmp_path.rglob('*')), sorted(p for p in ROOT.glob('*'))) == before


@pytest.mark.slow
def test_the_command_fails_where_the_run_does_not_fit():
    done = command('--topology=4x0GB')
    assert done.returncode == 1 and 'does NOT fit: ' in done.stdout and not done.stderr.strip()


@pytest.mark.parametrize(
    'topology, says',
    [
        ('8xV100', "--topology='8xV100': give a TPU slice such as 'v5e:2x4'; or GPUs, such as '4xH100', '2x8xH200' for two hosts (of A100"),
        ('4x80GB', 'mesh.data=1 × mesh.fsdp=8 × mesh.tensor=1 must multiply to the 4 devices'),
    ],
)
def test_a_topology_that_makes_no_sense_is_an_error(topology, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        measure(config(8), MODEL, topology)


def test_a_missing_tpu_compiler_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ValueError, match=r'pip install .bapo_jax\[tpu-compiler\]'):
        measure(config(8), MODEL, 'v5e:2x4')


def test_what_training_refuses_a_dry_run_refuses(benchmark):
    c = small_config('bapo_tuned', benchmark, learner__micro_batch_rows=3)
    c.mesh.data, c.mesh.fsdp = 2, 4
    with pytest.raises(ValueError, match='learner.micro_batch_rows=3 is not a multiple of mesh.data × mesh.fsdp = 8'):
        dry_run.dry_run(c, '8x80GB')
    with pytest.raises(ValueError, match='mesh.tensor=8 does not divide 4 query and 2 key-value heads'):
        c = config(1)
        c.mesh.tensor = 8
        measure(c, MODEL, '8x80GB')
    with pytest.raises(ValueError, match='4 attention heads cannot be split over 3 GPUs'):
        dry_run.dry_run(small_config('bapo_tuned', benchmark, rollout__engine='vllm', rollout__gpus=('0,1,2',)), '8x80GB')


@pytest.mark.slow
def test_a_tpu_slice_with_its_own_compiler():
    """In a process of its own: libtpu stays loaded. Most of the weights are gathered while the chip computes."""
    assert (TPU_COMPILER / 'libtpu').is_dir(), 'run make tpu-compiler'
    script = (
        'from test_dry_run import *\n'
        "r = measure(config(8), MODEL, 'v5e:2x4')\n"
        "state = r.memory['θ, the moments and the mini-batch']\n"
        'print(r.target.name, r.kernel, r.fits, state > 12 * r.parameters / 8, r.compile_s > 0)\n'
        "print(measure(config(8, micro_batch_rows=2**16), MODEL, 'v5e:2x4').fits, len(targets.tpu_devices('v6e:1x1')))\n"
        "mesh = targets.find_target('v5p:2x2x1', config(4)).mesh\n"
        "moved = collectives(parse(Learner(config(4), MODEL, mesh, 'splash').compile_update().as_text()))\n"
        "weights = [c for c in moved if (c.kind, c.dtype) == ('all-gather', 'bf16')]\n"
        'print(2 * sum(c.bytes * c.executions * c.asynchronous for c in weights) > sum(c.bytes * c.executions for c in weights))\n'
        'try:\n'
        "    measure(config(8), MODEL, 'v5e:99x99')\n"
        'except ValueError as e:\n'
        "    print('refused:', str(e)[:22])\n"
    )
    path = {'PYTHONPATH': f'{TPU_COMPILER}:{ROOT}:{ROOT}/tests/helpers'}
    done = subprocess.run(
        [sys.executable, '-c', script], cwd=Path(__file__).parent, env=os.environ | path, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ['8 TPU v5 lite splash True True True', 'False 1', 'True', "refused: --topology='v5e:99x99'"]
