"""The same questions to the policy that a run began with and to the one that it trained, their greedy answers
side by side.

python -m studies.real_policy.answers runs/arithmetic
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from absl import logging
from rich.table import Table

from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.evaluate import load_for_evaluation
from bapo_jax.inputs import benchmark_prompts
from bapo_jax.machine import terminal
from bapo_jax.models import hf
from bapo_jax.policies import find_policy
from bapo_jax.rollout.engine import EVALUATION, Draw, RolloutError, Sampling


def side_by_side(run: Path, count: int) -> Table:
    """A row for each of the first questions of the run's first benchmark. Raises as `load_for_evaluation`."""
    loaded = load_for_evaluation(run, None, 'jax', None)
    config, tokenizer = loaded.config, loaded.tokenizer
    config.evaluate.benchmarks = config.evaluate.benchmarks[:1]
    [prompts] = benchmark_prompts(config, tokenizer).values()
    questions = what_differs([tokenizer.decode(prompt.tokens) for prompt in prompts])
    prompts, greedy = prompts[:count], Sampling(0.0, config.evaluate.max_response_tokens)
    model = hf.read_config(config.model.path, config.model.dtype, hf.overrides(config.model))
    base = find_policy(path := Path(config.model.path)).params(model, path, make_mesh(1, -1, 1))
    columns = []
    with tempfile.TemporaryDirectory(prefix='bapo_answers') as workdir:
        engine = loaded.start(Path(workdir))
        try:
            for params in (None, base):
                if params is not None:
                    engine.load(params, 0)
                groups = engine.generate(prompts, 1, greedy, [Draw(0, 0, EVALUATION)] * len(prompts))
                columns.insert(0, [tokenizer.decode(response.tokens) for [response] in groups])
        finally:
            engine.close()
    table = Table('question', 'base', f'after {loaded.step} steps', title='greedy answers', show_lines=True)
    for row in zip(questions[:count], *columns, strict=True):
        table.add_row(*map(terminal.plain, row))
    return table


def what_differs(texts: list[str]) -> list[str]:
    """The texts without what all of them begin and end with, such as a chat template's words."""
    begin = len(os.path.commonprefix(texts))
    end = len(os.path.commonprefix([text[begin:][::-1] for text in texts]))
    return [text[begin : len(text) - end] for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('run', type=Path)
    parser.add_argument('--questions', type=int, default=3)
    arguments = parser.parse_args()
    logging.set_verbosity(logging.WARNING)
    try:
        terminal.console().print(side_by_side(arguments.run, arguments.questions))
    except (OSError, ValueError, RolloutError) as e:
        sys.exit(f'error: {e}')


if __name__ == '__main__':
    main()
