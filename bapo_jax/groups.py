"""The data that the loop passes on: Prompt -> Response -> Verdict -> Group -> Batch.

A group is a prompt, its G responses, and all that was known when they were sampled. The data are plain and numpy only. They are
immutable but for `Response.scored`, which grows. Nothing here knows of the loop.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class Verdict(enum.IntEnum):
    """The verifier's result for one response. An infrastructure error is never a reward of 0: its group is discarded."""

    CORRECT = 0
    WRONG = 1
    UNPARSEABLE = 2
    INFRA_ERROR = 3


class Author(enum.IntEnum):
    """Who wrote a response's tokens. It marks text of others for methods that train with it, such as LUFFY's traces.

    The engines sample POLICY responses only. A method that brings in other text makes groups whose responses say so; checkpoints
    and buffers keep the author. `Response.loss_mask`, not the author, decides which tokens are trained on.
    """

    POLICY = 0  # the behaviour policy sampled all of them
    TRACE = 1  # another model or a solver wrote all of them
    PREFIX = 2  # another wrote the first ones, and the behaviour policy continued


# For each group and each of its responses, an array with one number for each token.
ByGroup = list[list[np.ndarray]]

# A group's origin in a batch: fresh groups (X1), re-evaluated ones (X2), BAPO's buffer (X3), another row's replay.
X1, X2, X3, REPLAY = ORIGINS = ('x1', 'x2', 'x3', 'replay')


def binary_rewards(verdicts: Sequence[Verdict]) -> np.ndarray:
    """float32 [G], the paper's reward (A.7): 1 for a correct response, else 0; nan where the verifier itself failed."""
    return np.array([math.nan if v == Verdict.INFRA_ERROR else float(v == Verdict.CORRECT) for v in verdicts], np.float32)


def images_of(ground_truth: Any) -> Sequence[dict]:
    """References to the images of a question. They hold no pixels, and nor does anything that holds a prompt."""
    return ground_truth.get('images', ()) if isinstance(ground_truth, dict) else ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A question as the policy sees it. `id` is the dataset index, the identifier u_i of eq. 4."""

    id: int
    task: str
    tokens: np.ndarray  # int32 [prompt tokens]
    ground_truth: Any  # what the task's verifier needs; JSON-serialisable
    given: np.ndarray | None = None  # int32 [tokens]: the first tokens of a response, which the policy is to continue

    @property
    def images(self) -> Sequence[dict]:
        """References to its images (tasks/images.py), in the order of their places in the prompt."""
        return images_of(self.ground_truth)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Response:
    """Tokens as sampled, the ending token included when the policy produced one; never re-tokenised."""

    tokens: np.ndarray  # int32 [response tokens], at least one
    logp: np.ndarray  # float32 [response tokens], log-prob of each token under the behaviour policy, of logits / temperature
    finish: str  # 'stop' (ended itself) or 'length' (cut at the token limit)
    version: int  # the behaviour policy's version: how many steps had trained it
    author: Author = Author.POLICY
    loss_mask: np.ndarray | None = None  # bool [response tokens]; None: all True. See `trained_on`
    # float32 [response tokens] by policy: its log-probs under policies that never change. Who scores it first adds them (learner.py).
    scored: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def trained_on(self) -> np.ndarray:
        """bool [response tokens]: True on the tokens that the loss covers, False on tokens that are only context.

        `loss_mask` is for responses that are not all the policy's own, such as the continuation of a given prefix. The model reads
        masked tokens, but they have no advantage and no token weight.
        """
        return np.ones(len(self.tokens), bool) if self.loss_mask is None else self.loss_mask

    @property
    def nbytes(self) -> int:
        """Of its arrays of tokens and log-probs."""
        return self.tokens.nbytes + self.logp.nbytes + sum(logp.nbytes for logp in self.scored.values())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A prompt and its G responses with their verdicts and rewards (eq. 4). Never split, relabelled or partly replaced.

    A group that the engine lost has no responses. It counts as an infrastructure error, so that its prompt has an outcome too.

    The verdicts give k, which drives filters, X2, X3, thresholds and accuracy. The rewards alone drive advantages.
    """

    prompt: Prompt
    responses: tuple[Response, ...]
    verdicts: tuple[Verdict, ...]  # one per response
    rewards: np.ndarray  # float32 [G], one per response; nan on an infrastructure error
    step: int  # the training step it was sampled at
    answers: tuple[str | None, ...] = ()  # what the verifier extracted from each response; None where nothing

    @property
    def size(self) -> int:
        return len(self.responses)

    @property
    def correct(self) -> int:
        """k, the number of correct responses."""
        return sum(v == Verdict.CORRECT for v in self.verdicts)

    @property
    def accuracy(self) -> float:
        """mu = k / G."""
        return self.correct / self.size

    @property
    def infra_error(self) -> bool:
        return Verdict.INFRA_ERROR in self.verdicts or not self.responses


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What a step trains on: intact groups, each with its origin, and for every response its normalisation group."""

    groups: tuple[Group, ...]
    origins: tuple[str, ...]  # one per group, of ORIGINS
    normalisation: tuple[np.ndarray, ...]  # one per group, int32 [G]: responses with one number share mean and std of rewards

    def count(self, origin: str) -> int:
        return self.origins.count(origin)

    def of_origin(self, origin: str) -> list[Group]:
        return [g for g, o in zip(self.groups, self.origins, strict=True) if o == origin]

    def take(self, indices: Sequence[int]) -> Batch:
        """The batch of these groups, in this order."""
        return Batch(*(tuple(part[i] for i in indices) for part in (self.groups, self.origins, self.normalisation)))


def joined(old: Group, new: Group) -> Group:
    """Joins two groups of one prompt, the old responses first. The step is the new group's."""
    return Group(
        new.prompt, old.responses + new.responses, old.verdicts + new.verdicts, np.concatenate([old.rewards, new.rewards]), new.step,
        old.answers + new.answers,
    )  # fmt: skip


def taken(group: Group, places: Sequence[int]) -> Group:
    """A group of the responses at `places`, with their verdicts and rewards."""
    return Group(
        group.prompt, tuple(group.responses[i] for i in places), tuple(group.verdicts[i] for i in places),
        group.rewards[np.asarray(places)], group.step, tuple(group.answers[i] for i in places),
    )  # fmt: skip


def unscored(group: Group) -> Group:
    """The group as if no policy had scored its responses."""
    return dataclasses.replace(group, responses=tuple(dataclasses.replace(r, scored={}) for r in group.responses))


def make_batch(groups: Sequence[Group], origins: Sequence[str]) -> Batch:
    """A batch in which every group is normalised by itself."""
    return Batch(tuple(groups), tuple(origins), tuple(np.full(g.size, i, np.int32) for i, g in enumerate(groups)))


_SCORED = 'scored_'  # begins the names of arrays of `Response.scored`


def groups_to_arrays(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Flattens groups into a few numpy arrays for a checkpoint. Exact.

    Every array has at least one element, since array stores dislike empty ones. 'count' is the number of groups.
    """
    responses = [r for g in groups for r in g.responses]
    scored = sorted({name for r in responses for name in r.scored})

    def flat(arrays: Sequence[np.ndarray], dtype) -> np.ndarray:
        return np.concatenate([*arrays, np.zeros(1, dtype)]).astype(dtype, copy=False)

    def in_json(values: list) -> np.ndarray:
        return np.frombuffer(json.dumps(values).encode(), np.uint8)

    return {
        'count': np.array([len(groups)], np.int64),
        'prompt_id': flat([[g.prompt.id for g in groups]], np.int64),
        'prompt_len': flat([[len(g.prompt.tokens) for g in groups]], np.int32),
        'prompt_tokens': flat([g.prompt.tokens for g in groups], np.int32),
        'task_and_truth': in_json([[g.prompt.task, g.prompt.ground_truth] for g in groups]),
        'step': flat([[g.step for g in groups]], np.int64),
        'size': flat([[g.size for g in groups]], np.int32),
        'verdict': flat([[int(v) for g in groups for v in g.verdicts]], np.int8),
        'reward': flat([g.rewards for g in groups], np.float32),
        'answers': in_json([g.answers for g in groups]),
        'response_len': flat([[len(r.tokens) for r in responses]], np.int32),
        'tokens': flat([r.tokens for r in responses], np.int32),
        'logp': flat([r.logp for r in responses], np.float32),
        'stopped': flat([[r.finish == 'stop' for r in responses]], np.int8),
        'version': flat([[r.version for r in responses]], np.int64),
        'author': flat([[int(r.author) for r in responses]], np.int8),
        'loss_mask': flat([r.trained_on for r in responses], np.int8),
        # nan where a response was not scored
        **{
            _SCORED + name: flat([r.scored.get(name, np.full(len(r.tokens), math.nan)) for r in responses], np.float32)
            for name in scored
        },
    }


def groups_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[Group]:
    """The inverse of `groups_to_arrays`. Answers are None in arrays that an earlier version saved."""
    a = {name: np.asarray(value) for name, value in arrays.items()}
    count = int(a['count'][0])
    prompt_end, response_end = np.cumsum(a['prompt_len'][:-1]), np.cumsum(a['response_len'][:-1])
    truths = json.loads(a['task_and_truth'].tobytes())
    answers = json.loads(a['answers'].tobytes()) if 'answers' in a else [[None] * n for n in a['size'].tolist()]
    scored = [name.removeprefix(_SCORED) for name in a if name.startswith(_SCORED)]
    groups, first = [], 0
    for i in range(count):
        task, truth = truths[i]
        prompt_tokens = a['prompt_tokens'][prompt_end[i] - a['prompt_len'][i] : prompt_end[i]]
        rows = range(first, first + int(a['size'][i]))
        first = rows.stop
        responses = tuple(
            Response(
                tokens=a['tokens'][response_end[j] - a['response_len'][j] : response_end[j]],
                logp=a['logp'][response_end[j] - a['response_len'][j] : response_end[j]],
                finish='stop' if a['stopped'][j] else 'length',
                version=int(a['version'][j]),
                author=Author(int(a['author'][j])),
                loss_mask=_none_if_all(a['loss_mask'][response_end[j] - a['response_len'][j] : response_end[j]]),
                scored={
                    name: logp
                    for name in scored
                    if not np.isnan(logp := a[_SCORED + name][response_end[j] - a['response_len'][j] : response_end[j]]).any()
                },
            )
            for j in rows
        )
        verdicts = tuple(Verdict(int(a['verdict'][j])) for j in rows)
        prompt = Prompt(int(a['prompt_id'][i]), task, prompt_tokens, truth)
        rewards, step = a['reward'][rows.start : rows.stop], int(a['step'][i])
        groups.append(Group(prompt, responses, verdicts, rewards, step, tuple(answers[i])))
    return groups


def _none_if_all(mask: np.ndarray) -> np.ndarray | None:
    return None if mask.all() else mask.astype(bool)
