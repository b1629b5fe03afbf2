"""The grid: which settings are measured, from which base policy, and by which commands."""

from __future__ import annotations

from typing import Any, NamedTuple

SAMPLES = 32  # responses to each question, after training
# A base that solves a tenth but could solve a third: the quickstart's, after 200 steps on solutions that
# mostly aim at nothing.
WEAK_BASE = 'runs/first_proof/weak_base'
WEAK_BASE_COMMAND = (
    'python -m configs.making.sft --start=configs/quickstart_base --aimless=0.9 --steps=200 '
    f'--learning_rate=1e-3 --problems=20000 --output={WEAK_BASE}'
)


class Setting(NamedTuple):
    """A point of the grid: configs/quickstart.py:METHOD with these fields changed, those of BASES[base] among
    them.
    """

    base: str
    name: str
    axis: str  # what it varies, for the tables
    method: str
    changes: dict[str, Any]  # of config fields


def numbers_only(numbers: int) -> dict[str, Any]:
    """Fields for problems with `numbers` numbers alone, in training and in a third benchmark. Other bases mix
    three and four.
    """
    benchmarks = ('cd34', 'cd4', problems_file(numbers, 'test'))
    return {'task.train': problems_file(numbers, 'train'), 'evaluate.benchmarks': repr(benchmarks)}


def problems_file(numbers: int, part: str) -> str:
    return f'runs/first_proof/{part}_{numbers}.jsonl'


# As many responses a step as 64 groups of 8, but fewer of the groups are mixed.
GROUPS_OF_FOUR = {
    'rollout.group_size': 4,
    'learner.batch_groups': 128,
    'learner.mini_batch_groups': 32,
    'replay.max_reevaluate': 64,
}
# Policies and problems with more and less headroom. Most axes are varied on the first, where a step gains
# half a point.
RATE = 'learner.learning_rate'
BASES: dict[str, dict[str, Any]] = {
    'weak': {'model.path': WEAK_BASE, 'steps': 30, 'evaluate.every': 10, RATE: '2e-4'},
    'weak_four': {
        'model.path': WEAK_BASE,
        'steps': 60,
        'evaluate.every': 20,
        RATE: '1e-4',
        **numbers_only(4),
    },
    'weak_g4': {'model.path': WEAK_BASE, 'steps': 30, 'evaluate.every': 10, RATE: '2e-4', **GROUPS_OF_FOUR},
    'quickstart': {'steps': 100, 'evaluate.every': 20, RATE: '5e-5'},
    'three_numbers': {'steps': 100, 'evaluate.every': 20, RATE: '5e-5', **numbers_only(3)},
    'four_numbers': {'steps': 100, 'evaluate.every': 20, RATE: '5e-5', **numbers_only(4)},
}
# Held-out problems of the kind that a base trains on, 200 a benchmark.
HELD_OUT = {
    'weak': ('cd34',), 'weak_g4': ('cd34',), 'weak_four': ('cd4', problems_file(4, 'test')), 'quickstart': ('cd34',),
    'three_numbers': (problems_file(3, 'test'),), 'four_numbers': ('cd4', problems_file(4, 'test')),
}  # fmt: skip
V, ANCHOR, X2, X3 = 'rollout.sync_every', 'learner.anchor', 'replay.use_x2', 'replay.use_x3'
CENTRE = {'grpo': {}, 'bapo': {V: 1, ANCHOR: 'behaviour', 'replay.fresh_filter': 'range'}}
WIDE = {'replay.c2': (1 / 8,), 'replay.c3': (7 / 8,)}  # any mixed group is replayed


def settings() -> list[Setting]:
    """The grid, most informative first. The centre is BAPO with v = 1, the behaviour anchor and the range
    filter.
    """
    grid = []

    def add(base: str, name: str, axis: str, changes: dict[str, Any], method: str = 'bapo') -> None:
        grid.append(Setting(base, name, axis, method, BASES[base] | CENTRE[method] | changes))

    for base in ('weak', 'quickstart'):
        add(base, 'grpo', 'learning rate', {}, 'grpo')
        add(base, 'centre', 'learning rate', {})
        add(base, 'no_x3', 'sources', {X3: False})
        add(base, 'no_x2', 'sources', {X2: False})
        add(base, 'x1_only', 'sources', {X2: False, X3: False})
    add('weak', 'wide', 'reuse', WIDE)
    add('quickstart', 'wide', 'reuse', WIDE)
    add('weak', 'wide_no_x2', 'reuse', WIDE | {X2: False})
    add('quickstart', 'wide_no_x2', 'reuse', WIDE | {X2: False})
    for base in ('weak_four', 'weak_g4'):  # few of their fresh groups are mixed
        add(base, 'grpo', 'learning rate', {}, 'grpo')
        add(base, 'wide', 'reuse', WIDE)
        add(base, 'no_x3', 'sources', {X3: False})
        add(base, 'wide_no_x2', 'reuse', WIDE | {X2: False})
    for r in ('2e-4', '5e-5', '4e-4'):
        add('weak_four', f'grpo_lr{r}', 'learning rate', {RATE: r}, 'grpo')
        add('weak_four', f'wide_lr{r}', 'reuse', WIDE | {RATE: r})
    for base, rates in (('weak', ('3e-4', '1e-4', '4e-4', '5e-5')), ('quickstart', ('2e-4', '2e-5'))):
        for r in rates:
            add(base, f'grpo_lr{r}', 'learning rate', {RATE: r}, 'grpo')
            add(base, f'centre_lr{r}', 'learning rate', {RATE: r})
    for r in ('3e-4', '1e-4', '4e-4'):
        add('weak', f'wide_lr{r}', 'reuse', WIDE | {RATE: r})
    # GRPO's four updates a step, from the centre's 40 groups or from X1's 29 (19 on four numbers); and GRPO
    # with eight.
    add('weak', 'four_updates', 'updates', {'learner.mini_batch_groups': 11})
    for base, groups in (('weak', 7), ('weak_four', 5)):
        add(
            base,
            'x1_only_four_updates',
            'updates',
            {'learner.mini_batch_groups': groups, X2: False, X3: False},
        )
        add(base, 'grpo_eight_updates', 'updates', {'learner.mini_batch_groups': 8}, 'grpo')
    for r in ('2e-4', '4e-4', '8e-4'):
        # One update a step, as in the authors' script for this task.
        add('weak', f'grpo_one_update_lr{r}', 'updates', {'learner.mini_batch_groups': 64, RATE: r}, 'grpo')
    # GRPO without the passes of its anchor and reference policy, which BAPO lacks. At v = 1 both anchors are
    # the same policy.
    add(
        'weak',
        'grpo_same_passes',
        'KL target',
        {ANCHOR: 'behaviour', 'learner.kl_target': 'behaviour'},
        'grpo',
    )
    for base in ('three_numbers', 'four_numbers'):
        add(base, 'grpo', 'headroom', {}, 'grpo')
        add(base, 'centre', 'headroom', {})
        add(base, 'wide', 'headroom', WIDE)
    add('weak', 'grpo_pool1000', 'pool', {'task.limit': 1000}, 'grpo')
    add('weak', 'pool1000', 'pool', {'task.limit': 1000})
    # The paper's reading, at each rate; then anchor × v × rate, from which it differs by the filter.
    for r in ('2e-4', '5e-5', '4e-4'):
        add('weak', f'paper_lr{r}', 'paper', {V: 5, 'replay.fresh_filter': 'gaussian', RATE: r})
    for v in (5, 2, 1):
        for anchor in ('behaviour', 'proximal', 'decoupled'):
            for r in ('2e-4', '5e-5', '4e-4'):
                if (v, anchor) != (1, 'behaviour'):  # the centre and its rates are these
                    add('weak', f'v{v}_{anchor}_lr{r}', 'anchor', {V: v, ANCHOR: anchor, RATE: r})
    add('weak', 'literal', 'thresholds', {'replay.thresholds': 'literal'})
    add('weak', 'half', 'thresholds', {'replay.c2': (0.5,), 'replay.c3': (0.5,)})
    # How old a replayed group may be, in steps (3 elsewhere). Groups never trained on: what the Gaussian
    # filter left out.
    add('weak', 'wide_recent_1', 'reuse', WIDE | {'replay.high_recent_steps': 1})
    add('weak', 'wide_recent_10', 'reuse', WIDE | {'replay.high_recent_steps': 10})
    add('weak', 'wide_gaussian', 'reuse', WIDE | {'replay.fresh_filter': 'gaussian'})
    add(
        'weak',
        'wide_gaussian_untrained',
        'reuse',
        WIDE | {'replay.fresh_filter': 'gaussian', 'replay.x3_untrained': True},
    )
    add('weak', 'gaussian', 'filter', {'replay.fresh_filter': 'gaussian'})
    add('weak', 'uniform', 'filter', {'replay.fresh_filter': 'uniform'})
    add('weak', 'unfiltered', 'filter', {'replay.fresh_filter': 'none'})
    add('weak', 'kl_reference', 'KL target', {'learner.kl_target': 'reference'})
    add('weak', 'kl_none', 'KL target', {'learner.kl_target': 'none'})
    add('weak', 'sequence_mean', 'aggregation', {'learner.aggregation': 'seq_mean_token_mean'})
    return grid


def commands(setting: Setting, seed: int, workdir: str) -> list[list[str]]:
    """The training command and the evaluation of its result. All seeds have the same questions; their samples
    differ.
    """
    changes = {'seed': seed, 'log.rollouts_every': 0, 'checkpoint.every': 100} | setting.changes
    flags_ = [f'--config.{field}={value}' for field, value in changes.items()]
    train = [
        'python',
        '-m',
        'bapo_jax.train',
        f'--config=configs/quickstart.py:{setting.method}',
        f'--workdir={workdir}',
        *flags_,
    ]
    return [train, ['python', '-m', 'bapo_jax.evaluate', f'--checkpoint={workdir}', f'--samples={SAMPLES}']]
