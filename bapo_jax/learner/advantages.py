"""Group-relative advantages: rewards in, advantages out. Arrays only."""

from __future__ import annotations

import numpy as np

ADVANTAGES = ('group_std', 'paper_eq2')


def group_advantage(rewards_NxG: np.ndarray, kind: str) -> np.ndarray:
    """One advantage per response, shared by its tokens; a group without variance gets exactly 0.

    'group_std':  (r - mean) / (std + 1e-6) with the sample standard deviation (ddof 1), as verl and TRL compute it.
    'paper_eq2':  (r - mean) / sqrt(var + 1e-6) with the population variance, BAPO eq. 2.
    """
    rewards_NxG = np.asarray(rewards_NxG, np.float64)
    centred_NxG = rewards_NxG - rewards_NxG.mean(axis=1, keepdims=True)
    if kind == 'group_std':
        scale_Nx1 = rewards_NxG.std(axis=1, ddof=1, keepdims=True) + 1e-6
    elif kind == 'paper_eq2':
        scale_Nx1 = np.sqrt(rewards_NxG.var(axis=1, keepdims=True) + 1e-6)
    else:
        raise ValueError(f'learner.advantage={kind!r} is unknown; choose one of {ADVANTAGES}')
    # All rewards equal: the mean may differ from them by rounding, and 1e-17 / 1e-6 is not the 0 that was promised.
    varied_Nx1 = (rewards_NxG != rewards_NxG[:, :1]).any(axis=1, keepdims=True)
    return np.where(varied_Nx1, centred_NxG / scale_Nx1, 0.0).astype(np.float32)
