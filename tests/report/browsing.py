"""What a reader does with the rollout viewer, and sees."""

from benchmarks.host.viewer import settled


def listed(page):
    """What the list says, row by row; it draws only what is in sight."""
    return page.locator('#rows .row').all_inner_texts()


def count(page):
    return int(page.inner_text('#prompts-title').split()[0].replace(',', ''))


def colours_of(page, card=0):
    """[text, class] of a response's elements, in order."""
    return page.evaluate(f'[...cards[{card}].body.querySelectorAll("span")].map(s => [s.textContent, s.className])')


def fill(page, field, value):
    page.fill(f'#{field}', str(value))
    page.press(f'#{field}', 'Enter')
    settled(page)


def search(page, text):
    page.fill('#text', text)
    page.wait_for_selector('#progress:has-text("Searched everything")')
    settled(page)
