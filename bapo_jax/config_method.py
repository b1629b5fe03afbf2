"""What a method is made of: the sections rollout, replay, learner and critic of a config, each with its checks."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import numpy as np
from ml_collections import ConfigDict

from bapo_jax.fields import Need, at_least_one, not_negative, one_of, positive
from bapo_jax.replay.bapo import RULES
from bapo_jax.replay.failures import LAGS
from bapo_jax.replay.filters import FILTERS
from bapo_jax.replay.kinds import GIVEN_BY, KINDS, REEVALUATE
from bapo_jax.replay.repo import RETRIEVE
from bapo_jax.replay.thresholds import DIRECTIONS, R_TOT, TOLERANCE
from bapo_jax.rollout.gpus import named, parallel_flags
from bapo_jax.rollout.schedule import PHASES
from bapo_jax.rollout.token_guard import TOKEN_VARIABLE


def rollout_section() -> ConfigDict:
    """Who answers, and when."""
    r = ConfigDict()
    r.sync_every = 5  # v: the rollout policy α becomes π_θ every v steps
    r.sync_phase = 'paper'  # at steps t with t mod v = 0 (paper), or (t - 1) mod v = 0 (the authors' code)
    r.reevaluation_syncs = False  # a re-evaluation leaves π_θ as the new α, as in the authors' code
    r.mixture = 0.0  # p: the share of prompts that a recent rollout policy answers, not the newest (ReMix)
    r.mixture_policies = 2  # N: how many of the last rollout policies those are drawn from
    r.refill_batches = 1  # at most so many batches of prompts a step, until B groups pass the filter (DAPO); 1: no refill
    r.group_size = 8  # G responses to each prompt
    r.temperature = 1.0  # of sampling; all log-probs are of logits / temperature
    r.top_p = 1.0  # must be 1: cutting the distribution makes the stored log-probs those of another policy
    r.top_k = -1  # must be -1 (off), for the same reason
    r.max_prompt_tokens = 512  # a longer training prompt is left out, a longer one of a benchmark refused
    r.max_response_tokens = 2048  # a longer response is cut and has finish reason 'length'
    r.engine = 'jax'  # who answers: jax (in this process) or vllm (a process of its own)
    r.overlap = False  # answer the prompts of later steps, up to the next sync, while a step trains
    r.rows = 256  # jax: slots of all devices together, each for one response at a time
    r.cache_memory = 0.3  # jax: at most this share of a device's memory for keys and values; slots that do not fit take no response
    r.servers = ()  # vllm: URLs of running servers; (): they are started and supervised, one for each of `gpus`
    r.gpus = ()  # vllm: a server for each word: CUDA's numbers of its GPUs, which JAX leaves free: (4, '6,7'); (): one server
    r.python = ''  # vllm: the interpreter of its environment; '': $BAPO_VLLM_PYTHON, else that of a checkout's .venv-vllm
    r.dtype = 'float32'  # vllm: what policies are shipped and served in: float32 or bfloat16
    r.concurrency = 0  # vllm: groups under way at a server; 0: those of 2,048 responses, twice what vLLM samples at once on an H100
    r.deadline_s = 600.0  # vllm: most seconds for a server to start, to load a policy, or to answer without making progress
    r.probe_tolerance = 0.0  # vllm: most mean |server's - trainer's| log-prob after a sync; 0: as dtypes and devices want; above 1: none
    r.server_memory = 0.0  # vllm: fraction of the GPU's memory for the server that is started; 0: vLLM's choice
    r.server_args = ()  # vllm: more of vLLM's own flags for it, such as ('--enforce-eager',)
    return r


def check_rollout(c: ConfigDict, need: Need) -> None:
    r = c.rollout
    one_of(need, c, 'rollout.engine', ('jax', 'vllm'))
    one_of(need, c, 'rollout.dtype', ('float32', 'bfloat16'))
    one_of(need, c, 'rollout.sync_phase', PHASES)
    at_least_one(
        need, c, 'rollout.sync_every', 'rollout.mixture_policies', 'rollout.refill_batches', 'rollout.max_prompt_tokens',
        'rollout.max_response_tokens', 'rollout.rows',
    )  # fmt: skip
    positive(need, c, 'rollout.temperature', 'rollout.deadline_s')
    not_negative(need, c, 'rollout.concurrency')
    need(0 <= r.mixture < 1, f'rollout.mixture={r.mixture} must be in [0, 1): a share of prompts')
    need(not (r.overlap and (r.mixture or r.refill_batches > 1)),
         f'rollout.overlap with rollout.mixture={r.mixture} and rollout.refill_batches={r.refill_batches}: how many prompts a step '
         'takes, or which policies answer, is known at that step alone; set rollout.overlap=False')  # fmt: skip
    need(not (r.mixture and r.sync_every > 1),
         f'rollout.mixture={r.mixture} draws from the last rollout policies, which sync_every={r.sync_every} makes far older; set '
         'rollout.sync_every=1')  # fmt: skip
    need(not (r.mixture and c.replay.use_x2), f'rollout.mixture={r.mixture} re-evaluates nothing; set replay.use_x2=False')
    need(r.refill_batches == 1 or c.replay.fresh_filter == 'range',
         f'rollout.refill_batches={r.refill_batches} refills with mixed groups, but replay.fresh_filter='
         f'{c.replay.fresh_filter!r}; set it to range')  # fmt: skip
    need(r.group_size >= 2, f'rollout.group_size={r.group_size}: a group advantage needs at least 2 responses; raise it')
    need(r.top_p == 1.0 and r.top_k == -1,
         f'rollout.top_p={r.top_p}, rollout.top_k={r.top_k}: a cut distribution makes stored log-probs incomparable with the '
         "trainer's; set rollout.top_p=1 and rollout.top_k=-1")  # fmt: skip
    for server in r.servers:
        check_server(server, 'rollout.servers')
    need(not (r.servers and r.gpus),
         f'rollout.gpus={r.gpus} is for servers that are started, but rollout.servers={r.servers}; drop one')  # fmt: skip
    for name, value in (('gpus', r.gpus), ('server_memory', r.server_memory)):
        need(not value or r.engine == 'vllm',
             f'rollout.{name}={value} is for servers that are started, but rollout.engine={r.engine}; drop one')  # fmt: skip
    check_gpus(r, need)
    need(not r.servers or bool(os.environ.get(TOKEN_VARIABLE)),
         f"rollout.servers={r.servers}, but {TOKEN_VARIABLE} is not set; put the servers' token there")  # fmt: skip
    need(0 < r.cache_memory < 1, f'rollout.cache_memory={r.cache_memory} must be in (0, 1): a share of the memory of a device')
    need(0 <= r.server_memory < 1, f'rollout.server_memory={r.server_memory} must be in [0, 1): a share of the memory of a GPU')


def check_gpus(r: ConfigDict, need: Need) -> None:
    """Each word lists GPUs, none stands in two of them, and vLLM's own flags use as many."""
    try:
        of_servers = [named(word) for word in r.gpus]
        names = [name for gpus in of_servers for name in gpus]
        need(len({*names}) == len(names), f'rollout.gpus={tuple(r.gpus)} names a GPU twice; each server has its own')
        for gpus in of_servers or [()]:
            parallel_flags(gpus, r.server_args)
    except ValueError as error:
        need(False, str(error))


def check_server(url: str, field: str) -> None:
    """Raises ValueError unless `url` is a server's: http(s)://HOST[:PORT], without a user or a password, which are not shown."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ('http', 'https') and parts.hostname and parts.port != 0 and not parts.query and not parts.fragment
    except ValueError:  # brackets, or a port that is none
        parts, sound = None, False
    if '@' in url:
        raise ValueError(
            f'{field} has a URL with a user or a password; leave them out: servers ask for the token of {TOKEN_VARIABLE} alone'
        )
    if not sound:
        raise ValueError(f'{field} has {url!r}; expected http://HOST:PORT')


def replay_section() -> ConfigDict:
    """What is trained on."""
    p = ConfigDict()
    p.kind = 'bapo'  # who builds the batch: bapo (Algorithm 1; GRPO with its parts off), repo (a prompt's own earlier responses)
    p.fresh_filter = 'gaussian'  # X1: none, range (drop all-right and all-wrong), gaussian(.5, .2), uniform(.6)
    p.reevaluate_every = 5  # m: π_θ re-evaluates hard prompts every m steps
    p.max_reevaluate = 128  # at most this many of them
    p.reevaluate = 'uniform'  # which of them, and how: uniform (the paper), posterior (likeliest to be mixed), continue (with help)
    p.reevaluate_after = 0  # posterior: steps until a prompt is asked again; 0: an epoch
    p.pool_within = 0.0  # posterior: its earlier group joins where a token's mean |log ratio| is at most this; 0: never
    p.given_by = 'policy'  # continue: who wrote the response whose first tokens are given: the policy itself, or the task's solver
    p.c1 = 1 / 8  # a group with accuracy <= c1 is hard; a re-evaluated one with c1 < accuracy < 1 enters X2
    p.improved_rule = 'threshold'  # X2: c1 < accuracy < 1 (threshold), 0 < accuracy < 1 (mixed), or more than before (strict_increase)
    p.c2 = (4 / 8, 1 / 8)  # lower bound of X3's accuracy at r_tot = 0 and at 1; a lone number is fixed
    p.c3 = (5 / 8, 2 / 8)  # upper bound, likewise
    p.thresholds = 'easy_to_hard'  # direction of c2, c3 over r_tot; 'literal' is eq. 8 as printed [centre; literal, half]
    p.r_tot = 'ema'  # the performance c2, c3 follow: ema of the fresh groups' accuracy, or the mean over the buffer
    p.bad_capacity = 0  # prompts kept for re-evaluation, first in first out; 0: learner.batch_groups
    p.high_capacity = 0  # groups kept for replay; 0: high_recent_steps × learner.batch_groups
    p.high_recent_steps = 3  # replay reaches back this many steps [wide; wide_recent_1, wide_recent_10]
    p.shared_pool = False  # one pool of bad_capacity prompts for both parts, as in the authors' code
    p.use_x2 = True  # train on improved hard prompts
    p.use_x3 = True  # fill the batch from the buffer
    p.retrieve = 'recent'  # repo: which of a prompt's earlier responses: all, recent, reward (highest), variance (of rewards)
    p.retrieve_count = 0  # repo: how many of them; 0: G
    p.retrieve_normalisation = 'split'  # repo: fresh and earlier responses have baselines of their own, or one (mixed)
    p.per_prompt = 0  # repo: responses kept of a prompt, replayed once so many are there; 0: 2 G
    p.probe = 0  # prompts that failed and are asked again, for what X2 could earn; only counted (replay/failures.py); 0: none
    p.probe_every = 5  # steps between such questions
    p.x3_untrained = False  # but with nothing that was X1 or X3 before [wide_gaussian; wide_gaussian_untrained]
    return p


def check_replay(c: ConfigDict, need: Need) -> None:
    p = c.replay
    one_of(need, c, 'replay.kind', KINDS)
    one_of(need, c, 'replay.retrieve', RETRIEVE)
    one_of(need, c, 'replay.retrieve_normalisation', ('split', 'mixed'))
    not_negative(need, c, 'replay.retrieve_count')
    need(p.kind != 'repo' or (p.fresh_filter == 'none' and not p.use_x2 and not p.use_x3),
         f'replay.kind=repo trains on every fresh group and its own replay; set replay.fresh_filter=none (not {p.fresh_filter!r}), '
         'replay.use_x2=False and replay.use_x3=False')  # fmt: skip
    one_of(need, c, 'replay.fresh_filter', FILTERS)
    one_of(need, c, 'replay.improved_rule', RULES)
    one_of(need, c, 'replay.reevaluate', REEVALUATE)
    one_of(need, c, 'replay.given_by', GIVEN_BY)
    need(p.probe >= 0 and p.probe % len(LAGS) == 0,
         f'replay.probe={p.probe} must be 0 or a multiple of {len(LAGS)}: as many prompts for each lag of {LAGS} steps')  # fmt: skip
    at_least_one(need, c, 'replay.probe_every')
    not_negative(need, c, 'replay.reevaluate_after', 'replay.pool_within')
    one_of(need, c, 'replay.r_tot', R_TOT)
    one_of(need, c, 'replay.thresholds', DIRECTIONS)
    at_least_one(
        need, c, 'replay.reevaluate_every', 'replay.max_reevaluate', 'replay.bad_capacity', 'replay.high_capacity',
        'replay.high_recent_steps', 'replay.per_prompt',
    )  # fmt: skip
    need(0 <= p.c1 < 1, f'replay.c1={p.c1} must be in [0, 1)')
    G = c.rollout.group_size
    need(not p.use_x2 or p.improved_rule != 'threshold' or not 0 <= p.c1 < 1 or any(k > p.c1 * G + TOLERANCE for k in range(1, G)),
         f'replay.c1={p.c1}: no mixed group of rollout.group_size={G} has a larger accuracy, so X2 is always empty; lower c1, or set '
         'replay.use_x2=False')  # fmt: skip
    c2, c3 = np.atleast_1d(p.c2), np.atleast_1d(p.c3)
    if c2.shape not in ((1,), (2,)) or c3.shape not in ((1,), (2,)):
        need(False, f'replay.c2={p.c2} and replay.c3={p.c3} must each be one number or (value at r_tot = 0, value at 1)')
        return
    need(c2[0] <= c3[0] and c2[-1] <= c3[-1],
         f'replay.c2={p.c2} exceeds replay.c3={p.c3} at an end, so no accuracy is replayed; swap or lower c2')  # fmt: skip
    need(0 <= min(*c2, *c3) and max(*c2, *c3) <= 1, f'replay.c2={p.c2} and replay.c3={p.c3} must be in [0, 1]: accuracies')


def learner_section() -> ConfigDict:
    """How the policy improves."""
    l = ConfigDict()  # noqa: E741
    l.batch_groups = 256  # B: fresh prompts a step, and the most groups in a batch
    l.mini_batch_groups = 64  # groups an optimizer step
    l.partial_mini_batch = 'rebalance'  # an underfilled batch is cut into equal parts; 'keep' leaves a ragged last one
    l.shuffle = True  # mini-batches are cut from a random order of groups; False: from X1, X2, X3 as they stand
    l.passes_per_batch = 1  # passes over a batch
    l.learning_rate = 1e-6  # AdamW; the peak, where a schedule changes it
    l.vision_rate = 1.0  # of a vision tower's learning rate, in learning_rate (critic.learning_rate); 0: the tower is frozen
    l.warmup_updates = 0  # optimizer steps of linear warm-up
    l.schedule = 'constant'  # of the rate after warm-up: constant, cosine or linear
    l.decay_updates = 0  # optimizer steps of cosine and linear; 0: with warm-up, those of `steps` full batches (full_batch_updates)
    l.final_share = 0.1  # of learning_rate, from the end of cosine and linear on
    l.adam_b1 = 0.9  # AdamW: what a moment keeps of itself at an optimizer step; the first
    l.adam_b2 = 0.999  # the second
    l.adam_eps = 1e-8  # AdamW: added to the root of the second moment
    l.first_moment_dtype = 'float32'  # or bfloat16; the second stays float32: bfloat16 would round away what 1 - adam_b2 adds to it
    l.weight_decay = 0.01  # AdamW
    l.grad_clip = 1.0  # on the global norm
    l.skip_limit = 5  # an update without a finite gradient is skipped; the run ends after so many steps in a row that had one
    l.clip_low = 0.2  # trust region [1 - clip_low, 1 + clip_high] of the importance ratio
    l.clip_high = 0.2
    l.clip_centre = 'one'  # the trust region sits around 1, or around π_prox / α (proximal: GePPO, ReMix)
    l.dual_clip = 3.0  # bound on a negative advantage's loss, in advantages; 0: none
    l.anchor = 'behaviour'  # the ratio's denominator: behaviour (α), proximal (π at the step's start), decoupled
    l.importance_cap = 2.0  # decoupled: the weight π_prox / α is cut at this
    l.ratio_level = 'token'  # of which the importance ratio is taken
    l.surrogate = 'clip'  # the policy-gradient loss: clip (PPO), cispo
    l.kl_target = 'behaviour'  # held close to: behaviour (eq. 3), proximal, reference (θ_0), convex (reference, previous), none
    l.kl_coef = 0.001  # β
    l.switch_step = 0  # T: after it the reference is π_T, and rollouts, passes and KL are GRPO's (ReMix); 0: never
    l.entropy_coef = 0.001  # weight of the entropy bonus
    l.aggregation = 'token_mean'  # over a mini-batch: token_mean, or seq_mean_token_mean (eq. 1) [centre; sequence_mean]
    l.advantage = 'group_std'  # (r - mean) / (std + 1e-6); 'paper_eq2' has the population variance; 'gae': from a critic (PPO)
    l.row_tokens = 0  # tokens of a packed row; 0: prompt and response limits together, or with slots one for each response
    l.slot_tokens = 0  # a row is one prompt, computed once, and slots of so many tokens for its responses; 0: sequences end to end
    l.micro_batch_rows = 8  # rows the device sees at once; gradients are summed over micro-batches
    l.remat = 'none'  # what the backward pass computes again of a layer: none … full, the keys of REMAT in models/remat.py
    return l


def full_batch_updates(c: ConfigDict) -> int:
    """steps × ⌈batch_groups / mini_batch_groups⌉ × passes_per_batch: the optimizer steps of a run, or more than it has.

    A partly filled batch has fewer, and so has a row after its switch_step. 0 where only the data tell the steps (`epochs`).
    """
    a_pass = -(-c.learner.batch_groups // max(1, c.learner.mini_batch_groups))  # check_learner refuses less than 1
    return c.steps * a_pass * c.learner.passes_per_batch


def check_learner(c: ConfigDict, need: Need) -> None:
    r, l = c.rollout, c.learner  # noqa: E741
    # Names of learner/, which imports JAX; checks come before that.
    one_of(need, c, 'learner.anchor', ('behaviour', 'proximal', 'decoupled'))
    one_of(need, c, 'learner.kl_target', ('behaviour', 'proximal', 'reference', 'convex', 'none'))
    need(l.kl_target != 'convex' or r.mixture > 0,
         'learner.kl_target=convex holds the policy close to the reference and to the previous rollout policy; without '
         'rollout.mixture the previous one is the current one; set a share of rollout.mixture, or learner.kl_target=reference')  # fmt: skip
    one_of(need, c, 'learner.clip_centre', ('one', 'proximal'))
    need(l.clip_centre == 'one' or l.anchor == 'behaviour',
         f'learner.clip_centre={l.clip_centre} is π_prox / α, where a ratio to α begins; with learner.anchor={l.anchor} the ratio begins '
         'at 1; set learner.anchor=behaviour, or learner.clip_centre=one')  # fmt: skip
    one_of(need, c, 'learner.ratio_level', ('token', 'sequence'))
    one_of(need, c, 'learner.surrogate', ('clip', 'cispo'))
    one_of(need, c, 'learner.aggregation', ('token_mean', 'seq_mean_token_mean', 'seq_mean_token_sum'))
    one_of(need, c, 'learner.advantage', ('group_std', 'paper_eq2', 'centred', 'over_mean', 'gae'))
    one_of(need, c, 'learner.partial_mini_batch', ('rebalance', 'keep'))
    one_of(need, c, 'learner.remat', ('none', 'matrix_products', 'attention_and_mlp_inputs', 'offload', 'full'))
    one_of(need, c, 'learner.schedule', ('constant', 'cosine', 'linear'))
    one_of(need, c, 'learner.first_moment_dtype', ('float32', 'bfloat16'))
    at_least_one(
        need, c, 'learner.batch_groups', 'learner.mini_batch_groups', 'learner.passes_per_batch', 'learner.micro_batch_rows',
        'learner.row_tokens', 'learner.skip_limit',
    )  # fmt: skip
    not_negative(
        need, c, 'learner.switch_step', 'learner.warmup_updates', 'learner.kl_coef', 'learner.entropy_coef', 'learner.weight_decay',
        'learner.dual_clip', 'learner.decay_updates', 'learner.slot_tokens', 'learner.vision_rate',
    )  # fmt: skip
    positive(
        need, c, 'learner.learning_rate', 'learner.grad_clip', 'learner.clip_low', 'learner.clip_high', 'learner.importance_cap',
        'learner.adam_eps',
    )  # fmt: skip
    for name in ('adam_b1', 'adam_b2'):
        need(0 <= l[name] < 1, f'learner.{name}={l[name]} must be in [0, 1)')
    need(0 <= l.final_share <= 1, f'learner.final_share={l.final_share} must be in [0, 1]: a share of learner.learning_rate')
    need(l.schedule == 'constant' or l.decay_updates > 0,
         f'learner.schedule={l.schedule} has no end: steps={c.steps} leaves no optimizer step after learner.warmup_updates='
         f'{l.warmup_updates}; set learner.decay_updates, or steps where `epochs` gives them')  # fmt: skip
    need(l.slot_tokens == 0 or l.slot_tokens >= r.max_response_tokens,
         f'learner.slot_tokens={l.slot_tokens} is shorter than rollout.max_response_tokens={r.max_response_tokens}; raise it')
    need(l.slot_tokens < 1 or (l.row_tokens - r.max_prompt_tokens) % l.slot_tokens == 0,
         f'learner.row_tokens={l.row_tokens} is not rollout.max_prompt_tokens={r.max_prompt_tokens} and whole slots of '
         f'learner.slot_tokens={l.slot_tokens}; set it to {r.max_prompt_tokens} + a multiple, or to 0')  # fmt: skip
    need(l.mini_batch_groups <= l.batch_groups,
         f'learner.mini_batch_groups={l.mini_batch_groups} exceeds learner.batch_groups={l.batch_groups}; lower it')  # fmt: skip
    need(l.row_tokens >= r.max_prompt_tokens + r.max_response_tokens,
         f'learner.row_tokens={l.row_tokens} is shorter than rollout.max_prompt_tokens + rollout.max_response_tokens = '
         f'{r.max_prompt_tokens + r.max_response_tokens}; raise it')  # fmt: skip


def critic_section() -> ConfigDict:
    """The critic of rows with learner.advantage='gae': the policy's decoder with a value head, trained beside it."""
    v = ConfigDict()
    v.learning_rate = 1e-5  # AdamW, constant; the rest of AdamW and the clip of the gradient are the learner's
    v.value_clip = 0.5  # a value's loss gains nothing by moving farther than this from the value before the step
    v.gamma = 1.0  # γ, the discount a token
    v.gae_lambda = 1.0  # λ of the advantage estimate; 1: reward - value where γ is 1 too
    v.warmup_steps = 0  # first steps in which the critic alone is trained
    return v


def check_critic(c: ConfigDict, need: Need) -> None:
    v = c.critic
    positive(need, c, 'critic.learning_rate', 'critic.value_clip')
    not_negative(need, c, 'critic.warmup_steps')
    need(0 < v.gamma <= 1, f'critic.gamma={v.gamma} must be in (0, 1]')
    need(0 <= v.gae_lambda <= 1, f'critic.gae_lambda={v.gae_lambda} must be in [0, 1]')
