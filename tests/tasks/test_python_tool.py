"""What a policy's code may do: print, and nothing that reaches beyond its own process."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from bapo_jax.tasks import python_tool, python_worker, sandbox
from bapo_jax.tasks.mathematics import task as mathematics
from bapo_jax.tasks.python_tool import check_reply, code_in, output_of

REFUSED = 'Operation not permitted'
WHY_NOT = sandbox.why_not()


def slow(test):
    """Each starts a worker, or waits for a limit."""
    return pytest.mark.slow(pytest.mark.skipif(bool(WHY_NOT), reason=f'no sandbox here: {WHY_NOT}')(test))


@pytest.mark.parametrize('turn, code', [
    ('So:\n```python\nprint(1)\n```', 'print(1)\n'), ('```py\nx\n```  \n', 'x\n'),
    ('```python\na\n```\nthen\n```python\nb\n```', 'b\n'),
    ('1. Do:\n   ```python\n   if x:\n     y\n   ```', 'if x:\n  y\n'), ('```Python3 \nx\n```', 'x\n'),
    ('```python\ns = "```"\n```', 's = "```"\n'), ('```python\nx\n```\nand ```', None),
    ('```python\nx\n``` gives 3', None), ('```\nx\n```', None), ('```python\nx', None), ('```python x\n```', None), ('```', None), ('', None),
])  # fmt: skip
def test_a_turn_that_ends_with_a_block_of_code_calls_the_tool(turn, code):
    assert code_in(turn) == code


def test_the_filter_allows_what_it_lists_and_opens_for_reading():
    """By running the program on the calls that it may see."""

    def verdict(number, flags=0, architecture=sandbox._X86_64):
        program, at, word = sandbox._filter(), 0, None
        while True:
            code, yes, no, operand = program[at]
            at += 1
            if code == sandbox._RETURN:
                return operand
            if code == sandbox._LOAD:
                word = {sandbox._NUMBER: number, sandbox._ARCHITECTURE: architecture, sandbox._ARGUMENT_2: flags}[operand]
            else:
                at += yes if (word == operand if code == sandbox._IF_EQUAL else word & operand) else no

    allowed = {number for number in range(600) if verdict(number) == sandbox._ALLOW}
    assert allowed == {*sandbox._CALLS.values(), sandbox._OPENAT}
    assert len(set(sandbox._CALLS.values())) == len(sandbox._CALLS)
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_APPEND, os.O_RDONLY | os.O_TRUNC):
        assert (verdict(sandbox._OPENAT, flags) == sandbox._ALLOW) == (flags == 0)
    assert verdict(sandbox._OPENAT, os.O_RDONLY | os.O_CLOEXEC) == sandbox._ALLOW
    assert verdict(0, architecture=0x4000_0003) == verdict(0x4000_0000) == sandbox._EPERM  # the calls of 32 bits


@slow
@pytest.mark.parametrize('code, said', [
    ('print(6 * 7)', '42'),
    ('import sympy\nx = sympy.Symbol("x")\nprint(sympy.integrate(x**2, (x, 0, 3)))', '9'),
    ('import numpy as np, statistics, fractions\nprint(np.linalg.det(np.eye(2)), statistics.mean([1, 2]))', '1.0 1.5'),
    ('x = 3', '(no output)'), ('import sys\nprint(1)\nsys.exit(2)', '1'), ('import sys\nsys.exit("why")', 'why'),
    ('print("begun")\nimport os\nos._exit(99)', 'begun'), ('a = 1\nb = = 2', 'line 2: SyntaxError: invalid syntax'),
    ('import os\nos.close(1)\nos.close(2)\nx = 3', '(no output)'),
    ('a = 1\n\nprint(a / 0)', 'line 3: ZeroDivisionError: division by zero'), ('x = (', "SyntaxError: '(' was never closed"),
    ('print(input())', 'line 1: EOFError: EOF when reading a line'),
    ('x = [0] * 10**10', 'line 1: MemoryError'), ('a = []\nwhile True: a.append("x" * 10**6)', 'line 2: MemoryError'),
    ('def f(): f()\nf()', 'RecursionError'),
    ('import ctypes\nctypes.string_at(0)', '(stopped: it crashed)'),
    ('import socket\nsocket.socket()', REFUSED), ('import urllib.request\nurllib.request.urlopen("http://127.0.0.1:1")', REFUSED),
    ('import os\nwhile True: os.fork()', REFUSED), ('import subprocess\nsubprocess.run(["true"])', REFUSED),
    ('import threading\nthreading.Thread(target=print).start()', "can't start new thread"),
    ('import os\nos.kill(os.getppid(), 9)', REFUSED), ('import os\nos.setpriority(0, 0, 19)', REFUSED),
    ('open("here", "w")', REFUSED), ('open("../there", "a")', REFUSED), ('import os\nos.mkdir("here")', REFUSED),
    ('import os\nos.memfd_create("x")', REFUSED), ('import os\nos.open("/", os.O_TMPFILE | os.O_RDWR)', REFUSED),
    ('print(open("/etc/passwd").read())', 'Permission denied'), ('import os\nprint(os.listdir("/proc"))', 'Permission denied'),
    (f'print(open({__file__!r}).read())', 'Permission denied'),
])  # fmt: skip
def test_code_prints_and_reaches_nothing(code, said):
    assert said in output_of(code)


@slow
@pytest.mark.parametrize('code', ['while True: pass', 'import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass',
                                  'import time\ntime.sleep(60)', 'import os\nos.close(1)\nos.close(2)\nwhile True: pass'])  # fmt: skip
def test_code_that_does_not_end_is_stopped(code):
    assert output_of(f'print("begun")\n{code}') == 'begun\n(stopped: too slow)'
    assert output_of('print(1)') == '1'


@slow
def test_a_long_output_is_cut_and_ends_the_code():
    for code in ('print("y" * 10**7)', 'while True: print("y" * 100)', 'print("y\\n" * 10**6)'):
        text = output_of(code)
        assert text.startswith('y') and text.endswith('\n(the rest is cut)') and len(text) < python_worker.MOST_CHARACTERS + 50
    assert output_of('print(" " * 10**7)') == '(the rest is cut)'


@slow
@pytest.mark.parametrize('code', ['print("refused")\nos._exit(99)', 'os.close(1)\nos._exit(1)', 'os.write(1, b"+")'])
def test_no_code_can_pass_for_a_failure_of_the_machine(code):
    """That would cost its group, and end an evaluation."""
    assert 'did not run' not in output_of(f'import os\n{code}')


@slow
def test_no_file_or_secret_of_the_trainer_is_touched(tmp_path, monkeypatch):
    file = tmp_path / 'results'
    file.write_text('kept')
    monkeypatch.setenv('BAPO_VLLM_TOKEN', 'a secret')
    ways = ['os.unlink(f)', 'os.truncate(f, 0)', 'os.rename(f, f + "2")', 'os.open(f, os.O_RDONLY | os.O_TRUNC)', 'os.chmod(f, 0)', 'os.rmdir(d)']
    for way in ways:
        assert REFUSED in output_of(f'import os\nf, d = {str(file)!r}, {str(tmp_path)!r}\n{way}')
    assert file.read_text() == 'kept' and os.listdir(tmp_path) == ['results']
    assert 'secret' not in output_of('import os\nprint(os.environ)')
    assert 'Permission denied' in output_of(f'print(open("/proc/{os.getpid()}/environ").read())')


@slow
def test_a_run_knows_nothing_of_earlier_ones_and_is_always_the_same():
    """Of random numbers and of the order of sets, too, in whichever worker."""
    code = (
        'import random, secrets, uuid, numpy, sympy\nprint(random.random(), random.Random().random(), secrets.token_hex(), uuid.uuid4(), '
        'numpy.random.rand(), numpy.random.default_rng().random(), {"a", "b", "c", "d"}, getattr(sympy, "mine", 0))\nsympy.mine = 1'
    )
    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(output_of, [code] * 8))) == 1


@slow
def test_the_tool_replies_with_a_block_and_a_failure_of_the_machine_is_none_of_the_codes(monkeypatch):
    check_reply()
    assert mathematics.reply({}, 'Let me see.\n```python\nprint(2**10)\n```') == '```output\n1024\n```'
    assert mathematics.reply({}, 'It is 1024.') is None
    monkeypatch.setattr(python_tool.VerifierPool, 'run', lambda *_: ['failed'])
    with pytest.raises(RuntimeError, match='the Python tool did not run: its process failed'):
        output_of('print(1)')


def test_a_machine_that_cannot_confine_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox.platform, 'machine', lambda: 'riscv64')
    with pytest.raises(ValueError, match=r'task\.turns needs a sandbox.*linux on riscv64, not Linux on x86-64; set task\.turns=0'):
        check_reply.__wrapped__()
    assert socket.socket().close() is None  # nothing was confined here
