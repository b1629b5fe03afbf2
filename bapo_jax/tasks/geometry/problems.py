r"""Geometry3K: problems with diagrams, from the Hugging Face hub, parquet files, or InterGPS's folders.

A row becomes {'problem': str, 'answers': [str, ...], 'images': [reference, ...]}. The problem has one <image>
for each image. A reference (images.py) says where an image is; no image is kept in memory. Three sources are
read:

    hub            hiyouga/geometry3k, with the splits train, validation and test
    .parquet       a question and an answer as in shapes.py; in `images`, `image` or `image_png` one image or
                   a list of them, each as bytes or as {bytes, path}
    a folder       one folder per problem, with ID/data.json and ID/img_diagram.png, as in InterGPS

In data.json, `annotat_text` is the problem, and the letter `answer` picks one of `choices`; the hub's files
were made in this way. The hub's files were not available when this was written, so their columns are taken
from their public description.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from bapo_jax.machine import hub
from bapo_jax.tasks import repeats
from bapo_jax.tasks.images import file_image, open_image, parquet_image_rows, row_images
from bapo_jax.tasks.jsonl import short, shown
from bapo_jax.tasks.mathematics.problems import benchmark_files, question_of_row
from bapo_jax.tasks.shapes import COLUMNS

__all__ = [
    'BENCHMARKS',
    'PLACEHOLDER',
    'SUFFIX',
    'benchmark',
    'open_image',
    'read_problems',
    'training_problems',
]

BENCHMARKS = {
    'geo3k_val': 'Geometry3K validation, 300 problems (hub: hiyouga/geometry3k)',
    'geo3k_test': 'Geometry3K test, 601 problems (hub: hiyouga/geometry3k)',
}
_HUB = {'geo3k_val': 'hiyouga/geometry3k:validation', 'geo3k_test': 'hiyouga/geometry3k:test'}

# What verl, EasyR1 and the BAPO release add to a problem.
SUFFIX = (
    ' You FIRST think about the reasoning process as an internal monologue and then provide the final '
    'answer. The reasoning '
    'process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}.'
)
PLACEHOLDER = '<image>'
VISION_TOKENS = ('<|vision_start|>', '<|image_pad|>', '<|vision_end|>')

Problem = dict  # {'problem': str, 'answers': list[str], 'images': list[reference]}


def training_problems(source: str, *, limit: int, seed: int) -> list[Problem]:
    """Returns the problems to train on, in the order of the source; folders in the order of their numbers.

    `source` is a parquet file, a folder of problems or one with the folder `train`, or parquet files on the
    hub, owner/name[@revision][/subset][:split]. Repeats are left out, and a warning counts them. Returns the
    first `limit`, or all if `limit` is 0 or less; `seed` is not used. The whole source is read first, and
    every image is decoded once. Raises ValueError or OSError (FileNotFoundError, ConnectionError), naming the
    fault, its location and the remedy.
    """
    path = Path(source)
    if str(source).endswith('.parquet') or path.exists():
        problems = read_problems(path / 'train' if (path / 'train').is_dir() else path)
    elif hub.is_dataset(source):
        problems = _read_all(hub.dataset_files(source, 'task.train', ('.parquet',)))
    else:
        raise ValueError(
            f'task.train is {source!r}; expected a .parquet file, a folder of problems, or a hub data set '
            "'owner/name[:split]' such as hiyouga/geometry3k"
        )
    problems = repeats.left_out(problems, source)
    return problems[:limit] if limit > 0 else problems


def benchmark(name: str) -> list[Problem]:
    """Returns all rows of a test set, in order.

    `name` is one of `BENCHMARKS`, a .parquet file, or a name on the hub as in `training_problems`. If the
    environment variable BAPO_DATA names a directory, the benchmark is the file `NAME.parquet` or the folder
    `NAME` there. Raises FileNotFoundError if the directory has neither. Without the variable, it is
    downloaded from the hub.
    """
    if str(name).endswith('.parquet'):
        return read_problems(name)
    if hub.is_dataset(name):
        return _read_all(hub.dataset_files(name, 'evaluate.benchmarks', ('.parquet',)))
    if name not in BENCHMARKS:
        raise ValueError(
            f'unknown geometry benchmark {name!r}; choose one of {", ".join(BENCHMARKS)}, a .parquet file or '
            'a hub data set '
            "'owner/name[:split]'"
        )
    if folder := os.environ.get('BAPO_DATA'):
        for path in (Path(folder, f'{name}.parquet'), Path(folder, name)):
            if path.exists():
                return read_problems(path)
        raise FileNotFoundError(
            f'BAPO_DATA={folder} has neither {name}.parquet nor a folder {name}; add one of them, name a '
            'file as the benchmark, or unset BAPO_DATA to download it'
        )
    return _read_all(benchmark_files(name, _HUB[name], ('.parquet',)))


def _read_all(files: list[Path]) -> list[Problem]:
    return [p for file in files for p in read_problems(file)]


def read_problems(path: str | Path) -> list[Problem]:
    """Returns all problems of a parquet file, or of a folder with one folder per problem."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f'{path}: no such file; check the path')
    if path.is_dir():
        return [_folder_problem(folder) for folder in _folders(path)]
    if path.suffix != '.parquet':
        raise ValueError(
            f'{path}: expected a .parquet file, or a folder with ID/data.json and ID/img_diagram.png for '
            'each problem'
        )
    problems = []
    for row, column, values in parquet_image_rows(path, COLUMNS):
        where = f'{path}, row {row + 1}'
        question = question_of_row(values, where, blank_answers=False)
        problems.append(_with_images(question, row_images(values[column], path, row, column), where))
    if not problems:
        raise ValueError(f'{path}: no rows; expected columns "images", "problem" and "answer"')
    return problems


def _with_images(question: dict, images: list[dict], where: str) -> Problem:
    """Returns the problem with one placeholder per image; if it lacks one, a single image goes first."""
    text = question['problem']
    if found := [token for token in VISION_TOKENS if token in text]:
        raise ValueError(
            f'{where}: the problem contains {found[0]}, which the model would read as a part of an image; '
            f'write {PLACEHOLDER} instead'
        )
    if PLACEHOLDER not in text and len(images) == 1:
        text = PLACEHOLDER + text
    if (count := text.count(PLACEHOLDER)) != len(images):
        raise ValueError(
            f'{where}: the problem has {count} {PLACEHOLDER} but {len(images)} in "images"; write one where '
            'each image belongs'
        )
    return {**question, 'problem': text, 'images': images}


# ---- InterGPS's folders ------------------------------------------------------------------------------------


def _folders(path: Path) -> list[Path]:
    folders = [f for f in path.iterdir() if f.is_dir() and not f.name.startswith('.')]
    if not any((f / 'data.json').exists() for f in folders):
        raise ValueError(
            f'{path}: no ID/data.json in this folder; give the folder of one split, such as '
            'geometry3k/train, or a .parquet file'
        )
    return sorted(folders, key=lambda f: (int(f.name) if f.name.isdecimal() else -1, f.name))


def _folder_problem(folder: Path) -> Problem:
    where = str(folder / 'data.json')
    try:
        row = json.loads((folder / 'data.json').read_text('utf-8'))
        json.dumps(row, ensure_ascii=False).encode()  # "\\ud800" is valid JSON, but not a character
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f'{where}: not a readable JSON file ({short(error)}); download it again or drop the folder'
        ) from error
    if not isinstance(row, dict):
        raise ValueError(
            f'{where}: expected an object with "annotat_text", "choices" and "answer", got {shown(row)}'
        )
    choices, letter = row.get('choices'), row.get('answer')
    number = 'ABCDEFGH'.find(letter) if isinstance(letter, str) and len(letter) == 1 else -1
    if not isinstance(choices, list) or not 0 <= number < len(choices):
        raise ValueError(
            f'{where}: "answer" must be the letter of one of the "choices", got {shown(letter)} and '
            f'{shown(choices)}; correct or drop the folder'
        )
    text = row.get('annotat_text') or row.get('problem_text')
    question = question_of_row({'problem': text, 'answer': choices[number]}, where, blank_answers=False)
    return _with_images(question, [file_image(folder / 'img_diagram.png')], where)
