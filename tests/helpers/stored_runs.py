"""Run directories with checkpoints and a published policy, made without training."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.learner.update import TrainState
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.run.checkpoint import Checkpoints
from bapo_jax.run.state import RunState
from bapo_jax.weights.publish import publish


def moved(params, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (x * (1 + 0.1 * rng.standard_normal(x.shape))).astype(np.float32), params)


def make_run(policy, directory: Path):
    """A run directory with two checkpoints whose θ and α differ, and θ published as version 7; returns it and its newest θ."""
    base, run = shutil.copytree(policy.path, directory / 'base'), directory / 'run'
    character_tokenizer('a template').save_pretrained(base)
    run.mkdir()
    (run / 'config.json').write_text(json.dumps({'model': {'path': str(base)}}))
    checkpoints = Checkpoints(run / 'checkpoints', keep=None)
    for step in (4, 7):
        theta = moved(policy.params, step)
        learner = TrainState(jax.tree.map(jnp.array, theta), {'count': jnp.zeros(())})
        alpha = jax.tree.map(jnp.array, moved(policy.params, 100 + step))
        checkpoints.save(RunState(learner, alpha, step=step), {'empty': np.zeros(1)}, 'selector')
    checkpoints.close()
    publish(run / 'policy', 7, theta, policy.config, 'float32')
    return run, theta
