"""The table of fields: its checks, and what is read off it."""

import math

import pytest
from ml_collections import ConfigDict

from bapo_jax.config import default_config, fields_of_a_host, fields_that, rows, value
from bapo_jax.config.earlier import MOVED, as_now
from bapo_jax.config.field import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, SWITCH, Change, one_of, share


@pytest.mark.parametrize(
    ('check', 'sound', 'unsound', 'wrong'),
    [
        (AT_LEAST_1, 1, 0, 'must be at least 1'),
        (NOT_NEGATIVE, 0, -1, 'must be finite and not negative'),
        (NOT_NEGATIVE, 0.0, math.nan, 'must be finite and not negative'),
        (POSITIVE, 0.5, 0.0, 'must be positive and finite'),
        (POSITIVE, 0.5, math.inf, 'must be positive and finite'),
        (SWITCH, False, 0, 'must be True or False'),
        (share('a rate'), 0.0, 1.0, 'must be in [0, 1): a rate'),
        (share('', 'in (0, 1]'), 1.0, 0.0, 'must be in (0, 1]'),
        (one_of('x', 'y'), 'x', 'z', 'is unknown; choose one of x, y'),
    ],
)
def test_a_check_holds_or_says_what_is_wrong(check, sound, unsound, wrong):
    assert check.holds(sound) and not check.holds(unsound) and check.wrong == wrong


def test_every_default_is_what_its_check_wants_once_it_is_derived():
    """0 stands for 'derive it' in fields that must be at least 1."""
    wrong = [name for name, row in rows() if not row.check.holds(row.default)]
    assert wrong == [name for name, row in rows() if row.default == 0 and row.check is AT_LEAST_1]


def test_each_field_has_a_row_with_a_comment_and_the_config_has_those_rows():
    flat = dict(rows())
    assert all(row.comment and not row.comment.endswith('.') for row in flat.values())
    config = default_config()
    assert {name: value(config, name) for name in flat} == {name: row.default for name, row in flat.items()}
    assert sorted(name for change in Change for name in fields_that(change)) == sorted(flat)
    assert set(fields_of_a_host()) < set(flat)


def test_there_are_at_most_135_names_a_sub_table_being_one():
    names = {'.'.join(name.split('.')[:2]) for name, _ in rows()}
    assert len(names) <= 135


def test_a_field_is_found_by_its_dotted_name_and_an_unknown_one_is_an_error():
    c = ConfigDict({'a': {'b': {'c': (1, 2)}}})
    assert value(c, 'a.b.c') == (1, 2)
    with pytest.raises(KeyError, match='d'):
        value(c, 'a.b.d')


def test_what_an_earlier_version_wrote_has_the_names_of_this_one():
    fields = dict(rows())
    assert all(now in fields for now in MOVED.values()) and not MOVED.keys() & fields.keys()
    before = {
        'seed': 3, 'rollouts': {'every': 7}, 'rollout': {'mixture': 0.4, 'mixture_policies': 2, 'top_p': 1.0, 'top_k': -1,
                                                         'sync_phase': 'code', 'reevaluation_syncs': True},
        'learner': {'shuffle': False, 'partial_mini_batch': 'keep', 'schedule': 'linear', 'adam_b1': 0.9, 'skip_limit': 5},
        'model': {'least_pixels': 0, 'most_pixels': 9}, 'critic': {'gamma': 1.0, 'gae_lambda': 0.9},
        'replay': {'shared_pool': True, 'r_tot': 'buffer', 'retrieve_count': 3},
    }  # fmt: skip
    now = {
        'seed': 3, 'log': {'rollouts_every': 7}, 'rollout': {'mixture': {'share': 0.4, 'policies': 2}, 'sync_phase': 'code'},
        'learner': {'mini_batches': 'released', 'schedule': {'kind': 'linear'}, 'adam': {'b1': 0.9}}, 'model': {'pixels': [0, 9]},
        'critic': {'gae': [1.0, 0.9]}, 'replay': {'shared_pool': True, 'retrieve_count': 3},  # a value that no field has: kept
    }  # fmt: skip
    assert as_now(before) == now == as_now(now)
    assert as_now({'rollout': 'damaged', 'learner': None, 'rollouts': {}}) == {'rollout': 'damaged', 'learner': None, 'rollouts': {}}
