"""Part 4 of the real policy: ten runs that differ in method and prompts alone, and contrasts by seeds and questions."""

import numpy as np
import pytest

from bapo_jax.config import resolve
from configs import arithmetic
from studies.lib.contrasts import paired_both
from studies.real_policy import replay
from studies.real_policy.replay import ARMS, SEEDS, command, contrasts, contrasts_table, read_rows, rises_table, wanted


def test_ten_runs_are_missing_before_the_first(monkeypatch, tmp_path):
    monkeypatch.setattr(replay, 'ROWS', tmp_path / 'none')
    assert [(row['arm'], row['seed']) for row in read_rows()] == [('R', 0), ('R', 1)]
    assert wanted(read_rows()) == [('G', 0), ('S', 0), ('G', 1), ('S', 1), *((arm, seed) for seed in (2, 3) for arm in 'GRS')]
    monkeypatch.setattr('sys.argv', ['replay'])
    with pytest.raises(SystemExit, match='10 runs are missing; run'):
        replay.main()


def test_arms_differ_in_what_is_trained_on_and_asked():
    def of(arm):
        method, changes = ARMS[arm]
        c = arithmetic.get_config(method)
        c.update_from_flattened_dict({'model.path': 'configs/quickstart_base', **changes})
        return dict(resolve(c).to_dict())

    def flat(d, at=''):
        return {k: v for name, x in d.items() for k, v in (flat(x, f'{at}{name}.') if isinstance(x, dict) else {f'{at}{name}': x}).items()}

    g, r, s = (flat(of(arm)) for arm in 'GRS')
    assert {name for name in r if r[name] != s[name]} == {'prompts.selector'}
    assert {name for name in r if r[name] != g[name]} <= {'method', 'replay.fresh_filter', 'replay.use_x3', 'replay.c2', 'replay.c3'}
    assert '--config.prompts.selector=mixed' in command('S', 3, 'x') and '--config.seed=3' in command('S', 3, 'x')


def test_contrasts_are_by_seeds_and_questions():
    rng = np.random.default_rng(0)
    level = {'G': 0.2, 'R': 0.5, 'S': 0.52}
    rows = [
        {'arm': arm, 'seed': seed, 'base': [1] * 50, 'trained': rng.binomial(8, level[arm], 50).tolist()} for arm in ARMS for seed in SEEDS
    ]
    by = {(row['arm'], row['seed']): np.array(row['trained']) * 12.5 for row in rows}
    for name, k, found in contrasts(rows):
        if k == 1:
            a, b = name.split(' - ')
            assert found == paired_both('', np.stack([by[a, seed] - by[b, seed] for seed in SEEDS]))
    lines = contrasts_table(rows).splitlines()
    assert lines[2].startswith('| R - G | mean@8 |') and lines[2].endswith('| helps |') and lines[4].endswith('| open |')
    assert f'| G | 0 | 12.5 → {by["G", 0].mean():.1f} | 100.0 → ' in rises_table(rows)


def test_a_run_leaves_a_row_and_no_checkpoints(monkeypatch, tmp_path):
    monkeypatch.setattr(replay, 'ROWS', tmp_path / 'rows.jsonl')
    monkeypatch.setattr(replay, 'ROOT', tmp_path)
    monkeypatch.setattr(replay, 'call', lambda words, workdir: (workdir / 'checkpoints').mkdir(parents=True))
    monkeypatch.setattr(replay, 'row_of', lambda run, seconds, busy: {'seed': int(run.name[-1]), 'seconds': seconds})
    monkeypatch.setattr('sys.argv', ['replay', 'run'])
    replay.main()
    made = read_rows()[2:]
    assert len(made) == 10 and not wanted(read_rows()) and not list(tmp_path.rglob('checkpoints'))
    assert made[0]['command'].startswith('python -m bapo_jax.train --config=configs/arithmetic.py:grpo') and made[0]['cores'] >= 1
