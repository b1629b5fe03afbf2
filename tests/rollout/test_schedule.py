"""When α becomes π_θ, when hard prompts are re-evaluated (Algorithm 1, lines 3 and 12), and how far ahead α may answer."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bapo_jax.config import default_config, resolve
from bapo_jax.rollout.schedule import Schedule, is_due, schedule_of


def lags(every: int, steps: int) -> list[int]:
    schedule, version, result = Schedule(steps, every, 0, 0), 0, []
    for step in range(1, steps + 1):
        if schedule.sync_due(step):
            version = step - 1
        result.append(step - 1 - version)
    return result


def test_the_lag_cycles_from_0_to_v_minus_1_and_alpha_is_theta_0_before_the_first_sync():
    assert lags(5, 12) == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]


def test_the_phase_of_the_authors_code_syncs_at_step_1_and_every_v_steps_after():
    schedule = Schedule(12, 5, 0, 0, sync_phase='code')
    assert [t for t in range(1, 13) if schedule.sync_due(t)] == [1, 6, 11]


def test_with_v_1_the_rollout_policy_is_always_the_current_one():
    assert lags(1, 6) == [0] * 6


def test_reevaluation_falls_on_multiples_of_m():
    assert [t for t in range(1, 13) if Schedule(12, 5, 4, 0).reevaluation_due(t)] == [4, 8, 12]


def test_a_period_of_0_means_never():
    assert not any(is_due(0, t) or Schedule(12, 5, 0, 0).reevaluation_due(t) for t in range(13))


def test_the_schedule_of_a_row_re_evaluates_only_where_x2_is_trained_on():
    c = default_config()
    c.model.path = 'unused'
    c.rollout.sync_every, c.replay.reevaluate_every, c.evaluate.every = 3, 2, 7
    for use_x2, m in ((True, 2), (False, 0)):
        c.replay.use_x2 = use_x2
        schedule = schedule_of(resolve(c), 40)
        assert (schedule.steps, schedule.sync_every, schedule.reevaluate_every, schedule.evaluate_every) == (40, 3, m, 7)
    c.replay.kind, c.learner.traces.loss, c.replay.fresh_filter, c.replay.use_x3 = 'exgrpo', 'shaped', 'none', False
    assert schedule_of(resolve(c), 40).reevaluate_every == 1  # every step asks prompts again


def test_a_mixture_draws_every_age_up_to_n_until_the_switch_and_at_it():
    """ReMix: a share p of older policies, ages uniform over 1 … N; 0 is α. Each share within four standard deviations."""
    n, p, N = 6000, 0.4, 3
    schedule = Schedule(9, 1, 0, 0, mixture=p, mixture_policies=N, switch_step=4, seed=1)
    for step in (1, 4):
        shares = np.bincount(schedule.ages(step, n), minlength=N + 1) / n
        np.testing.assert_allclose(shares, [1 - p, *[p / N] * N], atol=4 * 0.5 / n**0.5)
    assert not schedule.ages(5, n).any()
    assert schedule._replace(switch_step=0).ages(500, n).any()
    np.testing.assert_array_equal(schedule.ages(3, n), schedule.ages(3, n))
    assert (schedule.ages(3, n) != schedule.ages(2, n)).any() and (schedule.ages(3, n) != schedule._replace(seed=2).ages(3, n)).any()


def other_policy_times(v, m, e, last):
    """When the engine changes its policy, as (step, phase): 0 sync, 1 own fresh prompts, 2 re-evaluation, 3 evaluation."""
    return [
        time for t in range(1, last + 1)
        for time, due in (((t, 0), t % v == 0), ((t, 2), m and t % m == 0), ((t, 3), e and t % e == 0)) if due
    ]  # fmt: skip


@given(v=st.integers(1, 6), m=st.integers(0, 6), e=st.integers(0, 6), step=st.integers(1, 30), behind=st.integers(0, 5))
def test_most_behind_steps_past_a_sync_are_asked_before_it(v, m, e, step, behind):
    """As far as no re-evaluation or evaluation comes between: those wait for what is under way."""
    last = 30
    others = [load for load in other_policy_times(v, m, e, last) if load[1]]
    plain, schedule = Schedule(last, v, m, e), Schedule(last, v, m, e, most_behind=behind)
    syncs = [t for t in range(step + 1, last + 1) if t % v == 0]
    first = syncs[0] if syncs else last + 1
    wanted = [
        t for t in range(step + 1, last + 1) if t < first + behind and not any((step, 2) < load < (t, 1) for load in others)
    ]
    assert schedule.last_ahead(step) == max(wanted, default=step) >= plain.last_ahead(step)


@given(v=st.integers(1, 6), m=st.integers(0, 6), e=st.integers(0, 6), step=st.integers(1, 30))
def test_a_step_is_asked_ahead_as_far_as_no_other_policy_comes_between(v, m, e, step):
    last = 30
    loads = other_policy_times(v, m, e, last)

    def safe(t):  # asked from `step` (its re-evaluation over) to the moment it would be asked anyway
        return not any((step, 2) < load < (t, 1) for load in loads)

    ahead = Schedule(last, v, m, e).last_ahead(step)
    assert all(safe(t) for t in range(step + 1, ahead + 1))
    assert ahead == last or not safe(ahead + 1)
