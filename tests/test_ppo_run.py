"""Runs of the rows with a critic on real prompts with the quickstart's policy: what they log, keep, continue from and export."""

import jax
import numpy as np
import pytest
from small_run import metrics, run, small_config

from bapo_jax.models import hf
from bapo_jax.policies import open_policy
from bapo_jax.run.checkpoint import Checkpoints


@pytest.fixture(scope='module', autouse=True)
def compile_once(tmp_path_factory):
    """Every run builds the same programs; the second one reads them from here."""
    jax.config.update('jax_compilation_cache_dir', str(tmp_path_factory.mktemp('xla')))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
    yield
    jax.config.update('jax_compilation_cache_dir', None)
