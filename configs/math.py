"""Mathematics, as in Table 1(a) of the paper: R1-Distill-Qwen-1.5B, DeepScaleR-Preview, B = 256, G = 8, 8,192
response tokens.

    python -m bapo_jax.train --config=configs/math.py:METHOD --workdir=runs/math_METHOD \\
        --config.model.path=deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --config.task.template=r1

METHOD is a row of bapo_jax/methods/ (default bapo). The other model of the paper is Qwen/Qwen3-8B (template
qwen3). Names are of the Hugging Face hub and are fetched once; a directory does as well (docs/start.md).
40,315 problems make 157 steps an epoch, 471 in all. The few problems with more than 2,048 prompt tokens are
left out. vLLM generates: docs/vllm.md.

The trainer fits one 80 GB card for 1.5B and eight for 8B: docs/reference/memory.md, and `--dry_run`.

Evaluation: the paper averages 32 samples in Table 1 (`python -m bapo_jax.evaluate … --samples=32`) and 8 in
its curves (evaluate.samples). It does not say how they are drawn. Here T = 0.6 with the whole distribution,
as in the authors' scripts for this task. The published numbers of DeepScaleR and R1-Distill use top-p 0.95
and 32,768 tokens, and do not compare with these.

Hardware, time, score: not run at this size by us yet; tests/test_math_run.py runs this file with a small
random Qwen3. The values are those of the paper's Table 3 and of the authors' scripts.
"""

from bapo_jax.config import default_config
from bapo_jax.methods import apply_method


def get_config(method: str = 'bapo'):
    c = default_config()
    c.task.name, c.task.train, c.task.template = 'math', 'agentica-org/DeepScaleR-Preview-Dataset', 'r1'
    c.model.path = 'deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B'
    c.model.dtype = 'bfloat16'
    c.rollout.engine, c.rollout.dtype, c.rollout.overlap = 'vllm', 'bfloat16', True
    c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 2048, 8192
    c.rollout.deadline_s = 3600.0  # a group of eight long responses may wait in the server's queue
    c.learner.remat = 'full'
    c.evaluate.every, c.evaluate.temperature, c.evaluate.samples = 50, 0.6, 8
    c.evaluate.benchmarks = ('aime24', 'amc23', 'math500', 'minerva', 'olympiadbench')
    apply_method(c, method, 'math')
    return c
