"""What the probe sees of a real Qwen2.5 (Coder, 0.5B, instructed): a sound server, and one that holds an
earlier policy.

    BAPO_DATA=DIR python -m studies.real_policy.map sets runs/map
    python -m studies.real_policy.probe --rate=1e-6 --engine=vllm      # or jax; prints rows, wants 16 GB

Ten optimizer steps, each on two responses of the policy's own, of which one is rewarded: the size of Adam's
first steps hardly depends on what for. A server in bfloat16 is given the policy and answers probes: a real
vLLM server, or, where a CPU multiplies no bfloat16 itself and vLLM takes hours, the in-process engine in
bfloat16. The trainer's log-probs of those answers are computed in three ways: in float32 with weights in
float32, in float32 with weights as shipped, and in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from bapo_jax.groups import X1, Group, Prompt, Verdict, make_batch
from bapo_jax.inputs import read_inputs
from bapo_jax.learner.build import build_learner
from bapo_jax.learner.objective import PROXIMAL
from bapo_jax.rollout.engine import FRESH, PROBE, Draw, Engine, Sampling
from bapo_jax.rollout.fidelity import way
from bapo_jax.rollout.start import start_engine
from bapo_jax.run.state import frozen_copy
from studies.real_policy import math_on_cpu

STEPS, SOUND = 10, (0, 10)  # steps, and those after which sound servers are looked at
BEHIND = (10, 5, 1)  # steps that a server is behind the last policy
PROBES, SIZE, TOKENS = 4, 8, 32  # prompts, and answers to each, of so many tokens


def config_of(model: str, rate: float, dtype: str, engine: str) -> ConfigDict:
    c = math_on_cpu.get_config()
    c.model.path = model
    c.rollout.engine, c.rollout.rows = engine, PROBES * SIZE
    c.replay.use_x2, c.log.failed_again.prompts = False, 0
    c.model.dtype = dtype
    c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 96, TOKENS
    c.rollout.group_size = SIZE
    c.learner.batch_groups = c.learner.mini_batch_groups = 1
    c.learner.micro_batch_rows, c.learner.row_tokens = 2, 0
    c.learner.learning_rate = rate
    c.evaluate.benchmarks = ()
    return c


def answered(engine: Engine, prompts: Sequence[Prompt], size: int, step: int, purpose: int) -> list[Group]:
    """Groups of the server's policy; every second response counts as right."""
    draws = [Draw(0, step, purpose)] * len(prompts)
    answers = engine.generate(prompts, size, Sampling(1.0, TOKENS), draws)
    verdicts = tuple(Verdict(i % 2) for i in range(size))
    rewards = np.array([float(v == Verdict.CORRECT) for v in verdicts], np.float32)
    return [
        Group(prompt, of_prompt, verdicts, rewards, step)
        for prompt, of_prompt in zip(prompts, answers, strict=True)
    ]


def under(learner: Any, params: Any, groups: Sequence[Group]) -> list[np.ndarray]:
    """The trainer's log-probs of each probe's tokens."""
    scored = learner.score_batch(PROXIMAL, params, make_batch(groups, [X1] * len(groups)))
    return [np.concatenate(of_group) for of_group in scored]


def served(groups: Sequence[Group]) -> list[np.ndarray]:
    """The server's."""
    return [np.concatenate([r.logp for r in group.responses]) for group in groups]


def apart(served: np.ndarray, trained: np.ndarray) -> dict[str, float]:
    """Mean, 95 % quantile and maximum of |the server's log-prob - the trainer's|."""
    apart = np.abs(served - trained)
    return {'mean': float(apart.mean()), 'q95': float(np.quantile(apart, 0.95)), 'most': float(apart.max())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--rate', type=float, default=1e-6)
    parser.add_argument('--model', default='pretrained/Qwen2.5-Coder-0.5B-Instruct')
    parser.add_argument('--engine', choices=('vllm', 'jax'), default='vllm')
    given = parser.parse_args()
    rate = given.rate
    read, rounded = (
        read_inputs(config_of(given.model, rate, dtype, given.engine)) for dtype in ('float32', 'bfloat16')
    )
    c = read.config
    short = [p for p in read.prompts if len(p.tokens) <= c.rollout.max_prompt_tokens]
    probes, to_train = short[:PROBES], short[PROBES : PROBES + STEPS]
    learner, in_bfloat16 = build_learner(c), build_learner(rounded.config)
    with tempfile.TemporaryDirectory(prefix='probe_') as folder:
        of_server = in_bfloat16 if given.engine == 'jax' else learner
        engine = start_engine(
            rounded.config, of_server.model, of_server.graph, read.stop_tokens, learner.mesh, Path(folder)
        )
        state, kept, copies = learner.init(learner.read_initial()), {}, {}

        def look(served_after: int, trained: int) -> None:
            for name, of, params in (
                ('float32', learner, state.params),
                ('float32, as shipped', learner, shipped),
                ('bfloat16', in_bfloat16, shipped),
            ):
                for i, two in enumerate(
                    zip(served(kept[served_after]), under(of, params, kept[served_after]), strict=True)
                ):
                    row = {
                        'rate': rate,
                        'server': served_after,
                        'trainer': trained,
                        'computes': name,
                        'probe': i,
                        **apart(*two),
                    }
                    print(json.dumps(row), flush=True)

        for step in range(STEPS + 1):
            if step in SOUND or STEPS - step in BEHIND:
                shipped = frozen_copy(state.params, dtype='bfloat16', on_host=False)
                engine.load(shipped, step)
                copies[step] = shipped
                kept[step] = answered(engine, probes, SIZE, step, PROBE)
            if step == 0:
                groups = answered(engine, to_train, 2, step, FRESH)
            if step in SOUND:
                look(step, step)
            if step < STEPS:
                batch = make_batch(groups[step : step + 1], [X1])
                state, metrics = learner.update(state, batch, np.random.default_rng(step), {}, step + 1)
                print(
                    json.dumps(
                        {'step': step + 1, 'grad_norm': metrics['actor/grad_norm'], 'lr': metrics['actor/lr']}
                    ),
                    flush=True,
                )
        for behind in BEHIND:
            look(STEPS - behind, STEPS)
            for server in (STEPS, STEPS - behind):  # a sound one, and one that still has the policy before
                trained, before = (
                    under(learner, copies[step], kept[server]) for step in (STEPS, STEPS - behind)
                )
                for i, three in enumerate(zip(served(kept[server]), trained, before, strict=True)):
                    share, error = way(*three)
                    row = {
                        'rate': rate,
                        'server': server,
                        'trainer': STEPS,
                        'before': STEPS - behind,
                        'probe': i,
                        'way': share,
                        'error': error,
                    }
                    print(json.dumps(row), flush=True)
        engine.close()


if __name__ == '__main__':
    main()
