"""The table of mutants is true: each text is there once, and its tests exist. `make mutants` applies them."""

import ast
from pathlib import Path

from tests.mutants.table import MUTANTS

ROOT = Path(__file__).resolve().parents[1]


def test_every_mutant_changes_one_place_of_a_file_that_stays_python():
    texts = {m.file: (ROOT / m.file).read_text('utf-8') for m in MUTANTS}
    for m in MUTANTS:
        assert texts[m.file].count(m.old) == 1, (m.file, m.old)
        assert m.new != m.old
        ast.parse(texts[m.file].replace(m.old, m.new))
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS) >= 60


def test_every_mutant_names_tests_that_exist():
    missing = {test for m in MUTANTS for test in m.tests if not (ROOT / test).is_file()}
    assert missing == set() and all(m.tests for m in MUTANTS)
    slow = {test for m in MUTANTS for test in m.tests if 'pytestmark = pytest.mark.slow' in (ROOT / test).read_text('utf-8')}
    assert slow == set()  # those are not run
