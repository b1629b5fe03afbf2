"""What a host that follows reports where it cannot do host 0's work."""

import json
from types import SimpleNamespace

import pytest
from small_run import small_config

from bapo_jax.cluster.hosts import HostError
from bapo_jax.config import default_config, resolve
from bapo_jax.follow import follow, other_commit, other_settings


def a_config(**changes):
    config = default_config()
    config.model.path = 'somewhere'
    config.update_from_flattened_dict({name.replace('__', '.'): value for name, value in changes.items()})
    return resolve(config)


def of_host_0(**changes):
    """The settings as host 0 sends them."""
    return json.loads(json.dumps(a_config(**changes).to_dict()))


def test_equal_settings_are_no_problem_and_tuples_are_equal_to_the_lists_that_were_sent():
    assert isinstance(a_config().replay.c2, tuple) and isinstance(of_host_0()['replay']['c2'], list)
    assert other_settings(of_host_0(), a_config()) == ''


def test_differing_settings_are_named():
    problem = other_settings(of_host_0(seed=1, replay__c2=(0.1,)), a_config(learner__clip_low=0.1))
    assert problem == 'other settings than host 0, in learner.clip_low, replay.c2, seed; start all hosts with the same config'


def test_another_commit_of_a_model_of_the_hub_is_a_problem_and_a_directory_is_none():
    assert other_commit('a' * 40, 'b' * 40) == (
        f'model.path is commit {"b" * 40} of the hub, but {"a" * 40} on host 0: it was just updated; start all hosts again'
    )
    assert [other_commit(*pair) for pair in (('a', 'a'), ('', 'a'), ('a', ''), ('', ''))] == [''] * 4


def test_an_adapter_that_this_host_lacks_is_a_problem_before_any_host_waits_in_shared_work(tmp_path):
    def agree(problem):
        raise HostError(problem)

    config = small_config('grpo', tmp_path / 'few.jsonl', model__adapter__rank=4, model__adapter__start=str(tmp_path / 'none'))
    hosts = SimpleNamespace(hear=lambda: {'do': 'open', 'config': {}, 'commit': '', 'code': {}}, agree=agree)
    with pytest.raises(HostError, match=r'^model\.adapter\.start=.*none. has no adapter_config\.json; give a directory'):
        follow(config, tmp_path / 'run', hosts)
