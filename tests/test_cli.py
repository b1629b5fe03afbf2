"""What the commands share: which overrides of a config are taken."""

import pytest
from ml_collections import ConfigDict

from bapo_jax import cli

CONFIG = ConfigDict({'steps': 3, 'learner': {'learning_rate': 1e-6, 'shuffle': True}, 'rollout': {'servers': ()}})


@pytest.mark.parametrize('argument', [
    '--config.steps=1', '-config.learner.shuffle', '--config.rollout.servers[0]=x', '--config=a.py', '--workdir=config.x',
])  # fmt: skip
def test_an_override_of_a_field_is_taken(argument):
    cli.check_overrides(CONFIG, ['train.py', argument])


@pytest.mark.parametrize('argument, told', [
    ('--config.lerner.shuffle=1', '--config.lerner.shuffle: no such field; the config has learner, rollout, steps'),
    ('--config.learner.lr=1', '--config.learner.lr: no such field; learner has learning_rate, shuffle'),
    ('--config.steps.x=1', '--config.steps.x: no such field; steps has no fields'),
])  # fmt: skip
def test_an_override_of_no_field_is_told_the_fields_there_are(argument, told):
    with pytest.raises(ValueError) as raised:
        cli.check_overrides(CONFIG, ['train.py', '--config.steps=1', argument])
    assert str(raised.value) == told


def test_the_flag_checks_the_overrides_of_its_command_line(monkeypatch):
    monkeypatch.setattr('sys.argv', ['train.py', '--config.lerner.shuffle=1'])
    with pytest.raises(ValueError, match=r'--config\.lerner\.shuffle: no such field'):
        cli._Parser(name='config', lock_config=True).parse('quickstart')
