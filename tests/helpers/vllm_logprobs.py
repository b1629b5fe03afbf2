"""What vLLM itself says of given tokens, for one model directory after another: run by vLLM's interpreter, without a server.

    python vllm_logprobs.py '[[5, 6, 7], …]' DIRECTORY…    a line of JSON for each: the log-prob of each token after the first
"""

import gc
import json
import os
import sys

os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] = '0'  # else each model would start a process, which imports for ten seconds

from vllm import LLM, SamplingParams

tokens = json.loads(sys.argv[1])
asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
for directory in sys.argv[2:]:
    model = LLM(
        model=directory, dtype='float32', enforce_eager=True, max_model_len=64, max_num_seqs=4, skip_tokenizer_init=True,
        generation_config='vllm',
    )  # fmt: skip
    said = model.generate([{'prompt_token_ids': ids} for ids in tokens], asked, use_tqdm=False)
    print(json.dumps([[next(iter(at.values())).logprob for at in one.prompt_logprobs[1:]] for one in said]), flush=True)
    del model
    gc.collect()
