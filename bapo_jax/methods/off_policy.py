"""Related systems that train on what other policies wrote: replay, mixtures, traces, stale responses."""

from __future__ import annotations

from bapo_jax.methods.method import Method
from bapo_jax.methods.on_policy import GRPO

OFF_POLICY: dict[str, Method] = {
    'kimi': GRPO.but(
        'Kimi k1.5: regression of the log ratio of whole responses on rewards; partial rollouts; length '
        'reward; Adam begins anew at each step',
        'arXiv 2501.12599',
        schedule={'rollout.step_share': 0.5},
        batch={'task.length_weight': 0.1},
        learning={
            'learner.anchor': 'behaviour',
            'learner.ratio_level': 'response',
            'learner.surrogate': 'regression',
            'learner.tau': 0.01,
            'learner.advantage': 'centred',
            'learner.aggregation': 'seq_mean_token_sum',
            'learner.kl_target': 'none',
            'learner.entropy_coef': 0.0,
            'learner.reset_every': 1,
        },
        of_task={},
    ),
    'areal': GRPO.but(
        "AReaL: up to η steps are requested before a sync; ratio to the policy at the step's start, times "
        'its ratio to the policies that sampled the tokens; no KL',
        'arXiv 2505.24298 and its code',
        schedule={'rollout.overlap': True, 'rollout.most_behind': 4},
        learning={
            'learner.anchor': 'decoupled',
            'learner.importance_cap': 5.0,
            'learner.importance_rule': 'mask',
            'learner.kl_target': 'none',
            'learner.entropy_coef': 0.0,
        },
        of_task={},
    ),
    'repo': GRPO.but(
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
    'remix': GRPO.but(
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
}
