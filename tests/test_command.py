"""How the training command ends, also on a host that follows. Whole runs of two hosts: tests/cluster."""

import types
from pathlib import Path

import numpy as np
import pytest

from bapo_jax import command
from bapo_jax.cluster.devices import use_cores
from bapo_jax.cluster.hosts import Hosts
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


@pytest.mark.parametrize('error, ends', [(stopping.Stopped(), 1), (ZeroDivisionError(), 0)])
def test_a_run_that_a_signal_stops_before_its_first_step_has_ended_in_order_and_a_crash_has_not(error, ends, monkeypatch, tmp_path):
    told = []

    def train(_):
        raise error

    monkeypatch.setattr(command, 'FLAGS', types.SimpleNamespace(amend=False))
    setup = types.SimpleNamespace(run=types.SimpleNamespace(end=lambda: told.append('end')))
    with pytest.raises(type(error)):
        command.lead(lambda *_: setup, train, default_config(), tmp_path / 'run', Hosts())
    assert told == ['end'] * ends


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


@pytest.mark.parametrize('started, first', [('/bin/bapo-train', 'bapo-report'), ('train.py', 'python -m bapo_jax.report')])
def test_a_finished_run_names_the_next_commands_with_its_own_directory(started, first, monkeypatch):
    monkeypatch.setattr('sys.argv', [started])
    said = command.next_commands(Path('runs/my run')).splitlines()
    assert said[1] == f"    {first} 'runs/my run'" and len(said) == 4
    assert "export --checkpoint='runs/my run' --output='runs/my run'/hf" in said[3]


@pytest.mark.parametrize('size, environment, given', [
    (1000, {}, 2), (41_000_000, {}, None), (None, {}, None), (1000, {'JAX_NUM_CPU_DEVICES': '3'}, None),
    (1000, {'XLA_FLAGS': '--xla_force_host_platform_device_count=3'}, None),
])  # fmt: skip
def test_a_small_policy_gets_a_cpu_device_for_each_core_that_divides_the_rows(size, environment, given, monkeypatch, tmp_path):
    """Three cores and four rows: two devices. A large policy, and an environment that says the number, keep what they have."""
    set_to = []
    monkeypatch.delenv('JAX_NUM_CPU_DEVICES', raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr('os.sched_getaffinity', lambda _: {0, 1, 2})
    monkeypatch.setattr('jax.config.update', lambda _, number: set_to.append(number))
    if size is not None:
        (tmp_path / 'model.safetensors').write_bytes(b'x' * size)
    use_cores(tmp_path, 4)
    assert set_to == ([] if given is None else [given])
