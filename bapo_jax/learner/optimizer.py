"""The optimizer: learning-rate schedules for the policy, and AdamW on clipped gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

FINAL_SHARE = 0.1  # final learning rate of cosine and linear, as a fraction of the peak


def learning_rate_of(learner: Any) -> optax.Schedule:
    """Returns the policy's learning rate as a function of the optimizer steps done.

    `learner` is the learner section of a resolved config. The rate warms up linearly from 0 to the peak. At
    step u of T = decay_updates after that, with f = FINAL_SHARE, it is

        constant   peak
        cosine     peak (f + (1 - f) (1 + cos(π u / T)) / 2)
        linear     peak (1 - (1 - f) u / T)

    From T on, cosine and linear stay at peak · f. The optimizer state has the count, so a resumed run
    continues the schedule.
    """
    peak = learner.learning_rate
    match learner.schedule.kind:
        case 'constant':
            after = optax.constant_schedule(peak)
        case 'cosine':
            after = optax.cosine_decay_schedule(peak, learner.schedule.decay_updates, alpha=FINAL_SHARE)
        case 'linear':
            after = optax.linear_schedule(peak, peak * FINAL_SHARE, learner.schedule.decay_updates)
    if not learner.schedule.warmup_updates:
        return after
    return optax.join_schedules(
        [optax.linear_schedule(0.0, peak, learner.schedule.warmup_updates), after],
        [learner.schedule.warmup_updates],
    )


def clipped_adamw(
    learning_rate: optax.ScalarOrSchedule, learner: Any, vision: bool = False
) -> optax.GradientTransformation:
    """Returns AdamW on gradients clipped by global norm, with the settings of a config's learner section.

    With `vision`, the trained parameters include a vision tower, whose learning rate is `vision_rate` times
    that of the others.
    """
    adamw = optax.adamw(
        learning_rate,
        b1=learner.adam.b1,
        b2=learner.adam.b2,
        eps=learner.adam.eps,
        weight_decay=learner.weight_decay,
        mu_dtype=learner.adam.first_moment_dtype,
    )
    if vision and learner.vision_rate != 1:
        slower = optax.masked(
            optax.scale(learner.vision_rate), lambda params: {name: name == 'vision' for name in params}
        )
        adamw = optax.chain(adamw, slower)
    return optax.chain(optax.clip_by_global_norm(learner.grad_clip), adamw)


def without_moments(opt_state: Any) -> Any:
    """Returns an optimizer state in which Adam begins anew; the count of a schedule goes on.

    The old moments are deleted, as by an update: whoever holds them would keep their memory throughout it.
    """

    def is_adam(part: Any) -> bool:
        return isinstance(part, optax.ScaleByAdamState)

    def zeros(x: jax.Array) -> jax.Array:
        shape, dtype, sharding = x.shape, x.dtype, x.sharding
        x.delete()
        # Arrays begin on a device, also those that are kept in host memory.
        new = jnp.zeros(shape, dtype, device=sharding.with_memory_kind('device'))
        return jax.device_put(new, sharding)

    return jax.tree.map(
        lambda part: jax.tree.map(zeros, part) if is_adam(part) else part, opt_state, is_leaf=is_adam
    )
