"""Parts 5 and 6 of the second proof: the arms of part 1 from a larger base, seed after seed, and what two of them may not tell."""

import numpy as np
import pytest
from scipy import stats

from studies.second_proof import large, page
from studies.lib.rows import Job
from studies.second_proof.arms import ARMS, DECISIVE, LARGE_BASE, commands, fields
from studies.second_proof.large import OWN, OWN_SCAN, RATIO, wanted_large, wanted_own


def row(part, arm, rate, seed, correct, base='a'):
    return {'part': part, 'arm': arm, 'rate': rate, 'seed': seed, 'changes': ARMS[arm].changes, 'samples': 32, 'correct': correct,
            'base': base, 'responses': 122_880, 'updates': 960, 'tokens': 6e6, 'seconds': 140}  # fmt: skip


def right_of(arm, seed):
    """Right answers of 32 to the second of three problems."""
    return {'large_R': 20, 'large_RX': 20, 'large_P': 16, 'large_G': 14}[arm] + seed * (3 + len(arm) + ord(arm[6])) % 5 % 3


def scan():
    rates = {1.25e-5: 10, 2.5e-5: 12, 5e-5: 8}
    rows = [row('large_scan', 'large_half', rate, 101, [right, 0]) for rate, right in rates.items()]
    return [*rows, row('large', 'large_base', 0.0, 101, [32, 3, 0])]


def with_seeds(count):
    jobs = wanted_large(scan())[: 4 * count]
    return scan() + [row(*job, [32, right_of(job.arm, job.seed), 0]) for job in jobs]


@pytest.mark.parametrize('arm', ['G', 'P', 'R', 'RX'])
def test_an_arm_is_that_of_part_1_but_for_its_base_and_the_cards_settings(arm):
    small, large_one = (fields(Job('final', name, 5e-5, 203)) for name in (arm, f'large_{arm}'))
    assert {field for field in large_one if large_one[field] != small.get(field)} == {
        'model.path', 'rollout.rows', 'learner.micro_batch_rows', 'learner.remat', 'checkpoint.every',
    }  # fmt: skip
    assert set(small) <= set(large_one) and ARMS[f'large_{arm}'].method == DECISIVE[arm].method


def test_the_base_is_answered_without_training_and_the_scan_answers_scan_problems():
    [[*words]] = commands(Job('large', 'large_base', 0.0, 101), 'runs/x')
    assert words[2] == 'bapo_jax.evaluate' and f'--checkpoint={LARGE_BASE}' in words and '--config.rollout.rows=512' in words
    train, evaluate = commands(Job('large_scan', 'large_half', 5e-5, 101), 'runs/x')
    assert '--config.steps=120' in train and '--benchmarks=runs/second_proof/scan.jsonl' in evaluate and '--samples=8' in evaluate


def test_seeds_come_one_after_another_at_the_ratios_of_part_1():
    assert {job.arm for job in wanted_large([])} == {'large_half', 'large_base'}
    jobs = wanted_large(scan())
    assert [job.seed for job in jobs] == [seed for seed in range(201, 209) for _ in range(4)]
    assert {(job.arm, job.rate) for job in jobs[:4]} == {
        ('large_G', 5e-5), ('large_P', 5e-5), ('large_R', 2.5e-5), ('large_RX', 5e-5),
    }  # fmt: skip
    assert wanted_large(with_seeds(3)[:-1])[0] == Job('large', 'large_RX', 5e-5, 203)


def test_a_seed_counts_where_all_arms_have_ended_from_one_base():
    rows = with_seeds(3)
    assert large.seeds(rows) == [201, 202, 203] and large.seeds(rows[:-1]) == [201, 202]
    assert large.seeds([*rows[:-1], rows[-1] | {'base': 'b'}]) == [201, 202]


def test_the_tables_tell_what_the_rows_hold():
    rows = with_seeds(5)
    np.random.default_rng(0).shuffle(rows)  # pairs go by seed, not by what ended first
    contrasts = large.contrasts_table(rows)
    for a, b in (('R', 'P'), ('RX', 'R'), ('R', 'G')):
        x, y = (np.array([100 * (32 + right_of(f'large_{arm}', s)) / 96 for s in range(201, 206)]) for arm in (a, b))
        want = stats.ttest_rel(x, y)
        assert np.ptp(x - y) > 0 and f'| {a} - {b} | {np.mean(x - y):.2f} (' in contrasts and f') | {want.pvalue:.4f} |' in contrasts
    assert '| 5 seeds |' in contrasts and contrasts.count('| 0.00 (0.00 to 0.00) |') == 3, 'as many problems are solved at all'
    arms = large.arms_table(rows)
    assert '| the base |  | 36.5 |' in arms and '| P | 5e-05 |' in arms and '| 960 | 24.0 | 140 |' in arms
    assert '| 2.5e-05 | 18.8 |' in large.scan_table(rows)


def test_nothing_of_part_5_is_told_before_three_seeds(monkeypatch):
    monkeypatch.setattr(large, 'read_rows', lambda: with_seeds(3)[:-1])
    with pytest.raises(SystemExit, match='fewer than 3 seeds have all four arms'):
        large.main()
    monkeypatch.setattr(page, 'wanted_hard', lambda rows: [None])  # part 2 asks for part 1's scan
    monkeypatch.setattr(page, 'wanted', lambda rows: [None])
    assert 'Part 5' in page.whole(with_seeds(3)) and 'Part 5' not in page.whole(with_seeds(3)[:-1])


def own_scan():
    best = {'G': 1, 'P': 2, 'R': 1, 'RX': 3}  # by place among the rates
    jobs = wanted_own([])
    return [row(*job, [12 - 2 * abs(i % 4 - best[job.arm.removeprefix('large_')]), 0]) for i, job in enumerate(jobs)]


def test_part_6_scans_every_arm_with_all_its_steps_and_takes_each_to_its_own_best_rate():
    assert [(job.part, job.arm) for job in wanted_own(scan())] == [(OWN_SCAN, f'large_{arm}') for arm in RATIO for _ in range(4)]
    train, evaluate = commands(wanted_own([])[0], 'runs/x')
    assert '--config.steps=240' in train and '--benchmarks=runs/second_proof/scan.jsonl' in evaluate and '--samples=8' in evaluate
    jobs = wanted_own(own_scan())
    assert [job.seed for job in jobs] == [seed for seed in range(209, 215) for _ in range(4)]
    assert [(job.arm, job.rate) for job in jobs[:4]] == [
        ('large_G', 2.5e-5), ('large_P', 5e-5), ('large_R', 2.5e-5), ('large_RX', 1e-4),
    ]  # fmt: skip
    _, evaluate = commands(jobs[0], 'runs/x')
    assert '--benchmarks=runs/second_proof/test.jsonl' in evaluate and '--samples=32' in evaluate


def test_part_6_tells_of_its_own_seeds_alone():
    rows = scan() + own_scan()
    there = [row(*job, [32, right_of(job.arm, job.seed + 1), 0]) for job in wanted_own(rows)[:12]]
    scores = {arm: [100 * (32 + right_of(f'large_{arm}', seed + 1)) / 96 for seed in (209, 210, 211)] for arm in 'PR'}
    rows = with_seeds(5) + own_scan() + there
    contrasts, arms, by_rate = (table(rows) for table in large.TABLES[OWN])
    assert '| 3 seeds |' in contrasts and f'| R - P | {np.mean(scores["R"]) - np.mean(scores["P"]):.2f} (' in contrasts
    assert '| RX | 0.0001 |' in arms and '| 5 seeds |' in large.contrasts_table(rows)
    assert '| G | 15.6 | **18.8** | 15.6 | 12.5 |' in by_rate and '| 15.6 | **18.8*** |' in by_rate
    assert large.seeds(rows, OWN) == [209, 210, 211] and large.seeds(rows[:-1], OWN) == [209, 210]
