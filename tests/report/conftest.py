"""A browser for the tests of pages, and what they do with it."""

import pytest

from benchmarks.host.viewer import DEADLINE, browser, settled

SIZES = {'desk': (1280, 900), 'phone': (390, 844)}


@pytest.fixture(scope='module')
def chromium():
    """A browser for a file of tests, not for all: until it is closed, playwright's event loop lets asyncio start none."""
    with browser() as started:
        yield started


@pytest.fixture
def opened(chromium):
    """A function of (address, scheme, size) to a page that has settled; each has met no error when the test ends.

    `.asked` are the chunks that were asked for, `.errors` the errors.
    """
    contexts, errors, asked = [], [], []

    def open_page(address, scheme='light', size='desk'):
        width, height = SIZES[size]
        contexts.append(chromium.new_context(color_scheme=scheme, viewport={'width': width, 'height': height}))
        page = contexts[-1].new_page()
        page.set_default_timeout(DEADLINE)
        page.on('pageerror', lambda error: errors.append(str(error)))
        page.on('console', lambda message: errors.append(message.text) if message.type == 'error' else None)
        page.on('request', lambda request: asked.append(request.url.rpartition('/')[2]) if '/chunks/' in request.url else None)
        page.goto(address, timeout=DEADLINE)
        settled(page)
        return page

    open_page.errors, open_page.asked = errors, asked
    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
