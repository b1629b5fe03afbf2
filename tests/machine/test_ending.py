"""What a run says that cannot go on: the message, the remedy, and status 1."""

import errno
import os

import pytest

from bapo_jax.cluster.hosts import HostError
from bapo_jax.machine.ending import explained, refused
from bapo_jax.rollout.engine import RolloutError
from bapo_jax.run.checkpoint import DamagedCheckpoint


@pytest.mark.parametrize(
    'error, says',
    [
        (OSError(errno.ENOSPC, 'No space left'), r'error: .*No space left\nMake room, or mount the disk for writing; then the same command'),
        (RolloutError('no server answers'), r'error: no server answers\nThe same command continues from the last checkpoint\.$'),
        (DamagedCheckpoint('checkpoints/4 is damaged'), r'error: checkpoints/4 is damaged$'),
    ],
)
def test_an_error_that_is_none_of_the_program_is_told_with_its_remedy(error, says, tmp_path):
    with pytest.raises(SystemExit, match=says), explained(tmp_path):
        raise error


def test_a_run_directory_that_is_gone_is_told_whatever_failed_there(tmp_path):
    gone = tmp_path / 'run'
    with pytest.raises(SystemExit, match=rf'error: the run directory {gone} is gone \(.*\); restore it, then run the same command'):
        with explained(gone):
            (gone / 'metrics.jsonl').open('a')


def test_an_error_of_the_program_keeps_its_traceback(tmp_path):
    for error in (ZeroDivisionError(), OSError(errno.EBADF, os.strerror(errno.EBADF))):
        with pytest.raises(type(error)), explained(tmp_path):
            raise error


def test_what_is_wrong_before_work_is_one_message():
    with pytest.raises(SystemExit, match='^error: rollout.rows=0 must be positive$'), refused():
        raise ValueError('rollout.rows=0 must be positive')


def test_what_ends_all_hosts_and_a_full_disk_are_no_refusals(tmp_path):
    for error in (HostError('host 1 differs'), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        with pytest.raises(type(error)), refused():
            raise error
    with pytest.raises(SystemExit, match='error: the server ended$'), refused():
        raise RolloutError('the server ended')
