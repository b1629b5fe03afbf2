"""TRL's row of peers.py: iterations of its GRPOTrainer on the workload's prompts. Runs in TRL's own
environment.

    python -m benchmarks.peers.in_trl DIR SETTING 5       # seconds of 5 iterations, one line of JSON

The first iteration is given the data's responses, so that its gradient can be compared; the others sample.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.peers import data as peers_data
import torch
from datasets import Dataset
from benchmarks.peers.data import (
    CLIP,
    GRAD_CLIP,
    LEARNING_RATE,
    SEED,
    WEIGHT_DECAY,
    Data,
    rate_of_product,
    report,
    text_of,
)
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

WARM_UP = 2  # iterations that do not count


class Setting(NamedTuple):
    sequences: int  # of a micro-batch


SETTINGS = {f'{n} sequences': Setting(n) for n in (8, 16, 32, 64, 128)}


class Timed(GRPOTrainer):
    """Notes when each iteration begins and what its generation takes."""

    def __init__(self, data: Data, **kwargs: Any):
        super().__init__(**kwargs)
        self.given, self.begins, self.generation = (
            data.responses.reshape(-1, data.responses.shape[-1]).tolist(),
            [],
            [],
        )

    def _generate_and_score_completions(self, inputs):
        self.begins.append(time.perf_counter())
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, *args, **kwargs):
        if len(self.begins) == 1:
            self.generation.append(0.0)
            return self.given, None
        seconds, answers = peers_data.timed(lambda: super(Timed, self)._generate_single_turn(*args, **kwargs))
        self.generation.append(seconds)
        assert all(len(tokens) == len(self.given[0]) for tokens in answers[0]), 'a response ended early'
        return answers


def main(directory: Path, name: str, iterations: int) -> None:
    setting, (w, data) = SETTINGS[name], peers_data.load(directory)
    torch.set_num_threads(2)
    # The given responses are compared mini-batch by mini-batch, so they stay in their order.
    grpo_trainer.shuffle_sequence_dict = lambda sequences: sequences
    tokenizer = AutoTokenizer.from_pretrained(directory / 'tokenizer')
    accumulated = w.prompts * w.group_size // w.optimizer_steps // setting.sequences
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output, use_cpu=True, bf16=False, seed=SEED, report_to='none', save_strategy='no', logging_first_step=True,
            logging_steps=10**6, disable_tqdm=True, max_steps=(WARM_UP + iterations) * w.optimizer_steps + 1,
            learning_rate=LEARNING_RATE, lr_scheduler_type='constant', weight_decay=WEIGHT_DECAY, max_grad_norm=GRAD_CLIP, optim='adamw_torch_fused',
            per_device_train_batch_size=setting.sequences, gradient_accumulation_steps=accumulated,
            steps_per_generation=accumulated * w.optimizer_steps, gradient_checkpointing=False, shuffle_dataset=False,
            num_generations=w.group_size, max_completion_length=w.response_tokens, temperature=1.0, beta=0.0, epsilon=CLIP,
            loss_type='dapo', log_completions=False,
        )  # fmt: skip
        trainer = Timed(
            data,
            model=AutoModelForCausalLM.from_pretrained(
                directory / 'model', dtype=torch.float32, attn_implementation='sdpa'
            ),
            processing_class=tokenizer,
            reward_funcs=lambda prompts, **_: data.rewards.reshape(-1)[: len(prompts)].tolist(),
            train_dataset=Dataset.from_dict({'prompt': [text_of(tokens) for tokens in data.prompts]}),
            args=config,
        )
        trainer.train()
    begins = trainer.begins[WARM_UP:]
    a, b = torch.randn(2, peers_data.MATRIX, peers_data.MATRIX)
    report(
        on_policy_norm=next(row['grad_norm'] for row in trainer.state.log_history if 'grad_norm' in row),
        seconds=np.diff(begins).tolist(),
        generation=trainer.generation[WARM_UP : WARM_UP + len(begins) - 1],
        matrix_flops=rate_of_product(lambda: a @ b),
        versions=peers_data.versions('trl', 'torch', 'transformers'),
    )


if __name__ == '__main__':
    os.environ['HF_HUB_OFFLINE'] = '1'
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
