"""Countdown with 3 or 4 numbers, as in Table 1(b) of the paper: Qwen2.5-Math-1.5B, 10,000 problems, B = 256,
G = 8.

    python -m bapo_jax.train --config=configs/countdown.py:METHOD --workdir=runs/countdown_METHOD \\
        --config.model.path=Qwen/Qwen2.5-Math-1.5B --config.task.train=Jiayi-Pan/Countdown-Tasks-3to4

METHOD is a row of bapo_jax/methods/, by default bapo (`python -m bapo_jax.methods` prints them).

Hardware, time, score: not run by us yet. The values are those of the paper and of the authors' scripts. The
paper generates with vLLM. For that, add --config.rollout.engine=vllm --config.rollout.dtype=bfloat16
(docs/vllm.md).
"""

from bapo_jax.config import default_config
from bapo_jax.methods import apply_method


def get_config(method: str = 'bapo'):
    c = default_config()
    c.task.name, c.task.train, c.task.limit, c.task.template = (
        'countdown',
        'Jiayi-Pan/Countdown-Tasks-3to4',
        10_000,
        'tinyzero',
    )
    c.model.path = 'Qwen/Qwen2.5-Math-1.5B'
    c.model.dtype = 'bfloat16'
    c.rollout.temperature = 0.6
    c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 512, 2048
    c.learner.entropy_coef = 0.0
    c.learner.kl_coef = 0.005
    c.learner.remat = 'full'
    c.evaluate.every, c.evaluate.temperature, c.evaluate.samples = 5, 0.6, 8
    apply_method(c, method, 'countdown')
    return c
