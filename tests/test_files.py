"""A file is there whole or not at all."""

import os

import pytest

from bapo_jax.files import replace_part, write_bytes, write_text


def test_a_file_is_replaced_by_what_is_written(tmp_path):
    for text in ('first', 'second: θ\n', ''):
        write_text(tmp_path / 'x.txt', text)
        assert (tmp_path / 'x.txt').read_bytes() == text.encode()
    write_bytes(tmp_path / 'y.bin', b'\x00\xff')
    assert (tmp_path / 'y.bin').read_bytes() == b'\x00\xff'
    assert sorted(p.name for p in tmp_path.iterdir()) == ['x.txt', 'y.bin']


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path, monkeypatch):
    write_text(tmp_path / 'x.txt', 'old')

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, 'replace', killed)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / 'x.txt', 'new')
    assert (tmp_path / 'x.txt').read_text() == 'old'


def test_a_part_of_a_page_is_replaced_and_the_rest_stays(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text('above\n<!-- table -->\nold\nlines\n<!-- /table -->\nbelow\n')
    replace_part(page, 'table', 'new\n')
    assert page.read_text() == 'above\n<!-- table -->\nnew\n<!-- /table -->\nbelow\n'
    before = page.read_text()
    with pytest.raises(ValueError, match="has no part 'figure'; put <!-- figure -->"):
        replace_part(page, 'figure', 'new\n')
    assert page.read_text() == before
