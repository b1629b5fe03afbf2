"""The growth of an update's cost, as benchmarks/compiled/scaling.py tells it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A point's groups have two responses, not eight: what grows is seen as well.
SMALL = """
import dataclasses, runpy
from benchmarks.peers import data

data.W = dataclasses.replace(data.W, group_size=2)
runpy.run_module('benchmarks.compiled.scaling', run_name='__main__', alter_sys=True)
"""


@pytest.mark.slow
def test_more_groups_are_more_optimizer_steps_of_one_size(tmp_path):
    """One axis, one update a point: its table, its points and its figure; the compiled step is the same at each."""
    out, figure = tmp_path / 'points.json', tmp_path / 'figure.svg'
    command = [sys.executable, '-c', SMALL, '--axes=groups', '--repeats=1', f'--out={out}', f'--plot={figure}']
    environment = os.environ | {'PYTHONPATH': str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    points = json.loads(out.read_text())['groups']
    assert [p['at'] for p in points] == [8, 16, 32, 64]
    assert len({p['temporary GB'] for p in points}) == 1
    assert all(p['s'] > 0 and p['without attention s'] > 0 for p in points)
    header, _, *rows = [line for line in done.stdout.splitlines() if line.startswith('|')]
    assert header == '| groups | s | exponent | without attention s | exponent | temporary GB |' and len(rows) == 4
    assert figure.read_text().rstrip().endswith('</svg>')
