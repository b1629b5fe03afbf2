"""The layout of image patches in the vision tower, and their tokens' positions in the decoder. NumPy only.

Hugging Face's image processor cuts an image into a grid of patches and lists them block by block: the m × m
patches of one feature are contiguous. Most of the tower's layers attend within square windows of such blocks.
So patches are laid out in windows with a fixed number of slots, and windows at an image's edge are padded.
Images follow each other in rows of windows, and none crosses the end of a row: attention within images costs
the square of a row, not of the whole input.

Row sizes and row counts are rounded up to powers of two and three quarters of them, so that few programs are
compiled. A run that states `row_windows` and `rows` compiles one.

Videos are not supported: a grid has one time step.

Shapes:  R rows · P slots in a row · I features, one per image token of a prompt, in the prompt's order
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Grid = Sequence[int]  # time steps (1), patches from top to bottom, patches from left to right


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The fields of a config.json's `vision_config` that shape the tower, with the same names."""

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
    fullatt_block_indexes: tuple[int, ...]  # blocks that attend within images; the others within windows
    image_token: int  # the token that features replace

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_numbers(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def window_side(self) -> int:
        """Patches along the side of a window, rounded down to whole features."""
        return self.window_size // self.patch_size // self.spatial_merge_size * self.spatial_merge_size

    @property
    def window_slots(self) -> int:
        return self.window_side**2


class TowerLayout(NamedTuple):
    """The slots of patches. `order` stays on the host; positions and images go to the tower."""

    order_RxP: np.ndarray  # int32: index of the patch in a slot, counted over all images; -1: no patch
    position_RxPx2: np.ndarray  # int32: the patch's row and column within its image
    image_RxP: np.ndarray  # int32: number of the patch's image, from 1; 0: no patch
    feature_I: np.ndarray  # int32: index of each feature among the tower's, images in their order


class Pixels(NamedTuple):
    """The vision tower's input, with arrays as in TowerLayout."""

    patch_RxPxC: np.ndarray  # float32: the pixel values of the patch in each slot
    position_RxPx2: np.ndarray
    image_RxP: np.ndarray


def blank_pixels(shape: Sequence[int]) -> Pixels:
    """Returns pixels without an image, whose patches have this shape, [R, P, C]."""
    return Pixels(
        np.zeros(shape, np.float32), np.zeros((*shape[:2], 2), np.int32), np.zeros(shape[:2], np.int32)
    )


def lay_out_images(
    grids: Sequence[Grid], config: VisionConfig, row_windows: int = 0, rows: int = 0, multiple: int = 1
) -> TowerLayout:
    """Lays out images with these patch grids in `rows` rows of `row_windows` windows.

    If either is 0, it is the number needed, rounded up; `rows` is then also a multiple of `multiple`. Raises
    ValueError if an image is larger than a row, there are too few rows, or a grid is not that of an image.
    """
    m, side, slots = config.spatial_merge_size, config.window_side, config.window_slots
    for t, h, w in grids:
        if t != 1 or h % m or w % m or not h * w:
            raise ValueError(
                f'a grid of {t} × {h} × {w} patches is no image: one time step, and sides that are multiples '
                f'of {m}'
            )
    windows = [windows_of(grid, config) for grid in grids]
    row_windows = row_windows or rounded_up(max(windows, default=1))
    if max(windows, default=0) > row_windows:
        largest = max(windows)
        raise ValueError(
            f'an image of {largest} windows does not fit into a row of {row_windows}; give '
            f'row_windows={largest}'
        )
    firsts, end = [], 0  # windows, counted over all rows
    for n in windows:
        if end % row_windows + n > row_windows:
            end += -end % row_windows
        firsts.append(end)
        end += n
    needed = -(-end // row_windows)
    rows = rows or -(-rounded_up(max(needed, 1)) // multiple) * multiple
    if needed > rows:
        raise ValueError(
            f'{len(windows)} images need {needed} rows of {row_windows} windows, and there are {rows}; raise '
            'rows'
        )

    order, image = (
        np.full(rows * row_windows * slots, -1, np.int32),
        np.zeros(rows * row_windows * slots, np.int32),
    )
    position, features, patches = np.zeros((len(order), 2), np.int32), [np.zeros(0, np.int32)], 0
    for number, ((_, h, w), first) in enumerate(zip(grids, firsts, strict=True), start=1):
        i, j = np.indices((h, w), np.int32).reshape(2, h // m, m, w // m, m).swapaxes(2, 3).reshape(2, h * w)
        window = first + i // side * -(-w // side) + j // side
        block = i % side // m * (side // m) + j % side // m  # within its window
        at = window * slots + (block * m + i % m) * m + j % m
        order[at], image[at], position[at] = patches + np.arange(h * w), number, np.stack([i, j], axis=1)
        features.append((at[:: m * m] // (m * m)).astype(np.int32))
        patches += h * w
    return TowerLayout(
        order.reshape(rows, -1),
        position.reshape(rows, -1, 2),
        image.reshape(rows, -1),
        np.concatenate(features),
    )


def windows_of(grid: Grid, config: VisionConfig) -> int:
    """Returns the number of windows that an image takes in a row."""
    _, h, w = grid
    return -(-h // config.window_side) * -(-w // config.window_side)


def rounded_up(n: int) -> int:
    """Returns the least of 1, 2, 3, 4, 6, 8, 12, 16, 24, … that is at least n."""
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if n <= power * 3 // 4 else power


def in_slots(patches: np.ndarray, order_RxP: np.ndarray) -> np.ndarray:
    """Returns the patches' pixels, [patches, C], in their slots, [R, P, C]; empty slots are 0."""
    slots, filled = np.zeros((*order_RxP.shape, patches.shape[1]), patches.dtype), order_RxP >= 0
    slots[filled] = patches[order_RxP[filled]]
    return slots


def features_at(tokens: np.ndarray, feature_I: np.ndarray, image_token: int) -> np.ndarray:
    """Returns the index of the tower's feature at each token, int32 like `tokens`; -1 for text.

    Raises ValueError if the numbers of image tokens and features differ.
    """
    is_image = tokens == image_token
    if np.count_nonzero(is_image) != len(feature_I):
        raise ValueError(
            f'{np.count_nonzero(is_image)} image tokens, and {len(feature_I)} features to stand there'
        )
    at = np.full(tokens.shape, -1, np.int32)
    at[is_image] = feature_I
    return at


def rope_positions(tokens: np.ndarray, grids: Sequence[Grid], config: VisionConfig) -> tuple[np.ndarray, int]:
    """Returns the three positions of a sequence's n tokens, int32 [3, n], and that of the token after it.

    Text advances all three positions. An image has one time position, and each feature its row and column.
    What follows begins after the image's longer side. Raises ValueError if image tokens do not fit the grids.
    """
    m, n, is_image = config.spatial_merge_size, len(tokens), tokens == config.image_token
    positions, at, following = np.empty((3, n), np.int32), 0, 0
    for _, h, w in grids:
        first = at + int(np.argmax(is_image[at:])) if is_image[at:].any() else n
        positions[:, at:first] = following + np.arange(first - at)
        following, at = following + first - at, first + h * w // m**2
        if at > n or not is_image[first:at].all():
            raise ValueError(
                f'no {h * w // m**2} image tokens for a grid of {h} × {w} patches; is the prompt cut off?'
            )
        positions[0, first:at] = following
        positions[1:, first:at] = following + np.indices((h // m, w // m)).reshape(2, -1)
        following += max(h, w) // m
    if is_image[at:].any():
        raise ValueError(
            f'{np.count_nonzero(is_image[at:])} image tokens behind the last of {len(grids)} images'
        )
    positions[:, at:] = following + np.arange(n - at)
    return positions, following + n - at
