"""What people look at after a run."""

import pytest
from making import make_run, row
from PIL import Image

from bapo_jax.report import draw_run


def test_a_run_without_a_step_has_no_figure(tmp_path):
    with pytest.raises(ValueError, match='no training step'):
        draw_run(make_run(tmp_path / 'run', [{'step': 0}]))


def test_a_run_is_drawn_as_three_panels_side_by_side(tmp_path):
    with Image.open(draw_run(make_run(tmp_path / 'run', [row(s) for s in range(1, 61)]))) as shown:
        assert shown.format == 'PNG' and shown.width > 4 * shown.height
