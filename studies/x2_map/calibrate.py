"""The simulation's policies that are most likely, given what real ones answered before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import comb, expit

from bapo_jax.replay.failures import LAGS
from studies.lib.rows import Row, rows_in
from studies.real_policy import map as the_map
from studies.real_policy import rows as real_policy
from studies.second_proof import analysis
from studies.second_proof.arms import GUARD, PROBLEMS, PROMPTS, RESPONSES
from studies.second_proof.guard import AS_IS, CD34, FINAL, base_of
from studies.second_proof.rows import of_part, of_today, read_rows
from studies.x2_map.simulate import FAILED, GROUP, WEIGHT, Policy, again, fifo, mixed, right

WEAK, QUICKSTART, QWEN = '0.8M, CD-4', '0.8M, CD-34', '0.5B, arithmetic'
REAL = {'135M, arithmetic': ('arithmetic', 60), '135M, CD-23': ('countdown', 60)}  # task, steps
PROBED = 5  # log.failed_again.every of those runs


class Answers(NamedTuple):
    """How many problems had i right answers at first and j later: counts[i, j]; one column: asked once."""

    counts: np.ndarray
    steps: int  # of training between the two


class Fit(NamedTuple):
    first: Policy
    steps: int
    loss: float  # -log likelihood

    @property
    def last(self) -> Policy:
        return self.first.after(self.steps)


class Check(NamedTuple):
    """Prompts that failed entirely so many steps before, and fresh ones: as seen, and as fitted."""

    lag: float
    seen: tuple[int, int, int, int]  # asked again, of them mixed; fresh, of them mixed
    failed: float  # P(mixed)
    fresh: float

    @property
    def seen_shares(self) -> tuple[float, float]:
        """P(mixed) of failed prompts and of fresh ones, as seen."""
        asked, again, others, fresh = self.seen
        return again / asked, fresh / others


def chances(policy: Policy, samples: int) -> np.ndarray:
    """P(so many of `samples` answers are right), if the problem is not hopeless, [samples + 1, EASE]."""
    p, k = right(policy), np.arange(samples + 1)[:, None]
    return comb(samples, k) * p**k * (1 - p) ** (samples - k)


def fit(answers: Answers, same_spread: bool = False) -> Fit:
    """The most likely policy; with `same_spread`, among those that do not sharpen."""
    first, later = (n - 1 for n in answers.counts.shape)
    steps = max(1, answers.steps)

    def policy_of(x: np.ndarray) -> Policy:
        """Unknowns that x lacks are 0: a ratio of spreads, then a growth."""
        log_spread, logit, ability, growth, log_ratio = np.pad(x, (0, 5 - len(x)))
        spread = np.exp(log_spread)
        widens = spread * (np.exp(log_ratio) - 1)
        return Policy(ability, spread, expit(logit), growth / steps, widens / steps)

    def loss(x: np.ndarray) -> float:
        policy = policy_of(x)
        not_hopeless = chances(policy, first) * WEIGHT @ chances(policy.after(steps), later).T
        expected = (1 - policy.hopeless) * not_hopeless
        expected[0, 0] += policy.hopeless
        return -float((answers.counts * np.log(np.maximum(expected, 1e-15))).sum())

    unknown = 3 if answers.steps == 0 else 4 if same_spread else 5
    starts = [np.array([log_spread, -0.5, -1.0, 1.0, 0.0])[:unknown] for log_spread in (0.0, 1.0)]
    tried = [minimize(loss, x, method='BFGS') for x in starts]
    best = min(tried, key=lambda found: found.fun)
    return Fit(policy_of(best.x), answers.steps, float(best.fun))


def pairs(runs: Sequence[tuple[Sequence[int], Sequence[int]]], samples: int) -> np.ndarray:
    """The table of these runs; each has its problems' right answers at first and later."""
    counts = np.zeros((samples + 1, samples + 1), int)
    for first, later in runs:
        np.add.at(counts, (first, later), 1)
    return counts


def moves_of(rows: Sequence[Row], arm: str, retried: int, asked: int) -> np.ndarray:
    """Groups of prompts that had been asked for so many responses: [right before, right now]."""
    counts = np.zeros((asked + 1, GROUP + 1), int)
    for row in analysis.of_arm(rows, arm):
        for known, before, again_, now, often in row.get('moves', ()):
            if (known, again_) == (asked, retried):
                counts[before, now] += often
    return counts


def of_real() -> dict[str, list[Row]]:
    """The runs of SmolLM2-135M-Instruct, by what they learned."""
    rows = [row for row in real_policy.read_rows() if row['arm'] != 'shuffled']
    return {name: [r for r in rows if (r['task'], r['steps']) == of] for name, of in REAL.items()}


def answers() -> dict[str, Answers]:
    """By policy and task. Arm R of the second study has the prompts' first two groups, an epoch apart."""
    rows = of_today(read_rows())
    base = base_of(rows, FINAL)
    guard = [(base['correct'][CD34], row['correct'][CD34]) for row in of_part(rows, FINAL, AS_IS)]
    found = {
        WEAK: Answers(moves_of(rows, 'R', 0, GROUP), PROBLEMS['train'][1] // PROMPTS),
        QUICKSTART: Answers(pairs(guard, base['samples']), GUARD[AS_IS].steps),
    }
    for name, runs in of_real().items():
        counts = pairs([(row['base'], row['trained']) for row in runs], runs[0]['samples'])
        found[name] = Answers(counts, runs[0]['steps'])
    [qwen] = [row['sets']['arithmetic'] for row in rows_in(the_map.ROWS) if 'Qwen' in row['model']]
    return found | {QWEN: Answers(np.bincount(qwen['correct'], minlength=the_map.SAMPLES + 1)[:, None], 0)}


def checks(fits: dict[str, Fit]) -> dict[str, list[Check]]:
    """What training saw of failed prompts that were asked again. No fit has read it."""
    rows, weak = of_today(read_rows()), fits[WEAK].first
    fresh, retried = moves_of(rows, 'RX', 0, 0)[0], moves_of(rows, 'RX', 1, GROUP)[0]
    seen = [int(n) for counts in (retried, fresh) for n in (counts.sum(), counts[1:GROUP].sum())]
    lag = fifo(weak).lag
    found = {WEAK: [Check(lag, tuple(seen), again(weak, lag, FAILED), mixed(weak))]}
    for name, runs in of_real().items():
        found[name] = []
        for lag in LAGS:
            seen = np.sum([row['asked_again'][str(lag)] for row in runs], axis=0).tolist()
            due = range(PROBED * (lag // PROBED + 1), fits[name].steps + 1, PROBED)
            then = [fits[name].first.after(step - 1) for step in due]
            if then:
                failed, other = np.mean([(again(p, lag, FAILED), mixed(p)) for p in then], axis=0)
                found[name].append(Check(lag, tuple(seen), float(failed), float(other)))
    return found


def measured_gain() -> float:
    """What X2 brought in arm RX: mixed groups a response, less those without, in percent."""
    runs = analysis.of_arm(of_today(read_rows()), 'RX')
    entered = sum(row['x2'] for row in runs) / sum(row['x1'] for row in runs)
    asked = sum(RESPONSES * row['reevaluated'] for row in runs) / sum(row['responses'] for row in runs)
    return 100 * ((1 - asked) * (1 + entered) - 1)
