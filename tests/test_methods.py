"""The table of methods: every row is sound in every config, an ablation changes one field, and the page is the table."""

import importlib
import json

import pytest
from small_run import ROOT

from bapo_jax.methods import __main__
from bapo_jax.config import check, default_config, resolve
from bapo_jax.methods.off_policy import OFF_POLICY
from bapo_jax.methods import METHODS, apply_method, differs_from, differs_from_grpo
from bapo_jax.run.directory import differences
from docs.reference.methods import PAGE, markdown, nearest


@pytest.mark.parametrize('file', sorted(path.stem for path in (ROOT / 'configs').glob('[!_]*.py')))
@pytest.mark.parametrize('method', METHODS)
def test_every_config_file_takes_every_method_and_is_sound(file, method, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    config = importlib.import_module(f'configs.{file}').get_config(method)
    assert config.method == method
    check(resolve(config))


def test_an_ablation_differs_from_bapo_in_one_field():
    def flat(method):
        c = default_config()
        apply_method(c, method)
        return json.loads(c.to_json())

    for ablation, field in (('bapo_no_x2', 'replay.use_x2'), ('bapo_no_x3', 'replay.use_x3')):
        assert differences(flat('bapo'), flat(ablation)) == ['method', field]


def test_the_page_of_methods_is_the_table():
    assert markdown() in PAGE.read_text('utf-8')


def test_every_related_system_has_a_word_on_what_it_shares_with_bapo():
    told = PAGE.read_text('utf-8').partition('## What they share with BAPO')[2]
    assert [name for name in OFF_POLICY if f'`{name}`' not in told] == []


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r'ppo2.*\(did you mean ppo\?\)'):
        apply_method(default_config(), 'ppo2')


def test_a_row_derived_from_another_changes_the_named_fields_alone():
    row = METHODS['grpo'].but('a summary', 'a source', batch={'replay.use_x3': True}, prompts={'prompts.selector': 'mopps'})
    assert row.fields == {**METHODS['grpo'].fields, 'replay.use_x3': True, 'prompts.selector': 'mopps'}
    assert (row.summary, row.source, row.of_task) == ('a summary', 'a source', METHODS['grpo'].of_task)
    assert METHODS['grpo'].but('', '', of_task={}).of_task == {}


def test_what_the_authors_set_for_a_task_counts_for_that_task_alone():
    elsewhere, countdown = default_config(), default_config()
    apply_method(elsewhere, 'mopps')
    apply_method(countdown, 'mopps', 'countdown')
    assert (elsewhere.prompts.mopps.candidates, countdown.prompts.mopps.candidates) == (16, 8)


def test_the_page_says_what_a_row_changes_in_grpo():
    assert differs_from_grpo('grpo') == {}
    assert differs_from_grpo('grpo_v5') == {'rollout.sync_every': 5, 'learner.anchor': 'behaviour'}
    assert '| `grpo` |  | `rollout.sync_every=5` |  | `learner.anchor=behaviour` |' in markdown()
    assert '| `bapo` |  |  | `replay.use_x2=False` |  |' in markdown()


def test_the_page_names_a_row_that_with_the_changes_is_the_method():
    for name, row in METHODS.items():
        other = nearest(name)
        assert {**METHODS[other].fields, **differs_from(name, other)} == row.fields
        assert other != name or name == 'grpo'
    assert [nearest(name) for name in ('bapo', 'bapo_tuned', 'bapo_guarded')] == ['grpo', 'bapo', 'bapo_tuned']


def test_the_command_shows_every_row_on_80_columns_and_marks_what_differs_from_grpo(monkeypatch, capsys):
    monkeypatch.setenv('COLUMNS', '80')
    monkeypatch.setattr('sys.argv', ['bapo-methods'])
    __main__.run()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in METHODS] == list(METHODS) and max(map(len, lines)) <= 80
    assert '  how it learns         anchor=proximal *kl_target=none *advantage=over_mean' in lines
    assert any('*c2=(0.5,0.125) ' in line for line in lines)
