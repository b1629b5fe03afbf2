"""How a policy sees the images of prompts: resized once, and cut into patches, when they are needed.

Images are held by reference (images.py), so buffers and checkpoints hold no pixels. A prompt's tokens have a mark for each
feature of an image. A rollout server is sent the resized image: its own resizing changes nothing then, and both see the same patches.
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
    """Hugging Face's image processor with a policy's own settings. Keeps the patches that were used last."""

    def __init__(
        self, path: str | Path, mark: int, least_pixels: int = 0, most_pixels: int = 0, kept_bytes: int = 2**29,
        tower: tuple[int, int, int] | None = None,
    ):  # fmt: skip
        """`path` is a model directory, `mark` the token in whose place a feature stands.

        Resized images have `least_pixels` to `most_pixels`; 0: what the directory says. Patches of up to `kept_bytes` stay in
        memory. The first image loads the processor, and raises ValueError where it cannot be loaded or is not that of `tower`:
        patch_size, spatial_merge_size and temporal_patch_size of its config.json.
        """
        self.row_windows = 0  # windows of the largest image of any prompt, once all are known; 0: not known
        self._path, self._mark, self._least, self._most, self._tower = path, mark, least_pixels, most_pixels, tower
        self._kept: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()  # by hash, the last used last
        self._kept_bytes, self._lock = kept_bytes, threading.Lock()

    @functools.cached_property
    def _processor(self) -> Any:
        # The import takes seconds, and brings torch where that is installed.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        stated = {'shortest_edge': self._least, 'longest_edge': self._most}
        try:
            processor = Qwen2VLImageProcessorPil.from_pretrained(self._path, local_files_only=True)
            said = dict(processor.size)
            processor.size = said | {name: pixels for name, pixels in stated.items() if pixels}
            wrong = _tried_out(processor, said)
        except Exception as e:  # files of another shape fail in any way
            wrong = f'{type(e).__name__}: {e}'
        if wrong:
            raise ValueError(
                f'model.path={str(self._path)!r}: no image processor loads from preprocessor_config.json there ({wrong}); '
                'fetch it again'
            )
        cuts = processor.patch_size, processor.merge_size, processor.temporal_patch_size
        if self._tower and cuts != self._tower:
            raise ValueError(
                f'{self._path}: patch_size, merge_size and temporal_patch_size of preprocessor_config.json are {cuts}, and those of '
                f'vision_config in config.json {self._tower}; the files are of two models: fetch the directory again'
            )
        if processor.size['shortest_edge'] > processor.size['longest_edge']:
            raise ValueError(
                f'model.least_pixels={self._least}, model.most_pixels={self._most} and the {said} of preprocessor_config.json leave no '
                'size for an image; set both'
            )
        return processor

    def limits(self) -> tuple[int, int]:
        """The least and the most pixels of a resized image."""
        return self._processor.size['shortest_edge'], self._processor.size['longest_edge']

    def grid(self, image: Reference) -> tuple[int, int, int]:
        """Time steps (1), rows and columns of an image's patches, from its size alone."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        p, side = self._processor, self._processor.patch_size
        height, width = smart_resize(image['height'], image['width'], side * p.merge_size, *self.limits())
        return 1, height // side, width // side

    def features(self, image: Reference) -> int:
        """How many tokens of a prompt an image takes."""
        _, rows, columns = self.grid(image)
        return rows * columns // self._processor.merge_size**2

    def expanded(self, tokens: np.ndarray, images: Sequence[Reference]) -> np.ndarray:
        """A prompt's tokens with each image's mark repeated for every feature. Raises ValueError where marks and images differ."""
        marks = tokens == self._mark
        if np.count_nonzero(marks) != len(images):
            raise ValueError(f'the prompt has {np.count_nonzero(marks)} places for images, and {len(images)} images')
        counts = np.ones(len(tokens), np.int64)
        counts[marks] = [self.features(image) for image in images]
        return np.repeat(tokens, counts)

    def collapsed(self, tokens: np.ndarray, images: Sequence[Reference]) -> np.ndarray:
        """The inverse of `expanded`: what a rollout server is asked with."""
        kept, at = np.ones(len(tokens), bool), 0
        for image in images:
            first, n = at + int(np.argmax(tokens[at:] == self._mark)), self.features(image)
            kept[first + 1 : first + n] = False
            at = first + n
        return tokens[kept]

    def resized(self, image: Reference) -> Image.Image:
        """The image in the size in which it is seen. Raises as `open_image` does."""
        _, rows, columns = self.grid(image)
        side = self._processor.patch_size
        return open_image(dict(image)).resize((columns * side, rows * side), Image.Resampling.BICUBIC)

    def patches(self, images: Sequence[Reference]) -> np.ndarray:
        """The patches of some images, one after the other, float32 [patches, numbers of a patch]. Any thread may ask."""
        return np.concatenate([self._patches(image) for image in images])

    def grids_of(self, prompt: Prompt) -> list[tuple[int, int, int]]:
        """The grid of each image of a prompt."""
        return [self.grid(image) for image in prompt.images]

    def patches_of(self, prompt: Prompt) -> np.ndarray:
        """The patches of a prompt's images, as `patches`."""
        return self.patches(prompt.images)

    def kept_bytes(self) -> int:
        """Bytes of the patches in memory."""
        return sum(patches.nbytes for patches in self._kept.values())

    def data_url(self, image: Reference) -> str:
        """The resized image as a rollout server takes it."""
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
    """What is wrong with how the processor cuts a picture into patches, '' where nothing is. It takes settings of any type."""
    least, most = size['shortest_edge'], size['longest_edge']
    if not (isinstance(least, int) and isinstance(most, int) and 0 < least <= most):
        return f'pixels of {least!r} to {most!r}'
    side = processor.patch_size * processor.merge_size
    patches = processor(Image.new('RGB', (2 * side, side), 'red'), do_resize=False)['pixel_values']
    wanted = 2 * processor.merge_size**2, 3 * processor.temporal_patch_size * processor.patch_size**2
    sound = patches.shape == wanted and np.isfinite(patches).all()
    return '' if sound else f'of a picture it makes an array of {patches.shape}, which is to be of {wanted} and finite'
