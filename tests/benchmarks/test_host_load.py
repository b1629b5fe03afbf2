"""The host's benchmark at a small size: every part runs on what the part before made."""

import pytest

from bapo_jax.models.tokenizer import character_tokenizer
from benchmarks.host import load


@pytest.mark.slow
def test_every_part_has_a_row_and_the_verifier_finds_the_answers_that_were_written():
    parts = load.measure(4, character_tokenizer(load.CHAT), shortest=100, tokens=200)
    assert tuple(parts) == load.PARTS
    assert parts['judge'].what == '32 of 32 verdicts as they should be'
    assert parts['compose'].what.startswith('4 groups')
    assert load.table(parts).row_count == len(load.PARTS) + 3
