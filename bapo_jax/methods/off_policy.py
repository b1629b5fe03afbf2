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
    'kimi': GRPO.but(
        'Kimi k1.5: prompts by their failure rate; regression of the log ratio of whole responses on '
        'rewards; partial rollouts; length reward; Adam begins anew at each step',
        'arXiv 2501.12599',
        prompts={'prompts.selector': 'prioritised'},
        schedule={'rollout.step_share': 0.5, 'rollout.overlap': False},
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
    'arpo': GRPO.but(
        'ARPO: where a whole group failed, an earlier success of its prompt takes the place of a response; '
        'clip-higher; no KL',
        'arXiv 2505.16282 and its code',
        batch={'replay.kind': 'arpo', 'replay.arpo.per_prompt': 8},
        learning={
            'learner.clip_high': 0.3,
            'learner.kl_target': 'none',
            'learner.aggregation': 'seq_mean_token_mean',
        },
        of_task={},
    ),
    'fifo': GRPO.but(
        'replay without removal: trains on a uniform sample of the newest groups, two for each fresh group; '
        'no KL',
        'Arnal et al., arXiv 2604.08706',
        batch={'replay.kind': 'fifo', 'replay.fifo.ratio': 2},
        learning={'learner.anchor': 'behaviour', 'learner.kl_target': 'none'},
        of_task={},
    ),
    'freshper': GRPO.but(
        'FreshPER: replays earlier groups by a priority that ages, beside every fresh group; no KL',
        'arXiv 2604.16918 and its code',
        batch={
            'replay.kind': 'freshper',
            'replay.freshper.tau': 500.0,
            'replay.freshper.alpha': 0.6,
            'replay.freshper.beta': 0.4,
        },
        learning={'learner.anchor': 'behaviour', 'learner.kl_target': 'none'},
        of_task={},
    ),
    'exgrpo': GRPO.but(
        'ExGRPO: asks prompts again that are solved at times, and lets a likely earlier success lead the '
        'group, with a shaped loss; rewards centred; no clip, no KL',
        'arXiv 2510.02245 and its code',
        batch={'replay.kind': 'exgrpo', 'replay.exgrpo.share': 0.5, 'replay.exgrpo.start_above': 0.35},
        learning={
            'learner.surrogate': 'unclipped',
            'learner.traces.loss': 'shaped',
            'learner.traces.gamma': 0.1,
            'learner.advantage': 'centred',
            'learner.aggregation': 'seq_mean_token_sum',
            'learner.kl_target': 'none',
        },
        of_task={},
    ),
    'dots': GRPO.but(
        'DOTS and rollout replay: prompts with a success rate near 1/2, predicted from references; half of a '
        'batch is replayed',
        'arXiv 2506.05316 and its code',
        prompts={
            'prompts.selector': 'dots',
            'prompts.dots.references': 256,
            'prompts.dots.cycle': 2,
            'prompts.dots.tau': 1e-3,
        },
        batch={'replay.kind': 'rollout_replay'},
        # The code clips π_θ / α to π_prox / α · [1 - ε, 1 + ε]: PPO's term times π_prox / α, uncapped.
        learning={
            'learner.anchor': 'decoupled',
            'learner.importance_cap': 1e6,
            'learner.dual_clip': 0.0,
            'learner.kl_target': 'none',
        },
        of_task={},
    ),
    'm2po': GRPO.but(
        'M2PO: importance sampling without a clip, and without the tokens that moved farthest from the '
        'behaviour policy; no KL, no entropy bonus',
        "arXiv 2510.01161, Algorithm 1; its authors' script",
        schedule={'rollout.sync_every': 5},
        learning={
            'learner.trust.kind': 'second_moment',
            'learner.trust.moment': 0.04,
            'learner.surrogate': 'unclipped',
            'learner.anchor': 'behaviour',
            'learner.kl_target': 'none',
            'learner.entropy_coef': 0.0,
        },
        of_task={},
    ),
    'sat': GRPO.but(
        'SAT: a narrower clip for the tenth of tokens that moved farthest from the behaviour policy; no KL',
        'arXiv 2607.18722',
        schedule={'rollout.sync_every': 8},
        learning={
            'learner.trust.kind': 'staleness',
            'learner.trust.quantile': 0.9,
            'learner.anchor': 'behaviour',
            'learner.dual_clip': 0.0,
            'learner.kl_target': 'none',
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
