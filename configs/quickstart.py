"""Countdown with 3 or 4 numbers, a 0.8M-parameter policy, two CPU cores.

    python -m bapo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart
"""

from bapo_jax.config import default_config
from bapo_jax.methods import apply_method


def get_config(method: str = 'bapo'):
    c = default_config()
    c.steps = 100
    c.model.path = 'configs/quickstart_base'
    c.task.limit, c.task.template = 10_000, 'compact'
    c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 16, 48
    c.learner.batch_groups, c.learner.mini_batch_groups = 64, 16
    c.learner.micro_batch_rows = 64
    c.learner.learning_rate = 1e-4
    c.learner.entropy_coef = 0.0
    c.evaluate.temperature = 1.0
    c.evaluate.track_prompts = 200
    c.replay.max_reevaluate = 32
    apply_method(c, method)
    c.replay.fresh_filter = 'range' if method.startswith('bapo') else 'none'
    return c
