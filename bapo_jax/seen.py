"""What a policy sees of prompts with images: what the vision tower reads, and where its features and positions belong. NumPy alone.

Shapes:  V rows of P slots in the tower, C numbers of a patch (models/patches.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from bapo_jax.groups import Prompt
from bapo_jax.models.patches import Grid, Layout, Pixels, VisionConfig, features_at, in_slots, lay_out_images, rope_positions


class Sight(Protocol):
    """What gives the images of prompts: tasks/sight.py."""

    row_windows: int  # of the tower's rows in the learner: windows of the largest image of any prompt

    def grids_of(self, prompt: Prompt) -> list[Grid]:
        """The patch grids of a prompt's images, in their order."""

    def patches_of(self, prompt: Prompt) -> np.ndarray:
        """The patches of a prompt's images, float32 [patches, C]; reads the images' files."""

    def kept_bytes(self) -> int:
        """Bytes of the patches that it keeps in memory."""


class Seen(NamedTuple):
    """The images of some prompts, those of equal prompts once, and what each prompt's tokens see of them."""

    sight: Sight
    distinct: list[Prompt]  # those with images
    layout: Layout
    pixel_shape: tuple[int, int, int]  # V, P, C
    feature: list[np.ndarray]  # of each prompt, int32 [prompt tokens]: which feature stands at a token; -1: none
    rope: list[np.ndarray]  # int32 [prompt tokens, 3]: rotary positions
    following: list[int]  # the rotary position of the token behind the prompt

    def pixels(self) -> Pixels:
        """What the tower reads. The images' files are read now, so no pixels lie in memory before."""
        patches = np.concatenate([self.sight.patches_of(prompt) for prompt in self.distinct])
        return Pixels(in_slots(patches, self.layout.order_RxP), self.layout.position_RxPx2, self.layout.image_RxP)


def see(
    prompts: Sequence[Prompt], sight: Sight | None, config: VisionConfig | None, row_windows: int = 0, multiple: int = 1
) -> Seen | None:
    """The images of these prompts, prompts of one id once, in rows as of `lay_out_images`; None where no prompt has an image.

    Raises ValueError where a prompt's image tokens and images do not fit.
    """
    grids = {} if sight is None else {prompt.id: sight.grids_of(prompt) for prompt in prompts}
    if not any(grids.values()):
        return None
    distinct = {prompt.id: prompt for prompt in prompts if grids[prompt.id]}
    layout = lay_out_images(
        [grid for number in distinct for grid in grids[number]], config, row_windows=row_windows, multiple=multiple
    )  # fmt: skip
    features, first = {}, 0
    for number, prompt in distinct.items():
        end = first + sum(h * w for _, h, w in grids[number]) // config.spatial_merge_size**2
        features[number], first = features_at(prompt.tokens, layout.feature_I[first:end], config.image_token), end
    placed = [rope_positions(prompt.tokens, grids[prompt.id], config) for prompt in prompts]
    return Seen(
        sight, list(distinct.values()), layout, (*layout.order_RxP.shape, config.patch_numbers),
        feature=[features.get(prompt.id, np.full(len(prompt.tokens), -1, np.int32)) for prompt in prompts],
        rope=[rope_3xn.T for rope_3xn, _ in placed],
        following=[following for _, following in placed],
    )  # fmt: skip
