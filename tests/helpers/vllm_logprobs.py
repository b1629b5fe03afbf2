"""What vLLM itself says of given tokens, for one model directory after another: run by vLLM's interpreter, without a server.

    python vllm_logprobs.py '[[5, 6, 7], …]' DTYPE DIRECTORY…    a line of JSON for each: the log-prob of each token after the first

A published policy (a directory with a manifest) is loaded into the model of the directory before it.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] = '0'  # else each model would start a process, which imports for ten seconds

from vllm import LLM, SamplingParams

sys.path.append(str(Path(__file__).resolve().parents[2]))
tokens, dtype = json.loads(sys.argv[1]), sys.argv[2]
asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
model = None
for directory in sys.argv[3:]:
    if (Path(directory) / 'manifest.json').is_file():
        for method in ('check_policy', 'load_policy'):
            [answer] = model.collective_rpc(method, args=(directory,))
            assert 'version' in answer, answer
    else:
        model = None
        gc.collect()
        model = LLM(
            model=directory, dtype=dtype, enforce_eager=True, max_model_len=64, max_num_seqs=4, skip_tokenizer_init=True,
            generation_config='vllm', worker_extension_cls='bapo_jax.rollout.vllm.worker.PolicyLoader',
        )  # fmt: skip
    said = model.generate([{'prompt_token_ids': ids} for ids in tokens], asked, use_tqdm=False)
    print(json.dumps([[next(iter(at.values())).logprob for at in one.prompt_logprobs[1:]] for one in said]), flush=True)
