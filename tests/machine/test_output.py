"""What is printed neither blocks nor ends a process, whatever became of its reader."""

import os
import subprocess
import sys

import pytest
from small_run import ROOT

from bapo_jax.machine.output import MOST_KEPT, Output


@pytest.fixture
def pipe():
    """The reading end of a pipe, and an Output on its writing end, as `guard` makes it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    yield reading, Output(writing, 'utf-8')
    os.close(writing)


def run_guarded(code, **streams):
    """A process that has guarded its output and runs `code`."""
    program = f'import os, sys\nfrom bapo_jax.machine import output\noutput.guard_streams()\n{code}'
    return subprocess.Popen([sys.executable, '-c', program], cwd=ROOT, **streams)


def dead():
    """The writing end of a pipe that nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def full():
    """Both ends of a pipe that takes no more."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writing, b'x' * 4096)
    os.set_blocking(writing, True)
    return reading, writing


def test_a_reader_that_stops_and_goes_on_misses_nothing(pipe):
    reading, output = pipe
    lines = [f'line {i} π\n' for i in range(20_000)]  # more than a pipe holds
    for line in lines:
        output.write(line)
    got = b''
    while len(got) < len(''.join(lines).encode()):
        got += os.read(reading, 65_536)
        output.flush()
    os.close(reading)
    assert got.decode() == ''.join(lines)


def test_of_what_nobody_reads_no_more_is_kept_than_said(pipe):
    reading, output = pipe
    for _ in range(40):
        output.write('x' * (MOST_KEPT // 10) + '\n')
    assert MOST_KEPT <= len(output._kept) <= 1.2 * MOST_KEPT
    os.close(reading)
    output.write('the reader is gone\n')
    assert not output._kept


def test_a_line_goes_out_at_once_and_half_a_line_with_a_flush(pipe):
    reading, output = pipe
    output.write('a line\nhalf')
    assert os.read(reading, 99) == b'a line\nhalf'
    output.write(' of the next')
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):
        os.read(reading, 99)
    output.flush()
    assert os.read(reading, 99) == b' of the next'
    os.close(reading)


def test_a_full_disk_and_letters_that_the_terminal_lacks_raise_nothing(pipe):
    reading, _ = pipe
    with open('/dev/full', 'wb') as disk:
        Output(disk.fileno(), 'utf-8').write('lost\n')
    Output(pipe[1].fileno(), 'ascii').write('π\n')
    assert os.read(reading, 99) == b'\\u03c0\n'
    os.close(reading)


@pytest.mark.slow
@pytest.mark.parametrize('stream', ['stdout', 'stderr'])
@pytest.mark.parametrize('broken', [dead, lambda: full()[1], lambda: os.open('/dev/full', os.O_WRONLY)], ids=['dead', 'full', 'disk'])
def test_the_status_is_that_of_the_work(stream, broken):
    """Python itself ends with 120 where it cannot write its last words, and waits for ever where they are not read."""
    end = broken()
    quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL, stream: end}
    code = f'print("x", file=sys.{stream}); print("y" * 10**6, file=sys.{stream}); sys.exit(7)'
    process = run_guarded(code, stdin=subprocess.DEVNULL, **quiet)
    os.close(end)
    assert process.wait(60) == 7


def test_the_end_waits_for_a_slow_reader():
    process = run_guarded('print("x" * 10**5); print("the last line")', stdout=subprocess.PIPE)
    assert process.communicate(timeout=60)[0].endswith(b'x\nthe last line\n') and process.returncode == 0


def test_libraries_that_write_to_the_descriptor_do_not_block_either_and_the_shell_notices_nothing():
    reading, writing = full()
    code = 'print(os.get_blocking(2))\ntry: os.write(2, b"from C")\nexcept BlockingIOError: print("not taken")\n'
    process = run_guarded(f'{code}output.hand_over(); print(os.get_blocking(2))', stdout=subprocess.PIPE, stderr=writing)
    assert process.communicate(timeout=60)[0].split(b'\n')[:3] == [b'False', b'not taken', b'True']
    assert os.get_blocking(writing)  # the pipe is the shell's too
    os.close(reading)
    os.close(writing)


def test_a_closed_standard_output_is_not_the_next_file_that_is_opened(tmp_path):
    code = f'file = os.open({str(tmp_path / "lock")!r}, os.O_RDWR | os.O_CREAT); print("into the lock?"); os.write(1, b"from C")'
    program = tmp_path / 'program.py'
    program.write_text(f'import os, sys\nfrom bapo_jax.machine import output\noutput.guard_streams()\n{code}\nsys.exit(file < 3)\n')
    done = subprocess.run(
        ['sh', '-c', f'exec {sys.executable} {program} >&- 2>&-'], env={**os.environ, 'PYTHONPATH': str(ROOT)}, timeout=60
    )
    assert done.returncode == 0 and (tmp_path / 'lock').read_bytes() == b''


def test_a_filter_ends_with_its_reader_and_says_where_a_disk_is_full():
    code = 'from bapo_jax.machine.output import ends_with_its_reader\nwith ends_with_its_reader(): print("a verdict")'
    for end, said in ((dead(), b''), (os.open('/dev/full', os.O_WRONLY), b'error: standard output: [Errno 28] No space left on device\n')):
        done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, stdout=end, stderr=subprocess.PIPE, timeout=60)
        os.close(end)
        assert (done.returncode, done.stderr) == (1, said)
