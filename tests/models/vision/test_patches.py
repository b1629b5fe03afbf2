"""Where patches lie, and which positions tokens have, by counting."""

import numpy as np
import pytest

from bapo_jax.models.vision.patches import VisionConfig, features_at, in_slots, lay_out_images, rope_positions, rounded_up

CONFIG = VisionConfig(
    depth=1, hidden_size=32, intermediate_size=20, num_heads=2, in_channels=3, out_hidden_size=32, patch_size=4,
    spatial_merge_size=2, temporal_patch_size=2, window_size=16, fullatt_block_indexes=(), image_token=5,
)  # fmt: skip
GRIDS = [(1, 4, 4), (1, 6, 10), (1, 2, 2), (1, 12, 6)]  # one window, edges on both sides, less than a window, an edge on one


def in_file_order(h, w, m=2):
    """The (row, column) of each patch, as the image processor lists them."""
    return [(bi + i, bj + j) for bi in range(0, h, m) for bj in range(0, w, m) for i in range(m) for j in range(m)]


def test_every_patch_stands_once_at_its_place_in_the_window_of_its_image():
    layout = lay_out_images(GRIDS, CONFIG)
    number, at = [], []
    for n, (_, h, w) in enumerate(GRIDS, start=1):
        number += [n] * (h * w)
        at += in_file_order(h, w)
    filled = layout.order_RxP >= 0
    assert sorted(layout.order_RxP[filled]) == list(range(len(at)))
    assert not layout.image_RxP[~filled].any()
    for patch, image, position in zip(*(x[filled] for x in (layout.order_RxP, layout.image_RxP, layout.position_RxPx2)), strict=True):
        assert (image, tuple(position)) == (number[patch], at[patch])
    # Windows are 4 × 4 patches: the slots of one are of one image, and of one square of it.
    windows = [x.reshape(-1, 16, *x.shape[2:]) for x in (layout.image_RxP, layout.position_RxPx2 // 4)]
    squares = [{(n, *p) for n, p in zip(image, square.tolist(), strict=True) if n} for image, square in zip(*windows, strict=True)]
    assert all(len(square) <= 1 for square in squares)
    assert len(set().union(*squares)) == sum(map(len, squares)) == 1 + 6 + 1 + 6


def test_the_patches_of_a_feature_are_neighbours_and_features_are_in_the_order_of_tokens():
    layout = lay_out_images(GRIDS, CONFIG)
    blocks = layout.order_RxP.reshape(-1, 4)
    np.testing.assert_array_equal(blocks[layout.feature_I], np.arange(sum(h * w for _, h, w in GRIDS)).reshape(-1, 4))


def test_no_image_crosses_the_end_of_a_row():
    layout = lay_out_images(GRIDS, CONFIG, row_windows=9)
    assert layout.order_RxP.shape == (2, 9 * 16)
    assert [set(row[row > 0].tolist()) for row in layout.image_RxP] == [{1, 2, 3}, {4}]


def test_sizes_are_few():
    assert [rounded_up(n) for n in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    rng = np.random.default_rng(0)
    grids = [[(1, *(2 * rng.integers(1, 16, 2)).tolist()) for _ in range(rng.integers(0, 6))] for _ in range(200)]
    assert len({lay_out_images(g, CONFIG).order_RxP.shape for g in grids}) <= 40
    assert {lay_out_images(g, CONFIG, row_windows=64, rows=5).order_RxP.shape for g in grids} == {(5, 64 * 16)}


def test_pixels_and_features_find_their_places():
    layout = lay_out_images(GRIDS, CONFIG)
    pixels = np.random.default_rng(0).standard_normal((152, 7)).astype(np.float32)
    slots = in_slots(pixels, layout.order_RxP)
    np.testing.assert_array_equal(slots[layout.order_RxP == 20], pixels[20:21])
    assert not slots[layout.order_RxP < 0].any()
    tokens = np.array([9, 5, 5, 9, 5])
    np.testing.assert_array_equal(features_at(tokens, np.array([7, 3, 4], np.int32), 5), [-1, 7, 3, -1, 4])
    with pytest.raises(ValueError, match='3 image tokens, and 2 features'):
        features_at(tokens, np.array([7, 3], np.int32), 5)


@pytest.mark.parametrize(
    'grids, sizes, message',
    [
        ([(2, 4, 4)], {}, 'a grid of 2 × 4 × 4 patches is no image'),
        ([(1, 4, 5)], {}, 'multiples of 2'),
        ([(1, 8, 8)], {'row_windows': 3}, 'an image of 4 windows does not fit into a row of 3; give row_windows=4'),
        ([(1, 8, 8)] * 3, {'row_windows': 6, 'rows': 2}, '3 images need 3 rows of 6 windows, and there are 2; raise rows'),
    ],
)
def test_what_does_not_fit_is_refused(grids, sizes, message):
    with pytest.raises(ValueError, match=message):
        lay_out_images(grids, CONFIG, **sizes)


def test_positions_by_hand():
    """Text, an image of 2 × 3 features, text: the image takes as many positions as its longer side."""
    positions, following = rope_positions(np.array([9, 9, 5, 5, 5, 5, 5, 5, 9]), [(1, 4, 6)], CONFIG)
    assert positions.tolist() == [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
    assert following == 6


@pytest.mark.parametrize(
    'tokens, message',
    [([9, 5, 5], 'no 4 image tokens'), ([9, 5, 5, 5, 9, 5], 'no 4 image tokens'), ([9, 9], 'no 4 image tokens'),
     ([9, 5, 5, 5, 5, 9, 5], '1 image tokens behind the last of 1 images')],
)  # fmt: skip
def test_tokens_that_do_not_fit_their_images_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        rope_positions(np.array(tokens), [(1, 4, 4)], CONFIG)
