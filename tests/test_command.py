"""How the training command ends, also on a host that follows. Whole runs of two hosts: tests/cluster."""

import json
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from small_run import ROOT

from bapo_jax import command
from bapo_jax.cluster import devices
from bapo_jax.cluster.devices import use_cores
from bapo_jax.cluster.hosts import Hosts
from bapo_jax.config import default_config
from bapo_jax.machine import stopping
from bapo_jax.models.tensor_files import stored_values
from bapo_jax.run.start import check_rows
from bapo_jax.run.state import RunState


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

    monkeypatch.setattr(command, 'FLAGS', types.SimpleNamespace(amend=False, hosts=1))
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


@pytest.mark.parametrize('unwritten, says', [({}, True), ({'loss': 1.0}, False)])
def test_the_next_commands_are_named_only_if_the_run_has_finished(unwritten, says, monkeypatch, tmp_path, capsys):
    """A signal in the evaluation after the last step stops the run: all steps are done, and it has not finished."""
    state, setup = RunState(None, None, step=2, unwritten=unwritten), types.SimpleNamespace(schedule=types.SimpleNamespace(steps=2))
    monkeypatch.setattr(command, 'FLAGS', types.SimpleNamespace(amend=False, hosts=1))
    monkeypatch.setattr(command, 'tell_end', lambda *_: None)
    assert command.lead(lambda *_: setup, lambda _: state, default_config(), tmp_path / 'run', Hosts()) is says
    assert ('next:' in capsys.readouterr().out) is says


@pytest.fixture
def set_to(monkeypatch, tmp_path):
    """The numbers of CPU devices that JAX was given, on three cores without a quota."""
    numbers = []
    monkeypatch.delenv('JAX_NUM_CPU_DEVICES', raising=False)
    monkeypatch.setattr(devices, 'CONTAINER', tmp_path)
    monkeypatch.setattr('os.sched_getaffinity', lambda _: {0, 1, 2})
    monkeypatch.setattr('jax.config.update', lambda _, number: numbers.append(number))
    return numbers


@pytest.mark.parametrize('parameters, environment, given', [
    (1000, {}, [2]), (10**7, {}, []), (0, {}, []), (1000, {'JAX_NUM_CPU_DEVICES': '3'}, []),
    (1000, {'XLA_FLAGS': '--xla_force_host_platform_device_count=3'}, []),
])  # fmt: skip
def test_a_small_policy_gets_a_cpu_device_for_each_core_that_divides_the_rows(parameters, environment, given, monkeypatch, set_to):
    """Three cores and four rows: two devices. A large policy, and an environment that says the number, keep what they have."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    use_cores(parameters, 4)
    assert set_to == given


@pytest.mark.parametrize('recorded, given, said', [
    (2, [2], ''), (4, [4], 'devices: 4,'), (1, [], 'devices: 1,'), (3, [2], ''), (0, [2], ''),
])  # fmt: skip
def test_a_run_keeps_its_number_of_devices_on_a_machine_with_other_cores_and_says_so(recorded, given, said, set_to, capsys):
    """Three would not divide the four rows, which were changed since: then the cores count."""
    use_cores(1000, 4, recorded)
    told = capsys.readouterr().out
    assert set_to == given and said in told and bool(told) == bool(said)
    assert not said or 'as config.json records, so that results stay the same; this machine would take 2: set JAX_NUM_CPU_DEVICES=2 ' in told


@pytest.mark.parametrize('files, cores', [
    ({}, 8), ({'cpu.max': 'max 100000\n'}, 8), ({'cpu.max': '200000 100000\n'}, 2), ({'cpu.max': '50000 100000\n'}, 1),
    ({'cpu/cpu.cfs_quota_us': '-1\n', 'cpu/cpu.cfs_period_us': '100000\n'}, 8),
    ({'cpu/cpu.cfs_quota_us': '350000\n', 'cpu/cpu.cfs_period_us': '100000\n'}, 3),
])  # fmt: skip
def test_a_container_has_as_many_cores_as_its_quota_by_either_interface(files, cores, monkeypatch, tmp_path):
    monkeypatch.setattr(devices, 'CONTAINER', tmp_path)
    monkeypatch.setattr('os.sched_getaffinity', lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert devices.usable_cores() == cores


def test_the_command_chooses_devices_by_the_policys_parameters_and_by_the_run(monkeypatch, tmp_path, set_to):
    """24 MB in two files of float16 are more than SMALL_POLICY parameters, though as few bytes as 6M of float32."""
    c, here = default_config(), types.SimpleNamespace(hosts=1)
    monkeypatch.setattr(command, 'FLAGS', here)
    c.model.path, c.learner.micro_batch_rows, c.mesh.data = str(tmp_path), 4, -1
    save_file({'a': np.zeros((6, 10**6), np.float16)}, tmp_path / 'model-1.safetensors')
    command.choose_devices(c, None)
    save_file({'b': np.zeros((6, 10**6), np.float16)}, tmp_path / 'model-2.safetensors')
    command.choose_devices(c, tmp_path / 'new')
    assert set_to == [2]
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'config.json').write_text(json.dumps({'environment': {'devices': '4 cpu', 'hosts': '1'}}))
    command.choose_devices(c, tmp_path / 'run')
    assert set_to == [2, 4]
    here.hosts = 2
    command.choose_devices(c, tmp_path / 'run')
    assert set_to == [2, 4]
    assert stored_values(tmp_path) == 12 * 10**6
    (tmp_path / 'model-1.safetensors').write_bytes(b'cut off')
    assert stored_values(tmp_path) == 0 == stored_values(tmp_path / 'no')


def test_a_config_file_that_starts_jax_is_refused_in_one_line(monkeypatch, tmp_path):
    jax.devices()
    monkeypatch.delenv('JAX_NUM_CPU_DEVICES')
    monkeypatch.setattr(devices, 'usable_cores', lambda: 2)
    monkeypatch.setattr(command, 'FLAGS', types.SimpleNamespace(amend=False, hosts=1))
    c = default_config()
    c.model.path, c.mesh.data = str(ROOT / 'configs' / 'quickstart_base'), -1
    with pytest.raises(SystemExit, match=r'^error: JAX has already started, .* in your config file .*, or set JAX_NUM_CPU_DEVICES=2$'):
        command.lead(lambda *_: pytest.fail('built'), None, c, tmp_path / 'run', Hosts())
    assert not (tmp_path / 'run').exists()
