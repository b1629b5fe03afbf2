"""Rules between fields. Each rule records its problems and continues, so that all are reported at once."""

from __future__ import annotations

import numpy as np
from ml_collections import ConfigDict

from bapo_jax.config.field import Need
from bapo_jax.config.own_code import check_own_code
from bapo_jax.config.rollout_rules import check_rollout
from bapo_jax.machine.terminal import without_passwords
from bapo_jax.methods import METHODS
from bapo_jax.own.method import is_own
from bapo_jax.replay.failures import LAGS
from bapo_jax.replay.kinds import TRACED
from bapo_jax.replay.thresholds import TOLERANCE
from bapo_jax.tasks import custom_reward, get_task


def check_run(c: ConfigDict, need: Need) -> None:
    need(c.method in METHODS, f'method={c.method!r} is unknown; choose one of {", ".join(METHODS)}')
    need(
        c.steps > 0 or c.epochs > 0, 'steps and epochs are both 0: nothing would be trained; set one of them'
    )
    no_passwords(need, c)


def no_passwords(need: Need, c: ConfigDict, section: str = '') -> None:
    """Refuses URLs with a user or password, since every reader of a run's config.json could see them."""
    for name, field in c.items():
        if isinstance(field, ConfigDict):
            no_passwords(need, field, f'{section}{name}.')
        else:
            texts = [
                text
                for text in (field if isinstance(field, (list, tuple)) else [field])
                if isinstance(text, str)
            ]
            need(
                texts == [without_passwords(text) for text in texts],
                f'{section}{name} has a URL with a user name or password, which config.json would show; '
                'remove them',
            )


def check_model(c: ConfigDict, need: Need) -> None:
    need(
        bool(c.model.path),
        'model.path is empty; give a Hugging Face model directory, or a hub name owner/name',
    )
    pixels = c.model.pixels
    if len(pixels) != 2 or min(pixels) < 0:
        need(
            False,
            f'model.pixels={pixels} must be two numbers of at least 0: the fewest and the most pixels of an '
            'image',
        )
        return
    least, most = pixels
    need(not most or least <= most, f'model.pixels={pixels}: the first number exceeds the second; lower it')


def check_replay(c: ConfigDict, need: Need) -> None:
    p = c.replay
    need(
        p.kind == 'bapo' or is_own(p.kind) or (p.fresh_filter == 'none' and not p.use_x2 and not p.use_x3),
        f'replay.kind={p.kind} trains on all fresh groups and has its own replay; set '
        f'replay.fresh_filter=none (not {p.fresh_filter!r}), replay.use_x2=False and replay.use_x3=False',
    )
    G = c.rollout.group_size
    need(
        not p.use_x2
        or p.improved_rule != 'threshold'
        or not 0 <= p.c1 < 1
        or any(k > p.c1 * G + TOLERANCE for k in range(1, G)),
        f'replay.c1={p.c1}: no mixed group of rollout.group_size={G} has a higher accuracy, so X2 would '
        'always be empty; lower c1, or set replay.use_x2=False',
    )
    c2, c3 = np.atleast_1d(p.c2), np.atleast_1d(p.c3)
    if c2.shape not in ((1,), (2,)) or c3.shape not in ((1,), (2,)):
        need(
            False,
            f'replay.c2={p.c2} and replay.c3={p.c3} must each be one number or (value at r_tot = 0, value at '
            'r_tot = 1)',
        )
        return
    need(
        c2[0] <= c3[0] and c2[-1] <= c3[-1],
        f'replay.c2={p.c2} exceeds replay.c3={p.c3} at r_tot = 0 or 1, so no accuracy lies between '
        'them; lower replay.c2, or swap the two',
    )
    need(
        0 <= min(*c2, *c3) and max(*c2, *c3) <= 1,
        f'replay.c2={p.c2} and replay.c3={p.c3} must be accuracies, in [0, 1]',
    )


def reads_traces(c: ConfigDict) -> bool:
    """Whether the method learns from responses of other authors."""
    return c.replay.kind in TRACED


def check_traces(c: ConfigDict, need: Need) -> None:
    p, l = c.replay, c.learner  # noqa: E741
    loss = l.traces.loss
    need(
        not reads_traces(c) or loss == 'cross_entropy' or loss == 'shaped' and p.kind != 'relift',
        f'replay.kind={p.kind}: learner.traces.loss={loss} trains on none of its traces; set '
        f'learner.traces.loss={"cross_entropy" if p.kind == "relift" else "shaped"}',
    )
    need(
        loss == 'none' or reads_traces(c) or is_own(p.kind),
        f'learner.traces.loss={loss}, but batches of replay.kind={p.kind} have no traces; set '
        f'learner.traces.loss=none, or replay.kind to one of {", ".join(TRACED)}',
    )
    need(
        not p.traces.file or reads_traces(c),
        f'replay.traces.file={p.traces.file!r} is not read by replay.kind={p.kind}; remove it, or set '
        f'replay.kind to one of {", ".join(TRACED)}',
    )
    need(
        loss == 'none' or l.advantage != 'gae',
        f'learner.traces.loss={loss}: the critic of learner.advantage=gae has no values for what others '
        'wrote; set another learner.advantage, such as centred',
    )


def full_batch_updates(c: ConfigDict) -> int:
    """An upper bound on a run's optimizer steps.

    It is steps × ⌈groups of a full batch / mini_batch_groups⌉ × passes_per_batch. A partly filled batch has
    fewer, and so has a method after its switch_step. It is 0 if the number of steps depends on the data
    (`epochs`).
    """
    groups = c.learner.batch_groups + (c.replay.kind == 'relift') * c.replay.traces.demonstrations
    a_pass = -(-groups // max(1, c.learner.mini_batch_groups))  # 0 is refused later
    return c.steps * a_pass * c.learner.passes_per_batch


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


def check_task(c: ConfigDict, need: Need) -> None:
    try:
        task = get_task(c.task.name)
        need(
            c.task.template in task.TEMPLATES,
            f'task.template={c.task.template!r} is unknown; choose one of {", ".join(task.TEMPLATES)}',
        )
        solved = getattr(task, 'SOLUTIONS', {})
        need(
            c.task.template in solved or (c.replay.reevaluate, c.replay.given_by) != ('continue', 'solver'),
            f'replay.given_by=solver: task.name={c.task.name} only has solutions for the templates '
            f'{", ".join(solved) or "(none)"}, not for task.template={c.task.template}; set '
            'replay.given_by=policy',
        )
    except ValueError as error:
        need(False, str(error))
    try:
        custom_reward.find_reward(c.task.reward)
    except ValueError as error:
        need(False, str(error))


def check_mesh(c: ConfigDict, need: Need) -> None:
    need(
        not (c.mesh.frozen_on_host and c.rollout.engine == 'jax'),
        'mesh.frozen_on_host=True: the in-process engine needs α on the devices; set '
        'mesh.frozen_on_host=False, or rollout.engine=vllm',
    )


def check_critic(c: ConfigDict, need: Need) -> None:
    gae = c.critic.gae
    need(
        len(gae) == 2 and 0 < gae[0] <= 1 and 0 <= gae[1] <= 1,
        f'critic.gae={gae} must be two numbers: γ in (0, 1] and λ in [0, 1]',
    )


def check_log(c: ConfigDict, need: Need) -> None:
    g = c.log
    for sink in g.sinks:
        need(
            sink in ('trackio', 'wandb'),
            f'log.sinks has {sink!r}, which is unknown; choose from trackio, wandb',
        )
    need(len(set(g.sinks)) == len(g.sinks), f'log.sinks={g.sinks} names a sink twice; list each once')
    again = g.failed_again.prompts
    need(
        again >= 0 and again % len(LAGS) == 0,
        f'log.failed_again.prompts={again} must be 0 or a multiple of {len(LAGS)}: each lag of {LAGS} steps '
        'gets the same number of prompts',
    )


CROSS_RULES = (
    check_run,
    check_model,
    check_task,
    check_rollout,
    check_replay,
    check_traces,
    check_learner,
    check_critic,
    check_mesh,
    check_log,
    check_own_code,
)
