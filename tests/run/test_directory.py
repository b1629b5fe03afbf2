"""A run directory belongs to one run: its config, data, tokenizer and model."""

import json

import numpy as np
import pytest

from bapo_jax.config import default_config
from bapo_jax.groups import Prompt
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.run.directory import claim, fingerprint_prompts, fingerprint_tokenizer

PRINTS = {'dataset': 'd', 'tokenizer': 't', 'model': {'layers': 2}}


def config(**changes):
    c = default_config()
    c.update_from_flattened_dict({name.replace('__', '.'): value for name, value in changes.items()})
    return c


def test_a_new_directory_is_claimed_with_the_resolved_config(tmp_path):
    claim(tmp_path / 'deep' / 'run', config(seed=5), PRINTS)
    written = json.loads((tmp_path / 'deep' / 'run' / 'config.json').read_text())
    assert written['seed'] == 5 and written['replay']['c2'] == [0.5, 0.125] and written['fingerprints'] == PRINTS


def test_the_same_run_may_claim_it_again_also_with_what_is_free_to_change(tmp_path):
    claim(tmp_path, config(), PRINTS)
    claim(tmp_path, config(steps=7, checkpoint__every=3, rollout__overlap=True), PRINTS)
    assert json.loads((tmp_path / 'config.json').read_text())['steps'] == 7


@pytest.mark.parametrize(
    'changes, prints, named',
    [
        ({'seed': 1, 'replay__c1': 0.25}, {}, r'differ in replay\.c1, seed\.'),
        ({}, {'dataset': 'other'}, r'differ in fingerprints\.dataset\.'),
        ({}, {'tokenizer': 'other'}, r'differ in fingerprints\.tokenizer\.'),
        ({}, {'model': {'layers': 3}}, r'differ in fingerprints\.model\.layers\.'),
    ],
)
def test_another_run_is_refused_naming_what_differs_and_leaves_it_as_it_is(changes, prints, named, tmp_path):
    claim(tmp_path, config(), PRINTS)
    before = (tmp_path / 'config.json').read_text()
    with pytest.raises(ValueError, match=named + ' Give another --workdir'):
        claim(tmp_path, config(**changes), PRINTS | prints)
    assert (tmp_path / 'config.json').read_text() == before


def test_a_fingerprint_is_of_tokens_and_their_order():
    def prompts(*rows):
        return [Prompt(i, 'countdown', np.array(row, np.int32), {}) for i, row in enumerate(rows)]

    same = fingerprint_prompts(prompts([1, 2], [3]))
    assert same == fingerprint_prompts(prompts([1, 2], [3]))
    others = ([[3], [1, 2]], [[1], [2, 3]], [[1, 2]], [[1, 2], [4]])
    assert len({same, *(fingerprint_prompts(prompts(*rows)) for rows in others)}) == 5


def test_a_tokenizers_fingerprint_is_of_its_vocabulary():
    a = character_tokenizer('a template')
    same = fingerprint_tokenizer(a)
    assert same == fingerprint_tokenizer(character_tokenizer('another template'))
    a.add_tokens(['<one more>'])
    assert fingerprint_tokenizer(a) != same
