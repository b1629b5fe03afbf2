"""A real Qwen2.5 (Coder, 0.5B, instructed) on MATH through a real vLLM server, on two CPU cores and 24 GiB:
the whole path, in small.

    python -m studies.real_policy.fetch Qwen2.5-Coder-0.5B-Instruct pretrained/Qwen2.5-Coder-0.5B-Instruct
    BAPO_DATA=DIR python -m studies.real_policy.map sets runs/map
    python -m bapo_jax.train --config=studies/real_policy/math_on_cpu.py --workdir=runs/math_on_cpu
    # keeps its steps in math_on_cpu.jsonl, and writes page.md's table
    python -m studies.real_policy.math_on_cpu runs/math_on_cpu

MATH's training problems of levels 1 and 2, tested on 32 of those levels of MATH-500. Every step syncs the
server, and every fifth asks hard prompts again. Ten steps teach nothing that could be measured; this shows
that the path holds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bapo_jax.config import default_config
from bapo_jax.machine.files import replace_part
from bapo_jax.methods import apply_method
from bapo_jax.run.log.metrics import read_metrics
from studies.lib.rows import Row, markdown_table, rows_in

HERE = Path(__file__).resolve().parent
ROWS = HERE / 'math_on_cpu.jsonl'
COLUMNS = {  # of the metrics, and how the page calls them
    'step': '', 'critic/score/mean': 'right', 'response_length/clip_ratio': 'cut', 'bapo/x1_groups': 'X1', 'bapo/x2_groups': 'X2',
    'bapo/x3_groups': 'X3', 'bapo/reevaluated': 'asked again', 'bapo/lag': 'lag', 'mismatch/logprob_abs_mean': 'mean abs. Δ log-prob',
    'actor/grad_norm': 'gradient norm', 'timing_s/gen': 's to generate', 'timing_s/update_actor': 's to update', 'timing_s/step': 's in all',
}  # fmt: skip


def get_config(method: str = 'bapo_tuned'):
    c = default_config()
    c.steps = 10
    c.task.name, c.task.train, c.task.template = 'math', 'runs/map/math_train_1_2.jsonl', 'chat'
    c.model.path = 'pretrained/Qwen2.5-Coder-0.5B-Instruct'
    c.model.attention = 'xla'
    c.rollout.engine, c.rollout.dtype = 'vllm', 'bfloat16'
    c.rollout.server.args = ('--enforce-eager', '--max-num-seqs=64')
    c.rollout.group_size = 8
    c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 256, 256
    c.rollout.deadline_s = 1800.0
    c.replay.max_reevaluate = 4
    c.log.failed_again.prompts, c.log.failed_again.every = 8, 5
    c.learner.batch_groups, c.learner.mini_batch_groups = 6, 6
    c.learner.micro_batch_rows, c.learner.row_tokens = 1, 1024
    c.learner.remat = 'full'
    c.learner.learning_rate = 1e-6
    c.checkpoint.every = 5
    c.evaluate.benchmarks, c.evaluate.temperature, c.evaluate.samples = ('runs/map/math_1_2.jsonl',), 1.0, 4
    c.evaluate.max_prompt_tokens = 512
    apply_method(c, method, 'math')
    c.replay.use_x2 = True  # off in this row; here every part is to run
    return c


def kept(run: Path) -> list[Row]:
    """What the study keeps of each step of a run."""
    return [
        {name: row[name] for name in (*COLUMNS, 'accuracy_bins') if name in row}
        for row in read_metrics(run)
        if row['step']
    ]


def table(rows: list[Row]) -> str:
    """A line a step."""
    lines = []
    for row in rows:
        cells = [f'{row[name]:.3g}' if name in row else '' for name, column in COLUMNS.items() if column]
        lines.append([str(row['step']), str(sum(row['accuracy_bins'][1:-1])), *cells])
    return markdown_table(['step', 'mixed of 6', *filter(None, COLUMNS.values())], lines)


def on_page(rows: list[Row]) -> list[Row]:
    """The first step, the last, and the one at which hard prompts were first asked again."""
    return [row for row in rows if row['step'] in (1, 5, 10)]


def main() -> None:
    if len(sys.argv) > 1:
        ROWS.write_text(''.join(json.dumps(row) + '\n' for row in kept(Path(sys.argv[1]))), 'utf-8')
    replace_part(HERE / 'page.md', 'math on cpu', table(on_page(rows_in(ROWS))) + '\n')
    print(table(rows_in(ROWS)))


if __name__ == '__main__':
    main()
