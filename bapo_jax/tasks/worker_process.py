"""What runs inside a worker process of a `VerifierPool`: it answers the pool's requests."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from bapo_jax.machine import output, terminal

# A worker's first line.
READY, READY_IN_NETWORK = b'ready', b'ready, in a network'


def serve(function: Callable[[Any], Any], *, quiet: bool = True) -> None:
    """Runs a worker: answers each numbered JSON request on stdin with its number and `function`'s result.

    The command line gives the wall-clock seconds per request and the address space in bytes. An exception in
    `function` ends the worker. stdout carries only the answers: prints are lost, or go to stderr if the
    worker is not `quiet`. A process that `function` forks neither receives requests nor answers them.
    """
    wall_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    requests, answers = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(1), 'wb')
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing if quiet else 2, 1)
    if not quiet:
        output.guard_streams('stdout')
        terminal.guard()
    pipes = requests.fileno(), answers.fileno()
    os.register_at_fork(after_in_child=lambda: [os.dup2(nothing, pipe, inheritable=False) for pipe in pipes])
    if memory_bytes != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    sys.setrecursionlimit(10_000)  # parsers recurse about twenty calls per bracket
    try:
        in_network = len(socket.if_nameindex()) > 1  # every network has a loopback interface
        answers.write((READY_IN_NETWORK if in_network else READY) + b'\n')
        answers.flush()
    except BrokenPipeError:  # the pool ended while this worker started
        os._exit(0)
    if quiet:
        os.dup2(nothing, 2)  # parsers print warnings about every odd answer
    for line in requests:
        # The pool kills a late worker. If the pool is gone, the alarm does: by default it ends the process.
        signal.alarm(math.ceil(wall_s) + 5)
        number, _, request = line.partition(b' ')
        outcome = function(json.loads(request))
        signal.alarm(0)
        answers.write(b'%b %b\n' % (number, json.dumps(outcome).encode()))
        answers.flush()
    sys.stdout.flush()
    os._exit(0)  # threads left by `function` would keep the process alive
