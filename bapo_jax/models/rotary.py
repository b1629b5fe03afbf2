"""Rotary position embedding: the frequency of each pair of a head's numbers, by transformers' rope types.

default   θ^(-2i/H)                                    RoFormer, arXiv 2104.09864
linear    all slower by the factor                     arXiv 2306.15595
llama3    slower for pairs with few turns within the pretraining positions, with a blend in between
yarn      like llama3, with another blend; cosine and sine are scaled   arXiv 2309.00071, section 3
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.models.layers import Rope


class Rotation(NamedTuple):
    """The `rope_parameters` of a config.json, with the same names. `scale` is YaRN's attention factor."""

    rope_theta: float
    rope_type: str = 'default'
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    scale: float = 1.0
    partial_rotary_factor: float = 1.0  # the share of a head's numbers that are turned, the first ones

    @property
    def positions(self) -> int:
        """The number of positions that a model stretched by YaRN is made for; 0 for other kinds."""
        return int(self.factor * self.original_max_position_embeddings) if self.rope_type == 'yarn' else 0


# The fields of each kind besides rope_theta: required, then optional.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    'default': ((), ()),
    'linear': (('factor',), ()),
    'llama3': (('factor', 'original_max_position_embeddings', 'low_freq_factor', 'high_freq_factor'), ()),
    'yarn': (
        ('factor', 'original_max_position_embeddings'),
        ('beta_fast', 'beta_slow', 'truncate', 'attention_factor', 'mscale', 'mscale_all_dim'),
    ),
}
# Fields that do not state a frequency.
_MARKS = ('rope_type', 'type', 'rope_theta', 'mrope_section', 'partial_rotary_factor')


def read_rotation(stated: Mapping[str, Any]) -> Rotation:
    """Returns the rotation of transformers' `rope_parameters`.

    Raises ValueError, naming the field, if it is of no kind above.
    """
    kind = stated.get('rope_type')
    if kind not in _FIELDS or stated.get('rope_theta') is None:
        kinds = ', '.join(_FIELDS)
        raise ValueError(
            f'rope_parameters={str(dict(stated))[:150]} is not supported; supported: a rope_theta, a '
            f'rope_type of {kinds}'
        )
    must, may = _FIELDS[kind]
    if kind == 'default':  # readers ignore all other fields
        share = stated.get('partial_rotary_factor')
        return Rotation(
            float(stated['rope_theta']), partial_rotary_factor=1.0 if share is None else float(share)
        )
    given = {name: value for name, value in stated.items() if value is not None and name not in _MARKS}
    if kind == 'linear':
        given.pop('original_max_position_embeddings', None)  # may accompany a factor that does not need it
    if missing := [name for name in must if name not in given]:
        raise ValueError(f'rope_parameters: rope_type {kind!r} needs {missing[0]}; add it')
    if more := [name for name in given if name not in must + may]:
        known = ', '.join(must + may)
        raise ValueError(
            f'rope_parameters: {more[0]}={str(given[more[0]])[:100]} is not supported with rope_type '
            f'{kind!r}; supported: {known}'
        )
    for name, value in given.items():
        fits, what = type(value) in (int, float) and 0 < value < 1e30, 'a positive number'
        if name == 'truncate':
            fits, what = type(value) is bool, 'true or false'
        if not fits:
            raise ValueError(f'rope_parameters: {name}={str(value)[:100]} must be {what}')
    scale = _attention_factor(given) if kind == 'yarn' else 1.0
    read = {name: value for name, value in given.items() if name in Rotation._fields}
    rotation = Rotation(float(stated['rope_theta']), kind, **read, scale=scale)
    if kind == 'llama3' and rotation.low_freq_factor >= rotation.high_freq_factor:
        raise ValueError('rope_parameters: low_freq_factor must be below high_freq_factor')
    return rotation


def _attention_factor(given: Mapping[str, Any]) -> float:
    """Returns YaRN's attention factor: √(1/t) of its section 3.4, or what config.json states instead."""

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(given['factor']) + 1.0 if given['factor'] > 1 else 1.0

    if 'attention_factor' in given:
        return float(given['attention_factor'])
    if 'mscale' in given and 'mscale_all_dim' in given:
        return of(given['mscale']) / of(given['mscale_all_dim'])
    return of(1.0)


def frequencies(rotation: Rotation, head_dim: int) -> jax.Array:
    """Returns the radians per position, float32 [H / 2], or of the share of H that is turned."""
    half, r = int(head_dim * rotation.partial_rotary_factor) // 2, rotation
    frequency_h = r.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if r.rope_type == 'default':
        return frequency_h
    if r.rope_type == 'linear':
        return frequency_h / r.factor
    if r.rope_type == 'llama3':
        turns_h = r.original_max_position_embeddings * frequency_h / (2 * math.pi)
        kept_h = jnp.clip((turns_h - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor), 0, 1)
    else:
        kept_h = 1 - _ramp(r, head_dim)
    return frequency_h * (kept_h + (1 - kept_h) / r.factor)


def _ramp(r: Rotation, head_dim: int) -> np.ndarray:
    """Returns YaRN's ramp, float32 [H / 2].

    It is 0 for pairs that turn more than β_fast times within the original positions, and 1 for less than
    β_slow times.
    """

    def pair_of(turns: float) -> float:
        return (
            head_dim
            * math.log(r.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(r.rope_theta))
        )

    low, high = pair_of(r.beta_fast), pair_of(r.beta_slow)
    if r.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 * (low == high)
    return np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)


def rope_tables(positions: jax.Array, config: Any) -> Rope:
    """Returns the rotary tables of tokens at `positions`.

    `positions` are [B, T] or, for a model with `mrope_section`, [3, B, T]; for text, all three are equal.
    """
    frequency_h, scale = frequencies(config.rotation, config.head_dim), config.rotation.scale
    if positions.ndim == 2:
        position_Bx1xTxh = positions[:, None, :, None]
    else:
        which_h = np.repeat(np.arange(len(config.mrope_section)) % 3, config.mrope_section)
        position_Bx1xTxh = jnp.moveaxis(positions[which_h], 0, -1)[:, None]
    angle_Bx1xTxh = position_Bx1xTxh.astype(jnp.float32) * frequency_h[None, None, None, :]
    rope = Rope(jnp.cos(angle_Bx1xTxh), jnp.sin(angle_Bx1xTxh))
    return rope if scale == 1 else Rope(scale * rope.cos, scale * rope.sin)
