"""Prints a run's results on the terminal."""

from __future__ import annotations

from pathlib import Path

from bapo_jax.machine import terminal
from bapo_jax.report.run_png import draw_run
from bapo_jax.report.waiting import who_waits
from bapo_jax.run.log.measures import one_sided
from bapo_jax.run.log.metrics import read_metrics
from bapo_jax.run.log.tables import print_table, scores_in
from bapo_jax.run.state import RunState


def tell_end(workdir: Path, state: RunState, steps: int) -> None:
    """Prints the results, or how to continue if the run has not ended or is past `steps`."""
    step = state.step
    if not state.has_ended(steps):
        where = f'in the evaluation after step {step}' if state.unwritten else f'after step {step}'
        print(f'stopped {where} of {steps}; the same command continues')
    elif step == steps:
        print_results(workdir, step)
    else:
        print(
            f'{workdir} is at step {step} and has finished its {steps} steps; set --config.steps to a larger '
            'number to continue'
        )


def print_results(workdir: Path, step: int) -> None:
    """Prints the scores of the base (if evaluated) and trained policy, the figure's path, and any advice."""
    files = {name: workdir / 'evals' / f'{i:06d}.json' for name, i in (('base', 0), ('trained', step))}
    print_table(f'{workdir}, {step} steps, %', scores_in(files))
    try:
        figure = draw_run(workdir)
    except OSError as e:  # a full disk: the run itself has not failed
        figure = f'not drawn ({e}); make room, then run the same command'
    print(f'figure: {figure}   metrics: {workdir / "metrics.jsonl"}')
    for advice in filter(None, (one_sided(read_metrics(workdir)), who_waits(workdir))):
        terminal.console().print(advice, highlight=False)
