"""All fields of a config, one row each. The fields that define a method are in method.py.

This table gives the defaults, the checks, what a run may change, `--fields` and docs/reference/fields.md.

Defaults are the paper's values (Table 3) if the paper has them. `configs/` changes what a task needs,
`methods/` what defines a method. Brackets in a comment name the row of studies/first_proof with the default
value, and the rows it was compared with.

A section has fields, and sub-tables with the fields of one choice.
"""

from __future__ import annotations

from bapo_jax.config.field import (
    ANY, AT_LEAST_1, COMPUTED, FREE, HELD, AMEND, NOT_NEGATIVE, POSITIVE, SWITCH, Field, one_of, share,
    within,
)  # fmt: skip
from bapo_jax.config.method import CRITIC_FIELDS, LEARNER_FIELDS, REPLAY_FIELDS, ROLLOUT_FIELDS

# Names defined in models/ are repeated here: it imports JAX, and a config is checked before that.
# fmt: off

TOP_LEVEL = {
    'method': Field('bapo', ANY, HELD, 'row of methods/; set by the argument of --config=FILE:METHOD'),
    'seed': Field(42, ANY, HELD, 'seed of every random draw: prompts, responses, filters, replay'),
    'steps': Field(0, NOT_NEGATIVE, FREE, 'training steps; 0: by `epochs`', alike=False),
    'epochs': Field(3, NOT_NEGATIVE, FREE, 'passes over the training prompts if steps is 0', alike=False),
}

_MODEL = {
    'path': Field('', ANY, FREE,
        'initial policy θ_0 (and the reference): a Hugging Face directory, or a hub name '
        'owner/name[@revision]', alike=False),
    'attention': Field('auto', one_of('auto', 'xla', 'splash', 'triton', 'cudnn'), COMPUTED,
        'attention kernel of the learner: splash (TPU), triton or cudnn (GPU), xla (anywhere; then in the '
        'engine, too); auto: the best that runs'),
    'max_positions': Field(0, NOT_NEGATIVE, HELD,
        'longest sequence in tokens, overriding max_position_embeddings of config.json; 0: the value there'),
    'rope_theta': Field(0.0, NOT_NEGATIVE, HELD, 'overrides rope_theta of config.json; 0: the value there'),
    'pixels': Field((0, 0), ANY, HELD,
        '(fewest, most) pixels of an image, which is resized to fit; 0: as in preprocessor_config.json'),
    'dtype': Field('float32', one_of('float32', 'bfloat16'), HELD,
        'dtype of matrix products; parameters are always float32'),
    'adapter': {
        'rank': Field(0, NOT_NEGATIVE, HELD,
            'rank of a LoRA adapter (W + alpha / rank · A B), which alone is trained; 0: all weights are'),
        'alpha': Field(32.0, POSITIVE, HELD, 'alpha of the adapter'),
        'targets': Field('all', one_of('all', 'attention', 'mlp'), HELD,
            'layers of the decoder whose matrices it changes'),
        'start': Field('', ANY, FREE,
            'directory of the adapter that the run starts from, as PEFT writes it; empty: A is random, B 0; '
            'its files must stay the same if there is a reference policy',
            alike=False),
    },
}

_TASK = {
    'name': Field('countdown', ANY, HELD,
        'task: a name of bapo_jax/tasks/, or a module of yours such as my_tasks.chess'),
    'train': Field('generated', ANY, HELD,
        "training problems: 'generated', a .parquet / .jsonl / .jsonl.gz file, or a hub data set "
        "'owner/name[:split]'"),
    'limit': Field(0, NOT_NEGATIVE, HELD,
        'number of training problems; 0: all (generated problems need a number)'),
    'seed': Field(1000, ANY, HELD, 'seed of generated problems'),
    'template': Field('tinyzero', ANY, HELD, "prompt template: a name in the task's TEMPLATES"),
    'turns': Field(0, within('a whole number below 512', lambda x: x in range(512)), HELD,
        "most replies of the task's tool to a response, each followed by another turn; 0: no tool"),
    'overlong_share': Field(0.0, share('a share of the limit'), AMEND,
        'soft overlong punishment (DAPO): the reward falls by up to 1 over this last share of the token '
        'limit; 0: off'),
    'length_weight': Field(0.0, NOT_NEGATIVE, AMEND,
        'length reward (Kimi k1.5): within a group, short right responses get up to half of this more, long '
        'ones up to half of it less; 0: off'),
    'reward': Field('', ANY, AMEND, "your reward function, as 'module:function'; '': the task's verifier"),
    'judging': {
        'step_s': Field(600.0, POSITIVE, FREE,
            'timeout for judging all responses of a step, in seconds; unjudged responses have no reward; '
            'if they are more than a fifth of all, the run ends', alike=False),
        'reward_s': Field(60.0, POSITIVE, FREE,
            'timeout of task.reward for one response, in seconds', alike=False),
        'workers': Field(0, NOT_NEGATIVE, FREE,
            'processes that run task.reward; 0: one per core. Use more if it waits for a service, such as a '
            'judge model', alike=False),
    },
}

_PROMPTS = {
    'selector': Field('shuffled', one_of('shuffled', 'mixed', 'mopps', 'prioritised', 'adaprefix', 'dots'),
        HELD,
        'shuffled: shuffled epochs; mixed: half of them prompts whose last group was mixed; mopps: prompts '
        'whose predicted success rate is nearest to a target; prioritised: in proportion to their failure '
        'rate (Kimi k1.5); adaprefix: epochs, each from a prefix of a correct response; dots: a success rate '
        'near 1/2, predicted from references'),
    'mopps': {
        'candidates': Field(16, AT_LEAST_1, HELD, 'batches of candidate prompts for each batch'),
        'target': Field(0.5, share('a success rate', 'in (0, 1)'), HELD, 'target success rate'),
        'decay': Field(1.0, share('', 'in [0, 1]'), HELD, 'λ, decay of old evidence at each new one'),
    },
    'prioritised': {
        'rate': Field(0.5, share('', 'in (0, 1]'), HELD,
            "weight of a prompt's newest group in its success rate, which begins at 0"),
    },
    'dots': {
        'references': Field(256, AT_LEAST_1, HELD, 'K: random prompts answered in the first step of a cycle'),
        'cycle': Field(2, AT_LEAST_1, HELD, 'μ: steps whose prompts are chosen by the same references'),
        'tau': Field(1e-3, POSITIVE, HELD,
            'τ: prompts are drawn with probability ∝ exp(-|predicted success - 1/2| / τ)'),
        'embeddings': Field('', ANY, AMEND,
            'model whose mean last hidden state embeds a prompt: a Hugging Face directory, or a hub name; '
            "'': hashed n-grams of tokens", alike=False),
    },
    'adaprefix': {
        'gain': Field(0.25, POSITIVE, HELD,
            "a prompt's prefix grows by gain × (1/2 - accuracy of its group), as a share of the response"),
        'withdrawal': Field((0.6, 0.8), ANY, HELD,
            'shares of the steps between which prefixes shrink to nothing'),
    },
}

_MESH = {
    'platform': Field('', one_of('', 'cpu', 'gpu', 'tpu'), COMPUTED,
        "required platform of the trainer; '': whatever JAX finds, which JAX_PLATFORMS can restrict"),
    'data': Field(0, ANY, COMPUTED,
        'data-parallel copies of the policy; 0: one per host of GPUs, else 1; what is left if fsdp is set'),
    'fsdp': Field(-1, ANY, COMPUTED,
        'ways to shard parameters, and rows or their tokens; -1: all remaining devices'),
    'tensor': Field(1, ANY, COMPUTED, 'ways to shard heads, MLP and vocabulary'),
    'gather_once': Field(False, SWITCH, COMPUTED,
        'gather weights once per mini-batch instead of twice per micro-batch; costs memory '
        '(docs/reference/memory.md)'),
    'frozen_on_host': Field(False, SWITCH, COMPUTED,
        'vllm: keep α, θ_0 and earlier policies in host memory; they are copied to the devices to score '
        'or to be published'),
    'deadline_s': Field(600.0, POSITIVE, COMPUTED,
        'many hosts: timeout without a heartbeat from host 0, in seconds; its work may take longer',
        alike=False),
}

_CHECKPOINT = {
    'every': Field(20, AT_LEAST_1, FREE,
        'steps between checkpoints; the last step always saves one', alike=False),
    'keep': Field(2, AT_LEAST_1, FREE, 'number of checkpoints kept', alike=False),
    'grace_s': Field(300.0, POSITIVE, FREE,
        'seconds that a run may take to stop after SIGTERM or Ctrl-C, before it ends without a new '
        'checkpoint',
        alike=False),
}

_EVALUATE = {
    'every': Field(0, NOT_NEGATIVE, FREE,
        'steps between evaluations of π_θ; 0: only before the first step and after the last', alike=False),
    'at_start': Field(True, SWITCH, FREE,
        'also evaluate before the first step, as the baseline of the table and the figure', alike=False),
    'benchmarks': Field(('cd34', 'cd4'), ANY, FREE,
        'benchmarks: names that the task knows, files of problems, or hub data sets', alike=False),
    'samples': Field(8, AT_LEAST_1, FREE, 'responses per question', alike=False),
    'temperature': Field(0.6, NOT_NEGATIVE, FREE, 'sampling temperature; 0: greedy', alike=False),
    'top_p': Field(1.0, share('', 'in (0, 1]'), FREE, 'nucleus (top-p) sampling threshold', alike=False),
    'max_prompt_tokens': Field(0, NOT_NEGATIVE, FREE,
        'a longer question is an error; 0: rollout.max_prompt_tokens', alike=False),
    'max_response_tokens': Field(0, NOT_NEGATIVE, FREE,
        'longer responses are cut; 0: rollout.max_response_tokens', alike=False),
    'track_prompts': Field(0, NOT_NEGATIVE, FREE,
        'training prompts whose accuracy is recorded at every evaluation (accuracy migration)', alike=False),
}

_LOG = {
    'sinks': Field((), ANY, FREE,
        "extra metric sinks: 'trackio', 'wandb'; install them yourself; they read their own environment "
        'variables', alike=False),
    'rollouts_every': Field(20, NOT_NEGATIVE, FREE,
        'steps between files with all prompts and responses, also for the first and the last step; 0: none',
        alike=False),
    'theory_every': Field(0, NOT_NEGATIVE, FREE,
        "steps between measurements of the paper's bound, which score the batch twice more; 0: never",
        alike=False),
    'ledger': Field(False, SWITCH, FREE,
        'check conservation at every step: one outcome per drawn prompt, one history per buffer entry '
        '(run/ledger.py)', alike=False),
    'failed_again': {
        'prompts': Field(0, ANY, FREE,
            'failed prompts to ask again, to measure what X2 could earn; only counted (replay/failures.py); '
            '0: off', alike=False),
        'every': Field(5, AT_LEAST_1, FREE, 'steps between such measurements', alike=False),
    },
}

# fmt: on

# Section -> (what it is for, its rows).
SECTIONS = {
    'model': ('The policy.', _MODEL),
    'task': ('The task, its data and its rewards.', _TASK),
    'prompts': ('How prompts are selected.', _PROMPTS),
    'rollout': ('How responses are generated.', ROLLOUT_FIELDS),
    'replay': ('Which groups a step trains on.', REPLAY_FIELDS),
    'learner': ('How the policy is updated.', LEARNER_FIELDS),
    'critic': (
        "The critic of rows with learner.advantage='gae': the policy's decoder with a value head, trained "
        'beside it.',
        CRITIC_FIELDS,
    ),
    'mesh': ('How parameters and data are split over devices.', _MESH),
    'checkpoint': ('When checkpoints are written.', _CHECKPOINT),
    'evaluate': ('How π_θ is evaluated on benchmarks.', _EVALUATE),
    'log': ('What is logged and measured in addition to metrics.jsonl, TensorBoard and the terminal.', _LOG),
}
