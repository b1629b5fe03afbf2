"""Mathematics problems from files or the Hugging Face hub: DeepScaleR and its like to train on, five benchmarks to test on.

A row becomes {'problem': str, 'answers': [str, ...]}, whatever public shape it has (shapes.py), and where the row has more, also

    before    the messages before the problem, such as a system message
    row       `data_source`, `ground_truth` and `extra_info` as in the row: what verl passes to a reward function

An answer is a string, a number, or a list of those, any of which is correct. Some data sets have rows without an answer, such as
proofs: they are left out of training and counted. So are repeats of a problem (repeats.py).

The hub's files were not available when this was written. Their columns are taken from their public descriptions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from absl import logging

from bapo_jax import hub
from bapo_jax.tasks import repeats
from bapo_jax.tasks.jsonl import short
from bapo_jax.tasks.rows import FILE_ENDINGS, rows_of
from bapo_jax.tasks.shapes import answer_text, beside, is_none, read_row, reads

BENCHMARKS = {
    'aime24': 'AIME 2024, 30 problems (hub: HuggingFaceH4/aime_2024)',
    'amc23': 'AMC 12 of 2022 and 2023, 83 problems (hub: AI-MO/aimo-validation-amc; the 40-problem amc23 sets are others)',
    'math500': 'MATH-500, 500 problems (hub: HuggingFaceH4/MATH-500)',
    'minerva': 'Minerva Math, 272 problems (hub: math-ai/minervamath)',
    'olympiadbench': 'OlympiadBench, open-ended, English, text only: 675 problems (hub: Hothan/OlympiadBench, which has 674)',
}
_HUB = {
    'aime24': 'HuggingFaceH4/aime_2024:train',
    'amc23': 'AI-MO/aimo-validation-amc:train',
    'math500': 'HuggingFaceH4/MATH-500:test',
    'minerva': 'math-ai/minervamath:test',
    'olympiadbench': 'Hothan/OlympiadBench/OE_TO_maths_en_COMP:train',
}
UNIFIED = 'math_test.jsonl.gz'  # a file in $BAPO_DATA with the rows of all benchmarks; the column `dataset` names each

# What DeepScaleR, MoPPS and the BAPO release add to a problem.
SUFFIX = " Let's think step by step and output the final answer within \\boxed{}."

Problem = dict  # {'problem': str, 'answers': list[str]}


def training_problems(source: str, *, limit: int, seed: int) -> list[Problem]:
    """The problems trained on, in the order of the source.

    `source` is a file (.parquet, .jsonl, .jsonl.gz, .json) or such files of the hub, owner/name[@revision][/subset][:split].
    Returns the first `limit`, or all where `limit` is 0 or less; `seed` is not used. The whole source is read and checked first.
    Rows without an answer and repeats are left out, before the limit, and warnings count them. Raises ValueError,
    FileNotFoundError or ConnectionError, which name the fault, its place and the remedy.
    """
    if str(source).endswith(FILE_ENDINGS) or Path(source).exists():
        files = [source]
    elif hub.is_dataset(source):
        files = hub.dataset_files(source, 'task.train', FILE_ENDINGS)
    else:
        raise ValueError(
            f"task.train is {source!r}; expected a file ending in {', '.join(FILE_ENDINGS)}, or a hub data set "
            "'owner/name[:split]' such as agentica-org/DeepScaleR-Preview-Dataset"
        )
    problems = repeats.left_out((p for file in files for p in _problems(file, blank_answers=True)), source)
    return problems[:limit] if limit > 0 else problems


def benchmark(name: str) -> list[Problem]:
    """A test set, all its rows in order: one of `BENCHMARKS`, or a file or name of the hub as in `training_problems`.

    Where the environment variable BAPO_DATA names a directory, the benchmark is `NAME.jsonl` or the like there, or the rows of
    `math_test.jsonl.gz` with that `dataset`. Raises FileNotFoundError where the directory has neither. Without the variable, the
    benchmark is downloaded from the hub.
    """
    if str(name).endswith(FILE_ENDINGS):
        return read_problems(name)
    if hub.is_dataset(name):
        return [p for path in benchmark_files(name, FILE_ENDINGS) for p in read_problems(path)]
    if name not in BENCHMARKS:
        known = ', '.join(BENCHMARKS)
        raise ValueError(
            f'unknown math benchmark {name!r}; known: {known}, or a file ending in {", ".join(FILE_ENDINGS)}, or a hub data set '
            "'owner/name[:split]'"
        )
    if folder := os.environ.get('BAPO_DATA'):
        for ending in FILE_ENDINGS:
            if (file := Path(folder, name + ending)).exists():
                return read_problems(file)
        if (file := Path(folder, UNIFIED)).exists() and (problems := read_problems(file, dataset=name)):
            return problems
        raise FileNotFoundError(
            f'BAPO_DATA={folder}: neither {name}.jsonl, {name}.jsonl.gz or {name}.parquet nor rows of {name} in {UNIFIED}; add one '
            'of them, give a file as the benchmark, or unset BAPO_DATA to download it'
        )
    return [p for path in benchmark_files(_HUB[name], FILE_ENDINGS) for p in read_problems(path)]


def benchmark_files(name: str, endings: tuple[str, ...]) -> list[Path]:
    """A benchmark's files from the hub; raises as `hub.dataset_files`."""
    try:
        return hub.dataset_files(name, 'evaluate.benchmarks', endings)
    except ConnectionError as error:
        raise ConnectionError(f'{error}. Benchmarks are also looked for in the folder that BAPO_DATA names') from error


def read_problems(path: str | Path, *, dataset: str | None = None) -> list[Problem]:
    """All rows of a file, or only those with the given `dataset` in that column (perhaps none).

    A row without an answer raises ValueError.
    """
    return list(_problems(path, dataset=dataset))


def _problems(path: str | Path, *, dataset: str | None = None, blank_answers: bool = False) -> Iterator[Problem]:
    """The problems of a file; with `blank_answers` rows without an answer are left out, and a warning counts them."""
    rows, blank = 0, []
    for where, row in rows_of(path, '"problem" and "answer"', lambda column: reads(column) or column == 'dataset'):
        rows += 1
        if dataset is None or row.get('dataset') == dataset:
            problem = question_of_row(row, where, blank_answers)
            if problem is None:
                blank.append(where)
            else:
                yield problem
    if blank and len(blank) == rows:
        raise ValueError(
            f'{path}: none of its {rows} rows has an answer; give a file whose "answer" is filled in, or whose worked solutions '
            'mark their result by \\boxed{} or ####'
        )
    if blank:
        logging.warning('%d of %d rows have no answer and are left out, the first of them %s', len(blank), rows, blank[0])


def question_of_row(row: dict, where: str, blank_answers: bool) -> Problem | None:
    """The problem of a row in any shape; None where it has no answer and `blank_answers` allows that."""
    chat, answer, column = read_row(row, where)
    if blank_answers and is_none(answer):
        return None
    answers = [answer_text(a) for a in (answer if isinstance(answer, list) else [answer])]
    if not answers or not all(answers):
        raise ValueError(
            f'{where}: "{column}" must be an answer, or a list of accepted ones, each a text or a number, got {short(answer)}; '
            'mend or drop the row'
        )
    problem = {'problem': chat[-1]['content'], 'answers': list(dict.fromkeys(answers))}
    return problem | ({'before': chat[:-1]} if chat[:-1] else {}) | ({'row': told} if (told := beside(row)) else {})
