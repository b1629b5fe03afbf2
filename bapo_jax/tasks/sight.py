"""How a policy sees the images of prompts: resized once and cut into patches when they are needed.

Images are held by reference (images.py), so buffers and checkpoints hold no pixels. A prompt has one
placeholder token, the mark, for each feature of an image. A rollout server receives the resized image: its
own resizing then changes nothing, and both see the same patches.
"""

from __future__ import annotations

import base64
import collections
import functools
import io
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bapo_jax.groups import Prompt
from bapo_jax.tasks.images import Reference, open_image


class Sight:
    """Hugging Face's image processor with a policy's own settings. Caches the most recently used patches."""

    def __init__(
        self, path: str | Path, mark: int, least_pixels: int = 0, most_pixels: int = 0,
        kept_bytes: int = 2**29, tower: tuple[int, int, int] | None = None,
    ):  # fmt: skip
        """`path` is a model directory, `mark` the placeholder token of a feature.

        Resized images have `least_pixels` to `most_pixels` pixels; 0 means the directory's own setting. The
        cache holds up to `kept_bytes` of patches. The first image loads the processor, and raises ValueError
        if it cannot be loaded or does not match `tower`: patch_size, spatial_merge_size and
        temporal_patch_size in config.json.
        """
        self.row_windows = 0  # windows of the largest image in any prompt, once all are known; 0: unknown
        self._path, self._mark, self._least, self._most, self._tower = (
            path,
            mark,
            least_pixels,
            most_pixels,
            tower,
        )
        self._kept: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()  # LRU, by hash
        self._kept_bytes, self._lock = kept_bytes, threading.Lock()

    @functools.cached_property
    def _processor(self) -> Any:
        # The import takes seconds, and imports torch if it is installed.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        stated = {'shortest_edge': self._least, 'longest_edge': self._most}
        try:
            processor = Qwen2VLImageProcessorPil.from_pretrained(self._path, local_files_only=True)
            said = dict(processor.size)
            processor.size = said | {name: pixels for name, pixels in stated.items() if pixels}
            wrong = _tried_out(processor, said)
        except Exception as e:  # malformed files can fail in any way
            wrong = f'{type(e).__name__}: {e}'
        if wrong:
            raise ValueError(
                f'model.path={str(self._path)!r}: the image processor in preprocessor_config.json cannot be '
                f'used ({wrong}); download the file again'
            )
        cuts = processor.patch_size, processor.merge_size, processor.temporal_patch_size
        if self._tower and cuts != self._tower:
            raise ValueError(
                f'{self._path}: patch_size, merge_size and temporal_patch_size are {cuts} in '
                f'preprocessor_config.json, but {self._tower} in vision_config of config.json; the files are '
                'of two models. Download the directory again'
            )
        if processor.size['shortest_edge'] > processor.size['longest_edge']:
            raise ValueError(
                f'model.pixels=({self._least}, {self._most}) and the size {said} in preprocessor_config.json '
                'contradict each other; set both numbers of model.pixels'
            )
        return processor

    def limits(self) -> tuple[int, int]:
        """Returns the least and the most pixels of a resized image."""
        return self._processor.size['shortest_edge'], self._processor.size['longest_edge']

    def grid(self, image: Reference) -> tuple[int, int, int]:
        """Returns the time steps (1), rows and columns of an image's patches, from its size."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        p, side = self._processor, self._processor.patch_size
        height, width = smart_resize(image['height'], image['width'], side * p.merge_size, *self.limits())
        return 1, height // side, width // side

    def features(self, image: Reference) -> int:
        """Returns the number of prompt tokens that an image takes."""
        _, rows, columns = self.grid(image)
        return rows * columns // self._processor.merge_size**2

    def expanded(self, tokens: np.ndarray, images: Sequence[Reference]) -> np.ndarray:
        """Returns a prompt's tokens with each image's mark repeated once per feature.

        Raises ValueError if the numbers of marks and images differ.
        """
        marks = tokens == self._mark
        if np.count_nonzero(marks) != len(images):
            raise ValueError(
                f'the prompt has {np.count_nonzero(marks)} image placeholders but {len(images)} images; '
                'write one for each'
            )
        counts = np.ones(len(tokens), np.int64)
        counts[marks] = [self.features(image) for image in images]
        return np.repeat(tokens, counts)

    def collapsed(self, tokens: np.ndarray, images: Sequence[Reference]) -> np.ndarray:
        """The inverse of `expanded`: returns the tokens to send to a rollout server."""
        kept, at = np.ones(len(tokens), bool), 0
        for image in images:
            first, n = at + int(np.argmax(tokens[at:] == self._mark)), self.features(image)
            kept[first + 1 : first + n] = False
            at = first + n
        return tokens[kept]

    def resized(self, image: Reference) -> Image.Image:
        """Returns the image at the size that the policy sees. Raises as `open_image` does."""
        _, rows, columns = self.grid(image)
        side = self._processor.patch_size
        return open_image(dict(image)).resize((columns * side, rows * side), Image.Resampling.BICUBIC)

    def patches(self, images: Sequence[Reference]) -> np.ndarray:
        """Returns the patches of images, concatenated, float32 [patches, numbers per patch]. Thread-safe."""
        return np.concatenate([self._patches(image) for image in images])

    def grids_of(self, prompt: Prompt) -> list[tuple[int, int, int]]:
        """Returns the grid of each image of a prompt."""
        return [self.grid(image) for image in prompt.images]

    def patches_of(self, prompt: Prompt) -> np.ndarray:
        """Returns the patches of a prompt's images, as `patches` does."""
        return self.patches(prompt.images)

    def kept_bytes(self) -> int:
        """Returns the bytes of the cached patches."""
        return sum(patches.nbytes for patches in self._kept.values())

    def data_url(self, image: Reference) -> str:
        """Returns the resized image as a data URL for a rollout server."""
        png = io.BytesIO()
        self.resized(image).save(png, 'PNG', compress_level=1)
        return 'data:image/png;base64,' + base64.b64encode(png.getvalue()).decode()

    def _patches(self, image: Reference) -> np.ndarray:
        name = image['sha256']
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        patches = self._processor(self.resized(image), do_resize=False)['pixel_values']
        with self._lock:
            self._kept[name] = patches
            while len(self._kept) > 1 and self.kept_bytes() > self._kept_bytes:
                self._kept.popitem(last=False)
        return patches


def _tried_out(processor: Any, size: dict[str, Any]) -> str:
    """Returns what is wrong with the processor's patches, '' if nothing is. Accepts settings of any type."""
    least, most = size['shortest_edge'], size['longest_edge']
    if not (isinstance(least, int) and isinstance(most, int) and 0 < least <= most):
        return f'its size limits are {least!r} and {most!r} pixels'
    side = processor.patch_size * processor.merge_size
    patches = processor(Image.new('RGB', (2 * side, side), 'red'), do_resize=False)['pixel_values']
    wanted = 2 * processor.merge_size**2, 3 * processor.temporal_patch_size * processor.patch_size**2
    sound = patches.shape == wanted and np.isfinite(patches).all()
    return (
        ''
        if sound
        else f'its output for a test image has shape {patches.shape}; '
        f'expected finite numbers of shape {wanted}'
    )
