"""DOTS (arXiv 2506.05316): selects prompts by success rates predicted from those of a few reference prompts.

Every `cycle` = μ steps, the rollout policy answers K random prompts, the references, with accuracies y. The
success rate of prompt q is predicted from the embeddings e, float32 [d]:

    b_q = Σ_i softmax_i(e_q · e_i / √d) y_i                      attention over the references i
    p̂_q = slope · b_q + intercept                                an affine fit of y to the references' own b

The prompts of the next μ steps are drawn from all prompts without replacement, with probability ∝
exp(-|p̂ - 1/2| / τ). Embeddings are centred over the training prompts and scaled to the norm √d.

The authors train projections of the embeddings and a temperature of b beforehand, on success rates of several
policies. Here nothing is trained. A reference's own b comes from the other references, since its own y would
dominate it, and a negative slope counts as 0: then the embeddings say nothing about success.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence

import numpy as np

from bapo_jax.groups import Group, Prompt
from bapo_jax.prompts.protocol import PromptSelector
from bapo_jax.prompts.weighted import without_replacement

TARGET = 0.5  # the success rate that prompts are chosen for
# The last parts of two draws' seeds, as in mopps.py: no other generator of a run ends in them.
_REFERENCES, _CHOICE = (1 << 16) + 3, (1 << 16) + 4

Embed = Callable[[Sequence[Prompt]], np.ndarray]  # prompts -> float32 [prompts, d]


class Dots(PromptSelector):
    """Selects the prompts whose predicted success rate is near 1/2.

    Random numbers are keyed by (seed, number of the draw). The prompts are embedded before the first draw.
    """

    learns = True

    def __init__(
        self, prompts: Sequence[Prompt], batch: int, seed: int, *, embed: Embed, references: int, cycle: int,
        tau: float,
    ):  # fmt: skip
        """A step has `batch` prompts; `references` is K, or all prompts if there are fewer.

        Raises ValueError if there are fewer prompts than a cycle takes.
        """
        if len(prompts) < cycle * batch:
            raise ValueError(
                f'{len(prompts)} training prompts are fewer than those of prompts.dots.cycle={cycle} steps '
                f'with {batch} prompts each; lower prompts.dots.cycle or learner.batch_groups, or raise '
                'task.limit'
            )
        self._prompts, self._batch, self._seed, self._embed = prompts, batch, seed, embed
        self._references, self._cycle, self._tau = min(references, len(prompts)), cycle, tau
        self._place = {p.id: i for i, p in enumerate(prompts)}
        self._draws = 0
        self._awaits = False  # whether the next groups to observe are those of the references
        self._chosen: list[tuple[int, float]] = []  # (place, p̂) of the cycle's prompts, in order
        self._measured: dict[str, float] = {}

    @functools.cached_property
    def _embedded(self) -> np.ndarray:
        """Float32 [prompts, d]."""
        return normalised(self._embed(self._prompts))

    def references(self) -> list[Prompt]:
        """The references in the first step of a cycle; none in the others."""
        self._awaits = self._draws % self._cycle == 0
        if not self._awaits:
            return []
        rng = np.random.default_rng([self._seed, self._draws, _REFERENCES])
        return [self._prompts[i] for i in rng.choice(len(self._prompts), self._references, replace=False)]

    def next(self) -> list[Prompt]:
        """The step's part of the prompts that were drawn for the cycle."""
        first = self._draws % self._cycle * self._batch
        self._draws += 1
        of_step = self._chosen[first : first + self._batch]
        self._measured['prompts/predicted'] = float(np.mean([p for _, p in of_step]))
        return [self._prompts[place] for place, _ in of_step]

    def observe(self, groups: Sequence[Group]) -> None:
        """Draws the cycle's prompts if the groups are those of the references; else measures the predictions.

        Ignores groups with an infrastructure error.
        """
        judged = [(self._place[g.prompt.id], g.accuracy) for g in groups if not g.infra_error]
        if self._awaits:
            self._awaits = False
            self._draw(*map(np.array, zip(*judged)) if judged else (np.zeros(0, int), np.zeros(0)))
            return
        predicted = dict(self._chosen)
        if judged:
            error = np.mean([abs(predicted[place] - y) for place, y in judged])
            self._measured['prompts/prediction_error'] = float(error)

    def metrics(self) -> dict[str, float]:
        """Metrics of the last step.

        prompts/references          prompts of the cycle that were asked for their success alone
        prompts/predicted           mean p̂ of the chosen prompts
        prompts/prediction_error    mean |p̂ - accuracy| of them
        """
        return {'prompts/references': self._references, **self._measured}

    def state(self) -> str:
        """Everything `restore` needs, as JSON: the cycle's prompts, the draw's number, the last metrics."""
        return json.dumps({
            'chosen': self._chosen, 'draws': self._draws, 'awaits': self._awaits, 'measured': self._measured,
        })  # fmt: skip

    def restore(self, state: str) -> None:
        """Restores exactly what `state` saved."""
        saved = json.loads(state)
        self._chosen = [(place, p) for place, p in saved['chosen']]
        self._draws, self._awaits, self._measured = saved['draws'], saved['awaits'], saved['measured']

    def _draw(self, references: np.ndarray, accuracy: np.ndarray) -> None:
        """Draws the prompts of the cycle, by the places and accuracies of the references."""
        p = predicted_success(self._embedded, references, accuracy)
        rng = np.random.default_rng([self._seed, self._draws, _CHOICE])
        log_weight = -np.abs(p - TARGET) / self._tau
        drawn = rng.permutation(without_replacement(rng, log_weight, self._cycle * self._batch))
        self._chosen = [(int(i), float(p[i])) for i in drawn]


def predicted_success(embedded_NxD: np.ndarray, references: np.ndarray, accuracy: np.ndarray) -> np.ndarray:
    """Predicts the success rates of N prompts from the accuracies, float [K], of K of them; float64 [N].

    `embedded_NxD` has rows of norm √d; `references` are the places of the K. Without any, all are 1/2.
    """
    if not len(references):
        return np.full(len(embedded_NxD), TARGET)
    scores = (embedded_NxD @ embedded_NxD[references].T).astype(np.float64) / embedded_NxD.shape[1] ** 0.5
    slope, intercept = 0.0, float(accuracy.mean())
    if len(references) > 1:
        others = scores[references]
        np.fill_diagonal(others, -np.inf)
        own = _attended(others, accuracy)
        if own.var() > 0:
            slope = max(0.0, float(np.mean((own - own.mean()) * (accuracy - accuracy.mean())) / own.var()))
            intercept = float(accuracy.mean() - slope * own.mean())
    return slope * _attended(scores, accuracy) + intercept


def _attended(scores_NxK: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The means of `values`, float [K], with weights softmax(scores); float64 [N]."""
    weight = np.exp(scores_NxK - scores_NxK.max(axis=1, keepdims=True))
    return weight @ values / weight.sum(axis=1)


def normalised(embedded_NxD: np.ndarray) -> np.ndarray:
    """The embeddings less their mean, scaled to the norm √d; float32 [N, D]. The mean itself becomes 0."""
    centred = embedded_NxD - embedded_NxD.mean(axis=0, dtype=np.float64).astype(np.float32)
    norm = np.linalg.norm(centred, axis=1, keepdims=True)
    return centred * (centred.shape[1] ** 0.5 / np.where(norm > 0, norm, 1.0)).astype(np.float32)
