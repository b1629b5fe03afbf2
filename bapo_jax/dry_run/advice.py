"""What a dry run advises for GPUs: settings that fit, with modelled times, or the fields that would help.

Memory is by the formula (memory.py). Times are modelled too, for a step on d cards in which all responses
have full length:

    seconds = max(F / (d · s · peak), G / link, K · KERNEL_S) + M / memory + A / link + H / link

F is the number of operations of all rows, recomputation included, and s = SHARE. G is the bytes of weights
gathered and gradients scattered over `fsdp`: per micro-batch, or per mini-batch with mesh.gather_once. K is
the number of kernels that a card launches. M is the bytes of weights and gradients that the micro-batches
read and write. A is the bytes of summing gradients over `data`, H those of summing the layers' outputs over
`tensor`. The bandwidth of a card to other hosts is BETWEEN_HOSTS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from bapo_jax.cluster.devices import POOL, pool_share
from bapo_jax.config.rules import full_batch_groups
from bapo_jax.dry_run.memory import matrix_sizes, numbers_idle
from bapo_jax.dry_run.targets import GB, Card, Target
from bapo_jax.learner.packing import rows_of_a_group
from bapo_jax.models import hf
from bapo_jax.models.decoder import ModelConfig

# The share of the card's dense bfloat16 peak that matrix products are assumed to reach; prime-rl's trainer
# reaches .11 to .17 in RL.
SHARE = 0.5
BETWEEN_HOSTS = 50  # GB/s per card: 400 Gb/s
# Kernels per layer and micro-batch (145 to 160 compiled: docs/reference/performance.md), and seconds of the
# shortest.
LAYER_KERNELS, KERNEL_S = 150, 3e-6
_ROWS = (1, 2, 4, 8, 16, 32)  # per device at once
# The share of a layer's forward pass that each remat policy recomputes in the backward pass.
_AGAIN = {'none': 0.0, 'matrix_products': 0.05, 'attention_and_mlp_inputs': 0.75, 'full': 1.0}
_SHOWN = 6
_WAYS = (1, 2, 4, 8)  # ways to split heads within a host


class Setting(NamedTuple):
    """Fields of a config, with the memory and time they would take."""

    data: int
    fsdp: int
    tensor: int
    rows: int  # learner.micro_batch_rows, over all devices
    remat: str
    bytes: int  # per device
    seconds: float  # per step

    def applied(self, config: ConfigDict) -> ConfigDict:
        """A copy of the config with these fields."""
        c = ConfigDict(config.to_dict())
        c.mesh.data, c.mesh.fsdp, c.mesh.tensor = self.data, self.fsdp, self.tensor
        c.learner.micro_batch_rows, c.learner.remat = self.rows, self.remat
        return c


def settings(
    config: ConfigDict,
    model: ModelConfig,
    card: Card,
    hosts: int,
    cards: int,
    memory: Callable[[ConfigDict], float],
    device_bytes: int,
) -> list[Setting]:
    """The settings of mesh, rows and remat that fit, fastest first; `memory(config)` is in bytes per device.

    `tensor` is 1 if any such setting fits, else the smallest split within a host with which one fits.
    """
    found: list[Setting] = []
    ways = [
        n
        for n in _WAYS
        if (cards // hosts) % n == 0 and model.num_kv_heads % n == 0 and model.num_heads % n == 0
    ]
    for tensor in ways:
        rest = cards // tensor
        for data, fsdp in sorted({(rest // n, n) for n in (1, rest // hosts, rest)}):
            for rows in _ROWS:
                for remat in _AGAIN:
                    trial = Setting(data, fsdp, tensor, rows * rest, remat, 0, 0.0)
                    c = trial.applied(config)
                    needs = memory(c)
                    if needs <= device_bytes:
                        found.append(
                            trial._replace(bytes=needs, seconds=step_seconds(c, model, card, cards // hosts))
                        )
        if found:
            break
    of_each = {}  # the fastest number of rows for each mesh and remat
    for setting in sorted(found, key=lambda s: (s.seconds, s.bytes)):
        of_each.setdefault((setting.data, setting.fsdp, setting.remat), setting)
    return list(of_each.values())


def step_seconds(config: ConfigDict, model: ModelConfig, card: Card, cards_of_a_host: int) -> float:
    """Modelled seconds of a training step on the config's mesh, which spans all cards."""
    l, r, m = config.learner, config.rollout, config.mesh
    cards, a_sequence = m.data * m.fsdp * m.tensor, r.max_prompt_tokens + r.max_response_tokens
    rows = (
        full_batch_groups(config)
        * rows_of_a_group(l, r.group_size, l.slot_tokens and r.max_prompt_tokens)
        * l.passes_per_batch
    )
    mini_batches = math.ceil(full_batch_groups(config) / l.mini_batch_groups) * l.passes_per_batch
    micro_batches = max(mini_batches, math.ceil(rows / l.micro_batch_rows))
    embedding, head, layer = matrix_sizes(model)
    # A product takes two operations per weight and token; the backward pass has two products per forward one.
    dense = 2 * (layer - numbers_idle(model)) * model.num_layers * l.row_tokens
    # Causal attention computes half of all pairs.
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * a_sequence * l.row_tokens
    operations = rows * ((dense + attention) * (3 + _AGAIN[l.remat]) + 4 * 2 * head * l.row_tokens)
    compute = operations / (cards * SHARE * card.teraflops * 1e12)
    launches = micro_batches * model.num_layers * LAYER_KERNELS * KERNEL_S
    weights, link = (
        embedding + head * (not model.tie_embeddings) + layer * model.num_layers,
        card.link_gb_per_s * GB,
    )
    within = link if m.fsdp * m.tensor <= cards_of_a_host else BETWEEN_HOSTS * GB
    # Weights are gathered twice in the compute dtype, or once in float32; the gradient is float32.
    crossed = (
        mini_batches * (4 + 4) if m.gather_once else micro_batches * (2 * hf.DTYPES[model.dtype].itemsize + 4)
    )
    gathered = crossed * weights / m.tensor * (m.fsdp - 1) / m.fsdp / within
    between = link if cards <= cards_of_a_host else BETWEEN_HOSTS * GB
    # A ring all-reduce sends each number twice, except a device's own part.
    summed = mini_batches * 2 * (m.data - 1) / m.data * 4 * weights / (m.fsdp * m.tensor) / between
    read = micro_batches * weights * (3 * 2 + 12 / m.fsdp) / (m.tensor * card.gb_per_s * GB)
    # Per layer, two ring all-reduces of the residual stream forward, two backward, and the recomputed ones.
    residual = rows * l.row_tokens * model.hidden_size * hf.DTYPES[model.dtype].itemsize / (m.data * m.fsdp)
    of_heads = residual * model.num_layers * (4 + 2 * _AGAIN[l.remat]) * 2 * (m.tensor - 1) / m.tensor / link
    return max(compute, gathered, launches) + read + summed + of_heads


def tokens_of_a_step(config: ConfigDict) -> int:
    """Prompt and response tokens of a step in which all of them have full length."""
    r = config.rollout
    return full_batch_groups(config) * r.group_size * (r.max_prompt_tokens + r.max_response_tokens)


def own_setting(config: ConfigDict, model: ModelConfig, target: Target, size: int) -> Setting:
    """The setting of the config itself on the target, where it takes `size` bytes per device."""
    mesh, l = target.mesh, config.learner
    sizes = (mesh.shape[axis] for axis in ('data', 'fsdp', 'tensor'))
    own = Setting(*sizes, l.micro_batch_rows, l.remat, size, 0.0)
    seconds = step_seconds(own.applied(config), model, target.card, mesh.size // target.hosts)
    return own._replace(seconds=seconds)


def as_table(
    found: Sequence[Setting], config: ConfigDict, best: Setting | None = None, own: Setting | None = None
) -> Iterator[str]:
    """Yields the fastest settings as lines.

    `best`, marked with *, is compiled if it is given, and so is `own`, the setting of the config, marked with
    =. Other sizes are estimated.
    """

    def row(mark: str, s: Setting, size: str) -> str:
        sizes, rate = f'{s.data} × {s.fsdp} × {s.tensor}', tokens_of_a_step(config) / s.seconds
        return f'{mark} {sizes:<26} {s.rows:<17} {s.remat:<25} {size:>7} {s.seconds:9.3g} {rate:9,.0f}'

    yield (
        f'  {"mesh.data × fsdp × tensor":<26} {"micro_batch_rows":<17} {"remat":<25} {"GB":>7} {"s/step":>9} '
        f'{"tokens/s":>9}'
    )
    if own:
        yield row('=', own, f'{"" if best else "~"}{own.bytes / GB:.1f}')
    for s in found[:_SHOWN]:
        is_best = best is not None and s[:5] == best[:5]
        yield row('*', s, f'{best.bytes / GB:.1f}') if is_best else row(' ', s, f'~{s.bytes / GB:.1f}')


def what_helps(
    config: ConfigDict, cards: int, memory: Callable[[ConfigDict], float], device_bytes: int, most: int
) -> Iterator[str]:
    """Yields what helps if nothing fits: a larger share of the GPU for JAX, else fields that reduce memory.

    Each line adds to those before it and says what `memory` then estimates. A line names every field that it
    changes, and a field that frees nothing stays unchanged, so the fields of all lines together give a config
    that runs. JAX has `device_bytes` of a device, and can have up to `most`.
    """
    steps: list[dict[str, Any]] = [
        {'mesh.gather_once': False},
        {'model.dtype': 'bfloat16'},
        {'learner.remat': 'full'},
        {'learner.micro_batch_rows': cards},
        # No other mesh splits rows more.
        {'mesh.data': 1, 'mesh.fsdp': cards, 'mesh.tensor': 1, 'learner.micro_batch_rows': cards},
        # Split heads over the cards of a host, so that no layer is gathered.
        *(
            [{'mesh.data': 1, 'mesh.fsdp': 1, 'mesh.tensor': cards, 'learner.micro_batch_rows': 1}]
            if cards <= _WAYS[-1]
            else []
        ),
        {'learner.adam.first_moment_dtype': 'bfloat16'},
        *([{'mesh.frozen_on_host': True}] if config.rollout.engine == 'vllm' else []),
    ]
    c, now = config, memory(config)
    if device_bytes < now <= most:
        yield _by_a_larger_share(now, device_bytes, most)
        return
    for fields in steps:
        before, trial = flatten_dict(c.to_dict(), sep='.'), ConfigDict(c.to_dict())
        trial.update_from_flattened_dict(fields)
        needs = memory(trial)
        if needs < now:
            c, now = trial, needs
            changed = ' '.join(
                f'{field}={value}' for field, value in fields.items() if value != before[field]
            )
            yield f'  {_estimated(now)} GB with {changed}{"  fits" if now <= device_bytes else ""}'
            if now <= device_bytes:
                return
            if now <= most:
                yield _by_a_larger_share(now, device_bytes, most)
                return
    short = ConfigDict(c.to_dict())
    short.learner.row_tokens //= 8
    rows = '; or lower rollout.max_response_tokens for shorter rows' if memory(short) <= most else ''
    yield f'  at least {2 ** math.ceil(math.log2(cards * now / most))} of these cards, or larger ones{rows}'


def _by_a_larger_share(needs: float, device_bytes: int, most: int) -> str:
    share = round(most / device_bytes * pool_share(), 2)
    return f'  {_estimated(needs)} GB fit with {POOL}={share:g}, which gives JAX {most / GB:.1f} GB'


def _estimated(size: float) -> str:
    return f'{f"~{size / GB:.1f}":>8}'
