"""A tiny Qwen2.5-VL with a tokenizer, questions with drawn pictures, and groups of responses to them."""

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from group_builders import graded, right
from PIL import Image, ImageDraw
from tiny import Policy

from bapo_jax.groups import Group, Prompt
from bapo_jax.models import hf
from bapo_jax.models.tokenizer import load_tokenizer
from bapo_jax.models.vision.patches import windows_of
from bapo_jax.rollout.engine import FRESH, Draw, Sampling
from bapo_jax.rollout.inprocess.engine import JaxEngine
from bapo_jax.rollout.inprocess.room import Limits
from bapo_jax.tasks import encode_prompts
from bapo_jax.tasks.images import file_image
from bapo_jax.tasks.sight import Sight

# Width and height of the pictures of each question; features are 28 × 28 pixels.
SIZES = [[(120, 90)], [(60, 60), (100, 40)], [(40, 110)], [], [(110, 110)], [(56, 84)]]


class Pictured(NamedTuple):
    policy: Policy
    tokenizer: Any
    sight: Sight
    prompts: list[Prompt]
    groups: list[Group]  # four responses of up to 10 tokens to each prompt, some right and some wrong


@pytest.fixture(scope='session')
def pictured(vl_directory, tmp_path_factory):
    directory, truths = tmp_path_factory.mktemp('pictures'), []
    for i, sizes in enumerate(SIZES):
        references = []
        for j, size in enumerate(sizes):
            picture, path = Image.new('RGB', size, 'white'), directory / f'{i}_{j}.png'
            ImageDraw.Draw(picture).line((3, 5 + 9 * i, size[0] - 7 * j - 3, size[1] - 4), fill='navy', width=3 + j)
            picture.save(path)
            references.append(file_image(path))
        truths.append({'problem': '<image>' * len(sizes) + 'x?' * (1 + i % 3), 'answers': ['5'], 'images': references})
    tokenizer, config = load_tokenizer(vl_directory), hf.read_config(vl_directory)
    policy = Policy(vl_directory, config, hf.abstract_params(config)[0], jax.tree.map(np.array, hf.load_params(vl_directory, config)))
    sight = Sight(vl_directory, config.vision.image_token)
    prompts = encode_prompts('geometry', truths, tokenizer, template='plain', sight=sight)
    sight.row_windows = max(windows_of(grid, config.vision) for prompt in prompts for grid in sight.grids_of(prompt))
    engine = JaxEngine(policy.graph, policy.config, (3,), Limits(32, 128), sight=sight)
    engine.load(policy.params, 0)
    answers = engine.generate(prompts, 4, Sampling(1.0, 10), [Draw(0, 0, FRESH)] * len(prompts))
    groups = [graded(p, r, right(k, 4)) for p, r, k in zip(prompts, answers, (1, 2, 3, 2, 1, 3), strict=True)]
    return Pictured(policy, tokenizer, sight, prompts, groups)
