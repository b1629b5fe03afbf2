"""Every metric that a run can write: its name, unit, meaning, and what a normal value is. Writes docs/metrics.md.

    python -m bapo_jax.run.metric_table

In a name, {a,b} stands for either, ORIGIN for x1, x2, x3 or replay, BENCHMARK for a benchmark's name, and n for a number of
samples.
A quantity that verl has too keeps verl's name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from bapo_jax.files import replace_part
from bapo_jax.groups import REPLAY, X1, X2, X3

PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'metrics.md'


class Metric(NamedTuple):
    """A row of the table."""

    name: str
    unit: str
    meaning: str
    normal: str  # what to expect, and what another value means


M = Metric
TABLE: dict[str, tuple[Metric, ...]] = {
    'Fresh groups, before filtering': (
        M(
            'critic/score/mean', 'share', 'mean accuracy k/G of judged groups; nan without one',
            'rises noisily; 0 throughout gives no gradient',
        ),
        M(
            'critic/rewards/mean', 'reward', 'mean reward of judged groups',
            'equals the score unless rewards are shaped or fractions',
        ),
        M(
            'accuracy_bins', 'groups', 'how many judged groups have k = 0..G correct responses',
            'moves to the right; all at both ends leaves nothing to train on',
        ),
        M(
            'response_length/{mean,max}', 'tokens', 'length of responses',
            'a mean at the limit, or falling to a few tokens, is a fault',
        ),
        M(
            'response_length/clip_ratio', 'share', 'responses cut at the limit',
            'low; where it grows, raise rollout.max_response_tokens or look for repetition',
        ),
        M(
            'response_length/image_tokens', 'tokens',
            'of questions with images: sampled tokens that stand for an image, not trained on',
            '0; more says that the policy writes placeholders',
        ),
        M('reward/unparseable', 'responses', 'those without a readable answer', 'falls early; a rise says that the format is lost'),
        M(
            'reward/infra_error', 'responses', 'those on which the verifier failed',
            '0; otherwise look at the verifier: their groups are lost',
        ),
    ),
    'Batch': (
        M(
            'bapo/{x1,x2,x3}_groups', 'groups', 'of the batch: fresh, re-evaluated, replayed',
            'X2 and X3 are 0 where the method has none; X3 fills what X1 and X2 leave',
        ),
        M('bapo/replay_groups', 'groups', "RePO's replayed groups", '0 until histories are full'),
        M(
            'bapo/batch_groups', 'groups', 'all groups of the batch',
            'at most learner.batch_groups, of RePO twice that; 0 trains on nothing',
        ),
        M(
            'bapo/discarded/filtered', 'groups', 'fresh groups that the filter left out of X1',
            'grows as prompts become all right or all wrong; all of them starves X1',
        ),
        M(
            'bapo/discarded/infra_error', 'groups', 'fresh groups with a failed verifier or without responses',
            '0; otherwise look at verifier and servers',
        ),
        M(
            'bapo/reevaluated', 'groups', 'hard prompts re-evaluated',
            'above 0 only each replay.reevaluate_every steps; always 0 without X2',
        ),
        M(
            'bapo/improved', 'groups', 'those of them that qualify for X2',
            'at most bapo/reevaluated; 0 throughout says that X2 spends responses for nothing',
        ),
        M(
            'failed_again/{asked,mixed}/{1,5,20,60}', 'groups', 'prompts that failed so many steps ago, asked again; those now mixed',
            'replay.probe; mixed/asked beside the share of mixed fresh groups says what X2 could earn. The report has both',
        ),
        M(
            'retries/may_be_asked', 'prompts', 'hard prompts that this step could ask again',
            'present where prompts were re-evaluated and replay.reevaluate is posterior or continue',
        ),
        M(
            'retries/{prior_mean,prior_strength}', 'share, responses', 'the Beta prior of success rates: its mean, and a + b',
            'replay.reevaluate=posterior; the weaker the prior, the more alike are the answers to one prompt',
        ),
        M(
            'retries/expected_mixed', 'groups', 'how many of the re-evaluated groups the posterior expects to be mixed',
            'replay.reevaluate=posterior; near bapo/improved while few are pooled',
        ),
        M(
            'retries/pooled', 'groups', "re-evaluated groups joined with the prompt's earlier one",
            'replay.reevaluate=posterior; 0 once π_θ moves farther than replay.pool_within in the meantime',
        ),
        M(
            'retries/given_share', 'share', 'the part of a right response that was given',
            'replay.reevaluate=continue; falls as the policy improves',
        ),
        M(
            'retries/continued_right', 'share', 'responses that were right with this help',
            'replay.reevaluate=continue; about a half',
        ),
        M(
            'bapo/{c2,c3}', 'share', 'bounds of the accuracy of X3',
            'c2 at most c3; fixed where replay.c2 and replay.c3 are single numbers',
        ),
        M(
            'bapo/r_tot', 'share', 'the performance that the bounds follow',
            'follows critic/score/mean; of the whole buffer where replay.r_tot says so',
        ),
        M('bapo/x3/age', 'steps', 'mean age of X3', 'at most replay.high_recent_steps'),
        M('bapo/x3/mean_reward', 'share', 'mean accuracy of X3', 'between bapo/c2 and bapo/c3'),
        M(
            'bapo/x3/uses', 'uses', 'mean earlier uses of X3 in training',
            'small; a rise says that the buffer is too small for the places it fills',
        ),
        M(
            'staleness/{mean,max}', 'steps', 'between behaviour policy and π_θ',
            '0 where α is π_θ at each step; grows with rollout.sync_every and the age of X3',
        ),
        M('bapo/lag', 'steps', 'between α and π_θ', 'below rollout.sync_every; a steady rise says that α is not synced'),
    ),
    'Selector': (
        M(
            'prompts/posterior_mean', 'share', 'mean success rate that MoPPS expects of the chosen prompts',
            'moves towards its target; apart from the score, evidence is old',
        ),
        M(
            'prompts/candidates', 'prompts', 'those that the choice was made from',
            'constant: prompts.candidates times the batch, or all prompts',
        ),
        M(
            'prompts/seen', 'prompts', 'those observed since the run began',
            'never falls; a plateau far below all prompts says that some are never chosen',
        ),
    ),
    'Buffer, after the step': (
        M('buffer/{bad,high}/size', 'entries', 'what each part holds', 'at most its capacity'),
        M(
            'buffer/{bad,high}/{added,evicted}', 'entries', 'what this step added and evicted, for any reason',
            'evictions near additions once a part is full',
        ),
        M(
            'buffer/bad/evicted_unseen', 'entries', 'hard prompts evicted without a re-evaluation',
            'near all evictions with X2 says: capacity or replay.max_reevaluate is too small',
        ),
        M(
            'buffer/{bad,high}/age_mean', 'steps', 'mean age of the entries',
            'of high, below replay.high_recent_steps; a bad part without turnover only ages',
        ),
        M('buffer/{bad,high}/bytes', 'bytes', 'of token and log-prob arrays', 'bounded by the capacity'),
        M('buffer/repo/prompts', 'prompts', 'those that RePO remembers', 'grows until every prompt was drawn'),
        M('buffer/repo/responses', 'responses', 'those that RePO remembers', 'at most replay.per_prompt for each prompt'),
        M('buffer/repo/bytes', 'bytes', 'of its token and log-prob arrays', 'grows with its responses; watch host memory'),
    ),
    'Update: means over mini-batches': (
        M('actor/pg_loss', 'loss', "policy loss, as the row's aggregation weighs it", 'near 0 and of either sign; its level says nothing of progress'),
        M(
            'actor/kl_loss', 'nats a token', 'KL estimate to the reference policy',
            'rises slowly; a jump says that the policy left its base; 0 where there is none',
        ),
        M(
            'actor/entropy', 'nats a token', "entropy of the policy's next token",
            'falls slowly; near 0 means collapse, a steady rise means noise',
        ),
        M(
            'actor/pg_clipfrac', 'share', 'tokens held back by the clip',
            'small; a large share says that the policy moves too far within a step',
        ),
        M(
            'actor/ppo_kl', 'nats a token', "estimate of the KL to the objective's anchor policy, by the mean log ratio",
            'near 0, of either sign; large values say: lower the learning rate',
        ),
        M('actor/grad_norm', 'norm', 'of the gradient, before clipping', 'steady; a spike that recurs, or 0, is a fault'),
        M('actor/lr', 'rate', 'learning rate of the last optimizer step', 'follows learner.schedule'),
        M(
            'actor/updates', 'updates', 'optimizer steps',
            'mini-batches times learner.passes_per_batch, less those skipped; 0 where nothing was trained on',
        ),
        M(
            '{actor,critic}/skipped_updates', 'updates', 'mini-batches whose loss or gradient was not finite',
            '0; learner.skip_limit steps with one in a row end the run',
        ),
        M(
            'actor/pg_clipfrac/ORIGIN', 'share', 'tokens held back by the clip, by origin',
            'larger for older data; near 1 says that this origin teaches little',
        ),
        M(
            'staleness/tv/ORIGIN', 'share', 'total variation of π_θ from the behaviour policy, a token',
            '0 where they agree; grows with age',
        ),
        M(
            'staleness/ratio/ORIGIN', 'ratio', 'mean importance ratio of a token',
            'near 1; far from 1 says that stored log-probs are wrong or too old',
        ),
        M(
            'staleness/ess/ORIGIN', 'share', 'effective sample size of the tokens',
            '1 where policies agree; near 0, few tokens carry the estimate',
        ),
    ),
    'Images': (
        M('images/prompts', 'prompts', 'distinct prompts with images in the mini-batches', 'above 0 where the batch has images'),
        M('images/features', 'features', 'features of these images', 'grows with the pixels of an image'),
        M(
            'images/pixel_bytes', 'bytes', 'of the patches that the tower reads for the update',
            'grows with the pixels; bound it by model.most_pixels',
        ),
    ),
    'Critic, where the method has one': (
        M('critic/value_loss', 'reward²', 'loss of the critic', 'falls, then follows the policy; a rise says that values lag'),
        M('critic/grad_norm', 'norm', "of the critic's gradient", 'steady; a recurring spike is a fault'),
        M(
            'critic/value_mean', 'reward', "mean value of the batch's trained tokens, before the update",
            'near critic/rewards/mean of the batch; apart, values are biased',
        ),
        M(
            'critic/explained_variance', 'share', '1 - Var(R - V) / Var(R), R the return; absent where R does not vary',
            'towards 1; below 0 the critic is worse than a constant',
        ),
    ),
    'Theory, every theory.every steps: learner/monitors.py': (
        M('theory/K1', 'factor', 'what the bound charges for distance from α_1', 'constant for one G'),
        M(
            'theory/K{2,3}', 'factor', 'the same for X2 and X3, at the least variance that can occur',
            'constant while thresholds are; nan: no level k/G is within them',
        ),
        M(
            'theory/K{2,3}_printed', 'factor', 'the same by the printed equations',
            'lower than K2 or K3: the printed equation promises too much',
        ),
        M(
            'theory/delta{1,3}/{mean,p95,max}', 'share', 'TV of whole responses, over the prompts of X1 and X3',
            'close to 1 for long responses: the theorem then assumes too much',
        ),
        M(
            'theory/tv_token/ORIGIN', 'share', 'TV of the next token to the behaviour policy',
            '0 where policies agree; grows with age',
        ),
        M(
            'theory/tv_sequence/ORIGIN', 'share', 'TV of whole responses',
            'close to 1 for long responses of an older policy; of X2 it is engine mismatch',
        ),
        M(
            'theory/tv_sequence_after/ORIGIN', 'share', 'the same after the update',
            'above tv_sequence where the update moved away from that policy',
        ),
        M(
            'theory/tv_bound/ORIGIN', 'share', 'upper bound of tv_sequence by the estimated KL',
            'above tv_sequence, but for the error of the estimate',
        ),
        M(
            'theory/kl_sequence/ORIGIN', 'nats a response', 'KL to the policy now, by k3',
            'never negative; grows with age and length',
        ),
        M(
            'theory/kl_sequence_k1/ORIGIN', 'nats a response', 'the same by k1',
            'near kl_sequence; apart, few responses carry it or stored log-probs are wrong',
        ),
        M(
            'theory/ess_sequence/ORIGIN', 'share', 'effective sample size of whole responses',
            '1 where policies agree; 1/n where one response carries all',
        ),
        M('theory/surrogate/ORIGIN', 'standard deviations', 'L of the policy before the update', '0 where α is that policy'),
        M(
            'theory/surrogate_after/ORIGIN', 'standard deviations', 'L of the policy after the update',
            'above surrogate where the update helped on these responses',
        ),
        M(
            'theory/bound/ORIGIN', 'standard deviations', "the origin's summand of the bound",
            'below 0 it guarantees no improvement, which is usual',
        ),
    ),
    'Engine against trainer, where α is π_θ: learner/update.py': (
        M(
            'mismatch/logprob_abs_{mean,max}', 'nats', 'difference of log-probs of a token of X1',
            'of the size of rounding; a jump says: stale or differently rounded weights',
        ),
        M(
            'mismatch/kl', 'nats a token', 'KL from engine to trainer, by k3',
            'near 0, never negative; growth says that the engine has other weights',
        ),
        M(
            'mismatch/ess', 'share', "effective sample size of the engine's tokens",
            'near 1; lower means that engine and trainer disagree',
        ),
    ),
    'Counters since the run began': (
        M(
            'rollout/responses_total', 'responses', 'generated, re-evaluation and refills included',
            'never falls; the cost to compare methods by',
        ),
        M(
            'rollout/discarded_total', 'responses', 'fresh ones not trained on',
            'never falls; near all of them, the filter or the task is too hard or too easy',
        ),
        M(
            'rollout/{reevaluated,reused}_total', 'responses', 'of re-evaluation; replayed',
            '0 where the method has none; else grows',
        ),
    ),
    'Time, memory and speed': (
        M(
            'timing_s/{step,weight_sync,wait_rollouts,gen,reward,reevaluate,compose,'
            'pack,old_log_prob,values,update_actor,update_critic,theory,rollouts,testing,save_checkpoint}', 's',
            'seconds of the step or a phase of it',
            'steady after compilation; wait_rollouts near step says: answering is the bottleneck',
        ),
        M('perf/throughput', 'tokens/s', 'trained tokens per second of the step', 'steady; compare on one machine only'),
        M(
            'perf/throughput/update', 'tokens/s',
            "tokens in the rows of the policy's updates, a prompt once a row, per second of update_actor",
            'steady after compilation; grows as rows are filled better',
        ),
        M(
            'perf/throughput/gen', 'tokens/s', 'tokens of the groups that ended, per second in which any was asked for',
            'steady; falls where a few long responses are waited for',
        ),
        M(
            'perf/mfu/actor', 'share', "the model's arithmetic of the updates, of what the devices can do in update_actor",
            'nothing recomputed counts; 0.3 to 0.5 is good; absent where the peak of the devices is not known, as on CPUs',
        ),
        M(
            'perf/idle/trainer', 'share', 'of the step: the trainer waited for responses',
            'low with rollout.overlap; else what sampling takes. The report says what to do',
        ),
        M(
            'perf/idle/engine', 'share', 'of the step: nothing was sampled, while the trainer worked and handed over no policy',
            'low with rollout.overlap; else what training takes',
        ),
        M(
            'perf/servers/cache_used', 'share', 'of a server\'s KV cache; the largest that was seen in the step',
            'below 1; low with none waiting: the server gets too few responses',
        ),
        M(
            'perf/servers/waiting', 'responses', 'those that waited in a server; the most that were seen in the step',
            '0 while the trainer waits says that the servers have room',
        ),
        M(
            'perf/servers/preemptions', 'preemptions', 'responses that a full cache threw out, to be computed again',
            '0; otherwise lower rollout.concurrency, or give servers more memory',
        ),
        M(
            'perf/kept_pixel_bytes', 'bytes', 'pixels of images in host memory between uses',
            'bounded; a steady rise fills host memory',
        ),
        M(
            'perf/checkpoint_bytes', 'bytes', 'of the checkpoint after the step before',
            'constant but for the replay and kept policies',
        ),
    ),
    'Scores, where the step evaluates': (
        M(
            'val-core/BENCHMARK/acc/{mean,pass,maj}@n', 'share', 'mean accuracy, any right, majority right of n samples',
            'rises; mean without pass sharpens what was known; falling is overfitting or collapse',
        ),
    ),
}  # fmt: skip

_STANDS_FOR = {
    'ORIGIN': f'({X1}|{X2}|{X3}|{REPLAY})',
    'BENCHMARK': '.+',  # a name, or the path of a file
    '@n': r'@\d+',
}


def pattern(name: str) -> re.Pattern[str]:
    """Matches the metrics that a name of the table stands for, as a whole."""
    text = re.sub(r'\{([^}]*)\}', lambda found: f'({found[1].replace(",", "|")})', name)
    for word, expression in _STANDS_FOR.items():
        text = text.replace(word, expression)
    return re.compile(text)


_PATTERNS = [(pattern(metric.name), metric) for of_heading in TABLE.values() for metric in of_heading]


def entries_of(name: str) -> list[Metric]:
    """The rows of the table that a metric's name matches: one, for each metric of a run."""
    return [metric for expression, metric in _PATTERNS if expression.fullmatch(name)]


def markdown() -> str:
    """The tables as they stand in docs/metrics.md."""
    parts = []
    for heading, metrics in TABLE.items():
        lines = ['| name | unit | meaning | normal |', '| --- | --- | --- | --- |']
        lines += [f'| `{m.name.replace(",", ", ")}` | {m.unit} | {m.meaning} | {m.normal} |' for m in metrics]
        parts.append(f'\n## {heading}\n\n' + '\n'.join(lines) + '\n')
    return ''.join(parts) + '\n'


if __name__ == '__main__':
    replace_part(PAGE, 'metrics', markdown())
