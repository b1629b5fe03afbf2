"""The study of episodes: its arms are what the plan says, and its page and verdict are those of its rows."""

import pytest

from bapo_jax.config import resolve
from studies.episodes import run
from studies.episodes.config import get_config
from studies.lib.rows import rows_in


def row(arm, seed, before, after):
    scores = [{name: {'mean': x, 'pass': x} for name in run.BENCHMARKS} for x in (before, after)]
    return {
        'arm': arm, 'seed': seed, 'steps': 9, 'seconds': 60, 'replies': [1, 2], 'unparseable': [3, 4], 'before': scores[0], 'after': scores[1],
    }  # fmt: skip


def test_the_page_has_the_rows_numbers():
    rows = rows_in(run.ROWS)
    assert (run.PAGE.read_text('utf-8') if run.PAGE.is_file() else '') == (run.page(rows) if rows else '')


def test_the_arms_differ_in_the_tool_and_in_the_stop_token_alone():
    tool, alone = (resolve(get_config(arm)).to_dict() for arm in run.ARMS)
    assert (tool['task'].pop('turns'), alone['task'].pop('turns')) == (3, 0)
    assert (tool['model'].pop('path'), alone['model'].pop('path')) == ('runs/episodes/base_tool', 'runs/episodes/base_alone')
    assert tool == alone


@pytest.mark.parametrize('tool, alone, said', [
    ((0.30, 0.32), (0.25, 0.29), ('**Episodes learn**', '**The tool helps**')),
    ((0.26, 0.27), (0.25, 0.29), ('**Episodes do not learn**', '**Its help is not shown**')),
    ((0.30, 0.30), (0.29, 0.29), ('**Episodes learn**', '**Its help is not shown**')),
])  # fmt: skip
def test_the_verdict_is_the_plans(tool, alone, said):
    rows = [row(arm, seed, 0.2, after) for arm, ends in (('tool', tool), ('alone', alone)) for seed, after in enumerate(ends)]
    assert all(part in run.verdict(rows) for part in said)
    assert run.page(rows).count('\n| `') == 4
    assert run.verdict(rows[:3]) == 'Missing: alone 1.'
