"""Geometry3K's 2,101 problems in memory: prompts and buffered groups hold references, and pixels have a limit of their own.

A process of its own reads them; it runs this file as a script.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / 'shared' / 'data'
PROBLEMS, LOOKED_AT = 2101, 80  # whose pixels exceed the limit


def peak() -> int:
    """The most memory that this process has had, in bytes. getrusage would count its parent's before it started, too."""
    return next(1024 * int(line.split()[1]) for line in Path('/proc/self/status').read_text().splitlines() if 'VmHWM' in line)


def main(file, model):
    from bapo_jax.groups import Group, Verdict, sampled
    from bapo_jax.replay.arrays import groups_to_arrays
    from bapo_jax.models import hf
    from bapo_jax.models.tokenizer import load_tokenizer
    from bapo_jax.tasks import encode_prompts
    from bapo_jax.tasks.geometry import task as geometry
    from bapo_jax.tasks.sight import Sight

    config, tokenizer = hf.read_config(model), load_tokenizer(model)
    sight = Sight(model, config.vision.image_token, least_pixels=512 * 28 * 28, most_pixels=768 * 28 * 28)
    sight._processor  # noqa: B018  (libraries are no cost of the images)
    before = peak()
    truths = geometry.benchmark(file)  # of training problems that repeat, one would be kept
    prompts = encode_prompts('geometry', truths, tokenizer, template='paper', sight=sight)
    assert len(prompts) == PROBLEMS
    logp = np.zeros(16, np.float32)
    responses = tuple(sampled(np.arange(16, dtype=np.int32), logp, 'stop', 0) for _ in range(8))
    groups = [Group(p, responses, (Verdict.WRONG,) * 8, np.zeros(8, np.float32), 1) for p in prompts]
    saved = groups_to_arrays(groups)
    for prompt in prompts[:LOOKED_AT]:
        sight.patches_of(prompt)
    assert sight.kept_bytes() <= 2**29
    assert b'"sha256"' in saved['task_and_truth'].tobytes() and sum(x.nbytes for x in saved.values()) < 64 * 2**20
    print(peak() - before)


if __name__ == '__main__':
    main(*sys.argv[1:])
    sys.exit()


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason='the shared data directory is absent')
def test_all_problems_cost_at_most_their_files_and_a_gibibyte(vl_directory, tmp_path):
    files = [SHARED / f'geometry3k_{name}.parquet' for name in ('train_examples_10', 'test_60')]
    at_hand = pyarrow.concat_tables([pyarrow.parquet.read_table(file) for file in files])
    repeated = at_hand.take(np.arange(PROBLEMS) % len(at_hand))
    pyarrow.parquet.write_table(repeated, tmp_path / 'problems.parquet', row_group_size=100)
    command = [sys.executable, __file__, tmp_path / 'problems.parquet', vl_directory]
    environment = {**os.environ, 'PYTHONPATH': f'{ROOT}:{ROOT}/tests/helpers', 'JAX_PLATFORMS': 'cpu'}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    taken = int(done.stdout.split()[-1])
    assert 0 < taken <= (tmp_path / 'problems.parquet').stat().st_size + 2**30
    print(f'{taken / 2**20:.0f} MiB')
