"""Where the patches of images lie in the vision tower, and which positions their tokens have in the decoder: numpy alone.

Hugging Face's image processor cuts an image into a grid of patches and lists them block by block: the m × m patches of one feature
stand together. Most of the tower's layers attend within square windows of such blocks. So patches are laid out in windows of a fixed
number of slots, and windows at an image's edge are filled up. Images follow each other in rows of windows, and none crosses a row's
end: attention within images costs the square of a row, not of all that is read.

Sizes of rows and numbers of rows are rounded up to powers of two and three quarters of them, so few programs are compiled. A run
that states `row_windows` and `rows` compiles one.

Videos are left out: a grid has one time step.

Shapes:  R rows · P slots in a row · I features, one for each image token of a prompt, in the prompt's order
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Grid = Sequence[int]  # time steps (1), patches from top to bottom, patches from left to right


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The fields of a config.json's `vision_config` that shape the tower, by their names there."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    out_hidden_size: int  # the decoder's width
    patch_size: int  # pixels
    spatial_merge_size: int  # m: a feature is m × m patches
    temporal_patch_size: int
    window_size: int  # pixels
    fullatt_block_indexes: tuple[int, ...]  # the blocks that attend within images; all others attend within windows
    image_token: int  # the token in whose place features stand

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_numbers(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def window_side(self) -> int:
        """Patches along the side of a window: whole features."""
        return self.window_size // self.patch_size // self.spatial_merge_size * self.spatial_merge_size

    @property
    def window_slots(self) -> int:
        return self.window_side**2


class Layout(NamedTuple):
    """Where patches lie. `order` stays on the host; positions and images go to the tower."""

    order_RxP: np.ndarray  # int32: which patch, counted over all images, stands in a slot; -1: none
    position_RxPx2: np.ndarray  # int32: the patch's row and column within its image
    image_RxP: np.ndarray  # int32: the patch's image, counted from 1; 0: no patch
    feature_I: np.ndarray  # int32: where each feature lies among the tower's, images in their order


class Pixels(NamedTuple):
    """What the vision tower reads, arrays as of a Layout."""

    patch_RxPxC: np.ndarray  # float32: the numbers of the patch in each slot
    position_RxPx2: np.ndarray
    image_RxP: np.ndarray


def blank_pixels(shape: Sequence[int]) -> Pixels:
    """Pixels of that shape of patches, [R, P, C], without an image."""
    return Pixels(np.zeros(shape, np.float32), np.zeros((*shape[:2], 2), np.int32), np.zeros(shape[:2], np.int32))


def lay_out_images(
    grids: Sequence[Grid], config: VisionConfig, row_windows: int = 0, rows: int = 0, multiple: int = 1
) -> Layout:
    """Lays images of those grids out in `rows` rows of `row_windows` windows; 0: as many as are needed, rounded up.

    Rows that are not stated are a multiple of `multiple`. Raises ValueError where an image is larger than a row, the rows do not
    suffice, or a grid is no image's.
    """
    m, side, slots = config.spatial_merge_size, config.window_side, config.window_slots
    for t, h, w in grids:
        if t != 1 or h % m or w % m or not h * w:
            raise ValueError(f'a grid of {t} × {h} × {w} patches is no image: one time step, and sides that are multiples of {m}')
    windows = [windows_of(grid, config) for grid in grids]
    row_windows = row_windows or rounded_up(max(windows, default=1))
    if max(windows, default=0) > row_windows:
        largest = max(windows)
        raise ValueError(f'an image of {largest} windows does not fit into a row of {row_windows}; give row_windows={largest}')
    firsts, end = [], 0  # windows, counted over all rows
    for n in windows:
        if end % row_windows + n > row_windows:
            end += -end % row_windows
        firsts.append(end)
        end += n
    needed = -(-end // row_windows)
    rows = rows or -(-rounded_up(max(needed, 1)) // multiple) * multiple
    if needed > rows:
        raise ValueError(f'{len(windows)} images need {needed} rows of {row_windows} windows, and there are {rows}; raise rows')

    order, image = np.full(rows * row_windows * slots, -1, np.int32), np.zeros(rows * row_windows * slots, np.int32)
    position, features, patches = np.zeros((len(order), 2), np.int32), [np.zeros(0, np.int32)], 0
    for number, ((_, h, w), first) in enumerate(zip(grids, firsts, strict=True), start=1):
        i, j = np.indices((h, w), np.int32).reshape(2, h // m, m, w // m, m).swapaxes(2, 3).reshape(2, h * w)
        window = first + i // side * -(-w // side) + j // side
        block = i % side // m * (side // m) + j % side // m  # of its window
        at = window * slots + (block * m + i % m) * m + j % m
        order[at], image[at], position[at] = patches + np.arange(h * w), number, np.stack([i, j], axis=1)
        features.append((at[:: m * m] // (m * m)).astype(np.int32))
        patches += h * w
    return Layout(order.reshape(rows, -1), position.reshape(rows, -1, 2), image.reshape(rows, -1), np.concatenate(features))


def windows_of(grid: Grid, config: VisionConfig) -> int:
    """The windows that an image takes in a row."""
    _, h, w = grid
    return -(-h // config.window_side) * -(-w // config.window_side)


def rounded_up(n: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, 24, … that is no less than n."""
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if n <= power * 3 // 4 else power


def in_slots(patches: np.ndarray, order_RxP: np.ndarray) -> np.ndarray:
    """The pixels of the patches, [patches, C], in their slots: [R, P, C], zeros where no patch is."""
    slots, filled = np.zeros((*order_RxP.shape, patches.shape[1]), patches.dtype), order_RxP >= 0
    slots[filled] = patches[order_RxP[filled]]
    return slots


def features_at(tokens: np.ndarray, feature_I: np.ndarray, image_token: int) -> np.ndarray:
    """int32 like `tokens`: which of the tower's features stands at each, -1 at text. Raises ValueError where numbers differ."""
    is_image = tokens == image_token
    if np.count_nonzero(is_image) != len(feature_I):
        raise ValueError(f'{np.count_nonzero(is_image)} image tokens, and {len(feature_I)} features to stand there')
    at = np.full(tokens.shape, -1, np.int32)
    at[is_image] = feature_I
    return at


def rope_positions(tokens: np.ndarray, grids: Sequence[Grid], config: VisionConfig) -> tuple[np.ndarray, int]:
    """The three positions of each of a sequence's n tokens, int32 [3, n], and the position of the token behind it.

    Text counts on in all three. An image stands at one time, each feature in its row and column. What follows begins behind the
    longer side. Raises ValueError where image tokens and grids do not fit.
    """
    m, n, is_image = config.spatial_merge_size, len(tokens), tokens == config.image_token
    positions, at, following = np.empty((3, n), np.int32), 0, 0
    for _, h, w in grids:
        first = at + int(np.argmax(is_image[at:])) if is_image[at:].any() else n
        positions[:, at:first] = following + np.arange(first - at)
        following, at = following + first - at, first + h * w // m**2
        if at > n or not is_image[first:at].all():
            raise ValueError(f'no {h * w // m**2} image tokens for a grid of {h} × {w} patches; is the prompt cut off?')
        positions[0, first:at] = following
        positions[1:, first:at] = following + np.indices((h // m, w // m)).reshape(2, -1)
        following += max(h, w) // m
    if is_image[at:].any():
        raise ValueError(f'{np.count_nonzero(is_image[at:])} image tokens behind the last of {len(grids)} images')
    positions[:, at:] = following + np.arange(n - at)
    return positions, following + n - at
