"""Writes a run's rollouts and evaluations as logs for the viewer and scripts of Inspect (inspect_ai).

    python -m bapo_jax.report.inspect_log RUN [--step=N] [--output=DIR]
    inspect view --log-dir DIR

    RUN/rollouts/STEP.jsonl.zst   one log with every response of the step; a
                                  group's responses are a sample's epochs
    RUN/evaluation/STEP/          one log per benchmark with every response of
                                  a finished `evaluate`
    RUN/evals/STEP.json           one log per benchmark with only the scores;
                                  training keeps no such responses

Inspect need not be installed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zstandard

from bapo_jax.groups import Verdict
from bapo_jax.machine import terminal
from bapo_jax.machine.events import utc
from bapo_jax.machine.files import write_text
from bapo_jax.machine.help import CommandParser
from bapo_jax.machine.output import ends_with_its_reader, open_streams
from bapo_jax.run.directory import read_run_config
from bapo_jax.run.log.responses import rollout_lines
from bapo_jax.scores import Question, summary

_VALUES = {'correct': 'C', 'wrong': 'I', 'unparseable': 'N'}  # Inspect scores N, no answer, as 0


def group_rows(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Splits a row of rollouts/ into one row per response, with the names that evaluations use."""
    of_group = {
        'question': group['prompt_id'],
        **{name: group[name] for name in ('prompt', 'ground_truth', 'use')},
    }
    columns = {
        'response': 'responses',
        'verdict': 'verdicts',
        'reward': 'rewards',
        'finish': 'finish',
        'version': 'versions',
    }
    answers = group.get('answers') or [None] * len(group['responses'])  # earlier versions did not store them
    for answer, *values in zip(answers, *(group[name] for name in columns.values()), strict=True):
        yield {**of_group, 'answer': answer, **dict(zip(columns, values, strict=True))}


def group_question(group: dict[str, Any]) -> Question:
    """Returns what the scores need from a row of rollouts/, which has no lengths."""
    verdicts = tuple(Verdict[name.upper()] for name in group['verdicts'])
    return Question(verdicts, (None,) * len(verdicts), (0,) * len(verdicts), (False,) * len(verdicts))


def target(truth: dict[str, Any]) -> str | list[str]:
    """Returns the right answer as text: accepted answers, a target, or the whole ground truth as JSON."""
    found = next(
        (truth[name] for name in ('answers', 'target', 'answer') if name in truth), json.dumps(truth)
    )
    return [str(answer) for answer in found] if isinstance(found, list) else str(found)


def samples(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns an EvalSample per row. A response without a verdict has an error and no score."""
    made, epochs = [], Counter()
    for row in rows:
        epochs[row['question']] += 1
        truth, verdict = row['ground_truth'], row['verdict']
        question = row.get('prompt') or truth.get('problem') or json.dumps(truth)
        reply = {'role': 'assistant', 'content': row['response'], 'source': 'generate'}
        stop = {'length': 'max_tokens'}.get(row['finish'], 'stop')
        score = {'value': _VALUES.get(verdict), 'answer': row['answer'], 'explanation': verdict}
        made.append(
            {
                'id': row['question'],
                'epoch': epochs[row['question']],
                'input': question,
                'target': target(truth),
                'messages': [{'role': 'user', 'content': question, 'source': 'input'}, reply],
                'output': {
                    'choices': [{'message': reply, 'stop_reason': stop}],
                    'completion': row['response'],
                },
                'metadata': {
                    'ground_truth': truth,
                    **{name: row[name] for name in ('use', 'reward', 'version') if name in row},
                },
                **(
                    {'scores': {'verdict': score}}
                    if verdict in _VALUES
                    else {
                        'error': {'message': f'no verdict: {verdict}', 'traceback': '', 'traceback_ansi': ''}
                    }
                ),
            }
        )
    return made


def log(
    task: str, step: int, file: Path, made: list[dict], s: dict[str, Any], config: dict, sampling: dict
) -> dict[str, Any]:
    """Returns an EvalLog, in version 2 of Inspect's schema.

    `made` are the samples, and `s` are the measures of scores.py.
    """
    at = utc(file.stat().st_mtime)
    name, asked = (
        hashlib.sha256(f'{file.resolve()} {task}'.encode()).hexdigest()[:22],
        s['questions'] * s['samples'],
    )
    metrics = {f'{m}@{s["samples"]}': s[m] for m in ('mean', 'pass') if s[m] is not None}
    counts = {'scored_samples': asked - s['infra_errors'], 'unscored_samples': s['infra_errors']}
    return {  # samples come last, since Inspect reads everything before them as the header
        'version': 2,
        'status': 'success',
        'eval': {
            'eval_id': name,
            'run_id': name,
            'task_id': name,
            'created': at,
            'task': task,
            'config': {'epochs': s['samples']},
            'model': f'bapo_jax/{config["method"]}-step-{step}',
            'dataset': {
                'name': task,
                'samples': s['questions'],
                'sample_ids': [*dict.fromkeys(m['id'] for m in made)],
            },
            'model_generate_config': {
                'temperature': sampling['temperature'],
                'max_tokens': sampling['max_response_tokens'],
            },
            'metadata': {'step': step, 'base': config['model']['path'], 'file': str(file)},
        },
        'plan': {},
        'stats': {'started_at': at, 'completed_at': at},
        'results': {
            'total_samples': asked,
            'completed_samples': counts['scored_samples'],
            'scores': [
                {
                    'name': 'verdict',
                    'scorer': 'verdict',
                    **counts,
                    'metrics': {m: {'name': m, 'value': v} for m, v in metrics.items()},
                },
            ],
        },
        'samples': made,
    }


def read_log(file: Path) -> list[dict[str, Any]]:
    """Returns the rows of a JSON Lines file, or the one object of a .json file.

    Raises ValueError, naming the file, if it is damaged.
    """
    try:
        if file.suffix == '.json':
            return [json.loads(file.read_bytes())]
        lines = rollout_lines(file) if file.suffix == '.zst' else file.read_bytes().splitlines()
        return [json.loads(line) for line in lines]
    except (ValueError, RecursionError, EOFError, zstandard.ZstdError) as e:
        raise ValueError(f'{file} is damaged ({str(e)[:200]}); restore or remove it') from e


def logs(run: Path, only: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the EvalLogs of a run, or of its step `only`.

    Raises FileNotFoundError or ValueError, naming the file and the remedy.
    """
    if not (run / 'config.json').is_file():
        raise FileNotFoundError(f'{run} is not a run directory (no config.json); give the --workdir of a run')
    c = read_run_config(run / 'config.json')
    for file in sorted(run.glob('rollouts/*.jsonl.zst')):
        # A step without samples has an empty file.
        if only in (None, step := int(file.name.partition('.')[0])) and (groups := read_log(file)):
            made = samples([row for group in groups for row in group_rows(group)])
            s = summary([group_question(group) for group in groups], votes=False)
            yield log(f'{c["task"]["name"]}-rollouts', step, file, made, s, c, c['rollout'])
    for file in sorted([*run.glob('evals/*.json'), *run.glob('evaluation/*/summary.json')]):
        [told] = read_log(file)
        sampling = c['evaluate'] | {
            name.removeprefix('config.evaluate.'): value for name, value in told.items()
        }
        for name, s in told['benchmarks'].items() if only in (None, told['step']) else ():
            made = (
                []
                if file.parent.name == 'evals'
                else samples(read_log(file.with_name(f'{Path(name).stem}.jsonl')))
            )
            yield log(Path(name).stem, told['step'], file, made, s, c, sampling)


def run() -> None:
    """Runs the command."""
    open_streams()
    terminal.guard()
    parser = CommandParser(__doc__)
    parser.add_argument('run', type=Path, metavar='RUN', help='a run directory')
    parser.add_argument(
        '--step', type=int, help='only this step; default: every step with rollouts or evaluations'
    )
    parser.add_argument('--output', type=Path, help='directory to write; default: RUN/inspect')
    args = parser.parse_args()
    output, count = args.output or args.run / 'inspect', 0
    try:
        for count, e in enumerate(logs(args.run, args.step), start=1):
            output.mkdir(parents=True, exist_ok=True)
            about = e['eval']
            # Inspect only lists JSON files named like this.
            name = (about['created'].replace(':', '-'), about['task'].replace('_', '-'), about['task_id'])
            write_text(output / f'{"_".join(name)}.json', json.dumps(e, allow_nan=False))
        if not count:
            raise ValueError(
                f'{args.run} has no rollouts or evaluations to export, or none of --step; choose another '
                'step, or set log.rollouts_every'
            )
    except (ValueError, OSError) as e:
        sys.exit(f'error: {e}')
    with ends_with_its_reader():
        print(f'{count} logs: {output}   to view them: inspect view --log-dir {output}')


if __name__ == '__main__':
    run()
