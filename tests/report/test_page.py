"""The page: all there, nothing outside it, and one line for a directory that is no run."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from making import config, evaluation, make_run, row

from bapo_jax.report import draw
from bapo_jax.report.page import slugs, write_report
from bapo_jax.report.panels import Line, Panel

FIGURES = {
    'reward', 'tests', 'bins', 'migration', 'composition', 'rollouts', 'gradient', 'dynamics', 'staleness', 'thresholds', 'seconds',
    'faults',
}  # fmt: skip
EVALS = [evaluation(0, [0, *[1] * 9], 0.3, 0.5), evaluation(500, [1, 2, *[0] * 8], 0.5, 0.4)]
EVENTS = [{'event': 'update <b>skipped</b>', 'time': '2026-01-01T00:00:00+00:00', 'step': 9, 'message': '$x_1$ & <script>'}]


def outside(html):
    """Every reference of a page that leaves it, and every tag that is never closed in order."""
    found = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            for name, value in attrs:
                if name in ('src', 'href', 'xlink:href', 'srcset', 'data', 'action') and not (value or '').startswith('#'):
                    found.append((tag, name, value))
            if tag in ('script', 'link', 'img', 'iframe', 'object'):
                found.append((tag,))

    Reader().feed(html)
    urls = [u for u in re.findall(r'https?://[^\s"<>]*', html) if u != 'http://www.w3.org/2000/svg']
    return found + urls + re.findall(r'@import|url\((?!#|"#)[^)]*\)', html)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """The page of 500 steps with everything, and its directory."""
    rows = [row(s, **{'staleness/ess/x2': 0.9, 'staleness/ess/x3': 0.3}) for s in range(1, 501)]
    directory = make_run(tmp_path_factory.mktemp('runs') / 'a & <b>', rows, EVALS, EVENTS, config())
    return write_report([directory]).read_text('utf-8'), directory


def test_the_page_refers_to_nothing_outside(whole):
    assert outside(whole[0]) == []


def test_the_pages_policy_lets_nothing_be_loaded_or_run(whole):
    [policy] = re.findall('<meta http-equiv="Content-Security-Policy" content="([^"]*)">', whole[0])
    rules = dict(rule.split(' ', 1) for rule in policy.split('; '))
    assert rules == {'default-src': "'none'", 'style-src': "'unsafe-inline'", 'base-uri': "'none'", 'form-action': "'none'"}
    assert whole[0].index(policy) < whole[0].index('<title>')


def test_a_run_takes_less_than_a_quarter_of_a_megabyte(whole):
    assert len(whole[0].encode()) < 250_000


def test_every_figure_is_on_the_page_and_a_png(whole):
    html, directory = whole
    assert {p.stem for p in (directory / 'report').glob('*.png')} == FIGURES
    assert all(f'id="run-0-{name}"' in html for name in {*FIGURES, 'cost'})
    assert all(p.read_bytes()[:8] == b'\x89PNG\r\n\x1a\n' for p in (directory / 'report').iterdir())


def test_text_and_lines_take_the_pages_colours(whole):
    drawn = ''.join(re.findall('<svg.*?</svg>', whole[0], re.S))
    assert 'currentColor' in drawn and not re.search('#[0-9a-fA-F]{6}|font-family', drawn)
    used = set(re.findall(r'var\((--c\d)\)', drawn))
    assert used and all(whole[0].count(f'{name}: #') == 3 for name in used)  # light, dark and print


def test_ids_are_unique_and_references_lead_to_them(whole):
    ids = re.findall(r'\bid="([^"]*)"', whole[0])
    wanted = set(re.findall(r'href="#([^"]*)"', whole[0])) | set(re.findall(r'url\(#([^)]*)\)', whole[0]))
    clips = [i for i in ids if i in wanted]
    assert len(clips) == len(set(clips)) and wanted <= set(ids)


def test_names_and_messages_are_text(whole):
    html = whole[0]
    assert '<script' not in html and '<b>' not in html and 'a &amp; &lt;b&gt;' in html and '$x_1$ &amp;' in html


def test_warnings_are_on_the_page(whole):
    assert 'pass@2 fell from 50.0% to 40.0%' in whole[0] and 'effective sample size of X3 is below 0.5 at 500 of 500 steps' in whole[0]


def test_a_run_of_one_step_and_nothing_else_says_what_is_missing(tmp_path):
    html = write_report([make_run(tmp_path / 'one', [{'step': 1, 'critic/score/mean': 0.5}])]).read_text('utf-8')
    assert outside(html) == [] and html.count('Not drawn, since the run lacks') == 14
    assert '<h1>one</h1>' in html and '<h2>' not in html  # its name stands once


def test_several_runs_share_a_page_that_begins_with_their_comparison(tmp_path):
    rows = [row(step) for step in (1, 2)]
    same = [make_run(tmp_path / part / 'x', rows, EVALS, settings=config(seed=i)) for i, part in enumerate('ab')]
    other = make_run(tmp_path / 'grpo', rows, EVALS, settings=config(method='grpo', seed=0))
    path = write_report([*same, other], tmp_path / 'out' / 'both.html')
    html = path.read_text('utf-8')
    assert path == tmp_path / 'out' / 'both.html' and '<h1>bapo, grpo: 3 runs</h1>' in html and outside(html) == []
    places = [html.index(x) for x in ('<td>bapo</td>', 'for grpo and bapo in', 'id="x-0" checked', f'<h2>{same[1]}</h2>')]
    assert places == sorted(places) and html.count('<details') == html.count('</details>') == 3
    assert '<details open' not in html and html.index('no interval can be computed') < html.index('<details')
    assert [p.name for p in (tmp_path / 'out' / 'both').glob('*.png')] == ['comparison.png']


def test_numbers_on_an_axis_keep_their_decimals():
    """The coordinates alone are shortened."""
    panel = Panel('a', 'step', 'b', (Line('c', np.arange(3), np.array([0.5725, 0.5775, 0.5825])),))
    text = draw.svg(panel, '')
    assert '>0.5775<' in text and not re.search(r' (d|x|y)="[^"]*\.\d\d', text)
    assert '#0072B2' not in text.upper() and 'var(--c0)' in text


def test_an_axis_that_does_not_start_at_0_says_so():
    def label(*values, kind='lines'):
        return draw.y_label(Panel('a', 'step', 'accuracy', (Line('c', np.arange(len(values)), np.array(values)),), kind))

    assert label(0.5, 0.7) == 'accuracy, axis from 0.49' and label(0.1, 0.7) == label(0.5, 0.7, kind='bars') == 'accuracy'
    assert label(-1.0, 1.0) == 'accuracy, axis from -1.1' and label(0.0, 0.0) == 'accuracy'


def test_a_legend_has_what_is_drawn_and_nothing_for_one_line():
    empty, full = Line('no', np.zeros(0), np.zeros(0)), [Line(f'{i}', np.arange(2), np.arange(2), i) for i in (0, 1, None)]
    assert [key.label for key in draw.legend(Panel('', '', '', (empty, *full)))] == ['0', '1', 'None']
    assert [key.colour for key in draw.legend(Panel('', '', '', tuple(full)))] == [0, 1, len(draw.COLOURS) - 1]
    assert draw.legend(Panel('', '', '', (empty, full[0]))) == []


NO_RUN = 'is not a run directory (no metrics.jsonl); give the --workdir of a run'


@pytest.mark.slow
def test_the_command_names_a_directory_that_is_no_run(tmp_path):
    done = subprocess.run([sys.executable, '-m', 'bapo_jax.report', str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f'error: {tmp_path} {NO_RUN}\n')


def test_bad_input_is_one_line_and_status_1(tmp_path, monkeypatch):
    from bapo_jax.report.__main__ import run

    monkeypatch.setattr(sys, 'argv', ['report', str(tmp_path / 'none')])
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == f'error: {tmp_path / "none"} {NO_RUN}'


def test_runs_of_like_names_keep_files_of_their_own():
    assert slugs(['a b', 'a-b', 'c', 'a b', '<>', 'run']) == ['a-b', 'a-b-2', 'c', 'a-b', 'run', 'run-2']
