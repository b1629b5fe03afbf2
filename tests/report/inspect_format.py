"""Version 2 of Inspect's log format, as far as we write it: every field that a log of ours may have, with its type.

`make inspect` holds this page against Inspect itself, which needs an environment of its own and is not part of the tests.
"""

import json
from pathlib import Path
from typing import Any, Literal

import msgspec


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A field that Inspect does not have is an error."""


class Dataset(Part):
    name: str
    samples: int
    sample_ids: list[int | str]


class Epochs(Part):
    epochs: int


class GenerateConfig(Part):
    temperature: float
    max_tokens: int


class Spec(Part):
    eval_id: str
    run_id: str
    task_id: str
    created: str
    task: str
    config: Epochs
    model: str
    dataset: Dataset
    model_generate_config: GenerateConfig
    metadata: dict[str, Any]


class Stats(Part):
    started_at: str
    completed_at: str


class Metric(Part):
    name: str
    value: int | float


class ScoreOfLog(Part):
    name: str
    scorer: str
    scored_samples: int
    unscored_samples: int
    metrics: dict[str, Metric]


class Results(Part):
    total_samples: int
    completed_samples: int
    scores: list[ScoreOfLog]


class Message(Part):
    role: Literal['user', 'assistant']
    content: str
    source: Literal['input', 'generate']


class Choice(Part):
    message: Message
    stop_reason: Literal['stop', 'max_tokens']


class Output(Part):
    choices: list[Choice]
    completion: str


class Score(Part):
    value: Literal['C', 'I', 'N']  # correct, incorrect, no answer: 1, 0, 0
    answer: str | None
    explanation: str | None


class Error(Part):
    message: str
    traceback: str
    traceback_ansi: str


class Sample(Part):
    id: int | str
    epoch: int
    input: str
    target: str | list[str]
    messages: list[Message]
    output: Output
    metadata: dict[str, Any]
    scores: dict[str, Score] | None = None
    error: Error | None = None


class Log(Part):
    version: Literal[2]
    status: Literal['success']
    eval: Spec
    plan: dict[str, Any]
    stats: Stats
    results: Results
    samples: list[Sample]


def read(directory: Path) -> list[dict]:
    """What the logs in a directory say, with the names that tests use. Raises msgspec.ValidationError for what is no log."""
    return [told(msgspec.json.decode(file.read_bytes(), type=Log), file) for file in sorted(directory.glob('*.json'))]


def told(log: Log, file: Path) -> dict:
    assert [*json.loads(file.read_text())][-1] == 'samples'  # Inspect reads a header up to there
    [scores] = log.results.scores
    return {
        'task': log.eval.task.replace('_', '-'), 'model': log.eval.model, 'step': log.eval.metadata['step'],
        'epochs': log.eval.config.epochs, 'temperature': log.eval.model_generate_config.temperature,
        'total': log.results.total_samples, 'unscored': scores.unscored_samples,
        'metrics': {name: metric.value for name, metric in scores.metrics.items()},
        'samples': [{
            'id': s.id, 'epoch': s.epoch, 'input': s.input, 'target': s.target, 'said': s.output.completion,
            'messages': len(s.messages), 'stop': s.output.choices[0].stop_reason, 'error': s.error and s.error.message,
            'reward': s.metadata.get('reward'),
            'score': s.scores and {'value': s.scores['verdict'].value, 'number': float(s.scores['verdict'].value == 'C'),
                                   'answer': s.scores['verdict'].answer},
        } for s in log.samples],
    }  # fmt: skip
