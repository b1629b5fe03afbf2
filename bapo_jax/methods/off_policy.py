"""Related systems that train on what other policies wrote: replay, mixtures, traces, stale responses."""

from __future__ import annotations

from bapo_jax.methods.method import Method
from bapo_jax.methods.on_policy import GRPO

OFF_POLICY: dict[str, Method] = {
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
