"""Which file of replay/ builds a row's batch."""

import pytest

from bapo_jax.config import default_config, resolve
from bapo_jax.replay.bapo import Bapo
from bapo_jax.replay.kinds import KINDS, make_replay
from bapo_jax.replay.repo import Repo


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
