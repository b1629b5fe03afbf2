"""Groups: from verdicts, with drawn tokens and log-probs; and their equality by value, since `==` compares them by identity."""

import dataclasses
import functools

import numpy as np

from bapo_jax.groups import Author, Begun, Group, Prompt, Span, Verdict, binary_rewards, sampled
from bapo_jax.replay.arrays import groups_to_arrays


def graded(prompt, responses, verdicts, step=0, rewards=None, answers=None):
    """The group of these verdicts; rewards are the paper's binary ones, and answers are None, unless others are given."""
    rewards = binary_rewards(verdicts) if rewards is None else np.array(rewards, np.float32)
    return Group(prompt, tuple(responses), tuple(verdicts), rewards, step, answers or (None,) * len(verdicts))


def right(k, G):
    """Verdicts of G responses, the first k correct."""
    return (Verdict.CORRECT,) * k + (Verdict.WRONG,) * (G - k)


@functools.cache
def make_group(prompt_id, k, G=8, step=0, infra=False):
    """k of G right; tokens and log-probs are drawn from (prompt_id, step, k), so that no two groups look alike by accident."""
    rng = np.random.default_rng([prompt_id, step, k])
    responses = []
    for _ in range(G):
        length = int(rng.integers(1, 6))
        tokens = rng.integers(0, 1000, length, dtype=np.int32)
        finish = 'stop' if rng.random() < 0.5 else 'length'
        responses.append(sampled(tokens, rng.standard_normal(length, dtype=np.float32), finish, step))
    verdicts = list(right(k, G))
    if infra:
        verdicts[-1] = Verdict.INFRA_ERROR
    prompt = Prompt(prompt_id, 'countdown', rng.integers(0, 1000, 1 + prompt_id % 3, dtype=np.int32), {'target': prompt_id})
    return graded(prompt, responses, verdicts, step)


def judged_group(prompt_id: int, verdicts: list[Verdict], rng: np.random.Generator, step: int = 3) -> Group:
    """A group with these verdicts; tokens, log-probs, finish reasons and versions are drawn from `rng`."""
    responses = []
    for _ in verdicts:
        n = int(rng.integers(1, 9))
        logp = -rng.random(n, np.float32)
        tokens, finish = rng.integers(0, 99, n).astype(np.int32), str(rng.choice(['stop', 'length']))
        responses.append(sampled(tokens, logp, finish, int(rng.integers(9))))
    prompt = Prompt(prompt_id, 'countdown', rng.integers(0, 99, 5).astype(np.int32), {'numbers': [1, 2], 'target': prompt_id})
    return graded(prompt, responses, verdicts, step)


def begun(prompts):
    """Groups to ask an engine for, with nothing given."""
    return [Begun(prompt) for prompt in prompts]


def version_of(response):
    """The version of the one policy that sampled a response."""
    [version] = set(response.versions.tolist())
    return version


def with_logp(response, logp):
    """The response of one policy, with other behaviour log-probs."""
    [span] = response.spans
    return dataclasses.replace(response, spans=(dataclasses.replace(span, logp=logp),))


def masked(response, mask, logp=None):
    """The response with another author's tokens where `mask` is False; `logp` are the log-probs there, None if unknown."""
    starts = [0, *(1 + np.flatnonzero(np.diff(mask))), len(mask)]
    spans = [
        Span(response.tokens[i:j], response.logp[i:j], Author.POLICY, version_of(response))
        if mask[i] else Span(response.tokens[i:j], None if logp is None else logp[i:j], Author.PLACEHOLDER)
        for i, j in zip(starts, starts[1:])
    ]  # fmt: skip
    return dataclasses.replace(response, spans=tuple(spans))


def ids(groups):
    return [g.prompt.id for g in groups]


def assert_same_arrays(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].tobytes() == b[name].tobytes(), name


def assert_same_groups(a, b):
    assert_same_arrays(groups_to_arrays(a), groups_to_arrays(b))
