"""Twenty steps of the rows that remember or wait: every part acts, and the last seven repeat from a checkpoint, bit for bit."""

import json
import shutil

import numpy as np
import pytest
from small_run import ROOT, metrics, run
from test_rows_run import LONGER, assert_sound, row_config, tiny_base  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow


def total(rows, name):
    return sum(row.get(name, 0) for row in rows)


def arpo_acted(rows):
    """Some failed groups got a success, some had none; what is not fresh is one response of such a group."""
    replayed = total(rows, 'bapo/replay_groups')
    assert 0 < replayed < total(rows, 'bapo/batch_groups')
    assert rows[-1]['rollout/reused_total'] == rows[-1]['rollout/discarded_total'] == replayed
    assert rows[-1]['buffer/arpo/responses'] > rows[-1]['buffer/arpo/prompts'] > 0


def fifo_acted(rows):
    """It waits for a batch, forgets what is old, and trains on about two groups for each fresh one."""
    assert rows[0]['bapo/batch_groups'] == 0 and all(row['bapo/batch_groups'] == 16 for row in rows[1:])
    assert rows[-1]['buffer/fifo/groups'] == 24 and 0 < total(rows[3:], 'bapo/x1_groups') < 17 * 8
    assert 1 < rows[-1]['bapo/replay/age'] <= 3 and rows[-1]['bapo/replay/uses'] > 0


def freshper_acted(rows):
    assert all(row['bapo/x1_groups'] == 8 for row in rows) and rows[0].get('bapo/replay_groups', 0) == 0
    assert total(rows, 'bapo/replay_groups') > 60 and rows[-1]['buffer/freshper/groups'] == 80
    assert all(0 < row['bapo/replay/weight'] < 1 for row in rows[3:]) and max(row['bapo/replay/age'] for row in rows[1:]) > 2


def exgrpo_acted(rows):
    """It starts late, then asks prompts again, and each group that a success leads has one response of before."""
    started = [row['buffer/exgrpo/started'] for row in rows]
    assert started[0] == 0 and started[-1] == 1 and started == sorted(started)
    first = started.index(1) + 2  # what is stored in the next step leads from the step after that
    assert all(row['bapo/reevaluated'] == 0 for row in rows[:first]) and all(row['bapo/reevaluated'] > 0 for row in rows[first:])
    assert rows[-1]['rollout/reused_total'] == total(rows, 'bapo/replay_groups') > 0
    assert max(abs(row['actor/trace_loss']) for row in rows) > 0 and rows[-1]['staleness/max'] == 0
    assert rows[-1]['buffer/exgrpo/retired'] > 0


def luffy_acted(rows):
    """Some prompts have a trace and some none; a trace makes room for itself, and some are wrong."""
    groups = total(rows, 'traces/groups')
    assert rows[-1]['rollout/discarded_total'] == rows[-1]['traces/groups_total'] == groups
    assert 0 < total(rows, 'traces/correct') < groups < total(rows, 'bapo/x1_groups') == 20 * 8
    assert all(row['actor/trace_loss'] != 0 for row in rows)


def relift_acted(rows):
    """Demonstrations join at some steps, and some prompts still wait; a batch of RL alone has no supervised loss."""
    joined = [row['traces/demonstrations'] for row in rows]
    assert set(joined) == {0, 2} and max(row['traces/queued'] for row in rows) > 0
    assert [row['actor/ce_loss'] > 0 for row in rows] == [n > 0 for n in joined]
    assert all(row['bapo/batch_groups'] == 8 + n for row, n in zip(rows, joined)) and rows[-1]['rollout/discarded_total'] == 0


def f_grpo_acted(rows):
    """There are groups of more than one success rate strictly between 0 and 1: they count by it."""
    assert len({k for row in rows for k, n in enumerate(row['accuracy_bins']) if n and 0 < k < 4}) > 1
    assert all(row['actor/grad_norm'] > 0 for row in rows)


def dppo_acted(rows):
    """Tokens are stopped, but not all, from the second mini-batch on: the policy has moved since it sampled."""
    assert total(rows, 'actor/pg_clipfrac') > 0 and all(row['actor/pg_clipfrac'] < 0.2 for row in rows)


def m2po_acted(rows):
    """Nothing is masked where the policy itself answered, and some tokens are, where one of up to four steps ago did."""
    assert {row['bapo/lag'] for row in rows} == {0, 1, 2, 3, 4}
    assert all(0 < row['actor/trust_narrowed'] < 0.5 if row['bapo/lag'] else row['actor/trust_narrowed'] == 0 for row in rows)
    assert total(rows, 'actor/pg_clipfrac') == 0


def sat_acted(rows):
    """A tenth of the tokens have a narrower clip where the policy has moved since it sampled; and the clip acts."""
    assert {row['bapo/lag'] for row in rows} == set(range(8))
    assert all(0.09 < row['actor/trust_narrowed'] < 0.12 for row in rows if row['bapo/lag']) and total(rows, 'actor/pg_clipfrac') > 0
    assert all(row['actor/trust_narrowed'] < 0.05 for row in rows if not row['bapo/lag'])  # only rounding errors


def gapo_acted(rows):
    """All tokens but those of the only right response of a group have a lower upper end than clip_high; and the clip acts."""
    assert all(0.5 < row['actor/trust_narrowed'] <= 1 for row in rows) and min(row['actor/trust_narrowed'] for row in rows) < 1
    assert total(rows, 'actor/pg_clipfrac') > 0


def areal_acted(rows):
    assert max(row['staleness/max'] for row in rows) >= 3 and max(row['rollout/unfinished'] for row in rows) > 0


def kimi_acted(rows):
    """Responses are continued, and shorter ones are worth more."""
    assert max(row['rollout/unfinished'] for row in rows) > 0
    judged = [row for row in rows if np.isfinite(row['critic/score/mean'])]
    assert max(abs(row['critic/rewards/mean'] - row['critic/score/mean']) for row in judged) > 0.001


def dots_acted(rows):
    """Half of each batch is replayed from step 2 on; every second step asks references, which are not trained on unless chosen."""
    assert all(row['bapo/x1_groups'] == 4 for row in rows) and [row.get('bapo/replay_groups', 0) for row in rows] == [0, *[4] * 19]
    asked = np.diff([0, *(row['rollout/responses_total'] for row in rows)]) // 4
    assert (asked[::2] > 4).all() and (asked[::2] <= 28).all() and (asked[1::2] == 4).all()
    assert total(rows, 'bapo/discarded/filtered') == sum(asked) - 80
    assert 1 <= rows[-1]['bapo/replay/age'] <= 2 and rows[-1]['buffer/rollout_replay/groups'] == 8
    assert any(a['prompts/predicted'] != b['prompts/predicted'] for a, b in zip(rows[::2], rows[1::2]))  # they differ by prompt


def adaprefix_acted(rows):
    """Prefixes are given until they are withdrawn between steps 12 and 16, and follow the success."""
    assert all(row['prompts/prefixed'] > 3 for row in rows[:12]) and all(row['prompts/prefixed'] == 0 for row in rows[15:])
    given = [row['prompts/given_share'] for row in rows]
    assert given[11] > given[12] > given[13] > given[14] > given[15] == 0 and len(set(given[:12])) > 4


# Row -> (changes that let its parts act within 20 steps, what must have acted, of the rows of metrics.jsonl).
ROWS = {
    'f_grpo': ({}, f_grpo_acted),
    'dppo': ({'learner__clip_low': 1e-3, 'learner__clip_high': 1e-3, 'learner__learning_rate': 1e-2}, dppo_acted),
    'm2po': ({'rollout__sync_every': 5, 'learner__trust__moment': 1e-4, 'learner__learning_rate': 2e-3}, m2po_acted),
    'sat': (
        {'rollout__sync_every': 8, 'learner__clip_low': 0.02, 'learner__clip_high': 0.02, 'learner__learning_rate': 1e-3},
        sat_acted,
    ),
    'gapo': ({'learner__learning_rate': 2e-3}, gapo_acted),
    'areal': ({'rollout__most_behind': 2, 'rollout__step_share': 0.6}, areal_acted),
    'kimi': ({'rollout__step_share': 0.6}, kimi_acted),
    'arpo': ({'task__limit': 16}, arpo_acted),
    'luffy': ({}, luffy_acted),
    'relift': ({'replay__traces__demonstrations': 2}, relift_acted),
    'adaprefix': ({'task__limit': 16}, adaprefix_acted),
    'dots': ({'prompts__dots__references': 24, 'prompts__dots__embeddings': str(ROOT / 'configs' / 'quickstart_base')}, dots_acted),
    'fifo': ({'replay__fifo__ratio': 2, 'replay__fifo__capacity': 24}, fifo_acted),
    'freshper': ({'replay__freshper__capacity': 80, 'replay__freshper__tau': 5.0}, freshper_acted),
    'exgrpo': ({'task__limit': 16, 'replay__exgrpo__start_above': 0.25}, exgrpo_acted),
}


def test_no_row_is_forgotten():
    assert ROWS.keys() == set(LONGER)


@pytest.mark.parametrize('method', ROWS)
def test_twenty_steps_with_a_resume(method, tiny_base, tmp_path):  # noqa: F811
    changes, acted = ROWS[method]
    whole, again = tmp_path / 'whole', tmp_path / 'again'

    def config():
        made = row_config(method, tiny_base)
        made.steps, made.checkpoint.every, made.log.theory_every, made.log.rollouts_every = 20, 13, 0, 0
        made.update_from_flattened_dict({name.replace('__', '.'): value for name, value in changes.items()})
        return made

    run(config(), whole)
    assert_sound(whole, 20)
    rows = metrics(whole)
    acted(rows[1:])
    # As if killed before step 20 was saved; stopping by a signal, which no row has a part in, is test_train.py's.
    shutil.copytree(whole, again)
    shutil.rmtree(again / 'checkpoints' / '20')
    assert run(config(), again).step == 20
    assert metrics(again) == rows
    starts = json.loads((again / 'config.json').read_text('utf-8'))['starts']
    assert [start['step'] for start in starts] == [0, 13]
