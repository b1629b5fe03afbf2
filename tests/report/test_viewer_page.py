"""The rollout viewer in Debian's Chromium, opened from the disk: by mouse, by keys, on a phone, and with hostile text."""

import random
import re

import pytest
from browsing import colours_of, count, fill, listed, search
from making import config, make_run, row as row_of_metrics

from bapo_jax.report.page import write_report
from bapo_jax.report.viewer import write_viewer
from benchmarks.host.viewer import row, settled, write_rows

pytestmark = pytest.mark.slow
HOSTILE = '</script><script>window.hit = 1</script><img src=x onerror="window.hit = 2"> \u2028\u2029 🙂<b>bold</b>'


@pytest.fixture(scope='module')
def rows():
    """Steps 10, 20 and 40 of 12 groups. In step 40: row 1 is known token by token, row 2 is hostile, row 3 has no ratio."""
    rng = random.Random(5)
    made = {step: [row(rng, step, 4, 30) | {'trained': 1} for _ in range(12)] for step in (10, 20, 40)}
    pieces = ['so ', '🙂', '', 'x', '\n']
    made[40][0] |= {
        'use': 'x2', 'prompt_id': 7, 'trained': 3, 'step': 38, 'versions': [37, 37, 36, 37], 'rewards': [1.0, 0.0, 0.0, None],
        'verdicts': ['correct', 'wrong', 'unparseable', 'infra_error'], 'answers': ['41', '40', None, None],
        'responses': [''.join(pieces)] * 4, 'pieces': [pieces] * 4, 'finish': ['stop', 'length', 'stop', 'stop'],
        'logp': [[-0.01, -0.5, -1.0, -3.0, -6.0]] * 4, 'ratio': [[1.0, 0.4, 0.9, 3.0, 1.1]] * 4,
    }  # fmt: skip
    made[40][1] |= {'use': HOSTILE, 'prompt': HOSTILE, 'ground_truth': {HOSTILE: 1}, 'responses': [HOSTILE] * 4}
    made[40][1] |= {'pieces': [list(HOSTILE)] * 4, 'logp': [[-9.0] * len(HOSTILE)] * 4, 'ratio': None}
    made[40][1] |= {'answers': [HOSTILE, 'w' * 300, '', None]}
    made[40][1] |= {'verdicts': [HOSTILE, 'wrong', '__proto__', 'constructor']}
    made[40][2] |= {'use': 'discarded', 'ratio': None, 'trained': 0}
    made[10][5]['answers'][1] = 'the Needle'
    return made


@pytest.fixture(scope='module')
def url(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp('viewer of <b> & "c"')
    for step, of in rows.items():
        write_rows(folder, step, of)
    return write_viewer(folder, folder / 'viewer', 'a <b>run</b>').path.as_uri()


def test_the_report_is_drawn_under_its_policy_and_runs_nothing(chromium, tmp_path):
    runs = [
        make_run(tmp_path / name, [row_of_metrics(s) for s in (1, 2)], [], [], config(method=name)) for name in ('grpo', 'bapo')
    ]
    html, said = write_report(runs, tmp_path / 'report.html').read_text('utf-8'), []
    shown = chromium.new_page(viewport={'width': 390, 'height': 844})
    shown.on('console', lambda message: said.append(message.text))
    shown.goto((tmp_path / 'report.html').as_uri())
    assert said == []  # the policy refused nothing of the page's own
    assert shown.evaluate('document.documentElement.scrollWidth') == 390  # nothing is wider than a phone
    start = {'commit': 40 * 'a', 'command': f'bapo-train --workdir={80 * "x"}', 'version': '1'}
    long = make_run(tmp_path / 'long', [row_of_metrics(1)], [], [], config(starts=[start]))
    shown.goto(write_report([long], tmp_path / 'long.html').as_uri())
    assert 80 * 'x' in shown.content() and shown.evaluate('document.documentElement.scrollWidth') == 390
    shown.goto((tmp_path / 'report.html').as_uri())
    assert shown.evaluate('getComputedStyle(document.querySelector("figure path[style*=stroke]")).fill') == 'none'
    assert [x.is_visible() for x in shown.locator('.view').all()] == [True, False, False]
    shown.locator('#x-2').check()  # without a script
    assert [x.is_visible() for x in shown.locator('.view').all()] == [False, False, True]
    assert not shown.locator('#run-1-reward').is_visible()
    shown.locator('#run-1 > summary').click()
    assert shown.locator('#run-1-reward').is_visible()
    (tmp_path / 'report.html').write_text(html.replace('<h1>', f'{HOSTILE}<h1>'))
    shown.goto((tmp_path / 'report.html').as_uri())
    assert shown.evaluate('window.hit === undefined && document.images.length') == 1
    assert len(said) >= 2  # a script and an image, refused
    shown.close()


def test_a_step_a_prompt_and_its_responses_with_all_that_is_known(opened, url, rows):
    page = opened(url)
    assert page.title() == page.inner_text('h1') == 'Rollouts of a <b>run</b>'
    assert page.inner_text('#about') == '3 steps, 36 prompts, 144 responses' and count(page) == 12
    assert page.inner_text('#detail-title') == 'Prompt 7, step 40: 1 of 4 correct'
    facts = page.inner_text('#group .facts')
    said = 'X2', 'a hard prompt asked again', 'trained on 3 times', 'mean reward 0.333', 'sampled at step 38'
    assert all(words in facts for words in said)
    first, second, third, fourth = page.locator('.card .facts').all_inner_texts()
    said = '✓ correct', 'reward 1', 'answer: 41', 'finish: stop', 'policy 37, 2 steps stale', '5 tokens'
    assert all(words in first for words in said)
    assert '✗ wrong' in second and 'cut at the length limit' in second
    assert '? unparseable' in third and 'no answer extracted' in third and 'policy 36, 3 steps stale' in third
    assert 'infrastructure error' in fourth and 'reward none' in fourth
    tops = [card.bounding_box()['y'] for card in page.locator('.card').all()]
    assert len(set(tops)) < 4  # side by side

    strip = page.locator('#strip').bounding_box()
    page.mouse.click(strip['x'] + 5, strip['y'] + 30)
    settled(page)
    assert (page.input_value('#from'), page.input_value('#to'), count(page)) == ('10', '10', 12)
    page.locator('.row').nth(4).click()
    settled(page)
    chosen = rows[10][4]
    assert page.inner_text('#detail-title').startswith(f'Prompt {chosen["prompt_id"]}, step 10')
    assert page.locator('.row[aria-selected=true]').count() == 1
    shown = [page.evaluate(f'cards[{i}].body.textContent') for i in range(4)]
    assert shown == chosen['responses']
    assert page.locator('#group pre').all_text_contents()[0] == chosen['prompt']


def test_the_histograms_count_the_groups(opened, url, rows):
    page = opened(url)
    means = [sum(known) / len(known) for r in rows[40] if (known := [x for x in r['rewards'] if x is not None])]
    cells = page.locator('#bars span').all_inner_texts()
    told = dict(zip(map(float, cells[::2]), map(int, cells[1::2]), strict=True))
    assert told == {value / 4: sum(round(4 * mean) == value for mean in means) for value in range(5)}
    page.focus('#strip')
    for key, step in (('ArrowLeft', 20), ('ArrowLeft', 10), ('ArrowLeft', 10), ('End', 40), ('Home', 10), ('ArrowRight', 20)):
        page.keyboard.press(key)
        assert page.get_attribute('#strip', 'aria-valuetext').startswith(f'step {step}: 12 prompts, mean reward 0.')


def test_tokens_take_their_colour_from_log_prob_or_ratio(opened, url):
    page = opened(url)
    assert colours_of(page) == [['🙂', 'l1'], ['x', 'l3'], ['\n', 'l4']]  # 'so ' is likely, '' has no text
    page.click('label:has-text("importance ratio")')
    settled(page)
    assert colours_of(page) == [['🙂', 'below3'], ['x', 'above3'], ['\n', 'above1']]
    assert page.locator('#legend span').all_inner_texts()[0] == '< 0.5'
    page.click('label:has-text("nothing")')
    settled(page)
    assert colours_of(page) == [] and page.locator('#legend span').count() == 0
    assert page.evaluate('cards[0].body.textContent') == 'so 🙂x\n'


def test_neighbours_of_one_colour_are_one_element_and_the_text_stays(opened, url, rows):
    page = opened(f'{url}#steps=20-20&group=20.3')
    r = rows[20][2]
    classes = [next((c for low, c in ((-0.1053605, ''), (-0.6931471, 'l1'), (-2.302585, 'l2'), (-4.60517, 'l3')) if x >= low), 'l4')
               for x in r['logp'][0]]  # fmt: skip
    merged = []
    for piece, name in zip(r['pieces'][0], classes, strict=True):
        if merged and merged[-1][1] == name:
            merged[-1][0] += piece
        else:
            merged.append([piece, name])
    assert colours_of(page) == [[text, name] for text, name in merged if name]


def test_the_exact_numbers_of_a_token_stand_beside_it(opened, url):
    page = opened(url)
    page.locator('.card .text span').first.hover()  # the second token
    page.wait_for_selector('#tip:not([hidden])')
    assert page.inner_text('#tip') == 'token 2 of 5: "🙂"\nlog-prob -0.500 (p = 0.607)\nimportance ratio 0.4'
    page.mouse.move(1, 1)
    page.wait_for_selector('#tip', state='hidden')
    page.locator('.card .text').first.focus()
    said = []
    for _ in range(6):
        page.keyboard.press('ArrowRight')
        said.append(page.inner_text('#tip').split('\n')[0])
    assert said == ['token 1 of 5: "so "', 'token 2 of 5: "🙂"', 'token 3 of 5: adds no text of its own', 'token 4 of 5: "x"',
                    'token 5 of 5: "\\n"', 'token 5 of 5: "\\n"']  # fmt: skip
    page.keyboard.press('ArrowLeft')
    assert page.inner_text('#tip') == 'token 4 of 5: "x"\nlog-prob -3.000 (p = 0.0498)\nimportance ratio 3'
    assert page.evaluate('getSelection().toString()') == 'x'
    page.keyboard.press('Escape')
    assert page.locator('#tip').is_hidden()


def test_a_group_outside_the_batch_has_no_ratios_and_says_so(opened, url):
    page = opened(f'{url}#steps=40-40&group=40.3&colour=ratio')
    assert 'This group has no importance ratios' in page.inner_text('#legend') and colours_of(page) == []
    page.keyboard.press('c')
    page.keyboard.press('c')
    settled(page)
    assert page.locator('input[value=logp]').is_checked() and colours_of(page)


@pytest.mark.parametrize('use', ['x1', 'discarded'])
def test_the_source_filters(opened, url, rows, use):
    page = opened(url)
    page.check(f'#uses input[value={use}]')
    page.click('#all')
    settled(page)
    assert count(page) == sum(r['use'] == use for of in rows.values() for r in of) > 0
    page.check('#uses input[value=x3]')
    assert count(page) == sum(r['use'] in (use, 'x3') for of in rows.values() for r in of)
    page.click('#reset')
    assert count(page) == 36 and page.locator('#uses :checked').count() == 0


def test_accuracy_and_steps_filter(opened, url, rows):
    page = opened(url)
    fill(page, 'from', 10)
    fill(page, 'to', 20)
    assert count(page) == 24 and page.locator('.row').first.inner_text().count('step 20') == 1
    fill(page, 'low', 50)
    fill(page, 'high', 75)
    k = [r['verdicts'].count('correct') for step in (10, 20) for r in rows[step]]
    assert count(page) == sum(x in (2, 3) for x in k) > 0
    fill(page, 'low', 101)
    assert count(page) == 0 and 'No prompt passes the filters' in page.inner_text('#list')
    assert page.locator('.card').count() == 4  # what was read stays


def test_text_is_found_in_everything_that_was_logged(opened, url, rows):
    page = opened(url)
    search(page, 'tHe nEEdle')
    assert 'Prompts with the text: 1; those of the filters: 0.' in page.inner_text('#progress') and count(page) == 0
    page.click('#all')
    settled(page)
    assert count(page) == 1 and f'#{rows[10][5]["prompt_id"]}' in listed(page)[0]
    assert page.inner_text('#detail-title').startswith(f'Prompt {rows[10][5]["prompt_id"]}, step 10')
    for text, fields in (('then get', ('responses',)), ('The sum of 1', ('prompt',)), ('{"answer": "1', ())):
        search(page, text)
        of = [r for some in rows.values() for r in some]
        where = [[*(str(r[f]) for f in fields), str(r['ground_truth']).replace("'", '"')] for r in of]
        assert count(page) == sum(any(text.lower() in t.lower() for t in texts) for texts in where) > 1, text
    page.fill('#text', '')
    page.wait_for_selector('#prompts-title:has-text("36 prompts")')


def test_the_text_that_was_searched_for_is_marked(opened, url):
    page = opened(url)
    search(page, '🙂X')
    marked = page.evaluate('[...CSS.highlights.get("found")].map(range => range.toString())')
    assert marked == ['🙂x'] * 4


def test_everything_can_be_reached_by_keys(opened, url):
    page = opened(url)
    page.keyboard.press('[')
    settled(page)
    assert page.input_value('#from') == '20'
    page.keyboard.press('j')
    page.keyboard.press('j')
    page.keyboard.press('k')
    settled(page)
    assert page.evaluate('data.columns.row[chosen]') == 2
    page.keyboard.press('a')
    assert count(page) == 36
    page.keyboard.press(']')
    page.keyboard.press('c')
    settled(page)
    assert page.input_value('#to') == '40' and page.locator('input[value=ratio]').is_checked()
    page.keyboard.press('?')
    assert page.locator('#help dl').is_visible()
    page.keyboard.press('/')
    page.keyboard.type('needle[j')  # letters in a field are text
    assert page.input_value('#text') == 'needle[j' and page.input_value('#from') == '40'
    page.fill('#text', '')
    page.keyboard.press('Escape')
    assert page.evaluate('document.activeElement === document.body')
    page.focus('#list')
    for key in ('ArrowDown', 'End', 'ArrowUp', 'Enter'):
        page.keyboard.press(key)
    settled(page)
    assert page.evaluate('[data.columns.row[chosen], document.activeElement.id]') == [11, 'detail-title']
    for _ in range(8):  # the prompt, the truth, the colours, the first response
        page.keyboard.press('Tab')
        if page.evaluate('document.activeElement.className') == 'text':
            break
    assert page.evaluate('document.activeElement === cards[0].body')
    assert page.evaluate('getComputedStyle(document.activeElement).outlineStyle') == 'solid'


def test_the_address_holds_the_view(opened, url):
    page = opened(url)
    page.check('#uses input[value=x1]')
    page.click('#all')
    fill(page, 'low', 25)
    search(page, '= 59')
    page.keyboard.press('Escape')
    page.keyboard.press('c')
    page.keyboard.press('j')
    settled(page)
    seen = listed(page), page.inner_text('#detail-title'), count(page)
    again = opened(page.url)
    assert (listed(again), again.inner_text('#detail-title'), count(again)) == seen and again.url == page.url
    assert again.input_value('#text') == '= 59' and again.locator('input[value=ratio]').is_checked()
    again.evaluate('location.hash = "steps=10-10&group=10.2"')
    again.wait_for_selector('#detail-title:has-text("step 10")')
    settled(again)
    assert again.evaluate('[data.columns.row[chosen], state.text, shown.length]') == [2, '', 12]
    damaged = opened(f'{url}#steps=x-y&group=3.x&source=no&accuracy=-&colour=blue')
    assert count(damaged) == 12


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_the_colours_can_be_read(opened, url, scheme):
    """Text keeps a contrast of 4.5 on every colour, and a scale's steps keep apart in lightness (WCAG 2.2)."""
    page = opened(url, scheme)

    def light(colour):
        parts = [int(x) / 255 for x in re.findall(r'\d+', colour)[:3]]
        return sum(w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
                   for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))  # fmt: skip

    def contrast(a, b):
        return (max(light(a), light(b)) + 0.05) / (min(light(a), light(b)) + 0.05)

    body = page.evaluate('getComputedStyle(document.body).backgroundColor')
    assert (light(body) > 0.5) == (scheme == 'light')
    for name, levels in (('logp', [0, 1, 2, 3, 4]), ('ratio', [0, 1, 2, 3]), ('ratio', [6, 5, 4, 3])):
        page.check(f'#colours input[value={name}]')
        settled(page)
        styles = page.evaluate("""[...document.querySelectorAll('#legend span')].map(s => {
            const style = getComputedStyle(s);
            return [style.backgroundColor, style.color];
        })""")
        shades = [body if back.startswith('rgba') else back for back, _ in styles]
        assert min(contrast(shade, ink) for shade, (_, ink) in zip(shades, styles, strict=True)) >= 4.5
        assert min(contrast(shades[a], shades[b]) for a, b in zip(levels, levels[1:], strict=False)) > 1.1
        order = [light(shades[level]) for level in levels]
        assert order == sorted(order, reverse=scheme == 'dark')
    lines = page.evaluate("""[...document.querySelectorAll('#legend span')].map(s => getComputedStyle(s).textDecoration)""")
    kinds = [('dotted' if 'dotted' in line else 'solid') if 'underline' in line else '' for line in lines]
    assert kinds == ['dotted', 'dotted', '', '', '', 'solid', 'solid']  # without any colour, which side of 1 a token lies on
    for verdict in ('.correct .verdict', '.wrong .verdict', '.soft', '.unparseable .verdict'):
        assert contrast(page.evaluate(f'getComputedStyle(document.querySelector("{verdict}")).color'), body) >= 4.5


@pytest.mark.parametrize('part', ['', '&group=40.2', '&text=hit'])
def test_a_phone_shows_one_response_under_the_other_and_never_scrolls_sideways(opened, url, part):
    page = opened(f'{url}#steps=40-40{part}', size='phone')
    assert page.evaluate('document.documentElement.scrollWidth') <= 390
    boxes = [card.bounding_box() for card in page.locator('.card').all()]
    assert len({box['x'] for box in boxes}) == 1 and all(300 < box['width'] <= 390 for box in boxes)
    assert all(a['y'] + a['height'] <= b['y'] for a, b in zip(boxes, boxes[1:], strict=False))


def test_hostile_text_is_only_text(opened, url):
    page = opened(f'{url}#steps=40-40&group=40.2')
    assert page.evaluate('cards.map(card => card.body.textContent)') == [HOSTILE] * 4
    assert page.locator('#group pre').all_text_contents()[0] == HOSTILE
    assert HOSTILE in page.locator('.card .verdict').all_text_contents()
    assert page.evaluate('[window.hit, document.querySelectorAll("img, b, .card script").length]') == [None, 0]
    assert page.evaluate('document.scripts.length') == 4
    search(page, HOSTILE[:20])
    assert count(page) == 1


def test_the_page_runs_no_script_but_its_own(opened, url):
    page = opened(url)
    page.evaluate("""(() => {
        const script = document.createElement('script');
        script.textContent = 'window.hit = 3';
        document.body.append(script);
        document.body.insertAdjacentHTML('beforeend', '<img src="https://127.0.0.1:9/x.gif" onerror="window.hit = 4">');
    })()""")
    page.wait_for_timeout(200)
    refused = [error for error in opened.errors if 'Content Security Policy' in error]
    assert page.evaluate('window.hit') is None and len(refused) >= 2 and refused == opened.errors
    opened.errors.clear()
