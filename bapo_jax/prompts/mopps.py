"""MoPPS (arXiv 2507.04632): selects prompts by Thompson-sampled success rate, without extra rollouts.

Every prompt has a Beta(α, β) posterior of the rollout policy's success rate γ, with prior Beta(1, 1). A step
1. draws candidates from shuffled epochs, a multiple of the batch;
2. samples γ̂ ~ Beta(α, β) for each, and chooses the B candidates with the smallest (γ̂ - target)²;
3. updates the chosen prompts with k correct of G responses:
   α ← λα + (1-λ)·1 + k and β ← λβ + (1-λ)·1 + (G-k).
The decay λ < 1 forgets old evidence, since the policy moves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from bapo_jax.groups import Group, Prompt
from bapo_jax.prompts.epochs import ShuffledEpochs
from bapo_jax.prompts.protocol import PromptSelector

PRIOR = 1.0  # α and β of a prompt that has not been observed: γ is uniform
# The last part of a draw's seed. A step's generators end in an index into replay.PURPOSES, which is smaller.
_THOMPSON = 1 << 16


class Mopps(PromptSelector):
    """Selects the prompts nearest to the target success rate among a draw of candidates.

    Random numbers are keyed by (seed, number of the draw), so only the number is saved.
    """

    learns = True

    def __init__(
        self,
        prompts: Sequence[Prompt],
        batch: int,
        seed: int,
        *,
        candidates: int,
        target: float,
        decay: float,
    ):
        """`batch` is B; draws `candidates` · B prompts, or all if there are fewer; `decay` is λ in [0, 1].

        Raises ValueError if there are fewer prompts than B.
        """
        if len(prompts) < batch:
            raise ValueError(
                f'{len(prompts)} training prompts are fewer than learner.batch_groups={batch}; '
                f'prompts.mopps.candidates={candidates} adds none. Lower learner.batch_groups or raise '
                'task.limit'
            )
        self._stream = ShuffledEpochs(prompts, min(candidates * batch, len(prompts)), seed)
        self._batch, self._seed, self._target, self._decay = batch, seed, target, decay
        self._posterior: dict[int, tuple[float, float]] = {}  # (α, β) by prompt id, of the observed prompts
        self._draws = 0
        self._drawn: dict[str, float] = {}  # metrics of the last draw

    def next(self) -> list[Prompt]:
        """The B chosen prompts, nearest first; ties go to the earlier candidate."""
        candidates = self._stream.next()
        alpha, beta = np.array([self._posterior.get(p.id, (PRIOR, PRIOR)) for p in candidates]).T
        rate = np.random.default_rng([self._seed, self._draws, _THOMPSON]).beta(alpha, beta)
        self._draws += 1
        chosen = np.argsort((rate - self._target) ** 2, kind='stable')[: self._batch]
        self._drawn = {
            'prompts/posterior_mean': float(np.mean(alpha[chosen] / (alpha + beta)[chosen])),
            'prompts/candidates': len(candidates),
        }
        return [candidates[i] for i in chosen]

    def observe(self, groups: Sequence[Group]) -> None:
        """Updates the posteriors of the groups' prompts; ignores groups with an infrastructure error."""
        for g in groups:
            if not g.infra_error:
                alpha, beta = self._posterior.get(g.prompt.id, (PRIOR, PRIOR))
                self._posterior[g.prompt.id] = (
                    self._decay * alpha + (1 - self._decay) * PRIOR + g.correct,
                    self._decay * beta + (1 - self._decay) * PRIOR + (g.size - g.correct),
                )

    def metrics(self) -> dict[str, float]:
        """Metrics of the last draw and of the run so far.

        prompts/posterior_mean  mean α/(α+β) of the chosen prompts, before their results
        prompts/candidates      prompts that the choice was made from
        prompts/seen            prompts observed since the run began
        """
        return {**self._drawn, 'prompts/seen': len(self._posterior)}

    def state(self) -> str:
        """Everything `restore` needs, as JSON: posteriors, the stream's position, the draw's number."""
        posterior = [[prompt_id, *of_prompt] for prompt_id, of_prompt in self._posterior.items()]
        return json.dumps({'posterior': posterior, 'stream': self._stream.state(), 'draws': self._draws})

    def restore(self, state: str) -> None:
        """Restores exactly what `state` saved."""
        saved = json.loads(state)
        self._stream.restore(saved['stream'])
        self._draws = saved['draws']
        self._posterior = {prompt_id: (alpha, beta) for prompt_id, alpha, beta in saved['posterior']}
