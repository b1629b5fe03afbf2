"""The launch scripts under stub srun, kubectl and gcloud: what each host is started with, and what happens when something is wrong.

launched.trainer_commands gives the trainers' commands to start as real processes.
"""

import ast
import copy
import functools
import operator
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from launched import (
    BASE,
    COORDINATOR_PORT,
    ROOT,
    SCRIPTS,
    applied,
    flag,
    free_ports,
    launch,
    plain_args,
    recorded,
    start,
    trainer_commands,
)  # fmt: skip

from bapo_jax.config import default_config
from bapo_jax.machine.stopping import STATUS

pytestmark = pytest.mark.slow
TOKEN = 'BAPO_ROLLOUT_TOKEN'
MANY_HOSTS = ('slurm', 'kubernetes', 'tpu_pod')
STARTING = ('one_machine', 'slurm', 'tpu_pod')  # those that start processes and wait for them
AWKWARD = (
    "--config.evaluate.benchmarks=('cd34', \"cd4\")", '--config.task.train=a  b', '--config.task.template=$HOME `id` $(id) $$ \\ *',
    '--config.task.name=é \'" # & ; | < > ! @NAME@ %s {}',
)  # fmt: skip


def alive(pid: int) -> bool:
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float = 30):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, 'it did not happen'
        time.sleep(0.1)
    return found


def pythons(tmp_path, module: str, after: str | None = None) -> list[dict]:
    """Records of the stub's python that ran `module`; `after`: those it made later."""
    return [c for c in recorded(tmp_path) if c['name'] == 'python' and c['argv'][1] == module and c.get('after') == after]


def all_ended(tmp_path) -> bool:
    """Within half a minute: what was told to end does so when it gets to it."""
    deadline = time.monotonic() + 30
    while any(alive(c['pid']) for c in recorded(tmp_path)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture(scope='module', params=SCRIPTS)
def done(request, tmp_path_factory):
    """A script that ran to its end with awkward arguments: two hosts where it has several, two servers."""
    tmp_path = tmp_path_factory.mktemp(request.param)
    args = [*plain_args(tmp_path), *AWKWARD]
    return request.param, args, launch(request.param, tmp_path, *args, SERVE_ARGS='--dtype=float32 -- --enforce-eager'), tmp_path


def test_every_host_runs_the_same_command_but_for_its_number(done):
    script, args, launched, _ = done
    assert launched.status == 0, launched.output
    first = launched.trainers[0].argv
    assert first[: 2 + len(args)] == ['-m', 'bapo_jax.train', *args]
    added = {a.split('=', 1)[0] for a in first[2 + len(args) :]}
    expected = {'--config.model.path', '--config.mesh.platform', '--config.rollout.engine', '--config.rollout.servers'}
    if script == 'one_machine':
        assert added == expected and len(launched.trainers) == 1
        return
    assert added == expected | {'--coordinator', '--hosts', '--host'}
    assert [flag(c, 'host') for c in launched.trainers] == ['0', '1']
    for trainer in launched.trainers:
        assert [a for a in trainer.argv if not a.startswith('--host=')] == [a for a in first if a != '--host=0']
    assert flag(launched.trainers[0], 'hosts') == '2'


def test_the_coordinator_is_host_0(done):
    script, _, launched, _ = done
    where = {'slurm': '127.0.0.1', 'kubernetes': 'math-trainer-0-0.math', 'tpu_pod': '127.0.0.1'}.get(script)
    assert {flag(c, 'coordinator') for c in launched.trainers} == {where and f'{where}:{COORDINATOR_PORT}'}
    if script == 'slurm':  # the step's first node is where task 0 runs
        assert launched.trainers[0].env['SLURMD_NODENAME'] == where and launched.trainers[0].env['SLURM_PROCID'] == '0'


def test_the_trainers_ask_where_the_servers_listen(done):
    script, _, launched, _ = done
    listening = [f'http://{flag(c, "host")}:{flag(c, "port")}' for c in launched.servers]
    if script == 'kubernetes':  # by their names there
        addresses = {flag(c, 'host'): f'math-server-0-{c.env["JOB_COMPLETION_INDEX"]}.math' for c in launched.servers}
        listening = [re.sub(r'(?<=//)[\d.]+', lambda m: addresses[m[0]], url) for url in listening]
    assert len(listening) == 2
    assert ast.literal_eval(flag(launched.trainers[0], 'config.rollout.servers')) == tuple(listening)
    for server in launched.servers:
        assert server.argv[:2] == ['-m', 'bapo_jax.rollout.serve']
        assert server.argv[-3:] == ['--dtype=float32', '--', '--enforce-eager']
        assert flag(server, 'model') == str(BASE) == flag(launched.trainers[0], 'config.model.path')


def test_one_token_for_all_and_on_no_command_line_nor_in_a_log(done):
    script, _, launched, tmp_path = done
    tokens = {c.env[TOKEN] for c in [*launched.trainers, *launched.servers]}
    token = tokens.pop()
    assert not tokens and re.fullmatch('[0-9a-f]{48}', token)
    assert {'curl'} < {c['name'] for c in launched.calls} or script == 'kubernetes'
    assert not [c for c in launched.calls if any(token in a for a in c['argv'])]
    assert token not in launched.output
    logs = [p.read_text() for p in (tmp_path / 'a run').rglob('*.log')]
    assert len(logs) == (0 if script == 'kubernetes' else 2) and not any(token in text for text in logs)
    written = [p for p in tmp_path.rglob('*') if p.is_file() and p.suffix != '.json' and token in p.read_text(errors='replace')]
    assert written == []


def test_nothing_is_left_running(done):
    assert all_ended(done[3])


@pytest.mark.parametrize('script', SCRIPTS)
def test_a_token_of_ones_own_is_used(script, tmp_path):
    launched = launch(script, tmp_path, BAPO_ROLLOUT_TOKEN='a token, "mine"')
    assert launched.status == 0, launched.output
    assert {c.env[TOKEN] for c in [*launched.trainers, *launched.servers]} == {'a token, "mine"'}


@pytest.mark.parametrize('script', SCRIPTS)
def test_trainer_commands_can_be_started_here(script, tmp_path):
    commands = trainer_commands(script, tmp_path, *plain_args(tmp_path), COORDINATOR_PORT='12345')
    assert len(commands) == (1 if script == 'one_machine' else 2)
    for command in commands:
        assert Path(command.argv[0]).exists() and command.argv[1:3] == ['-m', 'bapo_jax.train']
        assert flag(command, 'coordinator') == (None if script == 'one_machine' else '127.0.0.1:12345')
        assert command.env[TOKEN] and not any('stubs' in v for k, v in command.env.items() if k == 'PATH')


# ---- what is missing is named before anything starts

MISSING = [
    ('one_machine', 'MODEL'), ('one_machine', 'SERVER_GPUS'), ('one_machine', 'TRAINER_GPUS'), ('slurm', 'MODEL'),
    ('slurm', 'SLURM_JOB_NODELIST'),
    ('kubernetes', 'NAME'), ('kubernetes', 'IMAGE'), ('kubernetes', 'CLAIM'), ('kubernetes', 'MODEL'),
    ('tpu_pod', 'TPU'), ('tpu_pod', 'ZONE'), ('tpu_pod', 'SERVERS'), ('tpu_pod', 'REPO'), ('tpu_pod', 'MODEL'),
]  # fmt: skip


def refused(script, tmp_path, *args, **env) -> str:
    launched = launch(script, tmp_path, *args, **env)
    assert launched.status not in (0, None)
    assert not [c for c in launched.calls if c['name'] != 'scontrol'], 'something was started'
    return launched.output


@pytest.mark.parametrize('script, variable', MISSING)
def test_a_missing_variable_is_named_with_what_to_set(script, variable, tmp_path):
    remedy = 'sbatch' if variable == 'SLURM_JOB_NODELIST' else 'set it to'
    assert re.search(rf'\b{variable}: .*{remedy}', refused(script, tmp_path, **{variable: None}))


@pytest.mark.parametrize('script', SCRIPTS)
def test_config_and_workdir_must_be_given(script, tmp_path):
    config, workdir = plain_args(tmp_path)
    assert 'give --workdir=DIR after --' in refused(script, tmp_path, config)
    assert 'give --config=FILE after --' in refused(script, tmp_path, workdir)


@pytest.mark.parametrize('script', ['one_machine', 'slurm'])  # the others' trainers read files that are not here
def test_a_config_that_is_not_there_is_refused_before_servers_load(script, tmp_path):
    _, workdir = plain_args(tmp_path)
    for config, file in (('configs/nope.py', 'configs/nope.py'), ('nope:grpo', 'configs/nope.py'), ('/a/b.py:grpo', '/a/b.py')):
        assert f'error: --config={config}: there is no file {file} in ' in refused(script, tmp_path, f'--config={config}', workdir)
    assert launch(script, tmp_path, '--config=math:grpo', workdir).status == 0


@pytest.mark.parametrize(
    'script, env, message',
    [
        ('one_machine', {'PYTHON': '/nowhere/python'}, 'error: PYTHON=/nowhere/python is not executable; run make env'),
        ('one_machine', {'MODEL': '/nowhere'}, 'error: MODEL=/nowhere has no config.json'),
        ('one_machine', {'PORT': '65534', 'SERVER_GPUS': '1 2 3'}, 'error: PORT=65534: give a whole number from 1 to 65533 for 3 servers'),
        ('slurm', {'SLURM_SUBMIT_DIR': '/'}, 'error: / is not the repository; submit this script from the repository'),
        ('slurm', {'MODEL': '/nowhere'}, 'error: MODEL=/nowhere has no config.json'),
        ('slurm', {'SERVER_NODES': '4'}, 'error: 4 nodes with SERVER_NODES=4 leave no node for a trainer'),
        ('kubernetes', {'NAME': 'My run'}, 'error: NAME=My run: use a-z, 0-9 and -'),
        ('slurm', {'PORT': '65535', 'SERVER_GPUS': '0,1 2,3'}, 'error: PORT=65535: give a whole number from 1 to 65534 for 2 servers'),
        ('kubernetes', {'MOUNT': '/data'}, 'is not below MOUNT=/data'),
        ('tpu_pod', {'SERVERS': 'gpu-a gpu-b gpu-a'}, 'error: SERVERS names gpu-a twice; name each instance only once'),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(script, env, message, tmp_path):
    assert message in refused(script, tmp_path, **env)


NUMBERS = {  # the variables of each script that are one, and the least it may be
    'one_machine': {'PORT': 1, 'SERVER_DEADLINE': 1},
    'slurm': {'SERVER_NODES': 1, 'PORT': 1, 'COORDINATOR_PORT': 1, 'SERVER_DEADLINE': 1},
    'kubernetes': {
        'TRAINERS': 1, 'SERVERS': 1, 'GPUS_PER_TRAINER': 0, 'GPUS_PER_SERVER': 0, 'RESTARTS': 0, 'PORT': 1, 'COORDINATOR_PORT': 1,
        'SERVER_DEADLINE': 1,
    },
    'tpu_pod': {'PORT': 1, 'COORDINATOR_PORT': 1, 'SERVER_DEADLINE': 1},
}  # fmt: skip


@pytest.mark.parametrize('script, variable', [(script, variable) for script, of in NUMBERS.items() for variable in of])
def test_what_is_no_number_or_out_of_bounds_is_refused(script, variable, tmp_path):
    least = NUMBERS[script][variable]
    for value in ('x', '70000' if 'PORT' in variable else '0' if least else '9999999999'):
        said = refused(script, tmp_path, **{variable: value})
        assert said.startswith(f'error: {variable}={value}: give a whole number from {least} to ') and said.count('\n') == 1


def test_a_number_is_digits_within_its_bounds():
    """What bash would take for octal, an expression or another variable is none."""
    check = f'set -u; . {ROOT}/launch/checks.sh; for N in $1; do (check_whole N 8 90) 2>/dev/null && echo "$N"; done'
    said = subprocess.run(['bash', '-c', check, 'check', '8 90 7 91 08 010 0x9 1x 9+1 -9 N 8.0 99999999999999999999'], capture_output=True, text=True)
    assert said.stdout.split() == ['8', '90'], said.stderr


@pytest.mark.parametrize('script', SCRIPTS)
def test_a_platform_that_is_none_is_refused(script, tmp_path):
    assert refused(script, tmp_path, PLATFORM='cuda') == 'error: PLATFORM=cuda: choose one of cpu gpu tpu\n'


TWICE, NONE = 'is named twice; give each GPU to only one server, or to the trainer', 'is not a list of GPUs; give their numbers, with commas'


@pytest.mark.parametrize(('script', 'servers', 'trainer', 'message'), [
    ('one_machine', '4 5,6', '0,6', f'TRAINER_GPUS=0,6: GPU 6 {TWICE}'),
    ('one_machine', '0 0', '6,7', f'SERVER_GPUS=0 0: GPU 0 {TWICE}'),
    ('one_machine', '0 1,2,1', '6,7', f'SERVER_GPUS=0 1,2,1: GPU 1 {TWICE}'),
    ('one_machine', 'GPU-a1', '0,GPU-a1', f'TRAINER_GPUS=0,GPU-a1: GPU GPU-a1 {TWICE}'),
    ('one_machine', '0', '6,6', f'TRAINER_GPUS=6,6: GPU 6 {TWICE}'),
    ('one_machine', '1', '0, 1', f"TRAINER_GPUS=0, 1: '0, 1' {NONE}"),
    ('one_machine', '4;5', '0', f"SERVER_GPUS=4;5: '4;5' {NONE}"),
    ('one_machine', '4 5, 6', '0', f"SERVER_GPUS=4 5, 6: '5,' {NONE}"),
    ('one_machine', '01', '1', f"SERVER_GPUS=01: '01' {NONE}"),
    ('one_machine', 'all', '0', f"SERVER_GPUS=all: 'all' {NONE}"),
    ('one_machine', ' ', '0', f"SERVER_GPUS= : '' {NONE}"),
    ('slurm', '0,1 1,2', None, f'SERVER_GPUS=0,1 1,2: GPU 1 {TWICE}'),
    ('slurm', '0 all', None, f"SERVER_GPUS=0 all: 'all' {NONE}"),
    ('tpu_pod', '0,1 2', None, f"SERVER_GPUS=0,1 2: '0,1 2' {NONE}"),
])  # fmt: skip
def test_a_gpu_that_two_want_or_that_is_none_is_refused(script, servers, trainer, message, tmp_path):
    said = refused(script, tmp_path, SERVER_GPUS=servers, **({'TRAINER_GPUS': trainer} if trainer else {}))
    assert said.startswith(f'error: {message}') and said.count('\n') == 1


def test_who_waits_for_servers_wants_a_number_of_seconds():
    words = [ROOT / 'launch' / 'wait_for_servers.sh', 'x', 'http://127.0.0.1:1']
    done = subprocess.run(words, env=os.environ | {TOKEN: 'a token'}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, 'error: SERVER_DEADLINE=x: give a whole number from 1 to 999999999\n')


# ---- servers that do not come up, signals, statuses


@pytest.mark.parametrize('script', STARTING)
def test_a_server_that_never_answers_ends_the_start(script, tmp_path):
    launched = launch(script, tmp_path, STUB_SERVERS='are silent', SERVER_DEADLINE='3')
    assert launched.status != 0 and launched.trainers == []
    assert re.search(r'error: no answer from http://127\.0\.0\.\d+:\d+ in 3 s; see its log', launched.output)
    wait_until(lambda: all_ended(tmp_path))
    assert len(launched.servers) == 2


@pytest.mark.parametrize('script', ['one_machine', 'slurm'])
def test_a_server_that_ends_ends_the_start_at_once(script, tmp_path):
    launched = launch(script, tmp_path, STUB_SERVERS='die', SERVER_DEADLINE='100')
    assert launched.status != 0 and launched.trainers == []
    assert re.search(r'error: a server ended before http://127\.0\.0\.\d+:\d+ answered; see its log', launched.output)
    wait_until(lambda: all_ended(tmp_path))


@pytest.mark.parametrize('script', STARTING)
def test_a_server_that_refuses_the_token_is_reported_at_once(script, tmp_path):
    launched = launch(script, tmp_path, STUB_SERVERS='refuse', SERVER_DEADLINE='100')
    assert launched.status != 0 and launched.trainers == []
    assert 'refuses this BAPO_ROLLOUT_TOKEN' in launched.output
    wait_until(lambda: all_ended(tmp_path))


@pytest.mark.parametrize('script', STARTING)
def test_the_exit_status_is_the_trainers(script, tmp_path):
    assert launch(script, tmp_path, STUB_STATUS='5').status == 5
    wait_until(lambda: all_ended(tmp_path))


@pytest.mark.parametrize(('status', 'requeue', 'again'), [('75', '1', True), ('75', '0', False), ('1', '1', False)])
def test_slurm_queues_a_run_again_that_a_signal_stopped(status, requeue, again, tmp_path):
    assert launch('slurm', tmp_path, STUB_STATUS=status, REQUEUE=requeue, SLURM_JOB_ID='12').status == int(status)
    said = [c['argv'] for c in recorded(tmp_path) if c['name'] == 'scontrol']
    assert (['requeue', '12'] in said) == again


@pytest.mark.parametrize('script, number', [
    *((script, number) for script in STARTING for number in (signal.SIGTERM, signal.SIGINT)), ('one_machine', signal.SIGHUP),
])  # fmt: skip
def test_a_signal_goes_to_the_trainers_and_the_servers_outlive_them(script, number, tmp_path):
    process = start(script, tmp_path, *plain_args(tmp_path), STUB_TRAINER='waits')
    hosts = 1 if script == 'one_machine' else 2
    wait_until(lambda: len(pythons(tmp_path, 'bapo_jax.train', after='start')) == hosts)
    servers = pythons(tmp_path, 'bapo_jax.rollout.serve')
    assert len(servers) == 2 and all(alive(s['pid']) for s in servers)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as Ctrl-C
    else:
        process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 7, output  # what the trainer ends with after SIGTERM
    ended = pythons(tmp_path, 'bapo_jax.train', after='SIGTERM')
    assert [t['servers_there'] for t in ended] == [[True, True]] * hosts
    wait_until(lambda: all_ended(tmp_path))


@pytest.mark.parametrize('script', STARTING)
def test_a_signal_while_servers_start_ends_them(script, tmp_path):
    process = start(script, tmp_path, *plain_args(tmp_path), STUB_SERVERS='are silent', SERVER_DEADLINE='300')
    wait_until(lambda: len(pythons(tmp_path, 'bapo_jax.rollout.serve')) == 2)
    if script == 'tpu_pod':  # the hosts are waiting by then
        wait_until(lambda: [c for c in recorded(tmp_path) if c['name'] == 'curl' and c['argv'][-1].endswith('/health')])
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    wait_until(lambda: all_ended(tmp_path))
    assert pythons(tmp_path, 'bapo_jax.train') == []


# ---- the commands of the page and of the scripts' heads, word for word but for the paths

WANTED = {  # trainers, machines of servers, and the GPUs of each server
    'one_machine': (1, 1, ['4', '5', '6,7']),
    'slurm': (4, 2, ['0,1,2,3', '4,5,6,7'] * 2),
    'kubernetes': (4, 2, ['0', '0']),
    'tpu_pod': (2, 2, ['all', 'all']),
}
DEVICES = {'one_machine': 4, 'slurm': 4 * 8, 'kubernetes': 4 * 8, 'tpu_pod': 16}  # of the trainers; a v4-32 has 16 chips
OF_HEADS = WANTED | {'slurm': (4, 2, list('01234567') * 2)}


def documented(text: str, script: str) -> tuple[dict[str, str], list[str]]:
    """Environment and trainer's arguments of the command in `text` that starts `script`."""
    [command] = re.findall(rf'^(?:#  |   ) ((?:\w+=.*\n.*){{0,2}}launch/{script}\.sh -- --config(?:.*\\\n)*.*)$', text, re.MULTILINE)
    return words_of(command, script)


def words_of(command: str, script: str) -> tuple[dict[str, str], list[str]]:
    words = shlex.split(re.sub(r'\\\n#? *', ' ', command))
    at = words.index(f'launch/{script}.sh')
    return dict(word.split('=', 1) for word in words[:at] if re.match(r'\w+=', word)), words[at + 2 :]


def check_started(script, tmp_path, env, args, wanted):
    """The command starts so many trainers with its arguments, and servers on these GPUs; paths alone are of this machine."""
    here = {'MODEL': str(BASE), 'REPO': str(ROOT)}
    env = {name: here.get(name, value) for name, value in env.items()} | ({'MOUNT': '/shared'} if script == 'kubernetes' else {})
    if script != 'kubernetes':  # it makes nothing here
        args = [re.sub(r'--workdir=.*', f'--workdir={tmp_path}/run', arg) for arg in args]
    trainers, machines, gpus = wanted
    ports = {'PORT': str(free_ports(len(gpus) // machines))}
    done = launch(script, tmp_path, *args, hosts=trainers, servers=machines, **ports, **env)
    assert done.status == 0, done.output
    assert len(done.trainers) == trainers and all(c.argv[2 : 2 + len(args)] == args for c in done.trainers)
    assert [flag(c, 'gpus') for c in done.servers] == gpus


@pytest.mark.parametrize('script', SCRIPTS)
@pytest.mark.parametrize('place, wanted', [('docs/many_hosts.md', WANTED), ('launch/{}.sh', OF_HEADS)], ids=['page', 'head'])
def test_the_command_of_the_page_or_the_head_starts_what_it_says(place, wanted, script, tmp_path):
    env, args = documented((ROOT / place.format(script)).read_text('utf-8'), script)
    check_started(script, tmp_path, env, args, wanted[script])
    rows = dict(arg.split('=', 1) for arg in args).get('--config.learner.micro_batch_rows', default_config().learner.micro_batch_rows)
    assert int(rows) % DEVICES[script] == 0  # else the trainers would end once the servers have loaded


def test_what_the_cloud_and_the_container_run_starts_what_it_says(tmp_path):
    task = yaml.safe_load((ROOT / 'launch' / 'skypilot.yaml').read_text('utf-8'))
    inner = task['run'].split('\n', 2)[2].replace('launch/copy_runs.sh "$WORKDIR" "/bucket/$WORKDIR" \\\n', '')  # test_copy_runs.py
    env, args = words_of(re.sub(r'\$(\w+)', lambda name: task['envs'][name[1]], inner.strip()), 'one_machine')
    assert args == ['--config=configs/math.py', '--workdir=runs/math']
    (tmp_path / 'cloud').mkdir()
    (tmp_path / 'container').mkdir()
    check_started('one_machine', tmp_path / 'cloud', env, args, (1, 1, ['4', '5', '6', '7']))
    head = (ROOT / 'launch' / 'Dockerfile.cluster').read_text('utf-8')
    [command] = re.findall(r'docker run (?:.*\\\n)*.*', head)
    env, args = words_of(command, 'one_machine')
    check_started('one_machine', tmp_path / 'container', env, args, WANTED['one_machine'])


# ---- one target each


def test_each_process_of_one_machine_has_its_gpus(tmp_path):
    launched = launch('one_machine', tmp_path, SERVER_GPUS='4 5,6', TRAINER_GPUS='0,1')
    assert [flag(c, 'gpus') for c in launched.servers] == ['4', '5,6']  # serve shows them, and splits the model over them
    assert launched.trainers[0].env['CUDA_VISIBLE_DEVICES'] == '0,1'
    assert {flag(c, 'host') for c in launched.servers} == {'127.0.0.1'}


def test_slurm_starts_a_server_for_each_word_on_each_server_node(tmp_path):
    launched = launch('slurm', tmp_path, servers=2, SERVER_GPUS='0,1 2,3')
    assert launched.status == 0, launched.output
    first = int(flag(launched.servers[0], 'port'))
    assert [(flag(c, 'host'), int(flag(c, 'port')) - first, flag(c, 'gpus')) for c in launched.servers] == [
        ('127.0.0.101', 0, '0,1'), ('127.0.0.101', 1, '2,3'), ('127.0.0.102', 0, '0,1'), ('127.0.0.102', 1, '2,3'),
    ]  # fmt: skip
    assert len(ast.literal_eval(flag(launched.trainers[0], 'config.rollout.servers'))) == 4


@pytest.mark.parametrize(('script', 'env', 'gpus', 'platform'), [
    ('slurm', {}, 'all', 'gpu'),  # of the node, which has them all for one server
    ('kubernetes', {'GPUS_PER_SERVER': '2'}, '0,1', 'gpu'), ('kubernetes', {'GPUS_PER_SERVER': '0'}, None, 'gpu'),
    ('tpu_pod', {}, 'all', 'tpu'), ('tpu_pod', {'SERVER_GPUS': '0,1'}, '0,1', 'tpu'),
])  # fmt: skip
def test_a_server_is_told_its_gpus_and_a_trainer_what_it_must_compute_on(script, env, gpus, platform, tmp_path):
    launched = launch(script, tmp_path, PLATFORM=None, **env)
    assert launched.status == 0, launched.output
    assert {flag(c, 'gpus') for c in launched.servers} == {gpus}
    assert {flag(c, 'config.mesh.platform') for c in launched.trainers} == {platform}


def test_a_host_of_slurm_uses_all_its_gpus(tmp_path):
    """With SLURM_LOCALID in its environment, JAX would show each process the one GPU of that number."""
    from jax._src.clusters import ClusterEnv

    launched = launch('slurm', tmp_path)
    kept = {k: v for k, v in launched.trainers[0].env.items() if k.startswith('SLURM')}
    slurm = next(c for c in ClusterEnv._cluster_types if c.name == 'slurm')
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (kept | {'SLURM_JOB_ID': '1', 'SLURM_STEP_NODELIST': 'a', 'SLURM_NTASKS': '2'}).items():
            patch.setenv(name, value)
        assert not slurm.is_env_present()
        patch.setenv('SLURM_LOCALID', '0')
        assert slurm.is_env_present()


@pytest.fixture(scope='module')
def jobset(tmp_path_factory):
    """A JobSet of four trainers and three servers: the launch, the manifest, and the folder that its pods mount."""
    tmp_path = tmp_path_factory.mktemp('jobset')
    launched = launch('kubernetes', tmp_path, hosts=4, servers=3, GPUS_PER_TRAINER='2', RESTARTS='5', REPO='/repo', PYTHON=None)
    assert launched.status == 0, launched.output
    text = applied(launched.calls)
    assert not re.search('@[A-Z_]+@', text)
    return launched, yaml.safe_load(text), tmp_path


def test_the_jobset_says_what_it_should(jobset):
    launched, jobset, tmp_path = jobset
    assert (jobset['apiVersion'], jobset['kind'], jobset['metadata']['name']) == ('jobset.x-k8s.io/v1alpha2', 'JobSet', 'math')
    spec = jobset['spec']
    assert spec['network'] == {'enableDNSHostnames': True, 'subdomain': 'math'}
    assert spec['successPolicy'] == {'operator': 'All', 'targetReplicatedJobs': ['trainer']}
    jobs = {j['name']: j['template']['spec'] for j in spec['replicatedJobs']}
    assert {j['replicas'] for j in spec['replicatedJobs']} == {1}
    assert {name: (j['completionMode'], j['completions'], j['parallelism']) for name, j in jobs.items()} == {
        'trainer': ('Indexed', 4, 4), 'server': ('Indexed', 3, 3),
    }  # fmt: skip
    trainer, server = (jobs[name]['template']['spec'] for name in ('trainer', 'server'))
    for pod in (trainer, server):
        assert {'name': 'shared', 'persistentVolumeClaim': {'claimName': 'disk'}} in pod['volumes']
        assert {'name': 'shared', 'mountPath': str(tmp_path)} in pod['containers'][0]['volumeMounts']
        # NCCL and vLLM's workers share memory, of which a pod has 64 MB unless it asks for more.
        assert {'name': 'shm', 'emptyDir': {'medium': 'Memory'}} in pod['volumes']
        assert {'name': 'shm', 'mountPath': '/dev/shm'} in pod['containers'][0]['volumeMounts']
        assert pod['containers'][0]['image'] == 'registry/bapo:1' and pod['containers'][0]['workingDir'] == '/repo'
        assert pod['containers'][0]['command'][0] == '/repo/.venv/bin/python'
        token = next(v for v in pod['containers'][0]['env'] if v['name'] == TOKEN)
        assert token['valueFrom'] == {'secretKeyRef': {'name': 'math-token', 'key': 'token'}}
    assert [pod['containers'][0]['resources']['limits'] for pod in (trainer, server)] == [{'nvidia.com/gpu': 2}, {'nvidia.com/gpu': 1}]
    wait = trainer['initContainers'][0]
    assert wait['command'][0] == '/repo/launch/wait_for_servers.sh' and wait['env'] == trainer['containers'][0]['env']
    assert tuple(wait['command'][2:]) == ast.literal_eval(flag(launched.trainers[0], 'config.rollout.servers'))
    assert [flag(c, 'host') for c in launched.trainers] == ['0', '1', '2', '3']


def fields(required: str, **properties) -> dict:
    """The schema of an object that has these fields and no others."""
    return {'type': 'object', 'required': required.split(), 'additionalProperties': False, 'properties': properties}


TEXT, NUMBER, FLAG = {'type': 'string', 'minLength': 1}, {'type': 'integer', 'minimum': 0}, {'type': 'boolean'}
JOBS = {'type': 'array', 'minItems': 1, 'items': {'enum': ['trainer', 'server']}}
# The fields of a JobSet that the manifest has, by jobset_types.go of kubernetes-sigs/jobset, v1alpha2. Kubernetes' own schema knows the rest.
JOBSET = fields(
    'apiVersion kind metadata spec',
    apiVersion={'const': 'jobset.x-k8s.io/v1alpha2'},
    kind={'const': 'JobSet'},
    metadata=fields('name', name=TEXT),
    spec=fields(
        'replicatedJobs',
        network=fields('', enableDNSHostnames=FLAG, subdomain=TEXT, publishNotReadyAddresses=FLAG),
        successPolicy=fields('operator', operator={'enum': ['All', 'Any']}, targetReplicatedJobs=JOBS),
        failurePolicy=fields(
            '',
            maxRestarts=NUMBER,
            rules={'type': 'array', 'items': fields(
                'name action', name=TEXT, targetReplicatedJobs=JOBS,
                action={'enum': ['FailJobSet', 'RestartJobSet', 'RestartJobSetAndIgnoreMaxRestarts']},
                onJobFailureReasons={'type': 'array', 'items': {'enum': [
                    'BackoffLimitExceeded', 'DeadlineExceeded', 'FailedIndexes', 'MaxFailedIndexesExceeded', 'PodFailurePolicy',
                ]}},
            )},
        ),
        replicatedJobs={'type': 'array', 'items': fields('name template', name=TEXT, replicas=NUMBER, template={'type': 'object'})},
    ),
)  # fmt: skip


def test_jobset_knows_every_field_of_the_manifest(jobset):
    jsonschema.validate(jobset[1], JOBSET)
    for path, wrong in ((('spec', 'network'), 'enableDnsHostnames'), (('spec', 'failurePolicy', 'rules', 0), 'onJobFailureReason')):
        manifest = copy.deepcopy(jobset[1])
        functools.reduce(operator.getitem, path, manifest)[wrong] = True
        with pytest.raises(jsonschema.ValidationError, match=wrong):
            jsonschema.validate(manifest, JOBSET)


@pytest.mark.parametrize('version', ['1.29', '1.37'])
def test_kubernetes_knows_every_field_of_the_jobs(jobset, version):
    """The oldest version that the page names, and the newest. Kubernetes itself checks more than its schema says."""
    for job in jobset[1]['spec']['replicatedJobs']:
        one = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': job['name']}, **job['template']}
        assert kubernetes_validate.validate(one, version, strict=True) == version
        one['spec']['completionsMode'] = one['spec'].pop('completionMode')
        with pytest.raises(kubernetes_validate.ValidationError, match='completionsMode'):
            kubernetes_validate.validate(one, version, strict=True)
        one['spec']['completionMode'] = one['spec'].pop('completionsMode')


def test_a_trainer_that_was_told_to_stop_does_not_count_as_a_failure(jobset):
    spec = jobset[1]['spec']
    jobs = {j['name']: j['template']['spec'] for j in spec['replicatedJobs']}
    trainer = jobs['trainer']
    # Kubernetes marks the job with this reason where one of these rules fails it, and JobSet looks for the reason.
    assert spec['failurePolicy'] == {
        'maxRestarts': 5,
        'rules': [{
            'name': 'preempted', 'action': 'RestartJobSetAndIgnoreMaxRestarts', 'targetReplicatedJobs': ['trainer'],
            'onJobFailureReasons': ['PodFailurePolicy'],
        }],
    }  # fmt: skip
    assert trainer['podFailurePolicy'] == {'rules': [
        {'action': 'FailJob', 'onExitCodes': {'containerName': 'trainer', 'operator': 'In', 'values': [STATUS]}},
        {'action': 'FailJob', 'onPodConditions': [{'type': 'DisruptionTarget', 'status': 'True'}]},
    ]}  # fmt: skip
    assert [c['name'] for c in trainer['template']['spec']['containers']] == ['trainer']
    assert trainer['backoffLimit'] == 0 and trainer['template']['spec']['restartPolicy'] == 'Never'  # else it is not allowed
    assert 'podFailurePolicy' not in jobs['server']


def test_pods_keep_what_they_compile_and_download_on_the_claim(jobset):
    _, manifest, mount = jobset
    jobs = {j['name']: j['template']['spec']['template']['spec'] for j in manifest['spec']['replicatedJobs']}
    caches = {
        name: {v['name']: v['value'] for v in pod['containers'][0]['env'] if 'value' in v} for name, pod in jobs.items()
    }
    both = {'XDG_CACHE_HOME': f'{mount}/cache', 'TRITON_CACHE_DIR': f'{mount}/cache/triton'}
    assert caches == {'trainer': both | {'JAX_COMPILATION_CACHE_DIR': f'{mount}/cache/bapo_jax'}, 'server': both}
    read = 'from huggingface_hub import constants; print(constants.HF_HOME)'
    said = subprocess.run(
        [sys.executable, '-c', read], env={'PATH': os.environ['PATH'], 'HOME': '/nowhere', **both}, capture_output=True, text=True,
    )  # fmt: skip
    assert said.stdout.strip() == f'{mount}/cache/huggingface', said.stderr


def test_the_secret_comes_before_the_jobset_and_one_that_is_there_stays(tmp_path):
    calls = [c['argv'][:2] for c in launch('kubernetes', tmp_path).calls if c['name'] == 'kubectl']
    assert calls == [['get', 'secret'], ['create', 'secret'], ['apply', '-f']]
    shutil.rmtree(tmp_path / 'records')
    process = start('kubernetes', tmp_path, *plain_args(tmp_path), STUB_SECRET_EXISTS='1')
    assert process.wait(60) == 0
    assert [c['argv'][:2] for c in recorded(tmp_path) if c['name'] == 'kubectl'] == [['get', 'secret'], ['apply', '-f']]


def test_the_servers_of_a_tpu_pod_end_when_the_script_is_killed(tmp_path):
    process = start('tpu_pod', tmp_path, *plain_args(tmp_path), STUB_TRAINER='waits')
    waiting = wait_until(lambda: pythons(tmp_path, 'bapo_jax.train', after='start'))
    process.kill()
    process.wait()
    try:
        wait_until(lambda: not any(alive(s['pid']) for s in pythons(tmp_path, 'bapo_jax.rollout.serve')))
    finally:
        wait_until(lambda: len(pythons(tmp_path, 'bapo_jax.train', after='start')) == 2)
        for trainer in pythons(tmp_path, 'bapo_jax.train', after='start'):
            os.kill(trainer['pid'], signal.SIGTERM)
    assert waiting
    process.communicate(timeout=60)


@pytest.mark.parametrize('script', sorted((ROOT / 'launch').glob('*.sh')), ids=lambda p: p.name)
def test_bash_can_read_it(script):
    subprocess.run(['bash', '-n', script], check=True)
    assert os.access(script, os.X_OK)
    assert 'set -euo pipefail' in script.read_text()
