"""The study's arms are those of its plan, its decisions follow the plan's rules, and its statistics are the textbook's."""

import json

import numpy as np
import pytest
import zstandard
from scipy import stats

from bapo_jax.run.directory import differences
from configs import quickstart
from studies.second_proof import analysis, rows
from studies.lib.rows import Job
from studies.second_proof.arms import ARMS, RATES, SEEDS, commands, fields
from studies.second_proof.moves import moves

METHODS = {arm: quickstart.get_config(ARMS[arm].method) for arm in ARMS}


def config_of(arm):
    config = METHODS[arm].copy_and_resolve_references()
    config.update_from_flattened_dict({k: v for k, v in ARMS[arm].changes.items()})
    return config.to_dict()


def test_arms_differ_from_replay_in_what_the_plan_names_alone():
    r = config_of('R')
    sources = {'replay.use_x3', 'replay.use_x2', 'replay.c2', 'replay.c3', 'replay.fresh_filter', 'method'}
    assert set(differences(r, config_of('G'))) <= sources
    assert set(differences(r, config_of('P'))) == {'replay.use_x3', 'learner.passes_per_batch', 'learner.mini_batch_groups'}
    assert set(differences(r, config_of('RX'))) == {'replay.use_x2'}
    assert set(differences(r, config_of('C'))) == {'replay.use_x3', 'learner.batch_groups'}
    assert (r['learner']['anchor'], r['learner']['kl_target'], r['rollout']['sync_every']) == ('behaviour', 'behaviour', 1)


def test_re_evaluation_costs_steps_so_that_responses_are_equal():
    responses = ARMS['RX'].steps * (64 * 8 + 32 * 8 / 5)
    assert ARMS['RX'].steps == 218 and responses == pytest.approx(240 * 64 * 8, rel=0.002)


def test_a_scan_answers_scan_problems_and_a_final_run_the_test():
    [_, scan], [_, final] = (commands(Job(part, 'R', 1e-4, 201), 'runs/x') for part in ('scan', 'final'))
    assert '--benchmarks=runs/second_proof/scan.jsonl' in scan and '--samples=8' in scan
    assert '--benchmarks=runs/second_proof/test.jsonl' in final and '--samples=32' in final
    assert fields(Job('final', 'R', 1e-4, 201))['log.rollouts_every'] == 1 and fields(Job('final', 'R', 1e-4, 203))['log.rollouts_every'] == 0


def row(part, arm, rate, seed, right, updates=960):
    return {'part': part, 'arm': arm, 'rate': rate, 'seed': seed, 'changes': ARMS[arm].changes, 'samples': 8, 'correct': [right] * 3,
            'updates': updates}  # fmt: skip


def scan(best, **updates):
    """A whole scan in which the rate `best` of each arm is best, and the others are the worse the farther they are."""
    return [
        row('scan', arm, rate, seed, 8 - abs(round(np.log2(rate / best))), updates.get(arm, 960))
        for arm in rows.SCANNED for rate in RATES for seed in (101, 102)
    ]  # fmt: skip


def test_a_best_rate_inside_is_frozen_and_every_seed_has_all_arms():
    jobs = rows.wanted(scan(1e-4))
    assert [job.part for job in jobs] == ['final'] * 48 + ['ceiling'] * 4 + ['base'] * 2
    assert {job.rate for job in jobs if job.part != 'base'} == {1e-4}
    assert [(job.arm, job.seed) for job in jobs[:5]] == [('R', 201), ('G', 201), ('RX', 201), ('P', 201), ('R', 202)]


def test_a_best_rate_at_an_edge_is_followed_by_at_most_two_more():
    there = scan(2e-4)
    for added in (4e-4, 8e-4):
        assert {job.rate for job in rows.wanted(there)} == {added}
        there += [row('scan', arm, added, seed, 8) for arm in rows.SCANNED for seed in (101, 102)]
        there = [{**r, 'correct': [9]} if r['rate'] == added else r for r in there]
    assert {job.part for job in rows.wanted(there)} == {'final', 'ceiling', 'base'}


def test_the_scan_comes_before_everything_and_a_missing_seed_is_asked_for():
    there = [r for r in scan(1e-4) if (r['arm'], r['rate'], r['seed']) != ('P', 5e-5, 102)]
    assert rows.wanted(there) == [Job('scan', 'P', 5e-5, 102)]


@pytest.mark.parametrize('updates, refused', [(960, False), (1056, False), (864, False), (1100, True), (800, True)])
def test_p_has_as_many_optimizer_steps_as_r_or_the_study_stops(updates, refused):
    there = scan(1e-4, P=updates)
    if refused:
        with pytest.raises(ValueError, match='not within 10 %'):
            rows.wanted(there)
    else:
        assert rows.wanted(there)


def test_rows_of_other_passes_count_no_more_and_stay():
    old = {**row('scan', 'P', 1e-4, 101, 3), 'changes': {'learner.passes_per_batch': 9}}
    assert rows.of_today([old, *scan(1e-4)]) == scan(1e-4)


def test_a_contrast_is_the_paired_t():
    rng = np.random.default_rng(0)
    a, b = rng.normal(10, 1, 12), rng.normal(9, 1, 12)
    c, want = analysis.paired('a - b', a - b), stats.ttest_rel(a, b)
    assert (c.mean, c.p) == pytest.approx((np.mean(a - b), want.pvalue))
    assert c.interval95 == pytest.approx(tuple(want.confidence_interval(0.95)))
    assert c.interval90 == pytest.approx(tuple(want.confidence_interval(0.90)))


@pytest.mark.parametrize('ps, rejected', [
    ((0.01, 0.02, 0.03), (True, True, True)),  # .05/3, .05/2, .05
    ((0.03, 0.01, 0.03), (False, True, False)),  # .03 is above .05/2, and then nothing is looked at
    ((0.02, 0.02, 0.001), (True, True, True)),
    ((0.017, 0.5, 0.6), (False, False, False)),
])  # fmt: skip
def test_holm_steps_down(ps, rejected):
    assert tuple(analysis.holm(ps, 0.05)) == rejected


@pytest.mark.parametrize('mean, half, rejected, words', [
    (1.2, 0.3, True, 'helps'), (-1.2, 0.3, True, 'harms'), (0.6, 0.3, True, 'no relevant effect, though not 0'),
    (0.2, 0.3, False, 'no relevant effect'), (0.9, 0.3, True, 'open'), (0.9, 0.9, False, 'open'), (1.2, 0.3, False, 'open'),
])  # fmt: skip
def test_a_verdict_is_in_the_plans_words(mean, half, rejected, words):
    c = analysis.Contrast('x', mean, 0.01, (mean - half, mean + half), (mean - 2 * half, mean + 2 * half))
    assert analysis.verdict(c, rejected) == words


def test_pass_at_all_samples_is_the_share_of_problems_solved_at_all():
    assert analysis.passed({'samples': 8, 'correct': [0, 1, 8, 0]}, 8) == 50
    assert analysis.passed({'samples': 8, 'correct': [0, 1, 8, 0]}, 1) == pytest.approx(100 * 9 / 32)


def test_nothing_is_told_while_a_run_is_missing(monkeypatch):
    monkeypatch.setattr(analysis, 'read_rows', lambda: [*scan(1e-4), row('final', 'R', 1e-4, SEEDS[0], 8)])
    with pytest.raises(SystemExit, match='53 runs are missing'):
        analysis.main()


def test_an_arm_is_scored_where_it_has_taken_the_seconds_of_the_other():
    took = {'R': 720, 'P': 600, 'RX': 800, 'G': 710}
    there = [{**r, 'seconds': took[r['arm']]} for r in scan(1e-4)]
    # R has taken P's seconds after 240 * 600 / 720 = 200 steps; G's after 237, which is nearest to 240, the last.
    assert rows.earlier_steps(there, 'R') == {'P': 200}
    assert rows.earlier_steps(there, 'RX') == {'R': 200}  # 218 * 720 / 800 = 196
    assert rows.earlier_steps(there, 'P') == rows.earlier_steps(there, 'G') == {}


def test_the_base_is_answered_without_training():
    [[*words]] = commands(Job('base', 'base', 0.0, 2), 'runs/x')
    assert '--checkpoint=runs/first_proof/weak_base' in words and '--config.seed=2' in words and '--output=runs/x' in words


def test_moves_know_what_was_asked_in_earlier_steps(tmp_path):
    def group(prompt, use, right):
        return {'use': use, 'prompt_id': prompt, 'verdicts': ['correct'] * right + ['wrong'] * (8 - right)}

    steps = {1: [group(1, 'x1', 1), group(2, 'discarded', 0)], 2: [group(1, 'x3', 1), group(2, 'left_out', 0), group(3, 'x1', 4)],
             3: [group(2, 'x2', 2), group(1, 'discarded', 8)]}  # fmt: skip
    (tmp_path / 'rollouts').mkdir()
    for step, of_step in steps.items():
        lines = ''.join(json.dumps(row) + '\n' for row in of_step)
        (tmp_path / 'rollouts' / f'{step:06d}.jsonl.zst').write_bytes(zstandard.compress(lines.encode()))
    assert moves(tmp_path) == [
        [0, 0, 0, 0, 1], [0, 0, 0, 1, 1], [0, 0, 0, 4, 1],  # each prompt's first group
        [8, 0, 1, 0, 1], [8, 1, 0, 8, 1], [16, 0, 1, 2, 1],
    ]  # fmt: skip


ARMS_RIGHT = {'G': 8, 'P': 12, 'R': 16, 'RX': 16, 'C': 20, 'base': 4}  # of 32


def right_of(arm, seed):
    """Right answers of 32 to the second problem: the arm's, and one more at seeds that differ from arm to arm."""
    return ARMS_RIGHT[arm] + seed // (1 + list(ARMS_RIGHT).index(arm)) % 2


def whole_study():
    """Every row of part 1. Of three problems one is always solved, one as often as `right_of` says, one never."""
    took = {'R': 720, 'P': 600, 'RX': 720, 'G': 720}
    there = [{**r, 'seconds': took[r['arm']]} for r in scan(1e-4)]
    spent = {'entropy': [0.5, 0.25], 'responses': 122_880, 'tokens': 6e6, 'seconds': 700, 'moves': [[8, 0, 0, 2, 1], [8, 0, 0, 0, 3]]}
    for job in rows.wanted(there):
        part = row(job.part, job.arm, job.rate, job.seed, 0) | spent | {'samples': 32, 'correct': [32, right_of(job.arm, job.seed), 0]}
        steps = rows.earlier_steps(there, job.arm) if job.part == 'final' else {}
        there.append(part | {'earlier': {o: {'step': s, 'samples': 8, 'correct': [8, 2, 0]} for o, s in steps.items()}})
    return there


def test_the_analysis_tells_what_the_rows_hold():
    there = whole_study()
    assert rows.wanted(there) == []

    def points(a, b, seeds=SEEDS):
        return f'{np.mean([right_of(a, s) - right_of(b, s) for s in seeds]) / 96 * 100:.2f}'

    primary = analysis.primary_table(there)
    assert '| R | 87.5, 87.5 | **100.0, 100.0** | 87.5, 87.5 |' in analysis.rates_table(there)
    assert f'| R - P | {points("R", "P")} |' in primary and f'| R - G | {points("R", "G")} |' in primary
    assert primary.count('| helps |') == 2 and primary.count('| no relevant effect |') == 1
    guard = analysis.guard_table(there)
    assert '| R - P | 0.00 |' in guard and guard.count('| holds |') == 2
    exploratory = analysis.exploratory_table(there)
    assert f'| at equal steps, 4 seeds | C - R | {points("C", "R", SEEDS[:4])} |' in exploratory
    # After 200 steps R has 10 of 24 right.
    less = 100 * (10 / 24 - np.mean([32 + right_of('P', s) for s in SEEDS]) / 96)
    assert f'| at equal seconds: R at step 200 | R - P | {less:.2f} |' in exploratory
    assert '| at equal seconds: both at their last steps | R - G |' in exploratory
    arms = analysis.arms_table(there)
    assert '| R | 0.0001 | 50.' in arms and '0.500 → 0.250 |' in arms and arms.count('\n') == 7
    assert '| 960 | 6.0 | 700 |' in arms and '| 960 | 24.0 | 700 |' in arms, 'P makes four passes over its batches'
    assert '| 0 of 8 | 0.25 of 48 |' in analysis.moves_table(there)
    polarised = analysis.polarisation_table(there)
    assert '| 26 to 32 of 32 | 1 | 100.0 / 0 |' in polarised and '| 0 to 0 of 32 | 1 | 0.0 / 100 |' in polarised
    assert polarised.count('\n') == 4
