r"""configs/math.py from the command line to a Hugging Face directory: real problems, the real Qwen3 tokenizer, a real vLLM process.

The policy is a small random one and gets no problem right, so a reward of our own has it learn to close its thinking and then
write a digit; the verifier judges the export.
"""

import functools
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_run import ROOT, metrics, rollouts

from bapo_jax.models import hf
from bapo_jax.models.attention import xla
from bapo_jax.models.tokenizer import load_tokenizer
from bapo_jax.tasks import encode_prompts, get_task
from bapo_jax.tasks.mathematics.problems import BENCHMARKS, training_problems

SHARED = Path(__file__).resolve().parents[2] / 'shared' / 'data'
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SHARED.is_dir(), reason='the shared data directory is absent')]

# Untied like Qwen3-8B, and heads wider than the model.
MODEL = {
    'model_type': 'qwen3', 'vocab_size': 151_936, 'hidden_size': 64, 'intermediate_size': 128, 'num_hidden_layers': 2,
    'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 32, 'tie_word_embeddings': False,
    'max_position_embeddings': 4096, 'eos_token_id': 151_645,
}  # fmt: skip
# Five in six tokens that the policy writes are these, so that responses think, box, end and differ.
FAVOURED = ('<think>', '</think>', '<|im_end|>', '\\', 'boxed', '{', '}', '1', '2', '3', '4', '\n')
REWARD = r"""
import re

def thinks_then_counts(data_source, response, ground_truth, extra):
    return re.search(r'</think>.*\d', response, re.DOTALL) is not None
"""
STEPS = 4
LIMIT, PROMPT_TOKENS, RESPONSE_TOKENS = 64, 128, 24
SMALL = {
    'steps': STEPS, 'task.limit': LIMIT, 'task.template': 'qwen3', 'task.reward': 'rewards_of_the_math_run:thinks_then_counts',
    'rollout.group_size': 4, 'rollout.sync_every': 2, 'rollout.max_prompt_tokens': PROMPT_TOKENS,
    'rollout.max_response_tokens': RESPONSE_TOKENS, 'rollout.server.args': "('--enforce-eager',)", 'replay.reevaluate_every': 3,
    'replay.c1': 1 / 4,  # of four responses one, as 1/8 is of eight
    'learner.batch_groups': 8, 'learner.mini_batch_groups': 4, 'learner.row_tokens': 1024, 
    'learner.micro_batch_rows': 1, 'learner.learning_rate': 1e-3, 'evaluate.samples': 2, 'log.rollouts_every': 1,
}  # fmt: skip


def command(module, *flags, **environment):
    return subprocess.run(
        [sys.executable, '-m', module, *map(str, flags)], cwd=ROOT, capture_output=True, text=True, timeout=540,
        env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    """The directory of a random Qwen3 with the real tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path_factory.mktemp('model')
    (path / 'tokenizer.json').write_bytes(gzip.decompress((SHARED / 'tokenizer_qwen3' / 'tokenizer.json.gz').read_bytes()))
    (path / 'tokenizer_config.json').write_bytes((SHARED / 'tokenizer_qwen3' / 'tokenizer_config.json').read_bytes())
    favoured = load_tokenizer(path).convert_tokens_to_ids([{'\n': 'Ċ'}.get(text, text) for text in FAVOURED])
    assert None not in favoured
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
    with torch.no_grad():
        policy.model.embed_tokens.weight[:, 0] = 1.0  # is then about 8 after every norm
        policy.lm_head.weight[favoured, 0] = 1.5
    policy.save_pretrained(path)
    return path


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """A directory for BAPO_DATA: two short problems of each benchmark."""
    folder, few = tmp_path_factory.mktemp('data'), []
    with gzip.open(SHARED / 'math_test.jsonl.gz', 'rt', encoding='utf-8') as file:
        rows = [row for row in map(json.loads, file) if len(row['problem']) < 200]
    for name in BENCHMARKS:
        few += [row for row in rows if row['dataset'] == name][:2]
    (folder / 'math_test.jsonl.gz').write_bytes(gzip.compress(''.join(json.dumps(row) + '\n' for row in few).encode()))
    return folder


@pytest.fixture(scope='module')
def trained(tmp_path_factory, model, data):
    """(run directory, what the command printed)"""
    folder = tmp_path_factory.mktemp('run')
    (folder / 'rewards_of_the_math_run.py').write_text(REWARD)
    fields = {'model.path': model, 'task.train': SHARED / 'math_train.jsonl.gz', **SMALL}
    flags = [f'--config.{name}={value}' for name, value in fields.items()]
    environment = {'BAPO_DATA': str(data), 'PYTHONPATH': str(folder)}
    done = command('bapo_jax.train', '--config=configs/math.py', f'--workdir={folder}/math', *flags, **environment)
    assert done.returncode == 0, done.stderr
    return folder / 'math', done.stdout + done.stderr


def test_the_command_runs_as_the_config_says(trained):
    workdir, printed = trained
    config = json.loads((workdir / 'config.json').read_text())
    assert config['rollout']['overlap'] and (config['rollout']['dtype'], config['model']['dtype']) == ('bfloat16', 'bfloat16')
    tokenizer, problems = load_tokenizer(config['model']['path']), training_problems(config['task']['train'], limit=LIMIT, seed=0)
    lengths = {p.id: len(p.tokens) for p in encode_prompts('math', problems, tokenizer, template='qwen3')}
    long = sum(n > PROMPT_TOKENS for n in lengths.values())
    assert 0 < long <= LIMIT - 8 * STEPS
    assert f'{long} of {LIMIT} prompts are longer than rollout.max_prompt_tokens={PROMPT_TOKENS} and are left out' in printed
    drawn = [row for step in range(1, STEPS + 1) for row in rollouts(workdir, step) if row['use'] in ('x1', 'discarded')]
    assert len({row['prompt_id'] for row in drawn}) == len(drawn) == 8 * STEPS
    assert all(lengths[row['prompt_id']] <= PROMPT_TOKENS for row in drawn)
    assert all(problems[row['prompt_id']]['problem'] == row['ground_truth']['problem'] for row in drawn)


def test_two_syncs_and_a_reevaluation_between_them_by_the_schedule(trained):
    rows = metrics(trained[0])[1:]
    assert [row['bapo/lag'] for row in rows] == [0, 0, 1, 0]
    assert [row['step'] for row in rows if row['bapo/reevaluated']] == [3]
    for step, alpha in zip(range(1, STEPS + 1), (0, 1, 1, 3), strict=True):
        for row in [row for row in rollouts(trained[0], step) if row['use'] != 'x3']:
            assert set(row['versions']) == {alpha if row['use'] in ('x1', 'discarded') else step - 1}


def test_the_server_is_as_near_to_the_trainer_as_bfloat16_is(trained):
    rows = [row for row in metrics(trained[0]) if 'mismatch/kl' in row]
    assert len(rows) >= STEPS // 2  # those of steps with groups in X1
    for row in rows:
        assert 0 < row['mismatch/logprob_abs_mean'] < 0.05 and row['mismatch/logprob_abs_max'] < 0.5
        assert row['mismatch/kl'] < 0.01 and 0.95 < row['mismatch/ess'] <= 1


def test_it_trains_and_scores_all_five_benchmarks_before_and_after(trained):
    rows = metrics(trained[0])
    assert sum(row.get('actor/grad_norm', 0) > 0 for row in rows) >= STEPS // 2
    assert all(np.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))
    # no maj@n: what a reward of one's own names are no votes
    scores = {f'val-core/{name}/acc/{measure}@2' for name in BENCHMARKS for measure in ('mean', 'pass')}
    assert all({n for n in row if n.startswith('val-core/')} == scores for row in (rows[0], rows[-1]))


def test_rollout_files_keep_the_thinking_that_the_reward_saw(trained):
    responses = []
    for step in range(1, STEPS + 1):
        for row in rollouts(trained[0], step):
            assert row['prompt'].startswith('<|im_start|>user\n' + row['ground_truth']['problem'])
            assert row['prompt'].endswith('within \\boxed{}.<|im_end|>\n<|im_start|>assistant\n')
            assert row['rewards'] == [float(re.search(r'</think>.*\d', text, re.DOTALL) is not None) for text in row['responses']]
            assert [text.endswith('<|im_end|>') for text in row['responses']] == [finish == 'stop' for finish in row['finish']]
            responses += row['responses']
    for text in ('<think>', '</think>', '<|im_end|>'):
        assert any(text in response for response in responses)


@pytest.fixture(scope='module')
def exported(trained):
    output = trained[0].parent / 'hf'
    done = command('bapo_jax.export', f'--checkpoint={trained[0]}', f'--output={output}')
    assert done.returncode == 0, done.stderr
    return output


def test_torch_reads_the_export_with_our_logits(exported, model):
    import torch
    from transformers import AutoModelForCausalLM

    config = hf.read_config(exported)
    params, before = hf.load_params(exported, config), hf.load_params(model, config)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), params, before)))  # every tensor has moved
    tokens = np.random.default_rng(0).integers(0, 151_000, (2, 24))
    positions, one_segment = np.tile(np.arange(24), (2, 1)), functools.partial(xla, segment_BxT=jnp.ones((2, 24)))
    policy = nnx.merge(hf.abstract_params(config)[0], params)
    ours = policy.logits(policy(jnp.array(tokens), jnp.array(positions), one_segment))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(exported)(torch.tensor(tokens)).logits.numpy()
    assert theirs.std() > 0.1
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-5)


def test_the_verifier_judges_the_export(exported, data, tmp_path):
    flags = ['--config=configs/math.py', '--config.task.template=qwen3', f'--config.rollout.max_prompt_tokens={PROMPT_TOKENS}',
             f'--config.rollout.max_response_tokens={RESPONSE_TOKENS}', '--samples=2',
             '--engine=jax', '--config.rollout.rows=32']  # fmt: skip
    done = command('bapo_jax.evaluate', f'--checkpoint={exported}', f'--output={tmp_path}', *flags, BAPO_DATA=str(data))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / 'summary.json').read_text())
    assert summary['config.task.reward'] == '' and list(summary['benchmarks']) == list(BENCHMARKS)
    verdicts = set()
    for name, score in summary['benchmarks'].items():
        samples = [json.loads(line) for line in (tmp_path / f'{name}.jsonl').read_text().splitlines()]
        assert (score['questions'], score['samples'], len(samples)) == (2, 2, 4) and 'maj' in score
        for row in samples:
            verdict, answer = get_task('math').verify(row['response'].removesuffix('<|im_end|>'), row['ground_truth'])
            assert (row['verdict'], row['answer']) == (verdict.name.lower(), answer)
            verdicts.add(row['verdict'])
    assert 'unparseable' in verdicts and 'infra_error' not in verdicts
