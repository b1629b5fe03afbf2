"""A run directory belongs to one run: its config, data, tokenizer and model."""

import json

import numpy as np
import pytest

from bapo_jax.config import default_config
from bapo_jax.groups import Prompt
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.run.directory import (
    AMENDABLE, FREE_TO_CHANGE, OF_A_HOST, _flat, claim, fingerprint_prompts, fingerprint_tokenizer, in_words,
)  # fmt: skip

PRINTS = {'dataset': 'd', 'tokenizer': 't', 'model': {'layers': 2}}
HERE = {'devices': '2 cpu', 'jax': '0.10.2'}


def config(**changes):
    c = default_config()
    c.update_from_flattened_dict({name.replace('__', '.'): value for name, value in changes.items()})
    return c


def test_a_new_directory_is_claimed_with_the_resolved_config(tmp_path):
    claim(tmp_path / 'deep' / 'run', config(seed=5), PRINTS, HERE)
    written = json.loads((tmp_path / 'deep' / 'run' / 'config.json').read_text())
    assert written['seed'] == 5 and written['replay']['c2'] == [0.5, 0.125] and written['fingerprints'] == PRINTS


def test_the_same_run_may_claim_it_again_also_with_what_is_free_to_change(tmp_path):
    claim(tmp_path, config(), PRINTS, HERE)
    free = {'steps': 7, 'checkpoint__every': 3, 'rollout__overlap': True, 'learner__remat': 'full', 'model__path': 'moved'}
    assert claim(tmp_path, config(**free), PRINTS, HERE | {'devices': '1 cpu'}) == {
        'steps': (0, 7), 'checkpoint.every': (20, 3), 'rollout.overlap': (False, True), 'learner.remat': ('none', 'full'),
        'model.path': ('', 'moved'), 'environment.devices': ('2 cpu', '1 cpu'),
    }  # fmt: skip
    assert json.loads((tmp_path / 'config.json').read_text())['steps'] == 7
    assert claim(tmp_path, config(**free), PRINTS, HERE | {'devices': '1 cpu'}) == {}


def test_what_acts_from_step_to_step_is_changed_on_purpose(tmp_path):
    claim(tmp_path, config(), PRINTS, HERE)
    other = config(learner__learning_rate=5e-7, rollout__sync_every=1)
    with pytest.raises(ValueError, match='or --amend to change learner.learning_rate, rollout.sync_every from here on'):
        claim(tmp_path, other, PRINTS, HERE)
    changed = {'learner.learning_rate': (1e-6, 5e-7), 'rollout.sync_every': (5, 1)}
    assert claim(tmp_path, other, PRINTS, HERE, amend=True) == changed
    with pytest.raises(ValueError, match=r'differ in seed\. Give another --workdir, or the settings of that run$'):
        claim(tmp_path, config(seed=1, learner__learning_rate=1e-6), PRINTS, HERE, amend=True)


def test_a_run_of_a_version_without_a_field_is_continued_on_purpose(tmp_path):
    claim(tmp_path, config(), PRINTS, HERE)
    path = tmp_path / 'config.json'
    written = json.loads(path.read_text())
    del written['replay']['bad_capacity'], written['learner']['grad_clip']
    path.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r'learner\.grad_clip, replay\.bad_capacity\. .*or --amend to change learner\.grad_clip, replay'):
        claim(tmp_path, config(), PRINTS, HERE)
    changed = {'learner.grad_clip': (None, 1.0), 'replay.bad_capacity': (None, 0)}
    assert claim(tmp_path, config(), PRINTS, HERE, amend=True) == changed
    del written['fingerprints']['dataset']
    path.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r'differ in fingerprints\.dataset\. Give another --workdir'):
        claim(tmp_path, config(), PRINTS, HERE, amend=True)


@pytest.mark.parametrize(
    ('field', 'may_differ'),
    [
        ('steps', False), ('checkpoint.every', False), ('rollout.overlap', False), ('environment.devices', True),
        ('mesh.data', True), ('learner.micro_batch_rows', True), ('learner.learning_rate', True),
    ],
)  # fmt: skip
def test_a_change_says_that_numbers_may_differ_where_they_may(field, may_differ):
    assert in_words({'steps': (1, 2), field: (3, 4)}).endswith(f'{field} 3 → 4' + '. Numbers may differ from here on' * may_differ)


def test_every_name_in_the_lists_is_a_field_or_a_section():
    fields = [*_flat(config().to_dict()), 'environment.x', 'hub.owner/name']
    for names in (FREE_TO_CHANGE, AMENDABLE, OF_A_HOST):
        assert [name for name in names if not any(f == name or f.startswith(f'{name}.') for f in fields)] == []
    assert not [name for name in AMENDABLE if name in FREE_TO_CHANGE]


@pytest.mark.parametrize('text', ['', '{"seed": 1', '[]', 'null', '[' * 100_000])
def test_a_damaged_config_is_named_and_left_as_it_is(text, tmp_path):
    (tmp_path / 'config.json').write_text(text)
    with pytest.raises(ValueError, match=r'config\.json is damaged \(.*\); restore it, or give another --workdir'):
        claim(tmp_path, config(), PRINTS, HERE)
    assert (tmp_path / 'config.json').read_text() == text


def test_checkpoints_without_a_config_are_nobodys(tmp_path):
    (tmp_path / 'checkpoints' / '20').mkdir(parents=True)
    with pytest.raises(ValueError, match='has checkpoints and no config.json; restore that file'):
        claim(tmp_path, config(), PRINTS, HERE)
    assert not (tmp_path / 'config.json').exists()


def test_a_damaged_row_of_metrics_is_named_before_anything_is_written(tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 0\n')
    with pytest.raises(ValueError, match='line 1 is damaged'):
        claim(tmp_path, config(), PRINTS, HERE)
    assert not (tmp_path / 'config.json').exists()


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
    claim(tmp_path, config(), PRINTS, HERE)
    before = (tmp_path / 'config.json').read_text()
    with pytest.raises(ValueError, match=named + ' Give another --workdir'):
        claim(tmp_path, config(**changes), PRINTS | prints, HERE)
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
