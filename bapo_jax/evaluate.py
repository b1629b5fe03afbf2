"""A policy's score on the benchmarks: mean@n and pass@n, a table on the terminal, a JSON summary and every sample.

    python -m bapo_jax.evaluate --checkpoint=runs/x --benchmarks=cd34,cd4 --samples=8
    python -m bapo_jax.evaluate --checkpoint=HF_DIRECTORY --config=configs/quickstart.py

Of a run, π_θ of the newest checkpoint is scored (not the rollout policy α), by the run's own config.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags
from rich.console import Console
from rich.table import Table

from bapo_jax.groups import Group, Prompt
from bapo_jax.metrics import write_text
from bapo_jax.rollout.collect import collect
from bapo_jax.rollout.engine import EVALUATION, Draw, Engine, Sampling
from bapo_jax.tasks import encode_prompts, get_task

# One id range a benchmark, so that no two questions share random keys; training prompts count from 0.
_FIRST_ID = 1 << 24


def benchmark_prompts(config: ConfigDict, tokenizer: Any) -> dict[str, list[Prompt]]:
    """The questions of every benchmark in config.evaluate.benchmarks. Raises ValueError for an unknown name or a bad file."""
    task = get_task(config.task.name)
    return {
        name: encode_prompts(
            config.task.name,
            task.benchmark(name),
            tokenizer,
            template=config.task.template,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            first_id=_FIRST_ID * (1 + i),
        )
        for i, name in enumerate(config.evaluate.benchmarks)
    }


def score(engine: Engine, tokenizer: Any, prompts: Sequence[Prompt], config: ConfigDict, purpose: int, step: int) -> list[Group]:
    """`evaluate.samples` judged responses to each prompt. The same questions get the same random keys at every step."""
    sampling = Sampling(config.evaluate.temperature, config.rollout.max_response_tokens)
    draws = [Draw(config.seed, 0, purpose)] * len(prompts)
    groups = collect(engine, tokenizer, prompts, config.evaluate.samples, sampling, draws).groups
    return [Group(g.prompt, g.responses, g.verdicts, step) for g in groups]


def summary(groups: Sequence[Group]) -> dict[str, Any]:
    """mean@n: mean over questions of k/n; pass@n: share of questions with k > 0; and each question's k."""
    correct, n = np.array([g.correct for g in groups]), groups[0].size
    return {
        'questions': len(groups),
        'samples': n,
        'mean': float((correct / n).mean()),
        'pass': float((correct > 0).mean()),
        'truncated': float(np.mean([r.finish == 'length' for g in groups for r in g.responses])),
        'length': float(np.mean([len(r.tokens) for g in groups for r in g.responses])),
        'correct': correct.tolist(),
    }


def score_benchmarks(engine: Engine, tokenizer: Any, benchmarks: dict[str, list[Prompt]], config: ConfigDict, step: int):
    """(summary, groups) of every benchmark, by name, of the policy the engine holds."""
    scored = {name: score(engine, tokenizer, prompts, config, EVALUATION, step) for name, prompts in benchmarks.items()}
    return {name: summary(groups) for name, groups in scored.items()}, scored


def print_table(title: str, columns: dict[str, dict[str, dict]]) -> None:
    """`columns` maps a policy's name to its summaries by benchmark; one row a benchmark and measure, percent."""
    table = Table('', *columns, title=title)
    first = next(iter(columns.values()))
    for name, s in first.items():
        for measure in ('mean', 'pass'):
            cells = [f'{100 * summaries[name][measure]:.1f}' for summaries in columns.values()]
            table.add_row(f'{name}  {measure}@{s["samples"]}, {s["questions"]} problems', *cells)
    Console().print(table)


def main(_) -> None:
    from bapo_jax.setup import load_for_evaluation  # after the flags: this imports JAX

    logging.set_verbosity(logging.WARNING)
    checkpoint = Path(FLAGS.checkpoint)
    try:
        engine, tokenizer, config, step = load_for_evaluation(checkpoint, FLAGS.config)
        config.evaluate.benchmarks = tuple(FLAGS.benchmarks or config.evaluate.benchmarks)
        config.evaluate.samples = FLAGS.samples or config.evaluate.samples
        benchmarks = benchmark_prompts(config, tokenizer)
    except (ValueError, FileNotFoundError) as e:
        sys.exit(f'error: {e}')
    summaries, scored = score_benchmarks(engine, tokenizer, benchmarks, config, step)
    output = Path(FLAGS.output) if FLAGS.output else checkpoint / 'evaluation'
    output.mkdir(parents=True, exist_ok=True)
    for name, groups in scored.items():
        rows = (
            {'benchmark': name, 'question': i, 'sample': j, 'ground_truth': g.prompt.ground_truth, 'response': text,
             'verdict': verdict.name.lower(), 'finish': response.finish}
            for i, g in enumerate(groups)
            for j, (response, verdict, text) in enumerate(
                zip(g.responses, g.verdicts, tokenizer.batch_decode([r.tokens for r in g.responses]), strict=True))
        )  # fmt: skip
        write_text(output / f'{Path(name).stem}.jsonl', ''.join(json.dumps(row) + '\n' for row in rows))
    result = {'checkpoint': str(checkpoint), 'step': step, 'benchmarks': summaries}
    write_text(output / 'summary.json', json.dumps(result, indent=1) + '\n')
    print_table(f'{checkpoint}, after {step} steps', {'%': summaries})
    print(f'every sample: {output}/*.jsonl   summary: {output / "summary.json"}')


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_string('checkpoint', None, 'A run directory, or a Hugging Face directory (then --config too).', required=True)
    flags.DEFINE_list('benchmarks', None, 'Names the task knows, or files of problems; default: as the config says.')
    flags.DEFINE_integer('samples', None, 'Responses to each question; default: as the config says.', lower_bound=1)
    flags.DEFINE_string('output', None, 'Where the JSON goes; default: CHECKPOINT/evaluation.')
    config_flags.DEFINE_config_file('config', None, 'Config that says task, template and sampling; of a run, its own is used.')
    app.run(main)
