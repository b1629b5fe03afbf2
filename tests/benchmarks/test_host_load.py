"""The host's benchmark at a small size: every part runs on what the part before made."""

import pytest

from bapo_jax.models.tokenizer import character_tokenizer
from benchmarks import host_load


@pytest.mark.slow
def test_every_part_has_a_row_and_the_verifier_finds_the_answers_that_were_written():
    parts = host_load.measure(4, character_tokenizer(host_load.CHAT), shortest=100, tokens=200)
    assert tuple(parts) == host_load.PARTS
    assert parts['judge'].what == '32 of 32 verdicts as they should be'
    assert parts['compose'].what.startswith('4 groups')
    assert host_load.table(parts).row_count == len(host_load.PARTS) + 3
