"""Draws a run as one picture, run.png: training reward, batch composition, accuracy of fresh groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bapo_jax.groups import X1
from bapo_jax.replay.bapo import X2, X3
from bapo_jax.run.log.metrics import read_metrics


def draw_run(directory: Path) -> Path:
    """Draws DIRECTORY/run.png from metrics.jsonl and returns its path.

    Raises ValueError if no step is logged.
    """
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    rows = [row for row in read_metrics(directory) if row['step'] > 0]
    if not rows:
        raise ValueError(f'{directory}: metrics.jsonl has no training step yet; wait for the first')
    steps = np.array([row['step'] for row in rows])
    figure, (reward, batch, bins) = plt.subplots(1, 3, figsize=(15, 4), constrained_layout=True)

    values = np.array([row['critic/score/mean'] for row in rows])
    reward.plot(steps, values, color='0.75', label='each step')
    window = max(1, len(values) // 10)
    reward.plot(
        steps[window - 1 :], np.convolve(values, np.ones(window) / window, 'valid'), label=f'mean of {window}'
    )
    reward.set(title='Training reward (fresh groups, before filtering)', xlabel='step', ylabel='accuracy')
    reward.legend()

    parts = [[row[f'bapo/{source}_groups'] for row in rows] for source in (X1, X2, X3)]
    batch.stackplot(steps, parts, labels=['X1 fresh', 'X2 re-evaluated', 'X3 replayed'])
    batch.set(title='Batch composition', xlabel='step', ylabel='groups')
    batch.legend(loc='lower right')

    counts = np.array([row['accuracy_bins'] for row in rows], float)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    tenth = max(1, len(rows) // 10)
    k = np.arange(counts.shape[1])
    bins.bar(k - 0.2, shares[:tenth].mean(axis=0), 0.4, label=f'first {tenth} steps')
    bins.bar(k + 0.2, shares[-tenth:].mean(axis=0), 0.4, label=f'last {tenth} steps')
    bins.set(
        title='Accuracy of fresh groups',
        xlabel='correct responses k of G',
        ylabel='share of groups',
        xticks=k,
    )
    bins.legend()

    path = Path(directory) / 'run.png'
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
