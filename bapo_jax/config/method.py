"""The fields that define a method: rollout, replay, learner, critic. table.py has the others."""

from __future__ import annotations

from bapo_jax.config.field import (
    AMEND, ANY, AT_LEAST_1, COMPUTED, FREE, HELD, NOT_NEGATIVE, POSITIVE, SWITCH, Field, names, one_of, share,
)  # fmt: skip
from bapo_jax.config.own_code import or_own
from bapo_jax.replay.bapo import RULES
from bapo_jax.replay.filters import FILTERS
from bapo_jax.replay.freshper import BASES
from bapo_jax.replay.kinds import GIVEN_BY, KINDS, REEVALUATE
from bapo_jax.replay.repo import RETRIEVE
from bapo_jax.replay.thresholds import DIRECTIONS
from bapo_jax.rollout.schedule import PHASES

# Names defined in learner/ are repeated here: it imports JAX, and a config is checked before that.
# fmt: off

ROLLOUT_FIELDS = {
    'sync_every': Field(5, AT_LEAST_1, AMEND, 'v: the rollout policy α becomes π_θ every v steps'),
    'sync_phase': Field('paper', names(PHASES), HELD,
        "paper: sync at steps t with t mod v = 0; code (the authors'): at (t - 1) mod v = 0, and after a "
        're-evaluation'),
    'most_behind': Field(0, NOT_NEGATIVE, AMEND,
        'η: with overlap, up to η steps past a sync are requested before it, so that no step waits for '
        'responses (AReaL)'),
    'mixture': {
        'share': Field(0.0, share('a share of prompts'), HELD,
            'p: the share of prompts answered by a recent rollout policy instead of the newest (ReMix)'),
        'policies': Field(2, AT_LEAST_1, HELD, 'N: the number of recent rollout policies to draw from'),
    },
    'step_share': Field(1.0, share('a share of rollout.max_response_tokens', 'in (0, 1]'), HELD,
        'a response gets at most this share of max_response_tokens in a step; a later step continues it, and '
        'the first steps have few whole groups (partial rollouts: Kimi k1.5); 1: whole responses'),
    'refill_batches': Field(1, AT_LEAST_1, AMEND,
        'most batches of prompts a step, until B groups pass the filter (DAPO); 1: no refill'),
    'group_size': Field(8, ANY, HELD, 'G responses to each prompt'),
    'temperature': Field(1.0, POSITIVE, AMEND,
        'sampling temperature, without top-p or top-k; all log-probs are of logits / temperature'),
    'max_prompt_tokens': Field(512, AT_LEAST_1, HELD,
        'longer training prompts are left out; a longer benchmark prompt is an error'),
    'max_response_tokens': Field(2048, AT_LEAST_1, AMEND,
        "longer responses are cut, with finish reason 'length'"),
    'engine': Field('jax', one_of('jax', 'vllm'), AMEND,
        'the engine that generates: jax (in this process) or vllm (separate servers)'),
    'overlap': Field(False, SWITCH, FREE,
        'generate for later steps, up to the next sync, while a step trains', alike=False),
    'rows': Field(256, AT_LEAST_1, COMPUTED, 'jax: most sequences sampled concurrently, over all devices'),
    'cache_memory': Field(0.3, share('a share of the memory of a device', 'in (0, 1)'), COMPUTED,
        "jax: at most this share of a device's memory for the KV cache; sequences that do not fit wait",
        alike=False),
    'servers': Field((), ANY, FREE,
        'vllm: URLs of running servers; (): start and supervise one for each entry of `gpus`', alike=False),
    'gpus': Field((), ANY, FREE,
        'vllm: start one server for each entry, on these CUDA devices, which JAX must leave free: (4, '
        "'6,7'); (): one server", alike=False),
    'dtype': Field('float32', one_of('float32', 'bfloat16'), AMEND,
        'vllm: dtype in which policies are shipped and served'),
    'concurrency': Field(0, NOT_NEGATIVE, FREE,
        "vllm: concurrent groups per server; 0: 2,048 responses' worth, twice what vLLM samples at once on "
        'an H100', alike=False),
    'deadline_s': Field(600.0, POSITIVE, FREE,
        'vllm: timeout for a server to start, to load a policy, or to make progress on an answer, in seconds',
        alike=False),
    'probe_tolerance': Field(0.0, NOT_NEGATIVE, FREE,
        'vllm: largest mean |log-prob difference| between server and trainer after a sync; 0: by dtypes and '
        'devices; above 1: the direction is not checked', alike=False),
    'server': {
        'python': Field('', ANY, FREE,
            "Python of vLLM's environment; '': $BAPO_VLLM_PYTHON, or else .venv-vllm of the checkout",
            alike=False),
        'memory': Field(0.0, share('a share of the memory of a GPU'), FREE,
            "fraction of GPU memory for each started server; 0: vLLM's default", alike=False),
        'args': Field((), ANY, COMPUTED, "extra vLLM flags, such as ('--enforce-eager',)", alike=False),
    },
}

REPLAY_FIELDS = {
    'kind': Field('bapo', or_own(*KINDS), HELD,
        "how batches are built: bapo (Algorithm 1; GRPO if its parts are off), repo (replay of a prompt's "
        'earlier responses), arpo (a success in a failed group), fifo (uniform), freshper (prioritised), '
        'exgrpo (groups led by a success), rollout_replay (fewer fresh groups, and recent ones), luffy (a '
        'trace in each group), relift (traces of failed prompts)'),
    'fresh_filter': Field('gaussian', or_own(*FILTERS), AMEND,
        'X1: none, range (drop groups that are all right or all wrong), gaussian(.5, .2), uniform(.6)'),
    'use_x2': Field(True, SWITCH, AMEND, 'train on improved hard prompts'),
    'reevaluate_every': Field(5, AT_LEAST_1, AMEND, 'm: π_θ re-evaluates hard prompts every m steps'),
    'max_reevaluate': Field(128, AT_LEAST_1, AMEND, 'most hard prompts per re-evaluation'),
    'reevaluate': Field('uniform', names(REEVALUATE), AMEND,
        'which hard prompts, and how: uniform (the paper), delayed (at every step, those that failed m steps '
        'ago), posterior (most likely to give a mixed group), continue (from a given prefix)'),
    'posterior': {
        'after': Field(0, NOT_NEGATIVE, AMEND, 'steps before a prompt is asked again; 0: one epoch'),
        'pool_within': Field(0.0, NOT_NEGATIVE, AMEND,
            'pool with the earlier group if the mean |log ratio| per token is at most this; 0: never'),
    },
    'given_by': Field('policy', names(GIVEN_BY), AMEND,
        "continue, adaprefix: source of the given prefix: a correct response of the policy, or the task's "
        'solver. luffy, relift without traces.file: solver'),
    'c1': Field(1 / 8, share(''), AMEND,
        'a group with accuracy <= c1 is hard; a re-evaluated one with c1 < accuracy < 1 enters X2'),
    'improved_rule': Field('threshold', names(RULES), AMEND,
        'X2: c1 < accuracy < 1 (threshold), 0 < accuracy < 1 (mixed), or more than before (strict_increase)'),
    'use_x3': Field(True, SWITCH, AMEND, 'fill the batch from the buffer'),
    'c2': Field((4 / 8, 1 / 8), ANY, AMEND,
        'lower bound of accuracy in X3 at r_tot = 0 and at r_tot = 1; a single number is fixed'),
    'c3': Field((5 / 8, 2 / 8), ANY, AMEND, 'upper bound of accuracy in X3, likewise'),
    'thresholds': Field('easy_to_hard', names(DIRECTIONS), AMEND,
        "direction in which c2 and c3 move with r_tot; 'literal' is eq. 8 as printed [centre; literal, half]"
        ),
    'bad_capacity': Field(0, AT_LEAST_1, HELD,
        'capacity for hard prompts, FIFO; 0: learner.batch_groups, and m + 1 times that with '
        'reevaluate=delayed'),
    'high_capacity': Field(0, AT_LEAST_1, HELD,
        'capacity for replayable groups; 0: high_recent_steps × learner.batch_groups'),
    'high_recent_steps': Field(3, AT_LEAST_1, HELD,
        'replay only groups from this many recent steps [wide; wide_recent_1, wide_recent_10]'),
    'shared_pool': Field(False, SWITCH, HELD,
        "one pool of bad_capacity prompts for both parts, and r_tot is its mean accuracy (the authors' "
        'code); False: r_tot is an EMA over fresh groups'),
    'x3_untrained': Field(False, SWITCH, HELD,
        'exclude groups already trained on from X3 [wide_gaussian; wide_gaussian_untrained]'),
    'repo': {
        'retrieve': Field('recent', names(RETRIEVE), HELD,
            "which G of a prompt's earlier responses: all (regardless of G), recent, reward (highest), "
            'variance (of rewards)'),
        'normalisation': Field('split', one_of('split', 'mixed'), HELD,
            'split: separate baselines for fresh and earlier responses; mixed: one baseline'),
        'per_prompt': Field(0, AT_LEAST_1, HELD,
            'responses kept per prompt, replayed once there are this many; 0: 2 G'),
    },
    'arpo': {
        'per_prompt': Field(8, AT_LEAST_1, HELD, 'correct responses kept per prompt, FIFO'),
    },
    'fifo': {
        'ratio': Field(2, AT_LEAST_1, HELD, 'groups trained on per fresh group: a batch has ratio × B'),
        'capacity': Field(0, AT_LEAST_1, HELD, 'N: groups kept, FIFO; 0: 6 × learner.batch_groups'),
    },
    'freshper': {
        'ratio': Field(1, AT_LEAST_1, HELD, 'most earlier groups per fresh group in a batch'),
        'capacity': Field(0, AT_LEAST_1, HELD, "groups kept, FIFO; 0: 50,000 responses' worth"),
        'base': Field('advantage', names(BASES), HELD,
            'priority of a new group: mean |advantage| or mean |reward| of its responses'),
        'tau': Field(500.0, POSITIVE, AMEND, 'τ: steps after which a priority has fallen to 1/e'),
        'alpha': Field(0.6, NOT_NEGATIVE, AMEND, 'α: a group is drawn with P ∝ priority^α; 0: uniformly'),
        'beta': Field(0.4, NOT_NEGATIVE, AMEND,
            'β: token weights of an earlier group are multiplied by (N P)^-β / its maximum; 0: by 1'),
    },
    'exgrpo': {
        'share': Field(0.5, share('a share of the groups of a batch'), HELD,
            'ρ: the largest share of groups that a stored success leads'),
        'start_above': Field(0.35, share('a share of responses'), HELD,
            'successes are stored once more than this share of the responses of a batch is correct'),
        'per_prompt': Field(32, AT_LEAST_1, HELD, 'correct responses kept per prompt, FIFO'),
    },
    'rollout_replay': {
        'fresh': Field(0, AT_LEAST_1, HELD, 'fresh prompts per step; 0: half of learner.batch_groups'),
        'capacity': Field(0, AT_LEAST_1, HELD, 'groups kept, FIFO; 0: learner.batch_groups'),
    },
    'traces': {
        'file': Field('', ANY, FREE,
            "luffy, relift: file of responses by others, rows of prompt_id and text (docs/your_data.md); '': "
            "the task's solver writes them, with given_by=solver", alike=False),
        'demonstrations': Field(0, AT_LEAST_1, AMEND,
            'relift: N, traces that join a batch once as many failed prompts wait; 0: learner.batch_groups'),
    },
}

LEARNER_FIELDS = {
    'batch_groups': Field(256, AT_LEAST_1, HELD,
        'B: fresh prompts per step, and most groups of a batch; some kinds of replay change either'),
    'mini_batch_groups': Field(64, AT_LEAST_1, AMEND, 'groups per optimizer step'),
    'mini_batches': Field('even', one_of('even', 'released'), AMEND,
        "even: shuffled groups in equal parts; released (the authors' code): X1, X2, X3 in order, with a "
        'smaller last mini-batch'),
    'passes_per_batch': Field(1, AT_LEAST_1, AMEND, 'passes over each batch'),
    'learning_rate': Field(1e-6, POSITIVE, AMEND, 'AdamW; the peak rate if there is a schedule'),
    'schedule': {
        'kind': Field('constant', one_of('constant', 'cosine', 'linear'), AMEND,
            'decay after warm-up; cosine and linear end at a tenth of the peak'),
        'warmup_updates': Field(0, NOT_NEGATIVE, AMEND, 'optimizer steps of linear warm-up'),
        'decay_updates': Field(0, NOT_NEGATIVE, AMEND,
            'optimizer steps of cosine or linear decay; 0: up to the last step, if all batches are full'),
    },
    'vision_rate': Field(1.0, NOT_NEGATIVE, HELD,
        'learning rate of the vision tower as a multiple of learning_rate (critic.learning_rate for the '
        'critic); 0: frozen'),
    'adam': {
        'b1': Field(0.9, share(''), AMEND, 'decay of the first moment'),
        'b2': Field(0.999, share(''), AMEND, 'decay of the second moment'),
        'eps': Field(1e-8, POSITIVE, AMEND, 'added to the square root of the second moment'),
        'first_moment_dtype': Field('float32', one_of('float32', 'bfloat16'), HELD,
            'the second moment stays float32: bfloat16 would round away the increments of 1 - b2'),
        'on_host': Field(False, SWITCH, COMPUTED,
            'keep the moments in host memory; they are copied to the devices for each update'),
    },
    'reset_every': Field(0, NOT_NEGATIVE, AMEND,
        "reset Adam's moments before every so many steps (Kimi k1.5: at each sync); 0: never"),
    'weight_decay': Field(0.01, NOT_NEGATIVE, AMEND, "AdamW's decoupled weight decay"),
    'grad_clip': Field(1.0, POSITIVE, AMEND, 'largest global norm of a gradient'),
    'anchor': Field('behaviour', one_of('behaviour', 'proximal', 'decoupled'), HELD,
        "the ratio's denominator: behaviour (α), proximal (π at the step's start), decoupled"),
    'importance_cap': Field(2.0, POSITIVE, AMEND, 'decoupled: upper bound on the weight π_prox / α'),
    'importance_rule': Field('truncate', one_of('truncate', 'mask'), AMEND,
        'decoupled: a weight above the cap becomes the cap (truncate) or 0 (mask: AReaL)'),
    'ratio_level': Field('token', one_of('token', 'sequence', 'response'), AMEND,
        'level of the importance ratio: per token, per sequence (the geometric mean: GSPO), or per response '
        '(the product)'),
    'surrogate': Field('clip', or_own('clip', 'cispo', 'binary_tv', 'unclipped', 'regression'), AMEND,
        'the policy-gradient loss: clip (PPO), cispo, binary_tv (DPPO), unclipped (importance ratio times '
        'advantage), regression (Kimi k1.5)'),
    'tau': Field(0.01, POSITIVE, AMEND, 'regression: τ, the weight of the squared log ratio of a response'),
    'traces': {
        'loss': Field('none', one_of('none', 'shaped', 'cross_entropy'), HELD,
            "loss of the tokens of others' responses: none, shaped (-A w / (w + gamma): LUFFY, ExGRPO), "
            'cross_entropy (ReLIFT)'),
        'gamma': Field(0.1, POSITIVE, AMEND, 'shaped: γ'),
        'coef': Field(1.0, POSITIVE, AMEND, 'cross_entropy: weight of its token mean'),
    },
    'clip_low': Field(0.2, POSITIVE, AMEND,
        'trust region [1 - clip_low, 1 + clip_high] of the importance ratio (binary_tv: [-clip_low, '
        "clip_high] of the change of a token's probability)"),
    'clip_high': Field(0.2, POSITIVE, AMEND, 'its upper end'),
    'clip_centre': Field('one', one_of('one', 'proximal'), AMEND,
        'centre of the trust region: 1, or π_prox / α (proximal: GePPO, ReMix)'),
    'dual_clip': Field(3.0, NOT_NEGATIVE, AMEND,
        'dual clip: upper bound on the loss of a negative advantage, as a multiple of it; 0: off'),
    'trust': {
        'kind': Field('fixed', one_of('fixed', 'second_moment', 'staleness', 'success'), AMEND,
            'the trust region: the same for all tokens (fixed), without stale tokens (second_moment: M2PO), '
            'narrower for them (staleness: SAT), wider for rare successes (success: GAPO)'),
        'moment': Field(0.04, POSITIVE, AMEND,
            'second_moment: τ, largest mean squared log ratio of π_prox to α; older tokens are masked'),
        'quantile': Field(0.9, share('', 'in (0, 1)'), AMEND,
            'staleness: tokens beyond this quantile of |log ratio| have a narrower region'),
    },
    'kl_target': Field('behaviour', one_of('behaviour', 'proximal', 'reference', 'convex', 'none'), HELD,
        'policy of the KL penalty: behaviour (eq. 3), proximal, reference (θ_0), convex (reference and '
        'previous), none'),
    'kl_coef': Field(0.001, NOT_NEGATIVE, AMEND, 'β, weight of the KL penalty'),
    'entropy_coef': Field(0.001, NOT_NEGATIVE, AMEND, 'weight of the entropy bonus'),
    'balance_coef': Field(0.0, NOT_NEGATIVE, AMEND,
        "weight of the loss that evens out experts' loads, of a mixture of experts"),
    'switch_step': Field(0, NOT_NEGATIVE, HELD,
        'T: after this step train as GRPO with π_T as the reference (ReMix); 0: never'),
    'aggregation': Field('token_mean',
        one_of('token_mean', 'seq_mean_token_mean', 'seq_mean_token_sum'), AMEND,
        'reduction over a mini-batch; seq_mean_token_mean is eq. 1 [centre; sequence_mean]'),
    'advantage': Field('group_std',
        or_own('group_std', 'paper_eq2', 'centred', 'over_mean', 'focal', 'gae'), HELD,
        'group_std: (r - mean) / (std + 1e-6); paper_eq2: with the population variance; gae: from a critic '
        '(PPO)'),
    'row_tokens': Field(0, AT_LEAST_1, COMPUTED,
        'tokens per packed row; 0: longest prompt + longest response, or + one slot for each response'),
    'slot_tokens': Field(0, NOT_NEGATIVE, COMPUTED,
        'compute each prompt once: a row is a prompt and slots of this many tokens for its responses; 0: '
        'pack sequences end to end'),
    'micro_batch_rows': Field(8, AT_LEAST_1, COMPUTED,
        'rows per micro-batch, over all devices; if they are fewer than data × fsdp, as for long rows, fsdp '
        'splits the tokens of each; gradients are summed over micro-batches'),
    'remat': Field('none',
        one_of('none', 'matrix_products', 'attention_and_mlp_inputs', 'offload', 'full'), COMPUTED,
        'rematerialisation: what the backward pass recomputes of each layer'),
}

CRITIC_FIELDS = {
    'learning_rate': Field(1e-5, POSITIVE, AMEND,
        "constant AdamW rate; all other settings of AdamW and the gradient clip are the learner's"),
    'value_clip': Field(0.5, POSITIVE, AMEND,
        'clip range of the value loss around the value before the step'),
    'gae': Field((1.0, 1.0), ANY, AMEND,
        '(γ per token, λ) of generalised advantage estimation; (1, 1): reward - value'),
    'warmup_steps': Field(0, NOT_NEGATIVE, AMEND, 'number of first steps that only train the critic'),
}
