"""An adapter of the pretrained model: the plan's rule and words, and a page with the rows' numbers."""

import numpy as np
import pytest
from scipy import stats

from studies.adapters import pretrained
from studies.adapters.pretrained import best_rate, differences, outcome, tables
from studies.lib.rows import rows_in


def row(arm, rate, seed, mean):
    return {'arm': arm, 'rate': rate, 'seed': seed, 'base': [0] * 100, 'trained': np.random.default_rng(seed).binomial(8, mean, 100).tolist()}


def compared(*means):
    """The adapter's means on both seeds; all weights have one half."""
    scan = [row('adapter', 1e-5, 0, 0.1), row('adapter', 5e-4, 0, 0.05)]
    return [*scan, *(row('adapter', 1e-4, seed, mean) for seed, mean in enumerate(means))], [row('all', 1e-5, seed, 0.5) for seed in (0, 1)]


@pytest.mark.parametrize(('means', 'said'), [
    ((0.5, 0.5), 'as good on these questions'), ((0.3, 0.3), 'worse'), ((0.8, 0.8), 'better'), ((0.5, 0.8), 'mixed'), ((0.8, 0.3), 'mixed'),
])  # fmt: skip
def test_the_outcome_is_in_the_plans_words(means, said):
    assert outcome(differences(*compared(*means))) == said


def test_the_best_rate_is_of_the_first_seed_alone():
    adapters, _ = compared(0.4, 0.9)
    assert best_rate(adapters) == 1e-4
    assert best_rate([*adapters, row('adapter', 5e-4, 1, 1.0)]) == 1e-4


def test_differences_are_of_questions():
    adapters, full = compared(0.4, 0.6)
    d = np.subtract(adapters[3]['trained'], full[1]['trained']) * 12.5
    low, high = stats.t.interval(0.95, 99, d.mean(), stats.sem(d))
    assert f'| 1 | {d.mean():.1f} ({low:.1f} to {high:.1f}) |' in pretrained.differences_table(differences(adapters, full))


def test_the_page_has_the_rows_numbers():
    page = pretrained.PAGE.read_text('utf-8')
    assert len(rows_in(pretrained.ROWS)) == 6
    for name, lines in tables().items():
        assert f'<!-- {name} -->\n{lines}\n<!-- /{name} -->' in page
