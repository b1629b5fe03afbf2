"""The table of metrics: the page is the table, and a metric has one entry."""

import itertools

import pytest

from docs.reference.metrics import PAGE, TABLE, entries_of, markdown


def test_the_page_is_the_table():
    """Fails after a change of the table until `python -m docs.reference.metrics` wrote the page."""
    _, _, rest = PAGE.read_text('utf-8').partition('<!-- metrics -->\n')
    assert rest.partition('<!-- /metrics -->')[0] == markdown()


def test_every_entry_says_unit_meaning_and_what_is_normal():
    assert [m.name for m in itertools.chain(*TABLE.values()) if not all(m)] == []


@pytest.mark.parametrize(
    'name',
    [
        'actor/pg_clipfrac', 'actor/pg_clipfrac/x3', 'staleness/tv/replay', 'critic/skipped_updates', 'bapo/replay_groups',
        'val-core/data/a.jsonl/acc/maj@16', 'theory/delta3/p95', 'theory/K2_printed', 'timing_s/old_log_prob', 'images/pixel_bytes',
        'time', 'perf/kept_pixel_bytes', 'buffer/bad/evicted_unseen', 'response_length/image_tokens', 'response_length/replies', 'theory/surrogate_after/x2',
    ],
)  # fmt: skip
def test_a_metric_has_one_entry(name):
    assert len(entries_of(name)) == 1


@pytest.mark.parametrize('name', ['actor/pg_clipfrac/x4', 'theory/K4', 'timing_s/other', 'xactor/lr', 'actor/lrx'])
def test_another_name_has_none(name):
    assert entries_of(name) == []
