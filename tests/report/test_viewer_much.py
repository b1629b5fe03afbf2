"""The rollout viewer in Chromium with old rows, with many responses, with long ones, and with files that change under it."""

import random
import re

import pytest
from browsing import colours_of, count, search

from bapo_jax.report import viewer
from bapo_jax.report.viewer import write_viewer
from benchmarks.host.viewer import DEADLINE, row, settled, ten_thousand, write_rows

pytestmark = pytest.mark.slow


def test_rows_of_an_older_version_say_why_there_are_no_colours(opened, tmp_path):
    new = 'answers', 'trained', 'pieces', 'logp', 'ratio'
    rows = [row(random.Random(2), 10, 4, 30) for _ in range(3)]
    write_rows(tmp_path, 10, [{k: v for k, v in r.items() if k not in new} for r in rows])
    page = opened(write_viewer(tmp_path, tmp_path / 'viewer', 'old').path.as_uri())
    assert 'without tokens' in page.inner_text('.warning') and page.locator('#colouring').is_hidden()
    page.keyboard.press('c')
    settled(page)
    assert page.evaluate('cards[0].body.textContent') == rows[0]['responses'][0] and colours_of(page) == []
    assert 'times trained on: not logged' in page.inner_text('#group .facts') and 'answer' not in page.inner_text('.card .facts')


def test_ten_thousand_responses_stay_on_the_disk_until_they_are_asked_for(opened, tmp_path):
    ten_thousand(tmp_path)
    path = write_viewer(tmp_path, tmp_path / 'viewer', 'many').path
    assert (path.parent / 'index.js').stat().st_size < 200_000
    page, asked = opened(path.as_uri()), opened.asked
    page.keyboard.press('j')
    page.keyboard.press('a')
    settled(page)
    assert page.inner_text('#about') == '25 steps, 1,250 prompts, 10,000 responses' and count(page) == 1250
    assert asked == ['0.js']
    assert page.locator('.row').count() < 40
    page.focus('#list')
    page.keyboard.press('End')
    settled(page)
    chunks = page.evaluate('data.chunks')
    assert asked[1:] in ([f'{chunks - 1}.js'], [f'{chunks - 2}.js', f'{chunks - 1}.js']) and chunks > 20
    assert page.evaluate('document.querySelectorAll("*").length') < 5000
    search(page, 'therefore')
    assert len(set(asked)) == chunks and page.evaluate('kept.size') <= 4  # read once each, and let go
    assert page.locator('script').count() == 4 and page.locator('.row').count() < 40


def test_a_search_can_be_stopped(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(viewer, 'CHUNK_BYTES', 100)
    rng = random.Random(1)
    write_rows(tmp_path, 1, [row(rng, 1, 8, 5) for _ in range(150)])
    page = opened(write_viewer(tmp_path, tmp_path / 'viewer', 'small chunks').path.as_uri())
    page.fill('#text', 'so')
    page.wait_for_selector('#progress:has-text("Esc stops")')
    page.keyboard.press('Escape')
    page.wait_for_selector('#progress:has-text("Stopped there")')
    searched, parts = map(int, re.match(r'Searched (\d+) of (\d+) parts', page.inner_text('#progress')).groups())
    assert searched < parts == 1350 and page.input_value('#text') == 'so'
    settled(page)


def test_long_responses_are_made_as_they_are_read(opened, tmp_path):
    rng = random.Random(1)
    write_rows(tmp_path, 1, [row(rng, 1, 8, 8192)])
    page = opened(write_viewer(tmp_path, tmp_path / 'viewer', 'long').path.as_uri())
    made = 'document.querySelectorAll(".text span").length'
    before = page.evaluate(made)
    assert 8 * 100 < before < 8 * 500
    page.locator('.text').first.focus()
    page.keyboard.press('End')
    page.wait_for_selector('.card:first-child .slice:nth-child(20)', state='attached')
    while page.evaluate('cards[0].made < cards[0].runs.length'):
        assert page.evaluate('performance.now()') < DEADLINE
        page.wait_for_timeout(50)
    assert page.evaluate('cards[0].body.textContent === cards[0].part.text')
    assert page.evaluate('cards.slice(1).every(card => card.body.childNodes.length === 1)')
    assert page.evaluate(made) < before + 8192


def test_a_viewer_that_was_written_anew_is_told(opened, tmp_path):
    rng = random.Random(1)
    for step in (1, 2):
        write_rows(tmp_path, step, [row(rng, step, 8, 2000)])
    page = opened(write_viewer(tmp_path, tmp_path / 'viewer', 'run').path.as_uri())
    write_viewer(tmp_path, tmp_path / 'viewer', 'run')
    page.evaluate('kept.clear()')
    page.keyboard.press('[')
    page.wait_for_selector('#group .warning')
    settled(page)
    assert 'written anew; reload the page' in page.inner_text('#group .warning') and page.locator('.card').count() == 0
