"""Jobs of a core each, or of several: as many under way as the cores allow, and none begun after a failure."""

import os
import threading

import pytest

from benchmarks.cores import on_each_core

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize('cores', sorted({1, CORES}))
def test_every_item_is_worked_on_by_a_thread_with_its_cores(cores):
    seen = set()

    def work(item):
        seen.add(tuple(os.sched_getaffinity(0)))
        return 2 * item

    assert sorted(on_each_core(work, range(20), cores)) == [2 * i for i in range(20)]
    assert {len(of) for of in seen} == {cores}


def test_after_a_failure_no_item_is_begun_and_those_under_way_are_yielded():
    begun, failing, go = [], threading.Event(), threading.Event()

    def work(item):
        begun.append(item)
        if item == 0:
            failing.set()
            raise ValueError('item 0')
        assert go.wait(30)
        return item

    results = on_each_core(work, range(20))
    done = []
    threading.Thread(target=lambda: (failing.wait(30), go.set())).start()
    with pytest.raises(ValueError, match='item 0'):
        done += results
    assert len(begun) <= CORES
    assert sorted(done) == sorted(set(begun) - {0})
