"""Every knob with one comment, and beside each section the checks that refuse what cannot run, before any device work.

Of the sections, config_method.py holds those that a method is made of: rollout, replay, learner, critic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from bapo_jax.config_method import (
    check_critic, check_learner, check_replay, check_rollout, critic_section, full_batch_updates, learner_section,
    replay_section, rollout_section,
)  # fmt: skip
from bapo_jax.fields import Need, at_least_one, no_passwords, not_negative, one_of, positive
from bapo_jax.methods import METHODS
from bapo_jax.tasks import custom_reward, get_task


def default_config() -> ConfigDict:
    """Paper values (Table 3) where the paper gives them. `configs/` changes what a task needs, `methods.py` what a method is.

    In brackets the row of studies/first_proof that has a value, and those it was measured against.
    """
    c = ConfigDict()
    c.method = 'bapo'  # the row of methods.py that was applied; set by the config file's argument
    c.seed = 42  # of every draw: prompts, responses, filters, replay
    c.steps = 0  # training steps; 0: as many as `epochs` give
    c.epochs = 3  # passes over the training prompts where steps is 0
    for name, (section, _) in SECTIONS.items():
        c[name] = section()
    return c


def model_section() -> ConfigDict:
    """The policy."""
    m = ConfigDict()
    m.path = ''  # Hugging Face directory or hub name, owner/name[@revision], of the policy θ_0 (and of the reference policy)
    m.attention = 'auto'  # the learner's kernel: xla, splash (TPU), triton, cudnn (GPU); auto: the first that runs; xla: in the engine, too
    m.max_positions = 0  # tokens of the longest sequence, in place of config.json's max_position_embeddings; 0: as stated there
    m.rope_theta = 0.0  # in place of config.json's; 0: as stated there
    m.least_pixels = 0  # an image with fewer is enlarged to as many; 0: as preprocessor_config.json says
    m.most_pixels = 0  # an image with more is scaled down to as many; 0: as preprocessor_config.json says
    m.dtype = 'float32'  # what matrix products run in: float32 or bfloat16; parameters are float32 always
    return m


def check_model(c: ConfigDict, need: Need) -> None:
    need(bool(c.model.path), 'model.path is empty; give a Hugging Face model directory, or a name of the hub')
    not_negative(need, c, 'model.max_positions', 'model.rope_theta', 'model.least_pixels', 'model.most_pixels')
    need(not c.model.most_pixels or c.model.least_pixels <= c.model.most_pixels,
         f'model.least_pixels={c.model.least_pixels} exceeds model.most_pixels={c.model.most_pixels}; lower it')  # fmt: skip
    one_of(need, c, 'model.dtype', ('float32', 'bfloat16'))
    one_of(need, c, 'model.attention', ('auto', 'xla', 'splash', 'triton', 'cudnn'))


def task_section() -> ConfigDict:
    """What is asked and how answers are judged."""
    t = ConfigDict()
    t.name = 'countdown'  # which questions and which verifier: of bapo_jax/tasks/, or a module of yours such as my_tasks.chess
    t.train = 'generated'  # 'generated', a .parquet / .jsonl / .jsonl.gz file, or a hub data set 'owner/name[:split]'
    t.limit = 0  # use this many training problems; 0: all (a generator needs a number)
    t.seed = 1000  # of generated problems
    t.verify_s = 600.0  # most seconds for judging a step's responses; what is unjudged then is no reward, and a fifth ends the run
    t.reward = ''  # 'module:function' of yours that gives a reward and says what is correct; '': the task's verifier judges
    t.reward_deadline_s = 60.0  # most seconds that it may take for a response
    t.reward_workers = 0  # processes that run it; 0: one a core. More where it waits for others, such as a judge model
    t.overlong_share = 0.0  # the reward falls by up to 1 over this last share of the token limit (DAPO); 0: it does not
    t.template = 'tinyzero'  # how a question is put: a name of the task's TEMPLATES
    return t


def check_task(c: ConfigDict, need: Need) -> None:
    not_negative(need, c, 'task.limit', 'task.reward_workers')
    positive(need, c, 'task.verify_s', 'task.reward_deadline_s')
    need(0 <= c.task.overlong_share < 1, f'task.overlong_share={c.task.overlong_share} must be in [0, 1): a share of the limit')
    try:
        task = get_task(c.task.name)
        one_of(need, c, 'task.template', tuple(task.TEMPLATES))
        solved = getattr(task, 'SOLUTIONS', {})
        need(c.task.template in solved or (c.replay.reevaluate, c.replay.given_by) != ('continue', 'solver'),
             f'replay.given_by=solver: task.name={c.task.name} has solutions for the templates {", ".join(solved) or "(none)"}, not '
             f'for task.template={c.task.template}; set replay.given_by=policy')  # fmt: skip
    except ValueError as error:
        need(False, str(error))
    try:
        custom_reward.find_reward(c.task.reward)
    except ValueError as error:
        need(False, str(error))


def prompts_section() -> ConfigDict:
    """Which questions now."""
    q = ConfigDict()
    q.selector = 'shuffled'  # shuffled epochs, or mopps: those whose predicted success rate is nearest a target
    q.candidates = 16  # mopps: batches' worth of prompts to choose one batch from
    q.target = 0.5  # mopps: the success rate that is wanted
    q.decay = 1.0  # mopps: λ, what old evidence keeps of its weight at each new one
    return q


def check_prompts(c: ConfigDict, need: Need) -> None:
    q = c.prompts
    one_of(need, c, 'prompts.selector', ('shuffled', 'mopps'))
    at_least_one(need, c, 'prompts.candidates')
    need(0 < q.target < 1, f'prompts.target={q.target} must be in (0, 1): a success rate')
    need(0 <= q.decay <= 1, f'prompts.decay={q.decay} must be in [0, 1]')


def theory_section() -> ConfigDict:
    """What is watched of the paper's theory."""
    w = ConfigDict()
    w.every = 0  # steps between the monitors of the paper's bound, which score the batch twice more; 0: never
    return w


def check_theory(c: ConfigDict, need: Need) -> None:
    not_negative(need, c, 'theory.every')


def mesh_section() -> ConfigDict:
    """How devices share the work."""
    h = ConfigDict()
    h.platform = ''  # what the trainer must compute on: cpu, gpu or tpu; '': what JAX finds, as JAX_PLATFORMS says
    h.data = 0  # whole copies of the policy; 0: one for each host of GPUs, else 1, or what a stated fsdp leaves
    h.fsdp = -1  # ways to split parameters and rows; -1: all devices that are left
    h.tensor = 1  # ways to split heads, MLP and vocabulary
    h.gather_once = False  # weights cross the mesh once a mini-batch, not twice a micro-batch; costs memory (docs/memory.md)
    h.frozen_on_host = False  # vllm: α, θ_0 and earlier policies lie in host memory; they visit the devices to score or be published
    h.deadline_s = 600.0  # many hosts: most seconds they wait for host 0 without a sign of life; its work may take longer
    return h


def check_mesh(c: ConfigDict, need: Need) -> None:
    positive(need, c, 'mesh.deadline_s')
    one_of(need, c, 'mesh.platform', ('', 'cpu', 'gpu', 'tpu'))
    need(not (c.mesh.frozen_on_host and c.rollout.engine == 'jax'),
         'mesh.frozen_on_host: the in-process engine needs α on the devices; set it to False, or rollout.engine=vllm')  # fmt: skip


def checkpoint_section() -> ConfigDict:
    """What a run continues from."""
    k = ConfigDict()
    k.every = 20  # steps between checkpoints; the last step always makes one
    k.keep = 2  # how many are kept
    k.grace_s = 300.0  # SIGTERM, Ctrl-C: most seconds until the run has stopped; the last checkpoint counts where it has not
    return k


def check_checkpoint(c: ConfigDict, need: Need) -> None:
    at_least_one(need, c, 'checkpoint.every', 'checkpoint.keep')
    positive(need, c, 'checkpoint.grace_s')


def evaluate_section() -> ConfigDict:
    """How π_θ is scored."""
    e = ConfigDict()
    e.every = 0  # steps between evaluations of π_θ; 0: only before the first and after the last step
    e.at_start = True  # before the first step, too: the base that the table and the figure compare with
    e.benchmarks = ('cd34', 'cd4')  # names the task knows, files of problems, or hub data sets
    e.samples = 8  # responses to each question
    e.temperature = 0.6  # of sampling; 0: the likeliest token always (greedy)
    e.top_p = 1.0  # draws from the likeliest tokens that make up this share
    e.max_prompt_tokens = 0  # a longer question is refused; 0: rollout.max_prompt_tokens
    e.max_response_tokens = 0  # a longer response is cut; 0: rollout.max_response_tokens
    e.track_prompts = 0  # training prompts whose accuracy is kept at every evaluation (accuracy migration)
    return e


def check_evaluate(c: ConfigDict, need: Need) -> None:
    at_least_one(need, c, 'evaluate.samples')
    not_negative(
        need, c, 'evaluate.every', 'evaluate.track_prompts', 'evaluate.temperature', 'evaluate.max_prompt_tokens',
        'evaluate.max_response_tokens',
    )  # fmt: skip
    need(0 < c.evaluate.top_p <= 1, f'evaluate.top_p={c.evaluate.top_p} must be in (0, 1]')


def rollouts_section() -> ConfigDict:
    """What is kept of prompts and responses."""
    o = ConfigDict()
    o.every = 20  # steps between files of all prompts and responses, the first and the last step's beside them; 0: none
    return o


def check_rollouts(c: ConfigDict, need: Need) -> None:
    not_negative(need, c, 'rollouts.every')


def log_section() -> ConfigDict:
    """Where metrics go, beside metrics.jsonl, TensorBoard and the terminal."""
    g = ConfigDict()
    g.sinks = ()  # 'trackio', 'wandb': packages that are installed beside this one; they read their own environment variables
    return g


def check_log(c: ConfigDict, need: Need) -> None:
    for sink in c.log.sinks:
        need(sink in ('trackio', 'wandb'), f'log.sinks has {sink!r}, which is unknown; choose among trackio, wandb')
    need(len(set(c.log.sinks)) == len(c.log.sinks), f'log.sinks={c.log.sinks} names one twice; leave it out')


def debug_section() -> ConfigDict:
    """What is checked on the way."""
    d = ConfigDict()
    d.ledger = False  # every step: each drawn prompt has one outcome, each buffer entry one history (run/ledger.py)
    return d


SECTIONS = {
    'model': (model_section, check_model),
    'task': (task_section, check_task),
    'prompts': (prompts_section, check_prompts),
    'rollout': (rollout_section, check_rollout),
    'replay': (replay_section, check_replay),
    'learner': (learner_section, check_learner),
    'theory': (theory_section, check_theory),
    'critic': (critic_section, check_critic),
    'mesh': (mesh_section, check_mesh),
    'checkpoint': (checkpoint_section, check_checkpoint),
    'evaluate': (evaluate_section, check_evaluate),
    'rollouts': (rollouts_section, check_rollouts),
    'log': (log_section, check_log),
    'debug': (debug_section, lambda c, need: None),
}


def with_later_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings, with the defaults of fields that came after the version that began it."""
    return {**settings, **{name: section().to_dict() | settings.get(name, {}) for name, (section, _) in SECTIONS.items()}}


def resolve(config: ConfigDict) -> ConfigDict:
    """A checked copy with every 0 that means 'derive it' filled in. Raises ValueError naming fields and remedy."""
    check_fields(config)
    c = ConfigDict(config.to_dict())
    c.evaluate.max_prompt_tokens = c.evaluate.max_prompt_tokens or c.rollout.max_prompt_tokens
    c.evaluate.max_response_tokens = c.evaluate.max_response_tokens or c.rollout.max_response_tokens
    c.replay.bad_capacity = c.replay.bad_capacity or c.learner.batch_groups
    c.replay.high_capacity = c.replay.high_capacity or c.replay.high_recent_steps * c.learner.batch_groups
    c.replay.per_prompt = c.replay.per_prompt or 2 * c.rollout.group_size
    c.rollout.concurrency = c.rollout.concurrency or max(1, 2048 // c.rollout.group_size)
    slots = c.rollout.group_size * c.learner.slot_tokens
    c.learner.row_tokens = c.learner.row_tokens or c.rollout.max_prompt_tokens + (slots or c.rollout.max_response_tokens)
    if c.learner.schedule != 'constant':  # the steps of a constant rate are free to change
        c.learner.decay_updates = c.learner.decay_updates or max(0, full_batch_updates(c) - c.learner.warmup_updates)
    check(c)
    return c


def check_fields(config: ConfigDict) -> None:
    """Raises ValueError, naming them all, for fields that no config has, and for those that this one lacks."""
    problems = _other_fields(config, default_config(), '')
    if problems:
        raise ValueError('the config cannot run:\n  - ' + '\n  - '.join(problems))


def _other_fields(config: ConfigDict, default: ConfigDict, section: str) -> list[str]:
    place, there = section[:-1] or 'the config', ', '.join(sorted(default.keys()))
    problems = [f'{section}{name}: no such field; {place} has {there}' for name in config if name not in default]
    for name, value in default.items():
        if name not in config:
            problems.append(f'{section}{name} is missing; begin the config with default_config() of bapo_jax.config')
        elif isinstance(value, ConfigDict):
            if isinstance(config[name], ConfigDict):
                problems += _other_fields(config[name], value, f'{section}{name}.')
            else:
                problems.append(f'{section}{name} must be a section, got {config[name]!r}; set {section}{name}.FIELD')
    return problems


def check(c: ConfigDict) -> None:
    """Refuses impossible combinations. All problems found are in one ValueError."""
    problems = []

    def need(condition: bool, message: str) -> None:
        if not condition:
            problems.append(message)

    one_of(need, c, 'method', METHODS)
    not_negative(need, c, 'steps', 'epochs')
    need(c.steps > 0 or c.epochs > 0, 'steps and epochs are both 0: nothing would be trained; set one')
    for _, check_section in SECTIONS.values():
        check_section(c, need)
    no_passwords(need, c)
    if problems:
        raise ValueError('the config cannot run:\n  - ' + '\n  - '.join(problems))
