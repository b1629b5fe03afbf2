"""What people look at after a run."""

import pytest

from bapo_jax.report import draw_run


def test_a_run_without_a_step_has_no_figure(tmp_path):
    with pytest.raises(ValueError, match='no training step'):
        draw_run(tmp_path)
