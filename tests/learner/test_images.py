"""A mini-batch with images: the tower reads each picture once, and learns what it would learn if it read it for every response."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learners import BARE, FULL, assert_close, batch_of, gradient, largest, learner_config, updated
from tiny_vl import logp_of_rows, seen_logp, seen_rows

from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.learner.learner import Learner
from bapo_jax.learner.logprobs import Compute, token_logprobs
from bapo_jax.learner.mini_batch import Sequences, blank_sequences
from bapo_jax.learner.objective import numbers_of
from bapo_jax.learner.sums import Sums
from bapo_jax.learner.update import Program, accumulate
from bapo_jax.models.vision.patches import blank_pixels

pytestmark = pytest.mark.slow
ROWS = {'row_tokens': 256, 'max_prompt_tokens': 128}
SLOTS = {'row_tokens': 128 + 3 * 16, 'slot_tokens': 16, 'max_prompt_tokens': 128}  # a row is one prompt and slots


@pytest.fixture(scope='module')
def make(pictured):
    """A function of fields of the learner's config: that Learner of the policy with eyes."""

    @functools.cache
    def one(fields):
        fields = dict(fields)
        prompt_tokens = fields.pop('max_prompt_tokens')
        config = learner_config(**fields)
        config.model.path, config.rollout.max_prompt_tokens = str(pictured.policy.path), prompt_tokens
        return Learner(config, pictured.policy.config, make_mesh(1, 1, 1), 'xla', sight=pictured.sight)

    return lambda base, **changes: one(tuple({**base, **changes}.items()))


def sequences_of(groups):
    return [g.prompt for g in groups for _ in g.responses], [r.tokens for g in groups for r in g.responses]


@pytest.mark.parametrize('rows', [ROWS, SLOTS], ids=['end to end', 'one prompt and slots'])
def test_scores_are_those_of_each_response_alone(rows, make, pictured):
    learner, groups = make(FULL, **rows), pictured.groups
    scored = learner.score_batch('reference', pictured.policy.params, batch_of(groups))
    want = seen_logp(pictured.policy.config, pictured.policy.params, pictured.sight, *sequences_of(groups))
    for got, one in zip([x for of_group in scored for x in of_group], want, strict=True):
        np.testing.assert_allclose(got, one, rtol=0, atol=2e-5)


class Weighted(NamedTuple):
    sequences: Sequences
    weight: np.ndarray


def test_the_gradient_is_that_of_a_tower_that_reads_the_picture_for_every_response(make, pictured):
    """Of Σ w log π with any weights w, over three micro-batches or more, where all but matrix products is computed again."""
    policy, groups, rng = pictured.policy, pictured.groups, np.random.default_rng(0)
    learner = make(FULL, **ROWS)
    [part] = learner._cut(batch_of(groups), np.arange(len(groups)))
    weights = [[rng.standard_normal(len(r.tokens)).astype(np.float32) for r in g.responses] for g in groups]
    packed = Weighted(part.sequences(), part.on_responses(weights, np.float32))
    compute = Compute(remat='matrix_products')

    def loss(model, features, micro, _):
        return jnp.sum(micro.weight * token_logprobs(model, micro.sequences, 1.0, compute, features)[0]), Sums()

    program = Program(policy.graph, loss, None, learner.mesh, compute)

    def apart(params, inputs, weight_BxT):
        return jnp.sum(weight_BxT * logp_of_rows(policy.graph, params, *inputs))

    prompts, responses = sequences_of(groups)
    inputs = seen_rows(policy.config, pictured.sight, prompts, responses)
    weight_BxT = np.zeros((len(prompts), inputs[2].shape[1] - 1), np.float32)
    for b, (prompt, weight) in enumerate(zip(prompts, [w for of_group in weights for w in of_group], strict=True)):
        weight_BxT[b, len(prompt.tokens) - 1 :][: len(weight)] = weight
    want = jax.grad(apart)(policy.params, inputs, weight_BxT)

    accumulated = jax.jit(lambda p, rows, pixels, n: accumulate(p, None, rows, pixels, n, (), program)[0])
    assert part.layout.filled >= 3
    got = accumulated(policy.params, packed, part.seen.pixels(), part.layout.filled)
    assert largest(want['vision']) > 1e-2 * largest(want)
    assert_close(got['vision'], want['vision'], 1e-4)
    assert_close(got, want, 1e-5)


def loops(jaxpr):
    """The bodies of its loops over micro-batches, which have the shapes of rows."""
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            inner = getattr(value, 'jaxpr', value)
            if hasattr(inner, 'eqns'):
                if equation.primitive.name == 'while':
                    yield inner
                else:
                    yield from loops(inner)


def test_the_tower_is_computed_before_the_loop_over_micro_batches_and_each_picture_lies_there_once(make, pictured):
    learner, batch = make(FULL, **ROWS), batch_of([*pictured.groups, pictured.groups[0]])
    [part] = learner._cut(batch, np.arange(len(batch.groups)))
    shown = {image for image in np.unique(part.seen.layout.image_RxP) if image}
    assert len(shown) == 6  # of five prompts, one with two pictures; one prompt is there twice, and one has none
    assert part.seen.feature[0] is not None and (part.seen.feature[0] == part.seen.feature[6]).all()
    state = learner.init(jax.tree.map(jnp.array, pictured.policy.params))
    rows = learner._pack(part, ('x1', 'x2', 'x3'), [[np.ones(len(r.tokens), np.float32) for r in g.responses] for g in batch.groups], {})
    jaxpr = jax.make_jaxpr(learner.policy.step)(state, rows, 2, numbers_of(learner._config, np.float32(1), 1), part.seen.pixels())
    V, P, C = part.seen.pixel_shape
    assert f'{V},{P},{C}' in str(jaxpr)
    assert any('while' in str(body) or body.eqns for body in loops(jaxpr.jaxpr))
    assert not any(f'f32[{V},{P}' in str(body) for body in loops(jaxpr.jaxpr))


def test_a_frozen_tower_does_not_move(make, pictured):
    state, metrics = updated(make(BARE, **ROWS, mini_batch_groups=6, vision_rate=0.0), pictured.policy, batch_of(pictured.groups))
    params, start = jax.device_get(state.params), pictured.policy.params
    jax.tree.map(np.testing.assert_array_equal, params['vision'], start['vision'])
    assert largest(jax.tree.map(lambda x, y: x - y, params['layers'], start['layers'])) > 5e-5
    assert 'vision' not in gradient(state) and 'vision' not in state.trained and metrics['actor/grad_norm'] > 0
    assert params.keys() == start.keys()


def test_a_run_compiles_a_handful_of_programs_for_pictures_of_all_sizes(make, pictured):
    """Any choice of prompts, their pictures in any order: as many programs as there are numbers of rows of windows."""
    learner, rng = make(BARE, **ROWS, mini_batch_groups=2), np.random.default_rng(0)
    assert pictured.sight.row_windows
    shapes = set()
    for _ in range(40):
        chosen = [pictured.groups[i] for i in rng.choice(6, 2, replace=False)]
        [part] = learner._cut(batch_of(chosen), np.arange(2))
        shapes.add(part.seen and part.seen.pixel_shape)
    assert len(shapes) <= 4  # no picture, or one to three rows


def test_other_hosts_blanks_have_the_shapes_and_dtypes_of_what_host_0_packs(make, pictured):
    learner = make(FULL, **ROWS)
    [part] = learner._cut(batch_of(pictured.groups), np.arange(len(pictured.groups)))
    packed = part.sequences(), part.seen.pixels()
    blank = blank_sequences(part.layout.segment.shape, True), blank_pixels(part.seen.pixel_shape)
    assert jax.tree.structure(packed) == jax.tree.structure(blank)
    for a, b in zip(jax.tree.leaves(packed), jax.tree.leaves(blank), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
