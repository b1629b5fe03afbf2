"""A method of the user's without a fork: functions that fields name as 'module:function'.

    field                 the function                    what it returns
    learner.advantage     f(rewards)                      an advantage for each reward
    learner.surrogate     f(ratio, advantage)             the objective of each token, which is maximised
    replay.fresh_filter   f(rewards, accuracy)            True to keep the group, False, or a probability
    replay.kind           f(config, reevaluation_due)     a `Replay` (replay/protocol.py)

Advantage: the rewards of one normalisation group, usually a group, as float64 [n] of NumPy. They are not all
equal: equal rewards have advantage 0. The array is read-only.

Surrogate: written with jax.numpy. The importance ratio π_θ / anchor and the advantage of each token, float32
[rows, tokens]; neither rows nor tokens may be mixed. The function clips by itself: learner.clip_low,
learner.clip_high, learner.clip_centre and learner.dual_clip have no effect.

Filter: a group's rewards, float32 [G] of NumPy and read-only, and its accuracy k/G.

Replay: the resolved config, and `reevaluation_due(step)`, the condition of line 12 of Algorithm 1. Fields of
`config.replay`, such as the filter and the buffer's, only matter if it reads them.

Each is tried on small examples before training, and anything wrong is one error with the field and the
remedy. Advantages and filters are checked at every call, too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bapo_jax.machine.ending import CONTINUES, Ending
from bapo_jax.own.module import find_own, place_of

ARGUMENTS = {  # field -> the arguments of its function
    'learner.advantage': ('rewards',),
    'learner.surrogate': ('ratio', 'advantage'),
    'replay.fresh_filter': ('rewards', 'accuracy'),
    'replay.kind': ('config', 'reevaluation_due'),
}
_REWARDS = ([0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.25, 1.0, 0.5] + 5 * [0.0])


class BadMethod(Ending, ValueError):
    """A user's function of a method failed, or returned something else than it must."""

    remedy = CONTINUES


def is_own(name: str) -> bool:
    """Whether a field of ARGUMENTS names a user's function."""
    return ':' in name


def load_own(field: str, name: str) -> Callable[..., Any]:
    """Returns the function that `field` names. Whatever it raises becomes BadMethod, with file and line.

    Raises ValueError if it is missing or takes other arguments.
    """
    function, setting = find_own(name, field, 'my_method:focal'), f'{field}={name!r}'
    try:
        inspect.signature(function).bind(*ARGUMENTS[field])
    except (TypeError, ValueError) as error:  # ValueError: it is compiled and has no signature
        raise ValueError(
            f'{setting} must take the arguments ({", ".join(ARGUMENTS[field])}); define it so ({error})'
        ) from error

    @functools.wraps(function)
    def guarded(*given: Any) -> Any:
        with blamed(field, name):
            return function(*given)

    return guarded


@contextlib.contextmanager
def blamed(field: str, name: str) -> Iterator[None]:
    """Inside, the user's code that `field` names is at work: what it raises becomes BadMethod."""
    try:
        yield
    except BadMethod:
        raise
    except Exception as error:  # a user's code can fail in any way
        place = place_of(error, name.partition(':')[0]) or name
        raise BadMethod(f'{field}={name!r} failed ({type(error).__name__}: {error}); fix {place}') from error


def advantage_of(name: str) -> str | Callable[[np.ndarray], np.ndarray]:
    """Returns a built-in name as it is, or the user's function of that name, tried and with checked results.

    Raises ValueError if the function is missing or takes other arguments, and BadMethod if it fails.
    """
    return _own_advantage(name) if is_own(name) else name


@functools.cache
def _own_advantage(name: str) -> Callable[[np.ndarray], np.ndarray]:
    function = load_own('learner.advantage', name)

    def advantage(rewards: np.ndarray) -> np.ndarray:
        result = np.asarray(function(_read_only(rewards)))
        if result.shape != rewards.shape or result.dtype.kind not in 'fiu' or not _all_finite(result):
            raise BadMethod(
                f'learner.advantage={name!r} returned {_short(result)} for the rewards '
                f'{_short(rewards)}; return one finite number for each reward'
            )
        return result

    for rewards in _REWARDS:
        advantage(np.array(rewards))
    return advantage


@functools.cache
def own_filter(name: str) -> Callable[[np.ndarray, float], float]:
    """Returns the user's filter, tried and with checked results: the probability of keeping a group.

    Raises ValueError if the function is missing or takes other arguments, and BadMethod if it fails.
    """
    function = load_own('replay.fresh_filter', name)

    def keep(rewards: np.ndarray, accuracy: float) -> float:
        result = function(_read_only(rewards), accuracy)
        if not isinstance(result, (bool, float, int, np.bool_, np.number)) or not 0 <= result <= 1:
            raise BadMethod(
                f'replay.fresh_filter={name!r} returned {_short(result)} for the rewards {_short(rewards)}; '
                'return True, False, or a probability in [0, 1]'
            )
        return float(result)

    for correct in range(5):
        keep(np.array([1.0] * correct + [0.0] * (4 - correct), np.float32), correct / 4)
    return keep


def _read_only(rewards: np.ndarray) -> np.ndarray:
    """A copy that the function cannot write: it may not change what others read."""
    given = rewards.copy()
    given.flags.writeable = False
    return given


def _all_finite(values: np.ndarray) -> bool:
    """Whether all values are finite as float32, in which they are trained on."""
    with np.errstate(over='ignore'):
        return bool(np.isfinite(values.astype(np.float32)).all())


def _short(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= 100 else f'{text[:100]}…'
