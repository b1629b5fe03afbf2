"""Runs many one-core jobs on a machine of several cores. A policy this small gains next to nothing from a
second core.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from typing import Any


def on_each_core(work: Callable[[Any], Any], items: Iterable[Any], cores: int = 1) -> Iterator[Any]:
    """Yields `work(item)` as each ends, as many under way as that allows: a process that `work` starts has
    `cores` cores alone.

    After a failure no further item is begun. Its error is raised once the items under way have ended and been
    yielded.
    """
    free: queue.Queue[set[int]] = queue.Queue()
    failed = threading.Event()
    there = sorted(os.sched_getaffinity(0))
    for first in range(
        0, max(cores, len(there) - cores + 1), cores
    ):  # one set where the machine has fewer cores
        free.put(set(there[first : first + cores]))

    def pinned(item: Any) -> Any:
        if failed.is_set():
            raise CancelledError
        taken = free.get()
        try:
            os.sched_setaffinity(0, taken)  # of this thread; the process it starts inherits it
            return work(item)
        except BaseException:
            failed.set()  # here, not where results are taken: this thread would begin another item first
            raise
        finally:
            free.put(taken)

    error, pool = None, ThreadPoolExecutor(free.qsize())
    try:
        for done in as_completed([pool.submit(pinned, item) for item in items]):
            if not done.exception():
                yield done.result()
            elif not isinstance(done.exception(), CancelledError):
                error = error or done.exception()
    finally:  # also where the caller stops taking results
        pool.shutdown(cancel_futures=True)
    if error:
        raise error
