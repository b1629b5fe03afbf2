"""Images of prompts: the vision tower's input, and where its features and positions belong. NumPy only.

Shapes:  V rows of P slots in the tower, C numbers of a patch (models/vision/patches.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from bapo_jax.groups import Prompt
from bapo_jax.models.vision.patches import (
    Grid,
    TowerLayout,
    Pixels,
    VisionConfig,
    features_at,
    in_slots,
    lay_out_images,
    rope_positions,
    windows_of,
)


class ImageSource(Protocol):
    """Provides the patches of prompts' images: the Sight of tasks/sight.py."""

    row_windows: int  # windows per tower row in the learner: those of the largest image of any prompt

    def grids_of(self, prompt: Prompt) -> list[Grid]:
        """Returns the patch grids of a prompt's images, in their order."""

    def patches_of(self, prompt: Prompt) -> np.ndarray:
        """Returns the patches of a prompt's images, float32 [patches, C]; reads the image files."""

    def kept_bytes(self) -> int:
        """Returns the bytes of the patches that it keeps in memory."""


class Seen(NamedTuple):
    """The images of some prompts, those of equal prompts once, and what each prompt's tokens see of them."""

    sight: ImageSource
    distinct: list[Prompt]  # the distinct prompts with images
    layout: TowerLayout
    pixel_shape: tuple[int, int, int]  # V, P, C
    feature: list[np.ndarray]  # per prompt, int32 [prompt tokens]: index of the feature at a token; -1: text
    rope: list[np.ndarray]  # per prompt, int32 [prompt tokens, 3]: rotary positions
    following: list[int]  # per prompt, the rotary position of the token after it

    def pixels(self) -> Pixels:
        """Returns the tower's input. The image files are read only now, so no pixels are in memory before."""
        patches = np.concatenate([self.sight.patches_of(prompt) for prompt in self.distinct])
        return Pixels(
            in_slots(patches, self.layout.order_RxP), self.layout.position_RxPx2, self.layout.image_RxP
        )


def see(
    prompts: Sequence[Prompt],
    sight: ImageSource | None,
    config: VisionConfig | None,
    row_windows: int = 0,
    multiple: int = 1,
) -> Seen | None:
    """Returns the images of these prompts, in rows as from `lay_out_images`; None if no prompt has an image.

    Prompts with the same id count once. Raises ValueError if a prompt's image tokens do not fit its images.
    """
    grids = {} if sight is None else {prompt.id: sight.grids_of(prompt) for prompt in prompts}
    if not any(grids.values()):
        return None
    distinct = {prompt.id: prompt for prompt in prompts if grids[prompt.id]}
    layout = lay_out_images(
        [grid for number in distinct for grid in grids[number]],
        config,
        row_windows=row_windows,
        multiple=multiple,
    )
    features, first = {}, 0
    for number, prompt in distinct.items():
        end = first + sum(h * w for _, h, w in grids[number]) // config.spatial_merge_size**2
        features[number], first = (
            features_at(prompt.tokens, layout.feature_I[first:end], config.image_token),
            end,
        )
    placed = [rope_positions(prompt.tokens, grids[prompt.id], config) for prompt in prompts]
    return Seen(
        sight, list(distinct.values()), layout, (*layout.order_RxP.shape, config.patch_numbers),
        feature=[features.get(prompt.id, np.full(len(prompt.tokens), -1, np.int32)) for prompt in prompts],
        rope=[rope_3xn.T for rope_3xn, _ in placed],
        following=[following for _, following in placed],
    )  # fmt: skip


def tower_rows(grids: Sequence[Grid], config: VisionConfig, multiple: int) -> tuple[int, int]:
    """Returns V and P for a mini-batch of these images, in a run without larger images."""
    row_windows = max(windows_of(grid, config) for grid in grids)
    return lay_out_images(grids, config, row_windows=row_windows, multiple=multiple).order_RxP.shape


def largest_images(prompts: Sequence[Prompt], sight: ImageSource | None, groups: int) -> list[Grid]:
    """Returns the grids of the images of the `groups` prompts with the most patches."""
    if sight is None:
        return []
    of_prompts = [sight.grids_of(prompt) for prompt in prompts]
    of_prompts.sort(key=lambda grids: -sum(h * w for _, h, w in grids))
    return [grid for grids in of_prompts[:groups] for grid in grids]


def image_metrics(seen: Sequence[Seen]) -> dict[str, int]:
    """Returns the image metrics of a batch's mini-batches (docs/reference/metrics.py); {} without images."""
    if not seen:
        return {}
    return {
        'images/prompts': sum(len(s.distinct) for s in seen),
        'images/features': sum(len(s.layout.feature_I) for s in seen),
        'images/pixel_bytes': sum(
            4 * s.pixel_shape[-1] * int(np.count_nonzero(s.layout.image_RxP)) for s in seen
        ),
        'perf/kept_pixel_bytes': seen[0].sight.kept_bytes(),
    }
