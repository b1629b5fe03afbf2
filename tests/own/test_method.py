"""Functions of the user's for a method: what is sound is used as written, and anything else is one error before training."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from group_builders import make_group
from small_run import ROOT

from bapo_jax.config import default_config, resolve
from bapo_jax.config.own_code import JUDGES, OWN_FIELDS, code_of
from bapo_jax.follow import other_code
from bapo_jax.groups import make_batch
from bapo_jax.inputs import read_inputs
from bapo_jax.learner.credit import group_advantages, group_std
from bapo_jax.learner.losses import Clip, Tokens, clipped
from bapo_jax.learner.objective import objective_of
from bapo_jax.learner.own_surrogate import surrogate_of
from bapo_jax.methods import apply_method
from bapo_jax.own.method import ARGUMENTS, BadMethod, advantage_of, own_filter
from bapo_jax.replay.filters import fresh_filter
from bapo_jax.replay.kinds import make_replay
from bapo_jax.run.start import claim_directory, in_brief
from configs import quickstart

SOUND = '''
import dataclasses
import jax
import jax.numpy as jnp
import numpy as np
from bapo_jax.groups import make_batch
from bapo_jax.replay.arrays import groups_from_arrays, groups_to_arrays

def halved(rewards):
    return (rewards - rewards.mean()) / 2

def ppo(ratio, advantage):
    return jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.28) * advantage)

def hard(rewards, accuracy):
    return rewards.max() > 0 and accuracy <= 0.5

def sometimes(rewards, accuracy):
    return accuracy

class Last:
    """Trains on the fresh groups, and once more on those of the step before."""

    buffer = None

    def __init__(self):
        self.last = []

    def hard_prompts(self, step, rng):
        return []

    def compose(self, step, fresh, reevaluated, rng, score):
        groups = [g for g in fresh if not g.infra_error]
        return make_batch([*groups, *self.last], ['x1'] * len(groups) + ['last'] * len(self.last))

    def times_trained(self, batch):
        return [1 + (origin == 'last') for origin in batch.origins]

    def add(self, step, fresh, batch):
        self.last = batch.of_origin('x1')

    def metrics(self, step):
        return {}

    def state(self):
        return groups_to_arrays(self.last)

    def restore(self, arrays):
        self.last = groups_from_arrays(arrays)

def last(config, reevaluation_due):
    return Last()

def changed(**methods):
    return lambda config, reevaluation_due: type('Changed', (Last,), methods)()

keeps_what_failed = changed(compose=lambda self, step, fresh, *_: make_batch(fresh, ['x1'] * len(fresh)))
says_fresh = changed(compose=lambda self, step, fresh, *_: make_batch([*fresh[:1], *self.last], ['x1'] * (1 + len(self.last))))
no_weight = changed(compose=lambda self, step, fresh, *_: dataclasses.replace(make_batch(fresh[:2], ['x1'] * 2), weights=(1.0, 0.0)))
returns_groups = changed(compose=lambda self, step, fresh, *_: list(fresh))
fails = changed(add=lambda self, step, fresh, batch: fresh[0].nothing)
forgets = changed(restore=lambda self, arrays: None)
saves_nothing = changed(state=lambda self: {})
saves_words = changed(state=lambda self: {**groups_to_arrays(self.last), 'words': np.array(['a'])})
saves_failures = changed(state=lambda self: {**groups_to_arrays(self.last), 'failures': np.zeros(1)})
wants_no_more = changed(restore=lambda self, arrays: 1 / (arrays.keys() == self.state().keys()))
keeps_all = changed(restore=lambda self, arrays: setattr(self, 'state', lambda: arrays))
many_origins = changed(compose=lambda self, step, fresh, *_: make_batch(5 * fresh[:1], 'abcde'))
asks_prompts = changed(hard_prompts=lambda self, step, rng: [group.prompt for group in self.last])
draws_for_itself = changed(hard_prompts=lambda self, step, rng: list(rng('mine').permutation(0)))
miscounts = changed(times_trained=lambda self, batch: [])
measures_too_early = changed(metrics=lambda self, step: {'size': self.last[0].size})

def no_replay(config, reevaluation_due):
    return object()

def one_number(rewards):
    return rewards.mean()

def log(rewards):
    return np.log(rewards)

def in_place(rewards):
    rewards -= rewards.mean()
    return rewards

def two_rewards(rewards, others):
    return rewards

def breaks(rewards):
    return rewards.standard_deviation()

def twice(rewards, accuracy):
    return 2 * accuracy

def word(rewards, accuracy):
    return 'keep'

def doubled(rewards, accuracy):
    rewards *= 2
    return True

def a_loss(ratio, advantage):
    return -ratio * advantage

def a_mean(ratio, advantage):
    return (ratio * advantage).mean()

def whitened(ratio, advantage):
    return ratio * advantage / advantage.std()

def less_row_mean(ratio, advantage):
    return ratio * advantage - (ratio * advantage).mean(axis=1, keepdims=True) / 2

def less_mean_ratio(ratio, advantage):
    return (ratio - jax.lax.stop_gradient(ratio.mean(axis=0, keepdims=True)) / 2) * advantage

def running(ratio, advantage):
    return jnp.cumsum(ratio * advantage, axis=1)

def pulls_others(ratio, advantage):
    pull = ratio.mean()
    return ratio * advantage + pull - jax.lax.stop_gradient(pull)

def in_numpy(ratio, advantage):
    return np.minimum(ratio, 1.2) * advantage

def no_ratio(ratio, advantage):
    return advantage

def divides(ratio, advantage):
    return ratio / advantage
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the module `my_functions`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'my_functions', raising=False)
    (tmp_path / 'my_functions.py').write_text(SOUND)
    return tmp_path


def a_config(**changes):
    config = default_config()
    apply_method(config, 'grpo')
    config.model.path = 'somewhere'
    config.update_from_flattened_dict({name.replace('__', '.'): value for name, value in changes.items()})
    return config


def test_an_advantage_is_used_as_it_is_written(folder):
    groups = [make_group(1, 3), make_group(2, 0), make_group(3, 7)]
    batch = make_batch(groups, ['x1'] * 3)
    found = group_advantages(batch, advantage_of('my_functions:halved'))
    for group, advantage in zip(groups, found, strict=True):
        np.testing.assert_allclose(advantage, (group.rewards - group.rewards.mean()) / 2, atol=1e-7)
    assert advantage_of('group_std') == 'group_std'


def test_a_surrogate_is_the_clipped_one_if_it_says_the_same(folder):
    rng = np.random.default_rng(0)
    ratio, advantage = np.exp(rng.normal(0, 0.4, (3, 50))).astype(np.float32), rng.normal(size=(3, 50)).astype(np.float32)
    advantage[0, :9] = 0  # tokens of a prompt
    tokens = Tokens(np.log(ratio), ratio, advantage, np.ones_like(ratio), np.zeros_like(ratio), np.log(ratio))
    mine = surrogate_of('my_functions:ppo')
    got, want = mine(tokens, Clip(9.0, 9.0, 9.0)), clipped(tokens, Clip(0.2, 0.28, None))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    assert (np.asarray(got[1]) == np.asarray(want[1])).all() and 20 < want[1].sum() < 100
    learner = a_config(learner__surrogate='my_functions:ppo').learner
    assert objective_of(learner).terms[0].surrogate is mine and hash(objective_of(learner)) == hash(objective_of(learner))


def test_a_filter_sees_rewards_and_accuracy_and_may_give_a_probability(folder):
    groups = [make_group(k, k) for k in range(9)]
    kept = fresh_filter(groups, 'my_functions:hard', np.random.default_rng(0))
    assert [g.correct for g in kept] == [1, 2, 3, 4]
    rng, counts = np.random.default_rng(0), np.zeros(9)
    for _ in range(400):
        counts[[g.correct for g in fresh_filter(groups, 'my_functions:sometimes', rng)]] += 1
    np.testing.assert_allclose(counts / 400, np.arange(9) / 8, atol=0.08)
    assert fresh_filter([make_group(1, 3, infra=True)], 'my_functions:hard', rng) == []


def test_a_replay_is_built_with_the_config(folder):
    config = resolve(a_config(replay__kind='my_functions:last'))
    replay = make_replay(config, 100, lambda step: False, None)
    [old, new] = [make_group(1, 3), make_group(2, 3)]
    replay.add(1, [old], replay.compose(1, [old], [], None, None))
    assert replay.compose(2, [new], [], None, None).groups == (new, old)


def test_the_brief_of_a_run_says_what_its_replay_has(folder):
    def brief(kind):
        config = resolve(a_config(replay__kind=kind, replay__use_x2=True, replay__use_x3=True))
        return in_brief(SimpleNamespace(config=config, prompts=[], steps=3), SimpleNamespace(parameters={}, kernel='xla', mesh=SimpleNamespace(shape={'data': 1, 'fsdp': 1})))

    line, *levels = brief('bapo')
    assert 'filter none, X2 True, X3 True; on' in line and 'X2 re-evaluates' in levels[0]
    [line] = brief('my_functions:last')
    assert 'anchor proximal, replay my_functions:last; on' in line and not re.search('filter|X2|X3', line)


@pytest.mark.parametrize(
    ('field', 'function', 'message'),
    [
        ('learner.advantage', 'one_number', r"returned 0\.5 for the rewards \[0\.0, 1\.0\]; return one finite number for each reward"),
        ('learner.advantage', 'log', r'returned \[-inf, 0\.0\] for the rewards'),
        ('learner.advantage', 'in_place', r'read-only\); fix .*my_functions\.py, line \d+'),
        ('learner.advantage', 'two_rewards', r"must take the arguments \(rewards\); define it so .*'others'"),
        ('learner.advantage', 'breaks', r"failed \(AttributeError: .*standard_deviation.*; fix .*my_functions\.py, line \d+"),
        ('learner.advantage', 'absent', r'my_functions has no function absent; add it'),
        ('replay.fresh_filter', 'twice', r'returned 1\.5 for .*; return True, False, or a probability in \[0, 1\]'),
        ('replay.fresh_filter', 'word', r"returned 'keep' for"),
        ('replay.fresh_filter', 'doubled', r'read-only\); fix .*my_functions\.py, line \d+'),
        ('replay.fresh_filter', 'halved', r'must take the arguments \(rewards, accuracy\)'),
        ('learner.surrogate', 'halved', r'must take the arguments \(ratio, advantage\)'),
        ('replay.kind', 'asks_prompts', r'hard_prompts\(\) of .* must return a list of Begun \(bapo_jax/groups\.py\)'),
        ('replay.kind', 'no_replay', r'returned object without buffer, hard_prompts, compose, .*restore; add'),
        ('replay.kind', 'keeps_what_failed', r'compose\(\) of .* returned a group with an infrastructure error'),
        ('replay.kind', 'says_fresh', r"returned groups of origin 'x1' that are not fresh"),
        ('replay.kind', 'no_weight', r'returned weights that are not a positive number for each group'),
        ('replay.kind', 'returns_groups', r'returned list, no Batch; return a Batch'),
        ('replay.kind', 'fails', r"failed \(AttributeError: .*'nothing'.*; fix .*my_functions\.py, line \d+"),
        ('replay.kind', 'forgets', r'does not restore what it saved; make restore\(\) undo state\(\)'),
        ('replay.kind', 'saves_nothing', r'state\(\) of .* must return a dict of one array or more'),
        ('replay.kind', 'saves_words', r'state\(\) of .* must return .* of numbers or booleans'),
        ('replay.kind', 'saves_failures', r"state\(\) of .* has an array 'failures', .*; rename it"),
        ('replay.kind', 'wants_no_more', r'failed \(ZeroDivisionError: '),
        ('replay.kind', 'keeps_all', r"does not restore what it saved; .* ignore arrays of others, such as 'failures'"),
        ('replay.kind', 'many_origins', r'groups of 6 origins, more than LANES=4'),
        ('replay.kind', 'draws_for_itself', r'failed \(ValueError: '),
        ('replay.kind', 'measures_too_early', r'failed \(IndexError: '),
        ('replay.kind', 'miscounts', r'times_trained\(\) of .* must return one number for each group'),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings('ignore:divide by zero')
def test_what_is_wrong_is_refused_with_the_config_naming_field_and_remedy(folder, field, function, message):
    name = f'my_functions:{function}'
    with pytest.raises(ValueError, match=f'{re.escape(field)}={re.escape(repr(name))}') as error:
        resolve(a_config(**{field.replace('.', '__'): name}))
    assert re.search(message, str(error.value)), error.value


@pytest.mark.parametrize(
    ('function', 'message'),
    [
        ('a_loss', 'does not rise with the ratio where the advantage is positive: it is maximised'),
        ('no_ratio', 'does not rise with the ratio'),
        ('a_mean', r'returned .*shape=\(\)'),
        ('whitened', 'mixes tokens'),
        ('less_row_mean', 'mixes tokens'),
        ('less_mean_ratio', 'mixes tokens'),
        ('running', 'mixes tokens'),
        ('pulls_others', 'mixes tokens'),
        ('divides', 'is not finite'),
        ('in_numpy', r'failed \(TracerArrayConversionError.*; fix .*my_functions\.py, line \d+'),
    ],
)
def test_what_is_no_surrogate_is_refused_by_the_learner(folder, function, message):
    learner = resolve(a_config(learner__surrogate=f'my_functions:{function}')).learner
    with pytest.raises(BadMethod, match=re.compile(rf"learner\.surrogate='my_functions:{function}' .*{message}", re.DOTALL)):
        objective_of(learner)


def test_a_result_that_is_no_advantage_ends_a_run_in_its_midst(folder):
    (folder / 'fine_at_first.py').write_text('def inverse(rewards):\n    return 1 / (1 + rewards)\n\ndef keep(rewards, accuracy):\n    return rewards.max()')
    advantage, keep = advantage_of('fine_at_first:inverse'), own_filter('fine_at_first:keep')
    with np.errstate(divide='ignore'), pytest.raises(BadMethod, match=r'returned \[inf, 0\.5\] for the rewards \[-1\.0, 1\.0\]'):
        advantage(np.array([-1.0, 1.0]))
    with pytest.raises(BadMethod, match='probability'):
        keep(np.array([3.0]), 0.5)
    assert BadMethod.remedy


def test_the_source_of_each_function_belongs_to_the_run_and_that_of_the_judges_to_an_evaluation(folder):
    for name in ('b', 'c'):
        (folder / f'module_{name}.py').write_text(f'def {name}(rewards): return rewards')
    config = a_config(task__reward='my_functions:x', learner__advantage='module_b:b', replay__kind='module_c:c')
    of_run, of_evaluation = code_of(config), code_of(config, JUDGES)
    assert of_run.keys() == {'my_functions', 'module_b', 'module_c'} and of_evaluation.keys() == {'my_functions'}
    assert code_of(a_config()) == {} and set(OWN_FIELDS) == {*JUDGES, *ARGUMENTS}
    with (folder / 'module_b.py').open('a') as file:
        file.write('\n')
    changed = code_of(config)
    assert [name for name in of_run if of_run[name] != changed[name]] == ['module_b']
    assert other_code(of_run, of_run) == ''
    assert other_code(of_run, changed) == 'another source than on host 0 of your module_b; copy the files of host 0 to all hosts'


def page_example():
    """The file and the command of docs/methods.md."""
    page = (ROOT / 'docs' / 'methods.md').read_text('utf-8')
    [section] = re.findall(r'^## Your method without a fork\n.*?(?=^## )', page, re.MULTILINE | re.DOTALL)
    assert page.index(section) == page.index('\n## ') + 1  # the page begins with it
    [file] = re.findall(r'^```python\n(.*?)^```', section, re.MULTILINE | re.DOTALL)
    [command] = re.findall(r'^    bapo-train (.*)$', section, re.MULTILINE)
    return section, file, command.split()


def test_the_example_of_the_page_is_f_grpo(tmp_path, monkeypatch):
    section, file, _ = page_example()
    assert len(file.splitlines()) <= 40 and all(f'`{field}`' in section for field in ARGUMENTS)
    names = {}
    exec(file, names)
    for rewards in ([1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0, 0, 0, 0, 0]):
        r = np.array(rewards, float)
        np.testing.assert_allclose(names['focal'](r), (1 - r.mean()) ** names['GAMMA'] * group_std(r), rtol=1e-12)


@pytest.mark.slow
def test_the_example_of_the_page_trains_from_an_empty_folder(tmp_path, monkeypatch):
    _, file, flags = page_example()
    (tmp_path / 'my_method.py').write_text(file)
    small = [
        '--config.steps=1', '--config.task.limit=8', '--config.learner.batch_groups=8', '--config.learner.mini_batch_groups=8',
        '--config.learner.anchor=behaviour', '--config.learner.kl_target=none', '--config.evaluate.benchmarks=()',
        '--config.evaluate.track_prompts=0', '--config.learner.slot_tokens=0', '--config.learner.row_tokens=64', '--config.learner.remat=none',
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, '-m', 'bapo_jax.train', *flags, *small], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={'PYTHONPATH': str(ROOT), 'PATH': '/usr/bin:/bin', 'HOME': str(tmp_path), 'JAX_PLATFORMS': 'cpu'},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    workdir = tmp_path / 'runs' / 'focal'
    [_, row] = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    assert row['actor/grad_norm'] > 0
    recorded = json.loads((workdir / 'config.json').read_text())
    assert recorded['learner']['advantage'] == 'my_method:focal' and recorded['fingerprints']['code'].keys() == {'my_method'}
    assert 0 < sum(row['accuracy_bins'][1:-1])  # it had mixed groups to learn from


def test_a_run_with_a_changed_function_is_refused(folder):
    config = quickstart.get_config('grpo')
    config.update_from_flattened_dict({
        'task.limit': 8, 'learner.batch_groups': 8, 'learner.mini_batch_groups': 8, 'steps': 1, 'evaluate.benchmarks': (),
        'evaluate.track_prompts': 0, 'learner.advantage': 'my_functions:halved',
    })  # fmt: skip
    read = read_inputs(config)
    claim_directory(read, folder / 'run', amend=False)
    assert claim_directory(read, folder / 'run', amend=False).changed == {}
    (folder / 'my_functions.py').write_text(SOUND + '\n')
    with pytest.raises(ValueError, match=r'--amend to change .*fingerprints\.code\.my_functions: the source of one of your modules'):
        claim_directory(read, folder / 'run', amend=False)
    assert claim_directory(read, folder / 'run', amend=True).changed.keys() == {'fingerprints.code.my_functions'}
