"""Visual geometry, as in Table 1(b) of the paper: Qwen2.5-VL-3B or 7B, the 2,101 training problems of
Geometry3K, B = 256, G = 8.

    python -m bapo_jax.train --config=configs/geometry.py:METHOD --workdir=runs/geometry_METHOD

METHOD is a row of bapo_jax/methods/ (default bapo). For the 7B:
--config.model.path=Qwen/Qwen2.5-VL-7B-Instruct, or a directory. 2,101 problems make 8 steps an epoch, 240 in
all. Evaluated on the validation (300) and test (601) splits. vLLM generates: docs/vllm.md. To train on a file
or on InterGPS's folders: --config.task.train=PATH. The environment variable BAPO_DATA may name a directory
with geo3k_val.parquet and geo3k_test.parquet.

An image takes at most 768 of the 1,024 prompt tokens here (model.pixels), so that every question of a split
fits. The paper does not say what it allows. --config.learner.vision_rate=0 freezes the vision tower.

The trainer fits eight 80 GB cards, 16 v5e chips (3B), or eight v6e chips (7B, mesh.frozen_on_host=True):
docs/reference/memory.md, `--dry_run`.

Hardware, time, score: not run at this size by us yet; tests/test_geometry_run.py runs this file with a small
random Qwen2.5-VL. The values are those of the paper's Table 3 and of the authors' scripts.
"""

from bapo_jax.config import default_config
from bapo_jax.methods import apply_method


def get_config(method: str = 'bapo'):
    c = default_config()
    c.epochs = 30
    c.task.name, c.task.train, c.task.template = 'geometry', 'hiyouga/geometry3k', 'paper'
    c.model.path = 'Qwen/Qwen2.5-VL-3B-Instruct'
    c.model.dtype, c.model.pixels = 'bfloat16', (0, 768 * 28 * 28)
    c.rollout.engine, c.rollout.dtype, c.rollout.overlap = 'vllm', 'bfloat16', True
    c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 1024, 4096
    c.rollout.deadline_s = 3600.0  # a group of eight long responses may wait in the server's queue
    c.replay.max_reevaluate = 256
    c.learner.kl_coef, c.learner.entropy_coef = 0.01, 0.0
    c.learner.remat = 'full'
    c.evaluate.every, c.evaluate.temperature, c.evaluate.samples = 10, 0.6, 8
    c.evaluate.benchmarks = ('geo3k_val', 'geo3k_test')
    apply_method(c, method, 'geometry')
    return c
