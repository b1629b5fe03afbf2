"""The loop of all hosts except host 0: it does the device work that host 0 announces (hosts.py)."""

from __future__ import annotations

import json
from pathlib import Path

import jax
from ml_collections import ConfigDict

from bapo_jax import config as config_lib
from bapo_jax.cluster.hosts import HostError, Hosts
from bapo_jax.config.own_code import code_of
from bapo_jax.inputs import located
from bapo_jax.learner.build import build_learner
from bapo_jax.learner.critic import blank_targets
from bapo_jax.learner.mini_batch import Shape, blank, blank_sequences
from bapo_jax.machine import hub
from bapo_jax.models import hf
from bapo_jax.models.adapters import check_adapter
from bapo_jax.rollout.start import POLICIES
from bapo_jax.run.directory import differences, recorded_commits
from bapo_jax.run.opening import open_run
from bapo_jax.weights.publish import path_of, write_policy


def follow(config: ConfigDict, workdir: Path, hosts: Hosts) -> bool:
    """Works until host 0 says stop. Returns whether the run has finished.

    Raises HostError if host 0 falls silent, or if a host cannot do the same work.
    """
    problem, learner, commit = '', None, ''
    try:
        written = config_lib.resolve(config)
        with hub.commits_of(recorded_commits(workdir)) as commits:
            config = located(written)
        commit = commits.get(written.model.path, '')
        learner = build_learner(config, hosts)
        hf.check_weights(config.model.path, learner.model)
        check_adapter(config.model)
    except (ValueError, OSError) as e:
        problem = str(e)
    while (plan := hosts.hear())['do'] != 'stop':  # also after a signal: host 0 saves and says stop
        match plan['do']:
            case 'open':
                hosts.agree(
                    problem
                    or other_settings(plan['config'], config)
                    or other_commit(plan['commit'], commit)
                    or other_code(plan['code'], code_of(config))
                )
                state, _, checkpoints = open_run(learner, config, workdir / 'checkpoints')
            case 'sync':
                state.sync()
            case 'score':
                batches = [blank(Shape(*shape), blank_sequences) for shape in plan['shapes']]
                learner.score_packed(plan['role'], state.policies()[plan['role']], batches)
            case 'update':
                state.before = None  # the probe is finished
                shapes = [Shape(*shape) for shape in plan['shapes']]
                if learner.trains_policy(plan['step']):
                    rows = learner.objective.blank_rows
                    state.theta, _ = learner.update_policy(
                        state.theta, [blank(shape, rows) for shape in shapes], plan['step']
                    )
                if learner.critic:
                    state.theta, _ = learner.update_critic(
                        state.theta, [blank(shape, blank_targets) for shape in shapes]
                    )
                state.trained()
            case 'publish':
                held = {
                    state.step: state.theta.params,
                    **dict(state.recent),
                    state.alpha_version: state.alpha,
                }
                path = path_of(workdir / POLICIES, plan['version'])
                write_policy(path, held[plan['version']], learner.model, config.rollout.dtype, hosts)
            case 'save':
                checkpoints.save(state)
            case other:
                raise HostError(
                    f'host 0 announced {other!r}, which this host does not know; install the same version on '
                    'all hosts'
                )
    print(f'host {jax.process_index()}: host 0 has ended', flush=True)
    return plan['finished']


def other_settings(of_host_0: dict, config: ConfigDict) -> str:
    """The problem to report if this host's settings differ from host 0's; '' if they are equal."""
    here = json.loads(json.dumps(config.to_dict()))  # JSON turns tuples into lists
    names = differences(of_host_0, here, config_lib.fields_of_a_host())
    return (
        f'other settings than host 0, in {", ".join(names)}; start all hosts with the same config'
        if names
        else ''
    )


def other_commit(of_host_0: str, here: str) -> str:
    """The problem to report if host 0 has another hub commit of model.path.

    '' if the commits are equal, or if either host reads model.path from a directory.
    """
    if not of_host_0 or not here or of_host_0 == here:
        return ''
    return (
        f'model.path is commit {here} of the hub, but {of_host_0} on host 0: it was just updated; start all '
        'hosts again'
    )


def other_code(of_host_0: dict[str, str], here: dict[str, str]) -> str:
    """The problem to report if a module of the user's has another source than on host 0; '' if none has."""
    names = sorted(name for name in of_host_0.keys() | here.keys() if of_host_0.get(name) != here.get(name))
    return (
        f'another source than on host 0 of your {", ".join(names)}; copy the files of host 0 to all hosts'
        if names
        else ''
    )
