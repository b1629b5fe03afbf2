"""Generated arithmetic, a pretrained language model (SmolLM2-135M-Instruct), two CPU cores, the in-process
JAX engine.

    make real    # fetches the model first
    python -m bapo_jax.train --config=configs/arithmetic.py --workdir=runs/arithmetic

Hardware: 2 cores of an AMD EPYC, 9 GB. Time: 13 minutes with both evaluations. Score of two seeds on 200
questions never trained on, 8 samples at T = 1: mean@8 6.1 -> 51.4 and 5.6 -> 50.3 %, pass@8 27.5 -> 77.0 and
25.0 -> 69.5 % (studies/real_policy/page.md).
"""

from bapo_jax.config import default_config
from bapo_jax.methods import apply_method


def get_config(method: str = 'bapo_tuned'):
    c = default_config()
    c.steps = 60
    c.model.path = 'pretrained/SmolLM2-135M-Instruct'
    c.model.attention = 'xla'
    c.task.name, c.task.train, c.task.limit, c.task.template = 'arithmetic', 'generated', 500, 'chat'
    c.rollout.group_size = 8
    c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 56, 40
    c.rollout.rows = 64
    c.learner.batch_groups, c.learner.mini_batch_groups = 8, 8
    c.learner.slot_tokens, c.learner.row_tokens, c.learner.micro_batch_rows = 40, 56 + 4 * 40, 2
    c.learner.remat = 'matrix_products'
    c.mesh.data, c.mesh.fsdp = -1, 1
    c.learner.learning_rate = 1e-5
    c.learner.entropy_coef = 0.0
    c.evaluate.benchmarks, c.evaluate.temperature, c.evaluate.samples = ('arithmetic',), 1.0, 8
    c.log.failed_again.prompts, c.log.failed_again.every = 16, 5  # what X2 could earn; only counted
    apply_method(c, method, 'arithmetic')
    return c
