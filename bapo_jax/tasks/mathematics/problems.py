"""Mathematics problems from files or the Hugging Face hub: training sets like DeepScaleR and five benchmarks.

A row in any public shape (shapes.py) becomes {'problem': str, 'answers': [str, ...]}, with two optional keys:

    before    the messages before the problem, such as a system message
    row       the row's `data_source`, `ground_truth` and `extra_info`, which verl passes to a reward function

An answer is a string, a number, or a list of those, any of which is correct. Some data sets have rows without
an answer, such as proofs: they are left out of training and counted. So are repeated problems (repeats.py).

The hub's files were not available when this was written; the columns follow their public descriptions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from absl import logging

from bapo_jax.machine import hub
from bapo_jax.tasks import repeats
from bapo_jax.tasks.jsonl import short
from bapo_jax.tasks.rows import FILE_ENDINGS, rows_of
from bapo_jax.tasks.shapes import answer_text, beside, is_none, read_row, reads

BENCHMARKS = {
    'aime24': 'AIME 2024, 30 problems (hub: HuggingFaceH4/aime_2024)',
    'amc23': 'AMC 12 of 2022 and 2023, 83 problems '
    '(hub: AI-MO/aimo-validation-amc; the 40-problem amc23 sets are others)',
    'math500': 'MATH-500, 500 problems (hub: HuggingFaceH4/MATH-500)',
    'minerva': 'Minerva Math, 272 problems (hub: math-ai/minervamath)',
    'olympiadbench': 'OlympiadBench, open-ended, English, text only: 675 problems '
    '(hub: Hothan/OlympiadBench, which has 674)',
}
_HUB = {
    'aime24': 'HuggingFaceH4/aime_2024:train',
    'amc23': 'AI-MO/aimo-validation-amc:train',
    'math500': 'HuggingFaceH4/MATH-500:test',
    'minerva': 'math-ai/minervamath:test',
    'olympiadbench': 'Hothan/OlympiadBench/OE_TO_maths_en_COMP:train',
}
# A file in $BAPO_DATA with the rows of all benchmarks; the column `dataset` names the benchmark.
UNIFIED = 'math_test.jsonl.gz'

# The request that DeepScaleR, MoPPS and the BAPO release append to a problem.
SUFFIX = " Let's think step by step and output the final answer within \\boxed{}."

Problem = dict  # {'problem': str, 'answers': list[str]}


def training_problems(source: str, *, limit: int, seed: int) -> list[Problem]:
    """Returns the training problems, in the order of the source.

    `source` is a file (.parquet, .jsonl, .jsonl.gz, .json) or a hub data set of such files,
    owner/name[@revision][/subset][:split]. Returns the first `limit` problems, or all if `limit` is 0 or
    less; `seed` is not used. The whole source is read and checked first. Rows without an answer and repeats
    are left out before the limit applies, and warnings count them. Raises ValueError, FileNotFoundError or
    ConnectionError, which name the fault, its place and the remedy.
    """
    if str(source).endswith(FILE_ENDINGS) or Path(source).exists():
        files = [source]
    elif hub.is_dataset(source):
        files = hub.dataset_files(source, 'task.train', FILE_ENDINGS)
    else:
        raise ValueError(
            f'task.train is {source!r}; expected a file ending in {", ".join(FILE_ENDINGS)}, or a hub data '
            'set '
            "'owner/name[:split]' such as agentica-org/DeepScaleR-Preview-Dataset"
        )
    problems = repeats.left_out((p for file in files for p in _problems(file, blank_answers=True)), source)
    return problems[:limit] if limit > 0 else problems


def benchmark(name: str) -> list[Problem]:
    """Returns all rows of a test set, in order.

    `name` is one of `BENCHMARKS`, or a file or hub data set as in `training_problems`. If the environment
    variable BAPO_DATA names a directory, a benchmark is read from `NAME.jsonl` or the like there, or from the
    rows of `math_test.jsonl.gz` with that `dataset`. Raises FileNotFoundError if the directory has neither.
    Without the variable, the benchmark is downloaded from the hub.
    """
    if str(name).endswith(FILE_ENDINGS):
        return read_problems(name)
    if hub.is_dataset(name):
        files = hub.dataset_files(name, 'evaluate.benchmarks', FILE_ENDINGS)
        return [p for path in files for p in read_problems(path)]
    if name not in BENCHMARKS:
        known = ', '.join(BENCHMARKS)
        raise ValueError(
            f'unknown math benchmark {name!r}; choose one of {known}, a file ending in '
            f'{", ".join(FILE_ENDINGS)}, or a hub '
            "data set 'owner/name[:split]'"
        )
    if folder := os.environ.get('BAPO_DATA'):
        for ending in FILE_ENDINGS:
            if (file := Path(folder, name + ending)).exists():
                return read_problems(file)
        if (file := Path(folder, UNIFIED)).exists() and (problems := read_problems(file, dataset=name)):
            return problems
        raise FileNotFoundError(
            f'BAPO_DATA={folder} has neither {name}.jsonl, {name}.jsonl.gz or {name}.parquet nor rows of '
            f'{name} in {UNIFIED}; '
            'add one of them, name a file as the benchmark, or unset BAPO_DATA to download it'
        )
    return [p for path in benchmark_files(name, _HUB[name], FILE_ENDINGS) for p in read_problems(path)]


def benchmark_files(name: str, dataset: str, endings: tuple[str, ...]) -> list[Path]:
    """Returns the hub's files of a known benchmark; raises the same errors as `hub.dataset_files`."""
    try:
        return hub.dataset_files(dataset, 'evaluate.benchmarks', endings)
    except ConnectionError as error:
        raise ConnectionError(
            f'{error}. Or put it into a folder as {name}{endings[0]} and set the environment variable '
            'BAPO_DATA to that folder'
        ) from error


def read_problems(path: str | Path, *, dataset: str | None = None) -> list[Problem]:
    """Returns all rows of a file, or only those (possibly none) whose `dataset` column has the given value.

    Raises ValueError if a row has no answer.
    """
    return list(_problems(path, dataset=dataset))


def _problems(
    path: str | Path, *, dataset: str | None = None, blank_answers: bool = False
) -> Iterator[Problem]:
    """Yields the problems of a file; `blank_answers` skips rows without an answer, with a warning."""
    rows, blank = 0, []
    for where, row in rows_of(
        path, '"problem" and "answer"', lambda column: reads(column) or column == 'dataset'
    ):
        rows += 1
        if dataset is None or row.get('dataset') == dataset:
            problem = question_of_row(row, where, blank_answers)
            if problem is None:
                blank.append(where)
            else:
                yield problem
    if blank and len(blank) == rows:
        raise ValueError(
            f'{path}: none of its {rows} rows has an answer; fill in the column "answer", or give a file '
            'whose worked solutions mark the result with \\boxed{} or ####'
        )
    if blank:
        logging.warning(
            '%d of %d rows have no answer and are left out; the first is %s', len(blank), rows, blank[0]
        )


def question_of_row(row: dict, where: str, blank_answers: bool) -> Problem | None:
    """Returns the problem of a row in any shape; None if it has no answer and `blank_answers` allows that."""
    chat, answer, column = read_row(row, where)
    if blank_answers and is_none(answer):
        return None
    answers = [answer_text(a) for a in (answer if isinstance(answer, list) else [answer])]
    if not answers or not all(answers):
        raise ValueError(
            f'{where}: "{column}" must be an answer or a list of accepted answers, each a string or a '
            f'number, got {short(answer)}; correct or drop the row'
        )
    problem = {'problem': chat[-1]['content'], 'answers': list(dict.fromkeys(answers))}
    return (
        problem
        | ({'before': chat[:-1]} if chat[:-1] else {})
        | ({'row': told} if (told := beside(row)) else {})
    )
