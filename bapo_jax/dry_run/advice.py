"""What a dry run advises for GPUs: settings that fit, with modelled times, or the fields that would help.

Memory is by the formula (memory.py). Times are modelled too, for a step on d cards in which all responses
have full length:

    seconds = max(F / (d · s · peak), G / link, K · KERNEL_S) + M / memory + A / link + H / link

F is the number of operations of all rows, recomputation included, and s = SHARE. G is the bytes of weights
gathered and gradients scattered over `fsdp`: per micro-batch, or per mini-batch with mesh.gather_once. K is
the number of kernels that a card launches. If the tokens of rows are split, G includes the heads that cards
exchange. M is the bytes of weights and gradients that the micro-batches read and write, with experts also
the copies in their tiles. A is the bytes of summing gradients over `data`, H those of summing the layers'
outputs over `tensor`. The bandwidth of a card to other hosts is BETWEEN_HOSTS. Weights beside an adapter
have no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from bapo_jax.cluster.devices import POOL, pool_share
from bapo_jax.cluster.grouped import tiles_for
from bapo_jax.cluster.long_rows import copies_of_key_heads
from bapo_jax.config.rules import full_batch_groups
from bapo_jax.dry_run.memory import matrix_sizes, numbers_adapted, numbers_idle
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
# The share of a layer's forward pass that each remat policy recomputes in the backward pass. What offload
# copies to the host and back is not counted, so no setting is advised that has it.
_AGAIN = {
    'none': 0.0,
    'matrix_products': 0.05,
    'attention_and_mlp_inputs': 0.75,
    'offload': 0.75,
    'full': 1.0,
}
_ADVISED = [remat for remat in _AGAIN if remat != 'offload']
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

    `tensor` is 1 if any such setting fits, else the smallest split within a host with which one fits. Between
    hosts, all splits are tried: with them, fewer weights cross.
    """
    found: list[Setting] = []
    ways = [
        n
        for n in _WAYS
        if (cards // hosts) % n == 0 and model.num_kv_heads % n == 0 and model.num_heads % n == 0
    ]
    for tensor in ways:
        rest = cards // tensor
        meshes = sorted({(rest // n, n) for n in (1, rest // hosts, rest)})
        whole = [(data, fsdp, rows * rest) for data, fsdp in meshes for rows in _ROWS]
        parts = [(data, fsdp, data) for data, fsdp in meshes if fsdp > 1]  # a row's tokens split over fsdp
        for tried in (whole, parts):
            for data, fsdp, rows in tried:
                for remat in _ADVISED:
                    trial = Setting(data, fsdp, tensor, rows, remat, 0, 0.0)
                    c = trial.applied(config)
                    needs = memory(c)
                    if needs <= device_bytes:
                        seconds = step_seconds(c, model, card, cards // hosts)
                        found.append(trial._replace(bytes=needs, seconds=seconds))
            if found:
                break
        if found and hosts == 1:
            break
    of_each = {}  # the fastest number of rows for each mesh and remat
    for setting in sorted(found, key=lambda s: (s.seconds, s.bytes)):
        of_each.setdefault((setting.data, setting.fsdp, setting.tensor, setting.remat), setting)
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
    weights = embedding + head * (not model.tie_embeddings) + layer * model.num_layers
    adapted = numbers_adapted(model)
    trained = adapted * model.num_layers if model.adapter else weights
    unfilled, copied = cost_of_tiles(config, model) if model.routing else (0.0, 0.0)
    layer_passed = layer - numbers_idle(model) + unfilled
    # A product takes two operations per weight and token. The backward pass has one for the gradient of the
    # input and, if the weights are trained, one for theirs. The head's forward pass is always recomputed.
    have_gradients = adapted if model.adapter else layer_passed
    dense = layer_passed * (2 + _AGAIN[l.remat]) + have_gradients
    dense *= 2 * model.num_layers * l.row_tokens
    # Causal attention computes half of all pairs.
    full = model.num_layers // model.period
    attention = 2 * full * model.num_heads * model.head_dim * a_sequence * l.row_tokens
    attention *= 3 + _AGAIN[l.remat]
    of_head = 2 * head * l.row_tokens * (3 + (model.adapter is None))
    operations = rows * (dense + attention + of_head)
    compute = operations / (cards * SHARE * card.teraflops * 1e12)
    launches = micro_batches * model.num_layers * LAYER_KERNELS * KERNEL_S
    link = card.link_gb_per_s * GB
    within = link if m.fsdp * m.tensor <= cards_of_a_host else BETWEEN_HOSTS * GB
    b = hf.DTYPES[model.dtype].itemsize
    # Weights are gathered twice in the compute dtype, or once: those that are trained in float32, others in
    # the compute dtype. The gradient is float32.
    crossed = 4 * trained + b * (weights - trained) if m.gather_once else 2 * b * weights
    crossed = (mini_batches if m.gather_once else micro_batches) * (crossed + 4 * trained)
    gathered = crossed / m.tensor * (m.fsdp - 1) / m.fsdp / within
    tokens = rows * l.row_tokens / (m.data * m.fsdp)  # of a card
    if l.micro_batch_rows < m.data * m.fsdp:
        copies = copies_of_key_heads(model.num_heads // m.tensor, model.num_kv_heads // m.tensor, m.fsdp)
        exchanged = 2 * (model.num_heads + copies * model.num_kv_heads) * model.head_dim / m.tensor
        exchanged *= tokens * model.num_layers * (2 + _AGAIN[l.remat]) * (m.fsdp - 1) / m.fsdp
        gathered += exchanged * b / within
    between = link if cards <= cards_of_a_host else BETWEEN_HOSTS * GB
    # A ring all-reduce sends each number twice, except a device's own part.
    summed = mini_batches * 2 * (m.data - 1) / m.data * 4 * trained / (m.fsdp * m.tensor) / between
    read = 3 * 2 * weights + 12 / m.fsdp * trained + copied
    read *= micro_batches / (m.tensor * card.gb_per_s * GB)
    # Per layer, two ring all-reduces of the residual stream forward, two backward, and the recomputed ones.
    residual = tokens * model.hidden_size * b
    of_heads = residual * model.num_layers * (4 + 2 * _AGAIN[l.remat]) * 2 * (m.tensor - 1) / m.tensor / link
    return max(compute, gathered, launches) + read + summed + of_heads


def cost_of_tiles(config: ConfigDict, model: ModelConfig) -> tuple[float, float]:
    """What the tiles of experts cost on GPUs (cluster/grouped.py), in a micro-batch on one card.

    Returns the numbers of a layer's matrices that tiles which are not full add for each token, and the bytes
    of matrices that all layers copy to tiles and of gradients that they sum over tiles.
    """
    l, m, r = config.learner, config.mesh, model.routing
    pairs = max(1, l.micro_batch_rows * l.row_tokens // (m.data * m.fsdp)) * r.chosen
    tiles, rows = tiles_for(pairs, r.experts)
    matrices = 3 * model.hidden_size * model.intermediate_size
    # Copies are read, written and read again; a tile's gradient is written and read, in float32.
    copies = 3 * hf.DTYPES[model.dtype].itemsize * (2 + _AGAIN[l.remat])
    sums = 0 if model.adapter else 2 * 4
    unfilled = matrices * r.chosen * (tiles * rows / pairs - 1)
    return unfilled, model.num_layers * tiles * matrices * (copies + sums)


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
    over_all = {'mesh.data': 1, 'mesh.fsdp': cards, 'mesh.tensor': 1, 'mesh.gather_once': False}
    steps: list[dict[str, Any]] = [
        {'mesh.gather_once': False},
        {'model.dtype': 'bfloat16'},
        {'learner.remat': 'full'},
        {'learner.micro_batch_rows': cards},
        # No other mesh splits rows more; then their tokens.
        over_all | {'learner.micro_batch_rows': cards},
        over_all | {'learner.micro_batch_rows': 1},
        # Split heads over the cards of a host, so that no layer is gathered.
        *(
            [{'mesh.data': 1, 'mesh.fsdp': 1, 'mesh.tensor': cards, 'learner.micro_batch_rows': 1}]
            if cards <= _WAYS[-1]
            else []
        ),
        {'learner.adam.first_moment_dtype': 'bfloat16'},
        *([{'mesh.frozen_on_host': True}] if config.rollout.engine == 'vllm' else []),
        {'learner.adam.on_host': True},
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
