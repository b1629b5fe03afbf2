"""Each name of a replay builds the replay of that name."""

import pytest
from group_builders import make_group

from bapo_jax.config import default_config, resolve
from bapo_jax.methods import apply_method
from bapo_jax.replay.arpo import Arpo
from bapo_jax.replay.bapo import Bapo
from bapo_jax.replay.buffer import ReplayBuffer
from bapo_jax.replay.continuations import Continuations
from bapo_jax.replay.exgrpo import Exgrpo
from bapo_jax.replay.fifo import Fifo
from bapo_jax.replay.freshper import Freshper
from bapo_jax.replay.kinds import KINDS, OTHER_KINDS, make_replay, make_retries
from bapo_jax.replay.luffy import Luffy
from bapo_jax.replay.posterior import Posterior
from bapo_jax.replay.protocol import Replay
from bapo_jax.replay.relift import Relift
from bapo_jax.replay.repo import Repo
from bapo_jax.replay.rollout_replay import RolloutReplay
from bapo_jax.replay.retries import Uniform


def config_of(method, **changes):
    config = default_config()
    config.model.path = 'somewhere'
    apply_method(config, method)
    config.replay.update_from_flattened_dict({name.replace('__', '.'): value for name, value in changes.items()})
    return config


def row_of(kind):
    """A row with this kind of replay."""
    return 'dots' if kind == 'rollout_replay' else kind


def test_a_name_builds_what_it_says():
    built = {}
    for kind in KINDS:
        config = resolve(config_of(row_of(kind)))
        built[config.replay.kind] = type(make_replay(config, 100, lambda step: False, None))
    others = {'repo': Repo, 'arpo': Arpo, 'fifo': Fifo, 'freshper': Freshper, 'exgrpo': Exgrpo, 'rollout_replay': RolloutReplay}
    assert built == {'bapo': Bapo, 'luffy': Luffy, 'relift': Relift, **others}
    assert set(KINDS) == built.keys()


@pytest.mark.parametrize('method, made', [('bapo', Uniform), ('bapo_posterior', Posterior), ('bapo_continue', Continuations)])
def test_a_row_asks_again_as_its_name_says(method, made):
    assert isinstance(make_retries(resolve(config_of(method)), 1_000, None), made)


@pytest.mark.parametrize('after, prompts, first', [(0, 1_000, 4), (0, 100, 2), (7, 1_000, 8)])
def test_a_posterior_waits_for_an_epoch_or_as_many_steps_as_are_wanted(after, prompts, first):
    """256 prompts a step: three steps an epoch of 1,000, one of 100."""
    retries = make_retries(resolve(config_of('bapo_posterior', posterior__after=after)), prompts, None)
    buffer = ReplayBuffer(8, 8, 3, 1 / 8)
    buffer.add([make_group(1, 0, step=1)], 1)
    retries.observe([make_group(1, 0, step=1)], buffer)
    asked = [step for step in range(2, 12) if retries.choose(step, buffer, None)]
    assert asked[0] == first


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"replay\.kind='lifo' is unknown; choose one of bapo, repo, arpo, fifo, freshper, exgrpo, rollout_replay"):
        resolve(config_of('bapo', kind='lifo'))


@pytest.mark.parametrize('method, made', [('bapo', Bapo), *OTHER_KINDS.items()])
def test_a_kind_is_made_with_the_functions_that_the_loop_calls(method, made):
    replay = make_replay(resolve(config_of(row_of(method))), 100, lambda step: False, None)
    assert isinstance(replay, made) and (replay.buffer is None) == (method != 'bapo')
    for name in (name for name in vars(Replay) if not name.startswith('_')):
        assert callable(getattr(replay, name))
