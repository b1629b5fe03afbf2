"""What a run directory shows: run.png at its end, and the page that `python -m bapo_jax.report` writes."""

from bapo_jax.report.run_png import draw_run as draw_run
