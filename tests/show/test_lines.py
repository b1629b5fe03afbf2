"""A story in, lines out: how a run ended, its scores and metrics in words, on one screen of 80 columns."""

from collections import Counter

import pytest

from bapo_jax.machine import terminal
from bapo_jax.show.__main__ import table_of
from bapo_jax.show.lines import lines_of, outcome_of
from bapo_jax.show.story import Sampled, Story, two_of

CONFIG = {
    'method': 'bapo', 'seed': 3, 'steps': 60, 'model': {'path': 'org/base'}, 'task': {'name': 'countdown', 'train': 'generated'},
    'learner': {'batch_groups': 32, 'learning_rate': 5e-5}, 'rollout': {'group_size': 8},
    'fingerprints': {'model': {'model_type': 'qwen2', 'num_hidden_layers': 4, 'hidden_size': 128}},
}  # fmt: skip
SCORES = {
    0: {'cd34': {'questions': 200, 'samples': 8, 'mean': 0.236, 'interval': [0.2, 0.27], 'pass': 0.62, 'pass_interval': [0.5, 0.7]}},
    60: {'cd34': {'questions': 200, 'samples': 8, 'mean': 0.338, 'interval': [0.3, 0.375], 'pass': 0.61}},
}


def start(step=0, **more):
    return {
        'time': '2026-11-29T07:18:34+00:00', 'step': step, 'steps': 60, 'command': 'bapo-train --config=quickstart --workdir=runs/x',
        'version': '0.1.0', 'commit': 'a' * 40, 'host': 'node7', 'devices': '8 TPU v5e', 'hosts': '2', 'jax': '0.10.2', 'python': '3.12.1',
        'machine': 'x86_64', **more,
    }  # fmt: skip


def end(step, outcome):
    return {'end': {'time': '2026-11-29T09:00:00+00:00', 'step': step, 'outcome': outcome}}


def row(step, score, **more):
    return {
        'step': step, 'critic/score/mean': score, 'response_length/mean': 40.0 + step, 'response_length/clip_ratio': 0.25,
        'actor/entropy': 0.5, 'timing_s/step': 4.0, 'bapo/x1_groups': 20, 'bapo/x2_groups': 1, 'bapo/x3_groups': 11, **more,
    }  # fmt: skip


def story(**changes):
    rows = [row(step, step / 100) for step in range(1, 61)]
    told = Story(
        run='runs/x', config=CONFIG, starts=[start(**end(60, 'finished'))], held=False, step=60, rows=60, seconds=240.0,
        first=rows[:10], last=rows[-10:], written='2026-11-29T08:59:00+00:00', checkpoint=60, scores=SCORES, events=Counter(),
        responses=[Sampled(60, 'correct', '3 5 7=15\n', '3+5+7'), Sampled(60, 'wrong', '2 2=4\n', '2-2')], notes=[],
    )  # fmt: skip
    return told._replace(**changes)


def text(told, label):
    """The lines of a label, continued lines included."""
    found, now = [], ''
    for name, line in lines_of(told):
        now = name or now
        found += [line] * (now == label)
    return found


NEW = {'step': 0, 'rows': 0, 'checkpoint': None, 'first': [], 'last': [], 'seconds': 0.0}


@pytest.mark.parametrize('changes, told', [
    ({}, 'finished, 60 steps'),
    ({'held': True, 'step': 12, 'starts': [start()]}, 'running, after step 12 of 60'),
    ({'held': True, **NEW, 'starts': [start()]}, 'running, before the first step of 60'),
    ({'held': True, 'step': 40, 'starts': [start(**end(40, 'stopped'))]}, 'running, after step 40 of 60'),  # it is being built
    ({'step': 40, 'starts': [start(**end(40, 'stopped'))]}, 'stopped after step 40 of 60; the same command continues'),
    ({'step': 37, 'checkpoint': 20, 'starts': [start()]}, 'crashed after step 37 of 60, or copied while it ran; the same command continues after step 20'),
    ({'step': 7, 'checkpoint': None, 'starts': [start()]}, 'crashed after step 7 of 60, or copied while it ran; the same command starts over'),
    ({**NEW, 'starts': [start()]}, 'crashed before the first step of 60, or copied while it ran; the same command starts over'),
    ({'step': 50, 'checkpoint': 40, 'starts': [start(**end(40, 'stopped')), start(40)]},
     'crashed after step 50 of 60, or copied while it ran; the same command continues after step 40'),
    ({**NEW, 'starts': []}, 'not begun: its start failed'),
    ({'starts': None}, 'finished, 60 steps'),
    ({'starts': None, 'step': 37}, 'ended after step 37 of 60; its version did not record how'),
    ({'starts': None, 'config': {}}, 'ended after step 60; its version did not record how'),
    ({'starts': None, 'held': True, 'step': 37}, 'running, after step 37 of 60'),
    ({'starts': [start(steps='many', end=3)]}, 'crashed after step 60 of 60, or copied while it ran; the same command continues after step 60'),
])  # fmt: skip
def test_the_outcome_is_told_by_what_a_run_leaves_and_by_its_lock(changes, told):
    assert outcome_of(story(**changes)) == told


def test_what_was_trained_and_with_what():
    assert text(story(), 'trained') == [
        'org/base (qwen2, 4 layers of 128) on countdown, generated',
        'method bapo, 32 prompts × 8 responses a step, learning rate 5e-05, seed 3',
    ]
    assert text(story(), 'with') == ['bapo_jax 0.1.0 (aaaaaaaaaaaa), jax 0.10.2, Python 3.12.1']
    dirty = story(starts=[start(commit='b' * 40 + '-dirty')])
    assert text(dirty, 'with') == ['bapo_jax 0.1.0 (bbbbbbbbbbbb, with changes), jax 0.10.2, Python 3.12.1']
    assert text(story(starts=[start(commit=None)]), 'with') == ['bapo_jax 0.1.0, jax 0.10.2, Python 3.12.1']
    assert text(story(), 'command') == ['bapo-train --config=quickstart --workdir=runs/x']
    long = 'bapo-train ' + '--config.x=y ' * 99  # whole: it is to be typed again
    assert text(story(starts=[start(command=long)]), 'command') == [long]


def test_when_and_where_it_began_continued_and_ended():
    assert text(story(), 'began') == ['2026-11-29 07:18 UTC on node7 (8 TPU v5e, 2 hosts)']
    assert text(story(), 'continued') == [] and text(story(), 'ended') == ['2026-11-29 09:00 UTC, 4.0 min in 60 steps']
    starts = [start(), start(20), start(40, host='node8', time='2026-11-30T01:00:00+02:00')]
    crashed = story(starts=starts)
    assert text(crashed, 'continued') == ['2 times, last 2026-11-29 23:00 UTC on node8 (8 TPU v5e, 2 hosts), after step 40']
    assert text(crashed, 'ended') == [] and text(crashed, 'last row') == ['2026-11-29 08:59 UTC, 4.0 min in 60 steps']
    old = story(starts=[start(20, hosts='1')])
    assert text(old, 'began') == [] and text(old, 'continued') == ['2026-11-29 07:18 UTC on node7 (8 TPU v5e), after step 20']
    assert text(story(starts=None), 'last row') == ['2026-11-29 08:59 UTC, 4.0 min in 60 steps']


def test_scores_are_of_the_first_and_the_last_evaluation():
    assert text(story(), 'scores') == [
        'in %, after step 0 → 60, with 95 % confidence intervals',
        'cd34 mean@8: 23.6 (20.0 to 27.0) → 33.8 (30.0 to 37.5)',
        'cd34 pass@8: 62.0 (50.0 to 70.0) → 61.0',
    ]
    once = text(story(scores={0: SCORES[0]}), 'scores')
    assert once[0] == 'in %, after step 0, with 95 % confidence intervals' and once[1] == 'cd34 mean@8: 23.6 (20.0 to 27.0)'
    many = {step: {f'b{i}': {'samples': 2, 'mean': 0.5, 'pass': 0.5} for i in range(8)} for step in (0, 60)}
    lines = text(story(scores=many), 'scores')
    assert len(lines) == 8 and lines[1] == 'b0 mean@2: 50.0 → 50.0' and lines[-1] == 'and 2 more benchmarks (evals/)'
    assert text(story(scores={}), 'scores') == []


def test_metrics_are_put_into_words():
    assert text(story(), 'training') == [
        '55.5% of the responses of the last 10 steps were correct, 5.5% in the first 10.',
        'A response had 96 tokens, 25.0% were cut at the limit, the entropy was 0.50 nats per token, a step took 4.0 s.',
        'A batch had 20.0 fresh, 1.0 re-evaluated and 11.0 replayed groups.',
    ]
    nan = [row(1, float('nan')), row(2, 0.5, **{'actor/skipped_updates': 2})]
    few = story(first=nan, last=nan, rows=2, step=2)
    assert text(few, 'training')[0] == '50.0% of the responses of the last 2 steps were correct.'
    assert text(few, 'training')[-1] == '2 updates of the last 2 steps were skipped: the gradient was not finite.'
    one = story(first=[row(1, 0.5)], last=[row(1, 0.5)], rows=1, step=1)
    assert text(one, 'training')[0] == '50.0% of the responses of step 1 were correct.'
    assert text(story(**NEW), 'training') == []


def test_faults_and_unread_files_are_told():
    told = story(events=Counter({'server lost': 2}), notes=['rollouts/000003.jsonl.zst is damaged'])
    assert text(told, 'events') == ['2 × server lost (events.jsonl)'] and text(told, 'note') == ['rollouts/000003.jsonl.zst is damaged']


def test_a_right_and_a_wrong_response_are_shown_and_no_more_are_read():
    def sampled():
        for verdict in ('unparseable', 'wrong', 'correct'):
            yield Sampled(1, verdict, 'p', verdict)
        pytest.fail('read on')

    assert [r.verdict for r in two_of(sampled())] == ['correct', 'unparseable']
    assert [r.verdict for r in two_of(iter([Sampled(1, 'wrong', 'p', 'x')] * 3))] == ['wrong']
    assert text(story(), 'correct') == ['step 60: 3 5 7=15\\n → 3+5+7'] and text(story(), 'wrong') == ['step 60: 2 2=4\\n → 2-2']


def test_the_story_is_one_screen_of_80_columns_and_data_cannot_steer_the_terminal(capsys):
    long = [Sampled(60, verdict, 'question ' * 99, '\x1b[31m[bold]answer ' * 99) for verdict in ('correct', 'wrong')]
    told = story(
        run='runs/' + 'deep/' * 9, starts=[start(), start(40, command='bapo-train ' + '--config.x=y ' * 9)], responses=long,
        events=Counter({'server lost': 2, 'server restarted': 3}),
    )  # fmt: skip
    terminal.console(width=80).print(table_of(lines_of(told)))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 30
    assert not [line for line in lines if '\x1b' in line] and '[bold]answer' in ' '.join(lines)
