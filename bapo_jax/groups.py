"""The data structures of the training loop: Prompt -> Response -> Verdict -> Group -> Batch.

A group is a prompt with its G responses and everything that was known when they were sampled. The structures
hold plain data and numpy arrays. They are immutable, except that entries are added to `Response.scored`. They
do not depend on the loop.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Verdict(enum.IntEnum):
    """The verifier's result for one response.

    An infrastructure error does not count as a reward of 0; its group is discarded.
    """

    CORRECT = 0
    WRONG = 1
    UNPARSEABLE = 2
    INFRA_ERROR = 3


class Author(enum.IntEnum):
    """Who wrote a span of a response. Checkpoints and buffers hold the numbers."""

    POLICY = 0  # a rollout policy of the run sampled the tokens
    TRACE = 1  # another policy, model or solver wrote them, for the policy to imitate
    PREFIX = 2  # they were given, and the policy continued them
    PLACEHOLDER = 3  # the policy sampled the token that stands for image features: see `sampled_spans`
    ENVIRONMENT = 4  # a tool's reply to the policy: see rollout/episodes.py


TRAINED_ON = Author.POLICY, Author.TRACE  # whose tokens have a loss; all others' are only read
NO_VERSION = -1  # of tokens that no policy of the run sampled

# Finish reasons: cut at the limit of tokens; ended by a stop token; to be continued in a later step.
# Checkpoints hold the indices.
LENGTH, STOP, UNFINISHED = FINISHES = ('length', 'stop', 'unfinished')

# For each response of each group, an array with one number per token.
ByGroup = list[list[np.ndarray]]

# Origins of groups in a batch: fresh ones, and those with earlier responses. A method may name others.
X1, REPLAY = 'x1', 'replay'
LANES = 4  # maximum number of origins in a batch


def binary_rewards(verdicts: Sequence[Verdict]) -> np.ndarray:
    """The paper's rewards (A.7), float32 [G]: 1 if correct, else 0; nan if the verifier itself failed."""
    return np.array(
        [math.nan if v == Verdict.INFRA_ERROR else float(v == Verdict.CORRECT) for v in verdicts], np.float32
    )


def images_of(ground_truth: Any) -> Sequence[dict]:
    """References to the images of a question. They hold no pixels, and neither do prompts."""
    return ground_truth.get('images', ()) if isinstance(ground_truth, dict) else ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A question as the policy sees it. `id` is the dataset index, the identifier u_i of eq. 4."""

    id: int
    task: str
    tokens: np.ndarray  # int32 [prompt tokens]
    ground_truth: Any  # what the task's verifier needs; JSON-serialisable

    @property
    def images(self) -> Sequence[dict]:
        """References to its images (tasks/images.py), in their order in the prompt."""
        return images_of(self.ground_truth)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Consecutive tokens of a response with one author, and one version if a policy sampled them."""

    tokens: np.ndarray  # int32 [tokens], at least one
    logp: np.ndarray | None  # float32 [tokens], behaviour log-probs, of logits / temperature; None: unknown
    author: Author = Author.POLICY
    version: int = NO_VERSION  # of the policy that sampled them: the number of steps that had trained it


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Response:
    """A row of spans. Tokens are as sampled, never re-tokenised, and include the stop token, if any."""

    spans: tuple[Span, ...]
    finish: str  # of FINISHES
    # policy name -> float32 [response tokens]: log-probs under policies that never change. Added when the
    # response is first scored (learner.py).
    scored: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [response tokens]"""
        return _joined([span.tokens for span in self.spans], np.int32)

    @property
    def logp(self) -> np.ndarray:
        """float32 [response tokens]: behaviour log-probs; 0 where they are unknown."""
        return _joined(
            [np.zeros(len(s.tokens), np.float32) if s.logp is None else s.logp for s in self.spans],
            np.float32,
        )

    @property
    def trained_on(self) -> np.ndarray:
        """bool [response tokens]: False for tokens that are only context, which the model only reads."""
        return self.by(*TRAINED_ON)

    def by(self, *authors: Author) -> np.ndarray:
        """bool [response tokens]: True for tokens of these authors."""
        return self._of_spans([s.author in authors for s in self.spans], bool)

    @property
    def versions(self) -> np.ndarray:
        """int64 [policy's tokens]: the version of the policy that sampled each of its tokens."""
        own = [s for s in self.spans if s.author == Author.POLICY]
        return np.repeat([s.version for s in own], [len(s.tokens) for s in own]).astype(np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of its token and log-prob arrays."""
        arrays = [array for s in self.spans for array in (s.tokens, s.logp) if array is not None]
        return sum(array.nbytes for array in [*arrays, *self.scored.values()])

    def _of_spans(self, values: list, dtype: Any) -> np.ndarray:
        return np.repeat(np.array(values, dtype), [len(s.tokens) for s in self.spans])


class Begun(NamedTuple):
    """A prompt, and the spans with which all responses to it begin."""

    prompt: Prompt
    spans: tuple[Span, ...] = ()
    first: int = 0  # the index of the first response within its group, if only a part of it is requested
    most: int = 0  # the most tokens to add, after which a response is unfinished; 0: up to the limit

    @property
    def read(self) -> Prompt:
        """What an engine reads: the prompt, with the tokens of the spans behind its own."""
        tokens = _joined([self.prompt.tokens, *(span.tokens for span in self.spans)], np.int32)
        return dataclasses.replace(self.prompt, tokens=tokens)

    @property
    def length(self) -> int:
        """The number of response tokens that there are already."""
        return sum(len(span.tokens) for span in self.spans)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A prompt and its G responses with their verdicts and rewards (eq. 4).

    A group is never split, relabelled or partly replaced. A group that the engine lost has no responses. It
    counts as an infrastructure error, so that its prompt has an outcome, too. Filters, X2, X3, thresholds and
    accuracy depend on k, which comes from the verdicts. Advantages depend only on the rewards.
    """

    prompt: Prompt
    responses: tuple[Response, ...]
    verdicts: tuple[Verdict, ...]  # one per response
    rewards: np.ndarray  # float32 [G], one per response; nan on an infrastructure error
    step: int  # the training step that it was fresh or re-evaluated in
    answers: tuple[str | None, ...] = ()  # the answer that the verifier extracted from each response, or None

    @property
    def size(self) -> int:
        return len(self.responses)

    @property
    def correct(self) -> int:
        """k, the number of correct responses."""
        return sum(v == Verdict.CORRECT for v in self.verdicts)

    @property
    def accuracy(self) -> float:
        """μ = k / G."""
        return self.correct / self.size

    @property
    def infra_error(self) -> bool:
        return Verdict.INFRA_ERROR in self.verdicts or not self.responses

    @property
    def continued(self) -> bool:
        """Whether the policy continued given tokens: easier than answering the prompt."""
        return any(r.spans[0].author == Author.PREFIX for r in self.responses)

    def older_than(self, version: int) -> bool:
        """Whether a policy before `version` sampled any of its tokens."""
        return any((r.versions < version).any() for r in self.responses)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What a step trains on: whole groups with their origins, and each response's normalisation group."""

    groups: tuple[Group, ...]
    origins: tuple[str, ...]  # one per group: X1, or a name from the method's replay
    # One per group, int32 [G]: responses with the same number share the mean and std of rewards.
    normalisation: tuple[np.ndarray, ...]
    weights: tuple[float, ...] = ()  # one per group, by which its token weights are multiplied; (): 1 each

    def count(self, origin: str) -> int:
        return self.origins.count(origin)

    def of_origin(self, origin: str) -> list[Group]:
        return [g for g, o in zip(self.groups, self.origins, strict=True) if o == origin]

    def take(self, indices: Sequence[int]) -> Batch:
        """The batch with only these groups, in this order."""
        parts = (self.groups, self.origins, self.normalisation, self.weights)
        return Batch(*(tuple(part[i] for i in indices) if part else () for part in parts))


def sampled(tokens: np.ndarray, logp: np.ndarray, finish: str, version: int) -> Response:
    """A response that one policy sampled, int32 and float32 [response tokens]."""
    return Response(sampled_spans(tokens, logp, version), finish)


def sampled_spans(
    tokens: np.ndarray, logp: np.ndarray, version: int, image_token: int | None = None
) -> tuple[Span, ...]:
    """What a policy sampled, int32 and float32 [tokens].

    A policy that reads images may sample `image_token`, the placeholder of image features. There is no image,
    so the model reads an ordinary token. It is not trained on, so it has a span of another author.
    """
    other = tokens == image_token if image_token is not None else np.zeros(len(tokens), bool)
    starts = [0, *(1 + np.flatnonzero(np.diff(other))), len(tokens)]
    return tuple(
        Span(tokens[i:j], logp[i:j], Author.PLACEHOLDER if other[i] else Author.POLICY, version)
        for i, j in zip(starts, starts[1:])
    )


def joined(old: Group, new: Group) -> Group:
    """Joins two groups of the same prompt, old responses first. The step is that of the new group."""
    return Group(
        new.prompt,
        old.responses + new.responses,
        old.verdicts + new.verdicts,
        np.concatenate([old.rewards, new.rewards]),
        new.step,
        old.answers + new.answers,
    )


def taken(group: Group, places: Sequence[int]) -> Group:
    """A group with only the responses at `places`, and their verdicts and rewards."""
    return Group(
        group.prompt, tuple(group.responses[i] for i in places), tuple(group.verdicts[i] for i in places),
        group.rewards[np.asarray(places)], group.step, tuple(group.answers[i] for i in places),
    )  # fmt: skip


def last_success(group: Group) -> int | None:
    """The index of the last correct response that can be given to a policy, or None.

    A sampled image token cannot: read as given, it would stand for the features of an image.
    """
    can = [
        j
        for j, (verdict, response) in enumerate(zip(group.verdicts, group.responses, strict=True))
        if verdict == Verdict.CORRECT and not response.by(Author.PLACEHOLDER).any()
    ]
    return can[-1] if can else None


def unscored(group: Group) -> Group:
    """The group without scored log-probs."""
    return dataclasses.replace(
        group, responses=tuple(dataclasses.replace(r, scored={}) for r in group.responses)
    )


def make_batch(groups: Sequence[Group], origins: Sequence[str]) -> Batch:
    """A batch in which each group is normalised separately."""
    return Batch(
        tuple(groups), tuple(origins), tuple(np.full(g.size, i, np.int32) for i, g in enumerate(groups))
    )


def lanes_of(batch: Batch) -> tuple[str, ...]:
    """A batch's origins, X1 first, one lane each. Raises ValueError if there are more than LANES."""
    origins = tuple(dict.fromkeys((X1, *batch.origins)))
    if len(origins) > LANES:
        raise ValueError(
            f'a batch has groups of {len(origins)} origins, more than LANES={LANES} in groups.py; name '
            'fewer, or raise it'
        )
    return origins


def _joined(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """The parts as one array; that of a single part, not a copy."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype), *parts])
