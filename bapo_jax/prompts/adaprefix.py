"""Prompts with a prefix of a reference response, as long as half succeed (AdaPrefix, arXiv 2607.07674).

All G responses to a prompt continue the same prefix, which no loss covers. A prompt has a share f of its
reference, at first 1/2. After each of its groups, with k of G correct,

    f ← clip(f + gain · (1/2 - k/G), 0, 0.9).

The share given is f times a factor that falls linearly from 1 to 0 between two shares of the training steps:
in the end the policy answers alone, as in evaluations. A reference comes from `solve`, or is the prompt's
newest correct response; a prompt without one is asked as it is.

The control law is this project's own: the paper is known here by its abstract alone.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence

import numpy as np

from bapo_jax.groups import Author, Begun, Group, Prompt, Span, last_success
from bapo_jax.prompts.epochs import ShuffledEpochs
from bapo_jax.prompts.protocol import PromptSelector

FIRST, MOST = 0.5, 0.9  # f of a prompt that was never asked, and the largest f
# The last part of a reference's seed, as in mopps.py: no other generator of a run ends in it.
_REFERENCE = (1 << 16) + 2


class AdaPrefix(PromptSelector):
    """Shuffled epochs whose prompts are asked with prefixes; a controller for each prompt sets the length."""

    learns = True

    def __init__(
        self, prompts: Sequence[Prompt], batch: int, seed: int, *, steps: int, longest: int,
        solve: Callable[[Prompt, np.random.Generator], np.ndarray | None] | None, gain: float,
        withdrawal: tuple[float, float],
    ):  # fmt: skip
        """`steps` is the number of training steps; `withdrawal` are the shares of it at factor 1 and at 0.

        `solve` writes a correct response, int32 [tokens], or returns None; if it is None, references are the
        policy's own. References have at most `longest` tokens. Raises ValueError if there are fewer prompts
        than `batch`.
        """
        self._stream = ShuffledEpochs(prompts, batch, seed)
        self._seed, self._steps, self._longest, self._solve = seed, steps, longest, solve
        self._gain, self._withdrawal = gain, withdrawal
        self._share: dict[int, float] = {}  # f by prompt id, of the prompts whose groups were observed
        # The newest correct response by prompt id: its tokens as text, since every step writes the state.
        self._own: dict[int, str] = {}
        self._step = 0
        self._given: list[float] = []  # the share given with each prompt of the last draw; 0 for none

    def next(self) -> list[Prompt]:
        self._step, self._given = self._step + 1, []
        return self._stream.next()

    def begin(self, prompts: Sequence[Prompt]) -> list[Begun]:
        """Each prompt with the prefix that its responses continue; without one if it has no reference."""
        return [Begun(prompt, self._prefix(prompt)) for prompt in prompts]

    def observe(self, groups: Sequence[Group]) -> None:
        """Moves the shares of prompts that may have a reference, and keeps the policy's correct responses."""
        for g in groups:
            if g.infra_error:
                continue
            if self._solve is not None or g.prompt.id in self._own:
                f = self._share.get(g.prompt.id, FIRST) + self._gain * (0.5 - g.accuracy)
                self._share[g.prompt.id] = float(np.clip(f, 0.0, MOST))
            if self._solve is None and (newest := last_success(g)) is not None:
                tokens = g.responses[newest].tokens.astype('<i4')
                self._own[g.prompt.id] = base64.b64encode(tokens.tobytes()).decode()

    def metrics(self) -> dict[str, float]:
        """Metrics of the last draw.

        prompts/prefixed      its prompts that were asked with a prefix
        prompts/given_share   mean share of the reference that was given with them
        """
        given = [share for share in self._given if share]
        return {'prompts/prefixed': len(given), 'prompts/given_share': float(np.mean(given or [0.0]))}

    def state(self) -> str:
        """Everything `restore` needs, as JSON: shares, own responses, the stream's position, the step."""
        return json.dumps({
            'share': list(self._share.items()), 'own': list(self._own.items()),
            'stream': self._stream.state(), 'step': self._step,
        })  # fmt: skip

    def restore(self, state: str) -> None:
        """Restores exactly what `state` saved."""
        saved = json.loads(state)
        self._share, self._own = dict(map(tuple, saved['share'])), dict(map(tuple, saved['own']))
        self._stream.restore(saved['stream'])
        self._step = saved['step']

    def factor(self) -> float:
        """The factor of all shares in the step of the last draw: 1, then falling to 0."""
        first, last = self._withdrawal
        return float(np.clip((last - self._step / self._steps) / (last - first), 0.0, 1.0))

    def _prefix(self, prompt: Prompt) -> tuple[Span, ...]:
        share = self._share.get(prompt.id, FIRST) * self.factor()
        reference = self._reference(prompt) if share else None
        given = 0 if reference is None else min(len(reference) - 1, round(share * len(reference)))
        self._given.append(given / len(reference) if given else 0.0)
        return (Span(reference[:given], None, Author.PREFIX),) if given else ()

    def _reference(self, prompt: Prompt) -> np.ndarray | None:
        """The prompt's reference, int32 [tokens]; None if it has none of at most `longest` tokens."""
        if self._solve is None:
            if prompt.id not in self._own:
                return None
            tokens = np.frombuffer(base64.b64decode(self._own[prompt.id]), '<i4').astype(np.int32)
        else:
            tokens = self._solve(prompt, np.random.default_rng([self._seed, prompt.id, _REFERENCE]))
        return tokens if tokens is not None and len(tokens) <= self._longest else None
