"""Tokens a second of the in-process engine beside a vLLM server, on the quickstart's own prompts and lengths;
and its programs.

    python -m benchmarks.engine.rate    # both, one after the other, each on two cores
    python -m benchmarks.engine.rate --model=DIR  # a real model at arithmetic: both at 32 rows, and the parts
    # programs compiled over 200 steps of these problems' lengths
    python -m benchmarks.engine.rate --problems=FILE --tokenizer=DIR

The quickstart's policy answers 64 prompts × 8 responses a step, and so does a model (SmolLM2-135M-Instruct,
say), on one CPU device. FILE is JSONL with a field `problem`, maybe gzipped; only the problems' lengths in
tokens count, since a small random policy answers them, with up to 8 tokens.
"""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import importlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from absl import app, flags
from benchmarks.engine.parts import parts
from benchmarks.host.load import cpu_name
from rich.console import Console
from rich.table import Table

from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.groups import Prompt
from bapo_jax.inputs import Inputs, read_inputs
from bapo_jax.models import hf
from bapo_jax.models.tokenizer import load_tokenizer
from bapo_jax.rollout.engine import FRESH, Draw, Engine, Sampling
from bapo_jax.rollout.inprocess import slots
from bapo_jax.rollout.inprocess.engine import JaxEngine
from bapo_jax.rollout.inprocess.room import Limits
from bapo_jax.rollout.start import start_engine

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (slots.lay_out_weights, slots.nothing_yet, slots.prefill_prompts, slots.sample_responses)
CORES = 2


def rates(engine: Engine, read: Inputs) -> tuple[list[float], list[int]]:
    """Tokens a second of each step but the first two, and the lengths of their responses."""
    c, found, lengths = read.config, [], []
    for step in range(2 + FLAGS.steps):
        prompts = read.prompts[step * 64 : (step + 1) * 64]
        started = time.perf_counter()
        answers = engine.generate(
            prompts, 8, Sampling(1.0, c.rollout.max_response_tokens), [Draw(0, step, FRESH)] * 64
        )
        seconds = time.perf_counter() - started
        of_step = [len(r.tokens) for group in answers for r in group]
        if step >= 2:
            found.append(sum(of_step) / seconds)
            lengths += of_step
    return found, lengths


def beside_vllm(directory: Path, read: Inputs, rows: int, dtypes: Sequence[str]) -> Table:
    """The in-process engine, then a server, each in all of `dtypes`; none answers more than `rows` at once."""
    params = hf.load_params(read.config.model.path, read.model)
    table = Table('engine', 'tokens/s (median)', 'least', 'most', 'slots in use')
    for name, dtype in itertools.product(('jax', 'vllm'), dtypes):
        model = dataclasses.replace(read.model, dtype=dtype)
        c = read.config.copy_and_resolve_references()
        c.rollout.engine, c.rollout.rows, c.rollout.dtype = name, rows, dtype
        c.rollout.server.args = ('--enforce-eager', f'--max-num-seqs={rows}')
        mesh = make_mesh(-1, 1, 1)
        workdir = directory / f'{name}_{dtype}'
        workdir.mkdir()
        engine = start_engine(c, model, hf.abstract_params(model)[0], read.stop_tokens, mesh, workdir)
        engine.load(jax.device_put(params, slots.replicated(mesh)), 0)
        found, lengths = rates(engine, read)
        in_use = f'{100 * engine.sampled / engine.room:.0f} %' if name == 'jax' else ''
        table.add_row(
            f'{name}, {dtype}', f'{np.median(found):,.0f}', f'{min(found):,.0f}', f'{max(found):,.0f}', in_use
        )
        engine.close()
    table.title = (
        f'64 × 8 responses of {min(lengths)} to {max(lengths)} tokens, {np.mean(lengths):.0f} on average; '
        f'{CORES} cores, {cpu_name()}, jax {version("jax")}, {datetime.date.today()}'
    )
    return table


def programs(problems: Path, tokenizer: Path) -> str:
    """How many programs 200 steps of 16 of these problems compile."""
    with (gzip.open if problems.suffix == '.gz' else open)(problems, 'rt', encoding='utf-8') as lines:
        texts = [json.loads(line)['problem'] for line in lines]
    lengths = [len(tokens) for tokens in load_tokenizer(tokenizer)(texts)['input_ids']]
    lengths = np.array([n for n in lengths if n <= 2048])
    base = ROOT / 'configs' / 'quickstart_base'
    model = hf.read_config(base)
    engine = JaxEngine(hf.abstract_params(model)[0], model, (256,), Limits(32, 2048))
    params, rng = hf.init_params(model, 0), np.random.default_rng(0)
    before = sum(program._cache_size() for program in PROGRAMS)
    for step in range(200):
        engine.load(params, step)
        chosen = rng.choice(lengths, 16)
        prompts = [
            Prompt(i, 'math', rng.integers(0, 200, n, dtype=np.int32), {}) for i, n in enumerate(chosen)
        ]
        engine.generate(prompts, 4, Sampling(1.0, 8), [Draw(0, step, FRESH)] * 16)
    engine.close()
    count = sum(program._cache_size() for program in PROGRAMS) - before
    return (
        f'{count} programs over 200 steps of {len(lengths):,} prompts of {lengths.min()} to {lengths.max()} '
        'tokens (target 8)'
    )


def main(_) -> None:
    if FLAGS.problems:
        print(programs(Path(FLAGS.problems), Path(FLAGS.tokenizer)))
        return
    os.chdir(ROOT)
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)
    os.environ['VLLM_CPU_OMP_THREADS_BIND'] = f'{cores[0]}-{cores[-1]}'
    jax.config.update('jax_num_cpu_devices', 1 if FLAGS.model else len(cores))
    sys.path.append(str(ROOT))
    config = importlib.import_module(
        'configs.arithmetic' if FLAGS.model else 'configs.quickstart'
    ).get_config()
    config.model.path = FLAGS.model or config.model.path
    config.task.limit = max(config.task.limit, 64 * (2 + FLAGS.steps))
    read = read_inputs(config)
    rows = 32 if FLAGS.model else config.rollout.rows
    with tempfile.TemporaryDirectory() as directory:
        console = Console(width=132)
        console.print(
            beside_vllm(Path(directory), read, rows, ('float32', 'bfloat16') if FLAGS.model else ('float32',))
        )
    if FLAGS.model:
        console.print(
            parts(
                FLAGS.model,
                read.model,
                rows,
                config.rollout.max_prompt_tokens,
                config.rollout.max_response_tokens,
            )
        )


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_integer('steps', 10, 'Steps that count.', lower_bound=1)
    flags.DEFINE_string(
        'model', None, "Hugging Face directory of a small chat model; default: the quickstart's policy."
    )
    flags.DEFINE_string('problems', None, 'JSONL of problems, whose lengths prompts have.')
    flags.DEFINE_string(
        'tokenizer', None, 'Hugging Face directory of the tokenizer that counts their tokens.'
    )
    app.run(main)
