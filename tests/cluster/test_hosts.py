"""Many hosts: the trainer commands of launch/, started as real processes of this machine, exchange data by gloo.

Each has one CPU device; what they do is compared with one process that has two.
"""

import json
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from launched import trainer_commands
from recorded_server import RecordedServer
from small_run import metrics
from two_hosts import MINUTES, TRAIN, arguments, finish, free_port, start, start_two

from bapo_jax.cluster.hosts import HostLost, Hosts, naming_losses
from bapo_jax.run.log.metrics import read_metrics
from bapo_jax.weights.manifest import check_bytes, read_manifest, read_tensors
from bapo_jax.weights.publish import path_of, publish

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def server():
    server = RecordedServer()
    yield server
    server.stop()


def launched(script: str, directory: Path, server: RecordedServer, arguments: list[str]) -> list[list[str]]:
    """The commands that a script of launch/ gives two hosts (one_machine: one); tests/launch holds that the scripts' are the same."""
    directory.mkdir()
    commands = trainer_commands(script, directory, *arguments, COORDINATOR_PORT=str(free_port()))
    # The stubs' servers have ended; the recorded one is asked instead.
    return [[*command.argv, f"--config.rollout.servers=('{server.url}',)"] for command in commands]


def assert_same_numbers(rows: list[dict], rows_of_one: list[dict]) -> None:
    for row, row_of_one in zip(rows, rows_of_one, strict=True):
        assert row.keys() == row_of_one.keys()
        for name in row:
            np.testing.assert_allclose(row[name], row_of_one[name], rtol=1e-5, atol=1e-5, err_msg=f'step {row["step"]}, {name}')


@pytest.fixture(scope='module')
def one(tmp_path_factory, server, benchmark):
    """A run of one process with two devices, evaluated after every step, and the policies it shipped."""
    directory = tmp_path_factory.mktemp('one')
    [command] = launched('one_machine', directory / 'launch', server, arguments(directory / 'run', server, benchmark))
    [(status, output)] = finish(start(command, devices=2))
    assert status == 0, output
    shipped, server.loaded = server.loaded, {}
    return metrics(directory / 'run'), shipped


SPREAD = """
import sys
import jax, numpy as np
from jax.sharding import Mesh
from bapo_jax.cluster import hosts, mesh as meshes

host = int(sys.argv[1])
hosts.join(sys.argv[2], 2, host, 60)
devices = np.array(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))
mesh = Mesh(devices[[2, 0, 3, 1]].reshape(1, 4, 1), meshes.MESH_AXES)
arrays = {'floats': np.arange(48, dtype=np.float32).reshape(2, 8, 3) - 20, 'integers': np.arange(16, dtype=np.int32).reshape(2, 8)}
given = arrays if host == 0 else jax.tree.map(np.zeros_like, arrays)
placed = meshes.spread(given, meshes.row_sharding(mesh, 1))
for name, array in arrays.items():
    assert placed[name].sharding.device_set == set(devices) and placed[name].sharding.shard_shape(array.shape)[1] == 2
    np.testing.assert_array_equal(meshes.fetch(placed[name]), array)
"""


def test_what_host_0_spreads_arrives_though_the_mesh_mixes_the_hosts_devices():
    """As a TPU slice's mesh does, which follows the slice and not the hosts."""
    where = f'127.0.0.1:{free_port()}'
    for status, output in finish(*(start([sys.executable, '-c', SPREAD, str(host), where], devices=2) for host in (0, 1))):
        assert status == 0, output


PUBLISH = """
import re
import sys
from pathlib import Path
from bapo_jax.cluster import hosts
from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.models import hf
from bapo_jax.models.decoder import parameters_of
from bapo_jax.models.sharding import parameter_sharding
from bapo_jax.models.tensor_files import at
from bapo_jax.weights.publish import path_of, publish, write_weights

host, base, directory = int(sys.argv[1]), *map(Path, sys.argv[3:])
hosts.join(sys.argv[2], 2, host, 60)
config, together = hf.read_config(base), hosts.Hosts(60.0)
for version, sizes in enumerate(((2, 2, 1), (1, 2, 2))):
    mesh = make_mesh(*sizes)
    params = hf.load_params(base, config, parameter_sharding(mesh, hf.abstract_params(config)[1]))
    matrices = tuple(p for p in parameters_of(config) if p.indices and p.transposed)
    shardings = tuple(hf._sharding_in_files(p, at(params, p.path)) for p in matrices)
    program = hf._as_in_files.lower(params, (0,), parameters=matrices, dtype='bfloat16', shardings=shardings).compile().as_text()
    assert 'transpose' in program and not re.search('all-gather|all-to-all|all-reduce|permute', program)
    if host == 0:
        publish(directory, version, params, config, 'bfloat16', together)
    else:
        assert together.hear() == {'do': 'publish', 'version': version}
        assert not write_weights(path_of(directory, version), params, config, 'bfloat16', together)['model.norm.weight']['crc32']
"""


def test_a_policy_that_two_hosts_publish_in_parts_is_the_one_that_a_process_publishes_alone(policy, tmp_path):
    """And nothing crosses the mesh for it."""
    where = f'127.0.0.1:{free_port()}'
    command = [sys.executable, '-c', PUBLISH]
    two = (start([*command, str(host), where, str(policy.path), str(tmp_path)], devices=2) for host in (0, 1))
    for status, output in finish(*two):
        assert status == 0, output
    alone = publish(tmp_path, 2, policy.params, policy.config, 'bfloat16')
    want = {tensor.name: tensor for tensor in read_manifest(alone).tensors}
    for version in (0, 1):
        path = path_of(tmp_path, version)
        manifest = read_manifest(path)
        check_bytes(path, manifest)
        assert [t.name for t in manifest.tensors] == list(want)
        for tensor in manifest.tensors:
            assert (tensor.shape, tensor.dtype) == (want[tensor.name].shape, want[tensor.name].dtype)
            # Every device writes a part of every matrix, those that hold the same rows ('data' of version 0) included.
            assert len(tensor.crc32) == 4 or len(tensor.shape) == 1
        for (name, array), (_, of_one) in zip(read_tensors(path, manifest), read_tensors(alone, read_manifest(alone)), strict=True):
            assert array.tobytes() == of_one.tobytes(), f'{version} {name}'


def test_two_hosts_train_as_one_does_also_when_stopped_and_continued_and_their_evaluation_outlasts_their_deadline(
    one, server, benchmark, tmp_path, monkeypatch
):
    rows_of_one, shipped_by_one = one
    server.loaded = {}
    answer, begun = server._answer, []

    def slow_at_first(path, body):
        if path == '/inference/v1/generate':
            begun.append(time.monotonic())
            time.sleep(max(0, begun[0] + 6 - begun[-1]))  # the probe and the evaluation before the first step
        return answer(path, body)

    monkeypatch.setattr(server, '_answer', slow_at_first)
    given = [*arguments(tmp_path / 'run', server, benchmark), '--config.mesh.deadline_s=4.0']
    commands = launched('slurm', tmp_path / 'launch', server, given)
    processes, deadline = [start(command) for command in commands], time.monotonic() + 3 * MINUTES
    while len(read_metrics(tmp_path / 'run')) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in processes:  # as schedulers do
        process.send_signal(signal.SIGTERM)
    stopped = finish(*processes)
    assert [status for status, _ in stopped] == [75, 75], stopped
    for status, output in finish(*map(start, commands)):
        assert status == 0, output
    assert 'stopped after step' in stopped[0][1] and 'SIGTERM: saving a checkpoint and stopping' in stopped[1][1]
    rows = metrics(tmp_path / 'run')
    assert_same_numbers(rows, rows_of_one)
    # Both trained, re-evaluated and synced; what was shipped is the same policy, whole.
    assert sum(row.get('bapo/x1_groups', 0) for row in rows) > 8 and rows[3]['bapo/reevaluated'] > 0
    assert shipped_by_one.keys() == server.loaded.keys() == set(range(5))
    for version, tensors in shipped_by_one.items():
        for name, tensor in tensors.items():
            np.testing.assert_allclose(server.loaded[version][name], tensor, rtol=1e-5, atol=1e-5, err_msg=f'{version} {name}')
    assert not np.array_equal(shipped_by_one[0]['model.embed_tokens.weight'], shipped_by_one[4]['model.embed_tokens.weight'])


def test_a_host_with_other_settings_ends_the_run_naming_them(server, benchmark, tmp_path):
    two = start_two(arguments(tmp_path / 'run', server, benchmark), '--config.learner.learning_rate=0.5')
    (status, output_of_0), (status_of_1, output_of_1) = finish(*two)
    for output in (output_of_0, output_of_1):
        assert 'error: host 1: other settings than host 0, in learner.learning_rate' in output
    assert status == status_of_1 == 1


def test_an_error_of_host_0_is_told_once_and_ends_all(server, benchmark, tmp_path):
    wrong = "--config.evaluate.benchmarks=('no_such_benchmark',)"
    two = start_two(arguments(tmp_path / 'run', server, benchmark, wrong))
    (status, output), (status_of_1, output_of_1) = finish(*two)
    assert status == 1 and 'no_such_benchmark' in output and 'Traceback' not in output + output_of_1
    assert status_of_1 == 0 and not (tmp_path / 'run').exists()


def test_an_evaluation_may_take_longer_than_the_hosts_deadline_and_host_0_may_not_fall_silent_in_it(
    server, benchmark, tmp_path, monkeypatch
):
    answer, answered = server._answer, []

    def slowly(path, body):
        if path == '/inference/v1/generate':
            time.sleep(1.8)
            answered.append(path)
        return answer(path, body)

    monkeypatch.setattr(server, '_answer', slowly)
    slow = ['--config.mesh.deadline_s=3.0', '--config.rollout.concurrency=1']
    host_0, host_1 = start_two(arguments(tmp_path / 'run', server, benchmark, *slow))
    deadline = time.monotonic() + 3 * MINUTES
    try:
        while len(answered) < 6:  # the probe, and five of eight questions, which take three times as long as the deadline
            assert host_1.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        assert not list(tmp_path.glob('run/evals/*.json'))
        host_0.send_signal(signal.SIGSTOP)
        ((status, output),) = finish(host_1)
    finally:
        host_0.kill()
        host_1.kill()
        host_0.communicate()
    # JAX would end the host as well, after 100 seconds and with a trace.
    assert status == 1 and 'error: host 1 got no heartbeat from host 0 for 3 s (mesh.deadline_s)' in output
    assert 'Start all hosts again' in output and 'stack trace' not in output


WORKS = """
import sys, time
from bapo_jax.cluster import hosts

host = int(sys.argv[1])
hosts.join(sys.argv[2], 2, host, 60)
together = hosts.Hosts(1.0)
if host:
    while True:
        print('heard', together.hear(), flush=True)
with together:
    together.tell('work')
    time.sleep(600)
"""


def test_a_host_0_that_is_killed_while_another_waits_ends_that_too():
    where = f'127.0.0.1:{free_port()}'
    host_0, host_1 = (start([sys.executable, '-c', WORKS, str(host), where]) for host in (0, 1))
    try:
        assert any(line.startswith("heard {'do': 'work'}") for line in host_1.stdout)
        host_0.kill()
        ((status, said),) = finish(host_1)
    finally:
        host_0.kill()
        host_0.communicate()
    assert status and 'TypeError' not in said and ('lost its connection to host 0' in said or 'coordination' in said.lower())


class Heard:
    """JAX's coordination service, as a host that follows sees it: `beats` come one after the other, and then the last again."""

    def __init__(self, *beats, announced=10**9):
        self.beats, self.asked, self.announced, self.now = beats, 0, announced, 0.0

    def monotonic(self):
        return self.now

    def blocking_key_value_get(self, key, timeout_ms):
        if key != 'bapo/alive':
            self.asked += 1
            if self.asked <= self.announced:
                self.now += timeout_ms / 1000
                raise jax.errors.JaxRuntimeError('DEADLINE_EXCEEDED: GetKeyValue() timed out')
            return '{"do": "stop"}'
        beat = self.beats[min(self.asked, len(self.beats)) - 1]
        if isinstance(beat, Exception):
            raise beat
        return json.dumps([min(self.asked, len(self.beats)), 'evaluating: 256 of 512 responses', beat])

    def wait_at_barrier(self, name, timeout_ms):
        pass


def test_what_a_host_that_waits_makes_of_signs_of_life(monkeypatch):
    def hear(client):
        monkeypatch.setattr('bapo_jax.cluster.hosts.distributed.global_state.client', client)
        monkeypatch.setattr('bapo_jax.cluster.hosts.time', client)
        return Hosts(0.2, waits_s=400.0).hear()

    assert hear(Heard(*range(100), announced=60)) == {'do': 'stop'}  # three times as long as it waits without one
    with pytest.raises(HostLost, match='got no heartbeat from host 0 for 0.2 s'):
        hear(Heard(1.0, 2.0, 3.0))  # the last one again and again
    # What host 0 may wait for servers and verdicts, and an hour for the devices.
    with pytest.raises(HostLost, match='has made no progress for 4001 s; its last activity: evaluating: 256 of 512 responses'):
        hear(Heard(3999.0, 4000.0, 4001.0))
    with pytest.raises(HostLost, match='lost its connection to host 0: UNAVAILABLE: gone'):
        hear(Heard(jax.errors.JaxRuntimeError('UNAVAILABLE: gone')))


@pytest.mark.parametrize('host', [0, 1])
def test_a_host_that_does_not_join_ends_the_others_in_time_with_a_message(host, server, benchmark, tmp_path):
    where = f'127.0.0.1:{free_port()}'
    together = ['--hosts=2', f'--host={host}', f'--coordinator={where}', '--join_timeout=5']
    ((status, output),) = finish(start([*TRAIN, *arguments(tmp_path / 'run', server, benchmark), *together]))
    assert status == 1
    assert f'error: host {host} waited 5 s at {where}, but not all 2 hosts joined' in output and '--join_timeout' in output
    assert 'Check failure stack trace' not in output and not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    ('hosts', 'said', 'told'),
    [
        (2, 'UNKNOWN: Gloo all-reduce failed: Connection reset by peer\nmore', 'lost another host .*: UNKNOWN: .* by peer$'),
        (2, 'RESOURCE_EXHAUSTED: Out of memory', '^RESOURCE_EXHAUSTED'),
        (1, 'UNAVAILABLE: a device', '^UNAVAILABLE: a device$'),
    ],
)
def test_what_jax_says_of_a_lost_host_is_told_as_that_and_nothing_else_is(hosts, said, told, monkeypatch):
    monkeypatch.setattr('bapo_jax.cluster.hosts._hosts', lambda: hosts)
    with pytest.raises((HostLost, jax.errors.JaxRuntimeError), match=told) as raised, naming_losses():
        raise jax.errors.JaxRuntimeError(said)
    assert (raised.type is HostLost) == ('lost' in told)


def test_the_inprocess_engine_is_refused_on_several_hosts(server, benchmark, tmp_path):
    wrong = ['--config.rollout.engine=jax', '--config.rollout.servers=()']
    (status, output), _ = finish(*start_two(arguments(tmp_path / 'run', server, benchmark, *wrong)))
    assert status == 1 and 'rollout.engine=jax' in output and 'rollout.engine=vllm' in output
    assert not (tmp_path / 'run').exists()
