"""Samples and judges answers to benchmark questions, and scores π_θ during training."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from bapo_jax.config.own_code import JUDGES, code_of
from bapo_jax.groups import STOP, Begun, Group, Prompt, Response, Verdict
from bapo_jax.machine import events, stopping
from bapo_jax.machine.files import write_text
from bapo_jax.rollout.collect import judge
from bapo_jax.rollout.engine import EVALUATION, TRACKING, Draw, Engine, Sampling
from bapo_jax.rollout.episodes import NoReply
from bapo_jax.rollout.rollouts import Rollouts
from bapo_jax.run.samples import done_before, evaluation_settings, open_evaluation, sample_rows
from bapo_jax.run.state import RunState
from bapo_jax.scores import Question, question, summary
from bapo_jax.tasks import custom_reward, get_task, repeats

_CHUNK = 256  # responses judged and written together: the most an interruption loses, beside pending ones
_TRACKED = ''  # the key of the tracked prompts among benchmark names


def chunk_size(config: ConfigDict) -> int:
    """The number of questions that are judged and written together."""
    return max(1, _CHUNK // config.evaluate.samples)


def votes(config: ConfigDict) -> bool:
    """Whether maj@n is reported, which requires that the task's own verifier extracts answers for voting.

    A user's reward function may return no answer, or one that is not suitable for voting.
    """
    return get_task(config.task.name).VOTES and not config.task.reward


def answer_and_judge(
    engine: Engine, tokenizer: Any, prompts: Sequence[Prompt], config: ConfigDict, purpose: int
) -> Generator[list[Group], None, None]:
    """Yields `evaluate.samples` judged responses to each prompt, chunk by chunk, in order.

    All prompts are requested at once, so later chunks are sampled while one is judged. Random keys depend
    only on the question, not on the policy. Close the generator when leaving early, or the rest is sampled
    too.
    """
    e, size, rewards = config.evaluate, chunk_size(config), custom_reward.rewards_of(config.task)
    draws = [Draw(config.seed, 0, purpose)] * len(prompts)
    answers = engine.ask(
        list(map(Begun, prompts)), e.samples, Sampling(e.temperature, e.max_response_tokens, e.top_p), draws
    )
    try:
        for first in range(0, len(prompts), size):
            chunk = slice(first, first + size)
            responses = [_responses(answer, first + i) for i, answer in enumerate(answers[chunk])]
            judged = judge(
                tokenizer, prompts[chunk], responses, draws[chunk], rewards, config.task.judging.step_s
            )
            yield [group if group.responses else without_verdicts(group, e.samples) for group in judged]
    finally:
        for answer in answers:
            answer.cancel()


def _responses(answer: Future[tuple[Response, ...]], question: int) -> tuple[Response, ...]:
    """The responses to a question; () if a tool failed on one of them."""
    try:
        return answer.result()
    except NoReply as error:
        events.report('group lost', f'question {question} has no responses: {error}', question=question)
        return ()


def without_verdicts(group: Group, samples: int) -> Group:
    """A lost group as one of `samples` empty responses, all of them infrastructure errors."""
    return dataclasses.replace(
        group, responses=(Response((), STOP),) * samples, verdicts=(Verdict.INFRA_ERROR,) * samples,
        rewards=np.full(samples, np.nan, np.float32), answers=(None,) * samples,
    )  # fmt: skip


def summary_of(
    questions: Sequence[Question], prompts: Sequence[Prompt], config: ConfigDict
) -> dict[str, Any]:
    """Returns the summary (scores.py) of the answers to these prompts, which may contain duplicates."""
    return summary(questions, votes(config), repeats.numbered([p.ground_truth for p in prompts]))


def core_metrics(summaries: dict[str, dict]) -> dict[str, float | None]:
    """Returns the metrics to log: val-core/<benchmark>/acc/{mean@n,pass@n,maj@n}, maj@n only if reported."""
    return {
        f'val-core/{name}/acc/{measure}@{s["samples"]}': s[measure]
        for name, s in summaries.items()
        for measure in ('mean', 'pass', 'maj')
        if measure in s
    }


def evaluate(
    engine: Engine, tokenizer: Any, name: str, prompts: Sequence[Prompt], config: ConfigDict, file: Path,
    done: list[Question], purpose: int = EVALUATION, answered: Callable[[int], Any] = lambda questions: None,
) -> list[Question]:  # fmt: skip
    """Answers the prompts after those in `done`, and appends each judged chunk's samples to `file`.

    `answered` is called after each chunk with the number of answered questions. Returns all questions in
    order, including `done`.
    """
    questions, missing = list(done), prompts[len(done) :]
    if not missing:
        return questions
    with (
        closing(answer_and_judge(engine, tokenizer, missing, config, purpose)) as chunks,
        file.open('ab') as f,
    ):
        for groups in chunks:
            rows = sample_rows(name, len(questions), groups, tokenizer)
            f.write(''.join(json.dumps(row) + '\n' for row in rows).encode())
            f.flush()
            questions += map(question, groups)
            answered(len(questions))
    return questions


def answered_before(
    output: Path,
    chosen: dict[str, Any],
    files: dict[str, Path],
    benchmarks: dict[str, list[Prompt]],
    config: ConfigDict,
) -> dict[str, list[Question]]:
    """Opens an evaluation's directory and returns the questions already answered, by benchmark.

    Raises ValueError if it holds an evaluation with settings other than `chosen`, or a damaged file.
    """
    open_evaluation(output, chosen, list(files.values()))
    size = chunk_size(config)
    return {
        name: done_before(files[name], len(p), config.evaluate.samples, size)
        for name, p in benchmarks.items()
    }


def evaluate_in_training(
    engine: Engine, tokenizer: Any, benchmarks: dict[str, list[Prompt]], tracked: list[Prompt],
    config: ConfigDict, evals: Path, step: int, initial: int, say: Callable[[str], None],
) -> dict[str, dict]:  # fmt: skip
    """Scores a run's policy after `step` steps, writes `evals`/STEP.json, and returns benchmark summaries.

    Answers are kept in `evals`/STEP.partial until that file is written, so an interrupted evaluation can
    continue. `initial` is the checksum of θ_0. `say` is called now and then with the evaluation's progress.
    """
    asked = {**benchmarks, _TRACKED: tracked} if tracked else benchmarks
    partial, summaries, before = evals / f'{step:06d}.partial', {}, 0
    files = {name: partial / f'{i}.jsonl' for i, name in enumerate(asked)}
    # A run directory may be moved, so its policy is identified by the checksum of θ_0 and the step, not by a
    # path.
    chosen = evaluation_settings(partial, step, config, asked, code_of(config, JUDGES)) | {
        'checkpoint': initial
    }
    try:
        done = answered_before(partial, chosen, files, asked, config)
    except ValueError as e:  # other settings or a damaged file
        events.report('evaluation begun anew', f'the answers in {partial} were deleted: {e}')
        shutil.rmtree(partial)
        done = answered_before(partial, chosen, files, asked, config)
    samples, total = config.evaluate.samples, sum(map(len, asked.values()))
    work = f'scoring the policy of step {step}' if step else 'scoring the base'

    def answered(questions: int) -> None:
        say(f'{work}: {samples * (before + questions):,} of {samples * total:,} responses')

    say(f'{work}: {total:,} problems × {samples} responses')
    for name, prompts in asked.items():
        purpose = EVALUATION if name in benchmarks else TRACKING
        with stopping.leaving_waits():
            questions = evaluate(
                engine, tokenizer, name, prompts, config, files[name], done[name], purpose, answered
            )
        summaries[name], before = summary_of(questions, prompts, config), before + len(prompts)
    of_tracked = {'prompt_ids': [p.id for p in tracked], **summaries.pop(_TRACKED)} if tracked else None
    result = {'step': step, 'benchmarks': summaries, **({'tracked': of_tracked} if tracked else {})}
    write_text(evals / f'{step:06d}.json', json.dumps(result) + '\n')
    shutil.rmtree(partial)
    return summaries


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores π_θ (not α) on benchmarks and tracked prompts, and stores each question's count in `evals`."""

    config: ConfigDict
    tokenizer: Any
    benchmarks: dict[str, list[Prompt]]
    training_prompts: Sequence[Prompt]
    rollouts: Rollouts
    state: RunState
    evals: Path

    def __call__(self, say: Callable[[str], None]) -> dict[str, float | None]:
        """Returns metrics of the current policy.

        `say` is called now and then with the evaluation's progress.
        """
        c, state = self.config, self.state
        with self.rollouts.held_by_theta() as engine:
            summaries = evaluate_in_training(
                engine,
                self.tokenizer,
                self.benchmarks,
                self.tracked(),
                c,
                self.evals,
                state.step,
                state.initial,
                say,
            )
        return core_metrics(summaries)

    def tracked(self) -> list[Prompt]:
        """Returns a fixed random subset of the training prompts, for the accuracy-migration figures."""
        chosen = np.random.default_rng(self.config.seed).permutation(len(self.training_prompts))
        return [self.training_prompts[i] for i in np.sort(chosen[: self.config.evaluate.track_prompts])]
