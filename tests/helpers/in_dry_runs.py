"""A model and a config: what dry runs of the tests measure."""

from bapo_jax.config import default_config
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.rotary import Rotation

MODEL = ModelConfig('qwen2', 1000, 128, 384, 3, 4, 2, 128, Rotation(1e4), 1e-6, False, 'bfloat16')


def config(topology_devices=1, **learner):
    c = default_config()
    c.model.path, c.model.dtype = 'unused', 'bfloat16'
    c.mesh.fsdp = topology_devices
    changes = {'row_tokens': 512, 'micro_batch_rows': 8, 'remat': 'full', **learner}
    c.learner.update_from_flattened_dict({name.replace('__', '.'): value for name, value in changes.items()})
    return c
