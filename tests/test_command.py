"""How the training command ends on a host that follows. Whole runs of two hosts: tests/cluster."""

import types

import numpy as np
import pytest

from bapo_jax import command
from bapo_jax.config import default_config
from bapo_jax.machine import stopping
from bapo_jax.run.start import check_rows


@pytest.mark.parametrize('finished, status', [(True, None), (False, stopping.STATUS)])
def test_a_signalled_follower_ends_as_the_run_does(finished, status, monkeypatch, tmp_path):
    flags = types.SimpleNamespace(
        config=default_config(), workdir=str(tmp_path), fields=False, completion=None, dry_run=False, topology='', amend=False,
        coordinator='localhost:1', hosts=2, host=1, join_timeout=1,
    )  # fmt: skip
    monkeypatch.setattr(command, 'FLAGS', flags)
    for name, stand_in in (('join', lambda *_: None), ('part', lambda: None), ('follow', lambda *_: finished)):
        monkeypatch.setattr(command, name, stand_in)
    monkeypatch.setattr(stopping, 'requested', lambda: True)
    if status is None:
        command.conduct(None, None)
    else:
        with pytest.raises(SystemExit) as ended:
            command.conduct(None, None)
        assert ended.value.code == status


@pytest.mark.parametrize('slot, row, remedy', [(0, 100 + 50, 180), (32, 100 + 64, 196)])
def test_a_replayed_response_that_no_longer_fits_is_refused_with_the_field(slot, row, remedy):
    """The limit of responses was lowered by --amend, and rows became shorter than what the buffer holds."""
    c = default_config()
    c.rollout.update(max_prompt_tokens=100, max_response_tokens=50)
    c.learner.update(slot_tokens=slot, row_tokens=row)
    saved = {'high_response_len': np.array([7, 80, 1], np.int32), 'bad_response_len': np.zeros(1, np.int32), 'r_tot': np.array([1e9])}
    with pytest.raises(ValueError, match=f'learner.row_tokens={row} has no room for .* of 80 tokens .* set learner.row_tokens={remedy}$'):
        check_rows(saved, c)
    c.learner.row_tokens = remedy
    check_rows(saved, c)
