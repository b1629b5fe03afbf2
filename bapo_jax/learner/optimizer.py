"""The optimizer: the policy's learning rate over its optimizer steps, and AdamW on clipped gradients."""

from __future__ import annotations

from typing import Any

import optax


def learning_rate_of(learner: Any) -> optax.Schedule:
    """The policy's learning rate by the number of optimizer steps before; `learner` is the learner's part of a resolved config.

    Linear warm-up from 0 to the peak; then, u of T = decay_updates optimizer steps later and with f = final_share,

        constant   peak
        cosine     peak (f + (1 - f) (1 + cos(π u / T)) / 2)
        linear     peak (1 - (1 - f) u / T)

    From T on, cosine and linear stay at peak · f. The count is in the optimizer's state, so a continued run goes on where it was.
    """
    peak = learner.learning_rate
    match learner.schedule:
        case 'constant':
            after = optax.constant_schedule(peak)
        case 'cosine':
            after = optax.cosine_decay_schedule(peak, learner.decay_updates, alpha=learner.final_share)
        case 'linear':
            after = optax.linear_schedule(peak, peak * learner.final_share, learner.decay_updates)
    if not learner.warmup_updates:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, learner.warmup_updates), after], [learner.warmup_updates])


def clipped_adamw(learning_rate: optax.ScalarOrSchedule, learner: Any, vision: bool = False) -> optax.GradientTransformation:
    """AdamW on gradients clipped by their global norm; `learner`, the learner's part of a config, has all else.

    With `vision`, the parameters have a tower, whose rate is `vision_rate` times the others'. A frozen one has no moments; it must
    have a gradient of 0.
    """
    adamw = optax.adamw(
        learning_rate, b1=learner.adam_b1, b2=learner.adam_b2, eps=learner.adam_eps, weight_decay=learner.weight_decay,
        mu_dtype=learner.first_moment_dtype,
    )  # fmt: skip
    if vision and not learner.vision_rate:
        adamw = optax.masked(adamw, lambda params: _of_vision(params, False, True))
    elif vision and learner.vision_rate != 1:
        slower = optax.masked(optax.scale(learner.vision_rate), lambda params: _of_vision(params, True, False))
        adamw = optax.chain(adamw, slower)
    return optax.chain(optax.clip_by_global_norm(learner.grad_clip), adamw)


def _of_vision(params: Any, tower: bool, rest: bool) -> dict[str, bool]:
    return {name: tower if name == 'vision' else rest for name in params}
