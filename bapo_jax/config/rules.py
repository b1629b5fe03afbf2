"""Rules between fields. Each rule records its problems and continues, so that all are reported at once."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from ml_collections import ConfigDict

from bapo_jax.config.field import Need
from bapo_jax.config.learner_rules import check_critic, check_learner, check_trust
from bapo_jax.config.own_code import check_own_code
from bapo_jax.config.rollout_rules import check_rollout
from bapo_jax.config.trace_rules import check_traces
from bapo_jax.machine.terminal import without_passwords
from bapo_jax.methods import METHODS
from bapo_jax.own.method import is_own
from bapo_jax.replay.exgrpo import led_groups
from bapo_jax.replay.failures import LAGS
from bapo_jax.replay.kinds import OTHER_KINDS
from bapo_jax.replay.thresholds import TOLERANCE
from bapo_jax.tasks import asks_solver, custom_reward, get_task


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


def check_prompts(c: ConfigDict, need: Need) -> None:
    p, r = c.prompts, c.replay
    first_and_last = p.adaprefix.withdrawal
    need(
        len(first_and_last) == 2 and 0 <= first_and_last[0] < first_and_last[1] <= 1,
        f'prompts.adaprefix.withdrawal={first_and_last} must be two shares of the steps, the first below the '
        'second, such as (0.6, 0.8)',
    )
    need(
        p.selector != 'adaprefix' or (r.kind not in ('repo', 'arpo', 'exgrpo', 'luffy') and not r.use_x2),
        "prompts.selector=adaprefix: a prompt's groups continue prefixes of different lengths, and traces "
        'none, so they are not comparable; set replay.kind=bapo and replay.use_x2=False',
    )
    need(
        (p.selector not in ('adaprefix', 'dots') and r.kind != 'rollout_replay')
        or (c.rollout.refill_batches == 1 and c.rollout.step_share == 1),
        f'prompts.selector={p.selector} with replay.kind={r.kind} needs all groups in one step; set '
        'rollout.refill_batches=1 and rollout.step_share=1.0',
    )
    need(
        p.selector != 'dots' or r.kind == 'rollout_replay' or is_own(r.kind),
        f'prompts.selector=dots: replay.kind={r.kind} may also train on the groups of the references; set '
        'replay.kind=rollout_replay, which replays nothing if replay.rollout_replay.fresh is '
        'learner.batch_groups',
    )


def check_replay(c: ConfigDict, need: Need) -> None:
    p = c.replay
    need(
        p.kind not in OTHER_KINDS or (p.fresh_filter == 'none' and not p.use_x2 and not p.use_x3),
        f'replay.kind={p.kind} takes all fresh groups and has its own replay; set replay.fresh_filter=none '
        f'(not {p.fresh_filter!r}), replay.use_x2=False and replay.use_x3=False',
    )
    need(
        p.kind != 'fifo' or p.fifo.capacity >= p.fifo.ratio * c.learner.batch_groups,
        f'replay.fifo.capacity={p.fifo.capacity} is smaller than a batch of replay.fifo.ratio={p.fifo.ratio} '
        f'× learner.batch_groups={c.learner.batch_groups} groups, so nothing would be trained; raise it, or '
        'lower replay.fifo.ratio',
    )
    need(
        p.kind != 'exgrpo' or c.learner.traces.loss != 'none',
        'replay.kind=exgrpo makes traces of stored responses, and learner.traces.loss=none trains on none; '
        'set learner.traces.loss=shaped',
    )
    need(
        p.kind != 'exgrpo'
        or not 0 < p.exgrpo.share < 1
        or led_groups(c.learner.batch_groups, p.exgrpo.share) > 0,
        f'replay.exgrpo.share={p.exgrpo.share} of a batch with '
        f'learner.batch_groups={c.learner.batch_groups} fresh '
        'groups rounds to no group; raise it, or set it to 0',
    )
    need(
        p.kind != 'rollout_replay' or p.rollout_replay.fresh <= c.learner.batch_groups,
        f'replay.rollout_replay.fresh={p.rollout_replay.fresh} exceeds '
        f'learner.batch_groups={c.learner.batch_groups}; lower it',
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


def full_batch_updates(c: ConfigDict) -> int:
    """An upper bound on a run's optimizer steps.

    It is steps × ⌈groups of a full batch / mini_batch_groups⌉ × passes_per_batch. A partly filled batch has
    fewer, and so has a method after its switch_step. It is 0 if the number of steps depends on the data
    (`epochs`).
    """
    a_pass = -(-full_batch_groups(c) // max(1, c.learner.mini_batch_groups))  # 0 is refused later
    return c.steps * a_pass * c.learner.passes_per_batch


def full_batch_groups(c: ConfigDict) -> int:
    """The most groups that a step trains on: B, or more with some kinds of replay."""
    B, p = c.learner.batch_groups, c.replay
    return {
        'fifo': p.fifo.ratio * B,
        'freshper': (1 + p.freshper.ratio) * B,
        'relift': B + p.traces.demonstrations,
        'exgrpo': B + led_groups(B, min(p.exgrpo.share, 0.99)),
    }.get(p.kind, B)


def check_task(c: ConfigDict, need: Need) -> None:
    try:
        task = get_task(c.task.name)
        need(
            c.task.template in task.TEMPLATES,
            f'task.template={c.task.template!r} is unknown; choose one of {", ".join(task.TEMPLATES)}',
        )
        solved = getattr(task, 'SOLUTIONS', {})
        need(
            c.task.template in solved or not asks_solver(c),
            f'replay.given_by=solver: task.name={c.task.name} only has solutions for the templates '
            f'{", ".join(solved) or "(none)"}, not for task.template={c.task.template}; set '
            'replay.given_by=policy',
        )
        need(
            c.task.turns > 0 or c.task.template not in getattr(task, 'TOOL_TEMPLATES', ()),
            f'task.template={c.task.template} offers a tool, and with task.turns=0 nobody replies; set '
            'task.turns=3, say, or another task.template',
        )
        if c.task.turns:
            check_turns(c, task, need)
    except ValueError as error:
        need(False, str(error))
    try:
        custom_reward.find_reward(c.task.reward)
    except ValueError as error:
        need(False, str(error))


def check_turns(c: ConfigDict, task: ModuleType, need: Need) -> None:
    need(
        hasattr(task, 'reply'),
        f'task.turns={c.task.turns}: task.name={c.task.name} has no tool (no function '
        '`reply`); set task.turns=0',
    )
    need(
        not c.replay.use_x2 or c.replay.reevaluate != 'continue',
        f'task.turns={c.task.turns} with replay.reevaluate=continue: a part of a response may end within a '
        "tool's reply; set another replay.reevaluate, or task.turns=0",
    )
    need(
        c.prompts.selector != 'adaprefix',
        f'task.turns={c.task.turns} with prompts.selector=adaprefix: a part of a response may end within a '
        "tool's reply; set another prompts.selector, or task.turns=0",
    )
    getattr(task, 'check_reply', lambda: None)()


def check_mesh(c: ConfigDict, need: Need) -> None:
    need(
        not (c.mesh.frozen_on_host and c.rollout.engine == 'jax'),
        'mesh.frozen_on_host=True: the in-process engine needs α on the devices; set '
        'mesh.frozen_on_host=False, or rollout.engine=vllm',
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
    check_prompts,
    check_replay,
    check_traces,
    check_learner,
    check_trust,
    check_critic,
    check_mesh,
    check_log,
    check_own_code,
)
