"""A run directory belongs to one run: its config, data, tokenizer and model."""

import json
import re

import numpy as np
import pytest
from claims import claim
from ml_collections import ConfigDict

from bapo_jax.config import default_config, fields_of_a_host
from bapo_jax.groups import Prompt
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.run import directory
from bapo_jax.run.directory import (
    AMENDABLE,
    FREE_TO_CHANGE,
    _flat,
    changes_in_words,
    fingerprint_answers,
    fingerprint_prompts,
    fingerprint_tokenizer,
    read_run_config,
    settings_of,
)  # fmt: skip

PRINTS = {
    'dataset': 'd', 'answers': 'a', 'benchmarks': {'/data/b.jsonl': 'b'}, 'code': {'my.rewards': 'c'}, 'tokenizer': 't',
    'special_tokens': [1, 2], 'stop_tokens': [2], 'model': {'layers': 2},
}  # fmt: skip
HERE = {'devices': '2 cpu', 'jax': '0.10.2'}


def config(**changes):
    c = default_config()
    c.update_from_flattened_dict({name.replace('__', '.'): value for name, value in changes.items()})
    return c


def test_a_new_directory_is_claimed_with_the_resolved_config(tmp_path):
    claim(tmp_path / 'deep' / 'run', config(seed=5), PRINTS, HERE)
    written = json.loads((tmp_path / 'deep' / 'run' / 'config.json').read_text())
    assert written['seed'] == 5 and written['replay']['c2'] == [0.5, 0.125] and written['fingerprints'] == PRINTS


def test_a_start_that_fails_after_its_claim_leaves_the_settings(tmp_path):
    """So the next start names the change again."""
    claim(tmp_path, config(), PRINTS, HERE)
    before = (tmp_path / 'config.json').read_bytes()
    changed = {'learner.learning_rate': (1e-6, 1e-5)}
    for _ in range(2):
        assert directory.claim(tmp_path, config(learner__learning_rate=1e-5), PRINTS, HERE, amend=True).changed == changed
        assert (tmp_path / 'config.json').read_bytes() == before


def test_the_settings_of_a_run_are_a_config_whatever_its_files_are_called(tmp_path):
    claim(tmp_path, config(seed=5), PRINTS, HERE, commits={'owner/Name2.5': 'c'})
    settings = ConfigDict(settings_of(read_run_config(tmp_path / 'config.json')))  # refuses names with a dot
    assert settings.to_dict() == json.loads(json.dumps(config(seed=5).to_dict()))


def test_the_same_run_may_claim_it_again_also_with_what_is_free_to_change(tmp_path):
    claim(tmp_path, config(), PRINTS, HERE)
    free = {'steps': 7, 'checkpoint__every': 3, 'rollout__overlap': True, 'learner__remat': 'full', 'model__path': 'moved'}
    assert claim(tmp_path, config(**free), PRINTS, HERE | {'devices': '1 cpu'}) == {
        'steps': (0, 7), 'checkpoint.every': (20, 3), 'rollout.overlap': (False, True), 'learner.remat': ('none', 'full'),
        'model.path': ('', 'moved'), 'environment.devices': ('2 cpu', '1 cpu'),
    }  # fmt: skip
    assert json.loads((tmp_path / 'config.json').read_text())['steps'] == 7
    assert claim(tmp_path, config(**free), PRINTS, HERE | {'devices': '1 cpu'}) == {}


def test_names_that_differ_are_whole_and_the_rest_is_counted(tmp_path):
    (tmp_path / 'config.json').write_text('{}')
    with pytest.raises(ValueError) as raised:
        claim(tmp_path, config(), PRINTS, HERE)
    names = re.search(r'they differ in (.*) and (\d+) more\. Give another', str(raised.value))
    fields = _flat(config().to_dict() | {'fingerprints': PRINTS})
    assert set(names[1].split(', ')) <= fields.keys() and int(names[2]) > 0


def test_what_acts_from_step_to_step_is_changed_on_purpose(tmp_path):
    claim(tmp_path, config(), PRINTS, HERE)
    other = config(learner__learning_rate=5e-7, rollout__sync_every=1)
    with pytest.raises(ValueError, match='or --amend to change learner.learning_rate, rollout.sync_every from here on'):
        claim(tmp_path, other, PRINTS, HERE)
    changed = {'learner.learning_rate': (1e-6, 5e-7), 'rollout.sync_every': (5, 1)}
    assert claim(tmp_path, other, PRINTS, HERE, amend=True) == changed
    with pytest.raises(ValueError, match=r'differ in seed\. Give another --workdir, or the settings of that run$'):
        claim(tmp_path, config(seed=1, learner__learning_rate=1e-6), PRINTS, HERE, amend=True)


@pytest.mark.parametrize(('field', 'value'), [
    ('learner__adam__first_moment_dtype', 'bfloat16'), ('rollout__mixture__share', 0.5), ('replay__repo__retrieve', 'all'),
])  # fmt: skip
def test_a_field_of_a_sub_table_that_a_run_is_held_to_is_not_amended(tmp_path, field, value):
    claim(tmp_path, config(), PRINTS, HERE)
    name = field.replace('__', '.')
    with pytest.raises(ValueError, match=rf'differ in {name}\. Give another --workdir, or the settings of that run$'):
        claim(tmp_path, config(**{field: value}), PRINTS, HERE, amend=True)


def test_a_run_of_an_earlier_version_goes_on_with_the_new_names(tmp_path):
    claim(tmp_path, config(), PRINTS, HERE)
    path = tmp_path / 'config.json'
    written = json.loads(path.read_text())
    adam, schedule = written['learner'].pop('adam'), written['learner'].pop('schedule')
    written['learner'] |= {'adam_b1': adam['b1'], 'adam_b2': adam['b2'], 'adam_eps': adam['eps'], 'schedule': schedule['kind'], 'skip_limit': 5,
                           'first_moment_dtype': adam['first_moment_dtype'], 'warmup_updates': 0, 'decay_updates': 0, 'final_share': 0.1}  # fmt: skip
    path.write_text(json.dumps(written))
    assert claim(tmp_path, config(), PRINTS, HERE) == {'learner.adam.on_host': (None, False)}  # new since
    written['learner']['final_share'] = 0.5
    path.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r'differ in learner\.final_share\.'):
        claim(tmp_path, config(), PRINTS, HERE, amend=True)


def test_a_run_of_a_version_without_a_field_continues_at_its_default_and_on_purpose_at_another_value(tmp_path):
    claim(tmp_path, config(), PRINTS, HERE)
    path = tmp_path / 'config.json'
    written = json.loads(path.read_text())
    del written['replay']['bad_capacity'], written['learner']['grad_clip']
    path.write_text(json.dumps(written))
    other = config(learner__grad_clip=2.0, replay__bad_capacity=7)
    with pytest.raises(ValueError, match=r'learner\.grad_clip, replay\.bad_capacity\. .*or --amend to change learner\.grad_clip, replay'):
        claim(tmp_path, other, PRINTS, HERE)
    assert claim(tmp_path, other, PRINTS, HERE, amend=True) == {'learner.grad_clip': (None, 2.0), 'replay.bad_capacity': (None, 7)}
    path.write_text(json.dumps(written))
    assert claim(tmp_path, config(), PRINTS, HERE) == {'learner.grad_clip': (None, 1.0), 'replay.bad_capacity': (None, 0)}
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
    assert changes_in_words({'steps': (1, 2), field: (3, 4)}).endswith(f'{field} 3 → 4' + '. Results may differ from here on' * may_differ)


def test_every_name_in_the_lists_is_a_field_or_a_section():
    fields = [*_flat(config().to_dict()), *_flat({'fingerprints': PRINTS}), 'environment.x', 'hub.owner/name']
    for names in (FREE_TO_CHANGE, AMENDABLE, fields_of_a_host()):
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
    with pytest.raises(ValueError, match='has checkpoints but no config.json; restore that file'):
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
        ({}, {'answers': 'other'}, r'differ in fingerprints\.answers\.'),
        ({}, {'stop_tokens': [1]}, r'differ in fingerprints\.stop_tokens\.'),
        ({}, {'special_tokens': [1]}, r'differ in fingerprints\.special_tokens\.'),
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


@pytest.mark.parametrize('name, file, said', [
    ('answers', 'a', r'answers: the answers of task\.train=/data/train\.jsonl$'),
    ('dataset', 'a', r'dataset: the questions of task\.train=/data/train\.jsonl$'),
    ('stop_tokens', [3], r'stop_tokens: files of model\.path=/data/base$'),
    ('benchmarks', {'/data/b.jsonl': 'other'}, r'--amend to change .*b\.jsonl: questions and answers of a benchmark; give a changed benchmark'),
    ('code', {'my.rewards': 'other'}, r'--amend to change .*my\.rewards: the source of one of your modules$'),
])  # fmt: skip
def test_a_file_that_has_changed_is_named_with_what_may_be_restored(name, file, said, tmp_path):
    ours = config(task__train='/data/train.jsonl', model__path='/data/base')
    claim(tmp_path, ours, PRINTS | {'answers': 'x', 'dataset': 'x'}, HERE)
    with pytest.raises(ValueError, match=r'restore what was changed: fingerprints\.' + said if name not in ('benchmarks', 'code') else said):
        claim(tmp_path, ours, PRINTS | {'answers': 'x', 'dataset': 'x'} | {name: file}, HERE)


def test_a_benchmark_may_come_and_go_and_must_be_the_same_when_it_is_back(tmp_path):
    def once(benchmarks, **options):
        return claim(tmp_path, config(), PRINTS | {'benchmarks': benchmarks}, HERE, **options)

    once({'b.jsonl': '1'})
    assert once({'b.jsonl': '1', 'aime24': '2'}) == {'fingerprints.benchmarks.aime24': (None, '2')}
    assert once({'aime24': '2'}) == {} == once({})
    with pytest.raises(ValueError, match=r'differ in fingerprints\.benchmarks\.b\.jsonl\. '):
        once({'b.jsonl': '3'})
    assert once({'b.jsonl': '3'}, amend=True) == {'fingerprints.benchmarks.b.jsonl': ('1', '3')}


def test_a_run_that_began_without_these_fingerprints_goes_on_with_them_and_says_so_once(tmp_path):
    claim(tmp_path, config(), {name: PRINTS[name] for name in ('dataset', 'tokenizer', 'model')}, HERE)
    changed = claim(tmp_path, config(), PRINTS, HERE)
    names = ['answers', 'benchmarks./data/b.jsonl', 'code.my.rewards', 'special_tokens', 'stop_tokens']
    assert list(changed) == [f'fingerprints.{name}' for name in names]
    assert changes_in_words(changed) == ', '.join(f'fingerprints.{name} (recorded from here on)' for name in names)
    assert claim(tmp_path, config(), PRINTS, HERE) == {}
    with pytest.raises(ValueError, match=r'differ in fingerprints\.answers\.'):
        claim(tmp_path, config(), PRINTS | {'answers': 'other'}, HERE)


def test_a_fingerprint_of_answers_is_of_what_judges_and_of_images_wherever_they_lie():
    def answers(*truths):
        return fingerprint_answers([Prompt(i, 'math', np.zeros(1, np.int32), truth) for i, truth in enumerate(truths)])

    def seen(file, sha256='0a'):
        return {'answers': ['2'], 'images': [{'file': file, 'sha256': sha256}]}

    two, three = {'problem': 'p', 'answers': ['2']}, {'problem': 'p', 'answers': ['3']}
    assert len({answers(two), answers(three), answers(two, three), answers(three, two), answers(seen('a.png'))}) == 5
    assert answers(two) == answers({'answers': ['2'], 'problem': 'p'}) and answers('2') != answers(['2'])
    assert answers(seen('a.png')) == answers(seen('/moved/a.png')) != answers(seen('a.png', '0b'))


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
