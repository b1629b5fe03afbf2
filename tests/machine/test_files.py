"""Files are there whole or not at all, and a part of a page is replaced alone."""

import os
from pathlib import Path

import pytest

from bapo_jax.machine.files import check_directory, replace_part, write_bytes, write_text


def test_text_is_utf_8_and_replaces_what_was_there(tmp_path):
    file = tmp_path / 'a.txt'
    write_text(file, 'old')
    write_text(file, 'π_θ …\n')
    assert file.read_bytes() == 'π_θ …\n'.encode()
    assert [f.name for f in tmp_path.iterdir()] == ['a.txt']


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    file, whole = tmp_path / 'a', Path.write_bytes
    write_bytes(file, b'old')

    def full_disk(path, data):
        whole(path, data[:3])
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(Path, 'write_bytes', full_disk)
    with pytest.raises(OSError, match='No space left'):
        write_bytes(file, b'new and longer')
    monkeypatch.undo()
    assert file.read_bytes() == b'old'
    write_bytes(file, b'new')  # what the failed write left behind is in nobody's way
    assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [('a', b'new')]


@pytest.mark.parametrize('name', ['file', 'file/deep/er', 'link/deep'])
def test_a_file_in_the_way_of_a_directory_is_named_with_the_flag(tmp_path, name):
    (tmp_path / 'file').write_text('mine')
    (tmp_path / 'link').symlink_to(tmp_path / 'nowhere')
    with pytest.raises(NotADirectoryError, match=rf'--output={tmp_path}/{name}: {tmp_path}/(file|link) is not a directory; give'):
        check_directory(tmp_path / name, '--output')
    check_directory(tmp_path / 'new' / 'deep', '--output')
    assert not (tmp_path / 'new').exists()


PAGE = '# Title\n\n<!-- rows -->\nold\n<!-- /rows -->\n\n<!-- others -->\nmine\n<!-- /others -->\n'


def test_a_part_of_a_page_is_replaced_and_the_rest_stays(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text(PAGE)
    replace_part(page, 'rows', 'new\nrows\n')
    assert page.read_text() == PAGE.replace('old\n', 'new\nrows\n')
    replace_part(page, 'rows', 'old\n')
    assert page.read_text() == PAGE


@pytest.mark.parametrize('spoiled', [PAGE.replace('<!-- rows -->\n', ''), PAGE.replace('<!-- /rows -->', ''), ''])
def test_a_page_without_the_part_is_refused_and_left_alone(tmp_path, spoiled):
    page = tmp_path / 'page.md'
    page.write_text(spoiled)
    with pytest.raises(ValueError, match="page.md has no part 'rows'; put <!-- rows --> and <!-- /rows -->"):
        replace_part(page, 'rows', 'new\n')
    assert page.read_text() == spoiled


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
