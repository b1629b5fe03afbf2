"""Supervised training of a small base policy on generated worked solutions.

The quickstart's base, `configs/quickstart_base`, was made by

    python -m bapo_jax.sft --output=configs/quickstart_base

in 29 minutes on one CPU core (docs/quickstart_trials.md has the recipes that did worse). It is meant to have headroom: it solves
many problems sometimes, but far from always. The result is an ordinary Hugging Face directory, loaded like any other checkpoint.

--start with --aimless weakens a policy: it is shown steps that do not aim at the target. studies/first_proof uses such a base.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from absl import app, flags
from flax import nnx

from bapo_jax.learner.logprobs import token_logprobs
from bapo_jax.learner.packed import Sequences
from bapo_jax.models import hf
from bapo_jax.models.tokenizer import character_tokenizer, load_tokenizer
from bapo_jax.tasks import countdown
from bapo_jax.tasks.countdown_data import training_problems

FLAGS = flags.FLAGS
flags.DEFINE_string('output', None, 'Directory to write; must hold no model.', required=True)
flags.DEFINE_integer('steps', 3000, 'Optimizer steps.')
flags.DEFINE_integer('batch', 64, 'Solutions a step.')
flags.DEFINE_integer('problems', 60_000, 'Distinct problems; each is seen with a new random solution every time.')
flags.DEFINE_float('learning_rate', 5e-3, "Peak of the cosine schedule, of Muon; AdamW's is 0.3 of it.")
flags.DEFINE_integer('seed', 7, 'Of problems, solutions and initial weights; RL configs draw their problems with other seeds.')
flags.DEFINE_integer('width', 128, 'Hidden size.')
flags.DEFINE_integer('layers', 4, 'Decoder layers.')
flags.DEFINE_string('start', None, 'Directory of a policy to continue from, instead of --width, --layers and random weights.')
flags.DEFINE_float('aimless', 0.0, 'Share of solutions whose steps do not aim at the target: right steps, mostly wrong answers.')

ROW_TOKENS = 64  # prompt and solution; the few problems that need more are skipped


def model_files(output: Path, width: int, layers: int):
    """Writes config.json and the tokenizer. Returns the tokenizer."""
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(output)
    config = {
        'architectures': ['Qwen2ForCausalLM'],
        'model_type': 'qwen2',
        'hidden_act': 'silu',
        'hidden_size': width,
        'intermediate_size': 3 * width,
        'num_hidden_layers': layers,
        'num_attention_heads': width // 32,
        'num_key_value_heads': max(1, width // 64),
        'max_position_embeddings': 4096,
        'rope_theta': 10000.0,
        'rms_norm_eps': 1e-6,
        'tie_word_embeddings': True,
        'torch_dtype': 'float32',
        'vocab_size': len(tokenizer),
        'bos_token_id': tokenizer.eos_token_id,
        'eos_token_id': tokenizer.eos_token_id,
    }
    (output / 'config.json').write_text(json.dumps(config, indent=2) + '\n', 'utf-8')
    return tokenizer


def batches(tokenizer, problems: int, batch: int, seed: int, aimless: float = 0.0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (tokens, is_target) [batch, ROW_TOKENS] without end: prompt, random worked solution, end token.

    The targets are the tokens after the prompt.
    """
    truths = training_problems('generated', limit=problems, seed=seed)
    prompts = [tokenizer.encode(countdown.prompt_text(t, 'compact', tokenizer)) for t in truths]
    rng = np.random.default_rng(seed)
    while True:
        tokens, is_target = np.zeros((batch, ROW_TOKENS), np.int32), np.zeros((batch, ROW_TOKENS), bool)
        for row in range(batch):
            end = ROW_TOKENS + 1
            while end > ROW_TOKENS:  # draw another problem: some have long solutions only
                i = rng.integers(len(truths))
                aim = not aimless or rng.random() >= aimless
                solution = [*tokenizer.encode(countdown.worked_solution(truths[i], rng, aim)), tokenizer.eos_token_id]
                start, end = len(prompts[i]), len(prompts[i]) + len(solution)
            tokens[row, :end] = [*prompts[i], *solution]
            is_target[row, start:end] = True
        yield tokens, is_target


def muon(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) on the layers' matrices, AdamW on the rest: embedding, norms, biases.

    At this size it reaches the loss of AdamW in half the steps (docs/quickstart_trials.md).
    """

    def stacked_matrices(params):
        layer_in_out = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
        return jax.tree.map_with_path(lambda path, _: layer_in_out if path[-1].key == 'kernel' else None, params)

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, min(50, steps // 2), steps)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule(learning_rate),
            adam_learning_rate=schedule(0.3 * learning_rate),
            weight_decay=0.01,
            muon_weight_dimension_numbers=stacked_matrices,
            consistent_rms=0.2,  # updates as large as AdamW's (Liu et al. 2025)
        ),
    )


@functools.partial(jax.jit, static_argnames=('graph', 'optimizer'), donate_argnames=('params', 'opt_state'))
def train_step(params, opt_state, tokens_BxT, is_target_BxT, *, graph, optimizer):
    """One optimizer step on the mean cross-entropy of the target tokens."""
    position_BxT = jnp.broadcast_to(jnp.arange(tokens_BxT.shape[1]), tokens_BxT.shape)

    def loss_fn(params):
        # Each row holds one sequence; no target lies in the padding at its end.
        sequences = Sequences(tokens_BxT, jnp.ones_like(tokens_BxT), position_BxT, response=is_target_BxT.astype(jnp.int32))
        logp_BxT, _ = token_logprobs(nnx.merge(graph, params), sequences, jnp.float32(1.0))
        return -jnp.sum(logp_BxT) / jnp.sum(is_target_BxT).astype(logp_BxT.dtype)

    loss, gradient = jax.value_and_grad(loss_fn)(params)
    with jax.numpy_dtype_promotion('standard'):  # optax raises a float to the int32 number of updates
        updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def main(_) -> None:
    output = Path(FLAGS.output)
    if (output / 'model.safetensors').exists():
        raise app.UsageError(f'--output={output} already holds a model; give an empty directory')
    if FLAGS.start:
        hf.read_config(FLAGS.start)  # raises where it holds no model, before anything is written
    output.mkdir(parents=True, exist_ok=True)
    if FLAGS.start:
        tokenizer = load_tokenizer(FLAGS.start)
        tokenizer.save_pretrained(output)
        shutil.copy(Path(FLAGS.start) / 'config.json', output)
    else:
        tokenizer = model_files(output, FLAGS.width, FLAGS.layers)
    config = hf.read_config(output)
    graph, _ = hf.abstract_params(config)
    params = hf.load_params(FLAGS.start, config) if FLAGS.start else hf.init_params(config, FLAGS.seed)
    optimizer = muon(FLAGS.learning_rate, FLAGS.steps)
    opt_state = optimizer.init(params)
    print(f'{sum(x.size for x in jax.tree.leaves(params)):,} parameters; generating {FLAGS.problems:,} problems', flush=True)
    stream, started = batches(tokenizer, FLAGS.problems, FLAGS.batch, FLAGS.seed, FLAGS.aimless), time.perf_counter()
    for step in range(1, FLAGS.steps + 1):
        params, opt_state, loss = train_step(params, opt_state, *next(stream), graph=graph, optimizer=optimizer)
        if step % 100 == 0 or step == FLAGS.steps:
            print(f'step {step}/{FLAGS.steps}  loss {float(loss):.4f}  {time.perf_counter() - started:.0f} s', flush=True)
    hf.save(output, hf.to_hf(config, params), like=output)
    print(f'wrote {output}; its score: python -m bapo_jax.evaluate --checkpoint={output} --config=configs/quickstart.py')


if __name__ == '__main__':
    app.run(main)
