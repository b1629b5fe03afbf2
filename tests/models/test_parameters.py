"""The parameter table describes every parameter of every model, and nothing else."""

import dataclasses

import jax
import pytest
from tiny import QWEN3, QWEN3_5, QWEN3_MOE

from bapo_jax.models import hf
from bapo_jax.models.decoder import parameters_of
from bapo_jax.models.layers import Adapter
from bapo_jax.models.parameters import ADAPTER_PARAMETERS, HEAD, PARAMETERS, united, parted
from bapo_jax.models.sharding import ShardingRules

MODELS = [{'tie_word_embeddings': tied, **family} for family in ({}, QWEN3, QWEN3_MOE, QWEN3_5) for tied in (True, False)]


@pytest.mark.parametrize('fields', MODELS)
def test_a_model_has_exactly_the_parameters_of_its_rows(fields, make_policy):
    config = make_policy(**fields).config
    leaves = jax.tree_util.tree_flatten_with_path(hf.abstract_params(config)[1])[0]
    shapes = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    rows = {p.path: p for p in parameters_of(config)}
    layers_of = {'layers': config.num_layers // config.period, 'delta_layers': config.num_layers - config.num_layers // config.period}
    assert shapes.keys() == rows.keys()
    for path, shape in shapes.items():
        assert len(shape) == len(rows[path].axes), path
        assert rows[path].indices == (path[0] in layers_of) + ('experts' in path), path
        assert not rows[path].indices or shape[0] == layers_of[path[0]], path
        assert rows[path].indices < 2 or shape[1] == config.routing.experts, path
    assert (HEAD in rows.values()) is not fields['tie_word_embeddings']


def test_a_critic_has_a_value_head_in_place_of_the_head(make_policy):
    for fields in MODELS:
        policy = make_policy(**fields).config
        critic = dataclasses.replace(policy, value_head=True)
        shapes = {tuple(k.key for k in path) for path, _ in jax.tree_util.tree_flatten_with_path(hf.abstract_params(critic)[1])[0]}
        rows = set(parameters_of(critic))
        assert shapes == {p.path for p in rows}
        assert rows == set(parameters_of(policy)) - {HEAD} | {p for p in PARAMETERS if p.needs == 'value_head'}


def test_every_row_is_of_some_model_and_names_a_parameter_of_its_own(make_policy):
    models = [
        dataclasses.replace(make_policy(**fields).config, value_head=critic, adapter=adapter)
        for fields in MODELS for critic in (False, True)
        for adapter in [None, Adapter(2, 4.0, 'attention' if 'num_experts' in fields else 'all')][: 1 + ('linear_key_head_dim' not in fields)]
    ]  # fmt: skip
    rows = PARAMETERS + ADAPTER_PARAMETERS
    assert {p for model in models for p in parameters_of(model)} == set(rows)
    # A hybrid model's layers of either kind have norms and an MLP, by one name.
    assert len({p.path for p in rows}) == len({(p.name, p.path[0]) for p in rows}) == len(rows)
    assert all(p.name.count('{}') == p.indices for p in rows)


@pytest.mark.parametrize('like', [{'b': {'d': 0}}, {'a': 0}, {'a': 0, 'b': {'c': 0, 'd': 0}}, {'x': 0}, None])
def test_a_tree_is_parted_and_joined_again(like):
    tree = {'a': 1, 'b': {'c': 2, 'd': 3}}
    part, rest = parted(tree, like)
    assert united(part, rest) == united(rest, part) == tree
    assert (part is None) == (like in ({'x': 0}, None)) and (rest is None) == (like == {'a': 0, 'b': {'c': 0, 'd': 0}})
    assert like != {'b': {'d': 0}} or (part, rest) == ({'b': {'d': 3}}, {'a': 1, 'b': {'c': 2}})


def test_every_logical_axis_has_a_rule_and_every_rule_an_axis():
    rules = {field.name for field in dataclasses.fields(ShardingRules)}
    assert {axis for p in PARAMETERS for axis in p.axes if axis} == rules
