"""The pages are true where that can be read off: links lead somewhere, quoted messages exist, the first page is short."""

import ast
import builtins
import functools
import re
import subprocess

import pytest
from small_run import ROOT

PAGES = sorted([*ROOT.glob('*.md'), *(ROOT / 'docs').rglob('*.md')])
LINK = re.compile(r'\]\((?!https?://|#)([^)#\s]+)')


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    missing = [target for target in LINK.findall(page.read_text('utf-8')) if not (page.parent / target).exists()]
    assert not missing


@functools.cache
def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r'^```.*?^```', '', page.read_text('utf-8'), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r'[^\w\- ]', '', head.lower()).replace(' ', '-') for head in re.findall(r'^#+ (.*)', text, re.MULTILINE)}


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page):
    links = re.findall(r'\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)', page.read_text('utf-8'))
    assert not [(to, head) for to, head in links if head not in anchors(page.parent / to if to else page)]


def test_there_are_seven_guides_and_the_pages_are_not_long():
    """A page that is looked up belongs to docs/reference/."""
    guides = {page.stem for page in (ROOT / 'docs').glob('*.md')}
    assert guides == {'start', 'concepts', 'your_data', 'methods', 'vllm', 'many_hosts', 'evidence'}
    assert sum(len(page.read_text('utf-8').split()) for page in PAGES) <= 44_630
    # Whole tables are printed by the studies' commands. Plans are records, which nothing changes afterwards; argument.md is the
    # template of a page.
    of_studies = [page for folder in ('studies', 'benchmarks') for page in (ROOT / folder).rglob('*.md')]
    assert sum(len(page.read_text('utf-8').split()) for page in of_studies if not page.name.startswith(('plan', 'argument'))) <= 10_750


def test_no_command_leads_out_of_the_checkout():
    """Commands run from the root, so a path that begins with two dots is one of the writer's machine. Code has none either."""
    outside = '../' + 'shared'  # the folder beside a checkout that once stood in a page
    found = subprocess.run(['git', 'grep', '-nIF', outside], cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, ''), found.stdout + found.stderr
    commands = [line for page in PAGES for line in page.read_text('utf-8').splitlines() if line.startswith('    ')]
    assert len(commands) > 100 and not [line for line in commands if re.search(r'(?<![\w./(])\.\./', line)]


# A message has a remedy if a clause begins with one of these verbs, or if it says what is required, supported or known.
VERBS = """
add allow ask build change check choose close compare continue convert copy correct create delete disable download drop end
export fetch fill fix free give increase install keep leave list look lower make mend mount move name open pass pick point
publish put quote raise reduce remove rename repeat replace report request restart restore return run save scale see select send
serve set shorten specify split start state stop submit swap take train try unset update upgrade use wait wrap write
"""
REMEDY = re.compile(
    rf'(?:^|[;:.,(] |\b(?:and|or|then) )(?:{"|".join(VERBS.split())})\b'
    r'|\bmust\b|\bneeds?\b|\bexpected\b|\b(?:supported|allowed|known): |\bthe same command\b',
    re.IGNORECASE,
)
# Messages without a remedy and without a row on the page of errors, and why. A part of the text is enough.
NO_REMEDY = {
    'a mistake in the program; checks come before it, so no input leads there': (
        'the objective reads the role', 'patches is no image', 'features to stand there', 'is the prompt cut off?',
        'behind the last of … images', 'the engine holds no policy yet',
        'no checkpoint was written at step', 'no solution in non-negative integers', 'random attempts reached the target',
        'step …: …: …',
    ),
    'a command that ends closes its engine, and prints its own message': ('the engine was closed', 'takes no further turn'),
    'caught: the group is requested again': ('a reply is lost',),
    'caught: the answer is unparseable': ('unexpected …', 'longer than … characters', 'nested deeper than'),
    'caught: an infrastructure error, which the row "have no verdict" explains': (
        'the verifier failed on this answer', 'no reply to a response', 'the Python tool did not run',
    ),
    'caught: a note in the rollout viewer, beside what it shows': ('cut short', 'a line is longer than'),
    'the start of a message: what follows names the remedy': (
        'the config cannot run:', 'prompt …: …', '--start=…: …', '--teacher=…: …', 'no reply to a group in',
    ),
    'the end or the reason of a message that names the remedy': (
        'is not what was saved', 'bytes, more than any manifest', 'it is not a JSON object', 'it did not finish within',
        'is in another position', 'the kernel refuses to confine a process',
    ),
    'its class appends the remedy': ('lost another host', 'for the other hosts', '…: a response …'),
    'a reason within a note on standard error and in events.jsonl': ('it has no scores',),
}  # fmt: skip
# What is raised with a text that is made elsewhere: by another exception, or by a function whose texts are messages themselves.
MADE_ELSEWHERE = {
    'str(e)', 'told', 'str(warning.message)', "answer['bad']",
    'f"{file}: {\'; \'.join(messages)}"',
    "f'{name}={value(c, name)!r} {row.check.wrong}'",
    "f'{setting}: {e}'", "f'{file}: {e}'", "f'{type(e).__name__}: {reason}'",
    "'\\n'.join((f'host {i}: {text}' for i, text in enumerate(said) if text))",
    "f'error: {\"standard output: \" if is_of_output(e) else \"\"}{e}'",
    "f'error: {said}' if str(arguments.run) in said else f'error: {arguments.run}: {said}'", "f'error: {e}'", "f'error: {error}'",
    "f'error: {e}{e.remedy}'", "f'{said}: {error}'", "f'{_place(error, file)}: {_on_one_line(error)}'",
}  # fmt: skip
RAISED_AGAIN = {
    'result', 'Stopped', 'next(iter(damaged.values()))', '_in_use(path, holder)', '_in_use(path, before)',
    'none_complete(directory)', "none_complete(run / 'checkpoints')", 'damaged or none_complete(directory)',
}  # fmt: skip
EXIT_STATUS = {'1', 'main()', 'STATUS', 'stopping.STATUS', '0 if dry_run(c, FLAGS.topology).fits is not False else 1',
               'process.returncode if process.returncode >= 0 else 128 - process.returncode'}  # fmt: skip
LEAST = 12  # letters that a row quotes where it quotes less than half of a message: a shorter one would stand for anything


def text_of(node):
    """The text of a string in the source, with an ellipsis for each value that is put in; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return ''.join(part.value if isinstance(part, ast.Constant) else '…' for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left) or '…') + (text_of(node.right) or '…')
    return None


def name_of(node):
    return ast.unparse(node).split('.')[-1]


@functools.cache
def nodes():
    files = [file for folder in ('bapo_jax', 'configs') for file in (ROOT / folder).rglob('*.py')]
    return [(file, node) for file in files for node in ast.walk(ast.parse(file.read_text('utf-8')))]


@functools.cache
def exceptions():
    """The names of Python's exceptions, of absl's and of the package's own."""
    names = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
    names, classes = names | {'UsageError'}, [node for _, node in nodes() if isinstance(node, ast.ClassDef)]
    while new := {c.name for c in classes if any(name_of(base) in names for base in c.bases)} - names:
        names |= new
    return names


def is_made(node):
    """Whether a call makes an exception."""
    return isinstance(node, ast.Call) and (name_of(node.func) in exceptions() or name_of(node.func) == '_damaged')


def message_nodes():
    """The nodes of all messages: of exceptions, of sys.exit, of the config's problems, and of errors that are printed.

    Other modules' `need` puts its text into a message that they raise.
    """
    for file, node in nodes():
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called, notes = ast.unparse(node.func), file.name.endswith(('fields.py', 'rules.py', '__init__.py'))
        if is_made(node):
            yield node.args[-1 if called in ('self._damaged', 'OSError') else 0]
        elif called in ('sys.exit', 'leave') or called == 'print' and (text_of(node.args[0]) or '').startswith('error: '):
            yield node.args[0]
        elif called == 'need' and notes and ast.unparse(node.args[1]) != 'str(error)':
            yield node.args[1]


def messages_of_scripts():
    """The errors that launch/*.sh and the Makefile print, with an ellipsis for each variable."""
    for file in [ROOT / 'Makefile', *(ROOT / 'launch').glob('*.sh')]:
        for said in re.findall(r'''echo (?:"error: (.*?)"|'(.*?)') >&2''', file.read_text('utf-8')):
            yield re.sub(r'\$(\w+|\{.*?\})', '…', ''.join(said))


def messages():
    texts = [' '.join((text_of(node) or '…').split()) for node in message_nodes()]
    return {text for text in [*texts, *messages_of_scripts()] if re.search(r'\w', text.replace('error: …', ''))}


def rows():
    return re.findall(r'^\| `(.+?)` \|', (ROOT / 'docs' / 'reference' / 'errors.md').read_text('utf-8'), re.MULTILINE)


def quotes(row, text):
    """Whether the constant parts of the row stand in the text, in order."""
    at = 0
    for part in row.split('…'):
        if (at := text.find(part, at)) < 0:
            return False
        at += len(part)
    return True


def test_quoted_errors_are_messages_of_the_package():
    texts = [' '.join(text.split()) for _, node in nodes() if (text := text_of(node))]
    texts += messages_of_scripts()
    assert 25 <= len(rows()) <= 35 and len(set(rows())) == len(rows())
    # What varies may be a value, or text that the source puts in by another road.
    assert not [row for row in rows() if not any(quotes(row, text) for text in texts)]


@pytest.mark.parametrize(
    ('text', 'has'),
    [
        ('…: the file is truncated', False),
        ('the server lists no policies, and names none; it started in … s', False),
        ('x=… is unknown; choose one of …', True),
        ('the file is truncated. Download it again', True),
        ('x=… must be above 0', True),
        ('expected a line of JSON, got …', True),
        ('format=… is not read; supported: …', True),
    ],
)
def test_a_remedy_is_an_instruction_or_what_is_allowed(text, has):
    assert bool(REMEDY.search(text)) == has


def test_every_message_has_a_remedy_or_a_row_or_a_reason():
    reasoned = [part for parts in NO_REMEDY.values() for part in parts]
    sizes = {row: len(row.replace('…', '')) for row in rows()}
    silent = [
        text for text in messages()
        if not REMEDY.search(text)
        and not any(quotes(row, text) and size >= min(LEAST, len(text.replace('…', '')) / 2) for row, size in sizes.items())
    ]  # fmt: skip
    assert not [text for text in silent if not any(quotes(part, text) for part in reasoned)]
    assert not [part for part in reasoned if not any(quotes(part, text) for text in silent)], 'reasons for what is not there'


def test_a_message_is_written_where_it_is_raised():
    """Else the test above would not see it."""
    opaque = {ast.unparse(node) for node in message_nodes() if not re.search(r'\w', (text_of(node) or '').replace('error: …', ''))}
    # Pythons spell quotes inside an f-string differently.
    assert opaque == {ast.unparse(ast.parse(text, mode='eval')) for text in MADE_ELSEWHERE | EXIT_STATUS}
    raised = [node.exc for _, node in nodes() if isinstance(node, ast.Raise) and node.exc is not None]
    assert {ast.unparse(exc) for exc in raised if not any(map(is_made, ast.walk(exc)))} == RAISED_AGAIN


def test_the_first_page_leads_to_every_page():
    linked = set(LINK.findall((ROOT / 'README.md').read_text('utf-8')))
    assert {page.relative_to(ROOT).as_posix() for page in (ROOT / 'docs').rglob('*.md')} <= linked


def test_the_first_page_is_short():
    """Words have a letter or a digit. Numbers in tables, addresses and names such as mean@8 are not counted."""
    page = (ROOT / 'README.md').read_text('utf-8')
    prose = re.sub(r'\]\([^)]*\)', ']', '\n'.join(line for line in page.splitlines() if not line.startswith('|')))
    assert len(page.splitlines()) < 70
    assert len([word for word in page.split() if re.search(r'\w', word)]) <= 700
    assert len(re.findall(r'(?<![\w.@])\d[\d.,]*', prose)) <= 40
