"""The map's measures are those of all ways to split sixteen answers; its page has the rows' numbers."""

import gzip
import itertools
import json
import math

import numpy as np
import pytest
from small_run import ROOT

from bapo_jax.config import resolve
from bapo_jax.groups import Verdict
from bapo_jax.tasks.countdown import task as countdown
from studies.lib.rows import rows_in
from studies.real_policy import map as the_map, map_config


def test_the_page_has_the_rows_numbers():
    assert f'<!-- the map -->\n{the_map.table(rows_in(the_map.ROWS))}\n<!-- /the map -->' in the_map.PAGE.read_text('utf-8')


@pytest.mark.parametrize('correct', [0, 1, 7, 8, 9, 15, 16])
def test_a_group_of_eight_is_drawn_from_sixteen_answers_in_all_ways(correct, monkeypatch):
    """Of three and six in their place, to count them all."""
    monkeypatch.setattr(the_map, 'SAMPLES', 6)
    monkeypatch.setattr(the_map, 'GROUP', 3)
    right = [i < min(correct, 6) for i in range(6)]
    halves = [([right[i] for i in half], [right[i] for i in range(6) if i not in half]) for half in itertools.combinations(range(6), 3)]
    count, failed = np.array([sum(right)]), [other for half, other in halves if not any(half)]
    assert the_map.all_wrong(count) == pytest.approx(len(failed) / len(halves))
    assert the_map.mixed(count) == pytest.approx(np.mean([any(half) and not all(half) for half, _ in halves]))
    after = the_map.mixed_after_failure(count)
    assert after == pytest.approx(np.mean([any(o) and not all(o) for o in failed])) if failed else math.isnan(after)


def test_questions_that_fail_more_often_weigh_more_among_the_failed():
    """One question is never right, so its groups are all wrong and never mixed after that."""
    never, sometimes = 1.0, the_map.p_of(2, 0)
    assert the_map.mixed_after_failure(np.array([0, 2])) == pytest.approx(sometimes / (never + sometimes))


def test_the_sets_are_drawn_alike_every_time_and_can_be_judged(tmp_path, monkeypatch):
    data = tmp_path / 'data'
    data.mkdir()
    rows = [{'problem': f'{i}?', 'answer': str(i), 'meta': {'level': 1.0 + i % 5}} for i in range(200)]
    for file, dataset in (('math_test', 'math500'), ('math_train', 'math_train_7474')):
        lines = ''.join(json.dumps(row | {'dataset': dataset}) + '\n' for row in rows)
        (data / f'{file}.jsonl.gz').write_bytes(gzip.compress(lines.encode()))
    monkeypatch.setenv('BAPO_DATA', str(data))
    for name in ('a', 'b'):
        the_map.write_sets(tmp_path / name)
    files = sorted(file.name for file in (tmp_path / 'a').iterdir())
    assert files == [f'{n}.jsonl' for n in ('countdown_2', 'countdown_2_or_3', 'countdown_3', 'countdown_4', 'math_1_2', 'math_3_5', 'math_train_1_2')]
    assert all((tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes() for name in files)
    easy = [json.loads(line) for line in (tmp_path / 'a' / 'math_1_2.jsonl').read_text().splitlines()]
    assert len(easy) == 32 and all(int(q['answer']) % 5 < 2 for q in easy)
    assert len((tmp_path / 'a' / 'math_train_1_2.jsonl').read_text().splitlines()) == 80
    for question in countdown.benchmark(str(tmp_path / 'a' / 'countdown_2.jsonl')):
        assert len(question['numbers']) == 2
        assert countdown.verify('<answer>0</answer>', question)[0] != Verdict.CORRECT


@pytest.mark.parametrize('task', the_map.TASKS)
def test_what_asks_the_sets_is_a_config(task):
    c = map_config.get_config(task)
    c.model.path = str(ROOT / 'configs' / 'quickstart_base')
    c.task.limit = 1
    c = resolve(c)
    assert c.task.name == task.removesuffix('_examples') and c.task.template == ('examples' if '_' in task else 'chat')
