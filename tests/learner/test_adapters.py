"""LoRA: an adapter is the matrices W + alpha / rank · A B, it alone is trained, and a checkpoint holds nothing else."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from learners import BARE, assert_close, batch_of, gradient, largest, learner_config, make_learner, unscored, updated
from safetensors.numpy import load_file
from small_run import metrics, run, small_config

from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.export import export
from bapo_jax.learner.learner import Learner
from bapo_jax.learner.learner import Learner
from bapo_jax.learner.objective import REFERENCE, ROLLOUT
from bapo_jax.models import hf
from bapo_jax.models.adapters import adapter_tensors, save_adapter
from bapo_jax.models.configs import read_config
from bapo_jax.models.decoder import parameters_of
from bapo_jax.models.layers import Adapter
from bapo_jax.models.parameters import ADAPTER
from bapo_jax.run.opening import OtherWeights, open_run
from bapo_jax.run.state import copy_params

REPLAY = {'empty': np.zeros(1)}


def adapted(policy, rank=3, alpha=6.0, targets='all'):
    """The policy with an adapter whose A and B are drawn at random."""
    config = dataclasses.replace(policy.config, adapter=Adapter(rank, alpha, targets))
    rng, params = np.random.default_rng(0), flatten_dict(policy.params)
    for path, shape in flatten_dict(hf.abstract_params(config)[1]).items():
        if path not in params:
            params[path] = 0.2 * rng.standard_normal(shape.shape).astype(np.float32)
    return policy._replace(config=config, graph=hf.abstract_params(config)[0], params=unflatten_dict(params))


def merged(policy):
    """Its matrices by the equation, in float64."""
    params = flatten_dict(policy.params)
    for path in [path for path in params if path[-1] == 'a']:
        a, b = (params.pop((*path[:-1], x)).astype(np.float64) for x in 'ab')
        params[*path[:-1], 'kernel'] = (params[*path[:-1], 'kernel'] + policy.config.adapter.scale * (a @ b)).astype(np.float32)
    return unflatten_dict(params)


def logprobs(learner, params, groups):
    return np.concatenate([x for g in learner.score_batch(ROLLOUT, params, batch_of(groups)) for x in g])


@pytest.mark.parametrize('targets', ['all', 'attention', 'mlp'])
def test_an_adapter_is_the_decoder_of_merged_matrices_and_so_it_is_written_in_files(policy, groups, targets):
    with_adapter = adapted(policy, targets=targets)
    rows = [p for p in parameters_of(with_adapter.config) if p.when == ADAPTER]
    assert len(rows) == {'all': 14, 'attention': 8, 'mlp': 6}[targets]
    got = logprobs(make_learner(with_adapter, BARE), with_adapter.params, groups)
    want = logprobs(make_learner(policy, BARE), merged(with_adapter), groups)
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert np.abs(want - logprobs(make_learner(policy, BARE), policy.params, groups)).max() > 0.05
    written, plain = (dict(hf.to_hf(c, p)) for c, p in ((with_adapter.config, with_adapter.params), (policy.config, merged(with_adapter))))
    assert written.keys() == plain.keys()
    for name, tensor in plain.items():
        np.testing.assert_allclose(written[name], tensor, atol=1e-6, err_msg=name)


def test_with_images_the_merged_weights_travel_and_are_scored_as_they_arrive(pictured, tmp_path):
    """vLLM reads no adapter of a model with images by our names. The vision tower is frozen beside an adapter."""
    with_adapter, config = adapted(pictured.policy), learner_config(**BARE)
    config.rollout.dtype, config.rollout.max_prompt_tokens = 'bfloat16', max(len(p.tokens) for p in pictured.prompts)
    config.learner.row_tokens = config.rollout.max_prompt_tokens + 16

    def scored(policy, params):
        learner = Learner(config, policy.config, make_mesh(1, 1, 1), 'xla', sight=pictured.sight)
        assert any('vision' in path for path in flatten_dict(learner.init(copy_params(params)).trained)) == (policy is pictured.policy)
        return logprobs(learner, params, pictured.groups)

    hf.save(tmp_path / 'sent', hf.to_hf(with_adapter.config, with_adapter.params), like=pictured.policy.path, dtype='bfloat16')
    want = scored(pictured.policy, hf.load_params(tmp_path / 'sent', pictured.policy.config))
    np.testing.assert_allclose(scored(with_adapter, with_adapter.params), want, atol=2e-5)
    assert np.abs(scored(pictured.policy, pictured.policy.params) - want).max() > 0.05


def test_at_full_rank_the_first_update_is_that_of_full_training(policy, groups):
    """With A = 1, alpha = rank and B = 0, B's gradient is W's, and so is the first step of Adam."""
    batch = batch_of(groups[:3])
    for targets, inputs in (('attention', {'q': 32, 'k': 32, 'v': 32, 'o': 32}), ('mlp', {'gate': 32, 'up': 32})):
        identity = adapted(policy, 32, 32.0, targets)
        layers = identity.params['layers']
        for name in [name for name in layers if 'a' in layers[name]]:
            wide = layers[name]['a'].shape[1]
            layers[name]['a'] = np.broadcast_to(np.eye(wide, 32, dtype=np.float32), layers[name]['a'].shape).copy()
            layers[name]['b'] = np.zeros_like(layers[name]['b'])
        (state, _), (full, _) = updated(make_learner(identity, BARE), identity, batch), updated(make_learner(policy, BARE), policy, batch)
        for name in inputs:
            assert policy.params['layers'][name]['kernel'].shape[1] == 32
            want = gradient(full)['layers'][name]['kernel']
            assert_close(gradient(state)['layers'][name]['b'], want, 1e-5)
            moved = np.asarray(full.params['layers'][name]['kernel']) - policy.params['layers'][name]['kernel']
            large = np.abs(want) > 1e-3 * largest(want)  # Adam's first step divides by the gradient's size
            np.testing.assert_allclose(np.asarray(state.params['layers'][name]['b'])[large], moved[large], atol=3e-6)
            assert largest(moved) > 5e-5


def test_only_the_adapter_is_trained_and_every_other_array_is_shared(policy, groups):
    with_adapter = adapted(policy)
    learner = make_learner(with_adapter, BARE)
    state = learner.init(copy_params(with_adapter.params))
    frozen = jax.tree.leaves(state.frozen)
    after, metrics = learner.update(state, unscored(batch_of(groups[:3])), np.random.default_rng(0))
    assert metrics['actor/grad_norm'] > 0
    assert all(x is y for x, y in zip(frozen, jax.tree.leaves(after.frozen), strict=True))
    of_table = {p.path for p in parameters_of(with_adapter.config) if p.when == ADAPTER}
    assert set(flatten_dict(after.trained)) == set(flatten_dict(gradient(after))) == of_table
    for path, x in flatten_dict(jax.device_get(after.params)).items():
        assert (path in of_table) == bool((x != flatten_dict(with_adapter.params)[path]).any()), path


def test_a_run_begins_as_its_base_and_its_checkpoint_holds_the_adapter_alone(policy, groups, tmp_path):
    with_adapter = adapted(policy)
    config = learner_config(**{**BARE, 'kl_target': 'reference', 'kl_coef': 0.1})
    config.model.path = str(policy.path)
    learner = make_learner(with_adapter, BARE, kl_target='reference', kl_coef=0.1)
    state, _, checkpoints = open_run(learner, config, tmp_path)
    plain = logprobs(make_learner(policy, BARE), policy.params, groups)
    np.testing.assert_allclose(logprobs(learner, state.theta.params, groups), plain, atol=1e-6)
    a = np.asarray(state.theta.params['layers']['q']['a'])
    assert 0.9 * a.shape[1] ** -0.5 < np.abs(a).max() <= a.shape[1] ** -0.5 and (a[0] != a[1]).any()

    state.theta, _ = learner.update(state.theta, unscored(batch_of(groups[:3])), np.random.default_rng(0), state.policies())
    state.trained()
    state.sync()
    of_base = {id(x) for x in jax.tree.leaves(state.theta.frozen)}
    for role in (ROLLOUT, REFERENCE):
        assert of_base < {id(x) for x in jax.tree.leaves(state.policies()[role])}
    checkpoints.save(state, REPLAY, 'selector')
    checkpoints.close()
    sizes = sum(f.stat().st_size for f in (tmp_path / '1' / 'policy').rglob('*') if f.is_file())
    adapters = sum(x.nbytes for x in jax.tree.leaves(state.theta.trained))
    assert sizes < 8 * adapters + 50_000

    again, _, _ = open_run(learner, config, tmp_path)
    for name in ('theta', 'alpha', 'reference'):
        jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (getattr(again, name), getattr(state, name))))


def of_another_base(monkeypatch):
    """From here on, one number of the base's files is another."""
    read = Learner.read_initial

    def flipped(self):
        params = read(self)
        params['norm']['scale'] = params['norm']['scale'].at[0].multiply(-1)
        return params

    monkeypatch.setattr(Learner, 'read_initial', flipped)


def begun_from_files(policy, directory, **objective):
    """(learner, config, state) of a run that begins from an adapter's files, and has a checkpoint."""
    with_adapter, files = adapted(policy), directory / 'files'
    files.mkdir()
    save_adapter(files, with_adapter.config, adapter_tensors(with_adapter.config, with_adapter.params, 'float32'), str(policy.path))
    config = learner_config(**{**BARE, **objective})
    config.model.path, config.model.adapter.start = str(policy.path), str(files)
    learner = Learner(config, with_adapter.config, make_mesh(1, 1, 1), 'xla')
    state, _, checkpoints = open_run(learner, config, directory / 'checkpoints')
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.theta.params), with_adapter.params)
    state.trained()
    checkpoints.save(state, REPLAY, 'selector')
    checkpoints.close()
    return learner, config, state


def test_without_a_reference_a_run_goes_on_without_the_files_that_it_began_from(policy, tmp_path, monkeypatch):
    learner, config, state = begun_from_files(policy, tmp_path)
    config.model.adapter.start = ''
    learner = Learner(config, learner.model, learner.mesh, 'xla')
    again, _, _ = open_run(learner, config, tmp_path / 'checkpoints')
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (again.theta, state.theta)))
    of_another_base(monkeypatch)
    with pytest.raises(OtherWeights, match=r'^model\.path=\S+ holds other weights than at the start .*; restore its files$'):
        open_run(learner, config, tmp_path / 'checkpoints')


def test_with_a_reference_the_files_that_a_run_began_from_are_asked_for(policy, tmp_path):
    learner, config, state = begun_from_files(policy, tmp_path, kl_target='reference', kl_coef=0.1)
    again, _, _ = open_run(learner, config, tmp_path / 'checkpoints')
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (again.reference, state.reference)))
    config.model.adapter.start = ''
    learner = Learner(config, learner.model, learner.mesh, 'xla')
    with pytest.raises(OtherWeights, match=r"^model\.path=\S+ with model\.adapter\.start='' holds other weights .*; restore both$"):
        open_run(learner, config, tmp_path / 'checkpoints')


def test_a_checkpoint_of_all_weights_is_not_read_as_one_of_an_adapter(policy, tmp_path):
    """Earlier versions stored weights that a run did not train, too."""
    config = learner_config(**BARE)
    config.model.path = str(policy.path)
    state, _, checkpoints = open_run(make_learner(policy, BARE), config, tmp_path)
    state.trained()
    checkpoints.save(state, REPLAY, 'selector')
    checkpoints.close()
    with pytest.raises(ValueError, match='is of an earlier version, which also stored weights that are not trained; continue with'):
        open_run(make_learner(adapted(policy), BARE), config, tmp_path)


def test_a_frozen_base_has_the_dtype_to_which_the_model_rounds_it_and_nothing_else_changes(make_policy, groups):
    policy = adapted(make_policy('bfloat16'))
    learner = make_learner(policy, BARE)
    read = flatten_dict(learner.read_initial())
    trained = {p.path for p in parameters_of(policy.config) if p.when == ADAPTER}
    assert {str(x.dtype) for path, x in read.items() if path in trained or path[-1] == 'scale'} == {'float32'}
    assert {str(x.dtype) for path, x in read.items() if path not in trained and path[-1] != 'scale'} == {'bfloat16'}
    rounded = unflatten_dict({path: x.astype(read[path].dtype) for path, x in flatten_dict(policy.params).items()})
    batch = batch_of(groups[:3])
    one, other = (learner.update(learner.init(jax.tree.map(jax.numpy.array, p)), unscored(batch), np.random.default_rng(0)) for p in (policy.params, rounded))
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(state.trained) for state, _ in (one, other)))


def test_an_adapters_files_are_pefts(policy, tmp_path):
    """A is [rank, in] and B [out, rank] there, under the names of the modules, and alpha / rank is their factor."""
    with_adapter = adapted(policy, targets='attention')
    save_adapter(tmp_path, with_adapter.config, adapter_tensors(with_adapter.config, with_adapter.params, 'float32'), 'owner/base')
    stated, tensors = json.loads((tmp_path / 'adapter_config.json').read_text()), load_file(tmp_path / 'adapter_model.safetensors')
    assert (stated['r'], stated['lora_alpha'], stated['target_modules']) == (3, 6.0, ['k_proj', 'o_proj', 'q_proj', 'v_proj'])
    assert len(tensors) == 8 * with_adapter.config.num_layers
    base, whole = (dict(hf.to_hf(each.config, each.params)) for each in (policy, with_adapter))
    for name in (name for name in base if 'self_attn' in name and name.endswith('proj.weight')):
        a, b = (tensors['base_model.model.' + name.replace('weight', f'lora_{x}.weight')] for x in 'AB')
        np.testing.assert_allclose(whole[name], base[name] + 6.0 / 3 * b @ a, atol=1e-6)


@pytest.mark.slow
def test_a_run_of_an_adapter_goes_on_bit_for_bit_and_its_exports_are_its_policy(benchmark, tmp_path):
    """With X3 and a reference. The merged export is the adapter's files on the base."""
    fields = {'model__adapter__rank': 4, 'learner__learning_rate': 1e-3, 'steps': 4, 'checkpoint__every': 1, 'rollout__sync_every': 2}
    config = small_config('bapo_guarded', benchmark, **fields)
    run(config, tmp_path / 'whole')
    shutil.copytree(tmp_path / 'whole', tmp_path / 'again')
    shutil.rmtree(tmp_path / 'again' / 'checkpoints' / '4')
    run(config, tmp_path / 'again')
    rows = metrics(tmp_path / 'whole')
    assert metrics(tmp_path / 'again') == rows and any(row.get('actor/kl_loss') for row in rows)
    assert max(row['mismatch/logprob_abs_max'] for row in rows if 'mismatch/kl' in row) < 1e-4

    export(tmp_path / 'whole', tmp_path / 'merged')
    export(tmp_path / 'whole', tmp_path / 'adapter', adapter=True)
    base, merged = (load_file(folder / 'model.safetensors') for folder in (Path(config.model.path), tmp_path / 'merged'))
    adapter = load_file(tmp_path / 'adapter' / 'adapter_model.safetensors')
    changed = set()
    for name in base:
        stem = 'base_model.model.' + name.removesuffix('weight')
        parts = [adapter.pop(f'{stem}lora_{x}.weight', None) for x in 'BA']
        want = base[name] if parts[0] is None else base[name] + 32.0 / 4 * parts[0] @ parts[1]
        np.testing.assert_allclose(merged[name].astype(np.float32), want, atol=1e-6, err_msg=name)
        changed |= {name} if (merged[name] != base[name]).any() else set()
    assert not adapter and len(changed) == 7 * read_config(config.model.path).num_layers
    with pytest.raises(ValueError, match='--adapter: .* has no adapter'):
        export(tmp_path / 'merged', tmp_path / 'none', adapter=True)
    recorded = tmp_path / 'whole' / 'config.json'
    said = json.loads(recorded.read_text('utf-8'))
    said['model']['rope_theta'] = 4e4
    recorded.write_text(json.dumps(said))
    with pytest.raises(ValueError, match='model.rope_theta=40000, .* leave --adapter out'):
        export(tmp_path / 'whole', tmp_path / 'none', adapter=True)
    assert not (tmp_path / 'none').exists()
