"""The methods. Each is four choices: which prompts, which policy answers, what is trained on, how it learns.

Each method is a row of overrides of config fields. To add a method, add a row, not a trainer
(docs/methods.md). Configs select a row with `--config=FILE:METHOD`.

    python -m bapo_jax.methods    # each row, and how it differs from GRPO
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from bapo_jax.machine.help import CommandParser, columns, did_you_mean, hanging
from bapo_jax.machine.output import ends_with_its_reader, open_streams

Fields = dict[str, Any]  # dotted config field -> value


class Method(NamedTuple):
    """A row: overrides of config fields, by choice."""

    summary: str
    source: str
    prompts: Fields = {}  # which prompts
    schedule: Fields = {}  # which policy answers
    batch: Fields = {}  # what is trained on
    learning: Fields = {}  # how it learns
    # Name of a file in configs/ -> what the method's authors changed for that task.
    of_task: dict[str, Fields] = {}

    @property
    def fields(self) -> Fields:
        """All overrides, except those for one task."""
        return {**self.prompts, **self.schedule, **self.batch, **self.learning}

    def but(
        self, summary: str, source: str, *, of_task: dict[str, Fields] | None = None, **choices: Fields
    ) -> Method:
        """A copy of this row with changes to some fields."""
        changed = {choice: {**getattr(self, choice), **fields} for choice, fields in choices.items()}
        return self._replace(
            summary=summary, source=source, of_task=self.of_task if of_task is None else of_task, **changed
        )


# GRPO as in the paper's baseline (verl): ratio to the policy at the step's start, KL to the initial policy.
_GRPO = Method(
    summary='GRPO: trains once on every fresh group',
    source='DeepSeekMath, arXiv 2402.03300',
    schedule={'rollout.sync_every': 1},
    batch={'replay.fresh_filter': 'none', 'replay.use_x2': False, 'replay.use_x3': False},
    learning={'learner.anchor': 'proximal', 'learner.kl_target': 'reference'},
    # In the authors' script: one optimizer step on all 256 groups, and a weaker KL.
    of_task={'countdown': {'learner.kl_coef': 0.001, 'learner.mini_batch_groups': 256}},
)

# Algorithm 1 with Table 3; docs/concepts.md says how ambiguities are resolved.
_BAPO = Method(
    summary=(
        'BAPO, as in the paper: delayed rollouts, filtered fresh groups (X1), re-evaluated hard prompts '
        '(X2), replay (X3)'
    ),
    source='arXiv 2602.20722, Algorithm 1 and Table 3',
    schedule={'rollout.sync_every': 5, 'replay.reevaluate_every': 5},
    batch={
        'replay.fresh_filter': 'gaussian',
        'replay.use_x2': True,
        'replay.use_x3': True,
        'replay.c1': 1 / 8,
        'replay.c2': (4 / 8, 1 / 8),
        'replay.c3': (5 / 8, 2 / 8),
        'replay.thresholds': 'easy_to_hard',
    },
    learning={'learner.anchor': 'behaviour', 'learner.kl_target': 'behaviour'},
)

# BAPO as measured at 0.8M parameters. Comments name each choice's row in studies/first_proof; alternatives.
_TUNED = _BAPO.but(
    'BAPO as studies/first_proof supports it: no delay, trains on and replays every mixed group, no '
    're-evaluation',
    'studies/first_proof',
    schedule={'rollout.sync_every': 1},  # centre; v2_behaviour_lr2e-4, v5_behaviour_lr2e-4
    batch={
        'replay.fresh_filter': 'range',  # centre; gaussian, uniform, unfiltered
        'replay.use_x2': False,  # wide_no_x2; wide scores the same and takes a tenth more responses
        'replay.use_x3': True,  # wide; no_x3
        'replay.c2': (0.0,),  # wide, of all mixed groups; centre
        'replay.c3': (1.0,),
    },
    learning={
        'learner.anchor': 'behaviour',  # centre; v1_proximal_lr2e-4, v1_decoupled_lr2e-4
        'learner.kl_target': 'behaviour',  # centre; kl_reference, kl_none
    },
)

METHODS: dict[str, Method] = {
    'grpo': _GRPO,
    'grpo_v5': _GRPO.but(
        'off-policy GRPO: rollouts from a policy up to v steps old',
        'Mroueh et al., arXiv 2505.22257',
        schedule={'rollout.sync_every': 5},
        learning={'learner.anchor': 'behaviour'},
    ),
    'dr_grpo': _GRPO.but(
        'Dr.GRPO: rewards centred, not scaled; sum over tokens divided by the length limit; no KL',
        'arXiv 2503.20783',
        learning={
            'learner.advantage': 'centred',
            'learner.aggregation': 'seq_mean_token_sum',
            'learner.kl_target': 'none',
        },
        of_task={},
    ),
    'gspo': _GRPO.but(
        'GSPO: importance ratio per response (geometric mean over tokens); narrow trust region; no KL',
        'arXiv 2507.18071',
        learning={
            'learner.ratio_level': 'sequence',
            'learner.clip_low': 3e-4,
            'learner.clip_high': 4e-4,
            'learner.dual_clip': 0.0,
            'learner.aggregation': 'seq_mean_token_mean',
            'learner.kl_target': 'none',
        },
        of_task={},
    ),
    'cispo': _GRPO.but(
        'CISPO: importance weights clipped from above, no gradient masked; no KL',
        'MiniMax-M1, arXiv 2506.13585; bounds as in verl',
        learning={
            'learner.surrogate': 'cispo',
            'learner.clip_low': 10.0,
            'learner.clip_high': 0.2,
            'learner.dual_clip': 0.0,
            'learner.kl_target': 'none',
        },
        of_task={},
    ),
    'maxrl': _GRPO.but(
        'MaxRL: rewards centred and divided by their mean (the gradient of the log pass rate); no KL',
        "arXiv 2602.02710 and its authors' code",
        learning={'learner.advantage': 'over_mean', 'learner.kl_target': 'none'},
        of_task={},
    ),
    'dapo': _GRPO.but(
        'DAPO: samples until B groups are mixed, at most 4 batches; clip-higher; soft overlong punishment; '
        'no KL, no entropy bonus',
        'arXiv 2503.14476; at most 4 batches a step as in arXiv 2602.20722, Figure 9',
        schedule={'rollout.refill_batches': 4, 'rollout.overlap': False},
        batch={'replay.fresh_filter': 'range', 'task.overlong_share': 0.5},
        learning={
            'learner.kl_target': 'none',
            'learner.entropy_coef': 0.0,
            'learner.clip_high': 0.28,
            'learner.dual_clip': 10.0,
        },
        of_task={},
    ),
    'mopps': _GRPO.but(
        'MoPPS: chooses, from 16 batches of candidates, the prompts whose Thompson-sampled success rate is '
        'closest to 0.5',
        'arXiv 2507.04632 and its scripts',
        prompts={
            'prompts.selector': 'mopps',
            'prompts.mopps.candidates': 16,
            'prompts.mopps.target': 0.5,
            'prompts.mopps.decay': 1.0,
        },
        learning={'learner.kl_target': 'none', 'learner.clip_high': 0.28, 'learner.dual_clip': 10.0},
        of_task={
            task: {'prompts.mopps.candidates': 8, 'prompts.mopps.decay': 0.5}
            for task in ('countdown', 'geometry')
        },
    ),
    'repo': _GRPO.but(
        'RePO: adds to each fresh group the newest earlier responses of its prompt, normalised separately; '
        'other choices are replay.repo.retrieve=all, reward and variance',
        'arXiv 2506.09340 and its code',
        batch={'replay.kind': 'repo', 'replay.repo.retrieve': 'recent', 'replay.repo.normalisation': 'split'},
        learning={
            'learner.anchor': 'behaviour',
            'learner.kl_target': 'none',
            'learner.aggregation': 'seq_mean_token_mean',
        },
        of_task={},
    ),
    'remix': _GRPO.but(
        'ReMix: recent policies answer 0.4 of the prompts; two passes per batch; KL to base and last policy; '
        'GRPO after step 50',
        'arXiv 2507.06892',
        schedule={'rollout.mixture.share': 0.4, 'rollout.overlap': False, 'rollout.mixture.policies': 2},
        learning={
            'learner.anchor': 'behaviour',
            'learner.clip_centre': 'proximal',
            'learner.kl_target': 'convex',
            'learner.passes_per_batch': 2,
            'learner.switch_step': 50,
        },
        of_task={},
    ),
    'ppo': _GRPO.but(
        'PPO: a critic predicts a value for every token; advantages from GAE',
        "arXiv 1707.06347; verl's PPO",
        learning={'learner.kl_target': 'none', 'learner.advantage': 'gae'},
        of_task={
            **_GRPO.of_task,
            'quickstart': {'learner.learning_rate': 1e-4, 'critic.learning_rate': 5e-4},
        },
    ),
    'ba_ppo': _BAPO.but(
        'BA-PPO: PPO on the adaptive batch; the current critic values replayed groups',
        'arXiv 2602.20722, section A.9',
        batch={
            'replay.fresh_filter': 'range',
            'replay.c2': (4 / 8,),
            'replay.c3': (5 / 8,),
            'replay.bad_capacity': 64,
            'replay.high_capacity': 64,
        },
        learning={'learner.advantage': 'gae'},
        of_task={'quickstart': {'critic.learning_rate': 5e-4}},
    ),
    'bapo': _BAPO,
    'bapo_tuned': _TUNED,
    'bapo_guarded': _TUNED.but(
        'bapo_tuned with rewards divided by their mean (MaxRL) and a KL to the initial policy; keeps pass@8 '
        'in the quickstart',
        'studies/second_proof, parts 4 and 7',
        learning={
            'learner.advantage': 'over_mean',
            'learner.kl_target': 'reference',
            'learner.kl_coef': 0.05,
        },
    ),
    'bapo_posterior': _TUNED.but(
        'bapo_tuned that re-evaluates hard prompts after an epoch, first those whose next group is most '
        'likely to be mixed',
        'studies/second_proof; pooling as in Reinforce-Ada, arXiv 2510.04996',
        batch={
            'replay.use_x2': True,
            'replay.reevaluate': 'posterior',
            'replay.posterior.pool_within': 0.05,
            'replay.improved_rule': 'mixed',
            'replay.bad_capacity': 1_000_000,
        },
    ),
    'bapo_continue': _TUNED.but(
        'bapo_tuned that re-evaluates hard prompts from a prefix of a correct response, long enough that '
        'about half succeed',
        'studies/second_proof, after PrefixRL, arXiv 2601.18795',
        batch={'replay.use_x2': True, 'replay.reevaluate': 'continue', 'replay.improved_rule': 'mixed'},
    ),
    'bapo_official': _BAPO.but(
        "BAPO as in the authors' released code, but on intact groups",
        'waunx/BAPO_ICLR at 426b5098; docs/reference/departures.md',
        schedule={'rollout.sync_phase': 'code'},
        batch={
            'replay.fresh_filter': 'range',
            'replay.improved_rule': 'strict_increase',
            'replay.shared_pool': True,
            'replay.c2': (1 / 8,),
            'replay.c3': (3 / 8,),
        },
        learning={
            'learner.anchor': 'decoupled',
            'learner.importance_cap': 3.0,
            'learner.kl_target': 'proximal',
            'learner.mini_batches': 'released',
        },
    ),
    'bapo_mini': _BAPO.but(
        'the parameter-free Mini-test: re-evaluates prompts without a correct response, replays half-correct '
        'groups',
        'arXiv 2602.20722, section 5.2',
        schedule={'rollout.sync_every': 2, 'replay.reevaluate_every': 2},
        batch={'replay.fresh_filter': 'range', 'replay.c1': 0.0, 'replay.c2': (0.5,), 'replay.c3': (0.5,)},
        learning={'learner.kl_target': 'none', 'learner.clip_high': 0.28, 'learner.dual_clip': 10.0},
    ),
    'bapo_no_x2': _BAPO.but(
        'BAPO without re-evaluation', 'arXiv 2602.20722, Figure 6', batch={'replay.use_x2': False}
    ),
    'bapo_no_x3': _BAPO.but(
        'BAPO without replay', 'arXiv 2602.20722, Figure 6', batch={'replay.use_x3': False}
    ),
}


def apply_method(config: ConfigDict, name: str, task: str = '') -> None:
    """Writes a row's overrides into the config, including those for `task` (a name in configs/).

    Raises ValueError if the method is unknown.
    """
    if name not in METHODS:
        raise ValueError(f'method {name!r} is unknown{did_you_mean(name, METHODS)}; see `bapo-methods`')
    row = METHODS[name]
    config.update_from_flattened_dict({**row.fields, **row.of_task.get(task, {})})
    config.method = name


def differs_from(name: str, other: str) -> Fields:
    """The overrides of a row that the other row does not have with the same value."""
    theirs = METHODS[other].fields
    return {field: value for field, value in METHODS[name].fields.items() if theirs.get(field) != value}


def differs_from_grpo(name: str) -> Fields:
    """The overrides of a row that GRPO's row does not have with the same value."""
    return differs_from(name, 'grpo')


def _in_words(name: str, width: int) -> str:
    """A row for the terminal: its summary and its fields by choice; * marks those that differ from GRPO."""
    row, differing = METHODS[name], differs_from_grpo(name)
    lines = [name, hanging(f'{row.summary} ({row.source})', width, '  ', '  ')]
    choices = {
        'which prompts': row.prompts,
        'which policy answers': row.schedule,
        'what is trained on': row.batch,
        'how it learns': row.learning,
    }
    for choice, fields in choices.items():
        said = (f'{"*" if f in differing else ""}{f.partition(".")[2]}={v}' for f, v in fields.items())
        whole = ' '.join(word.replace(', ', ',') for word in said)
        lines += [hanging(whole, width, f'  {choice:<22}', ' ' * 24)] if fields else []
    return '\n'.join(lines)


def run() -> None:
    """The command: prints the table."""
    open_streams()
    CommandParser(__doc__).parse_args()
    with ends_with_its_reader():
        print(*(_in_words(name, columns()) for name in METHODS), '* differs from GRPO', sep='\n\n')


if __name__ == '__main__':
    run()
