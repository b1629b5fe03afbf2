"""Micro-batches of fewer rows than devices: the tokens of a row are split, and training is that of one device.

Eight fake CPU devices need a process of their own, which runs this file as a script. Tolerance: 1e-5 of the largest value, float32.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from eight_devices import eight_devices
from jax.sharding import AbstractMesh
from tiny import QWEN3, QWEN3_MOE

from bapo_jax.cluster.long_rows import copies_of_key_heads, token_splits
from bapo_jax.cluster.mesh import MESH_AXES, make_mesh
from bapo_jax.config import default_config
from bapo_jax.groups import make_batch
from bapo_jax.learner.build import choose_kernel
from bapo_jax.learner.learner import Learner
from bapo_jax.models import hf
from bapo_jax.replay.arrays import groups_from_arrays, groups_to_arrays

# 8 query heads: with 2 key heads, 8 devices share each among 4; with 6 query and 2 key heads, 2 devices need one each.
FAMILIES = {'Qwen2': {'num_attention_heads': 8}, 'Qwen3': QWEN3, 'Qwen3-MoE': QWEN3_MOE}
KL = {'anchor': 'decoupled', 'kl_coef': 0.1, 'entropy_coef': 0.01}
# family, mesh sizes, rows, mesh.gather_once, changes of learner
CASES = {
    'all devices': ('Qwen2', (1, 8, 1), 1, True, KL),
    'experts': ('Qwen3-MoE', (2, 4, 1), 2, False, {'ratio_level': 'response', 'surrogate': 'regression', 'tau': 0.1, 'balance_coef': 0.1}),
    'a critic': ('Qwen3', (2, 2, 2), 2, False, {'advantage': 'gae', 'ratio_level': 'sequence'}),
}


def train(model_path, groups, sizes, rows, gather_once, changes):
    """Two optimizer steps on `groups` on the mesh: metrics, parameters and the scores after it."""
    mesh, model, rng = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)]), hf.read_config(model_path), np.random.default_rng(0)
    params = jax.tree.map(np.array, hf.load_params(model_path, model))
    config = default_config()
    config.model.path, config.mesh.gather_once = str(model_path), gather_once
    config.learner.update({
        'mini_batch_groups': 3, 'row_tokens': 48, 'micro_batch_rows': rows, 'learning_rate': 1e-4, 'grad_clip': 0.1, **changes,
    })  # fmt: skip
    learner = Learner(config, model, mesh, 'xla')
    state, batch = learner.init(params), make_batch(groups, ['x1'] * len(groups))
    policies = {role: jax.tree.map(lambda x: x * 1.01, state.params) for role in learner.objective.roles}
    state, metrics = learner.update(state, batch, rng, policies)
    out = {f'm.{k}': np.float64(v) for k, v in metrics.items() if not k.startswith(('timing_s/', 'perf/'))}
    for of, tree in ('p', state.params), ('c', state.critic and state.critic.params):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            out['.'.join((of, *(k.key for k in path)))] = jax.device_get(leaf)
    out['m.logp'] = np.concatenate([logp for of_group in learner.scorer(state)(batch) for logp in of_group])
    return out


def main(directory, *paths):
    assert jax.device_count() == 8
    path_of = dict(zip(FAMILIES, paths, strict=True))
    groups = groups_from_arrays(dict(np.load(Path(directory) / 'groups.npz')))
    for name, (family, sizes, *others) in CASES.items():
        np.savez(Path(directory) / f'{name}.npz', **train(path_of[family], groups, sizes, *others))
        np.savez(Path(directory) / f'{name} alone.npz', **train(path_of[family], groups, (1, 1, 1), *others))


if __name__ == '__main__':
    main(*sys.argv[1:])
    sys.exit()


@pytest.fixture(scope='module')
def trained(tiny_hf, groups, tmp_path_factory):
    """Case -> what was trained with rows split by tokens, and what by one device."""
    directory = tmp_path_factory.mktemp('tokens')
    np.savez(directory / 'groups.npz', **groups_to_arrays(groups))
    command = [sys.executable, __file__, directory, *(tiny_hf(**fields) for fields in FAMILIES.values())]
    done = subprocess.run(command, env=eight_devices(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: [dict(np.load(directory / f'{name}{which}.npz')) for which in ('', ' alone')] for name in CASES}


@pytest.mark.slow
@pytest.mark.parametrize('case', CASES)
def test_training_and_scores_are_those_of_one_device(case, trained, make_policy):
    got, one = trained[case]
    assert got.keys() == one.keys() and one['m.actor/updates'] == 2
    for name, want in one.items():
        np.testing.assert_allclose(got[name], want, rtol=0, atol=1e-5 * max(1.0, np.abs(want).max()), err_msg=name)
    before = make_policy(**FAMILIES[CASES[case][0]]).params['layers']['q']['kernel']
    assert np.abs(one['p.layers.q.kernel'] - before).max() > 1e-4  # ten times the tolerance
    assert case != 'a critic' or np.abs(one['c.value.kernel']).max() > 1e-5


@pytest.mark.parametrize('heads', [(8, 2, 8), (8, 8, 4), (6, 2, 2), (12, 4, 6), (12, 2, 4), (6, 3, 2)], ids=str)
def test_each_device_gets_the_key_heads_that_its_query_heads_read(heads):
    N, K, devices = heads
    copies = copies_of_key_heads(N, K, devices)
    of_devices = np.repeat(np.arange(K), copies).reshape(devices, -1)
    own = N // devices
    for device, keys in enumerate(of_devices):
        read = keys[np.arange(own) // (own // len(keys))]  # as grouped-query attention does
        np.testing.assert_array_equal(read, np.arange(own * device, own * (device + 1)) // (N // K))
    assert copies == 1 or own % (N // K)  # none is sent twice where each device has whole groups


def test_rows_are_split_if_there_are_enough_and_else_their_tokens():
    assert [token_splits({'data': 2, 'fsdp': 4}, rows) for rows in (8, 16, 2, 4, 6)] == [1, 1, 4, 4, 4]
    with pytest.raises(ValueError, match='12 is not a multiple of mesh.data × mesh.fsdp = 8, .* set it to 8 or'):
        token_splits({'data': 1, 'fsdp': 8}, 12)


@pytest.mark.parametrize('changes, sizes, message', [
    ({'micro_batch_rows': 3}, (2, 4, 1), 'learner.micro_batch_rows=3 is not a multiple of mesh.data × mesh.fsdp = 8.* set it to 8 or, to'),
    ({'micro_batch_rows': 1, 'row_tokens': 50}, (1, 4, 1), 'learner.micro_batch_rows=1 .*do not divide learner.row_tokens=50; set it to 128, or set learner.micro_batch_rows=4'),
    ({'micro_batch_rows': 2, 'row_tokens': 48}, (1, 8, 1), 'which do not divide the 4 query heads of each; lower mesh.fsdp to a divisor of 4 and raise'),
    ({'micro_batch_rows': 2, 'row_tokens': 48}, (1, 4, 2), 'which do not divide the 2 query heads of each; .*, or set learner.micro_batch_rows=4, to split rows'),
    ({'micro_batch_rows': 1, 'row_tokens': 48, 'slot_tokens': 16}, (1, 4, 1), 'does not support; set learner.slot_tokens=0 or learner.micro_batch_rows=4'),
    ({'micro_batch_rows': 1, 'row_tokens': 48}, (1, 4, 3), 'mesh.tensor=3 does not divide 4 query and 2 key-value heads'),
])  # fmt: skip
def test_what_cannot_be_split_is_refused(policy, changes, sizes, message):
    config = default_config()
    config.learner.update(changes)
    with pytest.raises(ValueError, match=message):
        choose_kernel(config, dataclasses.replace(policy.config), AbstractMesh(sizes, MESH_AXES), 'cpu')
