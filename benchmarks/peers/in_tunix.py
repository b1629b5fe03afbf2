"""google-tunix's row of peers.py: iterations of its GRPOLearner on the workload's prompts. Runs in tunix's
own environment.

    python -m benchmarks.peers.in_tunix DIR SETTING 5       # seconds of 5 iterations, one line of JSON

The first mini-batch is given the data's responses, so that its gradient can be compared; the others sample.
tunix answers each mini-batch's prompts with the policy that the mini-batch before left.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from benchmarks.peers import data as peers_data
from benchmarks.peers.data import (
    CLIP,
    GRAD_CLIP,
    LEARNING_RATE,
    MATRIX,
    WEIGHT_DECAY,
    Data,
    Workload,
    rate_of_product,
    report,
    text_of,
)
from transformers import AutoTokenizer
from tunix.models.qwen2 import model as qwen2, params as qwen2_params
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput

WARM_UP = 2  # iterations that do not count


class Setting(NamedTuple):
    devices: int  # on which rows and parameters are split
    prompts: int  # of a micro-batch, with their responses


SETTINGS = {f'{d} devices, {8 * n} sequences': Setting(d, n) for d in (1, 2) for n in (1, 2, 4, 8, 16)}


class FirstNorm(NamedTuple):
    count: jax.Array
    norm: jax.Array  # of the first gradient


def keep_first_norm() -> optax.GradientTransformation:
    """Changes nothing; its state keeps the norm of the first gradient."""

    def update(gradient: Any, state: FirstNorm, _params: Any = None) -> tuple[Any, FirstNorm]:
        norm = jnp.where(state.count == 0, optax.tree.norm(gradient), state.norm)
        return gradient, FirstNorm(state.count + 1, norm)

    return optax.GradientTransformation(lambda _: FirstNorm(jnp.zeros((), jnp.int32), jnp.zeros(())), update)


class Timed(rl_cluster.RLCluster):
    """Notes what each generation takes."""

    def __init__(self, w: Workload, data: Data, **kwargs: Any):
        super().__init__(**kwargs)
        self.generation: list[float] = []
        rows = w.prompts // w.optimizer_steps * w.group_size
        tokens = data.responses.reshape(-1, w.response_tokens)[:rows]
        prompts = np.repeat(data.prompts, w.group_size, axis=0)[:rows]
        self._given = RolloutOutput([text_of(t) for t in tokens], [], list(tokens), prompts, None)

    def generate(self, *args: Any, **kwargs: Any) -> RolloutOutput:
        if not self.generation:
            self.generation.append(0.0)
            return self._given
        seconds, output = peers_data.timed(lambda: super(Timed, self).generate(*args, **kwargs))
        self.generation.append(seconds)
        assert all(len(t) == len(self._given.tokens[0]) for t in output.tokens), 'a response ended early'
        return output


def load_model(directory: Path, w: Workload, mesh: jax.sharding.Mesh) -> qwen2.Qwen2:
    config = qwen2.ModelConfig(
        num_layers=w.layers, vocab_size=w.vocabulary, embed_dim=w.hidden, hidden_dim=w.mlp, num_heads=w.heads, head_dim=w.head_dim,
        num_kv_heads=w.kv_heads, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
    )  # fmt: skip
    return qwen2_params.create_model_from_safe_tensors(
        str(directory / 'model'), config, mesh, dtype=jnp.float32
    )


def make_learner(directory: Path, w: Workload, data: Data, setting: Setting, iterations: int) -> GRPOLearner:
    mesh = jax.make_mesh((setting.devices, 1), ('fsdp', 'tp'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    adamw = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    mini_batch = w.prompts // w.optimizer_steps
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.chain(keep_first_norm(), optax.clip_by_global_norm(GRAD_CLIP), adamw), eval_every_n_steps=10**9,
        max_steps=iterations * w.optimizer_steps, mini_batch_size=mini_batch, train_micro_batch_size=setting.prompts,
        rollout_micro_batch_size=mini_batch, compute_logps_micro_batch_size=mini_batch,
    )  # fmt: skip
    rollout = RolloutConfig(
        max_tokens_to_generate=w.response_tokens, max_prompt_length=w.prompt_tokens, temperature=1.0, top_p=1.0, top_k=None,
        kv_cache_size=w.prompt_tokens + w.response_tokens,
    )  # fmt: skip
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh),
        rollout_engine='vanilla', training_config=training, rollout_config=rollout,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(directory / 'tokenizer')
    cluster = Timed(w, data, actor=load_model(directory, w, mesh), tokenizer=tokenizer, cluster_config=config)
    reward_of = {text_of(prompt): rewards for prompt, rewards in zip(data.prompts, data.rewards, strict=True)}

    def rewards(prompts: list[str], **_: Any) -> list[float]:
        return np.concatenate([reward_of[prompt] for prompt in prompts[:: w.group_size]]).tolist()

    algorithm = GRPOConfig(
        num_generations=w.group_size, num_iterations=1, beta=0.0, epsilon=CLIP, loss_agg_mode='token-mean'
    )
    return GRPOLearner(cluster, algorithm, rewards)


def main(directory: Path, name: str, iterations: int) -> None:
    setting, (w, data) = SETTINGS[name], peers_data.load(directory)
    jax.config.update('jax_num_cpu_devices', setting.devices)
    learner = make_learner(directory, w, data, setting, WARM_UP + iterations)
    begins = []

    def batches() -> Iterator[dict[str, list[str]]]:
        """One for each iteration, which asks for it when it begins."""
        for _ in range(WARM_UP + iterations):
            begins.append(time.perf_counter())
            yield {'prompts': [text_of(tokens) for tokens in data.prompts]}

    learner.train(batches())
    begins.append(time.perf_counter())
    state = learner.rl_cluster.actor_trainer.optimizer.opt_state
    norms = [
        s.norm
        for s in jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, FirstNorm))
        if isinstance(s, FirstNorm)
    ]
    generation = np.reshape(learner.rl_cluster.generation, (-1, w.optimizer_steps)).sum(axis=1)
    left, right = jnp.ones((2, MATRIX, MATRIX))
    report(
        on_policy_norm=float(norms[0][...]),
        seconds=np.diff(begins[WARM_UP:]).tolist(),
        generation=generation[WARM_UP:].tolist(),
        matrix_flops=rate_of_product(lambda: jnp.matmul(left, right).block_until_ready()),
        versions=peers_data.versions('google-tunix', 'jax'),
    )


if __name__ == '__main__':
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
