"""How the map asks: a chat model, through its template, in-process or by a vLLM server. `get_config` takes a
key of LONGEST.
"""

from bapo_jax.config import default_config

LONGEST = {'math': 512, 'countdown': 128, 'arithmetic': 56, 'countdown_examples': 256}  # tokens of a prompt


def get_config(task: str = 'arithmetic'):
    c = default_config()
    c.steps = 1
    name, _, template = task.partition('_')
    c.task.name, c.task.train, c.task.template = name, 'generated', template or 'chat'
    c.rollout.max_prompt_tokens, c.rollout.rows = LONGEST[task], 32
    c.rollout.dtype = 'bfloat16'
    c.rollout.server.args = ('--enforce-eager', '--max-num-seqs=256')
    return c
