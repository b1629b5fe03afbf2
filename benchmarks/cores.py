"""Runs many one-core jobs on a machine of several cores. A policy this small gains next to nothing from a second core."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any


def on_each_core(work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Yields `work(item)` as each ends, with as many under way as there are cores. A process that `work` starts has one core alone.

    After a failure no further item is begun. Its error is raised once the items under way have ended and been yielded.
    """
    cores: queue.Queue[int] = queue.Queue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)

    def pinned(item: Any) -> Any:
        core = cores.get()
        try:
            os.sched_setaffinity(0, {core})  # of this thread; the process it starts inherits it
            return work(item)
        finally:
            cores.put(core)

    error, pool = None, ThreadPoolExecutor(cores.qsize())
    asked = [pool.submit(pinned, item) for item in items]
    try:
        for done in as_completed(asked):
            if done.cancelled():
                continue
            if done.exception():
                error = error or done.exception()
                for other in asked:
                    other.cancel()
            else:
                yield done.result()
    finally:  # also where the caller stops taking results
        pool.shutdown(cancel_futures=True)
    if error:
        raise error
