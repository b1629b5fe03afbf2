"""Writes a GGUF file of llama.cpp as a Hugging Face directory in bfloat16: weights, config.json, tokenizer,
chat template.

    python -m studies.real_policy.gguf_to_hf MODEL.gguf DIRECTORY [--tied]

The architectures llama and qwen2. Quantised weights become the bfloat16 numbers that they stand for: the
model is the quantised one. The reader is the package gguf of llama.cpp (requirements-real.txt).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bapo_jax.models import hf

_NAMES = {
    'attn_norm': 'input_layernorm', 'ffn_norm': 'post_attention_layernorm', 'attn_q': 'self_attn.q_proj', 'attn_k': 'self_attn.k_proj',
    'attn_v': 'self_attn.v_proj', 'attn_output': 'self_attn.o_proj', 'ffn_gate': 'mlp.gate_proj', 'ffn_up': 'mlp.up_proj',
    'ffn_down': 'mlp.down_proj',
}  # fmt: skip
# Qwen2's own pattern: contractions, words with one character before them, single digits, marks with line
# ends, and spaces.
_QWEN2_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that no merge makes


def fields_of(reader: gguf.GGUFReader) -> dict[str, Any]:
    """The file's metadata by name."""
    return {name: field.contents() for name, field in reader.fields.items()}


def config_of(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """What config.json states. Raises ValueError for another architecture."""
    family = fields['general.architecture']
    if family not in ('llama', 'qwen2'):
        raise ValueError(f'general.architecture is {family!r}; supported: llama, qwen2')

    def stated(name: str) -> Any:
        return fields[f'{family}.{name}']

    return {
        'architectures': [{'llama': 'LlamaForCausalLM', 'qwen2': 'Qwen2ForCausalLM'}[family]],
        'model_type': family,
        'vocab_size': len(fields['tokenizer.ggml.tokens']),
        'hidden_size': stated('embedding_length'),
        'intermediate_size': stated('feed_forward_length'),
        'num_hidden_layers': stated('block_count'),
        'num_attention_heads': stated('attention.head_count'),
        'num_key_value_heads': stated('attention.head_count_kv'),
        'max_position_embeddings': stated('context_length'),
        'rope_theta': float(f'{stated("rope.freq_base"):.7g}'),
        'rms_norm_eps': float(f'{stated("attention.layer_norm_rms_epsilon"):.6g}'),  # a float32 in the file
        'hidden_act': 'silu',
        'tie_word_embeddings': tied,
        'bos_token_id': fields.get('tokenizer.ggml.bos_token_id'),
        'eos_token_id': fields['tokenizer.ggml.eos_token_id'],
        'torch_dtype': 'bfloat16',
    }


def tensors_of(reader: gguf.GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face's name, float32 array), a tensor at a time."""
    held = {tensor.name: tensor for tensor in reader.tensors}
    if config['tie_word_embeddings'] and 'output.weight' in held:
        # One matrix, rounded twice: the head's copy has more bits.
        held['token_embd.weight'] = held.pop('output.weight')
    for name, tensor in held.items():
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part, _, kind = name.rpartition('.')
        if part.startswith('blk.'):
            _, layer, inner = part.split('.')
            if config['model_type'] == 'llama' and inner in ('attn_q', 'attn_k'):
                heads = config['num_attention_heads' if inner == 'attn_q' else 'num_key_value_heads']
                array = _unpermuted(array, heads)
            yield f'model.layers.{layer}.{_NAMES[inner]}.{kind}', array
        else:
            yield (
                {
                    'token_embd': 'model.embed_tokens.weight',
                    'output_norm': 'model.norm.weight',
                    'output': 'lm_head.weight',
                }[part],
                array,
            )


def _unpermuted(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp turns neighbouring numbers of a head, Hugging Face the two halves: rows of queries and keys
    stand otherwise there.
    """
    return array.reshape(heads, array.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)


def tokenizer_of(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The byte-level BPE of the file; ids are those of the file. Raises ValueError for another kind."""
    kind = fields['tokenizer.ggml.pre']
    if fields['tokenizer.ggml.model'] != 'gpt2' or kind not in ('smollm', 'qwen2'):
        raise ValueError(
            f'the tokenizer is {fields["tokenizer.ggml.model"]}, {kind}; supported: gpt2 with smollm or qwen2'
        )
    tokens, types = fields['tokenizer.ggml.tokens'], fields['tokenizer.ggml.token_type']
    merges = [tuple(merge.split(' ')) for merge in fields['tokenizer.ggml.merges']]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    if kind == 'smollm':
        parts = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    else:
        bpe.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), 'isolated')
        parts = [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Sequence(parts), decoders.ByteLevel()
    marks = [token for token, of in zip(tokens, types, strict=True) if of in (_CONTROL, _USER_DEFINED)]
    bpe.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    named = {
        name: fields.get(f'tokenizer.ggml.{key}_token_id')
        for name, key in (('eos_token', 'eos'), ('bos_token', 'bos'))
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        clean_up_tokenization_spaces=False,
        **{name: tokens[i] for name, i in named.items() if i is not None},
    )
    tokenizer.chat_template = fields.get('tokenizer.chat_template')
    return tokenizer


def convert(file: Path, directory: Path, tied: bool, stop_tokens: tuple[int, ...] = ()) -> None:
    """Writes `directory`; `stop_tokens` are added to the file's own. Raises FileExistsError where weights are
    there already.
    """
    reader = gguf.GGUFReader(file)
    fields = fields_of(reader)
    config = config_of(fields, tied)
    with tempfile.TemporaryDirectory(dir=directory.parent) as name:
        beside = Path(name)
        (beside / 'config.json').write_text(json.dumps(config, indent=2) + '\n', 'utf-8')
        ends = list(dict.fromkeys([config['eos_token_id'], *stop_tokens]))
        (beside / 'generation_config.json').write_text(json.dumps({'eos_token_id': ends}) + '\n', 'utf-8')
        tokenizer_of(fields).save_pretrained(beside)
        hf.save(directory, tensors_of(reader, config), like=beside, dtype='bfloat16')
    hf.check_weights(directory, hf.read_config(directory))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('file', type=Path)
    parser.add_argument('directory', type=Path)
    parser.add_argument(
        '--tied', action='store_true', help='embedding and head are one matrix, though the file holds both'
    )
    arguments = parser.parse_args()
    try:
        convert(arguments.file, arguments.directory, arguments.tied)
    except (ValueError, OSError) as e:
        sys.exit(f'error: {e}')


if __name__ == '__main__':
    main()
