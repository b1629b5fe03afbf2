"""What a run directory shows: run.png and a sentence of advice at its end, and the page that `python -m bapo_jax.report` writes."""

from bapo_jax.report.run_png import draw_run as draw_run
from bapo_jax.report.waiting import who_waits as who_waits
