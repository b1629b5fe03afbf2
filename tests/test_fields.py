"""The checks of fields: each notes its problem by the field's dotted name and goes on."""

import pytest
from ml_collections import ConfigDict

from bapo_jax.fields import at_least_one, not_negative, one_of, positive, value


@pytest.fixture
def noted():
    """A function of a check, a value and further arguments: the problems noted of field a.b with that value."""

    def problems(check, x, *args):
        messages = []
        check(lambda condition, message: condition or messages.append(message), ConfigDict({'a': {'b': x}}), 'a.b', *args)
        return messages

    return problems


@pytest.mark.parametrize(
    ('check', 'sound', 'unsound', 'problem'),
    [
        (at_least_one, 1, 0, 'a.b=0 must be at least 1'),
        (not_negative, 0, -1, 'a.b=-1 must be finite and not negative'),
        (not_negative, 0.0, float('nan'), 'a.b=nan must be finite and not negative'),
        (positive, 0.5, 0.0, 'a.b=0.0 must be positive and finite'),
        (positive, 0.5, float('inf'), 'a.b=inf must be positive and finite'),
    ],
)
def test_a_number_out_of_bounds_is_noted_with_its_field(noted, check, sound, unsound, problem):
    assert noted(check, sound) == []
    assert noted(check, unsound) == [problem]


def test_a_value_that_is_no_choice_is_noted_with_the_choices(noted):
    assert noted(one_of, 'x', ('x', 'y')) == []
    assert noted(one_of, 'z', ('x', 'y')) == ["a.b='z' is unknown; choose one of x, y"]
    assert noted(one_of, 3, {1: 'one', 2: 'two'}) == ['a.b=3 is unknown; choose one of 1, 2']


def test_every_field_of_a_check_is_looked_at():
    messages, c = [], ConfigDict({'a': 0, 'b': 1, 'c': {'d': -3}})
    at_least_one(lambda condition, message: condition or messages.append(message), c, 'a', 'b', 'c.d')
    assert messages == ['a=0 must be at least 1', 'c.d=-3 must be at least 1']


def test_a_field_is_found_by_its_dotted_name_and_an_unknown_one_is_an_error():
    c = ConfigDict({'a': {'b': {'c': (1, 2)}}})
    assert value(c, 'a.b.c') == (1, 2)
    with pytest.raises(KeyError, match='d'):
        value(c, 'a.b.d')
