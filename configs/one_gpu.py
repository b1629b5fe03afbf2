"""Your questions, a 1.5B chat model, one GPU of 80 GB: trainer and in-process engine share it.
docs/your_data.md goes through it.

    export XLA_CLIENT_MEM_FRACTION=.93
    python -m bapo_jax.train --config=configs/one_gpu.py --dry_run
    python -m bapo_jax.train --config=configs/one_gpu.py --workdir=runs/one_gpu

In the current folder it wants questions.jsonl and held_out.jsonl, a question a line: {"question": "…",
"answer": "…"}. The last line of a response is compared with the answer; docs/your_data.md has other forms,
and a function of yours.

Hardware, time, score: not run on a card by us yet. The compiler's plan for an H100 is in docs/your_data.md.
"""

from bapo_jax.config import default_config
from bapo_jax.methods import apply_method


def get_config(method: str = 'bapo_tuned'):
    c = default_config()
    c.steps = 200
    c.model.path, c.model.dtype = 'Qwen/Qwen2.5-1.5B-Instruct', 'bfloat16'
    c.mesh.platform = 'gpu'  # a driver that does not load is an error, not a run on the CPU
    c.task.name, c.task.train, c.task.template = 'questions', 'questions.jsonl', 'chat'
    c.rollout.group_size = 8
    c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 1024, 4096
    c.rollout.rows = 128  # responses at once, whose keys and values fit three tenths of the card
    c.rollout.dtype = 'bfloat16'  # of a vLLM server, if one answers in place of this process
    c.learner.batch_groups, c.learner.mini_batch_groups = 32, 32
    c.learner.remat, c.learner.micro_batch_rows = 'full', 8
    c.learner.learning_rate = 1e-6
    c.evaluate.benchmarks, c.evaluate.samples, c.evaluate.temperature = ('held_out.jsonl',), 8, 1.0
    c.checkpoint.every = 10
    apply_method(c, method)
    return c
