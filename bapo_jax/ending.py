"""How a training run ends that cannot go on: its message, the remedy, and status 1. docs/errors.md has every message."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from bapo_jax.files import is_of_disk
from bapo_jax.hosts import HostError, HostLost, leave, naming_losses
from bapo_jax.models.hf import DamagedWeights
from bapo_jax.rollout.engine import RolloutError
from bapo_jax.run.checkpoint import DamagedCheckpoint, NotSaved, OtherWeights
from bapo_jax.run.run import Diverged
from bapo_jax.tasks.custom_reward import BadReward
from bapo_jax.tasks.verifier_pool import WorkersFailed


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Inside a run is built: what it is made of may be wrong in many ways, and each error says which."""
    try:
        yield
    except (ValueError, OSError, RolloutError) as e:
        sys.exit(f'error: {e}')


@contextlib.contextmanager
def explained(workdir: Path) -> Iterator[None]:
    """Inside a run goes on: an error that is none of the program ends it with its message and the remedy."""
    try:
        with naming_losses():
            yield
    except (DamagedCheckpoint, DamagedWeights, OtherWeights) as e:
        sys.exit(f'error: {e}')
    except HostLost as e:
        leave(f'error: {e}\nStart all hosts again: the same command continues from the last checkpoint.')
    except (RolloutError, BadReward, WorkersFailed, HostError, Diverged, NotSaved) as e:
        sys.exit(f'error: {e}\nThe same command continues from the last checkpoint.')
    except OSError as e:
        if not workdir.is_dir():
            sys.exit(f'error: {workdir}, the run directory, is gone ({e}); put it back, and the same command continues')
        if not is_of_disk(e):
            raise
        sys.exit(f'error: {e}\nMake room, or mount the disk for writing; then the same command continues from the last checkpoint.')
