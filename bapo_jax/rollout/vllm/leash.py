"""Runs a command that ends when the process that started it ends, for any reason.

    python bapo_jax/rollout/vllm/leash.py FD COMMAND…

FD is the read end of a pipe. Only the starter holds the write end, so the pipe closes when the starter is
gone, even after kill -9. Then the whole process group ends, including vLLM's engine and its workers. The
leash leads that group, and exits with its command's status.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

LOOK_S = 0.2  # between checks whether the command has ended by itself
GRACE_S = 10.0  # between SIGTERM and SIGKILL


def main() -> None:
    pipe, *command = sys.argv[1:]
    # The group's SIGTERM is meant for the command. A handler, unlike SIG_IGN, is not inherited by it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    process = subprocess.Popen(command)  # does not inherit the pipe
    while process.poll() is None:
        if select.select([int(pipe)], [], [], LOOK_S)[0]:  # the pipe has closed; nobody ever writes to it
            end_group(process)
    sys.exit(process.returncode if process.returncode >= 0 else 128 - process.returncode)


def end_group(process: subprocess.Popen) -> None:
    """Ends every process of this group, including this one."""
    os.killpg(0, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == '__main__':
    main()
