"""configs/arithmetic.py with a tiny random Llama in the place of the pretrained one: five steps, an export, and a question to it.

No weights are downloaded here. The policy gets hardly an answer right, so a reward of our own has it learn to end with a digit.
"""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from scored import forward
from small_run import ROOT, metrics, rollouts
from tiny import Policy

from bapo_jax.models import hf
from bapo_jax.models.tokenizer import character_tokenizer, load_tokenizer

pytestmark = pytest.mark.slow
STEPS = 5
CHAT = '{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant '
REWARD = 'def ends_with_a_digit(data_source, response, ground_truth, extra):\n    return response[-1:].isdigit()\n'
SMALL = {
    'steps': STEPS, 'task.limit': 40, 'task.reward': 'rewards_of_the_real_run:ends_with_a_digit', 'rollout.group_size': 4,
    'rollout.max_prompt_tokens': 64, 'rollout.max_response_tokens': 8, 'learner.slot_tokens': 8, 'learner.row_tokens': 64 + 4 * 8,
    'learner.learning_rate': 1e-3, 'evaluate.samples': 2,
}  # fmt: skip


def command(module, *flags, **environment):
    done = subprocess.run(
        [sys.executable, '-m', module, *map(str, flags)], cwd=ROOT, capture_output=True, text=True, timeout=400,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    """The directory of a random Llama whose rotation is stretched as Llama 3.1's; it favours digits, letters and the end."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = character_tokenizer(chat_template=CHAT)
    tokenizer.add_special_tokens({'eos_token': '<|im_end|>', 'additional_special_tokens': ['<|im_start|>']})
    fields = {
        'model_type': 'llama', 'vocab_size': -(-len(tokenizer) // 16) * 16, 'hidden_size': 64, 'intermediate_size': 96,
        'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'max_position_embeddings': 512,
        'tie_word_embeddings': False, 'eos_token_id': tokenizer.eos_token_id, 'bos_token_id': None, 'rope_parameters': {
            'rope_type': 'llama3', 'rope_theta': 1e4, 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
            'original_max_position_embeddings': 64},
    }  # fmt: skip
    path = tmp_path_factory.mktemp('model')
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    with torch.no_grad():
        policy.model.embed_tokens.weight[:, 0] = 1.0  # is then about 8 after every norm
        policy.lm_head.weight[tokenizer.convert_tokens_to_ids([*'0123456789abcdef', '<|im_end|>']), 0] = 1.0
    policy.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_a_llama_learns_by_the_command_and_its_export_is_hugging_faces(model, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    (tmp_path / 'rewards_of_the_real_run.py').write_text(REWARD)
    flags = [f'--config.{name}={value}' for name, value in {'model.path': model, **SMALL}.items()]
    run, own = tmp_path / 'run', {'PYTHONPATH': f'{tmp_path}:{ROOT}'}
    printed = command('bapo_jax.train', '--config=configs/arithmetic.py', f'--workdir={run}', *flags, **own)
    rows = metrics(run)
    assert [row['step'] for row in rows] == list(range(STEPS + 1))
    assert sum(row.get('actor/grad_norm', 0) > 0 for row in rows) >= 3
    assert 'val-core/arithmetic/acc/mean@2' in rows[0] and 'val-core/arithmetic/acc/mean@2' in rows[-1]
    assert sorted(path.name[:6] for path in (run / 'rollouts').iterdir()) == ['000001', f'{STEPS:06d}']  # a short run is seen, too
    assert '<|im_start|>assistant ' in rollouts(run, 1)[0]['prompt']
    assert 'step 1, correct: <|im_start|>user What is' in printed and f'step {STEPS}, ' in printed

    command('bapo_jax.export', f'--checkpoint={run}', f'--output={tmp_path / "out"}')
    config, tokenizer = hf.read_config(tmp_path / 'out'), load_tokenizer(tmp_path / 'out')
    ours = Policy(tmp_path / 'out', config, hf.abstract_params(config)[0], hf.load_params(tmp_path / 'out', config))
    tokens = np.random.default_rng(0).integers(0, len(tokenizer), (2, 100))
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(tmp_path / 'out')(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(forward(ours, tokens), want, rtol=0, atol=5e-5 * float(jnp.abs(want).max()))
    before, after = (hf.load_params(path, config)['head']['kernel'] for path in (model, tmp_path / 'out'))
    assert float(jnp.abs(before - after).max()) > 1e-4

    shown = command('bapo_jax.sample', f'--checkpoint={run}', 'What is 2 + 3?', '--max_response_tokens=8', '--json', **own)
    [answer] = [json.loads(line) for line in shown.splitlines()]
    assert answer['question'] == 'What is 2 + 3?' and answer['logp'] < 0
