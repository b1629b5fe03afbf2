"""The loop of every host but host 0: it does the device work of each step, as host 0 announces it (hosts.py)."""

from __future__ import annotations

import json
from pathlib import Path

import jax
from ml_collections import ConfigDict

from bapo_jax import config as config_lib, hub
from bapo_jax.hosts import Hosts
from bapo_jax.inputs import located
from bapo_jax.learner.critic import blank_targets
from bapo_jax.learner.learner import build_learner
from bapo_jax.learner.packed import blank_rows, blank_sequences
from bapo_jax.models import hf
from bapo_jax.models.patches import Pixels, blank_pixels
from bapo_jax.rollout.engines import POLICIES
from bapo_jax.rollout.publish import path_of, write_weights
from bapo_jax.run.checkpoint import open_run
from bapo_jax.run.directory import OF_A_HOST, differences, recorded_commits


def follow(config: ConfigDict, workdir: Path, hosts: Hosts) -> None:
    """Works until host 0 says stop. Raises HostError where host 0 falls silent, or where a host cannot do the same work."""
    problem, learner, commit = '', None, ''
    try:
        written = config_lib.resolve(config)
        with hub.commits_of(recorded_commits(workdir)) as commits:
            config = located(written)
        commit = commits.get(written.model.path, '')
        learner = build_learner(config, hosts)
        hf.check_weights(config.model.path, learner.model)
    except (ValueError, OSError) as e:
        problem = str(e)
    while (plan := hosts.hear())['do'] != 'stop':  # after a signal, too: it is host 0 that saves and says stop
        match plan['do']:
            case 'open':
                hosts.agree(problem or other_settings(plan['config'], config) or other_commit(plan['commit'], commit))
                state, _, checkpoints = open_run(learner, config, workdir / 'checkpoints')
            case 'sync':
                state.sync()
            case 'score':
                blank = [blank_sequences(*given) for given in zip(plan['shapes'], map(bool, plan['images']), strict=True)]
                learner.score_packed(plan['role'], state.policies()[plan['role']], blank, plan['counts'], blank_images(plan))
            case 'update':
                state.before = None  # the probe is over
                if learner.trains_policy(plan['step']):
                    roles = learner.objective.roles
                    blank = [blank_rows(shape, roles, bool(i)) for shape, i in zip(plan['shapes'], plan['images'], strict=True)]
                    state.theta, _ = learner.update_packed(state.theta, blank, plan['counts'], blank_images(plan), plan['step'])
                if learner.critic:
                    blank = [blank_targets(*given) for given in zip(plan['shapes'], map(bool, plan['images']), strict=True)]
                    state.theta, _ = learner.update_critic_packed(state.theta, blank, plan['counts'], blank_images(plan))
                state.trained()
            case 'publish':
                held = {state.step: state.theta.params, **dict(state.recent), state.alpha_version: state.alpha}
                path = path_of(workdir / POLICIES, plan['version'])
                write_weights(path, held[plan['version']], learner.model, config.rollout.dtype, hosts)
            case 'save':
                checkpoints.save(state)
    print(f'host {jax.process_index()}: host 0 has ended', flush=True)


def blank_images(plan: dict) -> list[Pixels | None]:
    """Pixels of the shapes that host 0 has; None for a mini-batch without images."""
    return [shape and blank_pixels(shape) for shape in plan['images']]


def other_settings(of_host_0: dict, config: ConfigDict) -> str:
    """The problem to report where this host's settings differ from those of host 0; '' where they are equal."""
    here = json.loads(json.dumps(config.to_dict()))  # JSON turns tuples into lists
    names = differences(of_host_0, here, OF_A_HOST)
    return f'other settings than host 0; they differ in {", ".join(names)}' if names else ''


def other_commit(of_host_0: str, here: str) -> str:
    """The problem to report where model.path was another commit of the hub for host 0; '' where either has it from a directory."""
    if not of_host_0 or not here or of_host_0 == here:
        return ''
    return f'model.path is commit {here} of the hub, and {of_host_0} for host 0: it moved just now; start all hosts again'
