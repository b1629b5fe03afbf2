"""The page of departures: made by the command, complete, and true to the config."""

import ast
import re

from bapo_jax.config import check, default_config
from bapo_jax.config import value
from docs.reference.departures import DEPARTURES, PAGE, ROWS, markdown, rows_markdown
from bapo_jax.methods import METHODS

OURS = {'bapo_tuned', 'bapo_no_x2', 'bapo_no_x3'}  # the paper's own, which the first table covers, and a study's


def settings(text: str) -> list[tuple[str, str]]:
    """(field, value) of every `field=value` in backticks. Raises AssertionError for other words in backticks."""
    quoted = re.findall('`([^`]*)`', text)
    assert all('=' in q for q in quoted), text
    return [tuple(q.split('=', 1)) for q in quoted]


def test_the_page_is_what_the_command_makes():
    page = PAGE.read_text('utf-8')
    assert f'<!-- paper and code -->\n{markdown()}<!-- /paper and code -->' in page
    assert f'<!-- rows -->\n{rows_markdown()}<!-- /rows -->' in page


def test_every_switch_is_a_field_that_takes_the_value():
    for departure in DEPARTURES:
        for field, text in settings(departure.switch):
            config = default_config()
            default = value(config, field)  # KeyError where there is no such field
            new = text if isinstance(default, str) else ast.literal_eval(text)
            assert type(new) is type(default), (departure.topic, field)
            config.update_from_flattened_dict({field: new})
            try:
                check(config)
            except ValueError as error:  # a default config lacks a model, and one switch may need another
                assert f'{field}={new!r} is unknown' not in str(error)


def test_row_bapo_official_sets_what_is_called_the_codes():
    official = METHODS['bapo_official'].fields
    named = [s for d in DEPARTURES for part in d.switch.split('; ') if part.startswith('the code') for s in settings(part)]
    assert len(named) >= 12
    for field, text in named:
        assert str(official[field]) == text, field


def test_a_departure_has_a_switch_or_a_reason():
    for departure in DEPARTURES:
        reason = departure.switch == 'always on' or departure.switch.startswith('not offered: ')
        assert settings(departure.switch) or reason, departure


def test_every_ambiguity_and_every_quirk_is_covered():
    covered = {number for departure in DEPARTURES for number in departure.numbers.split()}
    assert covered == {f'#{i}' for i in range(1, 32)} | {f'q{i}' for i in range(1, 21)}


def test_every_row_with_a_source_is_covered():
    assert [r.row for r in ROWS][0] == 'all rows'
    assert {r.row for r in ROWS[1:]} == METHODS.keys() - OURS
    assert len(ROWS) == 1 + len(METHODS.keys() - OURS)


def test_no_cell_breaks_the_table():
    assert not any('|' in cell or '\n' in cell for row in (*DEPARTURES, *ROWS) for cell in row)
