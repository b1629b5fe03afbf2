"""The rollout viewer's files: the index is what the rows say, the chunks hold every text and token, and damage becomes a note."""

import json
import random
import re
import tracemalloc

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings, strategies as st
from making import make_run

from bapo_jax.report import viewer
from bapo_jax.report.page import write_report
from bapo_jax.report.viewer import LIMIT_MB, excerpts, tokens, write_viewer
from bapo_jax.run.log import responses
from benchmarks.host.viewer import row, write_rows

NEW = 'answers', 'trained', 'pieces', 'logp', 'ratio'


def some_rows(*steps, groups=3, G=4, length=20):
    rng = random.Random(3)
    return {step: [row(rng, step, G, length) for _ in range(groups)] for step in steps}


def write(run, rows):
    for step, of in rows.items():
        write_rows(run, step, of)


def index_of(folder):
    text = (folder / 'index.js').read_text('utf-8')
    return json.loads(re.fullmatch(r'start\((.*)\)\n', text, re.S)[1])


def parts_of(folder):
    """The parts of all chunks by (group, place), in the chunks' order, and the numbers of the chunks that hold each group."""
    index, parts, chunks = index_of(folder), {}, {}
    for number in range(index['chunks']):
        text = (folder / 'chunks' / f'{number}.js').read_text('utf-8')
        build, told, body = re.fullmatch(r'chunk\("(\w+)",(\d+),(.*)\)\n', text, re.S).groups()
        assert (build, int(told)) == (index['build'], number)
        for group, place, part in json.loads(body):
            assert (group, place) not in parts
            parts[group, place] = part
            chunks.setdefault(group, []).append(number)
    return parts, chunks


def cut(text, cuts):
    """The pieces of a text whose UTF-16 lengths are given, as a browser would cut it."""
    units, pieces, at = text.encode('utf-16-le', 'surrogatepass'), [], 0
    for length in map(int, cuts.split()):
        pieces.append(units[2 * at : 2 * (at + length)].decode('utf-16-le', 'surrogatepass'))
        at += length
    assert 2 * at == len(units)
    return pieces


def made(tmp_path, rows, **limits):
    write(tmp_path / 'run', rows)
    done = write_viewer(tmp_path / 'run', tmp_path / 'viewer', 'run', **limits)
    return done, index_of(tmp_path / 'viewer')


@pytest.mark.parametrize('steps', [(1,), (4, 8, 12), (3, 20, 21, 1000)], ids=['one step', 'steps', 'gaps'])
def test_the_index_is_what_the_rows_say(tmp_path, steps):
    rows = some_rows(*steps)
    rows[steps[0]][1]['rewards'] = [None] * 4
    rows[steps[-1]][0]['rewards'] = [0.25, None, 1, -1.5]
    done, index = made(tmp_path, rows)
    flat = [(step, i, r) for step in reversed(steps) for i, r in enumerate(rows[step], start=1)]
    assert (done.path, done.notes) == (tmp_path / 'viewer' / 'index.html', [])
    assert (done.steps, done.groups, done.responses) == (len(steps), 3 * len(steps), 12 * len(steps))
    c = index['columns']
    assert list(zip(c['step'], c['row'], strict=True)) == [(step, i) for step, i, _ in flat]
    for name, of in {'use': 'use', 'id': 'prompt_id', 'trained': 'trained', 'sampled': 'step'}.items():
        assert c[name] == [r[of] for *_, r in flat]
    assert c['correct'] == [sum(v == 'correct' for v in r['verdicts']) for *_, r in flat] and set(c['G']) == {4}
    for mean, (*_, r) in zip(c['reward'], flat, strict=True):
        known = [x for x in r['rewards'] if x is not None]
        assert mean == (pytest.approx(sum(known) / len(known), abs=5e-5) if known else None)


def test_the_chunks_hold_every_text_and_token_once(tmp_path, monkeypatch):
    """Also where a group is longer than a chunk; a chunk is as long as said, or holds one part."""
    monkeypatch.setattr(viewer, 'CHUNK_BYTES', 2000)
    rows = some_rows(1, 2, groups=4, length=60) | some_rows(3, length=2)
    _, index = made(tmp_path, rows)
    parts, chunks = parts_of(tmp_path / 'viewer')
    c = index['columns']
    assert len(set(c['first'])) > 5 and any(a < b for a, b in zip(c['first'], c['last'], strict=True))
    for file in (tmp_path / 'viewer' / 'chunks').iterdir():
        assert len(file.read_bytes()) < 2100 or file.read_text().count('\n') == 3
    for g, (step, number) in enumerate(zip(c['step'], c['row'], strict=True)):
        r = rows[step][number - 1]
        assert (min(chunks[g]), max(chunks[g])) == (c['first'][g], c['last'][g])
        assert parts[g, -1] == {'prompt': r['prompt'], 'truth': json.dumps(r['ground_truth'])}
        for i in range(4):
            part = parts[g, i]
            told = [part[k] for k in ('text', 'verdict', 'reward', 'finish', 'version', 'answer')]
            assert told == [r[k][i] for k in ('responses', 'verdicts', 'rewards', 'finish', 'versions', 'answers')]
            assert cut(part['text'], part['cuts']) == r['pieces'][i]
            assert [int(x) / 1000 for x in part['logp'].split()] == r['logp'][i]
            assert ('ratio' in part) == (r['ratio'] is not None)
            if r['ratio']:
                assert list(map(float, part['ratio'].split())) == pytest.approx(r['ratio'][i], rel=1e-3)
    assert len(parts) == 5 * len(c['step'])


@given(st.lists(st.text(st.characters(codec=None), max_size=3)))
def test_tokens_are_cut_where_a_browser_counts(pieces):
    """Surrogate pairs, lone surrogates and pieces without text included."""
    text = ''.join(pieces)
    found = tokens(text, pieces, [-0.5] * len(pieces), None)
    lengths = [len(p.encode('utf-16-le', 'surrogatepass')) // 2 for p in pieces]
    assert found == {'text': text, 'cuts': ' '.join(map(str, lengths)), 'logp': ' '.join(['-500'] * len(pieces))}


def test_numbers_that_are_not_finite_are_unknown_and_lists_that_do_not_fit_leave_no_tokens():
    inf = float('inf')
    found = tokens('ab', ['a', 'b'], [-0.0004, None], [inf, 1.23456])
    assert found == {'text': 'ab', 'cuts': '1 1', 'logp': '-0 ?', 'ratio': '? 1.235'}
    for wrong in (['a'], ['a', 'c'], 'ab', None, ['a', 'b', None]):
        assert tokens('ab', wrong, None, None) == {}
    assert tokens('ab', ['a', 'b'], [-1.0], None) == tokens('ab', ['a', 'b'], [-1, -1], {'a': 1}) == {}


def test_broken_bytes_may_be_marked_otherwise():
    assert tokens('a\ufffd\ufffdb', ['a', '\ufffd', 'b'], None, None) == {'text': 'a\ufffdb', 'cuts': '1 1 1'}


def test_tokens_that_do_not_fit_are_told(tmp_path):
    rows = some_rows(5)
    rows[5][1]['pieces'][2][0] += 'x'
    rows[5][2]['logp'][0].pop()
    done, index = made(tmp_path, rows)
    assert done.notes == index['notes']
    assert done.notes == ['000005.jsonl.zst: 2 responses have no colours, since their tokens do not match their texts']
    assert index['coloured'] == 10


def test_rows_of_an_older_version_are_shown_without_tokens(tmp_path):
    rows = {2: [{k: v for k, v in r.items() if k not in NEW} for r in some_rows(2)[2]]}
    done, index = made(tmp_path, rows)
    assert (done.groups, done.notes, index['coloured'], index['columns']['trained']) == (3, [], 0, [None] * 3)
    part = parts_of(tmp_path / 'viewer')[0][0, 0]
    assert set(part) == {'text', 'verdict', 'reward', 'finish', 'version'}


def text_of(rows):
    return ''.join(json.dumps(r) + '\n' for r in rows)


DAMAGES = {
    'not JSON': lambda rows: text_of(rows) + '{"use": "x1", \n',
    'not UTF-8': lambda rows: text_of(rows).encode() + b'"\xff\xfe"\n',
    'no object': lambda rows: '[]\n' + text_of(rows),
    'deep': lambda rows: '[' * 100_000 + '\n' + text_of(rows),
    'a field lacks': lambda rows: text_of([{k: v for k, v in rows[0].items() if k != 'verdicts'}, *rows]),
    'too few verdicts': lambda rows: text_of([rows[0] | {'verdicts': ['wrong']}, *rows]),
    'no responses': lambda rows: text_of([rows[0] | {'responses': []}, *rows]),
    'a response is a number': lambda rows: text_of([rows[0] | {'responses': [1, 2, 3, 4]}, *rows]),
    'pieces of fewer': lambda rows: text_of([rows[0] | {'pieces': [[]]}, *rows]),
    'no step': lambda rows: text_of([rows[0] | {'step': 'one'}, *rows]),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_line_is_told_and_the_others_are_shown(tmp_path, damage):
    rows = some_rows(1, 2)
    write(tmp_path / 'run', rows)
    data = DAMAGES[damage](rows[2])
    file = tmp_path / 'run' / 'rollouts' / '000002.jsonl.zst'
    file.write_bytes(zstandard.compress(data if isinstance(data, bytes) else data.encode()))
    done = write_viewer(tmp_path / 'run', tmp_path / 'viewer', 'run')
    assert done.groups == 6 and len(done.notes) == 1
    assert re.fullmatch(r'000002\.jsonl\.zst: 1 damaged lines are left out, the first is line [14] \(.{10,}\)', done.notes[0])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_row_with_any_value_in_its_place_is_shown_or_told(tmp_path, data):
    good = some_rows(1, groups=1, G=2, length=2)[1][0]
    name = data.draw(st.sampled_from(sorted(good)))
    bad = good | {name: data.draw(JSON | st.lists(JSON, min_size=2, max_size=2) | st.just([[1, 'a'], [None, {}]]))}
    done, index = made(tmp_path, {1: [bad, good]})
    left_out = sum('1 damaged lines are left out, the first is line 1' in note for note in done.notes)
    assert done.groups == 2 - left_out == len(index['columns']['row']) and index['columns']['row'][-1] == 2
    parts_of(tmp_path / 'viewer')


@pytest.mark.parametrize('keep', [0, 4, 0.5, 0.95])
def test_a_file_cut_short_is_told_and_the_other_steps_are_shown(tmp_path, keep):
    write(tmp_path / 'run', some_rows(1, groups=2) | some_rows(2, groups=400))
    file = tmp_path / 'run' / 'rollouts' / '000002.jsonl.zst'
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    done = write_viewer(tmp_path / 'run', tmp_path / 'viewer', 'run')
    assert 2 <= done.groups < 402 and (keep != 0.95 or done.groups > 200)
    assert done.notes[-1].startswith('000002.jsonl.zst is damaged (cut short)')


def test_a_line_is_read_to_its_limit_and_the_rows_before_are_shown(tmp_path, monkeypatch):
    """64 MB in 6 kB: no piece of it makes more than 16 MiB, and no line is longer than the limit."""
    monkeypatch.setattr(responses, 'MOST_ROW_BYTES', 2**20)
    file = tmp_path / 'a.jsonl.zst'
    file.write_bytes(zstandard.compress(b'1\n' + b' ' * 2**26 + b'\n'))
    assert file.stat().st_size < 10_000
    lines = responses.rollout_lines(file)
    assert next(lines) == b'1'
    tracemalloc.start()
    with pytest.raises(EOFError, match='a line is longer than 1 MiB'):
        next(lines)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**26


def test_what_is_no_zstandard_file_is_told(tmp_path):
    write(tmp_path / 'run', some_rows(1))
    (tmp_path / 'run' / 'rollouts' / '000002.jsonl.zst').write_text('text')
    (tmp_path / 'run' / 'rollouts' / '000003.jsonl.zst').mkdir()
    done = write_viewer(tmp_path / 'run', tmp_path / 'viewer', 'run')
    assert done.groups == 3 and [note[:26] for note in done.notes] == ['000003.jsonl.zst is damage', '000002.jsonl.zst is damage']


def test_the_newest_rows_are_taken_up_to_the_limit(tmp_path):
    rows = some_rows(10, 20, 30, groups=10)
    whole, _ = made(tmp_path, rows)
    size = sum(f.stat().st_size for f in (tmp_path / 'viewer' / 'chunks').iterdir()) / 1e6
    part, index = made(tmp_path, rows, limit_mb=size / 2)
    c = index['columns']
    assert whole.groups == 30 and part.notes == index['notes'] and len(part.notes) == 1
    assert c['step'][:10] == [30] * 10 and set(c['step'][10:]) == {20} and 13 <= part.groups <= 17
    line = part.groups - 10 + 1
    assert f'step 20 from line {line} on, and 1 older steps; raise --rollouts_mb for more' in part.notes[0]
    none = write_viewer(tmp_path / 'run', tmp_path / 'viewer', 'run', limit_mb=0)
    assert none.path is None and 'step 30 from line 1 on, and 2 older steps' in none.notes[0]


def test_an_older_viewer_is_replaced_wholly_and_nothing_else_is(tmp_path):
    folder = tmp_path / 'viewer'
    made(tmp_path, some_rows(1))
    first = index_of(folder)['build']
    (folder / 'chunks' / '77.js').write_text('old')
    (tmp_path / 'viewer.partial').mkdir()  # as a writer that was killed leaves it
    made(tmp_path, some_rows(1))
    assert not (folder / 'chunks' / '77.js').exists() and index_of(folder)['build'] != first
    assert sorted(f.name for f in tmp_path.iterdir()) == ['run', 'viewer']
    for file in (tmp_path / 'run' / 'rollouts').iterdir():
        file.unlink()
    assert write_viewer(tmp_path / 'run', folder, 'run').path is None and not folder.exists()
    folder.mkdir()
    (folder / 'mine.txt').touch()
    with pytest.raises(ValueError, match='is not a rollout viewer; move it, or'):
        write_viewer(tmp_path / 'run', folder, 'run')
    assert (folder / 'mine.txt').exists()


def test_files_that_are_being_written_and_steps_that_sampled_nothing_are_passed_over(tmp_path):
    write(tmp_path / 'run', some_rows(1) | {2: []})
    for name in ('000002.jsonl.zst.partial', 'x.jsonl.zst', '-3.jsonl.zst'):
        (tmp_path / 'run' / 'rollouts' / name).write_bytes(b'\0')
    done = write_viewer(tmp_path / 'run', tmp_path / 'viewer', 'run')
    assert (done.steps, done.notes) == (1, [])


def test_nothing_of_a_model_can_end_a_script_or_a_line(tmp_path):
    rows = some_rows(1)
    hostile = '</script><script>alert(1)</script><!-- \u2028\u2029 \ud800 🙂 \\ " \0 ]]>'
    for name in ('prompt', 'prompt_id', 'use'):
        rows[1][0][name] = hostile
    rows[1][0] |= {name: [hostile] * 4 for name in ('responses', 'answers', 'verdicts')} | {'ground_truth': {hostile: hostile}}
    rows[1][0] |= {'pieces': [list(hostile)] * 4, 'logp': [[-1.0] * len(hostile)] * 4, 'ratio': None}
    made(tmp_path, rows)
    assert parts_of(tmp_path / 'viewer')[0][0, 0]['text'] == hostile
    for file in [tmp_path / 'viewer' / 'index.js', *(tmp_path / 'viewer' / 'chunks').iterdir()]:
        text = file.read_text('ascii')
        assert '<' not in text and all(' ' <= c or c == '\n' for c in text)


def test_an_excerpt_is_where_a_prompt_differs():
    head, tail = '<|user|>What is ', ' in metres?<|end|>'
    assert excerpts([f'{head}{x}{tail}' for x in ('12 + 3', '12 + 4', '9')]) == ['12 + 3', '12 + 4', '9']
    assert excerpts(['<|pad|><|pad|><|pad|>one', '<|pad|>two']) == ['one', 'two']
    assert excerpts(['same']) == excerpts(['same', 'same'])[:1] == ['same'] and excerpts([]) == []
    assert excerpts(['is 35?', 'is 45?', 'is 355?']) == ['35', '45', '355'] and excerpts(['a', 'ab']) == ['a', 'ab']
    assert len(excerpts(['x' * 1000])[0]) == 60


def test_the_report_links_to_a_viewer_of_each_run_that_has_rollouts(tmp_path):
    runs = [make_run(tmp_path / name, [{'step': 1}]) for name in ('a "b" & <c>?#%20', 'a-b-c', 'none')]
    for run in runs[:2]:
        write(run, some_rows(1, 2))
    (runs[1] / 'rollouts' / '000001.jsonl.zst').write_text('no')
    page = write_report(runs, tmp_path / 'all.html').read_text('utf-8')
    links = re.findall(r'<a href="(all/[^"]+)">Rollouts</a>: prompts and responses of (\d) steps', page)
    assert [int(steps) for _, steps in links] == [2, 1] and len({link for link, _ in links}) == 2
    assert all((tmp_path / link).is_file() for link, _ in links)
    assert 'Rollouts: 000001.jsonl.zst is damaged' in page
    alone = write_report(runs[:1])
    link = re.search(r'<a href="(report/[^"]+)">Rollouts</a>', alone.read_text('utf-8'))[1]
    assert (alone.parent / link).is_file() and LIMIT_MB == 256
    assert 'Rollouts</a>' not in write_report(runs[2:]).read_text('utf-8')
