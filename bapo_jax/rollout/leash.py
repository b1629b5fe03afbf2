"""Runs a command that ends with the process that started it, however that one ends.

    python bapo_jax/rollout/leash.py FD COMMAND…

FD is the reading end of a pipe. Its only writing end is the starter's, so the pipe closes when the starter is gone, also by kill
-9. Then the whole process group ends, vLLM's engine and its workers with it. The leash leads that group, and ends as its command
does.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

LOOK_S = 0.2  # between looks at whether the command has ended by itself
GRACE_S = 10.0  # between SIGTERM and SIGKILL


def main() -> None:
    pipe, *command = sys.argv[1:]
    # The group's SIGTERM is for the command. A handler, unlike SIG_IGN, is not handed down to it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    process = subprocess.Popen(command)  # it inherits no end of the pipe
    while process.poll() is None:
        if select.select([int(pipe)], [], [], LOOK_S)[0]:  # the pipe has closed: nobody writes
            end_group(process)
    sys.exit(process.returncode if process.returncode >= 0 else 128 - process.returncode)


def end_group(process: subprocess.Popen) -> None:
    """Ends every process of this group, this one included."""
    os.killpg(0, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == '__main__':
    main()
