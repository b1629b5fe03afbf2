"""The config's choice of selector."""

import numpy as np
import pytest
from ml_collections import ConfigDict

from bapo_jax.groups import Prompt
from bapo_jax.prompts.dots import Dots
from bapo_jax.prompts.epochs import ShuffledEpochs
from bapo_jax.prompts.mixed import MixedLast
from bapo_jax.prompts.mopps import Mopps
from bapo_jax.prompts.prioritised import Prioritised
from bapo_jax.prompts.selector import make_selector

PROMPTS = [Prompt(i, 'countdown', np.array([i], np.int32), None) for i in range(40)]


def config(selector: str) -> ConfigDict:
    return ConfigDict({
        'seed': 3,
        'prompts': {'selector': selector, 'mopps': {'candidates': 5, 'target': 0.5, 'decay': 1.0}, 'prioritised': {'rate': 0.5},
                    'adaprefix': {'gain': 0.25, 'withdrawal': (0.5, 1.0)},
                    'dots': {'references': 6, 'cycle': 2, 'tau': 1e-3, 'embeddings': 'ignored'}},
        'rollout': {'max_response_tokens': 8},
    })  # fmt: skip


def test_shuffled_epochs_are_the_stream_of_the_seed():
    selector, same = make_selector(config('shuffled'), PROMPTS, 4), ShuffledEpochs(PROMPTS, 4, seed=3)
    assert isinstance(selector, ShuffledEpochs)
    assert [p.id for p in selector.next()] == [p.id for p in same.next()]
    assert selector.metrics() == {}


def test_mopps_takes_its_fields_from_the_section_prompts():
    selector, same = make_selector(config('mopps'), PROMPTS, 4), Mopps(PROMPTS, 4, 3, candidates=5, target=0.5, decay=1.0)
    assert isinstance(selector, Mopps)
    assert [p.id for p in selector.next()] == [p.id for p in same.next()]
    assert selector.metrics()['prompts/candidates'] == 20


def test_prioritised_takes_its_field_from_the_section_prompts():
    selector, same = make_selector(config('prioritised'), PROMPTS, 4), Prioritised(PROMPTS, 4, 3, rate=0.5)
    assert isinstance(selector, Prioritised)
    assert [p.id for p in selector.next()] == [p.id for p in same.next()]


def test_adaprefix_gets_the_steps_the_solver_and_the_limit():
    solution = np.arange(8, dtype=np.int32)
    selector = make_selector(config('adaprefix'), PROMPTS, 4, steps=4, solve=lambda prompt, rng: solution)
    given = [selector.begin(selector.next())[0].length for _ in range(5)]
    assert given == [4, 4, 2, 0, 0]  # withdrawn between steps 2 and 4
    long = make_selector(config('adaprefix'), PROMPTS, 4, steps=4, solve=lambda prompt, rng: np.arange(9, dtype=np.int32))
    assert [begun.length for begun in long.begin(long.next())] == [0] * 4


def test_dots_gets_its_fields_and_the_embeddings():
    asked = []
    selector = make_selector(config('dots'), PROMPTS, 4, embed=lambda prompts: asked.append(prompts) or np.eye(40, dtype=np.float32))
    references = selector.references()
    selector.observe([])
    assert isinstance(selector, Dots) and len(references) == 6 and len(selector.next()) == 4
    assert asked == [PROMPTS]


def test_mixed_needs_no_field():
    assert isinstance(make_selector(config('mixed'), PROMPTS, 4), MixedLast)


def test_an_unknown_selector_is_refused():
    with pytest.raises(ValueError, match=r"prompts\.selector='hard' is unknown; choose one of shuffled, mixed, mopps, prioritised, adaprefix, dots"):
        make_selector(config('hard'), PROMPTS, 4)
