"""Qwen2.5-VL against Hugging Face's, and against itself. Tolerance of float32 features and logits (size about 1): 5e-5."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_vl import GRIDS, IMAGE, SHAPES, make_vl, pixels_of, prompt_of, torch_inputs, torch_model  # noqa: F401  (a fixture)

from bapo_jax.models import hf
from bapo_jax.models.attention import masked, xla
from bapo_jax.models.decoder import ImageFeatures, parameters_of
from bapo_jax.models.parameters import VISION_PARAMETERS
from bapo_jax.models.vision.patches import features_at, in_slots, lay_out_images, rope_positions
from bapo_jax.models.vision.tower import attend_within
from bapo_jax.rollout.inprocess import decoding

TOLERANCE = 5e-5


@functools.partial(jax.jit, static_argnames='graph')
def features(params, pixels, position, image, *, graph):
    return nnx.merge(graph, params).vision(pixels, position, image)


def features_of(policy, grids, pixels, **sizes):
    """The tower's features of those images, in the order of image tokens."""
    layout = lay_out_images(grids, policy.config.vision, **sizes)
    slots = in_slots(pixels, layout.order_RxP)
    values = features(policy.params, slots, layout.position_RxPx2, layout.image_RxP, graph=policy.graph)
    return np.asarray(values)[layout.feature_I]


class Rows:
    """The prompts of GRIDS in two rows: two packed end to end, and one alone. All images go through the tower at once."""

    def __init__(self, config, grids=GRIDS):
        self.tokens = [prompt_of(g, seed) for seed, g in enumerate(grids)]
        self.grids, self.pixels = grids, [pixels_of(g, seed) for seed, g in enumerate(grids)]
        layout = lay_out_images([grid for g in grids for grid in g], config.vision)
        positions = [rope_positions(t, g, config.vision)[0] for t, g in zip(self.tokens, grids, strict=True)]
        rows, T = [[0, 1], [2]], max(len(self.tokens[0]) + len(self.tokens[1]), len(self.tokens[2])) + 2
        self.token_BxT, self.segment_BxT = np.zeros((2, T), np.int32), np.zeros((2, T), np.int32)
        self.position_3xBxT = np.zeros((3, 2, T), np.int32)
        self.places = {}
        for b, row in enumerate(rows):
            end = 0
            for i in row:
                at = self.places[i] = (b, slice(end, end + len(self.tokens[i])))
                self.token_BxT[at], self.segment_BxT[at], self.position_3xBxT[:, *at] = self.tokens[i], i + 1, positions[i]
                end += len(self.tokens[i])
        self.slots = in_slots(np.concatenate(self.pixels), layout.order_RxP)
        self.layout, self.at_BxT = layout, features_at(self.token_BxT, layout.feature_I, IMAGE)

    def logits(self, graph, params):
        """[B, T, V], of pixels; to be differentiated."""
        model, layout = nnx.merge(graph, params), self.layout
        values = model.vision(self.slots, layout.position_RxPx2, layout.image_RxP)
        hidden = model(
            self.token_BxT, self.position_3xBxT, lambda *qkv: xla(*qkv, self.segment_BxT), ImageFeatures(values, self.at_BxT)
        )  # fmt: skip
        return model.logits(hidden)


@pytest.mark.parametrize('shape', SHAPES)
def test_features_are_hugging_faces(shape, make_vl):
    import torch

    policy, grids = make_vl(shape), [grid for g in GRIDS for grid in g]
    pixels = pixels_of(grids)
    with torch.no_grad():
        want = torch_model(policy.path).model.visual(torch.tensor(pixels), torch.tensor(grids)).pooler_output.numpy()
    assert want.std() > 0.5
    for sizes in ({}, {'row_windows': 64, 'rows': 3}):
        np.testing.assert_allclose(features_of(policy, grids, pixels, **sizes), want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize('shape', SHAPES)
def test_logits_are_hugging_faces(shape, make_vl):
    import torch

    policy = make_vl(shape)
    rows = Rows(policy.config)
    got = jax.jit(functools.partial(rows.logits, policy.graph))(policy.params)
    for i, place in rows.places.items():
        with torch.no_grad():
            want = torch_model(policy.path)(**torch_inputs(rows.tokens[i], rows.grids[i], rows.pixels[i])).logits[0].numpy()
        assert want.std() > 0.5
        np.testing.assert_allclose(got[place], want, rtol=0, atol=TOLERANCE, err_msg=str(i))


def test_text_alone_is_hugging_faces_with_one_position_or_three(make_vl):
    import torch

    policy, tokens = make_vl(), prompt_of([])[None].repeat(2, 0)
    with torch.no_grad():
        want = torch_model(policy.path)(torch.tensor(tokens)).logits.numpy()
    model, one = nnx.merge(policy.graph, policy.params), np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    a, b = (model.logits(model(tokens, p, lambda *qkv: xla(*qkv, jnp.ones_like(tokens)))) for p in (one, np.stack([one] * 3)))
    np.testing.assert_allclose(a, want, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(a, b)


def test_the_image_processors_pixels_are_read(make_vl):
    """Real images, in the sizes that the processor gives them."""
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    policy, rng = make_vl(), np.random.default_rng(3)
    images = [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in ((37, 90), (64, 16), (9, 11))]
    size = {'shortest_edge': 8 * 8, 'longest_edge': 80 * 80}
    processed = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size)(images, return_tensors='np')
    grids, pixels = processed['image_grid_thw'].tolist(), processed['pixel_values']
    assert len({tuple(grid) for grid in grids}) == 3
    with torch.no_grad():
        want = torch_model(policy.path).model.visual(torch.tensor(pixels), torch.tensor(grids)).pooler_output.numpy()
    np.testing.assert_allclose(features_of(policy, grids, pixels), want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize('grids', [[], *GRIDS])
def test_positions_are_hugging_faces(grids, make_vl):
    import torch

    policy, tokens = make_vl(), prompt_of(grids)
    want, shift = torch_model(policy.path).model.get_rope_index(
        torch.tensor(tokens)[None], torch.tensor(tokens == IMAGE).int()[None], torch.tensor(grids)
    )
    positions, following = rope_positions(tokens, grids, policy.config.vision)
    np.testing.assert_array_equal(positions, want[:, 0].numpy())
    assert following == len(tokens) + shift.item()


@pytest.mark.slow
@pytest.mark.parametrize('shape', list(SHAPES)[:2])
def test_gradients_are_hugging_faces(shape, make_vl):
    """Of the mean of sin(logits) over the tokens of one prompt, every parameter's: 1e-5 of its largest."""
    policy, model = make_vl(shape), torch_model(make_vl(shape).path)
    rows = Rows(policy.config)
    place = rows.places[2]

    def loss(params):
        return jnp.mean(jnp.sin(rows.logits(policy.graph, params)[place]))

    value, gradient = jax.jit(jax.value_and_grad(loss))(policy.params)
    model.zero_grad()
    want = model(**torch_inputs(rows.tokens[2], rows.grids[2], rows.pixels[2])).logits.sin().mean()
    want.backward()
    assert abs(float(value) - want.item()) < 1e-6
    theirs = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    ours = dict(hf.to_hf(policy.config, gradient))
    assert len(ours) == len(theirs)
    for name, of_ours in ours.items():
        inside = name.replace('model.', 'model.language_model.').replace('visual.', 'model.visual.')
        np.testing.assert_allclose(of_ours, theirs[inside], rtol=0, atol=1e-5 * np.abs(theirs[inside]).max(), err_msg=name)


def test_a_window_does_not_see_others_and_an_image_no_other(make_vl):
    """One patch changes: its window's features, with full attention its image's, and no bit of any other."""
    policy, grids = make_vl(), [(1, 8, 8), (1, 4, 4)]
    pixels = pixels_of(grids)
    changed = pixels.copy()
    changed[4] += 1.0  # of the second feature: rows 0-1, columns 2-3, in the first of four windows
    window = np.zeros(20, bool)
    window[[0, 1, 4, 5]] = True
    image = np.arange(20) < 16
    for full, seen in (((), window), ((1,), image)):
        vision = dataclasses.replace(policy.config.vision, fullatt_block_indexes=full)
        graph = hf.abstract_params(dataclasses.replace(policy.config, vision=vision))[0]
        a, b = (features_of(policy._replace(graph=graph), grids, p, row_windows=6) for p in (pixels, changed))
        np.testing.assert_array_equal((a != b).any(axis=1), seen)
        assert np.abs(a - b)[seen].max(axis=1).min() > 1e-4


def test_company_does_not_change_an_image(make_vl):
    policy, grids = make_vl(), GRIDS[2]
    pixels = pixels_of(grids)
    together, starts = features_of(policy, grids, pixels), np.cumsum([0, *(h * w for _, h, w in grids)])
    for i, grid in enumerate(grids):
        alone = features_of(policy, [grid], pixels[starts[i] : starts[i + 1]])
        np.testing.assert_allclose(together[starts[i] // 4 : starts[i + 1] // 4], alone, rtol=0, atol=1e-5)


def test_long_rows_in_blocks_are_the_same_value_and_gradient():
    """Rows of 768 slots take two blocks of queries."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, ct = (jax.random.normal(key, (2, 768, 2, 8)) for key in keys)
    image = np.sort(np.random.default_rng(0).integers(0, 4, (2, 768)), axis=1)

    def at_once(q, k, v):
        return masked(q, k.swapaxes(1, 2), v.swapaxes(1, 2), image[:, :, None] == image[:, None, :])

    got, want = (jax.vjp(f, q, k, v) for f in (lambda *qkv: attend_within(768, *qkv, image), at_once))
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-6)
    for a, b in zip(*(pullback(ct.reshape(2, 768, 16)) for _, pullback in (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_a_prompt_with_images_and_then_a_token_at_a_time_are_the_full_forward_pass(make_vl):
    policy = make_vl()
    rows, slots = Rows(policy.config, [GRIDS[0], [], []]), 64
    tokens, answer = rows.tokens[0], np.array([31, 32, 33])
    positions, following = rope_positions(tokens, GRIDS[0], policy.config.vision)
    after = np.concatenate([positions, np.broadcast_to(following + np.arange(3), (3, 3))], axis=1)
    model, layout = nnx.merge(policy.graph, policy.params), rows.layout
    values = features(policy.params, rows.slots, layout.position_RxPx2, layout.image_RxP, graph=policy.graph)
    whole = np.concatenate([tokens, answer])[None]
    images = ImageFeatures(values, features_at(whole, layout.feature_I, IMAGE))
    want = model(whole, after[:, None], lambda *qkv: xla(*qkv, jnp.ones_like(whole)), images)

    weights, n = decoding.unstacked(policy.params, policy.config), len(tokens)
    of_prompt = ImageFeatures(values, images.at_BxT[:, :n])
    prefill, decode = (jax.jit(f, static_argnums=0) for f in (decoding.prefill, decoding.decode))
    state, cache = prefill(policy.graph, weights, tokens[None], np.array([n]), positions[:, None], of_prompt)
    cache = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, slots - n), (0, 0))), cache)
    for i, token in enumerate(answer):
        np.testing.assert_allclose(state, want[:, n + i - 1], rtol=0, atol=2e-5)
        at, shift = np.array([n + i]), np.array([following - n])
        state, cache = decode(policy.graph, weights, np.array([token]), at, cache, n + i + 1, shift)
    np.testing.assert_allclose(state, want[:, -1], rtol=0, atol=2e-5)


def test_the_rows_of_the_table_are_the_towers_parameters(make_vl):
    for shape in SHAPES:
        config = make_vl(shape).config
        leaves = jax.tree_util.tree_flatten_with_path(hf.abstract_params(config)[1])[0]
        shapes = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
        rows = {p.path: p for p in parameters_of(config)}
        assert shapes.keys() == rows.keys() and set(VISION_PARAMETERS) <= set(rows.values())
        for path in (p for p in shapes if p[0] == 'vision'):
            assert len(shapes[path]) == len(rows[path].axes), path
            assert not rows[path].indices or shapes[path][0] == config.vision.depth, path
