"""Every metric of a training step: its name, unit, meaning and computation. A quantity that verl has too keeps verl's name.

Of the fresh groups, before filtering
    critic/score/mean                        mean accuracy k/G; nan without a judged group
    critic/rewards/mean                      mean reward; not the accuracy where rewards are shaped or fractions
    accuracy_bins                            number of groups with k = 0..G correct responses
    response_length/{mean,max}               tokens; clip_ratio: share of responses cut at the limit
    response_length/image_tokens             of questions with images: tokens that stand for an image, sampled, and not trained on
    reward/{unparseable,infra_error}         responses without a readable answer, and those on which the verifier failed
Of the batch
    bapo/{x1,x2,x3,replay}_groups            groups by origin (replay only in rows that have it); bapo/batch_groups: all groups
    bapo/discarded/{filtered,infra_error}    fresh groups that are not in X1, by reason; infra_error: groups without responses too
    bapo/reevaluated, bapo/improved          hard prompts re-evaluated, and those of them that gave a group of X2
    bapo/{c2,c3}, bapo/r_tot                 thresholds of X3, and the performance they follow
    bapo/x3/{age,mean_reward,uses}           means over X3: age in steps, accuracy (mean_reward), earlier uses in training
    staleness/{mean,max}                     steps between the behaviour policy and π_θ
    bapo/lag                                 steps between α and π_θ
Of the selector: prompts/{posterior_mean,seen,candidates}, see prompts/mopps.py
Of the buffer, after the step: see replay/buffer.py
    buffer/{bad,high}/{size,added,evicted,age_mean,bytes}, buffer/bad/evicted_unseen; of RePO: buffer/repo/{prompts,responses,bytes}
Of the update, means over its mini-batches
    actor/{pg_loss,kl_loss,entropy,pg_clipfrac,ppo_kl,grad_norm}   nats a token; pg_clipfrac: share of tokens held back by the clip
    actor/lr, actor/updates                  learning rate of the last optimizer step; optimizer steps
    {actor,critic}/skipped_updates           mini-batches whose loss or gradient was not finite; they change nothing
    actor/pg_clipfrac/ORIGIN, staleness/{tv,ratio,ess}/ORIGIN      by origin, of π_θ against the behaviour policy
Of a batch with images
    images/{prompts,features}                distinct prompts with images in its mini-batches, and the features of these images
    images/pixel_bytes                       of the patches that the vision tower reads for the update
Of the critic, where the row has one, in rewards
    critic/{value_loss,grad_norm}            means over the mini-batches of its update
    critic/value_mean                        mean value of the batch's trained tokens, before the update
    critic/explained_variance                1 - Var(R - V) / Var(R) over those tokens, R the return; absent where R does not vary
Of the paper's theory, every theory.every steps: theory/…, see learner/monitors.py
Of the engine against the trainer, at steps where α is π_θ: mismatch/{logprob_abs_mean,logprob_abs_max,kl,ess}, see learner/update.py
Counters since the run began
    rollout/responses_total                  responses generated, re-evaluation and refills included: the cost in Table 1, Figure 9
    rollout/discarded_total                  fresh responses not trained on
    rollout/{reevaluated,reused}_total       responses of re-evaluation; replayed responses
Seconds: timing_s/{step,weight_sync,wait_rollouts,gen,reward,reevaluate,compose,pack,old_log_prob,values,update_actor,update_critic,
    theory,testing,save_checkpoint}
    perf/throughput                          trained tokens per second of the step
    perf/kept_pixel_bytes                    pixels of images in host memory between uses; all else holds references
    perf/checkpoint_bytes                    of the checkpoint after the step before, which training waited save_checkpoint for
Scores: val-core/BENCHMARK/acc/{mean@n,pass@n,maj@n}, where the step evaluates; see scores.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from bapo_jax.groups import REPLAY, X1, X2, X3, Batch, Group, Verdict


def fresh_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Metrics of a step's fresh groups before filtering: score, lengths, verdicts, accuracy bins."""
    verdicts = Counter(v for g in groups for v in g.verdicts)
    judged = [g for g in groups if not g.infra_error]
    lengths = np.array([len(r.tokens) for g in groups for r in g.responses])
    masked = [~r.trained_on for g in groups if g.prompt.images for r in g.responses]
    bins = np.bincount([g.correct for g in judged], minlength=max(g.size for g in groups) + 1)
    return {
        'critic/score/mean': float(np.mean([g.accuracy for g in judged])) if judged else float('nan'),
        'critic/rewards/mean': float(np.mean([g.rewards for g in judged], dtype=np.float64)) if judged else float('nan'),
        'accuracy_bins': bins.tolist(),
        'response_length/mean': float(lengths.mean()),
        'response_length/max': int(lengths.max()),
        'response_length/clip_ratio': float(np.mean([r.finish == 'length' for g in groups for r in g.responses])),
        **({'response_length/image_tokens': int(np.concatenate(masked).sum())} if masked else {}),
        'reward/unparseable': verdicts[Verdict.UNPARSEABLE],
        'reward/infra_error': verdicts[Verdict.INFRA_ERROR],
    }


def batch_metrics(batch: Batch, step: int) -> dict[str, Any]:
    """The composition of the training batch, and its staleness: by how many steps each behaviour policy lags π_θ."""
    ages = np.array([step - 1 - r.version for g in batch.groups for r in g.responses])
    replayed = {f'bapo/{REPLAY}_groups': batch.count(REPLAY)} if REPLAY in batch.origins else {}
    return {
        **{f'bapo/{origin}_groups': batch.count(origin) for origin in (X1, X2, X3)},
        **replayed,
        'bapo/batch_groups': len(batch.groups),
        'staleness/mean': float(ages.mean()) if len(ages) else 0.0,
        'staleness/max': int(ages.max()) if len(ages) else 0,
    }


def discarded_metrics(fresh: Sequence[Group], batch: Batch) -> dict[str, int]:
    """Why fresh groups are not in X1. Together with bapo/x1_groups the counts cover all fresh groups."""
    broken = sum(g.infra_error for g in fresh)
    return {'bapo/discarded/filtered': len(fresh) - broken - batch.count(X1), 'bapo/discarded/infra_error': broken}


def trained_tokens(batch: Batch) -> int:
    """The number of prompt and response tokens in a batch, a prompt counted once for each response."""
    return sum(len(g.prompt.tokens) + len(r.tokens) for g in batch.groups for r in g.responses)
