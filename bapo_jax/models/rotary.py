"""Rotary position embedding: how fast each pair of numbers of a head turns, by the kinds that transformers names.

    default   θ^(-2i/H)                                    RoFormer, arXiv 2104.09864
    linear    all slower by the factor                     arXiv 2306.15595
    llama3    those slower that turn seldom within the positions of the pretraining, and between them a blend
    yarn      as llama3, by another blend; cosine and sine are scaled   arXiv 2309.00071, section 3
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Rotation(NamedTuple):
    """What `rope_parameters` of a config.json states, by the names there. `scale` is yarn's attention factor."""

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

    @property
    def positions(self) -> int:
        """How many positions a model is made for that was stretched by YaRN; 0 of other kinds."""
        return int(self.factor * self.original_max_position_embeddings) if self.rope_type == 'yarn' else 0


# What each kind reads beside rope_theta: what it must state, and what it may.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    'default': ((), ()),
    'linear': (('factor',), ()),
    'llama3': (('factor', 'original_max_position_embeddings', 'low_freq_factor', 'high_freq_factor'), ()),
    'yarn': (('factor', 'original_max_position_embeddings'),
             ('beta_fast', 'beta_slow', 'truncate', 'attention_factor', 'mscale', 'mscale_all_dim')),
}  # fmt: skip
_MARKS = ('rope_type', 'type', 'rope_theta', 'mrope_section', 'partial_rotary_factor')  # what says nothing of a speed


def read_rotation(stated: Mapping[str, Any]) -> Rotation:
    """The rotation of transformers' `rope_parameters`. Raises ValueError, naming the field, where it is of no kind above."""
    kind = stated.get('rope_type')
    if kind not in _FIELDS or stated.get('rope_theta') is None:
        kinds = ', '.join(_FIELDS)
        raise ValueError(f'rope_parameters={str(dict(stated))[:150]} is not supported; supported: a rope_theta, a rope_type of {kinds}')
    must, may = _FIELDS[kind]
    if kind == 'default':  # readers pass over what stands beside it
        return Rotation(float(stated['rope_theta']))
    given = {name: value for name, value in stated.items() if value is not None and name not in _MARKS}
    if kind == 'linear':
        given.pop('original_max_position_embeddings', None)  # stands beside a factor that does not need it
    if missing := [name for name in must if name not in given]:
        raise ValueError(f'rope_parameters: rope_type {kind!r} needs {missing[0]}')
    if more := [name for name in given if name not in must + may]:
        raise ValueError(f'rope_parameters: {more[0]}={str(given[more[0]])[:100]} is not supported with rope_type {kind!r}')
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
    """Of YaRN: √(1/t) of its section 3.4, or what a config.json states in its place."""

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(given['factor']) + 1.0 if given['factor'] > 1 else 1.0

    if 'attention_factor' in given:
        return float(given['attention_factor'])
    if 'mscale' in given and 'mscale_all_dim' in given:
        return of(given['mscale']) / of(given['mscale_all_dim'])
    return of(1.0)


def frequencies(rotation: Rotation, head_dim: int) -> jax.Array:
    """Radians a position, float32 [H / 2]."""
    half, r = head_dim // 2, rotation
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
    """Of YaRN: 0 for pairs that turn more than β_fast times within the original positions, 1 for less than β_slow times, float32 [H / 2]."""

    def pair_of(turns: float) -> float:
        return head_dim * math.log(r.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(r.rope_theta))

    low, high = pair_of(r.beta_fast), pair_of(r.beta_slow)
    if r.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 * (low == high)
    return np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)
