"""Typed sums for the metrics of an update. Each kind has one way to be accumulated and read.

Shapes:  O origins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.cluster.mesh import ROWS

TOKENS = 'tokens'  # key of `by_origin`: the number of trained tokens of each origin


class Sums(NamedTuple):
    """Sums over a mini-batch, by metric name."""

    weighted: dict[str, Any] = {}  # Σ weight · x, which is a mini-batch's value
    over_tokens: dict[str, Any] = {}  # Σ x over trained tokens; a mini-batch's value is the mean
    by_origin: dict[str, Any] = {}  # [O], Σ x over an origin's trained tokens
    counts: dict[str, Any] = {}  # whole numbers, which are not of tokens of an origin
    largest: dict[str, Any] = {}  # [O], the largest x ≥ 0 of an origin's trained tokens


class Updated(NamedTuple):
    """The diagnostics of an optimizer step."""

    sums: Sums
    grad_norm: Any
    skipped: Any  # 1 if the gradient or a weighted sum was not finite, so nothing was updated; else 0


def joined_sums(a: Sums, b: Sums) -> Sums:
    """Adds the sums of two micro-batches."""
    return Sums(*jax.tree.map(jnp.add, a[:-1], b[:-1]), jax.tree.map(jnp.maximum, a.largest, b.largest))


def over_mesh(sums: Sums) -> Sums:
    """Adds the sums of all devices' tokens, inside `per_device`."""
    return Sums(*jax.lax.psum(sums[:-1], ROWS), jax.lax.pmax(sums.largest, ROWS))


def means(updates: Sequence[Updated], trainee: str) -> dict[str, float]:
    """Returns means over a batch's mini-batches, and the number of skipped ones; {} without a mini-batch.

    The means exclude skipped mini-batches, and those over tokens also mini-batches that only have tokens of
    traces. `trainee`, 'actor' or 'critic', prefixes some names.
    """
    if not updates:
        return {}
    kept = not_skipped(updates)
    values = [_values(update, trainee) for update in kept]
    averages = {
        name: float(np.mean([of_one[name] for of_one in values if name in of_one], dtype=np.float64))
        for name in dict.fromkeys(name for of_one in values for name in of_one)
    }
    return {**averages, f'{trainee}/skipped_updates': len(updates) - len(kept)}


def not_skipped(updates: Sequence[Updated]) -> list[Updated]:
    return [update for update in updates if not update.skipped]


def _values(update: Updated, trainee: str) -> dict[str, Any]:
    sums = update.sums
    tokens = float(sums.by_origin[TOKENS].sum()) if sums.over_tokens else 0.0
    token_means = {name: x / tokens for name, x in sums.over_tokens.items()} if tokens else {}
    return {**sums.weighted, **token_means, f'{trainee}/grad_norm': update.grad_norm}
