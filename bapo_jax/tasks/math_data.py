"""Mathematics problems from files or the Hugging Face hub: DeepScaleR and its like to train on, five benchmarks to test on.

A row becomes {'problem': str, 'answers': [str, ...]}. Three shapes of row are read:

    `problem`, `answer`                          DeepScaleR and the unified benchmark file
    `question`, `answer` or `final_answer`       some benchmarks; of GSM8K's answers what stands behind ####
    `prompt`, `reward_model.ground_truth`        verl: the first is a chat, the second the answer

An answer is a string, a number, or a list of those, any of which is correct. DeepScaleR has rows whose answer is empty: they are
left out of training and counted.

The hub's files were not available when this was written. Their columns are taken from their public descriptions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from absl import logging

from bapo_jax import hub
from bapo_jax.tasks.jsonl import jsonl_rows, short

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
FILE_ENDINGS = ('.parquet', '.jsonl', '.jsonl.gz', '.json')
UNIFIED = 'math_test.jsonl.gz'  # a file in $BAPO_DATA with the rows of all benchmarks; the column `dataset` names each

# What DeepScaleR, MoPPS and the BAPO release add to a problem. verl's files contain it already, and it must not come twice.
SUFFIX = " Let's think step by step and output the final answer within \\boxed{}."

Problem = dict  # {'problem': str, 'answers': list[str]}


def training_problems(source: str, *, limit: int, seed: int) -> list[Problem]:
    """The problems trained on, in the order of the source.

    `source` is a file (.parquet, .jsonl, .jsonl.gz, .json) or such files of the hub, owner/name[@revision][/subset][:split].
    Returns the first `limit`, or all where `limit` is 0 or less; `seed` is not used. The whole source is read and checked first.
    Repeats stay. Rows without an answer are left out, and a warning counts them. Raises ValueError, FileNotFoundError or
    ConnectionError, which name the fault, its place and the remedy.
    """
    if str(source).endswith(FILE_ENDINGS) or Path(source).exists():
        problems = read_problems(source, blank_answers=True)
    elif hub.is_dataset(source):
        files = hub.dataset_files(source, 'task.train', FILE_ENDINGS)
        problems = [p for path in files for p in read_problems(path, blank_answers=True)]
    else:
        raise ValueError(
            f"task.train is {source!r}; expected a file ending in {', '.join(FILE_ENDINGS)}, or a hub data set "
            "'owner/name[:split]' such as agentica-org/DeepScaleR-Preview-Dataset"
        )
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


def read_problems(path: str | Path, *, dataset: str | None = None, blank_answers: bool = False) -> list[Problem]:
    """All rows of a file, or only those with the given `dataset` in that column (perhaps none).

    A row without an answer (null or blank) raises ValueError; with `blank_answers` it is left out with a warning.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f'{path}: no such file; check the path')
    if not path.is_file() or not path.name.endswith(FILE_ENDINGS):
        raise ValueError(f'{path}: expected a file ending in {", ".join(FILE_ENDINGS)}')
    rows = list(_parquet_rows(path) if path.suffix == '.parquet' else jsonl_rows(path, '"problem" and "answer"'))
    if not rows:
        raise ValueError(f'{path}: no rows; expected columns "problem" and "answer"')
    wanted = [(where, row) for where, row in rows if dataset is None or row.get('dataset') == dataset]
    problems = [question_of_row(row, where, blank_answers) for where, row in wanted]
    blank = [where for (where, _), problem in zip(wanted, problems) if problem is None]
    if blank and len(blank) == len(problems):
        raise ValueError(f'{path}: none of its {len(rows)} rows has an answer; give a file whose "answer" is filled in')
    if blank:
        logging.warning('%d of %d rows have no answer and are left out, the first of them %s', len(blank), len(rows), blank[0])
    return [p for p in problems if p is not None]


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict]]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            wanted = {'problem', 'question', 'answer', 'final_answer', 'prompt', 'reward_model', 'dataset'}
            table = file.read(columns=[c for c in file.schema_arrow.names if c in wanted])
            columns = file.schema_arrow.names
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(f'{path}: not a readable parquet file ({short(error)}); fetch or write it again') from error
    for first in range(0, table.num_rows, 1000):
        try:
            rows = table.slice(first, 1000).to_pylist()
        except UnicodeDecodeError:
            bad = next(i for i in range(first, table.num_rows) if not _decodes(table.slice(i, 1)))
            raise ValueError(f'{path}, row {bad + 1}: not UTF-8 text; save the file as UTF-8') from None
        # errors name the columns of the file, whether they are read or not
        yield from ((f'{path}, row {first + i}', {**dict.fromkeys(columns), **row}) for i, row in enumerate(rows, start=1))


def _decodes(table: pyarrow.Table) -> bool:
    try:
        table.to_pylist()
    except UnicodeDecodeError:
        return False
    return True


def question_of_row(row: dict, where: str, blank_answers: bool, *, suffix: str = SUFFIX) -> Problem | None:
    """The problem of a row in any of the three shapes; None where it has no answer and `blank_answers` allows that.

    `suffix` is the instruction that the task's template adds: verl's rows have it already, and lose it here.
    """
    if 'reward_model' in row or ('prompt' in row and 'problem' not in row and 'question' not in row):
        problem, answer, column = _verl_question(row, where, suffix), _verl_answer(row, where), 'reward_model.ground_truth'
    else:
        problem = _column(row, ('problem', 'question'), where)
        column = 'answer' if 'answer' in row or 'final_answer' not in row else 'final_answer'
        answer = _column(row, (column,), where)
    if not isinstance(problem, str) or not problem.strip():
        raise ValueError(f'{where}: the problem must be a text, got {short(problem)}; mend or drop the row')
    if blank_answers and (answer is None or (isinstance(answer, str) and not answer.strip())):
        return None
    answers = [_text(a) for a in (answer if isinstance(answer, list) else [answer])]
    if not answers or not all(answers):
        raise ValueError(
            f'{where}: "{column}" must be an answer, or a list of accepted ones, each a text or a number, got {short(answer)}; '
            'mend or drop the row'
        )
    return {'problem': problem.strip(), 'answers': list(dict.fromkeys(answers))}


def _column(row: dict, names: tuple[str, ...], where: str) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise ValueError(f'{where}: column {names[0]!r} is missing; the row has {short(", ".join(row))}; rename or add it')


def _verl_question(row: dict, where: str, suffix: str) -> Any:
    """The user's last message in verl's chat, without the instruction that the prompt template adds."""
    prompt = _column(row, ('prompt',), where)
    if isinstance(prompt, list):
        said = [m.get('content') for m in prompt if isinstance(m, dict) and m.get('role') == 'user']
        prompt = said[-1] if said else None
    return prompt.rstrip().removesuffix(suffix.strip()) if isinstance(prompt, str) else prompt


def _verl_answer(row: dict, where: str) -> Any:
    model = _column(row, ('reward_model',), where)
    if not isinstance(model, dict) or 'ground_truth' not in model:
        raise ValueError(
            f'{where}: "reward_model" must be an object with "ground_truth", got {short(model)}; mend or drop the row'
        )
    return model['ground_truth']


def _text(answer: object) -> str | None:
    """An answer as text, 142.0 as '142'; None where it is no answer."""
    if isinstance(answer, str):
        return answer.rpartition('\n#### ')[2].strip() or None
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if not isinstance(answer, float) or not math.isfinite(answer):
        return None
    return str(int(answer)) if answer == int(answer) else repr(answer)
