"""How long the rollout viewer holds up its page, in Chromium: 10,000 responses, and one group of 8 responses
of 8,192 tokens.

    python -m benchmarks.host.viewer

Prints for each action how long it took, and the longest task of the page's main thread; a page that answers
at once has none over 50 ms. Wants chromium on the PATH (`make browser`).
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.table import Table

from bapo_jax.report.viewer import write_viewer

DEADLINE = 30_000  # milliseconds for anything the browser is asked
USES = 'x1', 'x1', 'x2', 'x3', 'discarded', 'left_out'
WORDS = 'let x be the sum so then we get 42 + 17 = 59 and hence 3·4 ≥ 11 — 数学 🙂 \\frac{1}{2} \n \n wait therefore'.split(
    ' '
)
# The lengths of all tasks since the page began; tasks under 50 ms are not told.
WATCH = """window.tasks = [];
const note = list => tasks.push(...list.getEntries().map(entry => entry.duration));
new PerformanceObserver(note).observe({ type: 'longtask', buffered: true });"""


def row(rng: random.Random, step: int, G: int, tokens: int) -> dict[str, Any]:
    """A group's row as run/log/responses.py writes it, of made-up text: G responses of `tokens` tokens."""
    use = rng.choice(USES)
    in_batch = use in ('x1', 'x2', 'x3')
    pieces = [[rng.choice(WORDS) + ' ' for _ in range(tokens)] for _ in range(G)]
    verdicts = rng.choices(('correct', 'wrong', 'unparseable', 'infra_error'), (6, 5, 1, 1), k=G)
    sampled = step - rng.randrange(1, 9) if use == 'x3' else step
    return {
        'use': use,
        'prompt_id': rng.randrange(100_000),
        'prompt': f'<|im_start|>user\nThe sum of {rng.randrange(999)} and {rng.randrange(999)}?<|im_end|>\n<|im_start|>assistant\n',
        'ground_truth': {'answer': str(rng.randrange(2000))},
        'responses': [''.join(some) for some in pieces],
        'verdicts': verdicts,
        'answers': [str(rng.randrange(2000)) if v in ('correct', 'wrong') else None for v in verdicts],
        'rewards': [None if v == 'infra_error' else float(v == 'correct') for v in verdicts],
        'finish': rng.choices(('stop', 'length'), (3, 1), k=G),
        'versions': [sampled - 1] * G,
        'step': sampled,
        'trained': rng.randrange(1, 4) if in_batch else 0,
        'pieces': pieces,
        'logp': [[round(-rng.expovariate(2), 3) for _ in some] for some in pieces],
        'ratio': [[round(2 ** rng.gauss(0, 0.3), 4) for _ in some] for some in pieces] if in_batch else None,
    }


def write_rows(run: Path, step: int, rows: list[dict[str, Any]]) -> None:
    """Writes a step's file of rollouts."""
    (run / 'rollouts').mkdir(parents=True, exist_ok=True)
    data = ''.join(json.dumps(r) + '\n' for r in rows).encode()
    (run / 'rollouts' / f'{step:06d}.jsonl.zst').write_bytes(zstandard.compress(data))


def ten_thousand(run: Path) -> None:
    """25 steps of 50 groups of 8 responses of 150 tokens."""
    rng = random.Random(0)
    for step in range(10, 260, 10):
        write_rows(run, step, [row(rng, step, 8, 150) for _ in range(50)])


def long_group(run: Path) -> None:
    """Two groups of 8 responses of 8,192 tokens."""
    rng = random.Random(1)
    write_rows(run, 1, [row(rng, 1, 8, 8192) | {'use': 'x1'}, row(rng, 1, 8, 8192) | {'use': 'x2'}])


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Debian's Chromium. Raises FileNotFoundError where the PATH has none."""
    program = shutil.which('chromium')
    if program is None:
        raise FileNotFoundError('no chromium on the PATH; run: make browser')
    with sync_playwright() as playwright:
        # Without a sandbox, which root cannot have; the pages are files of our own.
        chromium = playwright.chromium.launch(
            executable_path=program, args=['--no-sandbox'], timeout=DEADLINE
        )
        try:
            yield chromium
        finally:
            chromium.close()


def settled(page: Page) -> None:
    """Waits until the chosen group is shown and no search is under way."""
    # By selectors: the page's policy lets nobody compile text, which waiting for a function would take.
    for part in ('#list', '#detail'):
        page.wait_for_selector(f'{part}[aria-busy=false]', timeout=DEADLINE)


ACTIONS = {
    'next prompt': 'move(1)',
    'colour by ratio': "setColour('ratio')",
    'step before': 'moveStep(-1)',
    'all steps': 'allSteps()',
    'last prompt of the list': 'move(Infinity)',
    'search all for a text': "update({ text: 'wait therefore' })",
}
LONG = {
    'next prompt': 'move(1)',
    'colour by ratio': "setColour('ratio')",
    'to the end of a response': """
    (async () => { while (addSlice(cards[0])) await nextFrame(); cards[0].body.scrollTop = 1e9; await nextFrame(); })()""",
}


def measure(page: Page, url: str, actions: dict[str, str]) -> Iterator[tuple[str, float, float, int]]:
    """(action, ms until all is shown, longest task in ms, tasks of 50 ms or more) of opening the page, and of
    each action.
    """
    page.add_init_script(WATCH)
    for action, script in {'open': '', **actions}.items():
        begun = time.perf_counter()
        if script:
            page.evaluate(f'tasks.length = 0; {script}')
        else:
            page.goto(url, timeout=DEADLINE)
        settled(page)
        took = 1000 * (time.perf_counter() - begun)
        page.wait_for_timeout(500)  # tasks are told late
        tasks = page.evaluate('tasks')
        yield action, took, max(tasks, default=0), len(tasks)


def main() -> None:
    table = Table('page', 'action', 'shown after, ms', 'longest task, ms', 'tasks of 50 ms or more')
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        for name, make, actions in (
            ('10,000 responses', ten_thousand, ACTIONS),
            ('8 responses of 8,192 tokens', long_group, LONG),
        ):
            run = Path(folder) / make.__name__
            make(run)
            begun = time.perf_counter()
            viewer = write_viewer(run, run / 'viewer', name)
            print(f'{name}: written in {time.perf_counter() - begun:.1f} s')
            for action, took, longest, tasks in measure(chromium.new_page(), viewer.path.as_uri(), actions):
                table.add_row(
                    name, action, f'{took:,.0f}', f'{longest:.0f}' if tasks else 'under 50', str(tasks)
                )
    Console(width=120).print(table)


if __name__ == '__main__':
    main()
