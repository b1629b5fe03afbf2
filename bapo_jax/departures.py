"""Where the paper, its authors' released code and this project differ, and where a row of methods.py differs from its source.

    python -m bapo_jax.departures            # both tables
    python -m bapo_jax.departures --write    # the same into docs/departures.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from bapo_jax.files import replace_part
from bapo_jax.output import ends_with_its_reader

PAGE = Path(__file__).resolve().parents[1] / 'docs' / 'departures.md'


class Departure(NamedTuple):
    """One question that the three answer differently. A switch is `field=value` in backticks, or says why none is offered."""

    topic: str
    paper: str
    code: str  # waunx/BAPO_ICLR at 426b5098
    here: str
    switch: str
    numbers: str  # #1-#31: ambiguities of the paper; q1-q20: quirks of the released code


class RowDeparture(NamedTuple):
    """What a row of methods.py does otherwise than its paper or its authors' code."""

    row: str
    source: str
    here: str


DEPARTURES = (
    # ---- who answers
    Departure(
        'when α becomes π_θ', 't mod v = 0; α is undefined before the first sync', '(t − 1) mod v = 0: a counter from 0',
        'α starts as π_θ0; either phase. The lag cycles through 0 … v−1; the fixed lag v of eq. 3 follows from neither phase',
        '`rollout.sync_phase=paper`; the code: `rollout.sync_phase=code`', '#1 q18',
    ),
    Departure(
        'α after a re-evaluation', 'unchanged', 'the engine keeps π_θ: only a flag is restored, not the weights',
        'π_θ re-evaluates, then the engine holds α again',
        '`rollout.reevaluation_syncs=False`; the code: `rollout.reevaluation_syncs=True`', '#2 q5',
    ),
    Departure(
        'sampling of a re-evaluation', 'not said', 'as in training', 'as in training: G responses at the same temperature',
        'not offered: X2 is trained on beside X1, so its groups must be alike', '#24',
    ),
    Departure(
        'evaluated policy', 'not said',
        'what the last sync flag gives: the updated π_θ on a sync step, else the weights that the engine holds',
        'π_θ after the update', 'not offered: scores of α would lag by up to v−1 steps', '#26 q6',
    ),
    Departure(
        'count of rollouts', 'Table 1: 677k is 331 steps of 2,048, not the 471 steps of three epochs',
        'logs re-evaluated and promoted prompts, no total',
        'every response is counted: fresh, refilled, re-evaluated (`rollout/responses_total`)', 'always on', '#27',
    ),
    Departure(
        'B', 'training batch 256, sample batch 256 (Table 3)', 'one number for both', 'one number for both',
        '`learner.batch_groups=256`', '#18',
    ),
    Departure(
        'identity of a prompt', 'a unique identifier u_i', 'a fresh uuid at every step, so a prompt met again is another entry',
        'the dataset index; a newer group replaces the older entries of its prompt',
        'not offered: with a uid per step one batch could hold a prompt twice', '#25 q1',
    ),
    # ---- X1
    Departure(
        'online filter',
        'range in eq. 5, line 11, section 3.2, A.2 and Figure 10; Gaussian N(0.5, 0.2²), which Table 3 lists; uniform 60 % (A.3)',
        'range by groups, over the limit by random responses. Gaussian: a quota of responses a level, 8/8 excluded and 0/8 not; a '
        'variant from easy to hard whose position never moves. Uniform: random responses',
        'whole groups, each kept with a probability that depends on its k alone: under the Gaussian .044 for all-right and '
        'all-wrong ones, which range drops',
        '`replay.fresh_filter=range`, `replay.fresh_filter=gaussian`, `replay.fresh_filter=uniform`, `replay.fresh_filter=none`; '
        'not offered: quotas and response-level filters, which split groups', 'q11',
    ),
    Departure(
        'a filter that keeps nothing', 'not said', 'the whole batch is trained on', 'X1 is empty',
        'not offered: all-right and all-wrong groups have advantage 0', 'q12',
    ),
    # ---- X2
    Departure(
        'what enters X2', 'c1 < μ′ < 1 (eq. 6)', 'μ′ greater than before: 1/8 after 0 and all-correct groups included', 'either',
        '`replay.improved_rule=threshold`; the code: `replay.improved_rule=strict_increase`', '#10 q7',
    ),
    Departure(
        'a hard prompt after its re-evaluation', 'stays (Algorithm 1 never removes)',
        'stays; is selected by its first score; its new score relabels the old responses, which X3 then may replay',
        'stays until a newer group replaces it or it is evicted; re-evaluated groups do not enter the buffer, and nothing is '
        'relabelled',
        'not offered: removal of improved or solved prompts (no study asked for it); relabelling (it pairs scores with responses '
        'of another policy)', '#11 q8',
    ),
    Departure(
        'how many hard prompts', 'at most 128', 'a random subset, cut to a multiple of the GPUs; an error on the way gives no X2',
        'uniform without replacement, any number; an engine error stops the run',
        '`replay.max_reevaluate=128`; not offered: newest or oldest first', '#23 q15',
    ),
    # ---- the buffer and X3
    Departure(
        'overlap of X1, X2, X3', 'eq. 5 is a sum where an indicator is meant', 'disjoint by uid, which is new at every step',
        'disjoint by prompt: X1 before X2 before X3', 'not offered: a prompt twice in a batch', '#5',
    ),
    Departure(
        'when fresh groups enter the buffer', 'before re-evaluation and replay (lines 8-9), and again at line 19', 'after training',
        'at the end of the step', "not offered: entering first re-draws the step's own prompts under the same policy", '#6',
    ),
    Departure(
        'the three most recent steps', 'X3 holds no older group',
        'older entries leave only where the pool is over-full and holds more than eight high-quality prompts',
        'groups stored in steps t−3 … t−1, when read and when stored', '`replay.high_recent_steps=3`', '#7',
    ),
    Departure(
        'capacity', '256 in Table 3; in the text the batch size for hard prompts alone',
        'one pool (256; the script: 128); when over-full at most eight high-quality prompts stay, and others leave by class',
        'two parts. With a shared pool: one limit on prompts, first in first out, no class favoured; groups outside c2 … c3 take '
        'places too',
        '`replay.bad_capacity=0` (B), `replay.high_capacity=0` (3 B); the code but for its classes: `replay.shared_pool=True`',
        '#8 q9',
    ),
    Departure(
        'hard prompts that leave unseen', 'not discussed', 'not logged', 'logged (`buffer/bad/evicted_unseen`)',
        '`replay.bad_capacity=0`: raise it where many leave unseen', '#9',
    ),
    Departure(
        'when c2 and c3 apply', 'when stored and when read', 'when stored with the old ones, when read with the new ones',
        'when read: every group with 0 < k < G is stored',
        'not offered: filtering at insertion, which discards what later thresholds want', '#14',
    ),
    Departure(
        'levels of c2 and c3', 'G = 8: one level k/8 lies between them, two at some r_tot', 'as the paper',
        'where no level k/G lies between them the nearest counts: below G = 8, bounds 1/8 apart would turn X3 off for much of '
        'r_tot, and the Mini-test at an odd G always. A run says at its start what it replays', 'always on', '',
    ),
    Departure(
        'direction of c2 and c3', 'the text: from easy to hard; eq. 8 with Table 3 rises, from hard to easy',
        'falls; off by default, then c2 = 1/8 and c3 = 3/8',
        'falls; pairs are (value at r_tot = 0, value at 1); one number is fixed',
        '`replay.thresholds=easy_to_hard`; eq. 8: `replay.thresholds=literal`; the code: `replay.c2=(0.125,)` `replay.c3=(0.375,)`',
        '#12 q10',
    ),
    Departure(
        'r_tot', 'the global average performance',
        'mean score over the pool, mapped from 0.2 … 0.8 to 0 … 1; updated only where X3 is needed',
        'exponential average (0.9) of the fresh accuracy before filtering, or the mean over the prompts held; at every step',
        '`replay.r_tot=ema`; the code: `replay.r_tot=buffer`; not offered: the map from 0.2 … 0.8 (the released script fixes c2 '
        'and c3)', '#13 q10',
    ),
    # ---- the batch
    Departure(
        'unit of the batch', 'groups', 'groups for X3; random responses where X2 or a filter is over its limit',
        'groups, always whole; a random subset of X2 where X1 leaves too little room',
        'not offered: split groups, whose mean and deviation are those of a part', '#15 q11',
    ),
    Departure(
        'a batch that is not full', 'allowed (Figure 8)', 'a ragged last mini-batch takes a full Adam step',
        'equal parts: max(1, round(groups / mini-batch)); no step without a group',
        '`learner.partial_mini_batch=rebalance`; the code: `learner.partial_mini_batch=keep`; not offered: dropping the remainder',
        '#16 q13',
    ),
    Departure(
        'order of mini-batches', 'not said', 'X1, X2, X3 as they stand, but for balancing lengths across ranks',
        'groups in random order', '`learner.shuffle=True`; the code: `learner.shuffle=False`', '#17 q13',
    ),
    # ---- learning
    Departure(
        'denominator of the ratio', 'α, stored with the response (eq. 3, 4)',
        'π_θ at collection, recomputed by the trainer; since 2026 weighted by min(π/α, 3) by token',
        'any of three: α, the policy before the step, or the latter weighted',
        '`learner.anchor=behaviour`; `learner.anchor=proximal`; the code: `learner.anchor=decoupled` `learner.importance_cap=3.0`',
        '#3 q3',
    ),
    Departure(
        'proximal policy of X3', 'none', 'π_θ of the step that collected the group, stored',
        'π_θ before this step, recomputed for X1, X2 and X3 alike',
        'not offered: stored proximal log-probs, a second array a token for one row', '',
    ),
    Departure(
        'KL target', 'eq. 1: π_ref; eq. 3: α', "each response's own old log-probs, under the name ref_log_prob", 'any of these',
        '`learner.kl_target=behaviour` (eq. 3); `learner.kl_target=reference` (eq. 1); the code: `learner.kl_target=proximal`; '
        'none: `learner.kl_target=none`', '#4 q2',
    ),
    Departure(
        'KL estimator', 'not said', 'k3, cut to ±10', 'k3, cut to ±10', 'not offered: k1, k2 and the k3 of the behaviour policy',
        '',
    ),
    Departure(
        'centre of the clip', '1', 'π_θ/π_old is computed for X3 and overwritten with 1', '1; π_prox/α for row remix',
        '`learner.clip_centre=one`; `learner.clip_centre=proximal`', 'q4',
    ),
    Departure(
        'clip range', 'not given', '0.2 / 0.2 and dual clip 3; its script: 0.2 / 0.28 and dual clip 10',
        '0.2 / 0.2 and dual clip 3',
        '`learner.clip_low=0.2` `learner.clip_high=0.2` `learner.dual_clip=3.0`; the script: `learner.clip_high=0.28` '
        '`learner.dual_clip=10.0`', '#21',
    ),
    Departure(
        'weights of X2 and X3', 'none', 'λ1 and λ2 multiply the advantages; its configuration sets both to 1', 'none',
        'not offered: λ1 and λ2, which the default, the script and the paper leave at 1', '#22',
    ),
    Departure(
        'advantage', 'population variance, ε inside the root (eq. 2)',
        'sample standard deviation + 1e-6. The runs of 2025 took statistics from the buffer, old and new scores pooled for X2',
        "either; a group's own statistics always",
        '`learner.advantage=group_std`; eq. 2: `learner.advantage=paper_eq2`; not offered: pooled statistics for X2 '
        '(x2_baseline=pooled), which push every re-evaluated group up', '#19 q16',
    ),
    Departure(
        'aggregation', 'mean over responses of the mean over tokens (eq. 1)', 'token mean of each micro-batch',
        'token mean over the mini-batch, however it is cut',
        '`learner.aggregation=token_mean`; eq. 1: `learner.aggregation=seq_mean_token_mean`; not offered: a mean that depends on '
        'the cut', '#20 q14',
    ),
    Departure(
        'options without effect', '-',
        'fix_max_size, importance_clip_ratio and normalize_importance_weights do nothing on the GRPO path', 'absent',
        'not offered: they change nothing', 'q19',
    ),
    # ---- runs, ablations, theory
    Departure(
        'without X3', 'Figure 6; a review says that it "retains all fresh samples"', 'completion off, the filter as before',
        'the filter as before', '`replay.use_x3=False`', '#28',
    ),
    Departure(
        'Mini-test (section 5.2)', 'c1 = 0 and X3 at μ = 1/2', 'the script: c1 = 1/8 and X3 in 1/8 … 3/8',
        'row bapo_mini: the text', '`replay.c1=0.0` `replay.c2=(0.5,)` `replay.c3=(0.5,)`', '',
    ),
    Departure(
        'checkpoints', 'not said', 'without the buffer',
        'with the buffer, r_tot and the prompt stream: a resumed run is bit for bit the same', 'always on', 'q17',
    ),
    Departure(
        'the bound', 'assumes a small TV of whole responses; K2 as printed is too small for some G and c1', 'not monitored',
        'terms and constants are logged, K2 from the levels k/G and as printed',
        '`theory.every=0` (steps between measurements; 0: never)', '#29',
    ),
    Departure(
        'BA-PPO (A.9)', 'PPO with a critic, buffer 64; groups still needed for μ', 'the trainer keeps its critic',
        'row ba_ppo: both parts of the buffer hold 64, and values of replayed groups are those of the current critic',
        '`learner.advantage=gae` with `replay.bad_capacity=64` `replay.high_capacity=64`', '#30',
    ),
    Departure(
        'sizes of data sets', 'Countdown 10,000 in the text, 49,000 in Table 4; Geometry3K 2,101 or 2,100; OlympiadBench 674',
        'its own files',
        'Countdown as the text; OlympiadBench as in the file read (675 or 674); Geometry3K as in its '
        'file; the run prints how many prompts it loaded', '`task.limit=10000` in configs/countdown.py', '#31',
    ),
    Departure(
        'size of images', 'not said', 'not set; EasyR1, of which its prompt comes, allows 4,194,304 pixels',
        'up to 768 of 1,024 prompt tokens, so that no question is left out',
        '`model.most_pixels=602112` in configs/geometry.py', '',
    ),
    Departure(
        'boxes within the thinking', 'not said', 'the last box of the response counts, wherever it stands',
        'a box counts after </think>; before it, none does', 'always on', '',
    ),
    Departure(
        'the DAPO baseline', 'refills, at most 4 batches (Figure 9)',
        'at most 1 batch by default; an earlier DAPO script sets no filter_groups, so it does not refill', 'row dapo refills',
        '`rollout.refill_batches=4` with `replay.fresh_filter=range`', 'q20',
    ),
)  # fmt: skip

ROWS = (
    RowDeparture(
        'all rows', 'own batch sizes, learning rates, warm-up, weight decay, entropy bonus, response limits',
        "the task's config sets these; a row sets what it names. Only row dapo turns the entropy bonus off",
    ),
    RowDeparture(
        'grpo', 'mean over responses of the mean over tokens (DeepSeekMath)',
        "token mean and dual clip 3: verl's, as the paper's baseline. On Countdown one optimizer step for all 256 groups, as in "
        "the authors' script, where the other rows take four",
    ),
    RowDeparture(
        'grpo_v5', 'recommends masking groups of equal rewards', 'they have advantage 0, and count in the token mean and in the KL',
    ),
    RowDeparture(
        'dr_grpo', 'no dual clip', 'dual clip 3 stays, beside the clip of 0.2; the constant is rollout.max_response_tokens',
    ),
    RowDeparture(
        'gspo', 'also a token variant; verl cuts the log ratio at 10', 'the sequence ratio alone; its logarithm is cut at ±20',
    ),
    RowDeparture(
        'cispo', "with DAPO's sampling and length handling",
        "every fresh group, no refills, no length penalty; the bounds are verl's",
    ),
    RowDeparture(
        'maxrl', 'the mean over successful responses, or (r − mean) / mean',
        'the second, with mean + 1e-6, in the clipped surrogate; dual clip 3 stays. Of rewards other than 0 and 1 the mean is that '
        'of the positive parts, and at least 1/n',
    ),
    RowDeparture(
        'dapo',
        '3 B prompts a generation batch; at most 10 batches, then an error; 4,096 of 20,480 tokens are penalised; rewards ±1; '
        'groups mixed by accuracy or by reward',
        'B prompts a batch, at most 4, then the step trains on what there is; half of the limit is penalised, as 4,096 of 8,192 '
        "in the script of BAPO's authors; rewards 0 and 1 less the penalty; groups mixed by verdict. The surplus beyond B is "
        'discarded. Epochs count steps of B prompts, so with refills the data are read up to four times as often',
    ),
    RowDeparture(
        'ppo',
        "verl's: KL in the reward as an option, with an adaptive controller; λ of 0.95 in places; critic and policy warm up apart",
        'no KL; γ = λ = 1; one optimizer step of the critic for each of the policy, on the same mini-batches; values are read from '
        'a copy of the policy with a head of 0; the reward is that of the last trained token',
    ),
    RowDeparture(
        'ba_ppo', 'initial values of BAPO (A.9); its code is not released',
        'thresholds fixed at their start values 4/8 and 5/8; X1 by range',
    ),
    RowDeparture(
        'mopps', 'may start from offline successes; may draw from an interval of rates; mini-batches of 128 for mathematics',
        "starts from Beta(1, 1); the nearest B; the config's mini-batches",
    ),
    RowDeparture(
        'repo', "a prompt's fresh and earlier responses share an optimizer step; λ_off; random retrieval; std + 1e-4; no dual clip",
        'J_on and J_off share mini-batches of at most mini_batch_groups groups in random order: 2 B groups make twice the '
        'optimizer steps, and the two groups of a prompt may part. λ_off is 1. Of equal rewards the oldest are taken. No random '
        'retrieval; std + 1e-6; dual clip 3. Prompts are remembered without bound, as there',
    ),
    RowDeparture(
        'remix',
        'PPO or GRPO; a mixture of trajectories; reward with a format part. Known from summaries: neither its paper nor its code '
        'could be checked',
        'GRPO alone. Who answers is drawn for each prompt, ages uniform over 1 … N, and recent policies answer anew. After T: '
        "base π_T, no mixture, one pass, the KL to the base alone. λ's constants (50, 10, 0.1, 0.5) are no fields. With T = 50 λ "
        'stays 1, so the previous policy counts only with a later learner.switch_step. Dual clip 3 stays. '
        "The clip's centre is a token's own, also under learner.ratio_level=sequence",
    ),
    RowDeparture(
        'bapo', 'eq. 5, section 3.2, Figure 10 and the release filter by range',
        "the Gaussian filter: Table 3 lists its numbers among the runs' settings, and the scripts of those runs set it. So X1 may "
        'hold all-right and all-wrong groups: their advantage is 0, and they count in the token mean, in the KL and in B',
    ),
    RowDeparture(
        'bapo_guarded', 'MaxRL has no KL; BAPO has group_std advantages and a KL to the behaviour policy',
        'both at once: over_mean advantages on the adaptive batch, and a KL of .05 to the initial policy',
    ),
    RowDeparture(
        'bapo_posterior', 'Reinforce-Ada asks a prompt in rounds within one step, until it has enough right responses, and draws a '
        'balanced group of fixed size from all rounds',
        'hard prompts alone, asked again after an epoch; a pooled group is all responses of two rounds, is normalised by itself, '
        'and counts as trained on once, though its earlier half may have been before',
    ),
    RowDeparture(
        'bapo_continue', 'PrefixRL trains on a fixed set of prefixed problems, made with the base policy from its own right traces, '
        'beside the problems as they are',
        "prompts that are hard now, from the task's solver (replay.given_by=policy: the policy's own), cut anew each time so that "
        'about half the responses succeed; their groups join X2',
    ),
    RowDeparture(
        'bapo_official', 'what the released code does: see the first table',
        "intact groups, no relabelling, no fall-back to the whole batch, no truncation to GPUs, r_tot unmapped. X3's proximal "
        'log-probs are recomputed at the step, not stored at collection. Clip 0.2 / 0.2 and dual clip 3. c2, c3 fixed at 1/8 and '
        '3/8. v = m = 5 and at most 128 re-evaluations as in the paper (the script: 2, 2, 32)',
    ),
    RowDeparture(
        'bapo_mini', 'the script: batches of 32, temperature 0.99, weight decay 0.1, warm-up of 10 steps',
        "v = m = 2, clip 0.2 / 0.28, dual clip 10 and no KL as in the script; the sizes are the config's",
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
    """The first table as it stands in docs/departures.md."""
    return _table(('topic', 'paper', 'released code', 'here', 'switch', 'ambiguity/quirk'), DEPARTURES)


def rows_markdown() -> str:
    """The second one."""
    return _table(('row', 'its paper or code', 'here'), [(f'`{r.row}`' if ' ' not in r.row else r.row, *r[1:]) for r in ROWS])


def _table(head: tuple[str, ...], rows) -> str:
    lines = [head, ('---',) * len(head), *rows]
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


if __name__ == '__main__':
    main(sys.argv[1:])
