"""Related systems that train on what other policies wrote: replay, mixtures, traces, stale responses."""

from __future__ import annotations

from bapo_jax.methods.method import Method
from bapo_jax.methods.on_policy import GRPO

# The objective of the policy's own responses in LUFFY and ReLIFT.
_WITHOUT_CLIP = {
    'learner.surrogate': 'unclipped',
    'learner.advantage': 'centred',
    'learner.aggregation': 'seq_mean_token_sum',
    'learner.kl_target': 'none',
}
_SOLVED = {'quickstart': {'replay.given_by': 'solver'}}  # it needs no file of traces

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
    'luffy': GRPO.but(
        'LUFFY: a response by another author in each fresh group, in a shaped objective; rewards centred; no '
        'clip, no KL',
        'arXiv 2504.14945 and its code',
        batch={'replay.kind': 'luffy'},
        learning={**_WITHOUT_CLIP, 'learner.traces.loss': 'shaped', 'learner.traces.gamma': 0.1},
        of_task=_SOLVED,
    ),
    'relift': GRPO.but(
        'ReLIFT: supervised learning from others of the prompts that the policy fails; rewards centred; no '
        'clip, no KL',
        'arXiv 2506.07527 and its code',
        batch={'replay.kind': 'relift'},
        learning={**_WITHOUT_CLIP, 'learner.traces.loss': 'cross_entropy'},
        of_task=_SOLVED,
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
