"""configs/geometry.py on real Geometry3K problems with a small random Qwen2.5-VL: in this process, and with a real vLLM server.

The policy gets no problem right, so a reward of our own has half of its responses right; the verifier judges the export.
"""

import dataclasses
import importlib
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet
import pytest
from real_servers import SEEING
from small_run import metrics, rollouts
from tiny_vl import torch_inputs

from bapo_jax.evaluate import load_for_evaluation
from bapo_jax.export import export
from bapo_jax.inputs import benchmark_prompts
from bapo_jax.models import hf
from bapo_jax.rollout.inprocess import slots
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE
from bapo_jax.run.directory import fingerprint_prompts
from bapo_jax.run.evaluation import evaluate, summary_of
from bapo_jax.tasks.geometry.problems import BENCHMARKS
from bapo_jax.train import build, train

SHARED = Path(__file__).resolve().parents[2] / 'shared' / 'data'
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHARED.is_dir(), reason='the shared data directory is absent'),
]  # fmt: skip

STEPS = 3
SMALL = {
    'steps': STEPS, 'model.dtype': 'float32', 'model.pixels': (6 * 28 * 28, 32 * 28 * 28),
    'task.train': str(SHARED / 'geometry3k_train_examples_10.parquet'), 'task.template': 'plain', 'task.reward': 'parity:odd',
    'rollout.group_size': 4, 'rollout.sync_every': 2, 'rollout.max_prompt_tokens': 600, 'rollout.max_response_tokens': 12,
    'rollout.rows': 16, 'rollout.dtype': 'float32', 'rollout.deadline_s': 400.0, 'replay.reevaluate_every': 3,  # between two syncs
    'replay.c1': 0.5,  # two of four responses: of the first two steps' eight groups, one in 10,000 runs has none as hard
    'learner.batch_groups': 4, 'learner.mini_batch_groups': 2, 'learner.row_tokens': 1024, 'learner.micro_batch_rows': 1,
    'learner.learning_rate': 1e-3, 'learner.remat': 'none', 'checkpoint.every': 1, 'checkpoint.keep': STEPS, 'evaluate.samples': 2,
    'evaluate.every': 0, 'evaluate.max_prompt_tokens': 600, 'log.rollouts_every': 1,
}  # fmt: skip


@pytest.fixture(scope='module', autouse=True)
def data(tmp_path_factory):
    """A directory for BAPO_DATA: the first six problems at hand of each split; the validation split's are of the test split."""
    folder, rows = tmp_path_factory.mktemp('data'), pyarrow.parquet.read_table(SHARED / 'geometry3k_test_60.parquet')
    for i, name in enumerate(BENCHMARKS):
        pyarrow.parquet.write_table(rows.slice(6 * i, 6), folder / f'{name}.parquet')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('BAPO_DATA', str(folder))
        yield folder


def geometry_config(path, method='bapo', **changes):
    config = importlib.import_module('configs.geometry').get_config(method)
    config.model.path = str(path)
    config.update_from_flattened_dict({**SMALL, **{name.replace('__', '.'): value for name, value in changes.items()}})
    return config


def in_process(path, workdir, **changes):
    setup = build(geometry_config(path, rollout__engine='jax', rollout__overlap=False, **changes), workdir)
    return setup, train(setup)


@pytest.fixture(scope='module')
def trained(vl_directory, tmp_path_factory):
    """(run directory, what it was built of, its last state, programs that read prompts) of a run in this process."""
    workdir, before = tmp_path_factory.mktemp('run') / 'geometry', slots.prefill_prompts._cache_size()
    return workdir, *in_process(vl_directory, workdir), slots.prefill_prompts._cache_size() - before


def test_it_trains_on_images_and_the_engine_has_the_learners_log_probs(trained):
    rows = metrics(trained[0])
    assert sum(row.get('actor/grad_norm', 0) > 0 for row in rows) == STEPS
    assert max(row['mismatch/logprob_abs_max'] for row in rows if 'mismatch/kl' in row) < 2e-5
    assert all(row['images/prompts'] >= 1 and row['images/features'] >= 6 for row in rows[1:])
    timed = metrics(trained[0], times=True)[1:]
    assert all(0 < row['images/pixel_bytes'] and 0 < row['perf/kept_pixel_bytes'] < 2**24 for row in timed)
    assert [row['step'] for row in rows if row.get('bapo/reevaluated')] == [3]
    assert all(np.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))
    before, after = trained[1].learner.read_initial(), trained[2].theta.params
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), before, after)))  # the tower's tensors too


def test_a_run_compiles_a_handful_of_programs(trained):
    """Images of 26 sizes; the tower's rows are as long as the largest."""
    learner = trained[1].learner
    sizes = {(i['width'], i['height']) for p in trained[1].run.evaluate.training_prompts for i in p.images}
    assert len(sizes) >= 8
    assert learner.policy.step._cache_size() <= 2 and 1 <= trained[3] <= 8


def test_a_run_that_is_continued_repeats_bit_for_bit(trained, vl_directory, tmp_path):
    workdir, _, first, _ = trained
    again = tmp_path / 'again'
    shutil.copytree(workdir, again)
    for step in range(2, STEPS + 1):
        shutil.rmtree(again / 'checkpoints' / str(step))
    _, second = in_process(vl_directory, again)
    assert metrics(again) == metrics(workdir)
    for name in ('theta', 'alpha', 'reference'):
        jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (getattr(first, name), getattr(second, name))))


def test_other_images_are_another_run(trained):
    """Also those of the same size, whose prompts have the same tokens."""
    recorded, prompts = json.loads((trained[0] / 'config.json').read_text()), trained[1].run.evaluate.training_prompts
    assert fingerprint_prompts(prompts) == recorded['fingerprints']['dataset']
    truth = prompts[0].ground_truth | {'images': [prompts[0].images[0] | {'sha256': '0' * 64}]}
    other = [dataclasses.replace(prompts[0], ground_truth=truth), *prompts[1:]]
    assert fingerprint_prompts(other) != recorded['fingerprints']['dataset']


@pytest.fixture(scope='module')
def exported(trained):
    output = trained[0].parent / 'hf'
    export(trained[0], output)
    return output


def test_torch_reads_the_export_with_our_logits(exported, trained):
    import torch
    from tiny_vl import seen_logp
    from transformers import Qwen2_5_VLForConditionalGeneration

    setup, config = trained[1], hf.read_config(exported)
    params, sight = hf.load_params(exported, config), setup.learner._sight
    prompts = [p for name in BENCHMARKS for p in setup.run.evaluate.benchmarks[name]][:2]
    policy = Qwen2_5_VLForConditionalGeneration.from_pretrained(exported)
    for prompt in prompts:
        response = np.arange(40, 50)
        tokens = np.concatenate([prompt.tokens, response])
        inputs = torch_inputs(tokens, sight.grids_of(prompt), sight.patches_of(prompt))
        inputs['mm_token_type_ids'] = torch.tensor(tokens == config.vision.image_token).int()[None]
        with torch.no_grad():
            theirs = torch.log_softmax(policy(**inputs).logits[0], -1).numpy()
        [ours] = seen_logp(config, params, sight, [prompt], [response])
        np.testing.assert_allclose(ours, theirs[np.arange(len(prompt.tokens) - 1, len(tokens) - 1), response], rtol=0, atol=5e-5)


def test_the_verifier_judges_the_export_on_both_splits(exported, trained, tmp_path):
    config = geometry_config(exported, task__reward='', rollout__engine='jax', rollout__overlap=False)
    loaded = load_for_evaluation(exported, config, None, None)
    benchmarks = benchmark_prompts(loaded.config, loaded.tokenizer, loaded.sight)
    engine = loaded.start(tmp_path)
    scores = {}
    for i, (name, prompts) in enumerate(benchmarks.items()):
        questions = evaluate(engine, loaded.tokenizer, name, prompts, loaded.config, tmp_path / f'{i}.jsonl', [])
        scores[name] = summary_of(questions, prompts, loaded.config)
    engine.close()
    assert list(scores) == list(BENCHMARKS)
    assert all((s['questions'], s['samples']) == (6, 2) and 'maj' in s for s in scores.values())


def test_a_vllm_server_answers_with_images_through_a_sync_and_a_reevaluation(
    vl_directory, seeing_server, tmp_path, monkeypatch
):
    monkeypatch.setenv(TOKEN_VARIABLE, seeing_server.token)
    config = geometry_config(vl_directory, rollout__servers=(seeing_server.url,), **{f'model__{k}': v for k, v in SEEING.items()})
    train(build(config, tmp_path / 'run'))
    rows = metrics(tmp_path / 'run')
    assert [row['bapo/lag'] for row in rows[1:]] == [0, 0, 1]
    assert [row['step'] for row in rows if row.get('bapo/reevaluated')] == [3]
    for step, alpha in zip(range(1, STEPS + 1), (0, 1, 1), strict=True):
        for row in [row for row in rollouts(tmp_path / 'run', step) if row['use'] != 'x3']:
            assert set(row['versions']) == {alpha if row['use'] in ('x1', 'discarded') else step - 1}
    near = [row for row in rows if 'mismatch/kl' in row]
    assert near and all(0 < row['mismatch/logprob_abs_mean'] and row['mismatch/logprob_abs_max'] < 1e-4 for row in near)
    scores = {f'val-core/{name}/acc/{measure}@2' for name in BENCHMARKS for measure in ('mean', 'pass')}
    assert all({n for n in row if n.startswith('val-core/')} == scores for row in (rows[0], rows[-1]))
