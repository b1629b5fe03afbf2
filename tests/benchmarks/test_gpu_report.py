"""The report of a GPU, without one: it starts where the trainer's requirements are absent, resumes, and knows a wrong kernel."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bapo_jax.learner.objective import numbers_of, objective_of
from bapo_jax.learner.optimizer import clipped_adamw
from bapo_jax.models import attention
from bapo_jax.models.decoder import abstract_params
from benchmarks import gpu_kernels, gpu_report, train_step
from benchmarks.gpu_report import Job

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bare(tmp_path):
    """An environment in which what a GPU machine may lack cannot be imported."""
    absent = ('grain', 'orbax', 'transformers', 'safetensors', 'tensorstore', 'ml_collections', 'huggingface_hub', 'torch')
    for module in absent:
        (tmp_path / f'{module}.py').write_text(f'raise ModuleNotFoundError("No module named {module!r} here")')
    return {**os.environ, 'PYTHONPATH': str(tmp_path), 'JAX_PLATFORMS': 'cpu'}


def run(*arguments, environment):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_a_training_step_needs_jax_flax_and_optax_alone(bare):
    done = run('benchmarks/train_step.py', '--model=tiny', '--tokens=256', '--any-device', '--steps=2', environment=bare)
    assert done.returncode == 0, done.stderr[-4000:]
    row = json.loads(done.stdout.splitlines()[-1])
    assert 0.8 < row['filled'] <= 1 and row['tokens_a_step'] == round(row['filled'] * 2 * 4 * 256)
    assert row['tokens_per_s'] == pytest.approx(row['tokens_a_step'] / row['seconds'])
    assert 0 < row['grad_norm'] < np.inf


@pytest.mark.slow
def test_a_rehearsal_runs_every_part_and_names_what_the_quickstart_lacks(bare):
    done = run('benchmarks/gpu_report.py', '--rehearse', environment=bare)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "quickstart: not run: ModuleNotFoundError: No module named" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith('| ')]
    for name, times in (('triton', 2), ('xla', 2), ('triton wide', 2), ('as it is', 2), ('attention=xla', 2)):
        found = [row for row in rows if row.startswith(f'| {name} |')]
        assert len(found) == times and not any('not run' in row for row in found), done.stdout
    assert all(row.endswith('| right |') for row in rows if row.startswith(('| triton |', '| xla |')))


def test_the_benchmarks_rule_names_every_field_that_the_learner_reads():
    """Also quickly: the whole command is a slow test."""
    rule = train_step.LEARNER
    assert objective_of(rule).terms and numbers_of(rule, 1.0, 1) and clipped_adamw(1e-6, rule)


@pytest.mark.slow
def test_without_a_gpu_it_says_what_to_do(bare):
    done = run('benchmarks/gpu_report.py', environment=bare)
    assert done.returncode == 1 and 'no CUDA device: JAX finds a cpu alone; install jax[cuda13]' in done.stderr


def test_a_part_that_is_there_is_not_run_again(tmp_path, monkeypatch, capsys):
    """And a part is there when all its rows are done."""
    ran = []
    monkeypatch.setattr(gpu_report, 'run', lambda *_: gpu_report.Done(0, 'gpu\n', ''))
    monkeypatch.setattr(gpu_report, 'run_job', lambda job, *_: ran.append(job.name) or {'error': 'tried'})
    gpu_report.main(['attention', f'--results={tmp_path}'])
    first = (tmp_path / 'attention.json').read_text()
    assert ran == list(gpu_report.KERNELS) and [p.name for p in tmp_path.iterdir()] == ['attention.json']
    gpu_report.main(['attention', f'--results={tmp_path}'])
    assert ran == list(gpu_report.KERNELS) and (tmp_path / 'attention.json').read_text() == first
    gpu_report.main(['attention', '--again', f'--results={tmp_path}'])
    assert len(ran) == 2 * len(gpu_report.KERNELS)
    assert '| triton |  |  |  |  |  | tried |' in capsys.readouterr().out


def test_when_a_parts_time_is_up_the_other_rows_are_not_run(monkeypatch):
    monkeypatch.setattr(gpu_report, 'PART_S', 4.0)
    rows = gpu_report.run_part([Job('late', ('-c', 'raise SystemExit'))], {})['rows']
    assert rows == {'late': {'error': "not run: the part's time was up"}}


@pytest.mark.slow
def test_a_job_that_takes_too_long_ends_with_its_processes(tmp_path):
    """The job writes its process group's number, starts a process and sleeps."""
    program = f"""
import os, subprocess, time
open({str(tmp_path / 'group')!r}, 'w').write(str(os.getpgrp()))
subprocess.Popen(['sleep', '60'])
time.sleep(60)
"""
    row = gpu_report.run_job(Job('slow', ('-c', program)), 2.0, dict(os.environ))
    assert row['error'] == 'stopped after 2 s'
    group, ends = int((tmp_path / 'group').read_text()), time.monotonic() + 30
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < ends:  # the last one may wait to be reaped
            os.killpg(group, 0)  # asks whether one is there
            time.sleep(0.1)


def test_a_failed_job_leaves_its_last_line():
    row = gpu_report.run_job(Job('bad', ('-c', 'raise ValueError("out of memory")')), 60.0, dict(os.environ))
    assert row['error'] == 'ValueError: out of memory'


def test_tables_are_empty_where_nothing_was_run(tmp_path):
    text = gpu_report.tables(tmp_path, rehearse=False)
    assert text.count('Not run.') == 5
    assert '| as it is |  |  |  |  |  |  |  | not run |' in text and '56.4 % of peak' in text


def test_a_kernel_that_fails_an_equation_is_wrong():
    assert gpu_report.equations_cell({'ok': True, 'packed': 0.01}) == 'right'
    assert gpu_report.equations_cell({'ok': False, 'a': 0.3, 'b': 0.001}) == '**wrong**: a: error 0.3 of the largest value'
    assert gpu_report.equations_cell({'ok': False, 'a': 0.1, 'b': 'FloatingPointError: not finite'}).startswith('**wrong**: b')
    assert gpu_report.equations_cell({'ok': False, 'a': "ModuleNotFoundError: No module named 'x'"}).startswith('**cannot run**')


def crosses_segments(q, k, v, segment):
    return attention.xla(q, k, v, jnp.minimum(segment, 1))


def turns_the_key_heads(q, k, v, segment):
    return attention.xla(q, jnp.roll(k, 1, axis=1), v, segment)


def is_not_finite(q, k, v, segment):
    return attention.xla(q, k, v, segment) / 0


@pytest.mark.slow
@pytest.mark.parametrize(
    'kernel, fails',
    [
        (attention.xla, set()),
        (crosses_segments, {'packed, 4/2 heads', 'packed = alone'}),
        (turns_the_key_heads, {'padded tails, 4/2 heads', 'whole rows, 4/2 heads', 'packed, 4/2 heads'}),
        (is_not_finite, {'padded tails, 4/2 heads', 'whole rows, 4/2 heads', 'packed, 4/2 heads', 'packed = alone'}),
    ],
)
def test_the_equation_tests_find_what_is_wrong(kernel, fails):
    tests = gpu_kernels.equation_tests(gpu_kernels.Candidate(kernel), T=64, heads=((4, 2),), H=16)
    ok = tests.pop('ok')
    assert {name for name, e in tests.items() if not (isinstance(e, float) and e <= gpu_kernels.TOLERANCE)} == fails
    assert ok == (not fails)


def test_ragged_rows_are_packed_sequences():
    rows = train_step.ragged_rows(np.random.default_rng(0), (2, 4, 512), 100)
    s = rows.sequences
    assert (s.segment > 0).mean() > 0.85
    for segment, position, response in zip(*(x.reshape(-1, 512) for x in (s.segment, s.position, s.response)), strict=True):
        lengths = np.bincount(segment)[1:]
        assert lengths.min() > 0 and (segment == np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, 512 - lengths.sum()])).all()
        np.testing.assert_array_equal(position[segment > 0], np.concatenate([np.arange(n) for n in lengths]))
        assert set(response[segment == 1]) == {0, 1} and (response[response > 0] == segment[response > 0]).all()
    assert rows.weight['rl'].sum() == pytest.approx(1) and ((rows.weight['rl'] > 0) == (s.response > 0)).all()


def test_useful_work_counts_products_and_visible_pairs():
    model, rows = train_step.MODELS['tiny'], train_step.ragged_rows(np.random.default_rng(0), (1, 2, 64), 100)
    segment, shapes = rows.sequences.segment[0], abstract_params(model)[1]
    pairs = np.asarray(attention.segment_mask(jnp.asarray(segment)) & (segment > 0)[:, None]).sum()
    matrices = sum(x.size for x in jax.tree.leaves(shapes) if x.ndim > 1) - 2 * 64 * 2 - 2 * (64 + 2 * 32)  # norms and biases
    want = 6 * matrices * (segment > 0).sum() + 12 * 2 * 4 * 16 * pairs
    assert train_step.useful_flops(model, rows) == want
