"""BAPO: the paper, its ablations, its released code, and the rows that studies here support."""

from __future__ import annotations

from bapo_jax.methods.method import Method

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

BAPO_ROWS: dict[str, Method] = {
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
