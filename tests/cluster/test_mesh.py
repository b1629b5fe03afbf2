"""Sharded = single device, on eight fake CPU devices; they need a process of their own, which runs this file as a script.

Tolerance: 1e-5 of the largest value, float32.
"""

import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from eight_devices import ROOT, eight_devices
from jax.sharding import AbstractMesh
from stand_in_gpus import gpus
from tiny import QWEN3, QWEN3_5, QWEN3_MOE

from bapo_jax.cluster import devices
from bapo_jax.cluster.devices import device_memory, gpu_hosts, keep_programs
from bapo_jax.cluster.mesh import MESH_AXES, fetch, make_mesh, mesh_sizes, row_sharding, sizes_across, spread
from bapo_jax.config import default_config
from bapo_jax.groups import make_batch
from bapo_jax.replay.arrays import groups_from_arrays, groups_to_arrays
from bapo_jax.learner.learner import Learner
from bapo_jax.models import hf
from bapo_jax.models.layers import Adapter
from bapo_jax.models.sharding import ShardingRules, parameter_sharding
from bapo_jax.rollout.engine import FRESH, Draw, Sampling
from bapo_jax.rollout.inprocess.engine import JaxEngine
from bapo_jax.rollout.inprocess.room import Limits
from bapo_jax.run.checksums import word_sum
from bapo_jax.tasks.sight import Sight

FAMILIES = {'Qwen2': {}, 'Qwen3': QWEN3, 'Qwen3-MoE': QWEN3_MOE, 'Qwen3.5': QWEN3_5}
VL = 'Qwen2.5-VL'  # with images
ADAPTER = 'Qwen3 with an adapter'
LORA = {ADAPTER: Adapter(4, 8.0, 'all')}
# family, mesh sizes, mesh.gather_once
CASES = (
    ('Qwen2', (2, 2, 2), False), ('Qwen3', (1, 8, 1), False), (VL, (2, 2, 2), False), (ADAPTER, (2, 2, 2), True),
    ('Qwen3-MoE', (2, 2, 2), False), ('Qwen3.5', (2, 2, 2), False),
)  # fmt: skip
SAMPLED = ('Qwen2', VL, 'Qwen3-MoE', 'Qwen3.5')  # families whose engine is compared, too


def first(model_path, adapter):
    """(model, parameters in numpy); an adapter is drawn at random, A and B."""
    model, rng = dataclasses.replace(hf.read_config(model_path), adapter=adapter), np.random.default_rng(0)
    params = jax.tree.map(np.array, hf.load_params(model_path, model))
    if adapter:
        for matrix in params['layers'].values():
            matrix |= {x: 0.2 * rng.standard_normal(matrix[x].shape).astype(np.float32) for x in ('a', 'b') if x in matrix}
    return model, params


def train_and_sample(model_path, groups, sizes, gather_once=False, adapter=None, samples=False):
    """Two optimizer steps on `groups`, then perhaps responses to their prompts, on that mesh: flat arrays, parameters under 'p.'."""
    mesh, (model_config, params) = make_mesh(*sizes), first(model_path, adapter)
    graph, _ = hf.abstract_params(model_config)
    config = default_config()
    config.mesh.gather_once = gather_once
    longest = max(16, *(len(g.prompt.tokens) for g in groups))
    config.learner.update({
        'mini_batch_groups': 3, 'row_tokens': 16 + longest, 'micro_batch_rows': 8, 'learning_rate': 1e-4,
        'grad_clip': 0.1, 'anchor': 'decoupled', 'kl_coef': 0.1, 'entropy_coef': 0.01,
        # A gradient near 0 decides the step by its rounding if eps is smaller.
        'adam': {'eps': 1e-4},
    })  # fmt: skip
    sight = Sight(model_path, model_config.vision.image_token) if model_config.vision else None
    learner = Learner(config, model_config, mesh, 'xla', sight=sight)
    state, metrics = learner.update(learner.init(params), make_batch(groups, ['x1'] * len(groups)), np.random.default_rng(0))
    out = {f'm.{k}': np.float64(v) for k, v in metrics.items() if not k.startswith(('timing_s/', 'perf/'))}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state.params)[0]:
        name = '.'.join(k.key for k in path)
        out[f'p.{name}'] = jax.device_get(leaf)
        out[f'parts.{name}'] = np.array(leaf.sharding.shard_shape(leaf.shape))
        out[f'sum.{name}'] = np.array(word_sum(leaf))
    if samples:
        engine = JaxEngine(graph, model_config, (3,), Limits(32 // mesh.size, longest), mesh, sight)
        engine.load(jax.device_put(params, parameter_sharding(mesh, params)), 0)
        answers = engine.generate([g.prompt for g in groups], 4, Sampling(1.0, 6), [Draw(1, 0, FRESH)] * len(groups))
        out['tokens'] = np.concatenate([r.tokens for rs in answers for r in rs])
        out['logp'] = np.concatenate([r.logp for rs in answers for r in rs])
    return out


def main(directory, *model_paths):
    assert jax.device_count() == 8
    path_of = dict(zip((*FAMILIES, VL), model_paths, strict=True))
    path_of[ADAPTER] = path_of['Qwen3']
    for case in CASES:
        groups = groups_from_arrays(dict(np.load(Path(directory) / f'{case[0] == VL}.npz')))
        trained = train_and_sample(path_of[case[0]], groups, *case[1:], LORA.get(case[0]), case[0] in SAMPLED)
        np.savez(Path(directory) / f'{case}.npz', **trained)


if __name__ == '__main__':
    main(*sys.argv[1:])
    sys.exit()


@pytest.fixture(scope='module')
def sharded(tiny_hf, groups, pictured, tmp_path_factory):
    """Case -> arrays from the eight-device process."""
    directory = tmp_path_factory.mktemp('sharded')
    for with_images, of_family in enumerate((groups, pictured.groups)):
        np.savez(directory / f'{bool(with_images)}.npz', **groups_to_arrays(of_family))
    environment = eight_devices()
    command = [sys.executable, __file__, directory, *(tiny_hf(**f) for f in FAMILIES.values()), pictured.policy.path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return {case: dict(np.load(directory / f'{case}.npz')) for case in CASES}


@pytest.fixture(scope='module')
def single(tiny_hf, groups, pictured):
    """Family -> arrays from one device."""
    of_text = {
        family: train_and_sample(tiny_hf(**fields), groups, (1, 1, 1), samples=family in SAMPLED) for family, fields in FAMILIES.items()
    }  # fmt: skip
    of_text[ADAPTER] = train_and_sample(tiny_hf(**QWEN3), groups, (1, 1, 1), adapter=LORA[ADAPTER])
    return of_text | {VL: train_and_sample(pictured.policy.path, pictured.groups, (1, 1, 1), samples=True)}


@pytest.fixture(scope='module')
def start(make_policy, pictured):
    """Family -> parameters before."""
    adapted = first(make_policy(**QWEN3).path, LORA[ADAPTER])[1]
    return {family: make_policy(**fields).params for family, fields in FAMILIES.items()} | {VL: pictured.policy.params, ADAPTER: adapted}


@pytest.mark.slow
@pytest.mark.parametrize('case', CASES)
def test_sharded_training_is_that_of_one_device(case, sharded, single, start):
    got, one = sharded[case], single[case[0]]
    assert got.keys() == one.keys()
    assert one['m.actor/updates'] == 2
    for name, want in one.items():
        if name.startswith(('m.', 'p.')):
            np.testing.assert_allclose(got[name], want, rtol=0, atol=1e-5 * max(1.0, np.abs(want).max()), err_msg=name)
    for name in ('a', 'b') if case[0] == ADAPTER else ('kernel',):
        moved = one[f'p.layers.q.{name}'] - start[case[0]]['layers']['q'][name]
        assert np.abs(moved).max() > 1e-4  # ten times the tolerance


@pytest.mark.slow
@pytest.mark.parametrize('case', [case for case in CASES if case[0] in SAMPLED])
def test_sharded_sampling_is_that_of_one_device(case, sharded, single):
    got, one = sharded[case], single[case[0]]
    np.testing.assert_array_equal(got['tokens'], one['tokens'])
    np.testing.assert_allclose(got['logp'], one['logp'], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_checkpoints_checksums_do_not_depend_on_the_mesh(sharded):
    for case in sharded.values():
        names = [name.removeprefix('p.') for name in case if name.startswith('p.')]
        assert names and all(case[f'sum.{name}'] == word_sum(case[f'p.{name}']) for name in names)


@pytest.mark.slow
def test_parameters_really_are_split(sharded):
    a, b, c = ({k: tuple(v) for k, v in sharded[case].items() if k.startswith('parts.')} for case in (*CASES[:2], CASES[3]))
    assert (a['parts.layers.q.kernel'], b['parts.layers.q.kernel']) == ((2, 16, 16), (2, 4, 64))
    assert (a['parts.layers.down.kernel'], b['parts.layers.down.kernel']) == ((2, 24, 16), (2, 48, 4))
    assert (a['parts.embedding.embedding'], b['parts.embedding.embedding']) == ((48, 16), (96, 4))
    assert (c['parts.layers.q.kernel'], c['parts.layers.q_norm.scale']) == ((2, 16, 32), (2, 16))


def test_a_mesh_takes_the_devices_that_are_left():
    assert [dict(make_mesh(*sizes).shape) for sizes in ((1, 1, 1), (-1, 1, 1), (1, -1, 1), (1, 1, -1))] == [
        dict.fromkeys(MESH_AXES, 1)
    ] * 4


@pytest.mark.parametrize('sizes', [(2, 1, 1), (1, 1, 8), (2, -1, 1), (-1, -1, 1), (-2, -1, 1)])
def test_a_mesh_that_does_not_fit_the_devices_is_an_error_that_names_the_fields(sizes):
    with pytest.raises(ValueError, match=f'mesh.data={sizes[0]} .*mesh.fsdp={sizes[1]} .*mesh.tensor={sizes[2]} .*1 devices'):
        make_mesh(*sizes)


@pytest.mark.parametrize(
    'sizes, axis, parameter',
    [((1, 5, 1), 'fsdp', 'embedding.embedding'), ((1, 1, 32), 'tensor', r'layers\.(down|gate|up)\.kernel')],
)
def test_an_axis_that_does_not_divide_is_an_error_that_names_field_and_parameter(sizes, axis, parameter, policy):
    mesh = AbstractMesh(sizes, MESH_AXES)
    with pytest.raises(ValueError, match=f'mesh.{axis}={max(sizes)} does not divide .*{parameter}'):
        parameter_sharding(mesh, policy.params)


def test_rules_that_split_two_dimensions_over_one_axis_are_an_error_that_names_the_parameter(policy):
    mesh = AbstractMesh((1, 1, 2), MESH_AXES)
    with pytest.raises(ValueError, match=r'two dimensions of embedding\.embedding .*over mesh\.tensor; give each a mesh axis'):
        parameter_sharding(mesh, policy.params, ShardingRules(embed='tensor'))
    with pytest.raises(ValueError, match=r'two dimensions of layers\.\S+ .*over mesh\.data'):
        parameter_sharding(mesh, policy.params, ShardingRules(layers='data', heads='data', mlp='data'))


@pytest.mark.parametrize('name', ['memory.max', 'memory/memory.limit_in_bytes'])
def test_a_containers_limit_counts_where_it_has_one(name, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, 'CONTAINER', tmp_path)
    machine = device_memory(jax.devices()[:1])
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for text, bytes_ in (('max\n', machine), (f'{2**62}\n', machine), ('1073741824\n', 2**30)):
        (tmp_path / name).write_text(text)
        assert device_memory(jax.devices()[:1]) == bytes_
    assert device_memory(jax.devices()[:1] * 2) == 2**29


@pytest.mark.parametrize(
    'sizes, slices, across',
    [((4, 8, 2), 2, (2, 1, 1)), ((2, 8, 1), 4, (2, 2, 1)), ((1, 8, 2), 4, (1, 4, 1)), ((6, 2, 2), 4, (2, 2, 1))],
)
def test_slices_are_crossed_by_the_outermost_axes_that_can(sizes, slices, across):
    assert sizes_across(sizes, slices) == across


ON_SLICES = """
import numpy as np
from jax.experimental import topologies
from bapo_jax.dry_run.targets import tpu_devices
from bapo_jax.cluster.mesh import make_mesh


def links(devices):  # most links of the slice between neighbours on an axis
    pairs = [np.stack([np.moveaxis(devices, axis, 0)[:-1].ravel(), np.moveaxis(devices, axis, 0)[1:].ravel()]) for axis in range(3)]
    return [max((int(np.abs(np.subtract(a.coords, b.coords)).sum()) for a, b in p.T), default=0) for p in pairs]


devices = tpu_devices('v5e:4x8')
by_host = sorted(devices, key=lambda device: (device.process_index, device.id))
for sizes in ((1, 8, 4), (4, 8, 1)):
    print(links(np.array(by_host).reshape(sizes)), links(make_mesh(*sizes, devices[::-1]).devices))
for topology in ('v4:2x2x4', 'v5p:2x4x4'):  # a chip is one device; and 8 is no product of 2, 4 and 4, so axes of the slice are cut
    print(make_mesh(1, -1, 8, tpu_devices(topology)).devices.shape)
two = make_mesh(2, 4, 4, topologies.get_topology_desc(platform='tpu', topology_name='v5e:4x4', num_slices=2).devices)
print([sorted({device.slice_index for device in copy.flat}) for copy in two.devices], links(two.devices)[1:])
"""


@pytest.mark.slow
def test_neighbours_in_the_mesh_are_neighbours_in_the_slice():
    """As libtpu describes slices that are absent; in a process of its own, since libtpu stays loaded."""
    assert (ROOT / '.tpu-compiler' / 'libtpu').is_dir(), 'run make tpu-compiler'
    environment = {**os.environ, 'PYTHONPATH': f'{ROOT}/.tpu-compiler:{ROOT}'}
    done = subprocess.run([sys.executable, '-c', ON_SLICES], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        '[0, 4, 2] [0, 1, 1]', '[2, 2, 0] [1, 1, 0]', '(1, 2, 8)', '(1, 4, 8)', '[[0], [1]] [1, 1]',
    ]  # fmt: skip


def test_what_is_spread_over_the_mesh_is_fetched_as_it_was():
    """One host; many hosts: test_hosts.py."""
    mesh, rows = make_mesh(1, 1, 1), {'a': np.arange(6, dtype=np.int32).reshape(1, 3, 2), 'b': np.ones((2, 2), np.float32)}
    placed = spread(rows, row_sharding(mesh, 1))
    for name, array in rows.items():
        assert placed[name].sharding == row_sharding(mesh, 1)
        np.testing.assert_array_equal(fetch(placed[name]), array)
        np.testing.assert_array_equal(fetch(array), array)


@pytest.mark.parametrize('backend, directory, kept', [('gpu', None, True), ('gpu', '/already/named', False), ('cpu', None, False)])
def test_programs_are_kept_on_accelerators_where_nothing_else_was_said(backend, directory, kept, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(jax, 'default_backend', lambda: backend)
    jax.config.update('jax_compilation_cache_dir', directory)
    try:
        keep_programs()
        assert jax.config.jax_compilation_cache_dir == (str(Path.home() / '.cache' / 'bapo_jax') if kept else directory)
    finally:
        jax.config.update('jax_compilation_cache_dir', before)


@pytest.mark.parametrize(('data', 'fsdp', 'hosts', 'sizes'), [
    (0, -1, 1, (1, 16, 1)), (0, -1, 2, (2, 8, 1)),  # weights are gathered within a host
    (1, -1, 2, (1, 16, 1)), (0, 4, 1, (4, 4, 1)), (0, 4, 2, (4, 4, 1)), (-1, 1, 2, (16, 1, 1)),
])  # fmt: skip
def test_data_is_by_default_the_hosts_of_gpus(data, fsdp, hosts, sizes):
    assert mesh_sizes(data, fsdp, 1, 16, hosts) == sizes


@pytest.mark.parametrize('hosts', [1, 2])
def test_a_mesh_of_gpus_splits_weights_within_a_host_whatever_order_they_come_in(hosts):
    mesh = make_mesh(0, -1, 1, gpus(8, hosts=hosts)[::-1])
    assert dict(mesh.shape) == {'data': hosts, 'fsdp': 8 // hosts, 'tensor': 1}
    assert [{device.process_index for device in copy.flat} for copy in mesh.devices] == [{host} for host in range(hosts)]


def test_only_gpus_have_slow_links_between_hosts():
    def devices(platform):
        return [types.SimpleNamespace(platform=platform, process_index=i // 8) for i in range(16)]

    assert (gpu_hosts(devices('gpu')), gpu_hosts(devices('tpu')), gpu_hosts(devices('cpu'))) == (2, 1, 1)
