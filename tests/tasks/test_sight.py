"""What a policy sees of an image is what Hugging Face's processor makes of it; prompts have a token for each feature."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.tasks.sight import Sight
from bapo_jax.tasks import encode_prompts, leave_out_long, refuse_long
from bapo_jax.tasks.images import file_image

MARK = 7
SIZES = [(90, 37), (64, 160), (41, 41)]  # width, height


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    directory, rng, references = tmp_path_factory.mktemp('images'), np.random.default_rng(0), []
    for number, (width, height) in enumerate(SIZES):
        path = directory / f'{number}.png'
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
        references.append(file_image(path))
    return references


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    """A model directory with a processor of patches of 4 pixels."""
    path = tmp_path_factory.mktemp('model')
    settings = {'patch_size': 4, 'merge_size': 2, 'size': {'shortest_edge': 16 * 16, 'longest_edge': 64 * 64}}
    (path / 'preprocessor_config.json').write_text(json.dumps({'image_processor_type': 'Qwen2VLImageProcessor', **settings}))
    return path


def processed(images, **size):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {'shortest_edge': 16 * 16, 'longest_edge': 64 * 64} | size
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size)([Image.open(i['file']) for i in images], return_tensors='np')


@pytest.mark.parametrize('least, most', [(0, 0), (80 * 80, 100 * 100), (0, 24 * 24)])
def test_patches_and_grids_are_hugging_faces(least, most, model, images):
    sight, stated = Sight(model, MARK, least, most), {'shortest_edge': least, 'longest_edge': most}
    want = processed(images, **{name: pixels for name, pixels in stated.items() if pixels})
    assert [list(sight.grid(i)) for i in images] == want['image_grid_thw'].tolist()
    np.testing.assert_array_equal(sight.patches(images), want['pixel_values'])


def test_a_server_that_resizes_again_sees_the_same_patches(model, images):
    sight = Sight(model, MARK)
    for image in images:
        sent = Image.open(io.BytesIO(base64.b64decode(sight.data_url(image).partition(',')[2])))
        assert (sent.height // 4, sent.width // 4) == tuple(sight.grid(image)[1:])
        again = sight._processor(sent)['pixel_values']
        np.testing.assert_array_equal(again, sight.patches([image]))


def test_a_prompt_has_a_token_for_each_feature_and_back(model, images):
    sight, tokens = Sight(model, MARK), np.array([1, MARK, 2, MARK, MARK, 3], np.int32)
    expanded = sight.expanded(tokens, images)
    counts = [sight.features(i) for i in images]
    assert counts == [rows * columns // 4 for _, rows, columns in map(sight.grid, images)] and len(set(counts)) == 3
    want = [1, *[MARK] * counts[0], 2, *[MARK] * (counts[1] + counts[2]), 3]
    assert expanded.tolist() == want and expanded.dtype == np.int32
    np.testing.assert_array_equal(sight.collapsed(expanded, images), tokens)
    with pytest.raises(ValueError, match='3 image placeholders but 2 images; write one for each'):
        sight.expanded(tokens, images[:2])


def test_patches_are_kept_up_to_a_bound_and_cut_again_when_they_have_gone(model, images, monkeypatch):
    sight, opened = Sight(model, MARK), []
    monkeypatch.setattr(sight, 'resized', lambda image, resized=sight.resized: opened.append(image['sha256']) or resized(image))
    whole = sight.patches(images)
    np.testing.assert_array_equal(sight.patches(images), whole)
    assert len(opened) == 3 and sight.kept_bytes() == whole.nbytes

    sight = Sight(model, MARK, kept_bytes=whole.nbytes - 1)
    np.testing.assert_array_equal(sight.patches(images), whole)
    assert 0 < sight.kept_bytes() < whole.nbytes


def test_prompts_are_as_long_as_their_images_make_them(model, images):
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(['<|vision_start|>', '<|image_pad|>', '<|vision_end|>'], special_tokens=True)
    mark = tokenizer.convert_tokens_to_ids('<|image_pad|>')
    truths = [{'problem': '<image>x<image>', 'answers': ['1'], 'images': images[:2]}, {'problem': 'x', 'answers': ['1'], 'images': []}]
    sight = Sight(model, mark)
    prompts = encode_prompts('geometry', truths, tokenizer, template='plain', sight=sight)
    assert [np.count_nonzero(p.tokens == mark) for p in prompts] == [sum(map(sight.features, images[:2])), 0]
    assert [len(p.images) for p in prompts] == [2, 0]
    with pytest.raises(ValueError, match='no vision tower; set model.path to a Qwen2.5-VL model'):
        encode_prompts('geometry', truths, tokenizer, template='plain')


def test_a_directory_without_a_processor_is_named(tmp_path, images):
    with pytest.raises(ValueError, match=f'model.path={str(tmp_path)!r}: the image processor in preprocessor_config.json cannot be used'):
        Sight(tmp_path, MARK).grid(images[0])


@pytest.mark.parametrize('settings', [
    '[]', '{"patch_size": "x"}', '{"patch_size": 0}', '{"merge_size": null}', '{"temporal_patch_size": "q"}', '{"size": 5}',
    '{"size": {"height": 3, "width": 3}}', '{"size": {"shortest_edge": "a", "longest_edge": 4}}', '{"min_pixels": "3"}',
    '{"min_pixels": 100000, "max_pixels": 10}', '{"image_mean": [1]}', '{"image_std": [0, 0, 0]}', '{"rescale_factor": "x"}', '{',
])  # fmt: skip
def test_a_processors_file_of_another_shape_is_named(settings, tmp_path, images):
    (tmp_path / 'preprocessor_config.json').write_text(settings)
    with pytest.raises(ValueError, match=f'model.path={str(tmp_path)!r}: the image processor in preprocessor_config.json cannot be used'):
        Sight(tmp_path, MARK).grid(images[0])


def test_a_processor_of_another_model_and_pixels_that_leave_no_size_are_refused(model, images):
    Sight(model, MARK, tower=(4, 2, 2)).grid(images[0])
    for tower in ((14, 2, 2), (4, 3, 2), (4, 2, 1)):
        with pytest.raises(ValueError, match=r'patch_size.* are \(4, 2, 2\) in preprocessor_config.json, but .* in vision_config'):
            Sight(model, MARK, tower=tower).grid(images[0])
    with pytest.raises(ValueError, match=r'model.pixels=\(5000, 0\) .*contradict each other; set both'):
        Sight(model, MARK, least_pixels=5000).grid(images[0])
    Sight(model, MARK, 5000, 9000).grid(images[0])


def test_a_prompt_that_outgrows_its_limit_with_its_images_is_refused_with_both_remedies(model, images):
    truths = [{'problem': 'x', 'answers': ['1']}, {'problem': '<image>' + 'x', 'answers': ['1'], 'images': images[1:2]}]
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({'additional_special_tokens': ['<|vision_start|>', '<|image_pad|>', '<|vision_end|>']})
    sight = Sight(model, tokenizer.convert_tokens_to_ids('<|image_pad|>'))
    text, seen = encode_prompts('geometry', truths, tokenizer, template='plain', sight=sight)
    features = sight.features(images[1])
    assert len(seen.tokens) == len(text.tokens) + features + 2 and features > 20
    most = len(text.tokens) + 10
    with pytest.raises(ValueError, match=r'geo, problem 2 of 2: the prompt has \d+ tokens.*lower the upper limit in model.pixels'):
        refuse_long([text, seen], most, 'geo')
    with pytest.raises(ValueError, match=r'all 1 prompts are longer than .*lower the upper limit in model.pixels'):
        leave_out_long([seen], most)
    assert leave_out_long([text, seen], most) == [text]
