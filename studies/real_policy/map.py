"""The map: what a pretrained model can do before any training, and which sets leave a method room.

    BAPO_DATA=DIR python -m studies.real_policy.map sets FOLDER       # writes the sets; DIR: tasks/mathematics/problems.py
    python -m studies.real_policy.map ask FOLDER MODEL --engine=vllm  # asks a model; continues where it was cut
    python -m studies.real_policy.map row FOLDER MODEL                # appends what it answered to map.jsonl
    python -m studies.real_policy.map                                 # writes the table into page.md

A vLLM server on two cores needs VLLM_CPU_OMP_THREADS_BIND=0-1, else it computes on one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np

from bapo_jax.machine.files import replace_part
from bapo_jax.scores import wilson_interval
from bapo_jax.tasks import arithmetic
from bapo_jax.tasks.countdown import problems as countdown_problems
from benchmarks.host.load import cpu_name
from studies.lib.rows import Row, append_row, markdown_table, rows_in

HERE = Path(__file__).resolve().parent
ROWS, PAGE = HERE / 'map.jsonl', HERE / 'page.md'
SAMPLES, GROUP = 16, 8
TASKS = {  # how it is asked (map_config.py): most tokens of a response, and the sets
    'math': (384, ('math_1_2', 'math_3_5')),
    'countdown': (160, ('countdown_2', 'countdown_3', 'countdown_4')),
    'arithmetic': (40, ('arithmetic',)),
    'countdown_examples': (40, ('countdown_2', 'countdown_3', 'countdown_4', 'countdown_2_or_3')),
}


def math_questions(file: str, dataset: str, levels: range, count: int | None = None) -> list[dict]:
    """The first `count` problems of MATH of these levels in an order drawn from seed 0."""
    with gzip.open(Path(os.environ['BAPO_DATA']) / file, 'rt', encoding='utf-8') as lines:
        rows = [
            row
            for row in map(json.loads, lines)
            if row['dataset'] == dataset and row['meta']['level'] in levels
        ]
    order = np.random.default_rng(0).permutation(len(rows))[:count]
    return [{'problem': rows[i]['problem'], 'answer': rows[i]['answer']} for i in order]


def countdown_questions(numbers: tuple[int, ...], count: int) -> list[dict]:
    """Problems of so many numbers, as the task's files have them."""
    problems = countdown_problems.generate(count, seed=sum(numbers), sizes=numbers)
    return [{'nums': problem['numbers'], 'target': problem['target']} for problem in problems]


def write_sets(folder: Path) -> None:
    """A file a set, but for arithmetic, whose test questions the task itself has; and what math_on_cpu.py
    trains on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sets = {
        'math_1_2': math_questions('math_test.jsonl.gz', 'math500', range(1, 3), 32),
        'math_3_5': math_questions('math_test.jsonl.gz', 'math500', range(3, 6), 32),
        'math_train_1_2': math_questions('math_train.jsonl.gz', 'math_train_7474', range(1, 3)),
        **{f'countdown_{n}': countdown_questions((n,), 48) for n in (2, 3, 4)},
        'countdown_2_or_3': countdown_questions((2, 3), 48),
    }
    for name, questions in sets.items():
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps(q) + '\n' for q in questions), 'utf-8')


def files_of(task: str, folder: Path) -> list[str]:
    """The benchmarks of a task as `evaluate` takes them."""
    return (
        list(arithmetic.BENCHMARKS)
        if task == 'arithmetic'
        else [str(folder / f'{name}.jsonl') for name in TASKS[task][1]]
    )


def answers_of(folder: Path, model: Path, task: str) -> Path:
    return folder / model.name / task


def ask(folder: Path, model: Path, engine: str) -> None:
    """Scores the model at T = 1 on every set, by the command that anybody scores a model by."""
    for task, (tokens, _) in TASKS.items():
        subprocess.run(
            [
                sys.executable, '-m', 'bapo_jax.evaluate', f'--checkpoint={model}', f'--config={HERE / "map_config.py"}:{task}',
                f'--benchmarks={",".join(files_of(task, folder))}', f'--samples={SAMPLES}', '--temperature=1', f'--engine={engine}',
                f'--max_response_tokens={tokens}', f'--output={answers_of(folder, model, task)}',
            ],
            check=True,
        )  # fmt: skip


def row_of(folder: Path, model: Path) -> Row:
    """What the map keeps of a model: of every set each question's count of right answers, mean length and
    share cut.
    """
    sets = {}
    for task in TASKS:
        found = json.loads((answers_of(folder, model, task) / 'summary.json').read_text('utf-8'))
        for name, measured in found['benchmarks'].items():
            shown = Path(name).stem + ', solved ones before it' * (task == 'countdown_examples')
            sets[shown] = {part: measured[part] for part in ('correct', 'length', 'truncated', 'unparseable')}
        engine = found['engine']
    return {'model': model.name, 'engine': engine, 'sets': sets, 'cpu': cpu_name(), 'date': str(date.today())}


def p_of(correct: int, right: int) -> float:
    """The chance that of GROUP answers drawn from SAMPLES, of which `correct` are right, `right` are."""
    ways = math.comb(correct, right) * math.comb(SAMPLES - correct, GROUP - right)
    return ways / math.comb(SAMPLES, GROUP)


def all_wrong(correct: np.ndarray) -> float:
    """P(0 of 8)."""
    return float(np.mean([p_of(c, 0) for c in correct]))


def mixed(correct: np.ndarray) -> float:
    """P(mixed): neither all wrong nor all right."""
    return float(np.mean([1 - p_of(c, 0) - p_of(c, GROUP) for c in correct]))


def mixed_after_failure(correct: np.ndarray) -> float:
    """P(mixed | 0 of 8): of 16 answers split in two halves, the one is all wrong and the other mixed. nan
    where none is all wrong.
    """
    failed = np.array([p_of(c, 0) for c in correct])
    return float(failed @ ((correct > 0) & (correct < GROUP)) / failed.sum()) if failed.sum() else math.nan


def mean(correct: np.ndarray) -> float:
    return float(np.mean(correct) / SAMPLES)


def in_percent(measure: Callable[[np.ndarray], float], correct: np.ndarray) -> str:
    """A measure with its 95 % bootstrap interval over questions; Wilson's where all questions are alike."""
    rng = np.random.default_rng(0)
    drawn = [measure(correct[rng.integers(len(correct), size=len(correct))]) for _ in range(2000)]
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    if low == high:
        low, high = wilson_interval(low, len(correct))
    return f'{100 * measure(correct):.1f} ({100 * low:.1f}–{100 * high:.1f})'


def table(rows: list[Row]) -> str:
    """A line a model and set; those on which no answer was right are named below."""
    head = [
        'model',
        'set',
        'questions',
        'mean',
        'P(0 of 8)',
        'P(mixed)',
        'P(mixed, given 0 of 8)',
        'tokens',
        'cut',
    ]
    lines, nothing = [], []
    for row in rows:
        for name, of_set in row['sets'].items():
            name, correct = (
                name.replace(', solved ones before it', ' after examples'),
                np.array(of_set['correct']),
            )
            if not correct.any():
                nothing.append(f'{row["model"]} on {name}')
                continue
            measures = [
                in_percent(measure, correct) for measure in (mean, all_wrong, mixed, mixed_after_failure)
            ]
            cells = [
                row['model'],
                name,
                str(len(correct)),
                *measures,
                f'{of_set["length"]:.0f}',
                f'{100 * of_set["truncated"]:.0f}',
            ]
            lines.append(cells)
    return f'{markdown_table(head, lines)}\n\nNo answer was right: {", ".join(nothing)}.'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('what', choices=['sets', 'ask', 'row', 'table'], nargs='?', default='table')
    parser.add_argument('folder', type=Path, nargs='?')
    parser.add_argument('model', type=Path, nargs='?')
    parser.add_argument('--engine', choices=['jax', 'vllm'], default='jax')
    given = parser.parse_args()
    if given.what != 'table' and not given.folder or given.what in ('ask', 'row') and not given.model:
        parser.error(f'{given.what} needs a folder' + ' and a model' * (given.what != 'sets'))
    if given.what == 'sets':
        write_sets(given.folder)
    elif given.what == 'ask':
        ask(given.folder, given.model, given.engine)
    elif given.what == 'row':
        append_row(ROWS, row_of(given.folder, given.model))
    if given.what in ('row', 'table'):
        replace_part(PAGE, 'the map', table(rows_in(ROWS)) + '\n')


if __name__ == '__main__':
    main()
