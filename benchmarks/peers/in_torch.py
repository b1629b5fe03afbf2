"""The update of peers.py in plain PyTorch: Hugging Face's Qwen2, the GRPO loss, AdamW. A worker of peers.py,
and its data's maker.

    python -m benchmarks.peers.in_torch prepare W DIR             # writes the workload's policy and data
    python -m benchmarks.peers.in_torch update DIR SETTING 5      # seconds of 5 updates, one line of JSON

It is written to be fast. No mask is built: rows are padded on the right and attention is causal, so response
tokens see no padding. The head is applied to response positions alone. Micro-batches may be cut from
sequences in order of length. A process may have both threads, or each of two processes one thread and every
other micro-batch.

Shapes:  S sequences of a mini-batch · B of a micro-batch · T tokens of the longest of them · N response
tokens · D width.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.peers import data as peers_data
import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.peers.data import (
    CLIP,
    GRAD_CLIP,
    LEARNING_RATE,
    SEED,
    WEIGHT_DECAY,
    WORKLOADS,
    Data,
    Workload,
    rate_of_product,
    report,
)
from transformers import AutoConfig, AutoModelForCausalLM

THREADS = 2


class Setting(NamedTuple):
    processes: int  # that share the threads and the micro-batches
    compiled: bool
    sequences: int  # of a micro-batch
    sort: bool  # cut micro-batches from sequences in order of length


SETTINGS = {
    f'{processes} {"compiled" if compiled else "eager"}, {n}{" sorted" if sort else ""}': Setting(processes, compiled, n, sort)
    for processes in (1, 2) for compiled in (False, True) for n in (4, 8, 16, 32, 64) for sort in (False, True)
}  # fmt: skip


class Micro(NamedTuple):
    """Sequences of a micro-batch, and per-token arrays of their response tokens, end to end."""

    tokens_BxT: torch.Tensor
    state_N: torch.Tensor  # int64, index into [B, T] of the state that predicts the token
    target_N: torch.Tensor  # int64
    behaviour_N: torch.Tensor
    advantage_N: torch.Tensor  # over the mini-batch's response tokens, so that the loss is a sum


def prepare(w: Workload, directory: Path) -> None:
    """Writes a random policy, its tokenizer, and the data with log-probs near the policy's own."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**w.hf_config())).eval()
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory / 'model')
    peers_data.write_tokenizer(directory / 'tokenizer', w.vocabulary)
    data = peers_data.draw(w)
    with torch.no_grad():
        for i, of_prompt in enumerate(data.prompts):
            prompts = np.broadcast_to(of_prompt, (w.group_size, w.prompt_tokens))
            tokens_GxT = torch.from_numpy(np.concatenate([prompts, data.responses[i]], axis=1)).long()
            logp_GxLxV = model(tokens_GxT).logits[:, w.prompt_tokens - 1 : -1].log_softmax(-1)
            data.initial[i] = logp_GxLxV.gather(-1, tokens_GxT[:, w.prompt_tokens :, None])[..., 0].numpy()
    data = data._replace(behaviour=data.initial + data.behaviour)
    peers_data.save(directory, w, data)


def gradient(
    model: Any, loss_of: Any, w: Workload, data: Data, groups: np.ndarray, setting: Setting
) -> torch.Tensor:
    """The loss of a mini-batch; its gradient is left in the parameters. All processes get the sums over their
    micro-batches.
    """
    rank, loss = (dist.get_rank() if setting.processes > 1 else 0), torch.zeros(())
    for micro in micro_batches(w, Data(*(x[groups] for x in data)), setting)[rank :: setting.processes]:
        of_micro = loss_of(model, micro)
        of_micro.backward()
        loss += of_micro.detach()
    if setting.processes > 1:
        summed = torch.cat([loss[None], *(p.grad.flatten() for p in model.parameters())])
        dist.all_reduce(summed)
        loss, first = summed[0], 1
        for p in model.parameters():
            p.grad = summed[first : first + p.numel()].view_as(p)
            first += p.numel()
    return loss


def update(
    model: Any, optimizer: Any, loss_of: Any, w: Workload, data: Data, setting: Setting
) -> tuple[float, float]:
    """Optimizer steps over all mini-batches; means of the loss and of the gradient's norm."""
    losses, norms = [], []
    for groups in np.split(np.arange(w.prompts), w.optimizer_steps):
        optimizer.zero_grad(set_to_none=True)
        losses.append(gradient(model, loss_of, w, data, groups, setting))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP))
        optimizer.step()
    return float(torch.stack(losses).mean()), float(torch.stack(norms).mean())


def micro_batches(w: Workload, data: Data, setting: Setting) -> list[Micro]:
    """The mini-batch's sequences, cut and padded to the longest of their micro-batch. A sequence's last token
    is not fed.
    """
    std = data.rewards.std(axis=1, ddof=1, keepdims=True)
    advantage_S = ((data.rewards - data.rewards.mean(axis=1, keepdims=True)) / (std + 1e-6)).reshape(-1)
    responses_SxL, behaviour_SxL, length_S = (
        x.reshape(-1, *x.shape[2:]) for x in (data.responses, data.behaviour, data.lengths)
    )
    order = np.argsort(-length_S, kind='stable') if setting.sort else np.arange(len(length_S))
    micros = []
    for rows in np.split(order, range(setting.sequences, len(order), setting.sequences)):
        longest, length = length_S[rows].max(), length_S[rows]
        tokens = np.concatenate(
            [data.prompts[rows // w.group_size], responses_SxL[rows, : longest - 1]], axis=1
        )
        row, position = np.nonzero(np.arange(longest) < length[:, None])
        arrays = (
            tokens.astype(np.int64),
            row * tokens.shape[1] + w.prompt_tokens - 1 + position,
            responses_SxL[rows][row, position].astype(np.int64),
            behaviour_SxL[rows][row, position],
            advantage_S[rows][row] / np.float32(length_S.sum()),
        )
        micros.append(Micro(*map(torch.from_numpy, arrays)))
    return micros


def micro_loss(model: Any, micro: Micro) -> torch.Tensor:
    """Σ max(-ρ A, -clip(ρ) A) over response tokens, ρ the ratio to the behaviour policy."""
    hidden_BxTxD = model.model(input_ids=micro.tokens_BxT, use_cache=False).last_hidden_state
    hidden_NxD = hidden_BxTxD.flatten(0, 1).index_select(0, micro.state_N)
    logp_N = -F.cross_entropy(model.lm_head(hidden_NxD), micro.target_N, reduction='none')
    ratio_N = torch.exp(logp_N - micro.behaviour_N)
    clipped_N = ratio_N.clamp(1 - CLIP, 1 + CLIP)
    return torch.maximum(-ratio_N * micro.advantage_N, -clipped_N * micro.advantage_N).sum()


def measure(rank: int, directory: Path, name: str, updates: int, meeting: str) -> None:
    """Reports the first update's loss and gradient norm, and the seconds of `updates` more. The processes
    meet at a file.
    """
    setting, (w, data) = SETTINGS[name], peers_data.load(directory)
    torch.set_num_threads(THREADS // setting.processes)
    if setting.processes > 1:
        dist.init_process_group(
            'gloo', init_method=f'file://{meeting}', rank=rank, world_size=setting.processes
        )
    model = AutoModelForCausalLM.from_pretrained(
        directory / 'model', dtype=torch.float32, attn_implementation='sdpa'
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    loss_of = torch.compile(micro_loss, dynamic=w.ragged) if setting.compiled else micro_loss

    first = np.arange(w.prompts // w.optimizer_steps)
    gradient(model, loss_of, w, data._replace(behaviour=data.initial), first, setting)
    on_policy_norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    loss, norm = update(model, optimizer, loss_of, w, data, setting)
    seconds = [
        peers_data.timed(lambda: update(model, optimizer, loss_of, w, data, setting))[0]
        for _ in range(updates)
    ]
    if setting.processes > 1:
        dist.destroy_process_group()
    if rank == 0:
        torch.set_num_threads(THREADS)
        a, b = torch.randn(2, peers_data.MATRIX, peers_data.MATRIX)
        report(
            loss=loss, grad_norm=norm, on_policy_norm=on_policy_norm, seconds=seconds, matrix_flops=rate_of_product(lambda: a @ b),
            versions=peers_data.versions('torch', 'transformers'),
        )  # fmt: skip


if __name__ == '__main__':
    if sys.argv[1] == 'prepare':
        prepare(WORKLOADS[sys.argv[2]], Path(sys.argv[3]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            arguments = (Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), f'{scratch}/meeting')
            torch.multiprocessing.spawn(measure, arguments, SETTINGS[sys.argv[3]].processes)
