"""Draws run.png, advises at a run's end, and writes the page of `python -m bapo_jax.report`."""

from bapo_jax.report.run_png import draw_run as draw_run
from bapo_jax.report.waiting import who_waits as who_waits
