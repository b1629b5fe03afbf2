"""The training command around Algorithm 1: flags, hosts, the lock of the run directory, and its end."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import ConfigDict

from bapo_jax import config as config_lib
from bapo_jax.cluster.devices import use_cores
from bapo_jax.cluster.hosts import Hosts, join, naming_losses, part
from bapo_jax.config import completion
from bapo_jax.config.help import values_page
from bapo_jax.dry_run.command import dry_run
from bapo_jax.follow import follow
from bapo_jax.machine import cli, events, stopping, terminal
from bapo_jax.machine.ending import explained, refused
from bapo_jax.machine.files import check_directory
from bapo_jax.machine.help import command_name
from bapo_jax.machine.lock import held
from bapo_jax.models.tensor_files import stored_values
from bapo_jax.report.results import tell_end
from bapo_jax.run.directory import recorded_devices

FLAGS = flags.FLAGS


def conduct(build: Callable[..., Any], train: Callable[[Any], Any]) -> None:
    """Runs one host's part: `train(build(config, workdir, hosts, amend))` on host 0, else `follow`."""
    logging.set_verbosity(logging.WARNING)
    if FLAGS.completion:
        with refused():
            print(completion.script(FLAGS.completion), end='')
        return
    if FLAGS.config is None:
        raise app.UsageError(
            f'--config is missing; choose one of {", ".join(cli.config_names())}, or give a file, as in '
            '`bapo-train --config=quickstart --workdir=runs/quickstart`'
        )
    if FLAGS.fields:
        print(values_page(FLAGS.config, terminal.console().width))
        return
    c = FLAGS.config
    if FLAGS.dry_run:
        try:
            choose_devices(c, FLAGS.workdir)
            sys.exit(0 if dry_run(c, FLAGS.topology).fits is not False else 1)
        except (ValueError, OSError) as e:
            sys.exit(f'error: {e}')
    if FLAGS.topology:
        raise app.UsageError(
            f'--topology={FLAGS.topology} is only for a dry run; add --dry_run, or leave it out'
        )
    if not FLAGS.workdir:
        raise app.UsageError('--workdir is missing; give the run directory')
    workdir = Path(FLAGS.workdir)
    hosts = Hosts(c.mesh.deadline_s, c.rollout.deadline_s + c.task.judging.step_s)
    if (FLAGS.hosts > 1 or FLAGS.host) and not FLAGS.coordinator:
        raise app.UsageError(
            f'--hosts={FLAGS.hosts} --host={FLAGS.host} needs --coordinator; give an ADDRESS:PORT of host 0 '
            'that the other hosts reach'
        )
    if FLAGS.coordinator:
        join(FLAGS.coordinator, FLAGS.hosts, FLAGS.host, FLAGS.join_timeout)
    try:
        with explained(workdir), naming_losses(), stopping.on_signal(c.checkpoint.grace_s):
            ended = follow(c, workdir, hosts) if FLAGS.host else lead(build, train, c, workdir, hosts)
    finally:
        part()
    if stopping.requested() and not ended:
        sys.exit(stopping.STATUS)


def lead(
    build: Callable[..., Any], train: Callable[[Any], Any], config: ConfigDict, workdir: Path, hosts: Hosts
) -> bool:
    """Runs the training on host 0. Returns whether the run has finished."""
    with contextlib.ExitStack() as until_the_end, hosts, naming_losses():
        with refused():
            check_directory(workdir, '--workdir')
            until_the_end.enter_context(held(workdir))
            counts = until_the_end.enter_context(events.recorded(workdir))
            choose_devices(config, workdir)
            setup = build(config, workdir, hosts, FLAGS.amend)
        try:
            state, steps = train(setup), setup.schedule.steps
        except stopping.Stopped:  # while the servers loaded the policy
            setup.run.end()
            raise
        tell_end(workdir, state, steps)
        hosts.run_finished = state.has_ended(steps)
        if hosts.run_finished and state.step == steps:
            print(next_commands(workdir))
    if counts:
        print(f'{events.counts_in_words(counts)}: {workdir / events.EVENTS_FILE}')
    return hosts.run_finished


def choose_devices(config: ConfigDict, workdir: Path | str | None) -> None:
    """Sets the number of CPU devices: those of the run in `workdir`, if any, else by cores and policy."""
    if FLAGS.hosts == 1 and config.mesh.data == -1 and not config.rollout.overlap:  # overlap needs one device
        recorded = recorded_devices(Path(workdir)) if workdir else 0
        use_cores(stored_values(Path(config.model.path)), config.learner.micro_batch_rows, recorded)


def next_commands(workdir: Path) -> str:
    """What to type after a run, with the commands named as this one was started."""
    run, typed = shlex.quote(str(workdir)), command_name().startswith('bapo-')
    report, inspect, export = (
        f'bapo-{name}' if typed else f'python -m bapo_jax.{module}'
        for name, module in (('report', 'report'), ('inspect', 'report.inspect_log'), ('export', 'export'))
    )
    return (
        'next: a page of the run, logs for Inspect, and the policy for other programs'
        f'\n    {report} {run}\n    {inspect} {run}\n    {export} --checkpoint={run} --output={run}/hf'
    )


def command_of(build: Callable[..., Any], train: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Defines the flags and returns the command's main function."""
    flags.DEFINE_string('workdir', None, 'The run directory. If it has a run, that run continues.')
    flags.DEFINE_bool(
        'dry_run',
        False,
        'Check the config and its inputs, compile the training step where possible, and report its memory; '
        'train and write nothing.',
    )
    flags.DEFINE_bool(
        'fields', False, 'Print every field of the config with its value and description, and exit.'
    )
    flags.DEFINE_string(
        'topology',
        '',
        "With --dry_run: absent GPUs ('4xH100', '2x8xH200', '8x80GB') or an absent TPU slice ('v5e:2x4').",
    )
    flags.DEFINE_bool(
        'amend',
        False,
        'Continue a run with changed settings; events.jsonl records them and the step from which they apply.',
    )
    cli.define_config(
        'NAME or NAME:METHOD for a config of this package, or FILE or FILE:METHOD.', config_lib.check_fields
    )
    flags.DEFINE_string(
        'coordinator', None, 'Many hosts: ADDRESS:PORT of host 0; the port must be free there.'
    )
    flags.DEFINE_integer(
        'hosts', 1, 'Many hosts: the number of processes that train together, one per host.', lower_bound=1
    )
    flags.DEFINE_integer(
        'host',
        0,
        'Many hosts: the number of this host; 0 runs the training loop and talks to the rollout servers.',
        lower_bound=0,
    )
    flags.DEFINE_integer(
        'join_timeout', 300, 'Many hosts: timeout for all hosts to join, in seconds.', lower_bound=1
    )
    flags.DEFINE_enum(
        'completion', None, completion.SHELLS, 'Print the script that completes words in a shell.'
    )

    def main(words: list[str]) -> None:
        if words[1:]:
            raise app.UsageError(f'{words[1]!r} is no flag; write --NAME=VALUE, such as --config={words[1]}')
        conduct(build, train)

    return main
