"""Every row of the methods table through the real trainer: two small steps, and one repeated from a checkpoint, bit for bit."""

import json
import shutil

import jax
import numpy as np
import pytest
from small_run import metrics, run, small_config
from tiny import expert_files

from configs.making.bases import countdown_files
from bapo_jax.methods import METHODS
from bapo_jax.models import hf
from bapo_jax.replay.kinds import TRACED
from bapo_jax.run.log.metrics import read_metrics
from bapo_jax.show.lines import outcome_of
from bapo_jax.show.story import read_story
from docs.reference.metrics import entries_of
from bapo_jax.train import build

pytestmark = pytest.mark.slow

# What lets a row's parts act within few steps.
SMALL = {
    'mopps': {'prompts__mopps__candidates': 3},
    'dots': {'prompts__dots__references': 12, 'prompts__dots__tau': 0.05},
    'adaprefix': {'replay__given_by': 'solver', 'rollout__max_response_tokens': 40, 'learner__row_tokens': 56},
    'areal': {'mesh__data': 1},
    'remix': {'learner__switch_step': 1},
    'repo': {'task__limit': 8, 'replay__repo__per_prompt': 4},
    **{row: {'replay__reevaluate_every': 2, 'rollout__sync_every': 2} for row in METHODS if row.startswith('ba')},
}
SMALL['bapo_posterior'] |= {'replay__posterior__after': 1}
SMALL['bapo_continue'] |= {'replay__c1': 0.5}  # so that hard prompts have a right response to continue


@pytest.fixture(scope='module')
def tiny_base(tmp_path_factory):
    """A random policy of one narrow layer: what is tested is the rows, and compiling is most of the time."""
    path = tmp_path_factory.mktemp('base')
    countdown_files(path, width=32, layers=1)
    config = hf.read_config(path)
    hf.save(path, hf.to_hf(config, hf.init_params(config, 0)), like=path)
    # Traces of five prompts in six, some right and some wrong by their length.
    rows = [{'prompt_id': i, 'text': '1' * (1 + i % 7)} for i in range(60) if i % 6]
    (path / 'traces.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    return path


def row_config(method, base, rank=0):
    changes = {
        'model__path': str(base), 'model__adapter__rank': rank, 'task__reward': 'parity:odd', 'rollout__max_response_tokens': 8,
        'learner__slot_tokens': 0, 'learner__row_tokens': 24,
        'steps': 2, 'checkpoint__every': 1, 'checkpoint__keep': 3, 'log__theory_every': 2,
    }  # fmt: skip
    if METHODS[method].fields.get('replay.kind') in TRACED:
        changes['replay__traces__file'] = str(base / 'traces.jsonl')
    config = small_config(method, base, **changes | SMALL.get(method, {}))
    config.evaluate.benchmarks, config.evaluate.track_prompts, config.log.rollouts_every = (), 0, 0
    return config


# Rows that test_rows_longer.py lets go through 20 steps.
LONGER = (
    'f_grpo dppo gapo adaprefix areal kimi m2po sat arpo fifo freshper exgrpo dots luffy relift'.split()
)


def assert_sound(workdir, steps):
    """A finished run whose numbers are finite, with the policy trained, and every metric in the reference."""
    rows = metrics(workdir)
    assert [row['step'] for row in rows] == list(range(steps + 1)) and max(row.get('actor/grad_norm', 0) for row in rows) > 0
    assert all(np.isfinite(v) for row in rows[1:] if sum(row['accuracy_bins']) for v in row.values() if isinstance(v, float))
    assert [name for row in metrics(workdir, times=True) for name in row if name != 'step' and len(entries_of(name)) != 1] == []
    assert outcome_of(read_story(workdir)) == f'finished, {steps} steps'


# Rows that also train an adapter here: of each, another part meets it. And those that train experts.
ADAPTED = ('bapo', 'ppo', 'remix', 'luffy', 'areal', 'kimi')
OF_EXPERTS = ('ppo', 'remix')


@pytest.fixture(scope='module')
def experts_base(tmp_path_factory):
    return expert_files(tmp_path_factory.mktemp('experts') / 'base')


@pytest.mark.parametrize(
    ('method', 'rank', 'base'),
    [(method, 0, 'tiny_base') for method in METHODS if method not in LONGER]
    + [(method, 2, 'tiny_base') for method in ADAPTED]
    + [(method, 0, 'experts_base') for method in OF_EXPERTS],
)
def test_a_row_trains_and_its_second_step_repeats_from_a_checkpoint(method, rank, base, request, tmp_path):
    whole, again, base = tmp_path / 'whole', tmp_path / 'again', request.getfixturevalue(base)
    first = run(row_config(method, base, rank), whole)
    assert_sound(whole, 2)
    rows = metrics(whole)
    assert not METHODS[method].fields.get('replay.use_x2') or rows[2]['bapo/reevaluated'] > 0
    shutil.copytree(whole, again)
    shutil.rmtree(again / 'checkpoints' / '2')
    second = run(row_config(method, base, rank), again)
    assert metrics(again) == rows
    starts = json.loads((again / 'config.json').read_text('utf-8'))['starts']
    assert outcome_of(read_story(again)) == 'finished, 2 steps'
    assert [(s['step'], s['steps'], s['end']['step'], s['end']['outcome']) for s in starts] == [(0, 2, 2, 'finished'), (1, 2, 2, 'finished')]
    for name in ('theta', 'alpha', 'reference', 'recent'):
        jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (getattr(first, name), getattr(second, name))))


def test_refilling_counts_every_response_and_trains_on_whole_batches(tiny_base, tmp_path):
    """DAPO: batches of prompts are drawn until 8 groups are mixed, 4 at the most; the surplus and the rejected are discarded."""
    config = row_config('dapo', tiny_base)
    config.steps = 4
    run(config, tmp_path / 'dapo')
    rows = read_metrics(tmp_path / 'dapo')[1:]
    generated = np.diff([0, *(row['rollout/responses_total'] for row in rows)]) // 4
    assert 8 <= generated.min() and 8 < generated.max() <= 32
    for row, groups in zip(rows, generated, strict=True):
        assert row['bapo/x1_groups'] == 8 or groups == 32
        assert row['bapo/x1_groups'] + row['bapo/discarded/filtered'] + row['bapo/discarded/infra_error'] == groups
        assert sum(row['accuracy_bins']) == groups
    assert rows[-1]['rollout/discarded_total'] == sum(row['bapo/discarded/filtered'] for row in rows) * 4
    assert any(row['critic/rewards/mean'] < row['critic/score/mean'] for row in rows)  # overlong responses are punished


def test_a_mixture_is_answered_by_policies_of_the_last_syncs_and_then_by_none(tiny_base, tmp_path):
    """ReMix: up to two versions behind, two passes a batch; after the switch, GRPO."""
    config = row_config('remix', tiny_base)
    config.steps, config.learner.switch_step, config.rollout.mixture.share = 5, 4, 0.6
    state = run(config, tmp_path / 'remix')
    rows = read_metrics(tmp_path / 'remix')[1:]
    assert [row['staleness/max'] for row in rows[:2]] == [0, 1] and 1 <= rows[2]['staleness/max'] <= 2
    assert [row['actor/updates'] for row in rows] == [4, 4, 4, 4, 2]
    assert rows[4]['staleness/max'] == 0
    assert [version for version, _ in state.recent] == [3, 2] and state.alpha_version == 4
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (state.reference, state.alpha)))  # θ after step 4


def test_the_released_codes_re_evaluation_moves_alpha(tiny_base, tmp_path):
    """Phase (t - 1) mod v; after step 2's re-evaluation α is π_θ of that step's start, though no sync was due."""
    config = row_config('bapo_official', tiny_base)
    config.steps, config.rollout.sync_every, config.replay.reevaluate_every = 4, 3, 2
    run(config, tmp_path / 'official')
    rows = read_metrics(tmp_path / 'official')[1:]
    assert [row['bapo/lag'] for row in rows] == [0, 0, 1, 0]  # synced at 1 and 4; re-evaluated at 2
    assert rows[1]['bapo/reevaluated'] > 0


@pytest.mark.parametrize(
    ('method', 'changes', 'message'),
    [
        ('dapo', {'rollout__overlap': True, 'mesh__data': 1}, r'rollout\.overlap=True with .*=0\.0 and rollout\.refill_batches=4'),
        ('dapo', {'replay__fresh_filter': 'none'}, r'rollout\.refill_batches=4 needs a filter that keeps only mixed groups.*range'),
        ('areal', {'rollout__overlap': False}, r'rollout\.most_behind=4 requests steps ahead, which rollout\.overlap=False excludes'),
        ('kimi', {'learner__anchor': 'proximal'}, r'learner\.surrogate=regression squares .*learner\.anchor=proximal; set'),
        ('kimi', {'rollout__step_share': 1.5}, r'rollout\.step_share=1\.5'),
        ('remix', {'rollout__sync_every': 5}, r'rollout\.mixture\.share=0\.4.*rollout\.sync_every=1'),
        ('remix', {'replay__use_x2': True}, r'rollout\.mixture\.share=0\.4 does not support re-evaluation; set replay\.use_x2=False'),
        ('repo', {'replay__use_x3': True}, r'replay\.kind=repo.*replay\.use_x3=False'),
        ('repo', {'replay__repo__retrieve': 'oldest'}, r"replay\.repo\.retrieve='oldest' is unknown; choose .* all, recent, reward, variance"),
        ('luffy', {'replay__given_by': 'policy'}, r'replay\.kind=luffy learns from traces, and there are none; set replay\.traces\.file'),
        ('luffy', {'learner__traces__loss': 'none'}, r'replay\.kind=luffy: learner\.traces\.loss=none trains on none .*set learner\.traces\.loss=shaped'),
        ('relift', {'learner__traces__loss': 'shaped'}, r'replay\.kind=relift: learner\.traces\.loss=shaped .*set learner\.traces\.loss=cross_entropy'),
        ('grpo', {'learner__traces__loss': 'shaped'}, r'learner\.traces\.loss=shaped, but batches of replay\.kind=bapo have no traces; .*luffy, relift'),
        ('grpo', {'replay__traces__file': 'some.jsonl'}, r"replay\.traces\.file='some\.jsonl' is not read by replay\.kind=bapo; remove it"),
        ('luffy', {'learner__advantage': 'gae'}, r'learner\.traces\.loss=shaped: the critic of learner\.advantage=gae has no values'),
        ('luffy', {'task__length_weight': 0.1}, r'task\.length_weight=0\.1 compares .* set task\.length_weight=0\.0'),
        ('relift', {'replay__use_x2': True}, r'replay\.kind=relift takes all fresh groups.*replay\.use_x2=False'),
        ('luffy', {'rollout__max_response_tokens': 5}, r'replay\.given_by=solver: none of its 60 traces has at most rollout\.max_response_tokens=5'),
        ('arpo', {'replay__use_x2': True}, r'replay\.kind=arpo.*replay\.use_x2=False'),
        ('arpo', {'replay__arpo__per_prompt': 0}, r'replay\.arpo\.per_prompt=0 must be at least 1'),
        ('fifo', {'replay__fresh_filter': 'range'}, r"replay\.kind=fifo.*set replay\.fresh_filter=none \(not 'range'\)"),
        ('fifo', {'replay__fifo__capacity': 15}, r'replay\.fifo\.capacity=15 is smaller than a batch of replay\.fifo\.ratio=2 × .*=8'),
        ('exgrpo', {'learner__traces__loss': 'none'}, r'replay\.kind=exgrpo makes traces .* set learner\.traces\.loss=shaped'),
        ('exgrpo', {'rollout__mixture__share': 0.4}, r'rollout\.mixture\.share=0\.4 does not support re-evaluation.*than exgrpo'),
        ('exgrpo', {'replay__exgrpo__share': 1.0}, r'replay\.exgrpo\.share=1\.0 must be in \[0, 1\)'),
        ('grpo', {'task__template': 'calculator'}, r'task\.template=calculator offers a tool, and with task\.turns=0 nobody replies'),
        ('exgrpo', {'replay__exgrpo__share': 0.05}, r'replay\.exgrpo\.share=0\.05 .*learner\.batch_groups=8 .*rounds to no group'),
        ('exgrpo', {'replay__use_x3': True}, r'replay\.kind=exgrpo.*replay\.use_x3=False'),
        ('freshper', {'replay__freshper__base': 'td'}, r"replay\.freshper\.base='td' is unknown; choose one of advantage, reward"),
        ('freshper', {'replay__freshper__tau': 0.0}, r'replay\.freshper\.tau=0\.0 must be positive'),
        ('mopps', {'prompts__mopps__target': 1.0}, r'prompts\.mopps\.target=1\.0'),
        ('mopps', {'task__limit': 7}, r'7 training prompts are fewer than learner\.batch_groups=8'),
        ('bapo', {'replay__improved_rule': 'better'}, r'replay\.improved_rule'),
        ('bapo_continue', {'replay__given_by': 'solver', 'task__template': 'tinyzero'}, r'countdown only has solutions for the templates compact, .*given_by=policy'),
        ('bapo_posterior', {'replay__reevaluate': 'likeliest'}, r'replay\.reevaluate'),
        ('bapo_posterior', {'replay__posterior__pool_within': -0.1}, r'replay\.posterior\.pool_within'),
        ('bapo', {'rollout__sync_phase': 'late'}, r'rollout\.sync_phase'),
        ('adaprefix', {'prompts__adaprefix__withdrawal': (0.8, 0.6)}, r'prompts\.adaprefix\.withdrawal=\(0\.8, 0\.6\)'),
        ('adaprefix', {'replay__use_x2': True}, r'prompts\.selector=adaprefix.*replay\.kind=bapo and replay\.use_x2=False'),
        ('adaprefix', {'replay__kind': 'luffy', 'replay__given_by': 'solver', 'learner__traces__loss': 'shaped'}, r'adaprefix.*not comparable'),
        ('adaprefix', {'rollout__refill_batches': 2, 'rollout__overlap': False}, r'prompts\.selector=adaprefix.*rollout\.refill_batches=1'),
        ('adaprefix', {'replay__given_by': 'solver', 'task__template': 'tinyzero'}, r'replay\.given_by=solver: .*countdown only has solutions for the templates compact'),
        ('dots', {'prompts__dots__tau': 0.0}, r'prompts\.dots\.tau=0\.0 must be positive'),
        ('dots', {'prompts__dots__cycle': 20}, r'60 training prompts are fewer than those of prompts\.dots\.cycle=20 steps with 4 prompts'),
        ('dots', {'replay__kind': 'repo'}, r'prompts\.selector=dots: replay\.kind=repo may also train .*; set replay\.kind=rollout_replay'),
        ('dots', {'replay__kind': 'bapo', 'replay__fresh_filter': 'range'}, r'prompts\.selector=dots: replay\.kind=bapo may also train'),
        ('dots', {'replay__use_x3': True}, r'replay\.kind=rollout_replay.*replay\.use_x3=False'),
        ('dots', {'replay__rollout_replay__fresh': 9}, r'replay\.rollout_replay\.fresh=9 exceeds learner\.batch_groups=8'),
        ('ppo', {'critic__gae': (1.0, 1.5)}, r'critic\.gae=\(1\.0, 1\.5\)'),
        ('dapo', {'task__overlong_share': 1.0}, r'task\.overlong_share=1\.0'),
        ('m2po', {'learner__anchor': 'proximal'}, r'learner\.trust\.kind=second_moment measures how far .*learner\.anchor=behaviour'),
        ('sat', {'learner__anchor': 'proximal'}, r'learner\.trust\.kind=staleness measures how far .*learner\.anchor=behaviour'),
        ('sat', {'learner__surrogate': 'unclipped'}, r'learner\.surrogate=unclipped does not read .*one of clip, cispo, binary_tv'),
        ('gapo', {'learner__surrogate': 'math:pow'}, r'learner\.surrogate=math:pow does not read .*one of clip, cispo, binary_tv'),
        ('gapo', {'learner__clip_low': 5e-3}, r'learner\.clip_low=0\.005 and learner\.clip_high=0\.005; set learner\.clip_high above'),
        ('kimi', {'learner__trust__kind': 'second_moment'}, r'learner\.surrogate=regression has a term without it; set learner\.trust\.kind=fixed'),
        ('m2po', {'learner__trust__kind': 'variance'}, r"learner\.trust\.kind='variance' is unknown; choose .* second_moment, staleness, success"),
        ('sat', {'learner__trust__quantile': 1.0}, r'learner\.trust\.quantile=1\.0 must be in \(0, 1\)'),
        ('dppo', {'learner__ratio_level': 'sequence'}, r'learner\.surrogate=binary_tv compares probabilities of tokens.*ratio_level=token'),
        ('dppo', {'learner__clip_centre': 'proximal'}, r'learner\.surrogate=binary_tv has no clip centre.*clip_centre=one'),
    ],
)
def test_impossible_settings_of_a_row_are_refused(tmp_path, benchmark, method, changes, message):
    with pytest.raises(ValueError, match=message):
        build(small_config(method, benchmark, **changes), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()
