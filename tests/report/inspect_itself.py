"""`make inspect`: Inspect reads our logs as inspect_format.py does. Inspect has an environment of its own; no part of the tests."""

import json
import subprocess

from inspect_format import read
from small_run import ROOT
from test_inspect_log import command, run_directory  # noqa: F401  (a fixture)

PYTHON = ROOT / '.venv-inspect' / 'bin' / 'python'
READ = """
import json, sys
from inspect_ai.log import list_eval_logs, read_eval_log
from inspect_ai.scorer import value_to_float

told = []
for info in list_eval_logs(sys.argv[1]):
    log, header = read_eval_log(info), read_eval_log(info, header_only=True)
    assert header.eval.model_dump() == log.eval.model_dump() and header.results == log.results and not header.samples
    [scores] = log.results.scores
    told.append({
        'task': info.task, 'model': log.eval.model, 'step': log.eval.metadata['step'], 'epochs': log.eval.config.epochs,
        'temperature': log.eval.model_generate_config.temperature, 'total': log.results.total_samples,
        'unscored': scores.unscored_samples, 'metrics': {name: metric.value for name, metric in scores.metrics.items()},
        'samples': [{
            'id': s.id, 'epoch': s.epoch, 'input': s.input, 'target': s.target, 'said': s.output.completion,
            'messages': len(s.messages), 'stop': s.output.stop_reason,
            'error': s.error and s.error.message, 'reward': s.metadata.get('reward'),
            'score': s.scores and {'value': s.scores['verdict'].value, 'number': value_to_float()(s.scores['verdict'].value),
                                   'answer': s.scores['verdict'].answer},
        } for s in log.samples or []],
    })
print(json.dumps(told))
"""


def test_inspect_reads_what_the_restated_format_reads(run_directory, monkeypatch):  # noqa: F811
    command(monkeypatch, run_directory)
    done = subprocess.run([PYTHON, '-c', READ, run_directory / 'inspect'], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

    def by_name(logs):
        return sorted(logs, key=lambda log: (log['task'], log['step']))

    assert by_name(json.loads(done.stdout)) == by_name(read(run_directory / 'inspect'))
