"""The head of a run: what is recorded, in words, and nothing of what is not; one response of the newest rollouts."""

import random

from making import config, make_run, row

from bapo_jax.report.about import head_of, sample_response
from bapo_jax.report.page import write_report
from bapo_jax.report.records import read_run
from benchmarks.host.viewer import row as rollouts, write_rows

START = {
    'time': '2026-01-01T00:00:00+00:00', 'command': 'bapo-train --config=quickstart', 'version': '1.2', 'commit': 'abc-dirty', 'host': 'box',
    'devices': '2 cpu', 'jax': '0.11', 'python': '3.12.1', 'machine': 'x86_64',
}  # fmt: skip
SETTINGS = config(
    steps=3, model={'path': 'base'}, task={'name': 'countdown', 'train': 'generated', 'limit': 10000},
    learner={'learning_rate': 5e-5, 'batch_groups': 8}, rollout={'group_size': 4}, environment={'devices': '1 gpu', 'jax': '0.10'},
)  # fmt: skip


def head(tmp_path, **more):
    return dict(head_of(read_run(make_run(tmp_path / 'run', [row(s) for s in (1, 2, 3)], settings=SETTINGS | more))))


def test_the_head_has_what_is_recorded(tmp_path):
    starts = [START | {'time': 'the first'}, START | {'end': {'step': 3, 'outcome': 'finished'}}]
    assert head(tmp_path, starts=starts) == {
        'model': 'base', 'task': 'countdown', 'data': 'generated, 10,000 problems', 'method': 'bapo', 'seed': '1', 'learning rate': '5e-05',
        'batch': '8 groups of 4 responses', 'hardware': '2 cpu, x86_64, box', 'version': 'bapo_jax 1.2, JAX 0.11, Python 3.12.1',
        'commit': 'abc-dirty', 'command': 'bapo-train --config=quickstart', 'start': 'the first, 2 starts', 'wall clock': '6 s',
        'steps': '3, from 1 to 3', 'outcome': 'finished, 3 steps',
    }  # fmt: skip


def test_the_head_leaves_out_what_an_older_run_lacks(tmp_path):
    found = head(tmp_path)
    assert found['hardware'] == '1 gpu' and found['version'] == 'JAX 0.10' and found['outcome'] == 'finished, 3 steps'
    assert not {'commit', 'command', 'start'} & found.keys()
    damaged = head(tmp_path / 'damaged', starts='none', task=3)
    assert not {'task', 'data', 'command'} & damaged.keys()
    bare = read_run(make_run(tmp_path / 'bare', [{'step': 1, 'critic/score/mean': 0.5}]))
    assert head_of(bare) == [('steps', '1, from 1 to 1')]


def test_the_head_leaves_out_an_outcome_that_nothing_tells(tmp_path):
    assert head(tmp_path / 'a', starts=[START])['outcome'] == 'crashed after step 3 of 3, or still running'
    assert 'outcome' not in head(tmp_path / 'b', steps=60) and 'outcome' not in head(tmp_path / 'c', steps=60, starts='none')


def test_one_response_of_the_newest_rollouts_is_shown_a_correct_one_if_there_is_one(tmp_path):
    run = make_run(tmp_path / 'run', [row(1)])
    assert sample_response(run) is None
    made = [rollouts(random.Random(i), 2, 2, 3) for i in range(3)]
    for group, verdicts in zip(made, (['wrong', 'wrong'], ['wrong', 'correct'], ['correct', 'correct']), strict=True):
        group['verdicts'] = verdicts
    made[1] |= {'rewards': [0.0, 1.0], 'responses': ['no', '<b>' + 'x' * 3000], 'prompt': 'y' * 3000 + '?', 'step': 2, 'pieces': None}
    write_rows(run, 1, made[:1])
    write_rows(run, 2, made)
    sample = sample_response(run)
    assert sample.about == 'Step 2, correct, reward 1.' and sample.prompt == '… ' + 'y' * 1999 + '?'
    assert sample.response == '<b>' + 'x' * 1997 + ' …'
    html = write_report([run]).read_text('utf-8')
    assert '<pre>&lt;b&gt;xxx' in html and '>Rollouts</a>' in html
    write_rows(run, 3, made[:1])
    assert sample_response(run).about.startswith(f'Step {made[0]["step"]}, wrong')
