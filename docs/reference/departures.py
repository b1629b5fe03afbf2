"""Where the paper, its authors' released code and this project differ, and where a row of methods/ differs from its source.

    python -m docs.reference.departures            # both tables
    python -m docs.reference.departures --write    # the same into docs/reference/departures.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from bapo_jax.machine.files import replace_part
from bapo_jax.machine.output import ends_with_its_reader

PAGE = Path(__file__).with_suffix('.md')


class Departure(NamedTuple):
    """A question on which the three differ. A switch is `field=value` in backticks, or the reason why there is none."""

    topic: str
    paper: str
    code: str  # waunx/BAPO_ICLR at 426b5098
    here: str
    switch: str
    numbers: str  # not printed. #1-#31: ambiguities of the paper; q1-q20: quirks of the released code


class RowDeparture(NamedTuple):
    """How a row of methods/ differs from its paper or its authors' code."""

    row: str
    source: str
    here: str


DEPARTURES = (
    # ---- which policy answers
    Departure(
        'when α becomes π_θ', 't mod v = 0; α is undefined before the first sync', '(t − 1) mod v = 0',
        'either; α starts as π_θ0. The lag cycles through 0 … v−1, unlike the fixed lag of eq. 3',
        '`rollout.sync_phase=paper`; the code: `rollout.sync_phase=code`', '#1 q18',
    ),
    Departure(
        'α after a re-evaluation', 'unchanged', 'the engine keeps π_θ', 'either',
        '`rollout.sync_phase=paper`; the code: `rollout.sync_phase=code`', '#2 q5',
    ),
    Departure(
        'sampling of a re-evaluation', 'not said', 'as in training', 'as in training',
        'not offered: X2 must be comparable to X1', '#24',
    ),
    Departure(
        'evaluated policy', 'not said', 'the updated π_θ on a sync step, otherwise that of the engine',
        'π_θ after the update', 'not offered: scores of α lag', '#26 q6',
    ),
    Departure(
        'number of rollouts', 'Table 1: 677k, 331 steps of 2,048; three epochs are 471',
        'logs no total', 'all responses: `rollout/responses_total`', 'always on', '#27',
    ),
    Departure(
        'B', 'training and sample batch 256 (Table 3)', 'one number', 'one number', '`learner.batch_groups=256`', '#18',
    ),
    Departure(
        'identity of a prompt', 'an identifier u_i', 'a new uuid at every step',
        'the dataset index; a new group replaces older entries',
        'not offered: a batch could hold a prompt twice', '#25 q1',
    ),
    # ---- X1
    Departure(
        'online filter',
        'range (eq. 5, line 11, section 3.2, A.2, Figure 10), Gaussian N(0.5, 0.2²) (Table 3), uniform 60 % (A.3)',
        'range drops groups and, over the limit, random responses; Gaussian: a quota of responses per level, without 8/8 but with 0/8; '
        'uniform: random responses',
        'whole groups, by k only; the Gaussian keeps all-correct and all-wrong ones with probability 0.044',
        '`replay.fresh_filter=range`, `replay.fresh_filter=gaussian`, `replay.fresh_filter=uniform`, `replay.fresh_filter=none`; '
        'not offered: response-level filters, which split groups', 'q11',
    ),
    Departure(
        'a filter that keeps nothing', 'not said', 'trains on the whole batch', 'X1 is empty',
        'not offered: advantages would be 0', 'q12',
    ),
    # ---- X2
    Departure(
        'what enters X2', 'c1 < μ′ < 1 (eq. 6)', 'μ′ > μ, including 1/8 after 0 and all-correct groups', 'either',
        '`replay.improved_rule=threshold`; the code: `replay.improved_rule=strict_increase`', '#10 q7',
    ),
    Departure(
        'a hard prompt after its re-evaluation', 'stays',
        'stays, and its new score relabels the old responses, which X3 may then replay',
        'stays until replaced or evicted; re-evaluated groups do not enter the buffer',
        "not offered: removal; relabelling (scores of another policy's responses)", '#11 q8',
    ),
    Departure(
        'how many hard prompts', 'at most 128', 'a random subset, a multiple of the GPUs; no X2 after an error',
        'a random subset; an engine error stops the run',
        '`replay.max_reevaluate=128`; not offered: newest or oldest first', '#23 q15',
    ),
    # ---- the buffer and X3
    Departure(
        'overlap of X1, X2, X3', 'eq. 5 is a sum where an indicator is meant', 'disjoint by uid',
        'disjoint by prompt: X1 before X2 before X3', 'not offered: a prompt twice in a batch', '#5',
    ),
    Departure(
        'when fresh groups enter the buffer', 'before X2 and X3 (lines 8-9), and again at line 19', 'after training',
        'at the end of the step', "not offered: X3 would draw the step's own prompts again", '#6',
    ),
    Departure(
        'the three most recent steps', 'X3 has no older group',
        'older ones leave only if the pool is full, with over eight high-quality prompts',
        'X3 has groups of steps t−3 … t−1', '`replay.high_recent_steps=3`', '#7',
    ),
    Departure(
        'capacity', '256 (Table 3), or the batch size for hard prompts (text)',
        'one pool (256; the script: 128) that evicts by class and keeps at most eight high-quality prompts',
        'two FIFO parts, or one FIFO pool of prompts without classes',
        '`replay.bad_capacity=0` (B), `replay.high_capacity=0` (3 B); the code but for its classes: `replay.shared_pool=True`',
        '#8 q9',
    ),
    Departure(
        'hard prompts evicted before a re-evaluation', 'not said', 'not logged', 'logged (`buffer/bad/evicted_unseen`); with B of them a prompt waits 1 or 2 steps, whatever m is',
        '`replay.bad_capacity=0`: raise it if there are many; `replay.reevaluate=delayed` asks each after m steps', '#9',
    ),
    Departure(
        'when c2 and c3 apply', 'on storing and on reading', 'old values on storing, new values on reading',
        'on reading; every group with 0 < k < G is stored',
        'not offered: storing fewer, as c2 and c3 move', '#14',
    ),
    Departure(
        'levels of c2 and c3', 'G = 8: one or two levels k/8 lie between them', 'as the paper',
        'if none lies between them, as often with G < 8, the nearest counts', 'always on', '',
    ),
    Departure(
        'direction of c2 and c3', 'text: easy to hard; eq. 8 with Table 3: hard to easy',
        'easy to hard; off by default, with c2 = 1/8 and c3 = 3/8',
        'easy to hard; pairs (value at r_tot = 0, at 1), or one fixed number',
        '`replay.thresholds=easy_to_hard`; eq. 8: `replay.thresholds=literal`; the code: `replay.c2=(0.125,)` `replay.c3=(0.375,)`',
        '#12 q10',
    ),
    Departure(
        'r_tot', 'the global average performance',
        'mean score of the pool, mapped from 0.2 … 0.8 to 0 … 1; updated only if X3 is needed',
        'exponential average (0.9) of unfiltered fresh accuracy, or mean of the pool; always updated',
        '`replay.shared_pool=False`; the code: `replay.shared_pool=True`; not offered: the map (unused by the script)',
        '#13 q10',
    ),
    # ---- the batch
    Departure(
        'unit of the batch', 'groups', 'groups for X3; random responses of X1 and X2 over the limit',
        'whole groups; a random subset of X2 if X1 leaves too little room',
        'not offered: parts of groups', '#15 q11',
    ),
    Departure(
        'a batch that is not full', 'allowed (Figure 8)', 'a small last mini-batch takes a full Adam step',
        'max(1, round(groups / mini-batch)) equal parts',
        '`learner.mini_batches=even`; the code: `learner.mini_batches=released`; not offered: dropping the remainder',
        '#16 q13',
    ),
    Departure(
        'order of mini-batches', 'not said', 'X1, X2, X3, balanced across ranks', 'random',
        '`learner.mini_batches=even`; the code: `learner.mini_batches=released`', '#17 q13',
    ),
    # ---- learning
    Departure(
        'denominator of the ratio', 'α (eq. 3, 4)',
        'π_θ at collection (stored for X3); since 2026 weighted per token by min(π/α, 3)',
        'α, or π_θ before the step (recomputed for X3), with or without that weight',
        '`learner.anchor=behaviour`; `learner.anchor=proximal`; the code: `learner.anchor=decoupled` `learner.importance_cap=3.0`',
        '#3 q3',
    ),
    Departure(
        'KL', 'eq. 1: π_ref; eq. 3: α', "each response's old log-probs, named ref_log_prob", 'any of these; k3, clipped to ±10, as in the code',
        '`learner.kl_target=behaviour` (eq. 3); `learner.kl_target=reference` (eq. 1); the code: `learner.kl_target=proximal`; '
        'none: `learner.kl_target=none`', '#4 q2',
    ),
    Departure(
        'centre of the clip', '1', 'computes π_θ/π_old for X3, then overwrites it with 1', '1; π_prox/α for row remix',
        '`learner.clip_centre=one`; `learner.clip_centre=proximal`', 'q4',
    ),
    Departure(
        'clip range', 'not given', '0.2 / 0.2, dual clip 3; its script: 0.2 / 0.28, dual clip 10', '0.2 / 0.2, dual clip 3',
        '`learner.clip_low=0.2` `learner.clip_high=0.2` `learner.dual_clip=3.0`; the script: `learner.clip_high=0.28` '
        '`learner.dual_clip=10.0`', '#21',
    ),
    Departure(
        'weights of X2 and X3', 'none', 'λ1 and λ2 multiply the advantages; both are 1', 'none', 'not offered: λ1 = λ2 = 1 everywhere', '#22',
    ),
    Departure(
        'advantage', 'population variance, ε inside the root (eq. 2)',
        'sample deviation + 1e-6; in 2025 statistics of the buffer, old and new scores of X2 pooled',
        "either, always from the group's own rewards",
        '`learner.advantage=group_std`; eq. 2: `learner.advantage=paper_eq2`; not offered: pooled statistics (x2_baseline=pooled), '
        'which push every X2 group up', '#19 q16',
    ),
    Departure(
        'aggregation', 'mean over responses of the mean over tokens (eq. 1)', 'token mean of each micro-batch',
        'token mean of the mini-batch',
        '`learner.aggregation=token_mean`; eq. 1: `learner.aggregation=seq_mean_token_mean`; not offered: a mean that depends on '
        'micro-batches', '#20 q14',
    ),
    Departure(
        'options without effect', '-', 'fix_max_size, importance_clip_ratio, normalize_importance_weights', 'absent',
        'not offered: they do nothing with GRPO', 'q19',
    ),
    # ---- runs, ablations, theory
    Departure(
        'without X3', 'Figure 6; a review: it "retains all fresh samples"', 'the filter stays', 'the filter stays',
        '`replay.use_x3=False`', '#28',
    ),
    Departure(
        'Mini-test (section 5.2)', 'c1 = 0, X3 at μ = 1/2', 'the script: c1 = 1/8, X3 in 1/8 … 3/8', 'row bapo_mini: the text',
        '`replay.c1=0.0` `replay.c2=(0.5,)` `replay.c3=(0.5,)`', '',
    ),
    Departure(
        'checkpoints', 'not said', 'without the buffer', 'with buffer, r_tot and prompt stream: runs resume bit for bit', 'always on', 'q17',
    ),
    Departure(
        'the bound', 'assumes small total variation per response; the printed K2 is too small for some G and c1', 'not monitored',
        'logs its terms, with K2 from the levels k/G and as printed',
        '`log.theory_every=0` (steps; 0: never)', '#29',
    ),
    Departure(
        'BA-PPO (A.9)', 'PPO with a critic, buffer 64; μ still needs groups', 'the trainer keeps its critic',
        'row ba_ppo: 64 in each part; the current critic values replayed groups',
        '`learner.advantage=gae` with `replay.bad_capacity=64` `replay.high_capacity=64`', '#30',
    ),
    Departure(
        'sizes of data sets', 'Countdown 10,000 (text) or 49,000 (Table 4); Geometry3K 2,101 or 2,100; OlympiadBench 674',
        'its own files', 'Countdown 10,000; others as in their files; a run prints the number',
        '`task.limit=10000` in configs/countdown.py', '#31',
    ),
    Departure(
        'size of images', 'not said', 'not set; EasyR1 allows 4,194,304 pixels',
        'up to 768 of 1,024 prompt tokens', '`model.pixels=(0, 602112)` in configs/geometry.py', '',
    ),
    Departure(
        'boxed answers', 'not said', 'the last box counts, wherever it is', 'boxes before </think> do not count', 'always on', '',
    ),
    Departure(
        'the DAPO baseline', 'at most 4 batches (Figure 9)', 'at most 1 batch by default',
        'row dapo refills', '`rollout.refill_batches=4` with `replay.fresh_filter=range`', 'q20',
    ),
)  # fmt: skip

ROWS = (
    RowDeparture(
        'all rows', 'own batch and group sizes, temperatures, learning rates, warm-up, weight decay, entropy bonus, response limits',
        "those of the task's config; only areal, dapo, dppo, gapo, kimi and m2po turn the entropy bonus off",
    ),
    RowDeparture(
        'grpo', 'mean over responses of the mean over tokens (DeepSeekMath)',
        "verl's token mean and dual clip 3, as the paper's baseline; on Countdown one optimizer step for all 256 groups, as in the "
        "authors' script",
    ),
    RowDeparture(
        'grpo_v5', 'recommends masking groups of equal rewards', 'they have advantage 0, and count in the token mean and in the KL',
    ),
    RowDeparture(
        'areal', 'new weights interrupt generation; group rewards and batch advantages are both normalised; in the examples η of 2 to 16 and a '
        'clip of 0.4; dual clip as an option',
        'true with vLLM servers; the in-process engine completes a group with the policy it was requested from, unless '
        "rollout.step_share is below 1; GRPO's advantage, clip 0.2 and dual clip 3; η = 4, and a weight above 5 is masked as in the examples",
    ),
    RowDeparture(
        'kimi', 'τ, the weight of the length reward and the budget of tokens are not stated; no length reward at first; repetition ends a response',
        'τ = 0.01, weight 0.1 from the first step, half of the limit a step; all segments are trained on, each against its own policy; '
        'no curriculum by labels, no end at repetition; success rates are moving averages, which the paper does not say; '
        'token sums are divided by rollout.max_response_tokens',
    ),
    RowDeparture(
        'dr_grpo', 'no dual clip', 'dual clip 3 stays, beside the clip of 0.2; the constant is rollout.max_response_tokens',
    ),
    RowDeparture(
        'gspo', 'also a token variant; verl clips the log ratio at 10', 'only the sequence ratio, its logarithm clipped to ±20',
    ),
    RowDeparture(
        'cispo', "DAPO's sampling and length handling", "no refills, no length penalty; verl's bounds",
    ),
    RowDeparture(
        'maxrl', 'the mean over successful responses, or (r − mean) / mean',
        'the second, with mean + 1e-6, clipped, dual clip 3. For rewards other than 0 and 1 the mean is that of the positive parts, '
        'at least 1/n',
    ),
    RowDeparture(
        'f_grpo', 'γ of 0.5, 1 or 2, chosen by validation; also with DAPO and CISPO',
        'γ = 0.5; GRPO alone, with dual clip 3; for rewards other than 0 and 1 the success rate is the place of the mean between the '
        'lowest and the highest reward of the group',
    ),
    RowDeparture(
        'dppo', "also Binary-KL; the recipe's C is 10,000, its code's 20 or 3 (a larger one is better); the paper's table of bounds: not read",
        'only Binary-TV, bounds 0.15, C = 20, the ratio to the policy that sampled; the constant of the sum is rollout.max_response_tokens',
    ),
    RowDeparture(
        'gapo', 'known only from summaries: rewards other than 0 and 1 are not defined there; also other bounds, and the token ratio',
        'bounds 0.003 to 0.005 on the ratio of a response, as for the main result; k counts the correct verdicts, and responses with a '
        'positive advantage get the wider clip',
    ),
    RowDeparture(
        'dapo',
        '3 B prompts per batch; an error after 10 batches; 4,096 of 20,480 tokens are penalised; rewards ±1; mixed by accuracy or '
        'reward',
        "B prompts per batch; after 4 batches the step trains on what it has; half of the limit is penalised, as in the BAPO authors' "
        'script; rewards 0 and 1 less the penalty; mixed by verdict. The surplus is discarded, so an epoch may read the data four times',
    ),
    RowDeparture(
        'ppo', "verl's: optional KL in the reward with an adaptive controller; λ = 0.95 in places; separate warm-ups",
        'no KL; γ = λ = 1; the critic trains on the same mini-batches, and starts as the policy with a zero head',
    ),
    RowDeparture(
        'ba_ppo', 'initial values of BAPO (A.9); code not released', 'thresholds fixed at their start values 4/8 and 5/8; range filter',
    ),
    RowDeparture(
        'mopps', 'optional offline prior and interval of rates; mini-batches of 128 for mathematics',
        "Beta(1, 1) prior, the nearest B; the config's mini-batches",
    ),
    RowDeparture(
        'adaprefix',
        'a correct reference solution; prefixes adjusted by feedback to a success of one half, calibrated first, later withdrawn '
        '(read in the abstract only)',
        'our control law: f ← clip(f + 0.25 (1/2 − k/G), 0, 0.9) for each prompt, from 1/2, without calibration; withdrawn linearly '
        'between 0.6 and 0.8 of the steps. Prefixes of the newest correct response of the policy, until which '
        'a prompt is asked plainly, or of the solver with replay.given_by=solver. Cut at a token, and as a share of its tokens',
    ),
    RowDeparture(
        'repo', "a prompt's fresh and earlier responses share an optimizer step; λ_off; random retrieval; std + 1e-4; no dual clip",
        'both are groups in shuffled mini-batches, with twice the optimizer steps; λ_off = 1; no random retrieval; std + 1e-6; dual '
        'clip 3',
    ),
    RowDeparture(
        'luffy',
        "7 responses and a trace; entropy bonus as a mean over all tokens; token losses / limit, summed; too long a trace is cut, without a "
        "stop token. The paper's text is unread: only the code was",
        "G responses are generated, and a trace takes the place of the first, which is wasted; entropy bonus on the policy's tokens alone; "
        'the sum is divided by the responses of a mini-batch; too long a trace is left out',
    ),
    RowDeparture(
        'relift',
        'after the update, a step of a second optimizer on 128 traces (its batch), token mean of each micro-batch, with an entropy bonus; too '
        "long a trace is cut, with a stop token; a group of wrong formats does not wait. The paper's text is unread: only the code was",
        'the RL part is as in luffy; N traces (0: B) join the mini-batches, with one optimizer and more steps '
        '(learner.mini_batches=released: traces come last, in steps of their own); token mean of a mini-batch, no entropy bonus on traces; '
        'too long a trace is left out; wrong formats wait, too',
    ),
    RowDeparture(
        'arpo', 'multi-turn GUI tasks; outcomes below thresholds; tasks pre-filtered; a response in each micro-batch (inferred: mean over '
        'responses); 16 updates a step',
        "k = 0 by the verifier; the config's prompts and mini-batches; the clip is of the ratio, not of its logarithm. The paper's text "
        'is unread: only the code was',
    ),
    RowDeparture(
        'fifo', 'unit: a response; asynchronous workers set the replay ratio; clip per response; positive bias and AsymRE as variants; '
        'no dual clip',
        'unit: a group, so a batch has whole groups; synchronous, 2 groups trained on per fresh one; ratio per token; no variants; dual '
        'clip 3. What is done before there is a batch is not said: here nothing is trained',
    ),
    RowDeparture(
        'freshper', 'unit: a response or an agent step; absolute reward, advantage or TD error, plus 1e-6; a new entry has the largest '
        'priority until the next step; stratified draws with replacement; weights over the largest of the buffer; β rises to 1 '
        '(README); separate optimizer steps; REINFORCE++; 50,000 responses',
        'unit: a group, mean absolute advantage; priority 0 is never drawn; without replacement; weights over the largest of the draw; β = 0.4; '
        "fresh and earlier groups in shuffled mini-batches; GRPO. The paper's text is unread: only the code was",
    ),
    RowDeparture(
        'exgrpo', 'half of 128 prompts are replayed, each asked for 7 responses; the trace of lowest entropy; no limit per prompt; solved '
        'prompts are no longer drawn; GRPO with a clip before the start; log-probs recomputed when a success is stored; entropy bonus on '
        'traces; a step with a gradient above 500 is skipped',
        'up to B groups are added to the B fresh ones, each asked for G responses, of which the first is dropped; the lowest mean -log '
        'π_θ of the stored tokens; 32 per prompt; solved prompts are drawn but not stored; no clip at all; log-probs as sampled; no '
        "bonus on traces; the sum is divided by the responses of a mini-batch. The paper's text is unread: only the code was",
    ),
    RowDeparture(
        'dots',
        'embeddings of the question by Qwen2.5-Math-1.5B-Instruct, with projections, temperature and bias trained beforehand on success '
        'rates of several policies; the affine fit includes each reference among its own neighbours; a first cycle of full fresh '
        'batches without replay; no entropy bonus (read in the code, not in the paper)',
        'nothing is trained: centred embeddings of the rendered prompt, by default of hashed n-grams of tokens, or of the model '
        'prompts.dots.embeddings; the fit leaves each reference out of its neighbours, with a slope of at least 0. Half a batch is fresh '
        'from step 1 on. References are not trained on, as in the code, but one that is chosen in the same step is not asked again. '
        'The ratio and clip are those of the code, as the weight π_prox / α, capped at 10⁶, times the clipped ratio to π_prox. All '
        'groups are stored, also all-correct and all-wrong ones; a drawn group stays (the code)',
    ),
    RowDeparture(
        'm2po',
        "the mask follows π_θ at every optimizer step, over a batch; its authors' code narrows PPO's clip per micro-batch instead; data 256 "
        'updates old',
        "Algorithm 1 with the policy at the step's start in place of π_θ, over a mini-batch; v = 5; group_std advantages, token mean",
    ),
    RowDeparture(
        'sat',
        'known only from summaries, not the exact kernel, KL or entropy bonus; q is taken over a micro-batch under π_θ; a fixed lag of 1 or '
        '8; also with the ratio of GSPO',
        "the factor is 1 / (1 + (d/q)²), which jumps from 1 to ½ at q; over a mini-batch, with the policy at the step's start in place of "
        'π_θ; v = 8, so lags of 0 to 7; the token ratio; no KL',
    ),
    RowDeparture(
        'remix',
        'PPO or GRPO; a mixture of trajectories; a format reward (known only from summaries)',
        'only GRPO; recent policies generate anew, drawn per prompt with ages uniform over 1 … N; after T no mixture, one pass, KL only to '
        "π_T. λ's constants (50, 10, 0.1, 0.5) are not fields; with T = 50, λ stays 1. Clip centred per token, dual clip 3",
    ),
    RowDeparture(
        'bapo', 'eq. 5, section 3.2, Figure 10 and the released code filter by range',
        'the Gaussian filter of Table 3 and its scripts. All-correct and all-wrong groups in X1 have advantage 0, but count in the token '
        'mean, the KL and B',
    ),
    RowDeparture(
        'bapo_guarded', 'MaxRL has no KL; BAPO has group_std advantages and a KL to the behaviour policy',
        'over_mean advantages, and a KL of 0.05 to the initial policy',
    ),
    RowDeparture(
        'bapo_posterior', 'Reinforce-Ada repeats a prompt within a step and draws a balanced group from all rounds',
        'only hard prompts, an epoch later; a pooled group has all responses of two rounds and counts as trained on once',
    ),
    RowDeparture(
        'bapo_continue', 'PrefixRL trains on fixed prefixes of correct traces by the base policy, beside the plain problems',
        "prompts that are hard now, with prefixes of the policy's correct responses or the task's solver (replay.given_by), cut so that "
        'about half the responses succeed',
    ),
    RowDeparture(
        'bapo_official', 'the released code: see the first table',
        'whole groups, no relabelling, no fallback to the whole batch, r_tot unmapped, proximal log-probs recomputed; c2 = 1/8, c3 = 3/8; '
        'v = m = 5 and at most 128 re-evaluations (the script: 2, 2, 32)',
    ),
    RowDeparture(
        'bapo_mini', 'the script: batches of 32, temperature 0.99, weight decay 0.1, warm-up of 10 steps',
        "v = m = 2, clip 0.2 / 0.28, dual clip 10 and no KL as in the script; the config's sizes",
    ),
)  # fmt: skip


def main(argv: list[str]) -> None:
    """Prints the tables, or writes them into the page."""
    if '--write' in argv:
        replace_part(PAGE, 'paper and code', markdown())
        replace_part(PAGE, 'rows', rows_markdown())
    else:
        with ends_with_its_reader():
            print(markdown(), rows_markdown(), sep='\n', end='')


def markdown() -> str:
    """The first table as it stands in docs/reference/departures.md."""
    return _table(('topic', 'paper', 'released code', 'here', 'switch'), [d[:-1] for d in DEPARTURES])


def rows_markdown() -> str:
    """The second one."""
    return _table(('row', 'its paper or code', 'here'), [(f'`{r.row}`' if ' ' not in r.row else r.row, *r[1:]) for r in ROWS])


def _table(head: tuple[str, ...], rows) -> str:
    lines = [head, ('---',) * len(head), *rows]
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


if __name__ == '__main__':
    main(sys.argv[1:])
