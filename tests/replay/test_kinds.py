"""Each name of a replay builds the replay of that name."""

import pytest

from bapo_jax.config import default_config, resolve
from bapo_jax.methods import apply_method
from bapo_jax.replay.bapo import Bapo
from bapo_jax.replay.kinds import KINDS, make_replay
from bapo_jax.replay.repo import Repo


def config_of(method, **changes):
    config = default_config()
    config.model.path = 'somewhere'
    apply_method(config, method)
    config.replay.update(changes)
    return config


def test_a_name_builds_what_it_says():
    built = {}
    for method in ('bapo', 'repo'):
        replay = resolve(config_of(method)).replay
        built[replay.kind] = type(make_replay(replay, 8, lambda step: False))
    assert built == {'bapo': Bapo, 'repo': Repo}
    assert set(KINDS) == built.keys()


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"replay\.kind='fifo' is unknown; choose one of bapo, repo"):
        resolve(config_of('bapo', kind='fifo'))


@pytest.mark.parametrize('kind, made', [('bapo', Bapo), ('repo', Repo)])
def test_a_kind_is_made_with_the_functions_that_the_loop_calls(kind, made):
    c = default_config()
    c.model.path = 'unused'
    fields = resolve(c).replay
    fields.kind = kind
    replay = make_replay(fields, 8, lambda step: False)
    assert isinstance(replay, made) and kind in KINDS
    for name in ('hard_prompts', 'compose', 'add', 'metrics', 'state', 'restore'):
        assert callable(getattr(replay, name))
