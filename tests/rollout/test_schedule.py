"""When α becomes π_θ and when hard prompts are asked again (Algorithm 1, lines 3 and 12)."""

from bapo_jax.rollout.schedule import reevaluation_due, sync_due


def lags(every: int, steps: int) -> list[int]:
    version, result = 0, []
    for step in range(1, steps + 1):
        if sync_due(step, every):
            version = step - 1
        result.append(step - 1 - version)
    return result


def test_the_lag_cycles_from_0_to_v_minus_1_and_alpha_is_theta_0_before_the_first_sync():
    assert lags(5, 12) == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]


def test_with_v_1_the_rollout_policy_is_always_the_current_one():
    assert lags(1, 6) == [0] * 6


def test_reevaluation_falls_on_multiples_of_m():
    assert [t for t in range(1, 13) if reevaluation_due(t, 4)] == [4, 8, 12]
