"""The config: one place for every knob, impossible combinations refused with field and remedy."""

import importlib
import json

import pytest
from ml_collections import ConfigDict, config_dict

from bapo_jax.config import default_config, resolve, with_later_fields
from bapo_jax.config.rollout_rules import check_server
from bapo_jax.learner.credit import ADVANTAGES, AGGREGATIONS
from bapo_jax.learner.losses import RATIO_LEVELS, SURROGATES
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE
from bapo_jax.run.directory import differences


def a_config(**changes):
    c = default_config()
    c.model.path = 'somewhere'
    c.update_from_flattened_dict({name.replace('__', '.'): value for name, value in changes.items()})
    return c


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'rollout__group_size': 1}, r'rollout\.group_size=1.*at least 2'),
        ({'rollout__group_size': 0}, r'rollout\.group_size=0.*at least 2'),
        ({'learner__mini_batch_groups': 512}, r'learner\.mini_batch_groups=512 exceeds learner\.batch_groups=256'),
        ({'replay__c1': 0.5, 'rollout__group_size': 2}, r'replay\.c1=0\.5: no mixed group of rollout\.group_size=2.*lower c1'),
        ({'replay__c2': (0.7, 0.1)}, r'replay\.c2=\(0\.7, 0\.1\) exceeds replay\.c3'),
        ({'replay__c2': (0.4,), 'replay__c3': (0.3,)}, r'replay\.c2.*exceeds replay\.c3'),
        ({'replay__c3': (0.1, 0.2, 0.3)}, r'replay\.c3.*one number or'),
        ({'model__pixels': (5, 4)}, r'model\.pixels=\(5, 4\): the first number exceeds the second'),
        ({'model__pixels': (5,)}, r'model\.pixels=\(5,\) must be two numbers'),
        ({'critic__gae': (1.0, 1.5)}, r'critic\.gae=\(1\.0, 1\.5\) must be two numbers'),
        ({'model__path': ''}, r'model\.path is empty'),
        ({'model__attention': 'flash'}, r"model\.attention='flash'.*auto, xla, splash, triton, cudnn"),
        ({'steps': 0, 'epochs': 0}, r'steps and epochs are both 0'),
        ({'learner__anchor': 'old'}, r"learner\.anchor='old'.*behaviour, proximal, decoupled"),
        ({'learner__kl_target': 'alpha'}, r'learner\.kl_target'),
        ({'learner__kl_target': 'convex'}, r'learner\.kl_target=convex.*rollout\.mixture\.share'),
        ({'learner__clip_centre': 'proximal', 'learner__anchor': 'proximal'}, r'learner\.clip_centre=proximal.*anchor=behaviour'),
        ({'learner__schedule__kind': 'step'}, r"learner\.schedule\.kind='step'.*constant, cosine, linear"),
        ({'learner__schedule__kind': 'cosine'}, r'learner\.schedule\.kind=cosine has no optimizer steps to decay over: steps=0.*set learner\.schedule\.decay_updates'),
        ({'learner__schedule__kind': 'linear', 'steps': 2, 'learner__schedule__warmup_updates': 8}, r'steps=2.*learner\.schedule\.warmup_updates=8'),
        ({'learner__adam__b2': 1.0}, r'learner\.adam\.b2=1\.0'),
        ({'learner__adam__eps': 0.0}, r'learner\.adam\.eps=0\.0'),
        ({'learner__adam__first_moment_dtype': 'float16'}, r"learner\.adam\.first_moment_dtype='float16'.*float32, bfloat16"),
        ({'learner__advantage': 'median'}, r"learner\.advantage='median'.*group_std"),
        ({'learner__aggregation': 'sum'}, r"learner\.aggregation='sum'.*token_mean"),
        ({'replay__fresh_filter': 'median'}, r'replay\.fresh_filter'),
        ({'replay__thresholds': 'down'}, r'replay\.thresholds'),
        ({'task__template': 'short'}, r'task\.template.*tinyzero'),
        ({'task__name': 'chess'}, r'task\.name.*countdown'),
        ({'task__reward': 'no_such_module_here:f'}, r"task\.reward='no_such_module_here:f': importing"),
        ({'task__reward': 'math:hypot3'}, r"task\.reward='math:hypot3': math has no function hypot3"),
        ({'task__judging__step_s': 0.0, 'task__judging__reward_s': 0.0}, r'task\.judging\.step_s=0.* positive.*\n.*task\.judging\.reward_s=0'),
        ({'rollout__temperature': 0.0}, r'rollout\.temperature'),
        ({'learner__row_tokens': 100}, r'learner\.row_tokens=100 is shorter than.*2560'),
        ({'task__turns': 2, 'task__name': 'arithmetic', 'task__template': 'chat'}, r'task\.turns=2: task\.name=arithmetic has no tool.*set task\.turns=0'),
        ({'task__turns': 2, 'replay__reevaluate': 'continue', 'task__template': 'compact'}, r'task\.turns=2 with replay\.reevaluate=continue.*set another replay\.reevaluate'),
        ({'task__turns': 2, 'prompts__selector': 'adaprefix', 'replay__use_x2': False}, r'task\.turns=2 with prompts\.selector=adaprefix.*prompts\.selector'),
        ({'task__turns': -1}, r'task\.turns'),
        ({'learner__remat': 'True'}, r'learner\.remat.*attention_and_mlp_inputs'),
        ({'checkpoint__every': 0}, r'checkpoint\.every'),
        ({'rollout__engine': 'sglang'}, r"rollout\.engine='sglang'.*jax, vllm"),
        ({'rollout__servers': ('http://127.0.0.1:8000',)}, r'rollout\.servers.*BAPO_ROLLOUT_TOKEN is not set'),
        ({'rollout__deadline_s': 0.0}, r'rollout\.deadline_s'),
        ({'rollout__cache_memory': 0.0}, r'rollout\.cache_memory=0\.0 must be in \(0, 1\)'),
        ({'rollout__server__memory': 1.0}, r'rollout\.server\.memory=1\.0 must be in \[0, 1\)'),
    ],
)
def test_an_impossible_config_is_refused_naming_field_and_remedy(changes, message, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=message):
        resolve(a_config(**changes))


@pytest.mark.parametrize(
    'field, table',
    [
        ('learner.advantage', ADVANTAGES),
        ('learner.aggregation', AGGREGATIONS),
        ('learner.surrogate', SURROGATES),
        ('learner.ratio_level', RATIO_LEVELS),
    ],
)
def test_the_choices_of_a_field_are_the_names_of_its_functions(field, table):
    """config/table.py repeats them: it checks before JAX is imported."""
    with pytest.raises(ValueError) as error:
        resolve(a_config(**{field.replace('.', '__'): 'no_such_name'}))
    assert f"{field}='no_such_name' is unknown; choose one of {', '.join(table)}" in str(error.value).splitlines()[1]


def test_all_problems_are_reported_at_once():
    with pytest.raises(ValueError) as e:
        resolve(a_config(rollout__group_size=1, rollout__rows=0, learner__anchor='x'))
    assert all(field in str(e.value) for field in ('group_size', 'rollout.rows', 'anchor'))


def test_resolve_derives_what_is_zero_and_leaves_its_argument_alone():
    c = a_config()
    r = resolve(c)
    assert (r.replay.bad_capacity, r.replay.high_capacity, r.learner.row_tokens) == (256, 768, 2560)
    assert c.learner.row_tokens == 0


def test_groups_under_way_are_2048_responses_unless_said_and_at_least_one():
    for group_size, groups in ((8, 256), (16, 128), (4096, 1)):
        assert resolve(a_config(rollout__group_size=group_size)).rollout.concurrency == groups
    assert resolve(a_config(rollout__concurrency=3)).rollout.concurrency == 3


def test_a_decay_without_a_length_ends_with_the_last_of_full_batches():
    """10 steps of ⌈250 / 64⌉ = 4 mini-batches, twice: 80 optimizer steps, warm-up among them."""
    of_run = {'steps': 10, 'learner__batch_groups': 250, 'learner__passes_per_batch': 2, 'learner__schedule__warmup_updates': 5}
    lengths = [
        resolve(a_config(**of_run, learner__schedule__kind=schedule, learner__schedule__decay_updates=given)).learner.schedule.decay_updates
        for schedule, given in (('cosine', 0), ('linear', 0), ('linear', 7), ('constant', 0))
    ]
    assert lengths == [75, 75, 7, 0]


def test_the_countdown_config_has_the_papers_values():
    c = importlib.import_module('configs.countdown').get_config('bapo')
    r, l = c.rollout, c.learner
    assert (r.max_prompt_tokens, r.max_response_tokens, r.temperature, r.group_size) == (512, 2048, 0.6, 8)
    assert (l.batch_groups, l.mini_batch_groups, l.learning_rate, l.kl_coef) == (256, 64, 1e-6, 0.005)
    assert (c.rollout.sync_every, c.replay.reevaluate_every, c.replay.max_reevaluate, c.epochs) == (5, 5, 128, 3)
    assert (c.replay.c1, c.replay.c2, c.replay.c3, c.replay.fresh_filter) == (1 / 8, (4 / 8, 1 / 8), (5 / 8, 2 / 8), 'gaussian')
    g = importlib.import_module('configs.countdown').get_config('grpo')
    assert (g.rollout.sync_every, g.replay.use_x2, g.replay.use_x3, g.replay.fresh_filter) == (1, False, False, 'none')
    l = g.learner
    assert (l.anchor, l.kl_target, l.kl_coef, l.mini_batch_groups) == ('proximal', 'reference', 0.001, 256)


def test_an_unknown_key_is_refused():
    c = default_config().lock()
    with pytest.raises((AttributeError, KeyError)):
        c.replay.c4 = 1
    assert isinstance(c, config_dict.ConfigDict)


def test_only_what_may_change_between_two_starts_is_free():
    a = json.loads(resolve(a_config()).to_json())
    b = json.loads(resolve(a_config(steps=9, checkpoint__every=1, evaluate__samples=2, log__rollouts_every=0)).to_json())
    assert differences(a, b) == []
    c = json.loads(resolve(a_config(learner__clip_low=0.1, seed=1, task__reward='math:hypot')).to_json())
    assert differences(a, c) == ['learner.clip_low', 'seed', 'task.reward']
    d = {'steps': 9, 'learner__schedule__kind': 'linear', 'learner__adam__b2': 0.99, 'learner__adam__first_moment_dtype': 'bfloat16'}
    changed = ['learner.adam.b2', 'learner.adam.first_moment_dtype', 'learner.schedule.decay_updates', 'learner.schedule.kind']
    assert differences(a, json.loads(resolve(a_config(**d)).to_json())) == changed


@pytest.mark.parametrize('url', ['http://me:secret@host:8000', 'http://secret@host', 'host:8000', 'ftp://host', 'http://', 'http://host:x'])
def test_a_server_is_a_url_without_a_password_and_none_is_shown(url):
    with pytest.raises(ValueError, match='^--servers has ') as said:
        check_server(url, '--servers')
    assert 'secret' not in str(said.value)
    check_server('http://127.0.0.1:8000', 'x')
    check_server('https://[::1]:8000/', 'x')


def test_fields_that_no_config_has_and_fields_that_are_missing_are_all_named():
    c = a_config()
    c.stepz, c.learner.learning_ratee = 3, 1.0
    del c.mesh, c.task.limit
    with pytest.raises(ValueError) as raised:
        resolve(c)
    for told in ('- stepz: no such field (did you mean steps?); choose one of the fields of the config: checkpoint, ',
                 '- learner.learning_ratee: no such field (did you mean learner.learning_rate?); choose one of the fields of learner: adam, ',
                 '- mesh is missing; begin the config with default_config()', '- task.limit is missing; '):  # fmt: skip
        assert told in str(raised.value)


@pytest.mark.parametrize('field', ['task__train', 'evaluate__benchmarks', 'model__path'])
def test_a_url_with_a_password_is_no_setting_and_is_not_shown(field):
    url = 'https://me:secret@host/problems.jsonl'
    with pytest.raises(ValueError, match=f'{field.replace("__", ".")} has a URL with a user name or password') as said:
        resolve(a_config(**{field: (url,) if field.endswith('s') else url}))
    assert 'secret' not in str(said.value)
    resolve(a_config(task__train='mail@host.jsonl'))  # no URL


def test_a_run_of_an_earlier_version_gets_the_defaults_of_later_fields():
    written = default_config().to_dict()
    written['rollout']['rows'] = 7
    earlier = {name: dict(part) if isinstance(part, dict) else part for name, part in written.items()}
    del earlier['rollout']['cache_memory'], earlier['replay']['posterior'], earlier['log']
    written['model']['path'] = earlier['model']['path'] = 'somewhere'
    assert with_later_fields(earlier).to_dict() == resolve(ConfigDict(written)).to_dict()
    with pytest.raises(ValueError, match='rollout of config.json is not a section; restore that file'):
        with_later_fields({**earlier, 'rollout': 'damaged'})
