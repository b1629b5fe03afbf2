"""A step's metrics by hand: numbers that account for every prompt."""

import numpy as np
import pytest
from group_builders import graded, judged_group, version_of

from bapo_jax.groups import Verdict, make_batch
from bapo_jax.run.log.measures import batch_metrics, discarded_metrics, fresh_metrics, one_sided, batch_tokens

RIGHT, WRONG, NONE, BROKEN = Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSEABLE, Verdict.INFRA_ERROR


def groups():
    rng = np.random.default_rng(0)
    return [judged_group(i, v, rng) for i, v in enumerate([[RIGHT, WRONG], [NONE, NONE], [RIGHT, RIGHT], [RIGHT, BROKEN]])]


def test_fresh_metrics_by_hand():
    g = groups()
    m = fresh_metrics(g)
    assert m['critic/score/mean'] == 0.5  # of the three judged groups: 1/2, 0, 1
    assert m['accuracy_bins'] == [1, 1, 1]
    assert (m['reward/unparseable'], m['reward/infra_error']) == (2, 1)
    responses = [r for group in g for r in group.responses]
    lengths = [len(r.tokens) for r in responses]
    assert (m['response_length/mean'], m['response_length/max']) == (np.mean(lengths), max(lengths))
    assert m['response_length/clip_ratio'] == np.mean([r.finish == 'length' for r in responses])


def test_the_score_counts_correct_responses_and_the_reward_is_what_trains():
    g = groups()
    rewards = ([1, 0.5], [0.25, 0.25], [2, 1], [1, np.nan])
    shaped = [graded(x.prompt, x.responses, x.verdicts, x.step, r) for x, r in zip(g, rewards)]
    plain, fractions = fresh_metrics(g), fresh_metrics(shaped)
    assert plain['critic/rewards/mean'] == plain['critic/score/mean'] == fractions['critic/score/mean'] == 0.5
    assert fractions['critic/rewards/mean'] == pytest.approx(5 / 6)  # of the three judged groups
    assert fractions['accuracy_bins'] == plain['accuracy_bins']


def test_without_a_judged_group_there_is_no_score():
    m = fresh_metrics(groups()[3:])
    assert np.isnan(m['critic/score/mean']) and np.isnan(m['critic/rewards/mean'])
    assert m['accuracy_bins'] == [0, 0, 0] and m['reward/infra_error'] == 1


def test_discarded_and_kept_account_for_every_fresh_group():
    fresh = groups()
    batch = make_batch(fresh[:1], ['x1'])
    assert discarded_metrics(fresh, batch) == {'bapo/discarded/filtered': 2, 'bapo/discarded/infra_error': 1}
    replayed = make_batch([*fresh[:1], groups()[2]], ['x1', 'x3'])
    assert discarded_metrics(fresh, replayed) == discarded_metrics(fresh, batch)  # only X1 is of the fresh groups


def test_batch_metrics_by_hand():
    g = groups()
    batch = make_batch((g[0], g[2]), ('x1', 'x3'))
    ages = [7 - 1 - version_of(r) for group in batch.groups for r in group.responses]
    m = batch_metrics(batch, step=7)
    assert (m['bapo/x1_groups'], m['bapo/x2_groups'], m['bapo/x3_groups'], m['bapo/batch_groups']) == (1, 0, 1, 2)
    assert (m['staleness/mean'], m['staleness/max']) == (np.mean(ages), max(ages))
    assert batch_tokens(batch) == sum(5 + len(r.tokens) for group in batch.groups for r in group.responses)
    assert batch_metrics(make_batch((), ()), 1)['bapo/batch_groups'] == 0


def test_another_rows_replay_is_counted_where_a_row_has_one():
    g = groups()
    assert 'bapo/replay_groups' not in batch_metrics(make_batch(g, ['x1'] * 4), 7)
    m = batch_metrics(make_batch(g, ['x1', 'replay', 'replay', 'x1']), 7)
    assert (m['bapo/x1_groups'], m['bapo/replay_groups'], m['bapo/batch_groups']) == (2, 2, 4)


def test_a_run_whose_responses_are_all_wrong_or_all_right_is_told_what_to_look_at():
    scores, wrong, mixed, right = {'step': 0}, *({'accuracy_bins': bins} for bins in ([2, 0, 0], [1, 1, 0], [0, 0, 1]))
    assert one_sided([scores, wrong, wrong]).startswith('no response of the run was correct, so no group was mixed')
    assert one_sided([right]).startswith('no response of the run was wrong')
    nothing_to_say = ([], [scores], [wrong, right], [mixed], [wrong, mixed], [{'accuracy_bins': [0, 0, 0]}])
    assert [one_sided(rows) for rows in nothing_to_say] == [''] * 6
