"""Trains a policy with BAPO, Algorithm 1 (arXiv 2602.20722), or another method.

    python -m bapo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart
    python -m bapo_jax.train --config=configs/countdown.py:grpo --workdir=runs/x \\
        --config.learner.learning_rate=2e-6

Every method in methods/ is this loop with other choices. If the package is installed, the command is
`bapo-train`. --config=quickstart, without a path, names one of the package's configs from any folder.

If --workdir already holds a run, it continues where it stopped. SIGTERM or Ctrl-C stops the run with a
checkpoint; exit status 75 means that it has not finished. docs/reference/operations.md says what else a run
survives. With --dry_run nothing is trained: it reports what the run would need, and whether it fits
(dry_run/).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from bapo_jax.cluster.hosts import Hosts
from bapo_jax.command import command_of
from bapo_jax.config.help import topics
from bapo_jax.inputs import read_inputs
from bapo_jax.learner.build import build_learner
from bapo_jax.learner.learner import Learner
from bapo_jax.machine import cli
from bapo_jax.replay.kinds import Replay, make_replay
from bapo_jax.rollout.rollouts import Rollouts
from bapo_jax.rollout.schedule import Schedule, schedule_of
from bapo_jax.rollout.start import start_engine
from bapo_jax.run.directory import recorded_commits
from bapo_jax.run.run import Run
from bapo_jax.run.start import claim_directory, open_on_hosts, start_or_continue
from bapo_jax.run.state import RunState
from bapo_jax.tasks import solver
from bapo_jax.tasks.custom_reward import rewards_of


class Setup(NamedTuple):
    """The components of the training loop."""

    schedule: Schedule  # when α is synced and hard prompts are re-evaluated
    replay: Replay  # stores groups and composes the batch
    rollouts: Rollouts  # samples and judges the responses
    learner: Learner  # updates the policy
    run: Run  # the run's state, and the files that it writes


def build(config: ConfigDict, workdir: Path, hosts: Hosts = Hosts(), amend: bool = False) -> Setup:
    """Builds the components of a run.

    In this order, it checks the config, reads the data, checks the model's files, claims the run directory
    and opens its state. `amend` allows changes to settings that are otherwise fixed for a run.

    Raises ValueError or OSError, mostly FileNotFoundError, naming the field and the remedy, before anything
    is written.
    """
    read = read_inputs(config, commits=recorded_commits(workdir))
    c = read.config
    learner = build_learner(c, hosts, read.sight)
    claimed = claim_directory(read, workdir, amend)
    engine = start_engine(
        c,
        read.model,
        learner.graph,
        read.stop_tokens,
        learner.mesh,
        workdir,
        hosts,
        read.sight,
        read.tokenizer,
    )
    schedule = schedule_of(c, read.steps)
    replay = make_replay(c, len(read.prompts), schedule.reevaluation_due, solver(c, read.tokenizer))
    opened = open_on_hosts(read, learner, hosts, workdir)
    rollouts = Rollouts(
        engine, read.tokenizer, read.selector, schedule, c, rewards_of(c.task), opened.state, hosts,
        logprobs=learner.served_logprobs, probe=read.prompts[0],
    )  # fmt: skip
    run = start_or_continue(
        read, workdir, hosts, opened, claimed, replay=replay, rollouts=rollouts, learner=learner
    )
    return Setup(schedule, replay, rollouts, learner, run)


def train(setup: Setup) -> RunState:
    """Trains until `schedule.steps`, or until a signal stops the run. Returns the final state."""
    schedule, replay, rollouts, learner, run = setup
    state = run.state
    rollouts.serve()
    for step in run.steps_left():
        with run.step(step) as now:
            # Lines 3-5: every v steps, the rollout policy α becomes π_θ.
            if schedule.sync_due(step):
                with now.timer('weight_sync'):
                    rollouts.sync()

            # Lines 12-13: every m steps, π_θ re-evaluates hard prompts.
            hard = replay.hard_prompts(step, now.rng)

            # Lines 6-7 and 13: G responses to each prompt, the behaviour policy's log-probs, and rewards.
            with now.timer('wait_rollouts'):
                fresh, reevaluated = rollouts.take(step, hard)

            # Lines 11 and 14-17, eq. 5-8: the adaptive batch X1 ∪ X2 ∪ X3.
            with now.timer('compose'):
                batch = replay.compose(step, fresh, reevaluated, now.rng, learner.scorer(state.theta))

            # While this step trains, α answers the prompts of later steps.
            rollouts.begin_ahead(step)

            # Line 18: advantages and the clipped update.
            with run.diagnostics.around_update(now, fresh, batch, replay.metrics(step)):
                state.theta, learned = learner.update(
                    state.theta, batch, now.rng('shuffle'), state.policies(), step
                )
                state.trained()

            # Lines 8-9 and 19: the fresh groups enter the buffer, after this step has drawn from it.
            now.took(fresh, reevaluated, batch, replay.times_trained(batch))
            replay.add(step, fresh, batch)

            now.record(learned, rollouts.metrics(now.started), replay.metrics(step))

    run.close()
    rollouts.close()
    return state


def run() -> None:
    """The command `bapo-train`."""
    cli.start(command_of(build, train), __doc__, topics)


if __name__ == '__main__':
    run()
