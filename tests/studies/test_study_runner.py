"""Jobs of a core each, or of several: as many under way as the cores allow, and none begun after a failure."""

import os
import subprocess
import threading
import time

import pytest

from studies.lib.rows import rows_in
from studies.lib.runner import call, made_by, measure_all, on_each_core

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


def test_rows_are_appended_as_they_end_and_none_is_begun_after_the_last_start(tmp_path, capsys):
    file, begun = tmp_path / 'rows.jsonl', []
    assert rows_in(file) == []

    def measure(seed):
        begun.append(seed)
        return {'arm': 'R', 'seed': seed}

    rows = measure_all(file, range(3), measure, time.monotonic() + 60)
    assert sorted(row['seed'] for row in rows) == [0, 1, 2] and rows_in(file) == rows
    assert 'R 2 there' in capsys.readouterr().out
    assert measure_all(file, range(3, 6), measure, time.monotonic()) == [] and rows_in(file) == rows and len(begun) == 3


def test_what_a_run_prints_goes_to_its_folder_and_a_failure_is_raised(tmp_path):
    workdir = tmp_path / 'runs' / 'x'
    call(['python', '-c', 'import os; print(os.getcwd(), os.environ["JAX_PLATFORMS"])'], workdir)
    call(['python', '-c', 'import os; print(os.environ["JAX_PLATFORMS"])'], workdir, {'JAX_PLATFORMS': 'cuda'})
    root, cuda = (workdir / 'output.txt').read_text('utf-8').splitlines()
    assert root == f'{os.getcwd()} cpu' and cuda == 'cuda'
    with pytest.raises(subprocess.CalledProcessError):
        call(['python', '-c', '1 / 0'], workdir)
    assert 'ZeroDivisionError' in (workdir / 'output.txt').read_text('utf-8')
    assert len(made_by()['commit']) == 40 and made_by()['cores'] == os.cpu_count()
