"""Runs a module like `python -m`, but without a network: `python without_network.py MODULE [ARGUMENT ...]`.

The process gets a network namespace of its own. The module's imports start threads, and a process with
threads may not leave its user namespace, so this runs before them. A kernel may refuse it, as in many
containers. The module then runs in the machine's network; `serve` detects that and reports it.
"""

import ctypes
import runpy
import sys

NEW_USER, NEW_NETWORK = 0x1000_0000, 0x4000_0000  # CLONE_NEWUSER and CLONE_NEWNET of linux/sched.h

if __name__ == '__main__':
    ctypes.CDLL(None).unshare(NEW_USER | NEW_NETWORK)
    del sys.argv[0], sys.path[0]  # this file's name and folder
    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
