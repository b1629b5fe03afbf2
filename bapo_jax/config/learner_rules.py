"""Rules between the fields of the sections of the learner and the critic."""

from __future__ import annotations

from ml_collections import ConfigDict

from bapo_jax.config.field import Need


def check_learner(c: ConfigDict, need: Need) -> None:
    r, l = c.rollout, c.learner  # noqa: E741
    need(
        l.kl_target != 'convex' or r.mixture.share > 0,
        'learner.kl_target=convex needs a previous rollout policy, which differs from the current one only '
        'with rollout.mixture.share above 0; set rollout.mixture.share, or learner.kl_target=reference',
    )
    need(
        l.clip_centre == 'one' or l.anchor == 'behaviour',
        f'learner.clip_centre={l.clip_centre} clips around π_prox / α, but with learner.anchor={l.anchor} '
        'the importance ratio starts at 1; set learner.anchor=behaviour, or learner.clip_centre=one',
    )
    need(
        l.surrogate != 'regression' or (l.ratio_level, l.anchor) == ('response', 'behaviour'),
        f'learner.surrogate=regression squares the log ratio of whole responses to the behaviour policy, not '
        f'learner.ratio_level={l.ratio_level} and learner.anchor={l.anchor}; set '
        'learner.ratio_level=response and learner.anchor=behaviour',
    )
    need(
        l.surrogate != 'binary_tv' or l.ratio_level == 'token',
        'learner.surrogate=binary_tv compares probabilities of tokens, not of responses '
        f'(learner.ratio_level={l.ratio_level}); set learner.ratio_level=token',
    )
    need(
        l.surrogate != 'binary_tv' or l.clip_centre == 'one',
        f'learner.surrogate=binary_tv has no clip centre, but learner.clip_centre={l.clip_centre}; set '
        'learner.clip_centre=one',
    )
    need(
        l.schedule.kind == 'constant' or l.schedule.decay_updates > 0,
        f'learner.schedule.kind={l.schedule.kind} has no optimizer steps to decay over: steps={c.steps} '
        f'leaves none after learner.schedule.warmup_updates={l.schedule.warmup_updates}; set '
        'learner.schedule.decay_updates, lower learner.schedule.warmup_updates, or set steps (more of them, '
        'or instead of epochs)',
    )
    need(
        l.slot_tokens == 0 or l.slot_tokens >= r.max_response_tokens,
        f'learner.slot_tokens={l.slot_tokens} is shorter than '
        f'rollout.max_response_tokens={r.max_response_tokens}; raise it',
    )
    need(
        l.slot_tokens < 1 or (l.row_tokens - r.max_prompt_tokens) % l.slot_tokens == 0,
        f'learner.row_tokens={l.row_tokens} is not rollout.max_prompt_tokens={r.max_prompt_tokens} plus a '
        f'multiple of learner.slot_tokens={l.slot_tokens}; set it to such a sum, or to 0',
    )
    need(
        l.mini_batch_groups <= l.batch_groups,
        f'learner.mini_batch_groups={l.mini_batch_groups} exceeds learner.batch_groups={l.batch_groups}; '
        'lower it',
    )
    need(
        l.row_tokens >= r.max_prompt_tokens + r.max_response_tokens,
        f'learner.row_tokens={l.row_tokens} is shorter than rollout.max_prompt_tokens + '
        f'rollout.max_response_tokens = {r.max_prompt_tokens + r.max_response_tokens}; raise it',
    )


def check_trust(c: ConfigDict, need: Need) -> None:
    l = c.learner  # noqa: E741
    kind = l.trust.kind
    need(
        kind not in ('second_moment', 'staleness') or l.anchor != 'proximal',
        f'learner.trust.kind={kind} measures how far the policy is from the behaviour policy, but '
        'learner.anchor=proximal leaves that out of the ratio; set learner.anchor=behaviour, or '
        'learner.trust.kind=fixed',
    )
    clips = 'clip', 'cispo', 'binary_tv'
    need(
        kind not in ('staleness', 'success') or l.surrogate in clips,
        f'learner.trust.kind={kind} narrows the clip of a token, but learner.surrogate={l.surrogate} does '
        f'not read learner.clip_low and clip_high; set learner.surrogate to one of {", ".join(clips)}, or '
        'learner.trust.kind=fixed',
    )
    need(
        kind != 'success' or l.clip_low < l.clip_high,
        'learner.trust.kind=success moves the upper end of the clip between '
        f'learner.clip_low={l.clip_low} and learner.clip_high={l.clip_high}; set learner.clip_high above '
        'learner.clip_low',
    )
    need(
        kind != 'second_moment' or l.surrogate != 'regression',
        "learner.trust.kind=second_moment masks a token's advantage, but learner.surrogate=regression has a "
        'term without it; set learner.trust.kind=fixed',
    )


def check_critic(c: ConfigDict, need: Need) -> None:
    gae = c.critic.gae
    need(
        len(gae) == 2 and 0 < gae[0] <= 1 and 0 <= gae[1] <= 1,
        f'critic.gae={gae} must be two numbers: γ in (0, 1] and λ in [0, 1]',
    )
