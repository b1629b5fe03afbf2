"""Supervised training of a small base policy on generated worked solutions (bases.py).

The quickstart's base, and the one that sees, were made by

    python -m configs.making.sft --output=configs/quickstart_base
    python -m configs.making.sft --task=diagrams --steps=1200 --output=runs/diagrams_reader
    python -m configs.making.sft --task=diagrams --start=runs/diagrams_reader --aimless=0.3 --steps=100 \\
        --learning_rate=1e-3 --seed=8 \\
        --output=configs/diagrams_base

in 29 and 21 minutes on one CPU core. Recipes that were tried for the first, one seed each (mean@8 and pass@8
of cd34 in percent; "sums first" draws products so much less often than sums):

    AdamW, 2,800 steps, any solution     19.7  48.5
    Muon, 1,500 steps, any solution      17.9  52.5
    Muon, 1,500 steps, sums first, 0.2   18.2  54.0
    Muon, 2,000 steps, sums first, 0.05  21.4  60.0
    Muon, 3,000 steps, sums first, 0.05  23.6  62.0    the quickstart's base

The bases are meant to have headroom: they solve many problems sometimes, but far from always. The result is
an ordinary Hugging Face directory, loaded like any other checkpoint.

--start with --aimless weakens a policy: it is shown steps that do not aim at the target, or the solutions of
other pictures. studies/first_proof uses such a base. With --searching it is shown attempts one after another,
in up to 160 tokens (studies/second_proof). With --calling it calls a calculator (studies/episodes).

--teacher distils: the policy learns the teacher's probabilities of the same tokens (Hinton et al. 2015). With
--experts=8 its layers are mixtures of experts (docs/reference/models.md).
"""

from __future__ import annotations

import functools
import shutil
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from absl import app, flags, logging
from flax import nnx

from configs.making import bases
from bapo_jax.cluster.devices import present
from bapo_jax.learner.logprobs import hidden_states, token_logprobs
from bapo_jax.learner.mini_batch import Sequences
from bapo_jax.machine import cli, hub
from bapo_jax.machine.files import check_directory
from bapo_jax.models import hf
from bapo_jax.models.decoder import Decoder
from bapo_jax.models.tokenizer import read_tokenizer

FLAGS = flags.FLAGS


def muon(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) on the layers' matrices, AdamW on the rest: embedding, norms, biases.

    At this size it reaches what AdamW does in half the steps (the recipes above).
    """

    def matrices(params):
        in_out = {
            2: optax.contrib.MuonDimensionNumbers(reduction_axis=0, output_axis=1),
            3: optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2),  # stacked layers
            4: optax.contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=3),  # and experts
        }
        return jax.tree.map_with_path(
            lambda path, x: in_out.get(x.ndim) if path[-1].key == 'kernel' else None, params
        )

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, min(50, steps // 2), steps)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule(learning_rate),
            adam_learning_rate=schedule(0.3 * learning_rate),
            weight_decay=0.01,
            muon_weight_dimension_numbers=matrices,
            consistent_rms=0.2,  # updates as large as AdamW's (Liu et al. 2025)
        ),
    )


def target_logprobs(model: Decoder, batch: bases.Batch) -> jax.Array:
    """The log-prob [B, T] of each target token, 0 elsewhere."""
    tokens_BxT = batch.tokens_BxT
    position_BxT = jnp.broadcast_to(jnp.arange(tokens_BxT.shape[1]), tokens_BxT.shape)
    # Each row holds one sequence; no target lies in the padding at its end.
    sequences = Sequences(
        tokens_BxT, jnp.ones_like(tokens_BxT), position_BxT, response=batch.is_target_BxT.astype(jnp.int32),
        rope=batch.rope_BxTx3, feature=batch.feature_BxT,
    )  # fmt: skip
    features = None if batch.pixels is None else model.vision(*batch.pixels)
    return token_logprobs(model, sequences, jnp.float32(1.0), features=features)[0]


def next_logprobs(model: Decoder, tokens_BxT: jax.Array) -> jax.Array:
    """The log-probs [B, T, V] of all tokens that may follow each one; a row holds one sequence."""
    position_BxT = jnp.broadcast_to(jnp.arange(tokens_BxT.shape[1]), tokens_BxT.shape)
    one_BxT = jnp.ones_like(tokens_BxT)
    hidden_BxTxD, _ = hidden_states(model, Sequences(tokens_BxT, one_BxT, position_BxT, one_BxT))
    return jax.nn.log_softmax(model.logits(hidden_BxTxD))


def distilled_logprobs(model: Decoder, teacher: Decoder, batch: bases.Batch) -> jax.Array:
    """Σ_y p_teacher(y) log p(y) over the vocabulary [B, T], 0 except on target tokens."""
    own_BxTxV, theirs_BxTxV = (next_logprobs(m, batch.tokens_BxT) for m in (model, teacher))
    expected_BxT = jnp.sum(jnp.exp(theirs_BxTxV) * own_BxTxV, axis=-1)
    # What follows token t - 1 is token t.
    return jnp.where(batch.is_target_BxT, jnp.roll(expected_BxT, 1, axis=1), 0.0)


@functools.partial(
    jax.jit, static_argnames=('graph', 'optimizer', 'teacher_graph'), donate_argnames=('params', 'opt_state')
)
def train_step(
    params, opt_state, batch: bases.Batch, teacher=None, *, graph, optimizer, teacher_graph=None
):
    """One optimizer step on the mean cross-entropy of the target tokens, or to a teacher's probabilities."""

    def loss_fn(params):
        model = nnx.merge(graph, params)
        if teacher_graph is None:
            logp_BxT = target_logprobs(model, batch)
        else:
            logp_BxT = distilled_logprobs(model, nnx.merge(teacher_graph, teacher), batch)
        return -jnp.sum(logp_BxT) / jnp.sum(batch.is_target_BxT).astype(logp_BxT.dtype)

    loss, gradient = jax.value_and_grad(loss_fn)(params)
    with jax.numpy_dtype_promotion('standard'):  # optax raises a float to the int32 number of updates
        updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    if not FLAGS.output:
        raise app.UsageError('--output is missing; give a directory to write')
    output = Path(FLAGS.output)
    try:
        check_directory(output, '--output')
        present()  # a driver that does not load is an error, not hours on the CPU
    except (ValueError, OSError) as e:
        sys.exit(f'error: {e}')
    if (output / 'model.safetensors').exists():
        raise app.UsageError(f'--output={output} already contains a model; give an empty directory')
    if FLAGS.searching and (FLAGS.task != 'countdown' or FLAGS.aimless):
        raise app.UsageError(
            '--searching needs --task=countdown and no --aimless: a search already has aimless attempts'
        )
    if (FLAGS.experts or FLAGS.teacher) and (FLAGS.task != 'countdown' or FLAGS.start):
        raise app.UsageError('--experts and --teacher need --task=countdown and no --start')
    if FLAGS.calling and (FLAGS.task != 'countdown' or FLAGS.searching or FLAGS.start):
        raise app.UsageError('--calling needs --task=countdown, no --searching and no --start')
    start = FLAGS.start
    if start:
        try:
            start = hub.model_folder(start, '--start')
            tokenizer, _ = read_tokenizer(start, hf.read_config(start))  # before anything is written
        except (ValueError, OSError) as e:
            sys.exit(f'error: --start={FLAGS.start}: {e}')
    teacher = teacher_graph = None
    if FLAGS.teacher:
        try:
            folder = hub.model_folder(FLAGS.teacher, '--teacher')
            theirs = hf.read_config(folder)
            teacher_graph, teacher = hf.abstract_params(theirs)[0], hf.load_params(folder, theirs)
        except (ValueError, OSError) as e:
            sys.exit(f'error: --teacher={FLAGS.teacher}: {e}')
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        sys.exit(f'error: {e}')
    if start:
        tokenizer.save_pretrained(output)
        for name in ('config.json', 'preprocessor_config.json'):
            if (Path(start) / name).is_file():
                shutil.copyfile(Path(start) / name, output / name)
    else:
        shape = output, FLAGS.width, FLAGS.layers
        tokenizer = (
            bases.countdown_files(*shape, FLAGS.calling, FLAGS.experts)
            if FLAGS.task == 'countdown'
            else bases.diagrams_files(*shape)
        )
    config = hf.read_config(output)
    graph, _ = hf.abstract_params(config)
    params = hf.load_params(start, config) if start else hf.init_params(config, FLAGS.seed)
    if teacher is not None and theirs.vocab_size != config.vocab_size:
        sys.exit(
            f'error: --teacher={FLAGS.teacher}: its vocabulary has {theirs.vocab_size} tokens, and the '
            f"policy's {config.vocab_size}; give a teacher with the same tokenizer"
        )
    optimizer = muon(FLAGS.learning_rate, FLAGS.steps)
    opt_state = optimizer.init(params)
    print(
        f'{sum(x.size for x in jax.tree.leaves(params)):,} parameters; '
        f'generating {FLAGS.problems:,} problems',
        flush=True,
    )
    if FLAGS.task == 'countdown':
        stream = bases.countdown_batches(
            tokenizer,
            FLAGS.problems,
            FLAGS.batch,
            FLAGS.seed,
            FLAGS.aimless,
            FLAGS.searching,
            FLAGS.calling,
        )
    else:
        stream = bases.diagrams_batches(
            output, tokenizer, FLAGS.problems, FLAGS.batch, FLAGS.seed, FLAGS.aimless
        )
    started = time.perf_counter()
    for step in range(1, FLAGS.steps + 1):
        params, opt_state, loss = train_step(
            params, opt_state, next(stream), teacher,
            graph=graph, optimizer=optimizer, teacher_graph=teacher_graph,
        )  # fmt: skip
        if step % 100 == 0 or step == FLAGS.steps:
            print(
                f'step {step}/{FLAGS.steps}  loss {float(loss):.4f}  {time.perf_counter() - started:.0f} s',
                flush=True,
            )
    hf.save(output, hf.to_hf(config, params), like=output)
    name = {'countdown': 'quickstart', 'diagrams': 'diagrams'}[FLAGS.task]
    print(f'wrote {output}; to score it: python -m bapo_jax.evaluate --checkpoint={output} --config={name}')


def run() -> None:
    """The command: its flags, then `main`."""
    flags.DEFINE_enum('task', 'countdown', ['countdown', 'diagrams'], 'Task that the solutions solve.')
    flags.DEFINE_string('output', None, 'Directory to write to; must not contain a model.', required=True)
    flags.DEFINE_integer('steps', 3000, 'Optimizer steps.')
    flags.DEFINE_integer('batch', 64, 'Solutions per step.')
    flags.DEFINE_integer(
        'problems', 60_000, 'Number of distinct problems; each use has a new random solution.'
    )
    flags.DEFINE_float(
        'learning_rate',
        5e-3,
        'Peak learning rate of Muon, with a cosine schedule; AdamW uses 0.3 times that.',
    )
    flags.DEFINE_integer(
        'seed',
        7,
        'Seed of problems, solutions and initial weights; the problems of RL configs have other seeds.',
    )
    flags.DEFINE_integer('width', 128, 'Hidden size.')
    flags.DEFINE_integer('layers', 4, 'Decoder layers.')
    flags.DEFINE_string(
        'start', None, 'Directory or name of a policy to continue from, in place of --width and --layers.'
    )
    flags.DEFINE_integer(
        'experts', 0, "Countdown only: experts in place of each layer's MLP, a quarter as wide; 0: one MLP."
    )
    flags.DEFINE_string(
        'teacher', None, 'Countdown only: directory or name of a policy whose probabilities are learned.'
    )
    flags.DEFINE_float(
        'aimless',
        0.0,
        'Fraction of solutions that ignore the target: correct steps, but mostly wrong answers.',
    )
    flags.DEFINE_bool(
        'searching',
        False,
        'Countdown only: a solution is a series of attempts, until one is right or it gives up.',
    )
    flags.DEFINE_bool(
        'calling',
        False,
        'Countdown only: a solution calls the calculator (task.turns); the end of a call is a stop token.',
    )
    cli.start(main)


if __name__ == '__main__':
    run()
