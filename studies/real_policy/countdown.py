"""Part 3: a pretrained language model (SmolLM2-135M-Instruct) on Countdown, behind four solved examples, on
two CPU cores.

    python -m studies.real_policy.countdown runs/countdown_2_or_3    # writes train.jsonl and test.jsonl there
    python -m bapo_jax.train --config=studies/real_policy/countdown.py:grpo --workdir=runs/countdown_grpo \\
        --config.seed=1

From a checkout's own folder, as the problems and the model are looked for there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bapo_jax.config import default_config
from bapo_jax.methods import apply_method
from bapo_jax.tasks.countdown.problems import generate, problem_key

SIZES = (2, 3)  # numbers of a problem
FOLDER = Path('runs/countdown_2_or_3')


def write_problems(folder: Path) -> None:
    """200 problems to test with, and 1,000 others to train on."""
    test = generate(200, seed=10, sizes=SIZES)
    train = generate(1000, seed=11, sizes=SIZES, exclude=frozenset(map(problem_key, test)))
    folder.mkdir(parents=True, exist_ok=True)
    for name, problems in (('train', train), ('test', test)):
        rows = (json.dumps({'nums': p['numbers'], 'target': p['target']}) + '\n' for p in problems)
        (folder / f'{name}.jsonl').write_text(''.join(rows), 'utf-8')


def get_config(method: str = 'bapo_tuned'):
    c = default_config()
    c.steps = 60
    c.model.path = 'pretrained/SmolLM2-135M-Instruct'
    c.model.attention = 'xla'
    c.task.name, c.task.train, c.task.template = 'countdown', str(FOLDER / 'train.jsonl'), 'examples'
    c.rollout.group_size = 8
    c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 224, 40
    c.rollout.rows = 64
    c.learner.batch_groups = 16
    c.learner.slot_tokens, c.learner.row_tokens, c.learner.micro_batch_rows = 40, 224 + 4 * 40, 2
    c.learner.remat = 'matrix_products'
    c.mesh.data, c.mesh.fsdp = -1, 1
    c.learner.learning_rate = 1e-5
    c.learner.entropy_coef = 0.0
    c.evaluate.benchmarks, c.evaluate.temperature, c.evaluate.samples = (str(FOLDER / 'test.jsonl'),), 1.0, 16
    c.log.failed_again.prompts, c.log.failed_again.every = 16, 5  # what X2 could earn; only counted
    apply_method(c, method, 'countdown')
    c.learner.mini_batch_groups = 16  # one optimizer step on all groups, as GRPO's row has it at its own size
    return c


if __name__ == '__main__':
    write_problems(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
