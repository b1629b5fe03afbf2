"""This project's rows of peers.py: `Learner.update` on groups of the workload's data, and an iteration with
the in-process engine.

    python -m benchmarks.peers.ours update DIR 'a sequence a row, 16 rows' 5
    python -m benchmarks.peers.ours iteration DIR 'a sequence a row, 16 rows' 5

DIR is a workload's, written by peers_torch.py. Prints one line of JSON: seconds of 5 updates or iterations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from benchmarks.peers import data as peers_data
from ml_collections import ConfigDict
from benchmarks.peers.data import (
    CLIP,
    GRAD_CLIP,
    LEARNING_RATE,
    SEED,
    WEIGHT_DECAY,
    Data,
    Workload,
    report,
    timed,
)
from benchmarks.host.step_phases import matmul_rate

from bapo_jax.config import default_config, resolve
from bapo_jax.groups import X1, Group, Prompt, Response, Verdict, make_batch, sampled
from bapo_jax.learner.build import build_learner
from bapo_jax.learner.update import TrainState
from bapo_jax.methods import Fields
from bapo_jax.rollout.engine import FRESH, Draw, Sampling
from bapo_jax.rollout.inprocess.engine import JaxEngine
from bapo_jax.rollout.inprocess.room import Limits

DEVICES = 2  # one for each core
WARM_UP = 2  # updates or iterations that do not count


def whole(w: Workload) -> int:
    """Tokens of the longest sequence."""
    return w.prompt_tokens + w.response_tokens


# The rows of the table: fields of the config that depend on the workload.
SETTINGS: dict[str, Callable[[Workload], Fields]] = {
    'a sequence a row, 16 rows': lambda w: {'learner.row_tokens': whole(w), 'learner.micro_batch_rows': 16},
    'each prompt once, 4 rows': lambda w: {
        'learner.slot_tokens': w.response_tokens,
        'learner.row_tokens': w.prompt_tokens + w.group_size * w.response_tokens,
        'learner.micro_batch_rows': 4,
    },
    'two sequences a row, 16 rows': lambda w: {
        'learner.row_tokens': 2 * whole(w),
        'learner.micro_batch_rows': 16,
    },
}
# What they share: GRPO as the other frameworks compute it here.
SHARED = {
    'seed': SEED, 'rollout.sync_every': 1, 'rollout.rows': 64, 'mesh.data': DEVICES, 'mesh.fsdp': 1, 'learner.mini_batches': 'released',
    'learner.learning_rate': LEARNING_RATE, 'learner.weight_decay': WEIGHT_DECAY, 'learner.grad_clip': GRAD_CLIP,
    'learner.clip_low': CLIP, 'learner.clip_high': CLIP, 'learner.dual_clip': 0.0, 'learner.anchor': 'behaviour',
    'learner.kl_target': 'none', 'learner.entropy_coef': 0.0, 'learner.aggregation': 'token_mean',
    'learner.advantage': 'group_std',
}  # fmt: skip


def make_config(directory: Path, w: Workload, setting: str) -> ConfigDict:
    config = default_config()
    config.update_from_flattened_dict({
        **SHARED, 'model.path': str(directory / 'model'), 'rollout.max_prompt_tokens': w.prompt_tokens,
        'rollout.max_response_tokens': w.response_tokens, 'rollout.group_size': w.group_size, 'learner.batch_groups': w.prompts,
        'learner.mini_batch_groups': w.prompts // w.optimizer_steps, **SETTINGS[setting](w),
    })  # fmt: skip
    return resolve(config)


def responses_of(data: Data, logp: np.ndarray) -> list[tuple[Response, ...]]:
    """The responses to each prompt, as an engine whose policy gives them these log-probs [P, G, L] would
    return them.
    """

    def one(i: int, j: int) -> Response:
        n = data.lengths[i, j]
        return sampled(data.responses[i, j, :n].copy(), logp[i, j, :n].copy(), 'length', version=0)

    return [tuple(one(i, j) for j in range(data.lengths.shape[1])) for i in range(len(data.prompts))]


def groups_of(
    prompts: Sequence[Prompt], answers: Sequence[tuple[Response, ...]], rewards: np.ndarray
) -> list[Group]:
    """A group for each of `answers`, the first prompts' where there are fewer."""
    verdicts = {1.0: Verdict.CORRECT, 0.0: Verdict.WRONG}
    return [
        Group(prompt, answer, tuple(verdicts[float(r)] for r in of_group), of_group, step=0)
        for prompt, answer, of_group in zip(prompts, answers, rewards, strict=False)
    ]


def measure(what: str, directory: Path, name: str, repeats: int) -> dict[str, Any]:
    """Seconds of `repeats` updates or iterations, and of each iteration's generation; and what is compared
    with the others.
    """
    jax.config.update('jax_num_cpu_devices', DEVICES)
    w, data = peers_data.load(directory)
    c = make_config(directory, w, name)
    learner = build_learner(c)
    limits = Limits(c.rollout.rows // learner.mesh.size, w.prompt_tokens)
    engine = JaxEngine(
        learner.graph, learner.model, (w.vocabulary,), limits, learner.mesh
    )  # with an end that is never sampled
    prompts = [Prompt(i, 'countdown', tokens, {}) for i, tokens in enumerate(data.prompts)]

    def update(
        state: TrainState, answers: Sequence[tuple[Response, ...]]
    ) -> tuple[TrainState, dict[str, float]]:
        groups = groups_of(prompts, answers, data.rewards)
        state, metrics = learner.update(
            state, make_batch(groups, [X1] * len(groups)), np.random.default_rng(SEED)
        )
        return jax.block_until_ready(state), metrics

    def iteration(state: TrainState, step: int) -> tuple[float, TrainState]:
        engine.load(state.params, step)
        draws = [Draw(SEED, step, FRESH)] * len(prompts)
        generate_s, answers = timed(
            lambda: engine.generate(prompts, w.group_size, Sampling(1.0, w.response_tokens), draws)
        )
        return generate_s, update(state, answers)[0]

    on_policy = update(
        learner.init(learner.read_initial()),
        responses_of(data, data.initial)[: w.prompts // w.optimizer_steps],
    )[1]
    given = responses_of(data, data.behaviour)
    state, metrics = update(learner.init(learner.read_initial()), given)
    seconds, generation = [], []
    for step in range(WARM_UP + repeats):
        if what == 'iteration':
            seconds_of_step, (generate_s, state) = timed(lambda: iteration(state, step))
            generation.append(generate_s)
        else:
            seconds_of_step, (state, _) = timed(lambda: update(state, given))
        seconds.append(seconds_of_step)
    return {
        'loss': metrics['actor/pg_loss'], 'grad_norm': metrics['actor/grad_norm'], 'on_policy_norm': on_policy['actor/grad_norm'],
        'seconds': seconds[WARM_UP:], 'generation': generation[WARM_UP:], 'matrix_flops': matmul_rate(c.model.dtype),
        'versions': peers_data.versions('jax', 'flax'),
    }  # fmt: skip


if __name__ == '__main__':
    report(**measure(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
