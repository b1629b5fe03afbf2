"""The notebook opens a run as it stands, without outputs of an earlier one."""

import json

import numpy as np
import pytest
from group_builders import judged_group
from making import config, evaluation, make_run, row
from small_run import ROOT

from bapo_jax.groups import Verdict
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.run.log.responses import Logged, write_rollouts

BOOK = json.loads((ROOT / 'docs' / 'open_a_run.ipynb').read_text('utf-8'))
CODE = [''.join(cell['source']) for cell in BOOK['cells'] if cell['cell_type'] == 'code']
VERDICTS = [Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSEABLE, Verdict.INFRA_ERROR]


@pytest.fixture
def run_directory(tmp_path, monkeypatch):
    """A run where the notebook looks for it, as the trainer writes it; the current folder is the notebook's."""
    evaluations = [evaluation(step, [0, 1, 2], 0.25 + step / 10, 0.5) for step in (0, 3)]
    run = make_run(tmp_path / 'runs' / 'quickstart', [row(step) for step in (1, 2, 3)], evaluations, settings=config())
    (run / 'rollouts').mkdir()
    for step in (1, 3):
        groups = [Logged('x1', judged_group(i, VERDICTS, np.random.default_rng(i), step)) for i in range(5)]
        write_rollouts(run / 'rollouts' / f'{step:06d}.jsonl.zst', character_tokenizer(), groups)
    (tmp_path / 'docs').mkdir()
    monkeypatch.chdir(tmp_path / 'docs')
    monkeypatch.setenv('MPLBACKEND', 'agg')
    return run


def test_the_notebook_is_short_and_keeps_no_output():
    assert (BOOK['nbformat'], len(BOOK['cells'])) == (4, 7)
    assert not [cell for cell in BOOK['cells'] if cell.get('outputs') or cell.get('execution_count')]


def test_the_notebook_runs_from_top_to_bottom(run_directory, capsys):
    import matplotlib.pyplot as plt

    plt.switch_backend('agg')
    names, said = {}, []
    for cell in CODE:
        exec(compile(cell, 'open_a_run.ipynb', 'exec'), names)
        said.append(capsys.readouterr().out)
    assert said[0] == 'quickstart: method bapo, seed 1, 3 steps, 0 events\n\n'
    assert 'critic/score/mean      first    0.110   last    0.130   mean    0.120\n' in said[1]
    reward, scores = names['figure'].axes
    assert list(reward.lines[0].get_ydata()) == [0.1 + step / 100 for step in (1, 2, 3)] and list(scores.lines[0].get_xdata()) == [0, 3]
    assert said[3].splitlines() == ['cd4  step    0   mean@2  25.0   pass@2  50.0', 'cd4  step    3   mean@2  55.0   pass@2  50.0']
    assert names['newest'].name == '000003.jsonl.zst' and len(names['groups']) == 5
    assert said[4].count('--- prompt ') == 3 and said[4].count('\ncorrect     1.0  ') == 3 and said[4].count('\ninfra_error None  ') == 3
    plt.close('all')
