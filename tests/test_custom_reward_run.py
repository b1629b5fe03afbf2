"""A run whose rewards are a user's function: training, its evaluations and `evaluate` all go by it, and nothing else judges."""

import json
import os
import subprocess
import sys

import pytest
from small_run import ROOT, metrics, rollouts, run, small_config

from bapo_jax.train import build

pytestmark = pytest.mark.slow
MODULE = """
def even(data_source, response, ground_truth, extra):
    assert data_source == 'countdown' and set(ground_truth) == {'numbers', 'target'} and extra['finish'] in ('stop', 'length')
    if extra['prompt_id'] % 30 == 6 and extra['prompt_id'] < 1000:  # of the training prompts, one a step at most
        raise RuntimeError('cannot judge this one')
    return {'score': len(response) % 2 == 0, 'pred': response[:3]}

def shaped(data_source, response, ground_truth, extra):
    share = round(len(response) / 32, 3)  # of a response's 24 tokens and more: never 1
    return {'score': share, 'correct': len(response) % 2 == 0} if len(response) % 3 else share / 2

def leaves(data_source, response, ground_truth, extra):
    raise SystemExit(0)

def undefined(data_source, response, ground_truth, extra):
    return float('nan')
"""


@pytest.fixture(scope='module')
def rewarded(tmp_path_factory, benchmark):
    """(directory of the module, of a run of 3 steps by its function `even`)."""
    modules, workdir = tmp_path_factory.mktemp('modules'), tmp_path_factory.mktemp('runs') / 'even'
    (modules / 'rewards_of_this_run.py').write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(modules)
        run(small_config('bapo_tuned', benchmark, steps=3, task__reward='rewards_of_this_run:even'), workdir)
    return modules, workdir


@pytest.fixture(scope='module')
def fractional(rewarded, tmp_path_factory, benchmark):
    """The directory of a run of 3 steps by the function `shaped`, whose rewards are fractions."""
    workdir = tmp_path_factory.mktemp('runs') / 'shaped'
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(rewarded[0])
        config = small_config('bapo_tuned', benchmark, steps=3, task__reward='rewards_of_this_run:shaped', replay__use_x2=True,
                              replay__reevaluate_every=2)  # fmt: skip
        run(config, workdir)
    return workdir


def events_of(workdir):
    rows = [json.loads(line) for line in (workdir / 'events.jsonl').read_text().splitlines()]
    return [(row['event'], row['failed']) for row in rows]


def command(module, *flags, path=''):
    return subprocess.run(
        [sys.executable, '-m', module, *flags], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, 'PYTHONPATH': str(path)},
    )  # fmt: skip


def test_every_response_is_judged_by_the_function_and_what_it_fails_on_is_discarded(rewarded):
    seen, broken = set(), []
    for step in (1, 2, 3):
        rows = rollouts(rewarded[1], step)
        for row in rows:
            if row['prompt_id'] % 30 == 6:
                assert row['verdicts'] == ['infra_error'] * 4 and row['rewards'] == [None] * 4 and row['use'] == 'discarded'
            else:
                texts = [text.removesuffix('<|endoftext|>') for text in row['responses']]
                assert row['rewards'] == [float(len(text) % 2 == 0) for text in texts]
            seen |= set(row['rewards'])
        broken.append(sum(row['prompt_id'] % 30 == 6 for row in rows))
        assert metrics(rewarded[1])[step]['bapo/discarded/infra_error'] == broken[-1]
    assert seen == {0.0, 1.0, None} and broken == [0, 1, 1]
    assert events_of(rewarded[1]) == [('reward failed', 4)] * 2
    assert max(row.get('actor/grad_norm', 0) for row in metrics(rewarded[1])) > 0  # and it did train


def test_rewards_that_are_fractions_train_and_k_counts_correct_responses_alone(fractional):
    """A response of 3n characters earns partial credit and is wrong. Filter, score and bins go by k, advantages by rewards."""
    uneven = 0
    for row in metrics(fractional)[1:]:
        fresh = [r for r in rollouts(fractional, row['step']) if r['use'] in ('x1', 'discarded')]
        counts = []
        for r in rollouts(fractional, row['step']):
            lengths = [len(text.removesuffix('<|endoftext|>')) for text in r['responses']]
            right = [bool(n % 3) and n % 2 == 0 for n in lengths]
            assert r['verdicts'] == ['correct' if x else 'wrong' for x in right]
            want = [round(n / 32, 3) if n % 3 else round(n / 32, 3) / 2 for n in lengths]
            assert r['rewards'] == pytest.approx(want, abs=1e-6)
            if r in fresh:
                counts.append(sum(right))
                assert (r['use'] == 'x1') == (0 < sum(right) < 4)
                uneven += sum(right) in (0, 4) and len(set(r['rewards'])) > 1
        assert row['accuracy_bins'] == [counts.count(k) for k in range(5)]
        assert row['critic/score/mean'] == pytest.approx(sum(counts) / 32)
        assert row['critic/rewards/mean'] == pytest.approx(sum(x for r in fresh for x in r['rewards']) / 32, rel=1e-5)
        assert abs(row['critic/rewards/mean'] - row['critic/score/mean']) > 1e-3
    assert uneven  # their rewards differ, and still they are all right or all wrong: left out
    assert max(row.get('actor/grad_norm', 0) for row in metrics(fractional)) > 0  # and it did train


def test_evaluate_goes_by_the_runs_reward_and_wants_it_before_any_work(rewarded, benchmark, tmp_path):
    modules, workdir = rewarded
    flags = [f'--checkpoint={workdir}', f'--output={tmp_path}/out']
    absent = command('bapo_jax.evaluate', *flags)
    assert absent.returncode == 1 and "task.reward='rewards_of_this_run:even': importing" in absent.stderr
    assert 'Traceback' not in absent.stderr and not (tmp_path / 'out').exists()
    done = command('bapo_jax.evaluate', *flags, path=modules)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / 'out' / 'summary.json').read_text())
    assert summary['config.task.reward'] == 'rewards_of_this_run:even'
    assert summary['benchmarks'] == json.loads((workdir / 'evals' / '000003.json').read_text())['benchmarks']
    samples = [json.loads(line) for line in (tmp_path / 'out' / 'few.jsonl').read_text().splitlines()]
    for row in samples:
        text = row['response'].removesuffix('<|endoftext|>')
        assert (row['verdict'], row['answer']) == ('wrong' if len(text) % 2 else 'correct', text[:3])
    assert {row['verdict'] for row in samples} == {'correct', 'wrong'}


def test_a_run_by_another_reward_is_another_run(rewarded, benchmark):
    with pytest.raises(ValueError, match=r'differ in task\.reward\. Give another --workdir'):
        build(small_config('bapo_tuned', benchmark, steps=3), rewarded[1])


@pytest.mark.parametrize('function, message', [
    ('undefined', "rewards_of_this_run:undefined (task.reward) returned 'nan'; return a finite number"),
    ('leaves', '512 of 512 responses of step 1 have no verdict (more than a fifth)'),
])  # fmt: skip
def test_what_gives_no_rewards_ends_the_run_in_one_message(rewarded, benchmark, tmp_path, function, message):
    flags = ['--config=configs/quickstart.py', f'--workdir={tmp_path}/run', f'--config.task.reward=rewards_of_this_run:{function}',
             f"--config.evaluate.benchmarks=('{benchmark}',)", '--config.evaluate.samples=2', '--config.task.limit=64',
             '--config.evaluate.track_prompts=0']  # fmt: skip
    result = command('bapo_jax.train', *flags, path=rewarded[0])
    assert result.returncode == 1 and message in result.stderr, result.stderr
    assert 'Traceback' not in result.stderr.partition('error: ')[2]  # the function's own was told before
