"""The data structures of the training loop: Prompt -> Response -> Verdict -> Group -> Batch.

A group is a prompt with its G responses and everything that was known when they were sampled. The structures
hold plain data and numpy arrays. They are immutable, except that entries are added to `Response.scored`. They
do not depend on the loop.
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
    """The verifier's result for one response.

    An infrastructure error does not count as a reward of 0; its group is discarded.
    """

    CORRECT = 0
    WRONG = 1
    UNPARSEABLE = 2
    INFRA_ERROR = 3


class Author(enum.IntEnum):
    """Who wrote a response's tokens, for methods that also train on other text, such as LUFFY's traces.

    The engines only sample POLICY responses. A method that uses other text sets the author of its responses;
    checkpoints and buffers keep it. `Response.loss_mask`, not the author, selects the tokens to train on.
    """

    POLICY = 0  # the behaviour policy sampled all tokens
    TRACE = 1  # another model or a solver wrote all tokens
    PREFIX = 2  # another model or a solver wrote the first tokens, and the behaviour policy continued


# For each response of each group, an array with one number per token.
ByGroup = list[list[np.ndarray]]

X1 = 'x1'  # the origin of fresh groups in a batch; a method's replay names the other origins
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
    given: np.ndarray | None = None  # int32 [tokens]: first tokens of a response for the policy to continue

    @property
    def images(self) -> Sequence[dict]:
        """References to its images (tasks/images.py), in their order in the prompt."""
        return images_of(self.ground_truth)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Response:
    """Tokens as sampled, never re-tokenised. They include the stop token if the policy produced one."""

    tokens: np.ndarray  # int32 [response tokens], at least one
    logp: np.ndarray  # float32 [response tokens], behaviour policy's log-probs, of logits / temperature
    finish: str  # 'stop' (with a stop token) or 'length' (cut at the token limit)
    version: int  # the behaviour policy's version: the number of steps that had trained it
    author: Author = Author.POLICY
    loss_mask: np.ndarray | None = None  # bool [response tokens]; None: all True. See `trained_on`
    # policy name -> float32 [response tokens]: log-probs under policies that never change. Added when the
    # response is first scored (learner.py).
    scored: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def trained_on(self) -> np.ndarray:
        """bool [response tokens]: True for tokens in the loss, False for tokens that are only context.

        `loss_mask` is for responses that the policy wrote only in part, such as the continuation of a given
        prefix. The model reads masked tokens, but they have no advantage and no token weight.
        """
        return np.ones(len(self.tokens), bool) if self.loss_mask is None else self.loss_mask

    @property
    def nbytes(self) -> int:
        """Bytes of its token and log-prob arrays."""
        return self.tokens.nbytes + self.logp.nbytes + sum(logp.nbytes for logp in self.scored.values())


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
    step: int  # the training step in which it was sampled
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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What a step trains on: whole groups with their origins, and each response's normalisation group."""

    groups: tuple[Group, ...]
    origins: tuple[str, ...]  # one per group: X1, or a name from the method's replay
    # One per group, int32 [G]: responses with the same number share the mean and std of rewards.
    normalisation: tuple[np.ndarray, ...]

    def count(self, origin: str) -> int:
        return self.origins.count(origin)

    def of_origin(self, origin: str) -> list[Group]:
        return [g for g, o in zip(self.groups, self.origins, strict=True) if o == origin]

    def take(self, indices: Sequence[int]) -> Batch:
        """The batch with only these groups, in this order."""
        return Batch(
            *(tuple(part[i] for i in indices) for part in (self.groups, self.origins, self.normalisation))
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


_SCORED = 'scored_'  # prefix of the arrays with `Response.scored`


def groups_to_arrays(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Flattens groups into a few numpy arrays for a checkpoint, without loss.

    Every array has at least one element, since array stores may not support empty ones. 'count' is the number
    of groups.
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
        # nan if a response was not scored
        **{
            _SCORED + name: flat(
                [r.scored.get(name, np.full(len(r.tokens), math.nan)) for r in responses], np.float32
            )
            for name in scored
        },
    }


def groups_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[Group]:
    """The inverse of `groups_to_arrays`. Answers are None if an earlier version saved the arrays."""
    a = {name: np.asarray(value) for name, value in arrays.items()}
    count = int(a['count'][0])
    prompt_end, response_end = np.cumsum(a['prompt_len'][:-1]), np.cumsum(a['response_len'][:-1])
    truths = json.loads(a['task_and_truth'].tobytes())
    answers = (
        json.loads(a['answers'].tobytes()) if 'answers' in a else [[None] * n for n in a['size'].tolist()]
    )
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
                loss_mask=_none_if_all(
                    a['loss_mask'][response_end[j] - a['response_len'][j] : response_end[j]]
                ),
                scored={
                    name: logp
                    for name in scored
                    if not np.isnan(
                        logp := a[_SCORED + name][response_end[j] - a['response_len'][j] : response_end[j]]
                    ).any()
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
