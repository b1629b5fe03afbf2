"""Every source gives the same problems, images are held by reference alone, and what is wrong is said with file, row and field."""

import io
import json
import os
import random
import re
import struct
import tracemalloc
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hub_stub import folder_files
from PIL import Image

from bapo_jax.tasks import images
from bapo_jax.tasks.geometry.problems import BENCHMARKS, SUFFIX, benchmark, open_image, read_problems, training_problems
from bapo_jax.tasks.geometry import task as geometry
from bapo_jax.tasks.images import MAX_PIXELS


def drawn(seed=0, width=40, height=30, format='PNG'):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue(), pixels


def struct_of(data):
    return {'bytes': data, 'path': None}


def row(seed=0, **changes):
    return {'images': [struct_of(drawn(seed)[0])], 'problem': '<image>Find $x$.', 'answer': str(seed), **changes}


def write(path, rows, **how):
    path.parent.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.Table.from_pylist(rows), path, **how)
    return path


def pixels_of(reference):
    image = open_image(reference)
    assert image.mode == 'RGB'
    return np.asarray(image)


# ---- what is read -----------------------------------------------------------------------------------------------------


def test_a_parquet_file_and_its_images(tmp_path):
    path = write(tmp_path / 'a.parquet', [row(i) for i in range(7)], row_group_size=3)
    problems = training_problems(str(path), limit=0, seed=0)
    assert json.loads(json.dumps(problems)) == problems == benchmark(str(path))
    assert training_problems(str(path), limit=2, seed=5) == problems[:2]
    for i in (6, 0, 3, 2):
        assert {**problems[i], 'images': None} == {'problem': '<image>Find $x$.', 'answers': [str(i)], 'images': None}
        [reference] = problems[i]['images']
        assert (reference['file'], reference['row'], reference['number']) == (str(path), i, 0)
        np.testing.assert_array_equal(pixels_of(reference), drawn(i)[1])


@pytest.mark.parametrize('column', ['images', 'image', 'image_png'])
@pytest.mark.parametrize('shape', [lambda d: d, struct_of, lambda d: [d], lambda d: [struct_of(d)]])
def test_shapes_of_the_image_column(tmp_path, column, shape):
    data, pixels = drawn()
    path = write(tmp_path / 'a.parquet', [{column: shape(data), 'problem': '<image>p', 'answer': 3}])
    [problem] = read_problems(path)
    np.testing.assert_array_equal(pixels_of(problem['images'][0]), pixels)
    assert problem['answers'] == ['3']


def test_two_images_stand_where_the_problem_says(tmp_path):
    images = [struct_of(drawn(i)[0]) for i in (8, 9)]
    [problem] = read_problems(write(tmp_path / 'a.parquet', [row(images=images, problem='Is <image> like <image>?')]))
    for reference, seed in zip(problem['images'], (8, 9), strict=True):
        np.testing.assert_array_equal(pixels_of(reference), drawn(seed)[1])


def test_a_problem_without_placeholder_gets_one_first(tmp_path):
    [problem] = read_problems(write(tmp_path / 'a.parquet', [row(problem='Find $x$.')]))
    assert problem['problem'] == '<image>Find $x$.'


def test_verls_rows_keep_their_instruction(tmp_path):
    prompt = [{'role': 'user', 'content': '<image>Find $x$.' + SUFFIX}]
    rows = [{'prompt': prompt, 'images': row()['images'], 'reward_model': {'style': 'rule', 'ground_truth': '4'}}]
    [problem] = read_problems(write(tmp_path / 'a.parquet', rows))
    assert (problem['problem'], problem['answers'], problem['row']) == (prompt[0]['content'], ['4'], {'ground_truth': '4'})


def test_a_row_may_name_an_image_file_beside_it(tmp_path):
    (tmp_path / 'b.png').write_bytes(drawn(3)[0])
    path = write(tmp_path / 'a.parquet', [row(images=[{'bytes': None, 'path': 'b.png'}])])
    [reference] = read_problems(path)[0]['images']
    height, width, _ = drawn(3)[1].shape
    assert reference == {'file': str(tmp_path / 'b.png'), 'sha256': reference['sha256'], 'width': width, 'height': height}
    np.testing.assert_array_equal(pixels_of(reference), drawn(3)[1])


def test_a_row_names_no_file_outside_the_data_sets_folder(tmp_path):
    """By no path and by no link. Nor does it learn whether there is one."""
    outside, folder = tmp_path / 'private.png', tmp_path / 'data'
    outside.write_bytes(drawn(3)[0])
    folder.mkdir()
    (folder / 'link.png').symlink_to(outside)
    (folder / 'links').symlink_to(tmp_path)
    (folder / 'circle.png').symlink_to(folder / 'circle.png')
    names = [str(outside), '../private.png', 'x/../../private.png', 'link.png', 'links/private.png', '../none.png', '/etc/none', '\0']
    for name in names:
        path = write(folder / 'a.parquet', [row(), row(images=[{'bytes': None, 'path': name}])])
        with pytest.raises(ValueError, match=r'a\.parquet, row 2, "images"\[0\]: the path .* leads out of .*/data, the folder of its f'):
            read_problems(path)
    path = write(folder / 'a.parquet', [row(images=[{'bytes': None, 'path': 'circle.png'}])])
    with pytest.raises(ValueError, match='row 1'):
        read_problems(path)


def test_a_row_may_name_a_file_in_the_hubs_cache_where_all_are_links(tmp_path):
    blobs, folder = tmp_path / 'blobs', tmp_path / 'snapshots' / 'c'
    for place in (blobs, folder):
        place.mkdir(parents=True)
    (blobs / '1').write_bytes(drawn(3)[0])
    write(blobs / '2', [row(images=[{'bytes': None, 'path': 'b.png'}])])
    (folder / 'b.png').symlink_to('../../blobs/1')
    (folder / 'a.parquet').symlink_to('../../blobs/2')
    assert read_problems(folder / 'a.parquet')[0]['images'][0]['file'] == str(folder / 'b.png')


def test_an_image_file_is_read_to_a_limit(tmp_path):
    with (tmp_path / 'b.png').open('wb') as file:
        file.truncate(images.MAX_BYTES + 1)
    with pytest.raises(ValueError, match=r'b\.png: the image file has 268,435,457 bytes, more than the limit of 268,435,456'):
        read_problems(write(tmp_path / 'a.parquet', [row(images=[{'bytes': None, 'path': 'b.png'}])]))


@pytest.mark.parametrize('format', ['JPEG', 'WEBP'])
def test_other_formats(tmp_path, format):
    [problem] = read_problems(write(tmp_path / 'a.parquet', [row(images=[struct_of(drawn(0, format=format)[0])])]))
    assert pixels_of(problem['images'][0]).shape == (30, 40, 3)


def test_what_is_transparent_becomes_white(tmp_path):
    image = Image.new('RGBA', (40, 30), (0, 0, 0, 0))
    image.putpixel((5, 6), (0, 0, 0, 255))
    file = io.BytesIO()
    image.save(file, 'PNG')
    [problem] = read_problems(write(tmp_path / 'a.parquet', [row(images=[struct_of(file.getvalue())])]))
    pixels = pixels_of(problem['images'][0])
    assert pixels[6, 5].tolist() == [0, 0, 0] and (pixels == 255).sum() == 3 * (40 * 30 - 1)


# ---- InterGPS's folders -----------------------------------------------------------------------------------------------


def write_folder(folder, seed=0, **changes):
    folder.mkdir(parents=True)
    data = {'problem_text': 'Find x.', 'annotat_text': 'Find $x$.', 'choices': ['36', '48', '66', '72'], 'answer': 'B', 'id': seed}
    data = {key: value for key, value in {**data, **changes}.items() if value is not None}
    (folder / 'data.json').write_text(json.dumps(data))
    (folder / 'img_diagram.png').write_bytes(drawn(seed)[0])
    return folder


def test_folders_in_the_order_of_their_numbers(tmp_path):
    for i in (10, 9, 0):
        write_folder(tmp_path / 'train' / str(i), seed=i, answer='ABCD'[i % 4])
    write_folder(tmp_path / 'test' / '5', annotat_text=None)
    problems = training_problems(str(tmp_path), limit=0, seed=0)
    assert problems == training_problems(str(tmp_path / 'train'), limit=0, seed=0)
    assert [p['answers'] for p in problems] == [['36'], ['48'], ['66']]
    for problem, seed in zip(problems, (0, 9, 10), strict=True):
        assert problem['problem'] == '<image>Find $x$.'
        np.testing.assert_array_equal(pixels_of(problem['images'][0]), drawn(seed)[1])
    assert read_problems(tmp_path / 'test')[0]['problem'] == '<image>Find x.'


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'answer': 'E'}, r'"answer" must be the letter of one of the "choices", got .E.'),
        ({'answer': None}, r'"answer" must be the letter of one of the "choices", got None'),
        ({'choices': '48'}, r'"answer" must be the letter of one of the "choices", got .B. and .48.'),
        ({'choices': ['1', ' ']}, r'"answer" must be an answer'),
        ({'annotat_text': None, 'problem_text': None}, 'the problem must be a string, got None'),
    ],
)
def test_a_bad_folder_is_named(tmp_path, changes, message):
    write_folder(tmp_path / '0')
    write_folder(tmp_path / '7', **changes)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / '7' / 'data.json')) + ': .*' + message):
        read_problems(tmp_path)


def test_a_folder_without_its_files_is_named(tmp_path):
    with pytest.raises(ValueError, match=r'no ID/data\.json in this folder; give the folder of one split'):
        read_problems(tmp_path)
    (write_folder(tmp_path / '7') / 'img_diagram.png').unlink()
    with pytest.raises(FileNotFoundError, match=r'7/img_diagram\.png: the image cannot be read'):
        read_problems(tmp_path)
    (tmp_path / '7' / 'img_diagram.png').write_bytes(b'GIF')
    with pytest.raises(ValueError, match=r'7/img_diagram\.png: not a readable image'):
        read_problems(tmp_path)
    (tmp_path / '7' / 'img_diagram.png').write_bytes(drawn()[0])
    (tmp_path / '8').mkdir()
    with pytest.raises(ValueError, match=r'8/data\.json: not a readable JSON file'):
        read_problems(tmp_path)


# ---- where sources are looked for -------------------------------------------------------------------------------------


def test_the_hubs_splits(tmp_path, monkeypatch, hub_stub):
    for split, seed in (('train', 1), ('validation', 2), ('test', 3)):
        write(tmp_path / 'data' / f'{split}-00000-of-00001.parquet', [row(seed)])
    hub_stub.repos['datasets/hiyouga/geometry3k'] = {'main': folder_files(tmp_path)}
    monkeypatch.delenv('BAPO_DATA', raising=False)
    names = [*BENCHMARKS, 'hiyouga/geometry3k:test']
    read = [training_problems('hiyouga/geometry3k', limit=0, seed=0), *map(benchmark, names)]
    assert [problem['answers'] for [problem] in read] == [['1'], ['2'], ['3'], ['3']]


def test_an_unreachable_hub_is_said(monkeypatch):
    monkeypatch.delenv('BAPO_DATA', raising=False)
    with pytest.raises(ConnectionError, match=r"task\.train='hiyouga/geometry3k' is not a local file.*HF_HUB_OFFLINE is set"):
        training_problems('hiyouga/geometry3k', limit=0, seed=0)
    with pytest.raises(ConnectionError, match=r"'hiyouga/geometry3k:test'.*BAPO_DATA"):
        benchmark('geo3k_test')


def test_benchmarks_in_bapo_data(tmp_path, monkeypatch):
    monkeypatch.setenv('BAPO_DATA', str(tmp_path))
    with pytest.raises(FileNotFoundError, match='neither geo3k_val.parquet nor a folder geo3k_val'):
        benchmark('geo3k_val')
    write_folder(tmp_path / 'geo3k_val' / '0')
    assert benchmark('geo3k_val')[0]['answers'] == ['48']
    write(tmp_path / 'geo3k_test.parquet', [row(5)])
    assert benchmark('geo3k_test')[0]['answers'] == ['5']
    with pytest.raises(ValueError, match="unknown geometry benchmark 'geo3k'; choose one of geo3k_val, geo3k_test"):
        benchmark('geo3k')


def test_unknown_sources(tmp_path):
    with pytest.raises(ValueError, match=r"task\.train is 'geo'; expected a \.parquet file"):
        training_problems('geo', limit=0, seed=0)
    with pytest.raises(FileNotFoundError, match=r'none\.parquet: no such file'):
        training_problems(str(tmp_path / 'none.parquet'), limit=0, seed=0)
    (tmp_path / 'a.jsonl').write_text('{}')
    with pytest.raises(ValueError, match=r'a\.jsonl: expected a \.parquet file'):
        training_problems(str(tmp_path / 'a.jsonl'), limit=0, seed=0)
    (tmp_path / 'b.parquet').write_bytes(b'PAR1')
    with pytest.raises(ValueError, match=r'b\.parquet: not a readable parquet file'):
        read_problems(tmp_path / 'b.parquet')
    pa.parquet.write_table(pa.Table.from_pylist([row()]).slice(0, 0), tmp_path / 'c.parquet')
    with pytest.raises(ValueError, match=r'c\.parquet: no rows; expected columns "images"'):
        read_problems(tmp_path / 'c.parquet')


# ---- bad rows ---------------------------------------------------------------------------------------------------------


def header(width, height):
    """A PNG of that size whose pixels are missing: only its header can be read."""
    body = b'IHDR' + struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    start = b'\x89PNG\r\n\x1a\n' + struct.pack('>I', 13) + body + struct.pack('>I', zlib.crc32(body))
    return start + struct.pack('>I', 0) + b'IDAT' + struct.pack('>I', zlib.crc32(b'IDAT'))


def flipped(data):
    return data[:200] + bytes([data[200] ^ 255]) + data[201:]


GOOD = drawn()[0]
BAD = [
    ({'images': []}, r'"images" is empty'),
    ({'images': None}, r'"images" is empty'),
    ({'images': [None]}, r'"images"\[0\]: expected the encoded bytes of an image, or an object .*, got None'),
    ({'images': [struct_of(b'')]}, r'"images"\[0\]: expected the encoded bytes of an image'),
    ({'images': [{'bytes': None, 'path': 'absent.png'}]}, r'"images"\[0\]: expected .*absent\.png'),
    ({'images': [struct_of(b'no image')]}, r'"images"\[0\]: not a readable image in one of the formats PNG, JPEG, WEBP'),
    ({'images': [struct_of(GOOD[:500])]}, r'"images"\[0\]: the image is damaged or truncated'),
    ({'images': [struct_of(flipped(GOOD))]}, r'"images"\[0\]: the image is damaged or truncated'),
    ({'images': [struct_of(header(0, 5))]}, r'"images"\[0\]: not a readable image in one of the formats'),
    ({'images': [struct_of(drawn(width=27)[0])]}, r'"images"\[0\]: the image is 27 x 30; each side must have at least 28 pixels'),
    ({'images': [struct_of(drawn(width=28 * 201, height=28)[0])]}, r'the image is 5628 x 28; .*200 times'),
    ({'images': [struct_of(header(8192, 4097))]}, r'the image is 8192 x 4097, more than the limit of 33,554,432 pixels'),
    ({'images': [struct_of(header(60_000, 60_000))]}, r'the limit is 33,554,432 pixels\. Scale the image down or drop it'),
    ({'images': [struct_of(GOOD)] * 2}, r'the problem has 1 <image> but 2 in "images"'),
    ({'images': [struct_of(GOOD)] * 2, 'problem': 'p'}, r'the problem has 0 <image> but 2 in "images"'),
    ({'problem': '<image> and <image>'}, r'the problem has 2 <image> but 1 in "images"'),
    ({'problem': '<|image_pad|>p'}, r'the problem contains <\|image_pad\|>, which the model would read as a part of an image; write <image> instead'),
    ({'problem': ' '}, 'the problem must be a string'),
    ({'answer': ' '}, '"answer" must be an answer'),
    ({'answer': None}, '"answer" must be an answer'),
]


@pytest.mark.parametrize(('changes', 'message'), BAD)
def test_a_bad_row_is_named_with_its_field(tmp_path, changes, message):
    assert MAX_PIXELS == 33_554_432
    path = write(tmp_path / 'a.parquet', [row(), row(**changes)])
    with pytest.raises(ValueError, match=re.escape(str(path)) + ', row 2[:,] .*' + message):
        training_problems(str(path), limit=1, seed=0)


@pytest.mark.parametrize('column', ['images', 'problem', 'answer'])
def test_a_missing_column_is_named(tmp_path, column):
    path = write(tmp_path / 'a.parquet', [{k: v for k, v in row().items() if k != column}])
    with pytest.raises(ValueError, match=rf'a\.parquet, row 1: column ["\']{column}["\'] is missing; the .* has '):
        read_problems(path)


# ---- references -------------------------------------------------------------------------------------------------------


def test_a_changed_file_is_noticed(tmp_path):
    path = write(tmp_path / 'a.parquet', [row(i) for i in range(4)])
    references = [p['images'][0] for p in read_problems(path)]
    for reference in references:
        open_image(reference)
    write(path, [row(0), row(7), row(2)])
    os.utime(path, ns=(1, 1))  # a clock may be too coarse to tell the two
    open_image(references[0])
    with pytest.raises(ValueError, match=r'a\.parquet, row 2, image 1: the image has changed since the problems were read'):
        open_image(references[1])
    with pytest.raises(ValueError, match=r'a\.parquet, row 4, image 1: the file now has 3 rows of images'):
        open_image(references[3])
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r'a\.parquet, row 1, image 1: no such file'):
        open_image(references[0])


def test_a_changed_image_file_is_noticed(tmp_path):
    write_folder(tmp_path / '0')
    [reference] = read_problems(tmp_path)[0]['images']
    file = tmp_path / '0' / 'img_diagram.png'
    file.write_bytes(drawn(1)[0])
    with pytest.raises(ValueError, match=r'img_diagram\.png: the image has changed'):
        open_image(reference)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r'img_diagram\.png: the image cannot be read'):
        open_image(reference)


def test_a_training_set_of_images_is_never_in_memory(tmp_path):
    """2,101 rows of 10 kB images, as many as Geometry3K trains on, cost what their texts and references do."""
    ten = pa.Table.from_pylist([row(i, images=[struct_of(drawn(i, 60, 56)[0])]) for i in range(10)])
    path = tmp_path / 'a.parquet'
    with pa.parquet.ParquetWriter(path, ten.schema, use_dictionary=False) as file:
        for first in range(0, 2101, 1000):
            file.write_table(ten.take([i % 10 for i in range(first, min(first + 1000, 2101))]), row_group_size=1000)
    assert path.stat().st_size > 20 << 20
    pool = pa.default_memory_pool()
    held, most = pool.bytes_allocated(), max(pool.max_memory(), pool.bytes_allocated() + (4 << 20))
    tracemalloc.start()
    problems = read_problems(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(problems) == 2101 and len(json.dumps(problems).replace(str(path), '')) < 450_000
    assert peak < 6 << 20, f'{peak:,} bytes at most'
    assert pool.bytes_allocated() == held and pool.max_memory() <= most
    for i in random.Random(0).sample(range(2101), 5):
        np.testing.assert_array_equal(pixels_of(problems[i]['images'][0]), drawn(i % 10, 60, 56)[1])


@pytest.mark.slow
def test_accepted_answers_are_tried_when_they_are_read(tmp_path, caplog):
    """Those that names decide need no other judge."""
    answers = ['5', '\\frac{', '\\overline{AB} \\parallel \\overline{CD}', '12 \\text{ cm}', '\\frac{']
    file = str(write(tmp_path / 'a.parquet', [row(i, answer=answer) for i, answer in enumerate(answers)]))
    assert [p['answers'] for p in geometry.training_problems(file, limit=0, seed=0)] == [[answers[i]] for i in (0, 2, 3)]
    assert len(geometry.benchmark(file)) == 5
    assert ['left out of training' in m for m in caplog.messages] == [True, False]
    assert all('2 of 5 problems have no accepted answer that can be parsed' in m for m in caplog.messages)
