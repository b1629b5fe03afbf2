"""What a policy sees of prompts: each prompt's images once, the patches of each where its features are looked for."""

import dataclasses

import numpy as np
import pytest

from bapo_jax.models.vision.layout import largest_images, see, tower_rows


@pytest.fixture
def vision(pictured):
    return pictured.policy.config.vision


def test_equal_prompts_share_their_images_and_text_has_none(pictured, vision):
    sight, prompts = pictured.sight, pictured.prompts
    seen = see([prompts[1], prompts[3], prompts[0], prompts[1]], sight, vision)
    assert [p.id for p in seen.distinct] == [1, 0]
    np.testing.assert_array_equal(seen.feature[0], seen.feature[3])
    assert (seen.feature[1] == -1).all()
    np.testing.assert_array_equal(seen.rope[1], np.repeat(np.arange(len(prompts[3].tokens))[:, None], 3, axis=1))
    assert seen.following[1] == len(prompts[3].tokens) and seen.following[0] < len(prompts[1].tokens)
    at = [seen.feature[i][seen.feature[i] >= 0] for i in (0, 2)]
    assert len(np.unique(np.concatenate(at))) == sum(map(len, at)) == len(seen.layout.feature_I)
    assert see([prompts[3]], sight, vision) is see(prompts, None, vision) is None


def test_a_prompts_features_are_made_of_its_own_patches_in_their_order(pictured, vision):
    sight, prompts, m2 = pictured.sight, pictured.prompts, vision.spatial_merge_size**2
    seen = see(prompts, sight, vision, row_windows=sight.row_windows, multiple=4)
    pixels = seen.pixels()
    assert pixels.patch_RxPxC.shape == seen.pixel_shape and seen.pixel_shape[0] % 4 == 0
    of_feature = pixels.patch_RxPxC.reshape(-1, m2, vision.patch_numbers)
    for prompt, feature in zip(prompts, seen.feature, strict=True):
        at = feature[prompt.tokens == vision.image_token]
        assert (feature[prompt.tokens != vision.image_token] == -1).all()
        if prompt.images:
            np.testing.assert_array_equal(of_feature[at].reshape(-1, vision.patch_numbers), sight.patches_of(prompt))


def test_a_prompt_that_was_cut_within_its_image_is_refused(pictured, vision):
    prompt = pictured.prompts[0]
    cut = dataclasses.replace(prompt, tokens=prompt.tokens[:5])
    with pytest.raises(ValueError, match='image tokens'):
        see([cut], pictured.sight, vision)


def test_a_dry_run_takes_the_prompts_with_most_to_see(pictured, vision):
    largest = largest_images(pictured.prompts, pictured.sight, 2)
    sizes = sorted((sum(h * w for _, h, w in pictured.sight.grids_of(p)) for p in pictured.prompts), reverse=True)
    assert sum(h * w for _, h, w in largest) == sum(sizes[:2]) and largest_images(pictured.prompts, None, 2) == []
    rows, slots = tower_rows(largest, vision, multiple=8)
    assert rows == 8 and slots % vision.window_slots == 0
