"""Every metric that a run can write: its name, unit, meaning, and what a normal value is. Writes docs/reference/metrics.md.

    python -m docs.reference.metrics

In names, {a,b} means either, ORIGIN is x1, x2, x3 or replay, BENCHMARK the name of a benchmark, and n a number of
samples. If verl has the metric, it has verl's name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from bapo_jax.groups import REPLAY, X1
from bapo_jax.replay.bapo import X2, X3
from bapo_jax.machine.files import replace_part

PAGE = Path(__file__).with_suffix('.md')


class Metric(NamedTuple):
    """A row of the table."""

    name: str
    unit: str
    meaning: str
    normal: str  # the expected value, and what others mean


M = Metric
TABLE: dict[str, tuple[Metric, ...]] = {
    'Fresh groups, before filtering': (
        M(
            'critic/score/mean', 'share', 'mean accuracy k/G of judged groups; nan if there are none',
            'rises noisily; constant 0 gives no gradient',
        ),
        M('critic/rewards/mean', 'reward', 'mean reward of judged groups', 'equals the score unless rewards are shaped or partial'),
        M(
            'accuracy_bins', 'groups', 'number of judged groups with k = 0..G correct responses',
            'moves to the right; groups at either end give no gradient',
        ),
        M('response_length/{mean,max}', 'tokens', 'response length', 'a mean near the limit or near 0 is a fault'),
        M(
            'response_length/clip_ratio', 'share', 'responses truncated at the limit',
            'low; if it rises, raise rollout.max_response_tokens or look for repetition',
        ),
        M(
            'response_length/replies', 'replies', "a tool's replies per response, if there are any (task.turns)",
            'up to task.turns; 0 if the policy stops calling the tool',
        ),
        M(
            'response_length/image_tokens', 'tokens', 'sampled image placeholders, which are not trained on; only with images',
            '0',
        ),
        M('reward/unparseable', 'responses', 'responses without a readable answer', 'falls early; a rise means a lost format'),
        M('reward/infra_error', 'responses', 'responses on which the verifier failed', '0; otherwise check the verifier'),
    ),
    'Batch': (
        M(
            'bapo/{x1,x2,x3}_groups', 'groups', 'fresh, re-evaluated and replayed groups',
            'X3 fills the places left by X1 and X2',
        ),
        M('bapo/replay_groups', 'groups', 'groups with earlier responses, of rows with a replay of their own', '0 until there is something to replay'),
        M('bapo/replay/age', 'steps', 'mean age of replayed groups', 'not repo, arpo; at most capacity / fresh groups of a step'),
        M('bapo/replay/mean_reward', 'share', 'mean accuracy of replayed groups', 'not repo, arpo; follows critic/score/mean'),
        M('bapo/replay/uses', 'uses', 'mean number of earlier uses of replayed groups', 'not repo, arpo; fifo: below replay.fifo.ratio'),
        M('bapo/replay/weight', 'share', 'mean factor of the token weights of replayed groups', 'freshper; 1 if all have the same priority'),
        M(
            'bapo/batch_groups', 'groups', 'all groups of the batch',
            'at most learner.batch_groups (RePO, fifo, freshper, exgrpo: twice that; relift: plus replay.traces.demonstrations)',
        ),
        M('traces/groups', 'groups', 'luffy: fresh groups with a trace', 'bapo/x1_groups, if every prompt has a trace'),
        M('traces/correct', 'groups', 'luffy: those whose trace is correct', 'near traces/groups; others push the policy away from their trace'),
        M('traces/groups_total', 'groups', 'luffy: groups with a trace since the run began', 'rises by traces/groups'),
        M('traces/demonstrations', 'groups', 'relift: traces that joined the batch', '0 or replay.traces.demonstrations'),
        M('traces/queued', 'prompts', 'relift: failed prompts that wait, after the step', 'a steady rise means that the oldest are never taken'),
        M(
            'bapo/discarded/filtered', 'groups', 'fresh groups that are not in the batch; fifo and freshper keep them in memory',
            'grows as prompts become all right or all wrong',
        ),
        M(
            'bapo/discarded/infra_error', 'groups', 'fresh groups without responses or whose verifier failed',
            '0; otherwise check verifier and servers',
        ),
        M('bapo/reevaluated', 'groups', 'hard prompts re-evaluated', '0 except every replay.reevaluate_every steps; exgrpo: rises after its start'),
        M(
            'bapo/improved', 'groups', 're-evaluated groups that qualify for X2',
            'at most bapo/reevaluated; if always 0, X2 wastes its responses',
        ),
        M(
            'failed_again/{asked,mixed}/{1,5,20,60}', 'groups',
            'prompts asked again this many steps after failing; those now mixed',
            'needs log.failed_again.prompts; mixed/asked shows what X2 could gain',
        ),
        M(
            'retries/may_be_asked', 'prompts', 'hard prompts eligible for re-evaluation',
            'replay.reevaluate=posterior or continue',
        ),
        M(
            'retries/{prior_mean,prior_strength}', 'share, responses', 'Beta prior of success rates: its mean, and a + b',
            'posterior only; weaker if prompts are all right or all wrong',
        ),
        M(
            'retries/expected_mixed', 'groups', 're-evaluated groups expected to be mixed',
            'posterior only; near bapo/improved unless many are pooled',
        ),
        M(
            'retries/pooled', 'groups', "re-evaluated groups joined with the prompt's previous one",
            'posterior only; 0 if π_θ moved by more than replay.posterior.pool_within',
        ),
        M('retries/given_share', 'share', 'part of a correct response given as a prefix', 'continue only; falls as the policy improves'),
        M('retries/continued_right', 'share', 'correct responses with this prefix', 'continue only; about one half'),
        M('bapo/{c2,c3}', 'share', 'bounds of the accuracy of X3', 'c2 <= c3; constant if replay.c2 and replay.c3 are numbers'),
        M(
            'bapo/r_tot', 'share', 'average performance, which sets c2 and c3',
            'follows critic/score/mean, or the buffer with replay.shared_pool',
        ),
        M('bapo/x3/age', 'steps', 'mean age of X3', 'at most replay.high_recent_steps'),
        M('bapo/x3/mean_reward', 'share', 'mean accuracy of X3', 'between bapo/c2 and bapo/c3'),
        M('bapo/x3/uses', 'uses', 'mean number of earlier uses of X3', 'small; a rise means that the buffer is too small'),
        M(
            'staleness/{mean,max}', 'steps', 'steps from behaviour policy to π_θ',
            '0 if α is always π_θ; grows with rollout.sync_every and the age of X3',
        ),
        M('bapo/lag', 'steps', 'steps from α to π_θ', 'below rollout.sync_every'),
    ),
    'Prompt selectors': (
        M(
            'prompts/posterior_mean', 'share', 'mean success rate expected of the chosen prompts',
            'moves towards its target; far from the score, evidence is old',
        ),
        M('prompts/candidates', 'prompts', 'prompts that were candidates', 'constant: prompts.mopps.candidates times the batch, or all prompts'),
        M('prompts/{again, mixed}', 'prompts', 'prompts whose last group was mixed: of this step, and in all', 'mixed only; again is half a step'),
        M('prompts/success_mean', 'share', 'mean success rate of the drawn prompts before their results, 0 if not seen', 'prioritised only; rises with the score, and stays below it'),
        M('prompts/prefixed', 'prompts', 'prompts asked from a prefix of a correct response', 'adaprefix only; 0 after the withdrawal'),
        M('prompts/given_share', 'share', 'mean share of that response in the prefix', 'adaprefix only; falls as the policy improves'),
        M('prompts/references', 'prompts', 'prompts asked for their success alone, in the first step of a cycle', 'dots only; prompts.dots.references'),
        M('prompts/predicted', 'share', 'mean predicted success rate of the chosen prompts', 'dots only; near 1/2 if some prompts are of medium difficulty'),
        M('prompts/prediction_error', 'share', 'mean |predicted success rate - accuracy| of the chosen prompts', 'dots only; large if the embeddings say little about success'),
        M('prompts/seen', 'prompts', 'prompts observed since the run began', 'a low plateau means that some are never chosen'),
    ),
    'Buffer, after the step': (
        M('buffer/{bad,high}/size', 'entries', 'entries in each part', 'at most its capacity'),
        M(
            'buffer/{bad,high}/{added,evicted}', 'entries', 'entries added and evicted in this step',
            'about equal once the part is full',
        ),
        M(
            'buffer/bad/evicted_unseen', 'entries', 'hard prompts evicted without a re-evaluation',
            'if near all evictions, raise the capacity or replay.max_reevaluate',
        ),
        M(
            'buffer/{bad,high}/age_mean', 'steps', 'mean age of the entries',
            'high: below replay.high_recent_steps; bad: a steady rise means no turnover',
        ),
        M('buffer/{bad,high}/bytes', 'bytes', 'size of token and log-prob arrays', 'bounded by the capacity'),
        M('buffer/{repo,arpo,exgrpo}/prompts', 'prompts', 'prompts with stored responses', 'grows until every prompt was drawn, or solved'),
        M('buffer/{repo,arpo,exgrpo}/responses', 'responses', 'stored responses', 'at most per_prompt of each prompt'),
        M('buffer/{fifo,freshper,rollout_replay}/groups', 'groups', 'stored groups', 'at most the capacity'),
        M('buffer/{repo,arpo,fifo,freshper,exgrpo,rollout_replay}/bytes', 'bytes', 'size of their token and log-prob arrays', 'grows with them; watch host memory'),
        M('buffer/exgrpo/started', '0 or 1', 'whether successes are stored', '1 once the accuracy exceeded replay.exgrpo.start_above'),
        M('buffer/exgrpo/retired', 'prompts', 'prompts of which a whole group was correct', 'grows; their successes are not stored'),
    ),
    'Update: means over mini-batches': (
        M('actor/pg_loss', 'loss', 'policy loss', 'near 0, of either sign; no measure of progress'),
        M('actor/trace_loss', 'loss', 'loss of the tokens of traces', 'near 0; 0 without traces in the batch'),
        M(
            'actor/ce_loss', 'nats/token', 'mean -log π of the tokens of traces, times learner.traces.coef',
            'learner.traces.loss=cross_entropy; falls; 0 in mini-batches without traces',
        ),
        M('actor/kl_loss', 'nats/token', 'KL estimate to the reference policy', 'rises slowly, or 0 without a reference'),
        M(
            'actor/entropy', 'nats/token', "entropy of the policy's next token",
            'falls slowly; near 0 is collapse',
        ),
        M('actor/pg_clipfrac', 'share', 'tokens clipped', 'small; if large, the policy moves too far per step'),
        M(
            'actor/ppo_kl', 'nats/token', "KL estimate to the objective's anchor policy (mean log-ratio)",
            'near 0, of either sign; if large, lower the learning rate',
        ),
        M(
            'actor/trust_narrowed', 'share', 'tokens that learner.trust masks, or whose clip it narrows; absent if it is fixed',
            'second_moment: small, more for older data; staleness: up to 1 - quantile; success: most tokens',
        ),
        M('actor/grad_norm', 'norm', 'gradient norm, before clipping', 'steady; repeated spikes or 0 are a fault'),
        M('actor/lr', 'rate', 'learning rate of the last optimizer step', 'follows learner.schedule.kind'),
        M(
            'actor/updates', 'updates', 'optimizer steps',
            'mini-batches times learner.passes_per_batch, minus skipped ones',
        ),
        M(
            '{actor,critic}/skipped_updates', 'updates', 'mini-batches with a non-finite loss or gradient',
            '0; five such steps in a row end the run',
        ),
        M('actor/pg_clipfrac/ORIGIN', 'share', 'tokens clipped, by origin', 'larger for older data'),
        M('staleness/tv/ORIGIN', 'share', 'total variation per token from behaviour policy to π_θ', '0 if they agree; grows with age'),
        M('staleness/ratio/ORIGIN', 'ratio', 'mean importance ratio of a token', 'near 1; otherwise log-probs are wrong or old'),
        M('staleness/ess/ORIGIN', 'share', 'effective sample size of the tokens', '1 if the policies agree; near 0, few tokens dominate'),
    ),
    'Images': (
        M('images/prompts', 'prompts', 'distinct prompts with images in the mini-batches', 'above 0'),
        M('images/features', 'features', 'features of these images', 'grows with image size'),
        M('images/pixel_bytes', 'bytes', 'patches that the vision tower reads in the update', 'limited by model.pixels'),
    ),
    'Critic, if the method has one': (
        M('critic/value_loss', 'reward²', 'loss of the critic', 'falls; a rise means that values lag the policy'),
        M('critic/grad_norm', 'norm', 'gradient norm of the critic', 'steady; repeated spikes are a fault'),
        M(
            'critic/value_mean', 'reward', 'mean value of trained tokens, before the update',
            "near the batch's mean reward; otherwise values are biased",
        ),
        M(
            'critic/explained_variance', 'share', '1 - Var(R - V) / Var(R), R the return; absent if R is constant',
            'towards 1; below 0, worse than a constant',
        ),
    ),
    'Theory, every log.theory_every steps (run/theory.py)': (
        M('theory/K1', 'factor', "the bound's penalty for distance from α_1", 'constant for one G'),
        M(
            'theory/K{2,3}', 'factor', 'the same for X2 and X3, at the least possible variance',
            'constant with constant thresholds; nan if no level k/G qualifies',
        ),
        M(
            'theory/K{2,3}_printed', 'factor', 'the same by the printed equations',
            'if lower, the printed equation promises too much',
        ),
        M(
            'theory/delta{1,3}/{mean,p95,max}', 'share', 'TV of whole responses, over the prompts of X1 and X3',
            'near 1 for long responses; the theorem assumes a small value',
        ),
        M('theory/tv_token/ORIGIN', 'share', 'TV of the next token to the behaviour policy', '0 if the policies agree; grows with age'),
        M(
            'theory/tv_sequence/ORIGIN', 'share', 'TV of whole responses',
            'near 1 for long, old responses; for X2 it is engine mismatch',
        ),
        M(
            'theory/tv_sequence_after/ORIGIN', 'share', 'the same after the update',
            'above tv_sequence if the policy moved away',
        ),
        M(
            'theory/tv_bound/ORIGIN', 'share', 'upper bound of tv_sequence from the estimated KL',
            'above tv_sequence, within estimation error',
        ),
        M('theory/kl_sequence/ORIGIN', 'nats/response', 'KL to the current policy (k3 estimate)', 'never negative; grows with age and length'),
        M(
            'theory/kl_sequence_k1/ORIGIN', 'nats/response', 'the same (k1 estimate)',
            'near kl_sequence; otherwise few responses dominate or log-probs are wrong',
        ),
        M(
            'theory/ess_sequence/ORIGIN', 'share', 'effective sample size of whole responses',
            '1 if the policies agree; 1/n if one response dominates',
        ),
        M('theory/surrogate/ORIGIN', 'σ of rewards', 'L of the policy before the update', '0 if α is that policy'),
        M(
            'theory/surrogate_after/ORIGIN', 'σ of rewards', 'L of the policy after the update',
            'above surrogate if the update helped',
        ),
        M('theory/bound/ORIGIN', 'σ of rewards', "the origin's term of the bound", 'usually below 0: no improvement is guaranteed'),
    ),
    'Engine against trainer, if α is π_θ (learner/policy.py)': (
        M(
            'mismatch/logprob_abs_{mean,max}', 'nats', 'difference of log-probs of a token of X1',
            'like rounding; a jump means stale or differently rounded weights',
        ),
        M(
            'mismatch/kl', 'nats/token', 'KL from engine to trainer (k3 estimate)',
            'near 0, never negative; a rise means different weights',
        ),
        M('mismatch/ess', 'share', "effective sample size of the engine's tokens", 'near 1; lower if engine and trainer disagree'),
    ),
    'Experts, over the layers and mini-batches of a step': (
        M('experts/load_max', 'multiple', "load of a layer's busiest expert, by the mean load", '1 is even; a rise means that routing collapses'),
        M('experts/imbalance', 'ratio', "mean over responses of E/S Σ share × probability of each expert, with learner.balance_coef", '1 is even'),
        M('experts/idle', 'share', 'experts that no token chose', 'near 0 with enough tokens'),
    ),
    'Counters since the run began': (
        M('rollout/responses_total', 'responses', 'all generated responses', 'compare methods at equal values'),
        M(
            'rollout/discarded_total', 'responses', 'fresh responses not trained on',
            'if near all, the filter or the task does not fit',
        ),
        M(
            'rollout/{unfinished,ready}', 'count', 'with rollout.step_share below 1: responses to be continued; finished groups that wait for a later step',
            'steady after the first steps',
        ),
        M('rollout/{reevaluated,reused}_total', 'responses', 'responses of re-evaluations; replayed responses', '0 if the method has none'),
    ),
    'Time, memory and speed': (
        M('time', 'UTC', "when the step's row was written, by the trainer's clock", 'rises; absent from rows of earlier versions'),
        M(
            'timing_s/{step,weight_sync,wait_rollouts,gen,reward,reevaluate,compose,'
            'pack,old_log_prob,values,update_actor,update_critic,theory,rollouts,testing,save_checkpoint}', 's',
            'duration of the step or a phase',
            'steady; if wait_rollouts is near step, generation is the bottleneck',
        ),
        M('perf/throughput', 'tokens/s', 'trained tokens per second of the step', 'steady; compare on one machine only'),
        M(
            'perf/throughput/update', 'tokens/s', 'tokens in rows per second of update_actor; a shared prompt counts once',
            'steady; higher with fuller rows',
        ),
        M(
            'perf/throughput/gen', 'tokens/s', 'tokens of finished groups per second with pending requests',
            'steady; falls while a few long responses finish',
        ),
        M(
            'perf/mfu/actor', 'share', 'model FLOPs utilisation of update_actor, without recomputation',
            '0.3 to 0.5 is good; absent if the peak is unknown, as on CPUs',
        ),
        M(
            'perf/idle/trainer', 'share', 'part of the step spent waiting for responses',
            'low with rollout.overlap',
        ),
        M('perf/idle/engine', 'share', 'part of the step without sampling, waiting or weight sync', 'low with rollout.overlap'),
        M(
            'perf/servers/cache_used', 'share', "largest share of a server's KV cache in use",
            'below 1; low if the server is under-used',
        ),
        M('perf/servers/waiting', 'responses', 'most responses waiting in a server', '0 if servers have room'),
        M(
            'perf/servers/preemptions', 'preemptions', 'responses evicted from a full KV cache and recomputed',
            '0; otherwise lower rollout.concurrency or give servers more memory',
        ),
        M('perf/kept_pixel_bytes', 'bytes', 'image pixels cached in host memory', 'bounded'),
        M('perf/checkpoint_bytes', 'bytes', "size of the previous step's checkpoint", 'constant except for replay and kept policies'),
    ),
    'Scores, if the step evaluates': (
        M(
            'val-core/BENCHMARK/acc/{mean,pass,maj}@n', 'share', 'of n samples: mean accuracy, any correct, majority correct',
            'rises; a fall is overfitting or collapse',
        ),
    ),
}  # fmt: skip

_STANDS_FOR = {
    'ORIGIN': f'({X1}|{X2}|{X3}|{REPLAY})',
    'BENCHMARK': '.+',  # a name, or the path of a file
    '@n': r'@\d+',
}


def pattern(name: str) -> re.Pattern[str]:
    """Returns an expression for the full names of the metrics that a name of the table covers."""
    text = re.sub(r'\{([^}]*)\}', lambda found: f'({found[1].replace(",", "|")})', name)
    for word, expression in _STANDS_FOR.items():
        text = text.replace(word, expression)
    return re.compile(text)


_PATTERNS = [(pattern(metric.name), metric) for of_heading in TABLE.values() for metric in of_heading]


def entries_of(name: str) -> list[Metric]:
    """The rows of the table that match a name; exactly one for each metric that a run writes."""
    return [metric for expression, metric in _PATTERNS if expression.fullmatch(name)]


def markdown() -> str:
    """The tables of docs/reference/metrics.md."""
    parts = []
    for heading, metrics in TABLE.items():
        lines = ['| name | unit | meaning | normal |', '| --- | --- | --- | --- |']
        lines += [f'| `{m.name.replace(",", ", ")}` | {m.unit} | {m.meaning} | {m.normal} |' for m in metrics]
        parts.append(f'\n## {heading}\n\n' + '\n'.join(lines) + '\n')
    return ''.join(parts) + '\n'


if __name__ == '__main__':
    replace_part(PAGE, 'metrics', markdown())
