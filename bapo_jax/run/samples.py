"""The directory of one evaluation, from which an interrupted evaluation continues.

settings.json       the settings that the samples depend on
BENCHMARK.jsonl     one JSON row per sample, written one chunk of questions at a time
summary.json        the settings and every benchmark's measures (scores.py)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bapo_jax.groups import Author, Group, Prompt, Verdict
from bapo_jax.machine.files import write_text
from bapo_jax.run.log.responses import spans_of
from bapo_jax.scores import Question
from bapo_jax.tasks.jsonl import flaw


def sample_files(output: Path, benchmarks: Sequence[str]) -> dict[str, Path]:
    """Returns the file of each benchmark's samples.

    Raises ValueError if two benchmarks would share a file.
    """
    files = {name: output / f'{Path(name).stem}.jsonl' for name in benchmarks}
    for name, file in files.items():
        same = [other for other in files if files[other] == file]
        if len(same) > 1:
            raise ValueError(
                f'--benchmarks: {" and ".join(same)} would share {file.name}; rename one, or evaluate them '
                'separately'
            )
    return files


def evaluation_settings(
    checkpoint: Path,
    step: int,
    config: ConfigDict,
    benchmarks: dict[str, list[Prompt]],
    code: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Returns the settings that the samples depend on, by the names of flags and config fields.

    `code` has a hash of each user module that judges responses.
    """
    c = config
    program = (
        {'config.rollout.rows': c.rollout.rows}
        if c.rollout.engine == 'jax'
        else {'config.rollout.dtype': c.rollout.dtype}
    )
    return {
        'checkpoint': str(checkpoint.resolve()), 'step': step, 'engine': c.rollout.engine,
        'samples': c.evaluate.samples, 'config.seed': c.seed, 'config.model.dtype': c.model.dtype,
        'config.task.name': c.task.name, 'config.task.reward': c.task.reward,
        'config.task.template': c.task.template,
        'config.evaluate.max_response_tokens': c.evaluate.max_response_tokens,
        'config.evaluate.temperature': c.evaluate.temperature, 'config.evaluate.top_p': c.evaluate.top_p,
        'benchmarks': list(benchmarks),
        'questions': {name: fingerprint_questions(prompts) for name, prompts in benchmarks.items()},
        **program, **({'code': dict(code)} if code else {}),
        **({'config.task.turns': c.task.turns} if c.task.turns else {}),
    }  # fmt: skip


def fingerprint_questions(prompts: Sequence[Prompt]) -> str:
    """Hashes a benchmark's prompts and ground truths, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.tokens.tolist(), prompt.ground_truth]).encode())
    return digest.hexdigest()[:16]


def open_evaluation(output: Path, new: dict[str, Any], files: Sequence[Path]) -> None:
    """Writes settings.json into a new output directory, or checks that a used one is of the same evaluation.

    Raises ValueError, naming the differences, if the directory holds another evaluation, or if a sample file
    exists without settings.json.
    """
    path = output / 'settings.json'
    if path.is_file():
        old = json.loads(path.read_text('utf-8'))
        may_lack = {'code'} - old.keys()  # earlier versions did not record it
        names = [name for name in sorted((old.keys() | new) - may_lack) if old.get(name) != new.get(name)]
        if names:
            differing = [f'{name} ({old.get(name)!r} there, {new.get(name)!r} now)' for name in names]
            raise ValueError(
                f'{output} holds an evaluation with other settings; they differ in {", ".join(differing)}. '
                'Give another --output, or the settings of that evaluation'
            )
    else:
        foreign = [file.name for file in files if file.exists()]
        if foreign:
            raise ValueError(
                f'{output} holds {", ".join(foreign)}, but no settings.json; restore it, or give another '
                '--output'
            )
        output.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(new, indent=1) + '\n')


def done_before(file: Path, questions: int, samples: int, chunk: int) -> list[Question]:
    """Truncates `file` to whole chunks, and returns the questions that are already answered.

    `questions` is the benchmark's number of questions, `samples` the number of responses to each, and `chunk`
    the number of questions written at once. A chunk is written in one call, so only a kill during a write
    leaves part of one. Raises ValueError, without changing the file, if a row is not valid JSON or is out of
    place.
    """
    if not file.is_file():
        return []
    lines = file.read_bytes().split(b'\n')[:-1]  # the text after the last newline is empty or half a row
    if len(lines) < questions * samples:  # only the last chunk may be smaller
        lines = lines[: len(lines) // (chunk * samples) * chunk * samples]
    rows = []
    for i, line in enumerate(lines):
        try:
            row = json.loads(line)
        except ValueError as e:
            raise ValueError(f'{file}, line {i + 1}: not valid JSON ({flaw(e)}); remove the file') from None
        if i >= questions * samples or (row['question'], row['sample']) != divmod(i, samples):
            place = f'question {row["question"]}, sample {row["sample"]}'
            raise ValueError(f'{file}, line {i + 1}: {place} is out of place; remove the file')
        rows.append(row)
    os.truncate(file, sum(len(line) + 1 for line in lines))
    return [_question(rows[i : i + samples]) for i in range(0, len(rows), samples)]


def _question(rows: Sequence[dict[str, Any]]) -> Question:
    """The inverse of `sample_rows` for one question."""
    return Question(
        tuple(Verdict[row['verdict'].upper()] for row in rows),
        tuple(row['answer'] for row in rows),
        tuple(row['tokens'] for row in rows),
        tuple(row['finish'] == 'length' for row in rows),
    )


def sample_rows(benchmark: str, first: int, groups: Sequence[Group], tokenizer: Any) -> list[dict[str, Any]]:
    """Returns a JSON row for each sample of a chunk. `first` is the index of its first question."""
    rows = []
    for i, g in enumerate(groups, start=first):
        texts = tokenizer.batch_decode([r.tokens for r in g.responses])
        for j, (response, verdict, answer, text) in enumerate(
            zip(g.responses, g.verdicts, g.answers, texts, strict=True)
        ):
            rows.append({
                'benchmark': benchmark, 'question': i, 'sample': j, 'ground_truth': g.prompt.ground_truth,
                'response': text, 'verdict': verdict.name.lower(), 'answer': answer,
                'finish': response.finish, 'tokens': len(response.tokens),
                **({'spans': spans_of(response)} if response.by(Author.ENVIRONMENT).any() else {}),
            })  # fmt: skip
    return rows
