"""BAPO, Algorithm 1 (arXiv 2602.20722). Every method of methods.py is this loop with other choices.

    python -m bapo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart
    python -m bapo_jax.train --config=configs/countdown.py:grpo --workdir=runs/x --config.learner.learning_rate=2e-6

Installed, the command is `bapo-train`. --config=quickstart, without a path, names one of the package's configs from any folder.
A used run directory continues where it stopped. SIGTERM or Ctrl-C stops with a checkpoint, and exit status 75 says that the run has
not ended; docs/operations.md says what else a run survives. With --dry_run nothing is trained: dry_run.py says what a run would
take, and whether it fits.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags, logging
from ml_collections import ConfigDict

from bapo_jax import cli, config as config_lib, events, stopping
from bapo_jax.dry_run import dry_run
from bapo_jax.ending import explained, refused
from bapo_jax.evaluate import core_metrics, evaluate_in_training
from bapo_jax.files import check_directory
from bapo_jax.follow import follow
from bapo_jax.groups import Batch, ByGroup, Prompt
from bapo_jax.hosts import Hosts, join, naming_losses, part
from bapo_jax.inputs import read_inputs
from bapo_jax.learner.learner import Learner, build_learner
from bapo_jax.learner.objective import BEFORE, PROXIMAL, ROLLOUT
from bapo_jax.models.attention import described
from bapo_jax.models.hf import architecture
from bapo_jax.parallel import describe_devices
from bapo_jax.replay.bapo import Bapo
from bapo_jax.replay.failures import Failures, measured
from bapo_jax.replay.kinds import make_replay, make_retries
from bapo_jax.replay.repo import Repo
from bapo_jax.replay.thresholds import levels_in_words
from bapo_jax.report import draw_run, who_waits
from bapo_jax.rollout.engines import check_start, start_engine
from bapo_jax.rollout.rollouts import Rollouts
from bapo_jax.rollout.schedule import Schedule, schedule_of
from bapo_jax.run.checkpoint import RunState, open_run
from bapo_jax.run.directory import claim, environment, fingerprints_of, in_words, recorded_commits
from bapo_jax.run.ledger import open_ledger
from bapo_jax.run.lock import held
from bapo_jax.run.log import read_metrics
from bapo_jax.run.measures import batch_metrics, discarded_metrics, fresh_metrics, one_sided
from bapo_jax.run.monitored import monitored
from bapo_jax.run.run import Run
from bapo_jax.run.sinks import check_sinks
from bapo_jax.run.tables import print_table, scores_in
from bapo_jax.tasks import custom_reward, solver
from bapo_jax.tasks.own_module import fingerprints_of_code

FLAGS = flags.FLAGS


class Setup(NamedTuple):
    """What the loop works with; `build` makes it from a config."""

    config: ConfigDict  # resolved; model.path is a directory
    tokenizer: Any
    training_prompts: list[Prompt]
    benchmarks: dict[str, list[Prompt]]
    schedule: Schedule
    replay: Bapo | Repo
    failures: Failures
    rollouts: Rollouts
    learner: Learner
    hosts: Hosts
    changed: dict[str, tuple[Any, Any]]  # fields that differ from when the run last began: (before, now)
    commit: str  # of model.path on the hub; '' for a directory


def build(config: ConfigDict, workdir: Path, hosts: Hosts = Hosts(), amend: bool = False) -> Setup:
    """Checks the config, reads data, checks the model's files and claims the run directory, in that order; devices come last.

    `amend` lets settings change that a run is otherwise held to.

    Raises ValueError or OSError, mostly FileNotFoundError, naming the field and the remedy, before anything is written.
    """
    read = read_inputs(config, commits=recorded_commits(workdir))
    c = read.config
    check_sinks(c.log.sinks, workdir)
    learner, reward = build_learner(c, hosts, read.sight), custom_reward.rewards_of(c.task)
    check_start(c)
    fingerprints = {
        **fingerprints_of(read.prompts, read.benchmarks, read.tokenizer, read.stop_tokens),
        'code': fingerprints_of_code(c.task),
        'model': architecture(read.model),
    }
    changed = claim(workdir, read.written, fingerprints, environment(), amend, read.commits)
    engine = start_engine(c, read.model, learner.graph, read.stop_tokens, learner.mesh, workdir, hosts, read.sight)
    schedule = schedule_of(c, read.steps)
    retries = make_retries(c, len(read.prompts), solver(c, read.tokenizer))
    return Setup(
        config=c,
        tokenizer=read.tokenizer,
        training_prompts=read.prompts,
        benchmarks=read.benchmarks,
        schedule=schedule,
        replay=make_replay(c.replay, c.learner.batch_groups, schedule.reevaluation_due, retries),
        failures=Failures(read.prompts, c.replay.probe, c.replay.probe_every),
        rollouts=Rollouts(engine, read.tokenizer, read.selector, schedule, c, reward, probe=read.prompts[0]),
        learner=learner,
        hosts=hosts,
        changed=changed,
        commit=read.commits.get(read.written.model.path, ''),
    )


def train(s: Setup, workdir: Path) -> RunState:
    """Trains until `schedule.steps`, continuing what `workdir` holds. Returns where the run stands."""
    schedule, replay, failures, rollouts, learner = s.schedule, s.replay, s.failures, s.rollouts, s.learner
    run = start_or_continue(s, workdir)
    state = run.state

    def theta_logprobs(batch: Batch) -> ByGroup:
        return learner.score_batch(PROXIMAL, state.theta.params, batch)

    def served_logprobs(batch: Batch) -> Iterator[np.ndarray]:
        yield from learner.logprobs(ROLLOUT, state.alpha, batch)
        if state.before is not None:
            yield learner.logprobs(BEFORE, state.before, batch)[1]

    def serve() -> None:
        rollouts.serve(state, served_logprobs)
        state.before = None

    serve()
    for step in run.steps_left():
        with run.step(step) as now:
            # Lines 3-5: every v steps the rollout policy α becomes π_θ.
            if schedule.sync_due(step):
                with now.timer('weight_sync'):
                    run.sync()
                    serve()

            # Lines 12-13: every m steps π_θ re-evaluates hard prompts.
            hard = replay.hard_prompts(step, now.rng)

            # Lines 6-7 and 13: G responses to each prompt, with the log-probs of the policy that answered; rewards.
            with now.timer('wait_rollouts'):
                fresh, reevaluated = rollouts.take(step, hard, state)
            if hard and schedule.reevaluation_syncs:
                run.sync()
                serve()

            # What X2 could earn: prompts that failed some steps ago are asked again, and only counted.
            if asked := failures.choose(step, now.rng('failures')):
                with now.timer('failed_again'):
                    groups = rollouts.ask_failed(step, [again.prompt for again in asked])
                    now.record(measured(asked, groups))
            failures.observe(step, fresh)

            # Lines 11 and 14-17, eq. 5-8: the adaptive batch X1 ∪ X2 ∪ X3.
            with now.timer('compose'):
                batch = replay.compose(step, fresh, reevaluated, now.rng, theta_logprobs)

            # While this step trains, α answers the prompts of later ones.
            rollouts.begin_ahead(step)

            # Line 18: advantages and the clipped update.
            with monitored(s.config, learner, state, batch, replay.metrics(step), now):
                state.theta, learned = learner.update(state.theta, batch, now.rng('shuffle'), state.policies(), step)
                state.trained()

            state.count(fresh, reevaluated, batch)
            now.took(fresh, reevaluated, batch, replay.times_trained(batch))

            # Lines 8-9 and 19: the fresh groups enter the buffer, after this step's draws from it.
            replay.add(step, fresh, batch)

            now.record(fresh_metrics(fresh), batch_metrics(batch, step), discarded_metrics(fresh, batch), learned)
            now.record(rollouts.metrics(now.started), replay.metrics(step), state.metrics())

    run.close()
    rollouts.close()
    tell_end(workdir, state, schedule.steps)
    return state


def start_or_continue(s: Setup, workdir: Path) -> Run:
    """The run at θ_0, or at its newest checkpoint with replay and prompt stream put back."""
    c, learner = s.config, s.learner
    s.hosts.tell('open', config=c.to_dict(), commit=s.commit)
    s.hosts.agree('')
    state, of_host, checkpoints = open_run(learner, c, workdir / 'checkpoints')
    if of_host:
        replayed, selector = of_host
        s.replay.restore(replayed)
        s.failures.restore(replayed)
        s.rollouts.restore(selector)
        print(f'continuing {workdir} after step {state.step}')
        if s.changed:
            message = f'{workdir} goes on after step {state.step} with other settings: {in_words(s.changed)}'
            events.report('settings changed', message, step=state.step, changed=s.changed)
    else:
        print(
            f'{len(s.training_prompts):,} prompts, {s.schedule.steps} steps of {c.learner.batch_groups} prompts × '
            f'{c.rollout.group_size} responses; method {c.method}: v={c.rollout.sync_every}, anchor {c.learner.anchor}, '
            f'filter {c.replay.fresh_filter}, X2 {c.replay.use_x2}, X3 {c.replay.use_x3}; on '
            f'{describe_devices(learner.parameters)}, attention {described(learner.kernel)}',
            *filter(None, [levels_in_words(c.replay, c.rollout.group_size)]), sep='\n', flush=True,
        )  # fmt: skip
    return Run(
        c, workdir, s.schedule.steps, state, checkpoints, s.hosts, s.tokenizer,
        evaluate=lambda say: evaluate_policy(s, state, workdir, say),
        to_save=lambda: (s.replay.state() | s.failures.state(), s.rollouts.state()),
        ledger=open_ledger(c, workdir, state.step, len(s.training_prompts), s.replay),
    )  # fmt: skip


def evaluate_policy(s: Setup, state: RunState, workdir: Path, say: Callable[[str], None]) -> dict[str, float | None]:
    """Scores π_θ (not α) on the benchmarks and the tracked prompts, and keeps every question's count in evals/."""
    c = s.config
    # A fixed subset of the training prompts, for the accuracy-migration figures.
    chosen = np.random.default_rng(c.seed).permutation(len(s.training_prompts))[: c.evaluate.track_prompts]
    tracked = [s.training_prompts[i] for i in np.sort(chosen)]
    with s.rollouts.held_by_theta(state) as engine, stopping.leaving_waits():
        summaries = evaluate_in_training(
            engine, s.tokenizer, s.benchmarks, tracked, c, workdir / 'evals', state.step, state.initial, say
        )
    return core_metrics(summaries)


def has_ended(state: RunState, steps: int) -> bool:
    """Whether the run has had its steps, and the evaluation after the last one."""
    return state.step >= steps and not state.unwritten


def tell_end(workdir: Path, state: RunState, steps: int) -> None:
    """What the run came to; or how it goes on where it has not ended, or has had more steps than these."""
    step = state.step
    if not has_ended(state, steps):
        where = f'in the evaluation after step {step}' if state.unwritten else f'after step {step}'
        print(f'stopped {where} of {steps}; the same command continues')
    elif step == steps:
        print_results(workdir, step)
    else:
        print(f'{workdir} is at step {step} and has had its {steps} steps; to train on, give more by --config.steps')


def print_results(workdir: Path, step: int) -> None:
    """Base, where it was scored, against trained policy; where the figure is; what to look at, or to give more."""
    files = {name: workdir / 'evals' / f'{i:06d}.json' for name, i in (('base', 0), ('trained', step))}
    print_table(f'{workdir}, {step} steps, %', scores_in(files))
    print(f'figure: {draw_run(workdir)}   metrics: {workdir / "metrics.jsonl"}')
    for advice in filter(None, (one_sided(read_metrics(workdir)), who_waits(workdir))):
        print(advice)


def lead(config: ConfigDict, workdir: Path, hosts: Hosts, amend: bool) -> bool:
    """The run, on host 0 of its hosts. Returns whether it has ended."""
    with contextlib.ExitStack() as until_the_end, hosts, naming_losses():
        with refused():
            check_directory(workdir, '--workdir')
            until_the_end.enter_context(held(workdir))
            counts = until_the_end.enter_context(events.recorded(workdir))
            setup = build(config, workdir, hosts, amend)
        state = train(setup, workdir)
    if counts:
        print(f'{events.in_words(counts)}: {workdir / events.FILE}')
    return has_ended(state, setup.schedule.steps)


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    if FLAGS.dry_run:
        try:
            sys.exit(0 if dry_run(FLAGS.config, FLAGS.topology).fits is not False else 1)
        except (ValueError, OSError) as e:
            sys.exit(f'error: {e}')
    if FLAGS.topology:
        raise app.UsageError(f'--topology={FLAGS.topology} is for --dry_run, which trains nothing')
    if not FLAGS.workdir:
        raise app.UsageError('--workdir is missing: the run directory')
    workdir, c = Path(FLAGS.workdir), FLAGS.config
    hosts = Hosts(c.mesh.deadline_s, c.rollout.deadline_s + c.task.verify_s)
    if FLAGS.hosts > 1 and not FLAGS.coordinator:
        raise app.UsageError(f'--hosts={FLAGS.hosts} needs --coordinator=ADDRESS:PORT, an address of host 0 that the others reach')
    if FLAGS.coordinator:
        join(FLAGS.coordinator, FLAGS.hosts, FLAGS.host, FLAGS.join_timeout)
    try:
        with explained(workdir), stopping.on_signal(c.checkpoint.grace_s):
            ended = follow(c, workdir, hosts) if FLAGS.host else lead(c, workdir, hosts, FLAGS.amend)
    finally:
        part()
    if stopping.requested() and not ended:
        sys.exit(stopping.STATUS)


def run() -> None:
    """The command: its flags, then `main`."""
    flags.DEFINE_string('workdir', None, 'The run directory; a used one continues.')
    flags.DEFINE_bool('dry_run', False, 'Check everything and compile the train step; train nothing, write nothing.')
    flags.DEFINE_string('topology', '', "For --dry_run: GPUs ('4xH100', '2x8xH200', '8x80GB') or a TPU slice ('v5e:2x4'), absent ones.")
    flags.DEFINE_bool('amend', False, 'Continue a run with other settings on purpose; events.jsonl says which, from which step on.')
    cli.define_config('NAME or NAME:METHOD, a config of this package; or FILE or FILE:METHOD.', config_lib.check_fields)
    flags.DEFINE_string('coordinator', None, 'Many hosts: ADDRESS:PORT of host 0, the port free there.')
    flags.DEFINE_integer('hosts', 1, 'Many hosts: how many processes train together, one a host.', lower_bound=1)
    flags.DEFINE_integer(
        'host', 0, 'Many hosts: which of them this is; 0 runs the loop and speaks to the rollout servers.', lower_bound=0
    )
    flags.DEFINE_integer('join_timeout', 300, 'Many hosts: most seconds until all of them have come.', lower_bound=1)
    flags.mark_flag_as_required('config')
    cli.start(main)


if __name__ == '__main__':
    run()
