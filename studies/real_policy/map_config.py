"""How the map asks: a chat model, through its template, in-process or by a vLLM server. `get_config` takes the task's name."""

from bapo_jax.config import default_config

LONGEST = {'math': 512, 'countdown': 128, 'arithmetic': 56}  # tokens of a prompt


def get_config(task: str = 'arithmetic'):
    c = default_config()
    c.steps = 1
    c.task.name, c.task.train, c.task.template = task, 'generated', 'chat'
    c.rollout.max_prompt_tokens, c.rollout.rows = LONGEST[task], 32
    c.rollout.dtype = 'bfloat16'
    c.rollout.server_args = ('--enforce-eager', '--max-num-seqs=64')
    return c
