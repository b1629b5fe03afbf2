"""The pages are true where that can be read off: links lead somewhere, quoted messages exist, the first page is short."""

import ast
import re

import pytest
from small_run import ROOT

PAGES = sorted([*ROOT.glob('*.md'), *(ROOT / 'docs').glob('*.md')])
LINK = re.compile(r'\]\((?!https?://|#)([^)#\s]+)')


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    missing = [target for target in LINK.findall(page.read_text('utf-8')) if not (page.parent / target).exists()]
    assert not missing


def text_of(node):
    """The text of a string in the source, with an ellipsis for each value that is put in; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return ''.join(part.value if isinstance(part, ast.Constant) else '…' for part in node.values)
    return None


def test_quoted_errors_are_messages_of_the_package():
    trees = [ast.parse(file.read_text('utf-8')) for file in (ROOT / 'bapo_jax').rglob('*.py')]
    texts = [text for tree in trees for node in ast.walk(tree) if (text := text_of(node))]
    rows = re.findall(r'^\| `(.+?)` \|', (ROOT / 'docs' / 'errors.md').read_text('utf-8'), re.MULTILINE)
    assert len(rows) > 40
    # What varies may be a value, or text that the source puts in by another road.
    unknown = [row for row in rows if not any(re.search('.*'.join(map(re.escape, row.split('…'))), text) for text in texts)]
    assert not unknown


def test_the_first_page_is_short():
    assert len((ROOT / 'README.md').read_text('utf-8').splitlines()) <= 80
