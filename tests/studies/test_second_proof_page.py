"""The second proof's page has the tables of the parts that are whole, and docs/evidence.md those that it publishes."""

import re

import numpy as np
import pytest
from scipy import stats
from test_second_proof import whole_study
from test_second_proof_hard import whole_part_2

from studies.lib.contrasts import holm
from studies.second_proof import analysis, hard_analysis, page
from studies.second_proof.arms import CEILING_SEEDS, CONTRASTS, SEEDS
from studies.second_proof.rows import accuracy, of_today, passed, read_rows, wanted


def test_what_is_printed_are_the_parts_that_are_whole():
    of_part_1 = page.sections(whole_study())
    assert of_part_1.count('## Part 1') == 5 and '## Part 2' not in of_part_1 and '## Part 3' not in of_part_1
    both = page.sections(whole_part_2())
    assert both.count('## Part 1') == 5 and both.count('## Part 2') == 3
    assert '| R - P |' in both and '| posterior | epoch - R |' in both


def test_the_page_has_every_section_that_others_link_to():
    """And those sections are what is printed, word for word."""
    rows = of_today(read_rows())
    written, printed = page.page(rows), page.sections(rows)
    titles = re.findall('^## (.*)', written, re.MULTILINE)
    assert titles == list(page.CITED) and set(titles) < set(page.SECTIONS)
    assert all(section in printed for section in re.split('^(?=## )', written, flags=re.MULTILINE)[1:])
    linked = re.findall(r'second_proof/page\.md#([\w-]+)', page.EVIDENCE.read_text('utf-8'))
    assert linked and set(linked) <= {re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-') for title in titles}


def test_everything_is_printed_on_request(monkeypatch, capsys):
    monkeypatch.setattr(page, 'read_rows', whole_study)
    monkeypatch.setattr(page, 'write_text', None)  # nothing is written
    page.main(['--all'])
    assert capsys.readouterr().out == page.sections(whole_study())


def test_nothing_is_written_while_a_run_of_part_1_is_missing(monkeypatch):
    monkeypatch.setattr(page, 'read_rows', lambda: whole_study()[:-1])
    with pytest.raises(SystemExit, match='1 runs are missing'):
        page.main([])


def test_what_is_published_is_what_the_rows_say():
    rows = of_today(read_rows())
    assert not wanted(rows)
    assert page.PAGE.read_text('utf-8') == page.page(rows)
    evidence = page.EVIDENCE.read_text('utf-8')
    arms = {name: analysis.of_arm(rows, name, CEILING_SEEDS if name == 'C' else SEEDS) for name in ('G', 'P', 'R', 'RX', 'C')}
    arms = {'the base': [row for row in rows if row['part'] == 'base']} | arms
    for name, of in arms.items():
        mean, solved = (np.mean([score(row) for row in of]) for score in (accuracy, lambda row: passed(row, 32)))
        [line] = [line for line in evidence.splitlines() if line.startswith(f'| {name} |')]
        assert line.endswith(f' | {mean:.1f} | {solved:.1f} |')
    there = page.whole(rows)
    for name, (part, table) in page.PUBLISHED.items():
        assert part not in there or f'<!-- {name} -->\n{table(rows)}\n<!-- /{name} -->' in evidence
    for setting in hard_analysis.chosen(rows).values():
        mean, solved = (hard_analysis.kind_contrast(rows, setting, 'R', f) for f in (accuracy, lambda row: passed(row, 32)))
        told = [f'{c.mean:.2f} ({analysis.interval(c.interval95)})' for c in (mean, solved)]
        assert f'| {told[0]} | {told[1]} |' in evidence
    contrasts = [analysis.difference(rows, a, b) for a, b in CONTRASTS]
    rejected = holm([c.p for c in contrasts], analysis.ALPHA)
    for i, (c, (a, b)) in enumerate(zip(contrasts, CONTRASTS), start=1):
        sentence = verdict_line(evidence, i)
        assert analysis.verdict(c, rejected[i - 1]) in sentence and sentence.endswith(f'{a} − {b}.')
        assert '{:.1f} '.format(c.mean) in sentence and '({:.1f} to {:.1f})'.format(*c.interval95) in sentence
    kept = [analysis.difference(rows, a, b, lambda row: passed(row, 32)) for a, b in analysis.GUARDED]
    assert all(c.mean > analysis.GUARD for c in kept) and 'The guard holds for both' in verdict_line(evidence, 4)
    for low, high in (c.interval95 for c in kept):
        assert f'({low:.1f} to {high:.1f})' in verdict_line(evidence, 4)


def test_what_the_readme_alone_says_is_what_the_rows_say():
    rows, readme = of_today(read_rows()), (page.PAGE.parent / 'README.md').read_text('utf-8')
    of = {arm: {r['seed']: 100 * np.mean(r['correct']) / 32 for r in rows if r['part'] == 'search' and r['arm'] == arm}
          for arm in ('search_RX', 'search_R')}  # fmt: skip
    d = [of['search_RX'][seed] - of['search_R'][seed] for seed in of['search_R']]
    told = [f'{x:.2f}'.removeprefix('0') for x in (np.mean(d), *stats.t.interval(0.95, len(d) - 1, np.mean(d), stats.sem(d)))]
    assert 'RX leads R by {} ({} to {}), with three seeds'.format(*told) in readme and len(d) == 3
    trained = [r['seconds'] for r in rows if r['part'] in ('table', 'table_scan') and r.get('seconds')]
    assert f'its {len(trained)} runs trained for {sum(trained) / 3600:.1f} core-hours' in readme


def verdict_line(evidence, i):
    [line] = [line for line in evidence.splitlines() if line.startswith(f'{i}. ')]
    return line
