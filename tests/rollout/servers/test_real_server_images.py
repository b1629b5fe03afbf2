"""A real vLLM server of a policy that reads images: the trainer's log-probs, other vision towers, and what is refused."""

import json

import jax
import numpy as np
import pytest
from group_builders import version_of
from tiny_vl import seen_logp

from bapo_jax.rollout.engine import FRESH, Draw, RolloutError, Sampling
from bapo_jax.rollout.vllm import client
from bapo_jax.rollout.vllm.loading import PolicyRefused
from bapo_jax.tasks.sight import Sight
from bapo_jax.weights.manifest import MANIFEST
from bapo_jax.weights.publish import publish

pytestmark = pytest.mark.slow
G, TOLERANCE = 4, 1e-4


def generate(engine, prompts, temperature=1.0, max_tokens=48):
    return engine.generate(prompts, G, Sampling(temperature, max_tokens), [Draw(0, 1, FRESH)] * len(prompts))


def differences(seeing, params, prompts, answers, temperature=1.0):
    """For each response, the largest difference of a log-prob from the trainer's."""
    asked = [p for p, responses in zip(prompts, answers, strict=True) for _ in responses]
    responses = [r for members in answers for r in members]
    want = seen_logp(seeing.config, params, seeing.sight, asked, [r.tokens for r in responses], temperature)
    return np.array([np.abs(r.logp - logp).max() for r, logp in zip(responses, want, strict=True)])


def test_log_probs_are_the_trainers_also_after_reloads_of_all_weights_and_of_the_vision_tower_alone(
    seeing, seeing_server, connect_seeing
):
    prompts = seeing.prompts
    assert [len(p.images) for p in prompts] == [1, 1, 1, 1, 2, 0]
    assert len({tuple(seeing.sight.grid(i)) for p in prompts for i in p.images}) == 4
    engine, tower_moved = connect_seeing(seeing_server), {**seeing.params, 'vision': seeing.moved['vision']}
    has_images = np.repeat([bool(p.images) for p in prompts], G)
    for version, (params, before, temperature) in enumerate([
        (seeing.params, seeing.moved, 1.0), (seeing.moved, seeing.params, 0.6), (seeing.params, seeing.moved, 1.0),
        (tower_moved, seeing.params, 1.0),
    ]):  # fmt: skip
        engine.load(params, version)
        answers = generate(engine, prompts, temperature)
        assert {version_of(r) for members in answers for r in members} == {version}
        assert differences(seeing, params, prompts, answers, temperature).max() < TOLERANCE
        others = differences(seeing, before, prompts, answers, temperature)
        assert np.median(others[has_images]) > 100 * TOLERANCE
    assert others[~has_images].max() < TOLERANCE  # text alone has the same log-probs with any tower


def test_an_image_token_that_the_policy_writes_is_read_as_a_word_and_not_trained_on(seeing, seeing_server, connect_seeing):
    engine, image_token = connect_seeing(seeing_server), seeing.config.vision.image_token
    tokens = np.concatenate([r.tokens for members in generate(engine, seeing.prompts) for r in members])
    frequent = np.bincount(tokens).argmax()
    params = jax.tree.map(np.array, seeing.params)
    params['embedding']['embedding'][image_token] = params['embedding']['embedding'][frequent]  # as likely then
    engine.load(params, 1)
    answers = generate(engine, seeing.prompts)
    assert differences(seeing, params, seeing.prompts, answers).max() < TOLERANCE
    responses = [r for members in answers for r in members]
    wrote = [r for r in responses if image_token in r.tokens]
    assert wrote and any(image_token in r.tokens[:-1] for r in wrote)
    for response in responses:
        np.testing.assert_array_equal(response.trained_on, response.tokens != image_token)


@pytest.mark.parametrize('least, most', [(64 * 28 * 28, 128 * 28 * 28), (4 * 28 * 28, 4 * 28 * 28)])
def test_a_server_that_resizes_images_again_is_found_out(seeing, seeing_server, connect_seeing, vl_directory, least, most):
    image_token = seeing.config.vision.image_token
    other = Sight(vl_directory, image_token, least, most)
    prompt = seeing.prompts[4]
    images = prompt.images
    tokens = other.expanded(seeing.sight.collapsed(prompt.tokens, images), images)
    theirs, ours = r'\[\d+, \d+\]', str([other.features(i) for i in images]).replace('[', r'\[')
    with pytest.raises(RolloutError, match=rf'images have {theirs} features on the server and {ours} in the trainer.*model\.pixels'):
        generate(connect_seeing(seeing_server, sight=other), [prompt.__class__(0, 'geometry', tokens, prompt.ground_truth)])


def test_a_policy_of_another_vision_tower_is_refused_by_name(seeing, seeing_server, connect_seeing, monkeypatch):
    def publish_with_other_depth(*args):
        path = publish(*args)
        manifest = json.loads((path / MANIFEST).read_text())
        manifest['model']['vision_config.depth'] = 32
        (path / MANIFEST).write_text(json.dumps(manifest))
        return path

    engine = connect_seeing(seeing_server)
    wider = jax.tree.map(np.array, seeing.params)
    wider['vision']['merge_norm']['scale'] = np.ones(80, np.float32)
    with pytest.raises(PolicyRefused, match=r'visual\.merger\.ln_q\.weight has shape \(80,\), but \(64,\) in .*; serve the model directory that the run trains'):
        engine.load(wider, 1)
    monkeypatch.setattr(client, 'publish', publish_with_other_depth)
    with pytest.raises(PolicyRefused, match=r'another model: vision_config\.depth 32 \(the server has 3\)'):
        engine.load(seeing.moved, 2)
