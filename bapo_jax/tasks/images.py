"""Images held by reference: location, hash of the encoded bytes, size in pixels. No image stays in memory.

    {'file': path, 'row': 0, 'number': 0, …}     a row of a parquet file and one of its images, counted from 0
    {'file': path, …}                            an image file
    {'figure': {'kind': 'angles', …}, …}         a figure drawn from its description (diagrams/pictures.py)
    {…, 'sha256': hex, 'width': 640, 'height': 480}

`row_images` makes references while a file is read, and checks the images. `open_image` reads an image again.
The hash of a figure is that of its pixels.
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

from bapo_jax.tasks.diagrams.pictures import draw_diagram, pixels_hash
from bapo_jax.tasks.jsonl import short, shown
from bapo_jax.tasks.parquet import rows_in

FORMATS = ('PNG', 'JPEG', 'WEBP')  # only these, since some of Pillow's readers start other programs
IMAGE_COLUMNS = ('images', 'image', 'image_png')  # the first one present holds the images
MIN_SIDE = 28  # pixels: the side of one Qwen2.5-VL token; its first image processors refuse smaller images
MAX_ASPECT = 200  # longer side / shorter side: Qwen2.5-VL's image processor refuses more
MAX_PIXELS = 1 << 25  # 100 MB as RGB, and eight times what EasyR1 passes on
MAX_BYTES = 1 << 28  # of an image file: twice the uncompressed size of MAX_PIXELS

# {'file': str, 'sha256': str, 'width': int, 'height': int}; in a parquet file also 'row' and 'number'.
# A figure has 'figure' instead of 'file'.
Reference = dict


def image_column(names: list[str]) -> str | None:
    """Returns the column that holds a file's images, or None."""
    return next((name for name in IMAGE_COLUMNS if name in names), None)


def row_images(cell: Any, path: Path, row: int, column: str) -> list[Reference]:
    """Returns references to the images in a row of a parquet file, and decodes each image once to check it.

    `cell` is one image or a list of them. Raises ValueError, naming file, row and field, if an image cannot
    be used.
    """
    where = f'{path}, row {row + 1}'
    images = cell if isinstance(cell, list) else [cell]
    if cell is None or not images:
        raise ValueError(
            f'{where}: "{column}" is empty; every problem needs an image, so fill it in or drop the row'
        )
    references = []
    for number, image in enumerate(images):
        place = f'{where}, "{column}"[{number}]'
        data, file = _content(image, path, place)
        if file is not None:
            references.append(file_image(file))
        else:
            references.append(
                {'file': os.path.abspath(path), 'row': row, 'number': number, **_checked(data, place)}
            )
    return references


def file_image(path: Path) -> Reference:
    """Returns a reference to an image file, and decodes it once to check it.

    Raises ValueError if the image cannot be used, and FileNotFoundError if the file cannot be read.
    """
    return {'file': os.path.abspath(path), **_checked(_file_bytes(path), str(path))}


def open_image(reference: Reference) -> Image.Image:
    """Returns the image as RGB; transparent parts become white.

    Raises ValueError if the file has changed since the reference was made, or if a figure is now drawn
    differently. Raises FileNotFoundError if the file is gone. For an image in a parquet file its whole row
    group is read; Hugging Face's image data sets have one row group for every 100 rows.
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
            f'{where}: the image has changed since the problems were read (its sha256 is no longer '
            f'{reference["sha256"][:12]}...); restore the file, or start a new run'
        )
    return decode_image(data, where)


def _drawn(reference: Reference) -> Image.Image:
    picture = draw_diagram(reference['figure'])
    if pixels_hash(picture) != reference['sha256']:
        raise ValueError(
            f'figure {shown(reference["figure"])}: it is now drawn differently than when the problems were '
            f'made (its sha256 is no longer {reference["sha256"][:12]}...); install the version of Pillow '
            'used then, or start a new run'
        )
    return picture


def decode_image(data: bytes, where: str) -> Image.Image:
    """Decodes an image to RGB on white. Checks the size in its header before decoding.

    Raises ValueError, with a message that begins with `where`, if the image cannot be used.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ValueError(
            f'{where}: {short(error)}; the limit is {MAX_PIXELS:,} pixels. Scale the image down or drop it'
        ) from None
    except Exception as error:  # damaged bytes can make a reader fail in any way
        raise ValueError(
            f'{where}: not a readable image in one of the formats {", ".join(FORMATS)} ({short(error)}); '
            'replace or drop it'
        ) from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ValueError(
            f'{where}: the image is {width} x {height}, more than the limit of {MAX_PIXELS:,} pixels; scale '
            'it down or drop it'
        )
    if min(width, height) < MIN_SIDE or max(width, height) > MAX_ASPECT * min(width, height):
        raise ValueError(
            f'{where}: the image is {width} x {height}; each side must have at least {MIN_SIDE} pixels, and '
            f'the longer one at most {MAX_ASPECT} times the shorter. Pad or drop it'
        )
    try:
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image.convert('RGBA'))
        return image.convert('RGB')
    except Exception as error:  # as above
        raise ValueError(
            f'{where}: the image is damaged or truncated ({short(error)}); replace or drop it'
        ) from error


def _checked(data: bytes, where: str) -> dict:
    """Returns the fields of a reference other than the image's location."""
    image = decode_image(data, where)
    return {'sha256': _hash(data), 'width': image.width, 'height': image.height}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _content(image: Any, path: Path, place: str) -> tuple[bytes, None] | tuple[None, Path]:
    """Returns the encoded bytes of an image in a cell, or the file that it names, beside `path`.

    A row is untrusted data, so it may name only files of its own data set.
    """
    data, name = (image.get('bytes'), image.get('path')) if isinstance(image, dict) else (image, None)
    if isinstance(data, bytes) and data:
        return data, None
    if not data and isinstance(name, str) and name:
        if not _lies_below(path.parent / name, path):
            raise ValueError(
                f'{place}: the path {shown(name)} leads out of {path.parent}, the folder of its file; copy '
                'the image into that folder and give its path from there, or drop the row'
            )
        if (file := path.parent / name).is_file():
            return None, file
    raise ValueError(
        f'{place}: expected the encoded bytes of an image, or an object with "bytes" or with the "path" of a '
        f'file below the folder of this one, got {shown(image)}; fill it in or drop the row'
    )


def _lies_below(file: Path, data_set: Path) -> bool:
    """Whether a file is below a data set's folder, following links; in the hub's cache both are links."""
    try:
        folders = data_set.parent.resolve(), data_set.resolve().parent
        return any(file.resolve().is_relative_to(folder) for folder in folders)
    except (OSError, RuntimeError, ValueError):  # a cycle of links, or an invalid file name
        return False


def _file_bytes(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(
                f'{path}: the image file has {size:,} bytes, more than the limit of {MAX_BYTES:,}; '
                'scale it down or drop it'
            )
        return path.read_bytes()
    except OSError as error:
        raise FileNotFoundError(
            f'{path}: the image cannot be read ({short(error)}); restore the file, or start a new run'
        ) from error


_reading = threading.Lock()  # a ParquetFile allows one reader at a time


def _parquet_bytes(path: Path, row: int, number: int, where: str) -> bytes:
    try:
        state = path.stat()
        with _reading:
            file, column, ends = _opened(path, state.st_mtime_ns, state.st_size)
            group = bisect.bisect_right(ends, row)
            if group == len(ends) or column is None:
                raise ValueError(
                    f'{where}: the file now has {ends[-1] if ends else 0} rows of images; restore the '
                    'original file'
                )
            cells = file.read_row_group(group, columns=[column], use_threads=False).column(0)
        cell = cells[row - ends[group]].as_py()
    except FileNotFoundError as error:
        raise FileNotFoundError(f'{where}: no such file; restore it, or start a new run') from error
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f'{where}: the file cannot be read ({short(error)}); restore the original file'
        ) from error
    images = cell if isinstance(cell, list) else [cell]
    if cell is None or number >= len(images):
        raise ValueError(f'{where}: the row no longer has this image; restore the original file')
    return _content(images[number], path, where)[0] or b''


@functools.lru_cache(maxsize=4)  # training, validation, test; a changed file has another time or size
def _opened(
    path: Path, changed_ns: int, size: int
) -> tuple[pyarrow.parquet.ParquetFile, str | None, list[int]]:
    """Returns an open file, its image column, and the end row (exclusive) of each row group."""
    file = pyarrow.parquet.ParquetFile(path)
    rows = (file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups))
    return file, image_column(file.schema_arrow.names), list(itertools.accumulate(rows))


def parquet_image_rows(path: Path, wanted: set[str], at_once: int = 16) -> Iterator[tuple[int, str, dict]]:
    """Yields (row counted from 0, name of the image column, row with its images and the columns `wanted`).

    Only `at_once` rows are in memory at a time. Raises ValueError, naming the file, if it cannot be read or
    has no images.
    """
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20) as file:  # reads a column in pieces
            names = file.schema_arrow.names
            if (column := image_column(names)) is None:
                raise ValueError(
                    f'{path}, row 1: column "images" is missing; the file has {short(", ".join(names))}; '
                    'rename or add it'
                )
            for batch in file.iter_batches(
                at_once, columns=[n for n in names if n in wanted or n == column], use_threads=False
            ):
                for values in rows_in(batch):
                    # errors name all columns of the file, read or not
                    yield row, column, {**dict.fromkeys(names), **values}
                    row += 1
    except UnicodeDecodeError as error:
        raise ValueError(
            f'{path}, row {row + 1} or one of the next: not UTF-8 text; save the file as UTF-8'
        ) from error
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f'{path}: not a readable parquet file ({short(error)}); download or write it again'
        ) from error
