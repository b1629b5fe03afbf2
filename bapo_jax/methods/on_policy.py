"""GRPO, and the rows that change its prompts, sampling, loss or advantage, without replay."""

from __future__ import annotations

from bapo_jax.methods.method import Method

# GRPO as in the paper's baseline (verl): ratio to the policy at the step's start, KL to the initial policy.
GRPO = Method(
    summary='GRPO: trains once on every fresh group',
    source='DeepSeekMath, arXiv 2402.03300',
    schedule={'rollout.sync_every': 1},
    batch={'replay.fresh_filter': 'none', 'replay.use_x2': False, 'replay.use_x3': False},
    learning={'learner.anchor': 'proximal', 'learner.kl_target': 'reference'},
    # In the authors' script: one optimizer step on all 256 groups, and a weaker KL.
    of_task={'countdown': {'learner.kl_coef': 0.001, 'learner.mini_batch_groups': 256}},
)

ON_POLICY: dict[str, Method] = {
    'grpo': GRPO,
    'grpo_v5': GRPO.but(
        'off-policy GRPO: rollouts from a policy up to v steps old',
        'Mroueh et al., arXiv 2505.22257',
        schedule={'rollout.sync_every': 5},
        learning={'learner.anchor': 'behaviour'},
    ),
    'dr_grpo': GRPO.but(
        'Dr.GRPO: rewards centred, not scaled; sum over tokens divided by the length limit; no KL',
        'arXiv 2503.20783',
        learning={
            'learner.advantage': 'centred',
            'learner.aggregation': 'seq_mean_token_sum',
            'learner.kl_target': 'none',
        },
        of_task={},
    ),
    'gspo': GRPO.but(
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
    'cispo': GRPO.but(
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
    'maxrl': GRPO.but(
        'MaxRL: rewards centred and divided by their mean (the gradient of the log pass rate); no KL',
        "arXiv 2602.02710 and its authors' code",
        learning={'learner.advantage': 'over_mean', 'learner.kl_target': 'none'},
        of_task={},
    ),
    'dapo': GRPO.but(
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
    'f_grpo': GRPO.but(
        'F-GRPO: prompts that the policy mostly solves count less: advantages times (1 - success rate)^0.5; '
        'no KL',
        'arXiv 2602.06717',
        learning={'learner.advantage': 'focal', 'learner.kl_target': 'none'},
        of_task={},
    ),
    'dppo': GRPO.but(
        "DPPO: no gradient where a token's probability has moved too far, instead of its ratio; no KL, no "
        'entropy bonus',
        "arXiv 2602.04879, Binary-TV, and its authors' recipe",
        learning={
            'learner.surrogate': 'binary_tv',
            'learner.anchor': 'behaviour',
            'learner.clip_low': 0.15,
            'learner.clip_high': 0.15,
            'learner.dual_clip': 0.0,
            'learner.advantage': 'centred',
            'learner.aggregation': 'seq_mean_token_sum',
            'learner.kl_target': 'none',
            'learner.entropy_coef': 0.0,
        },
        of_task={},
    ),
    'gapo': GRPO.but(
        'GAPO: the fewer responses of a group are correct, the higher the upper end of their clip; '
        'importance ratio per response; no KL, no entropy bonus',
        'arXiv 2609.00444',
        learning={
            'learner.trust.kind': 'success',
            'learner.ratio_level': 'sequence',
            'learner.clip_low': 3e-3,
            'learner.clip_high': 5e-3,
            'learner.dual_clip': 0.0,
            'learner.advantage': 'centred',
            'learner.aggregation': 'seq_mean_token_mean',
            'learner.kl_target': 'none',
            'learner.entropy_coef': 0.0,
        },
        of_task={},
    ),
    'mopps': GRPO.but(
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
    'adaprefix': GRPO.but(
        'AdaPrefix: prompts are asked from a prefix of a correct response, long enough that half succeed; '
        'later withdrawn',
        "arXiv 2607.07674 (abstract); the control law is this project's own",
        prompts={
            'prompts.selector': 'adaprefix',
            'prompts.adaprefix.gain': 0.25,
            'prompts.adaprefix.withdrawal': (0.6, 0.8),
        },
    ),
    'ppo': GRPO.but(
        'PPO: a critic predicts a value for every token; advantages from GAE',
        "arXiv 1707.06347; verl's PPO",
        learning={'learner.kl_target': 'none', 'learner.advantage': 'gae'},
        of_task={
            **GRPO.of_task,
            'quickstart': {'learner.learning_rate': 1e-4, 'critic.learning_rate': 5e-4},
        },
    ),
}
