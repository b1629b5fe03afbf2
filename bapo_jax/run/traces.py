"""Judges a run's traces as its rollouts are judged, once, before it trains."""

from __future__ import annotations

from bapo_jax.groups import Group
from bapo_jax.inputs import Inputs
from bapo_jax.rollout.collect import check_judged, judge
from bapo_jax.rollout.engine import FRESH, Draw
from bapo_jax.tasks.custom_reward import rewards_of
from bapo_jax.tasks.shaping import punish_overlong


def judged_traces(read: Inputs) -> dict[int, Group]:
    """Returns a group of one response for each trace of `read`, by prompt id; their step is 0.

    Traces without a verdict are left out. Raises TooFewJudged if they are more than a fifth, and ValueError
    if the task's verifier finds no trace correct.
    """
    c, rewards = read.config, rewards_of(read.config.task)
    prompts = [prompt for prompt in read.prompts if prompt.id in read.traces.responses]
    responses = [(read.traces.responses[prompt.id],) for prompt in prompts]
    draws = [Draw(c.seed, 0, FRESH)] * len(prompts)
    groups = judge(read.tokenizer, prompts, responses, draws, rewards)
    check_judged(groups, 1)
    judged = [g for g in groups if not g.infra_error]
    if rewards is None and not any(g.correct for g in judged):
        raise ValueError(
            f'{read.traces.source}: the verifier finds none of the {len(judged):,} traces correct; check '
            'that each "prompt_id" is the place of its problem in task.train, counted from 0 after repeats '
            'were left out, and that each "text" has the form of answer that task.template asks for'
        )
    if c.task.overlong_share:
        limit, share = c.rollout.max_response_tokens, c.task.overlong_share
        judged = [punish_overlong(g, limit, share) for g in judged]
    return {g.prompt.id: g for g in judged}
