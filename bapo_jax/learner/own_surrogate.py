"""The surrogate that a config names: a built-in one, or the user's function (own/method.py), tried here."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.learner.losses import SURROGATES, Clip, Surrogate, Tokens
from bapo_jax.own.method import BadMethod, is_own, load_own

_RATIOS = (0.05, 0.5, 0.9, 1.0, 1.1, 2.0, 20.0)
_ADVANTAGES = (-2.0, -0.5, 0.0, 0.5, 2.0)


def surrogate_of(name: str) -> Surrogate:
    """Returns the surrogate of a name of SURROGATES, or of the user's 'module:function'.

    Raises ValueError if the function is missing or takes other arguments, and BadMethod if it fails or is no
    surrogate.
    """
    return _own_surrogate(name) if is_own(name) else SURROGATES[name]


@functools.cache  # one function a name: the step is compiled once
def _own_surrogate(name: str) -> Surrogate:
    function = load_own('learner.surrogate', name)

    def surrogate(tokens: Tokens, clip: Clip) -> tuple[jax.Array, jax.Array]:
        """`held` marks tokens whose objective does not change with the ratio: a clip stops the gradient."""
        ratio_RxT, advantage_RxT = tokens.ratio_RxT, tokens.advantage_RxT
        _, pull = jax.vjp(lambda ratio: function(ratio, advantage_RxT), jax.lax.stop_gradient(ratio_RxT))
        [slope_RxT] = pull(jnp.ones_like(ratio_RxT))
        return -function(ratio_RxT, advantage_RxT), (slope_RxT == 0) & (advantage_RxT != 0)

    try:
        wrong = _wrong(function)
    except BadMethod:
        raise
    except Exception as error:  # JAX finds what it cannot differentiate after the function has returned
        wrong = f'has no gradient ({error})'
    if wrong:
        raise BadMethod(
            f'learner.surrogate={name!r} {wrong}; return the objective of each token, an array of the shape '
            'of ratio, for example jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)'
        )
    return surrogate


def _wrong(function: Callable[..., jax.Array]) -> str:
    """Says what is wrong with the objective of a user's function on examples; '' if nothing is."""
    ratio, advantage = _examples()
    result = jax.eval_shape(function, ratio, advantage)
    if getattr(result, 'shape', None) != ratio.shape or result.dtype != jnp.float32:
        return f'returned {result} for float32 arrays of shape {ratio.shape}'
    objective = np.ravel(jax.jit(function)(ratio, advantage))
    of_one = ratio.reshape(-1, 1, 1), advantage.reshape(-1, 1, 1)  # each token alone in its row
    alone = np.ravel(jax.jit(jax.vmap(function))(*of_one))
    slope = np.reshape(jax.jit(jax.jacrev(function))(ratio, advantage), (ratio.size, ratio.size))
    [at_one] = np.diag(slope)[np.ravel((ratio == 1.0) & (advantage == 0.5))]
    if not (np.isfinite(objective).all() and np.isfinite(slope).all()):
        return 'or its gradient is not finite at ordinary ratios and advantages'
    if not np.allclose(alone, objective, rtol=1e-4, atol=1e-6) or (slope - np.diag(np.diag(slope))).any():
        return 'mixes tokens: the objective of a token, or its gradient, changes with the others'
    if not at_one > 0:
        return 'does not rise with the ratio where the advantage is positive: it is maximised'
    return ''


def _examples() -> tuple[np.ndarray, np.ndarray]:
    """All pairs of the ratios and advantages, float32 [rows, tokens].

    Their order is random: a mean over equal ratios or advantages would not show that tokens are mixed.
    """
    pairs = np.stack(np.meshgrid(_RATIOS, _ADVANTAGES), axis=-1).reshape(-1, 2).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(pairs))
    ratio, advantage = pairs[order].T.reshape(2, len(_ADVANTAGES), len(_RATIOS))
    return ratio, advantage
