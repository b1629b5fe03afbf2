"""Writes the rollout viewer: rollouts/*.jsonl.zst as a static page that opens from a disk, without a server.

The folder holds an index with one row of numbers per group, and chunks with the texts and tokens. Both are
scripts that call a function of the page, because a page opened from a disk can load scripts but cannot fetch
files. A chunk is a list of parts. A part is a prompt (place -1) or a response (places 0 to G-1) and names its
group's row in the index, so a group may span chunks.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterator
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from bapo_jax.machine.files import write_text
from bapo_jax.run.log.responses import rollout_lines
from bapo_jax.tasks.jsonl import flaw

LIMIT_MB = 256  # total size of the chunks; newer steps are written first
CHUNK_BYTES = 400_000  # a browser parses this much in a few milliseconds
_BROKEN = '\ufffd'  # what a decoder puts in place of invalid bytes
EXCERPT = 60  # characters of a prompt in the index
_STATIC = {
    'index.html': 'rollouts.html',
    **{name: name for name in ('rollouts.css', 'rollouts.js', 'list.js', 'responses.js')},
}
_COLUMNS = 'step', 'row', 'use', 'id', 'G', 'correct', 'reward', 'trained', 'sampled', 'first', 'last'
_RESPONSE = {
    'text': 'responses',
    'verdict': 'verdicts',
    'reward': 'rewards',
    'finish': 'finish',
    'version': 'versions',
}


class Viewer(NamedTuple):
    """Summary of a viewer that was written."""

    path: Path | None  # its start page; None if no group could be read
    steps: int
    groups: int
    responses: int
    notes: list[str]  # what could not be read or was left out


def write_viewer(run: Path, folder: Path, name: str, limit_mb: float = LIMIT_MB) -> Viewer:
    """Writes the viewer of run/rollouts/ into `folder`, replacing an older viewer.

    Newer steps are read first, until the chunks take `limit_mb` megabytes. Raises ValueError if `folder`
    exists and is not a viewer, and OSError if a file cannot be written.
    """
    if folder.exists() and not (folder / 'index.js').is_file():
        raise ValueError(f'{folder} exists and is not a rollout viewer; move it, or choose another --output')
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(folder.name + '.partial')
    shutil.rmtree(partial, ignore_errors=True)
    (partial / 'chunks').mkdir(parents=True)
    index = _write_chunks(rollout_files(run), partial / 'chunks', limit_mb)
    write_text(partial / 'index.js', f'start({_js({"run": name, **index})})\n')
    for target, source in _STATIC.items():
        shutil.copyfile(Path(__file__).with_name(source), partial / target)
    if folder.exists():
        shutil.rmtree(folder)
    columns = index['columns']
    if columns['step']:
        partial.rename(folder)
    else:
        shutil.rmtree(partial)
    path = folder / 'index.html' if columns['step'] else None
    return Viewer(path, len(set(columns['step'])), len(columns['step']), sum(columns['G']), index['notes'])


def rollout_files(run: Path) -> list[Path]:
    """Returns a run's rollout files, newest step first."""
    files = {
        int(f.name.partition('.')[0]): f
        for f in run.glob('rollouts/*.jsonl.zst')
        if re.match(r'[0-9]+\.', f.name)
    }
    return [files[step] for step in sorted(files, reverse=True)]


class _Chunks:
    """Writes parts into numbered files of up to CHUNK_BYTES, or of a single longer part."""

    def __init__(self, folder: Path):
        self.build = secrets.token_hex(6)  # lets the page reject chunks of another build
        self.count = self.bytes = self._held_bytes = 0
        self._folder, self._held = folder, []

    def add(self, part: str) -> int:
        """Adds a part and returns the number of its chunk."""
        if self._held and self._held_bytes + len(part) > CHUNK_BYTES:
            self.close()
        self._held.append(part)
        self._held_bytes += len(part)
        self.bytes += len(part)
        return self.count

    def close(self) -> None:
        """Writes the buffered parts."""
        if self._held:
            parts = ',\n'.join(self._held)
            write_text(
                self._folder / f'{self.count}.js', f'chunk("{self.build}",{self.count},[\n{parts}\n])\n'
            )
            self._held, self._held_bytes = [], 0
            self.count += 1


def _write_chunks(files: list[Path], folder: Path, limit_mb: float) -> dict[str, Any]:
    """Writes the chunks of the files in order and returns the index."""
    columns: dict[str, list] = {name: [] for name in _COLUMNS}
    prompts: list[str] = []
    notes: list[str] = []
    chunks, coloured = _Chunks(folder), 0
    for place, file in enumerate(files):
        step, misspelt, full = int(file.name.partition('.')[0]), 0, False
        for number, row in readable_rows(file, notes):
            if full := chunks.bytes >= limit_mb * 1e6:
                break
            parts = [{'prompt': row['prompt'], 'truth': _text(row.get('ground_truth'))}, *_responses(row)]
            where = [chunks.add(_js([len(prompts), i - 1, part])) for i, part in enumerate(parts)]
            numbers = {**_numbers(row), 'step': step, 'row': number, 'first': where[0], 'last': where[-1]}
            for name, values in columns.items():
                values.append(numbers[name])
            prompts.append(row['prompt'])
            with_tokens = sum('cuts' in part for part in parts)
            coloured += with_tokens
            misspelt += len(row['responses']) - with_tokens if row.get('pieces') is not None else 0
        if misspelt:
            notes.append(
                f'{file.name}: {misspelt:,} responses have no colours, since their tokens do not match their '
                'texts'
            )
        if full or (chunks.bytes >= limit_mb * 1e6 and place + 1 < len(files)):
            part = f'step {step:,} from line {number:,} on, and ' if full else ''
            older = len(files) - place - 1
            notes.append(
                f'left out, beyond {limit_mb:,g} MB: {part}{older:,} older steps; raise --rollouts_mb for '
                'more'
            )
            break
    chunks.close()
    head = {'build': chunks.build, 'chunks': chunks.count, 'coloured': coloured, 'notes': notes}
    return {**head, 'columns': {**columns, 'excerpt': excerpts(prompts)}}


def readable_rows(file: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, row) of every row that can be shown. Each problem adds a note."""
    damaged: list[tuple[int, str]] = []
    try:
        for number, line in enumerate(rollout_lines(file), start=1):
            try:
                row = json.loads(line, parse_constant=lambda constant: None)
                check_row(row)
            except (ValueError, RecursionError) as e:
                damaged.append((number, flaw(e)))
            else:
                yield number, row
    except (zstandard.ZstdError, EOFError, OSError) as e:
        notes.append(f'{file.name} is damaged ({e}); only the rows before the damage are shown')
    if damaged:
        number, reason = damaged[0]
        notes.append(
            f'{file.name}: {len(damaged):,} damaged lines are left out, the first is line {number:,} '
            f'({reason})'
        )


def check_row(row: Any) -> None:
    """Raises ValueError if a row cannot be shown."""
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ('use', 'prompt')):
        raise ValueError('expected an object with the strings "use" and "prompt"')
    if type(row.get('prompt_id')) not in (int, str) or type(row.get('step')) is not int:
        raise ValueError('"prompt_id" must be an integer or a string, and "step" an integer')
    responses = row.get('responses')
    if (
        not isinstance(responses, list)
        or not responses
        or not all(isinstance(text, str) for text in responses)
    ):
        raise ValueError('"responses" must be a non-empty list of strings')
    lists = [
        *_RESPONSE.values(),
        *(name for name in ('answers', 'pieces', 'logp', 'ratio') if row.get(name) is not None),
    ]
    if any(not isinstance(row.get(name), list) or len(row[name]) != len(responses) for name in lists):
        raise ValueError(f'{", ".join(lists)} must be lists with one entry per response')


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row's numbers for the index.

    `reward` is the mean of the known rewards, None if none is known.
    """
    rewards = [x for x in row['rewards'] if _finite(x)]
    return {
        'use': row['use'],
        'id': row['prompt_id'],
        'G': len(row['responses']),
        'correct': row['verdicts'].count('correct'),
        'reward': round(sum(rewards) / len(rewards), 4) if rewards else None,
        'trained': row['trained'] if type(row.get('trained')) is int else None,
        'sampled': row['step'],
    }


def _responses(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a row's responses in the form that the chunks store."""
    lists = {**_RESPONSE, **({'answer': 'answers'} if row.get('answers') is not None else {})}
    for i, text in enumerate(row['responses']):
        pieces, logp, ratio = ((row.get(name) or {i: None})[i] for name in ('pieces', 'logp', 'ratio'))
        yield {**{name: row[of][i] for name, of in lists.items()}, **tokens(text, pieces, logp, ratio)}


def tokens(text: str, pieces: Any, logp: Any, ratio: Any) -> dict[str, str]:
    """Returns the numbers of a response's T tokens as strings, which a browser parses faster than lists.

    cuts: how many UTF-16 units each token adds to the text; logp: in thousandths; ratio: to four digits; '?'
    if not finite. text: the joined pieces, whose marks for invalid bytes may differ. Returns {} if the pieces
    spell another text, or if a list that is not None has a length other than T.
    """
    if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
        return {}
    spelled = ''.join(pieces)
    if spelled.replace(_BROKEN, '') != text.replace(_BROKEN, ''):
        return {}
    found = {
        'text': spelled,
        'cuts': ' '.join(str(len(p) if p.isascii() else sum(1 + (c > '\uffff') for c in p)) for p in pieces),
    }
    for name, values, spell in (
        ('logp', logp, lambda x: f'{1000 * x:.0f}'),
        ('ratio', ratio, lambda x: f'{x:.4g}'),
    ):
        if values is not None:
            if not isinstance(values, list) or len(values) != len(pieces):
                return {}
            found[name] = ' '.join(spell(x) if _finite(x) else '?' for x in values)
    return found


def _finite(x: Any) -> bool:
    return type(x) in (int, float) and -1e300 < x < 1e300  # an integer may be greater than any float


def excerpts(prompts: list[str]) -> list[str]:
    """Returns the first characters in which the prompts differ, without their common start and end.

    Repeated special tokens are collapsed.
    """
    short = [re.sub(r'(<\|\w+\|>)\1+', r'\1', prompt) for prompt in prompts]
    start, end = 0, 0
    if len(set(short)) > 1:
        start = _shared(short)
        end = _shared([text[start:][::-1] for text in short])
    return [text[start : len(text) - end].strip()[:EXCERPT] for text in short]


def _shared(texts: list[str]) -> int:
    """The length of the common prefix, cut back to the start of a word."""
    shared = commonprefix([min(texts), max(texts)])
    return len(re.sub(r'\w+\Z', '', shared))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _js(data: Any) -> str:
    """Encodes plain data as JavaScript: only ASCII and no '<', so nothing in it ends a script or a line."""
    return json.dumps(data, separators=(',', ':')).replace('<', '\\u003c')
