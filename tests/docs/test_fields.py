"""The page of fields is the table of fields."""

from bapo_jax.config import rows
from docs.reference.fields import PAGE, markdown


def test_the_page_is_the_table():
    assert f'<!-- fields -->\n{markdown()}<!-- /fields -->' in PAGE.read_text('utf-8')


def test_every_field_has_a_line():
    page = PAGE.read_text('utf-8')
    assert [name for name, _ in rows() if f'| `{name}` | ' not in page] == []
