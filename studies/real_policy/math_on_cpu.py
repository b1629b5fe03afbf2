"""A real Qwen2.5 (Coder, 0.5B, instructed) on MATH through a real vLLM server, on two CPU cores and 24 GiB: the whole path, in small.

    python -m studies.real_policy.fetch Qwen2.5-Coder-0.5B-Instruct pretrained/Qwen2.5-Coder-0.5B-Instruct
    BAPO_DATA=DIR python -m studies.real_policy.map sets runs/map
    python -m bapo_jax.train --config=studies/real_policy/math_on_cpu.py --workdir=runs/math_on_cpu

MATH's training problems of levels 1 and 2, tested on 32 of those levels of MATH-500. Every step syncs the server, and every fifth asks
hard prompts again. Ten steps teach nothing that could be measured; this shows that the path holds.
"""

from bapo_jax.config import default_config
from bapo_jax.methods import apply_method


def get_config(method: str = 'bapo_tuned'):
    c = default_config()
    c.steps = 10
    c.task.name, c.task.train, c.task.template = 'math', 'runs/map/math_train_1_2.jsonl', 'chat'
    c.model.path = 'pretrained/Qwen2.5-Coder-0.5B-Instruct'
    c.model.attention = 'xla'
    c.rollout.engine, c.rollout.dtype = 'vllm', 'bfloat16'
    c.rollout.server_args = ('--enforce-eager', '--max-num-seqs=64')
    c.rollout.group_size = 8
    c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 256, 256
    c.rollout.deadline_s = 1800.0
    c.replay.max_reevaluate = 4
    c.replay.probe, c.replay.probe_every = 8, 5
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
