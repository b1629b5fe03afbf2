"""Images held by reference: where one is, the hash of its encoded bytes, and its size in pixels. None stays in memory.

    {'file': path, 'row': 0, 'number': 0, …}     a row of a parquet file and which of its images, both counted from 0
    {'file': path, …}                            an image file
    {'figure': {'kind': 'angles', …}, …}         a figure that is drawn from its description (figures.py)
    {…, 'sha256': hex, 'width': 640, 'height': 480}

`row_images` makes references while a file is read, and checks what they stand for. `open_image` reads one again. A figure's hash is
of its pixels.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import io
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from PIL import Image

from bapo_jax.tasks.figures import draw, pixels_hash
from bapo_jax.tasks.jsonl import short, shown
from bapo_jax.tasks.parquet import rows_in

FORMATS = ('PNG', 'JPEG', 'WEBP')  # Pillow has readers that start other programs
COLUMNS = ('images', 'image', 'image_png')  # the first one present holds the images
MIN_SIDE = 28  # pixels: what one token of Qwen2.5-VL covers; its first image processors refuse less
MAX_ASPECT = 200  # the longer side by the shorter: Qwen2.5-VL's image processor refuses more
MAX_PIXELS = 1 << 25  # 100 MB as RGB, and eight times what EasyR1 passes on
MAX_BYTES = 1 << 28  # of an image file: twice what so many pixels take without compression

# {'file': str, 'sha256': str, 'width': int, 'height': int}, in a parquet file also 'row' and 'number'; or 'figure' for 'file'
Reference = dict


def image_column(names: list[str]) -> str | None:
    """Which of a file's columns holds the images."""
    return next((name for name in COLUMNS if name in names), None)


def row_images(cell: Any, path: Path, row: int, column: str) -> list[Reference]:
    """References to the images of a parquet file's row, each decoded once to check it.

    `cell` is one image or a list of them. Raises ValueError, which names file, row and field, where one cannot be used.
    """
    where = f'{path}, row {row + 1}'
    images = cell if isinstance(cell, list) else [cell]
    if cell is None or not images:
        raise ValueError(f'{where}: "{column}" is empty; every problem needs an image, so fill it in or drop the row')
    references = []
    for number, image in enumerate(images):
        place = f'{where}, "{column}"[{number}]'
        data, file = _content(image, path, place)
        if file is not None:
            references.append(file_image(file))
        else:
            references.append({'file': os.path.abspath(path), 'row': row, 'number': number, **_checked(data, place)})
    return references


def file_image(path: Path) -> Reference:
    """A reference to an image file, which is decoded once to check it. Raises ValueError or FileNotFoundError."""
    return {'file': os.path.abspath(path), **_checked(_file_bytes(path), str(path))}


def open_image(reference: Reference) -> Image.Image:
    """The image, RGB; what is transparent becomes white.

    Raises ValueError where the file has changed since the reference was made, or a figure is drawn otherwise than then. Raises
    FileNotFoundError where the file is gone. An image in a parquet file costs the reading of its row group, of which Hugging Face's
    image data sets have one for every 100 rows.
    """
    if 'figure' in reference:
        return _drawn(reference)
    path = Path(reference['file'])
    if 'row' in reference:
        where = f'{path}, row {reference["row"] + 1}, image {reference["number"] + 1}'
        data = _parquet_bytes(path, reference['row'], reference['number'], where)
    else:
        where, data = str(path), _file_bytes(path)
    if _hash(data) != reference['sha256']:
        raise ValueError(
            f'{where}: the image has changed since the problems were read (its sha256 is no longer {reference["sha256"][:12]}...); '
            'put the file back, or start anew'
        )
    return decode(data, where)


def _drawn(reference: Reference) -> Image.Image:
    picture = draw(reference['figure'])
    if pixels_hash(picture) != reference['sha256']:
        raise ValueError(
            f'figure {shown(reference["figure"])}: it is drawn otherwise than when the problems were made (its sha256 is no longer '
            f'{reference["sha256"][:12]}...); install the Pillow of then, or start anew'
        )
    return picture


def decode(data: bytes, where: str) -> Image.Image:
    """The image in encoded bytes, RGB on white. The header's size is checked before anything is decoded.

    Raises ValueError, which begins with `where`.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ValueError(f'{where}: {short(error)}; at most {MAX_PIXELS:,} pixels are read: scale it down or drop it') from None
    except Exception as error:  # damaged bytes can fail in any way inside a reader
        raise ValueError(
            f'{where}: not an image in the formats {", ".join(FORMATS)}, or one of zero size ({short(error)}); mend or drop it'
        ) from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ValueError(
            f'{where}: the image is {width} x {height}, at most {MAX_PIXELS:,} pixels are read; scale it down or drop it'
        )
    if min(width, height) < MIN_SIDE or max(width, height) > MAX_ASPECT * min(width, height):
        raise ValueError(
            f'{where}: the image is {width} x {height}; both sides need {MIN_SIDE} pixels or more, and the longer at most '
            f'{MAX_ASPECT} times the shorter: pad it or drop it'
        )
    try:
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image.convert('RGBA'))
        return image.convert('RGB')
    except Exception as error:  # as above
        raise ValueError(f'{where}: the image is damaged or cut short ({short(error)}); mend or drop it') from error


def _checked(data: bytes, where: str) -> dict:
    """What a reference says of an image beside its place."""
    image = decode(data, where)
    return {'sha256': _hash(data), 'width': image.width, 'height': image.height}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _content(image: Any, path: Path, place: str) -> tuple[bytes, None] | tuple[None, Path]:
    """The encoded bytes of one image of a cell, or the file that it names, which is looked for beside `path`.

    A row is data from outside, so it may name a file of its data set and no other file of the machine.
    """
    data, name = (image.get('bytes'), image.get('path')) if isinstance(image, dict) else (image, None)
    if isinstance(data, bytes) and data:
        return data, None
    if not data and isinstance(name, str) and name:
        if not _lies_below(path.parent / name, path):
            raise ValueError(
                f'{place}: the path {shown(name)} leads out of {path.parent}, the folder of its file, and only images below that '
                'are read; copy the image there and name it from there, or drop the row'
            )
        if (file := path.parent / name).is_file():
            return None, file
    raise ValueError(
        f'{place}: expected encoded bytes, or an object with "bytes" or the "path" of a file beside this one, got {shown(image)}; '
        'fill it in or drop the row'
    )


def _lies_below(file: Path, data_set: Path) -> bool:
    """Whether a file is below the folder of a data set's file, links followed; in the hub's cache both are links."""
    try:
        folders = data_set.parent.resolve(), data_set.resolve().parent
        return any(file.resolve().is_relative_to(folder) for folder in folders)
    except (OSError, RuntimeError, ValueError):  # a circle of links, or no name of a file
        return False


def _file_bytes(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(f'{path}: the image file has {size:,} bytes, at most {MAX_BYTES:,} are read; scale it down or drop it')
        return path.read_bytes()
    except OSError as error:
        raise FileNotFoundError(f'{path}: the image cannot be read ({short(error)}); put the file back, or start anew') from error


_reading = threading.Lock()  # a ParquetFile serves one reader at a time


def _parquet_bytes(path: Path, row: int, number: int, where: str) -> bytes:
    try:
        state = path.stat()
        with _reading:
            file, column, ends = _opened(path, state.st_mtime_ns, state.st_size)
            group = bisect.bisect_right(ends, row)
            if group == len(ends) or column is None:
                raise ValueError(f'{where}: the file has {ends[-1] if ends else 0} rows of images; put back the one that was read')
            cells = file.read_row_group(group, columns=[column], use_threads=False).column(0)
        cell = cells[row - ends[group]].as_py()
    except FileNotFoundError as error:
        raise FileNotFoundError(f'{where}: no such file; put it back, or start anew') from error
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f'{where}: the file cannot be read ({short(error)}); put back the one that was read') from error
    images = cell if isinstance(cell, list) else [cell]
    if cell is None or number >= len(images):
        raise ValueError(f'{where}: the row has no such image; put back the file that was read')
    return _content(images[number], path, where)[0] or b''


@functools.lru_cache(maxsize=4)  # training, validation, test; the time and size of a file tell a new one from the one cached
def _opened(path: Path, changed_ns: int, size: int) -> tuple[pyarrow.parquet.ParquetFile, str | None, list[int]]:
    """An open file, its column of images, and the row after the last one of each row group."""
    file = pyarrow.parquet.ParquetFile(path)
    rows = (file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups))
    return file, image_column(file.schema_arrow.names), list(itertools.accumulate(rows))


def parquet_rows(path: Path, wanted: set[str], at_once: int = 16) -> Iterator[tuple[int, str, dict]]:
    """Yields (row counted from 0, name of the image column, row with its images and the columns `wanted`).

    Only `at_once` rows are in memory at a time. Raises ValueError, which names the file, where it cannot be read or has no images.
    """
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20) as file:  # a column is read in pieces, not whole
            names = file.schema_arrow.names
            if (column := image_column(names)) is None:
                raise ValueError(
                    f'{path}, row 1: column "images" is missing; the file has {short(", ".join(names))}; rename or add it'
                )
            for batch in file.iter_batches(at_once, columns=[n for n in names if n in wanted or n == column], use_threads=False):
                for values in rows_in(batch):
                    # errors name the columns of the file, whether they are read or not
                    yield row, column, {**dict.fromkeys(names), **values}
                    row += 1
    except UnicodeDecodeError as error:
        raise ValueError(f'{path}, row {row + 1} or soon after: not UTF-8 text; save the file as UTF-8') from error
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f'{path}: not a readable parquet file ({short(error)}); fetch or write it again') from error
