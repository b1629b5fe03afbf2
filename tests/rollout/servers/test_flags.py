"""vLLM's own flags: in which spellings they are read, and which are refused. What vLLM takes was tried with 0.32.0's parser."""

import re

import pytest

from bapo_jax.rollout.vllm.flags import in_full

TENSOR = '--tensor-parallel-size'


@pytest.mark.parametrize(
    'words, full',
    [
        ([TENSOR, '2'], [TENSOR, '2']),
        (['--tensor_parallel_size=2'], [TENSOR, '2']),
        (['--tensor-parallel_size', 2], [TENSOR, '2']),  # a config may have a number
        (['-tp', '2', '-tp=3'], [TENSOR, '2', TENSOR, '3']),
        (['-pp=2', '-pcp', '3'], ['--pipeline-parallel-size', '2', '--prefill-context-parallel-size', '3']),
        (['-dp', '1'], ['--data-parallel-size', '1']),
        (['--hf_overrides={"a_b": "--c=d"}', '-x'], ['--hf-overrides', '{"a_b": "--c=d"}', '-x']),
    ],
)
def test_a_flag_that_is_read_here_is_written_one_way(words, full):
    assert in_full(words) == full == in_full(full)


def test_all_others_stay_as_they_are():
    words = [
        '--enforce-eager', '--max_num_seqs=64', '--model-impl', 'auto', '--config-format=hf', '--data-parallel-size-local=1',
        '-cc.mode=3', '-O3', '--kernel-config.a.b', '1', '--hf-overrides-of-mine', '--max-num-seqs', '--seed', '-1', 'model', '1.5',
    ]  # fmt: skip
    assert in_full(words) == words and in_full(()) == []


@pytest.mark.parametrize(
    'words, message',
    [
        (['--tensor-parallel', '2'], f'--tensor-parallel: this abbreviates {TENSOR}; write the name of the flag in full'),
        (['--tensor_parallel=2'], f'--tensor_parallel=2: this abbreviates {TENSOR}'),
        (['--te=2'], f'--te=2: this abbreviates {TENSOR}'),
        (['-t', '2'], '-t: this abbreviates -tp;'),
        (['--hf-o', '{}'], '--hf-o: this abbreviates --hf-overrides'),
        (['--hf_o.rope_theta', '1'], '--hf_o.rope_theta: this abbreviates --hf-overrides'),
        (['--dty', 'float32'], '--dty: this abbreviates --dtype'),
        (['--gpu_memory=.5'], '--gpu_memory=.5: this abbreviates --gpu-memory-utilization'),
        (['--device-mem', '.5'], '--device-mem: this abbreviates --device-memory-utilization'),
        (['--max-model=77'], '--max-model=77: this abbreviates --max-model-len'),
        (['--hf-overrides.rope_theta', '1'], '--hf-overrides.rope_theta: a dotted flag replaces all others; give an object'),
        (['--hf_overrides.rope_theta=40000'], '--hf_overrides.rope_theta=40000: a dotted flag replaces'),
        (['--hf-overrides.layers+', '1,2'], '--hf-overrides.layers+: a dotted flag replaces'),
        (['--config', 'x.yaml'], '--config: flags in a file are not checked by this package; give each of them here'),
        (['--config=x.yaml'], '--config=x.yaml: flags in a file are not checked'),
        (['--dtype', 'float32'], "--dtype: vLLM's --dtype is set by rollout.dtype, or --dtype of serve; leave it out here"),
        (['--gpu_memory_utilization=.5'], 'is set by rollout.server.memory, or --memory of serve; leave'),
        (['-x', '--max-model-len', '1k'], 'is set by the token limits of rollout and evaluate, or --max_tokens of serve'),
        (['--device-ids=0'], 'is set by rollout.gpus, or --gpus of serve'),
        (['--host=0.0.0.0'], 'is set by --host of serve'),
        (['8000'], "8000: only vLLM's own flags are allowed here, such as --enforce-eager; remove it"),
        (['--enforce-eager', '--', '-tp', '2'], "--: only vLLM's own flags"),
    ],
)
def test_what_would_be_lost_or_not_seen_is_refused(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        in_full(words)
