"""Part 3 of the second proof: every method's best rate, and a table that says what its rows hold."""

import json

import numpy as np
import pytest
from scipy import stats

from bapo_jax.config import resolve
from bapo_jax.tasks.countdown.problems import problem_key, test_problems, training_problems
from configs import quickstart
from studies.second_proof import arms, table
from studies.lib.rows import Job
from studies.second_proof.arms import ARMS, TABLE_METHODS, TABLE_RATES, commands, fields
from studies.second_proof.table import METHODS, wanted_table


def row(part, arm, rate, seed, correct):
    return {'part': part, 'arm': arm, 'rate': rate, 'seed': seed, 'changes': ARMS[arm].changes, 'samples': 8, 'correct': correct,
            'responses': 60_000, 'tokens': 5e6, 'seconds': 400, 'cpu': 'another' if arm == 'table_remix' else 'one'}  # fmt: skip


def scan(best):
    return [row('table_scan', arm, rate, 301, [6 if rate == best else 3] * 4) for arm in METHODS for rate in TABLE_RATES]


@pytest.mark.parametrize('method', TABLE_METHODS)
def test_a_method_runs_as_the_quickstart_has_it_for_three_epochs(method):
    job = Job('table', f'table_{method}', 5e-5, 311)
    changes = fields(job)
    assert changes['steps'] * 64 == 3 * changes['task.limit'] and changes['task.train'] == 'generated'
    config = quickstart.get_config(method)
    before = resolve(config).to_dict()
    config.update_from_flattened_dict({k: v for k, v in changes.items() if k != 'evaluate.benchmarks'})
    config.evaluate.benchmarks = ()
    after = resolve(config).to_dict()
    for section in ('rollout', 'replay', 'critic', 'prompts'):
        assert before[section] == after[section]
    [train, evaluate] = commands(job, 'runs/x')
    assert f'--config=configs/quickstart.py:{method}' in train and '--config.model.path=configs/quickstart_base' in train
    assert '--benchmarks=cd34,cd4' in evaluate and '--samples=32' in evaluate


def test_the_scan_comes_first_and_then_the_best_rate_of_each_method():
    assert len(wanted_table(scan(5e-5)[1:])) == 1 and {job.part for job in wanted_table([])} == {'table_scan'}
    jobs = wanted_table(scan(1e-4))
    assert {(job.part, job.rate) for job in jobs if job.arm != 'table_base'} == {('table', 1e-4)}
    assert len(jobs) == 3 * len(TABLE_METHODS) + 1


def test_problems_of_one_use_are_in_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(arms, 'ROOT', tmp_path)
    monkeypatch.setattr(arms, 'PROBLEMS', {name: (seed, 20, sizes) for name, (seed, _, sizes) in arms.PROBLEMS.items()})
    (tmp_path / arms.RUNS).mkdir(parents=True)
    arms.write_problems()
    lines = {name: (tmp_path / arms.problems_file(name)).read_text().splitlines() for name in arms.PROBLEMS}
    sets = {name: [json.loads(line) for line in of_set] for name, of_set in lines.items()}
    keys = [problem_key({'numbers': p['nums'], 'target': p['target']}) for problems in sets.values() for p in problems]
    table_keys = list(map(problem_key, training_problems('generated', limit=2_560, seed=1000)))
    keys += map(problem_key, [*test_problems('cd34'), *test_problems('cd4')])
    assert len(set(keys)) == len(keys) == 4 * 20 + 400
    assert not {problem_key({'numbers': p['nums'], 'target': p['target']}) for p in sets['scan_34']} & set(table_keys)
    assert {len(p['nums']) for p in sets['test'] + sets['scan'] + sets['train']} == {4}
    assert {len(p['nums']) for p in sets['scan_34']} == {3, 4}


def test_the_table_tells_what_the_rows_hold():
    rng = np.random.default_rng(0)
    there = scan(1e-4)
    for job in wanted_table(there):
        right = rng.binomial(32, 0.5 if job.arm == 'table_dapo' else 0.3, 400).tolist()
        there.append({**row(job.part, job.arm, job.rate, job.seed, right), 'samples': 32})
    rng.shuffle(there)  # pairs go by seed, not by what ended first
    assert wanted_table(there) == []
    lines = {line.split(' | ')[0].strip('| '): line.split(' | ') for line in table.table(there).splitlines()}
    assert set(lines) >= {'base', *TABLE_METHODS}

    def means(arm, part):
        by_seed = {r['seed']: r['correct'] for r in there if r['part'] == 'table' and r['arm'] == f'table_{arm}'}
        return [100 * np.mean(by_seed[seed][part]) / 32 for seed in sorted(by_seed)]

    cd34, both = means('dapo', slice(0, 200)), np.subtract(means('dapo', slice(400)), means('grpo', slice(400)))
    assert lines['dapo'][1] == '0.0001*' and lines['dapo'][2].startswith(f'{np.mean(cd34):.1f} (')
    low, high = stats.t.interval(0.95, 2, both.mean(), stats.sem(both))
    assert lines['dapo'][6] == f'{both.mean():.1f} ({low:.1f} to {high:.1f})' and lines['grpo'][6] == ''
    assert lines['dapo'][7:] == ['60,000', '5.0', '400 |'] and lines['remix'][9] == '400† |'
    assert '| dapo | 37.5 | 37.5 | **75.0** |' in table.scan_table(there)


def test_nothing_of_the_table_is_told_while_a_run_is_missing(monkeypatch):
    monkeypatch.setattr(table, 'read_rows', lambda: scan(1e-4))
    with pytest.raises(SystemExit, match='40 runs are missing'):
        table.main()
