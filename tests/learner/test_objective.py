"""A row's objective on packed arrays, against its closed form in numpy. Tolerance 1e-5 relative (float32) unless said otherwise."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learners import learner_config

from bapo_jax.groups import LANES, Author
from bapo_jax.learner.losses import SURROGATES, Clip, cross_entropy, k3, shaped
from bapo_jax.learner.mini_batch import Rows, Sequences
from bapo_jax.learner.objective import KL, Objective, Term, evaluate_objective, numbers_of, objective_of, switched
from bapo_jax.learner.policy import policy_metrics
from bapo_jax.learner.sums import Updated

PLAIN = Objective('token', (Term(Author.POLICY, SURROGATES['clip'], 'rl'),), Clip(0.2, 0.3, 3.0), 'behaviour', None, None, (), False)
NUMBERS = {'temperature': np.float32(1), 'kl_coef': np.float32(0.3), 'entropy_coef': np.float32(0.05)}
R, T = 2, 8


@pytest.fixture
def rows():
    """Two rows: three responses, one token in the middle of the first not trained on, prompts and padding around them."""
    rng = np.random.default_rng(0)
    response = np.array([[0, 1, 1, 0, 1, 0, 2, 2], [0, 0, 1, 1, 1, 1, 0, 0]], np.int32)
    on = response > 0
    origin = np.array([[1] * 5 + [3] * 3, [4] * 8], np.int8) * on

    def draw(scale):
        return np.where(on, rng.normal(0, scale, (R, T)), 0).astype(np.float32)

    behaviour = draw(1) - 2 * on.astype(np.float32)
    roles = {'proximal': behaviour + draw(0.3), 'reference': behaviour + draw(0.5), 'previous': behaviour + draw(0.4)}
    zeros = np.zeros((R, T), np.int32)
    sequences = Sequences(zeros, zeros, zeros, response)
    return Rows(sequences, origin, behaviour, draw(1), {'rl': np.abs(draw(0.2))}, roles)


@pytest.fixture
def logp(rows):
    """Of π_θ, with numbers that are nobody's where no response token is."""
    on = rows.sequences.response > 0
    moved = rows.behaviour + np.random.default_rng(1).normal(0, 0.3, (R, T)).astype(np.float32)
    return np.where(on, moved, np.float32(-777))


@pytest.fixture
def entropy(rows):
    return np.where(rows.sequences.response > 0, np.random.default_rng(2).uniform(0, 3, (R, T)), 55).astype(np.float32)


def evaluate(objective, rows, logp, entropy, numbers=NUMBERS):
    return evaluate_objective(objective, jax.tree.map(jnp.asarray, rows), jnp.asarray(logp), jnp.asarray(entropy), numbers)


def by_hand(rows, logp, entropy, anchor='behaviour', kl=None, cap=None, entropy_coef=0.0):
    """The value, in float64 and over response tokens alone."""
    on = rows.sequences.response > 0
    roles = {'behaviour': rows.behaviour, **rows.roles}
    x = {name: a.astype(np.float64)[on] for name, a in {**roles, 'logp': logp, 'A': rows.advantage, 'w': rows.weight['rl']}.items()}
    ratio = np.exp(x['logp'] - x[anchor])
    loss = -np.minimum(ratio * x['A'], np.clip(ratio, 0.8, 1.3) * x['A'])
    loss = np.where(x['A'] < 0, np.minimum(loss, -3 * x['A']), loss)
    if cap:
        loss = loss * np.minimum(np.exp(x['proximal'] - x['behaviour']), cap)
    penalty = 0.0
    if kl:
        gap = x[kl] - x['logp']
        penalty = 0.3 * (np.exp(gap) - gap - 1)
    return (x['w'] * (loss + penalty - entropy_coef * entropy[on])).sum()


@pytest.mark.parametrize('anchor', ['behaviour', 'proximal'])
@pytest.mark.parametrize('kl', [None, 'behaviour', 'reference'])
@pytest.mark.parametrize('cap', [None, 1.1])
@pytest.mark.parametrize('has_entropy', [False, True])
def test_the_value_is_the_closed_form(anchor, kl, cap, has_entropy, rows, logp, entropy):
    terms = () if kl is None else (KL(kl, k3),)
    objective = dataclasses.replace(PLAIN, anchor=anchor, kl=terms, importance_cap=cap, entropy=has_entropy)
    value, _ = evaluate(objective, rows, logp, entropy)
    assert float(value) == pytest.approx(by_hand(rows, logp, entropy, anchor, kl, cap, 0.05 * has_entropy), rel=1e-5, abs=1e-6)


def test_the_importance_weight_multiplies_the_surrogate_only(rows, logp, entropy):
    plain = dataclasses.replace(PLAIN, anchor='proximal', kl=(KL('behaviour', k3),))
    _, want = evaluate(plain, rows, logp, entropy)
    _, got = evaluate(dataclasses.replace(plain, importance_cap=2.0), rows, logp, entropy)
    changed = [
        name for of_got, of_want in zip(got, want, strict=True) for name in of_want if not np.array_equal(of_got[name], of_want[name])
    ]
    assert changed == ['actor/pg_loss']
    # A weight that is the same for all tokens is a factor.
    same = rows._replace(roles={**rows.roles, 'proximal': rows.behaviour + np.float32(np.log(1.5))})
    _, one = evaluate(plain, same, logp, entropy)
    _, half_more = evaluate(dataclasses.replace(plain, importance_cap=2.0), same, logp, entropy)
    assert float(half_more.weighted['actor/pg_loss']) == pytest.approx(1.5 * float(one.weighted['actor/pg_loss']), rel=1e-5)


def test_what_lies_where_no_response_token_is_counts_in_nothing(rows, logp, entropy):
    """Neither in the value, nor in a metric, nor in the gradient."""
    objective = dataclasses.replace(PLAIN, anchor='proximal', kl=(KL('reference', k3),), entropy=True, importance_cap=2.0)
    off = rows.sequences.response == 0
    want = evaluate(objective, rows, logp, entropy)
    for there in (0.0, -1e4, -np.inf, np.nan):
        got = evaluate(objective, rows, np.where(off, np.float32(there), logp), np.where(off, np.float32(9), entropy))
        jax.tree.map(np.testing.assert_array_equal, got, want)
    gradient = jax.grad(lambda x, h: evaluate(objective, rows, x, h)[0], argnums=(0, 1))(jnp.asarray(logp), jnp.asarray(entropy))
    for g in gradient:
        assert (np.asarray(g)[off] == 0).all() and (np.asarray(g)[~off] != 0).any()


def test_behaviour_and_proximal_anchor_and_decoupled_are_one_where_alpha_is_pi(rows, entropy):
    """GRPO is BAPO on-policy: value, metrics and gradient, bit for bit."""
    logp = rows.behaviour
    same = rows._replace(roles={'proximal': rows.behaviour})
    results = []
    for anchor, cap in (('behaviour', None), ('proximal', None), ('proximal', 2.0)):
        objective = dataclasses.replace(PLAIN, anchor=anchor, importance_cap=cap, kl=(KL('behaviour', k3),))
        results.append(jax.value_and_grad(lambda x, o=objective: evaluate(o, same, x, entropy), has_aux=True)(jnp.asarray(logp)))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, results[0])
    (value, sums), _ = results[0]
    assert float(value) == pytest.approx(-float((rows.weight['rl'] * rows.advantage).sum()), rel=1e-6)
    assert sums.over_tokens['actor/kl_loss'] == sums.over_tokens['actor/pg_clipfrac'] == sums.over_tokens['actor/ppo_kl'] == 0


def test_penalties_towards_several_policies_add_up_each_with_its_own_share(rows, logp, entropy):
    """β (λ k3(π_ref) + (1 - λ) k3(π_prev)); what is logged is the sum without β. Here every token weighs 1."""
    rows = rows._replace(weight={'rl': (rows.sequences.response > 0).astype(np.float32)})

    def penalty(*terms, **shares):
        numbers = {**NUMBERS, **{name: np.float32(x) for name, x in shares.items()}}
        plain = evaluate(PLAIN, rows, logp, entropy, numbers)[0]
        value, sums = evaluate(dataclasses.replace(PLAIN, kl=terms), rows, logp, entropy, numbers)
        assert float(value - plain) == pytest.approx(0.3 * float(sums.over_tokens['actor/kl_loss']), rel=1e-4, abs=1e-6)
        return float(sums.over_tokens['actor/kl_loss'])

    a, b = KL('reference', k3, 'one'), KL('previous', k3, 'other')
    first, second = penalty(KL('reference', k3)), penalty(KL('previous', k3))
    assert min(first, second) > 1e-3
    assert penalty(a, b, one=0.7, other=0.3) == pytest.approx(0.7 * first + 0.3 * second, rel=1e-5)
    assert penalty(a, b, one=0, other=1) == pytest.approx(second, rel=1e-6)


def test_a_clip_centre_is_the_roles_ratio_to_the_behaviour_policy(rows, entropy):
    """π_θ = π_prox, 2 times α: held with the centre at 1, not with the centre at 2."""
    on = rows.sequences.response > 0
    moved = np.where(on, rows.behaviour + np.float32(np.log(2)), 0).astype(np.float32)
    good = rows._replace(advantage=on.astype(np.float32), roles={'proximal': moved})
    held, free = (
        evaluate(dataclasses.replace(PLAIN, clip_centre=centre), good, moved, entropy)[1] for centre in (None, 'proximal')
    )
    assert float(held.over_tokens['actor/pg_clipfrac']) == on.sum() and free.over_tokens['actor/pg_clipfrac'] == 0
    assert float(held.weighted['actor/pg_loss']) == pytest.approx(-1.3 * rows.weight['rl'].sum(), rel=1e-5)
    assert float(free.weighted['actor/pg_loss']) == pytest.approx(-2 * rows.weight['rl'].sum(), rel=1e-5)


def test_sums_by_origin_are_over_an_origins_response_tokens(rows, logp, entropy):
    """Of the ratio to the policy that answered, whatever the anchor is."""
    _, sums = evaluate(dataclasses.replace(PLAIN, anchor='proximal'), rows, logp, entropy)
    x = logp.astype(np.float64) - rows.behaviour
    held = np.exp(logp - rows.roles['proximal'])
    clipped = (held * rows.advantage > np.clip(held, 0.8, 1.3) * rows.advantage) & (rows.sequences.response > 0)
    for i in range(LANES):
        of = rows.origin == 1 + i
        for name, values in {
            'tokens': np.ones_like(x), 'ratio': np.exp(x), 'squared_ratio': np.exp(2 * x), 'tv': np.maximum(1 - np.exp(x), 0),
            'clipped': clipped.astype(float), 'gap': np.abs(x), 'k3': np.exp(x) - 1 - x,
        }.items():  # fmt: skip
            np.testing.assert_allclose(sums.by_origin[name][i], values[of].sum(), rtol=1e-5, err_msg=f'{name} {i}')
        assert sums.largest['gap'][i] == pytest.approx(np.abs(x[of]).max(initial=0), rel=1e-6)
    assert sums.by_origin['tokens'].tolist() == [3, 0, 2, 4]


def test_what_is_logged_of_tokens_is_their_mean_whatever_the_loss_weighs_them_by(rows, logp, entropy):
    """One nat is logged as one nat, also where the loss divides by the length limit (Dr.GRPO) or by a response's length."""
    on = rows.sequences.response > 0
    objective = dataclasses.replace(PLAIN, anchor='proximal', kl=(KL('reference', k3),))
    gap, ratio = (rows.roles['reference'] - logp)[on].astype(float), np.exp((logp - rows.roles['proximal'])[on].astype(float))
    advantage = rows.advantage[on]
    want = {
        'actor/kl_loss': (np.exp(gap) - gap - 1).mean(), 'actor/entropy': entropy[on].mean(), 'actor/ppo_kl': -np.log(ratio).mean(),
        'actor/pg_clipfrac': (ratio * advantage > np.clip(ratio, 0.8, 1.3) * advantage).mean(),
    }  # fmt: skip
    for weight in (np.where(on, 1 / on.sum(), 0), np.where(on, 1e-4, 0), rows.weight['rl']):
        of_weight = rows._replace(weight={'rl': weight.astype(np.float32)})
        value, sums = evaluate(objective, of_weight, logp, entropy)
        logged = policy_metrics([jax.device_get(Updated(sums, np.float32(1), np.int32(0)))], ('x1', 'x2', 'x3', 'replay'))
        assert {name: logged[name] for name in want} == pytest.approx(want, rel=1e-4)
        assert logged['actor/pg_loss'] + 0.3 * (weight[on] * (np.exp(gap) - gap - 1)).sum() == pytest.approx(float(value), rel=1e-4)


@pytest.mark.parametrize(
    'changes, roles',
    [
        ({'anchor': 'behaviour', 'kl_target': 'behaviour'}, ()),
        ({'anchor': 'behaviour', 'kl_target': 'none'}, ()),
        ({'anchor': 'proximal', 'kl_target': 'behaviour'}, ('proximal',)),
        ({'anchor': 'decoupled', 'kl_target': 'none'}, ('proximal',)),
        ({'anchor': 'behaviour', 'kl_target': 'reference'}, ('reference',)),
        ({'anchor': 'proximal', 'kl_target': 'reference'}, ('proximal', 'reference')),
        ({'anchor': 'behaviour', 'kl_target': 'none', 'clip_centre': 'proximal'}, ('proximal',)),
        ({'anchor': 'behaviour', 'kl_target': 'convex'}, ('previous', 'reference')),
        ({'anchor': 'behaviour', 'kl_target': 'none', 'trust__kind': 'second_moment'}, ('proximal',)),
        ({'anchor': 'behaviour', 'kl_target': 'none', 'trust__kind': 'staleness'}, ('proximal',)),
        ({'anchor': 'behaviour', 'kl_target': 'none', 'trust__kind': 'success'}, ()),
    ],
)
def test_the_roles_that_are_scored_are_those_that_the_objective_reads(changes, roles):
    assert objective_of(learner_config(**changes).learner).roles == roles


def test_an_objective_is_made_of_the_config_and_names_a_compiled_program():
    """Equal configs give equal objectives with one hash: a compiled step is found again."""
    c = learner_config(anchor='decoupled', importance_cap=1.5, clip_low=0.1, clip_high=0.4, dual_clip=0.0, entropy_coef=0.0).learner
    objective = objective_of(c)
    assert (objective.anchor, objective.importance_cap, objective.entropy) == ('proximal', 1.5, False)
    assert objective.clip == Clip(0.1, 0.4, None)
    assert objective.kl == (KL('behaviour', k3),)
    again = objective_of(c)
    assert objective == again and hash(objective) == hash(again)
    with pytest.raises(dataclasses.FrozenInstanceError):
        objective.anchor = 'behaviour'


def test_numbers_are_traced_so_another_value_compiles_nothing(rows, logp, entropy):
    traced = []

    @jax.jit
    def value(rows, logp, numbers):
        traced.append(1)
        objective = dataclasses.replace(PLAIN, kl=(KL('behaviour', k3),))
        return evaluate_objective(objective, rows, logp, jnp.asarray(entropy), numbers)[0]

    values = set()
    for coefficient in (0.0, 0.1, 0.2):
        numbers = numbers_of(learner_config(kl_coef=coefficient).learner, 1.0, 1)
        assert all(x.dtype == np.float32 for x in numbers.values())
        values.add(float(value(rows, logp, numbers)))
    assert len(values) == 3 and len(traced) == 1


def test_the_switch_comes_after_its_step():
    learner = learner_config(switch_step=4).learner
    assert [step for step in range(1, 8) if switched(learner, step)] == [5, 6, 7]
    assert not any(switched(learner_config(switch_step=0).learner, step) for step in range(8))


def test_factors_multiply_the_advantage_and_the_clips_ends_and_1_is_no_change(rows, logp, entropy):
    """By hand, token by token; what is logged is the share of the policy's tokens with a factor below 1."""
    on = rows.sequences.response > 0
    objective = dataclasses.replace(PLAIN, entropy=True)
    ones = {name: on.astype(np.float32) for name in ('advantage', 'low', 'high')}
    want, plain_sums = evaluate(objective, rows, logp, entropy)
    got, sums = evaluate(objective, rows._replace(factors=ones), logp, entropy)
    assert got == want and sums.over_tokens.pop('actor/trust_narrowed') == 0
    jax.tree.map(np.testing.assert_array_equal, sums, plain_sums)
    drawn = {name: np.where(on, np.random.default_rng(i).choice([0.1, 0.5, 1, 1, 1], (R, T)), 0) for i, name in enumerate(ones)}
    factors = {name: x.astype(np.float32) for name, x in drawn.items()}
    value, sums = evaluate(objective, rows._replace(factors=factors), logp, entropy)
    w, f = rows.weight['rl'][on].astype(float), {name: x[on] for name, x in drawn.items()}
    a = rows.advantage[on] * f['advantage']
    ratio = np.exp(logp[on].astype(float) - rows.behaviour[on])
    loss = -np.minimum(ratio * a, np.clip(ratio, 1 - 0.2 * f['low'], 1 + 0.3 * f['high']) * a)
    loss = np.where(a < 0, np.minimum(loss, -3 * a), loss)
    assert float(value) == pytest.approx((w * (loss - 0.05 * entropy[on])).sum(), rel=1e-5) != float(want)
    narrowed = (np.min(list(f.values()), axis=0) < 1).sum()
    assert 0 < narrowed < on.sum() and float(sums.over_tokens['actor/trust_narrowed']) == narrowed


@pytest.mark.parametrize('kind', ['trace', 'ce'])
def test_a_term_adds_the_loss_of_a_traces_tokens_and_no_metric_of_the_policy_counts_them(rows, logp, entropy, kind):
    """The last response of the second row is a trace: the other sums are those of the rows in which it is only read."""
    trace = np.zeros((R, T), bool)
    trace[1, 2:6] = True
    own = np.where(trace, 0, rows.weight['rl'])
    only_read = rows._replace(
        sequences=rows.sequences._replace(response=np.where(trace, 0, rows.sequences.response)), origin=np.where(trace, 0, rows.origin),
        behaviour=np.where(trace, 0, rows.behaviour), advantage=np.where(trace, 0, rows.advantage), weight={'rl': own},
    )
    plain, sums = evaluate(PLAIN, only_read, logp, entropy)
    traced = rows._replace(origin=np.where(trace, 0, rows.origin), weight={'rl': own, kind: np.where(trace, rows.weight['rl'], 0)})
    term = Term(Author.TRACE, {'trace': shaped(0.1), 'ce': cross_entropy}[kind], kind)
    value, traced_sums = evaluate(dataclasses.replace(PLAIN, terms=(*PLAIN.terms, term)), traced, logp, entropy)
    weight, of_trace = np.float64(rows.weight['rl'])[trace], np.float64(logp)[trace]
    p = np.exp(of_trace - rows.behaviour[trace])
    want = {'trace': -p / (p + 0.1) * rows.advantage[trace], 'ce': -of_trace}[kind]
    assert float(value - plain) == pytest.approx((weight * want).sum(), rel=1e-4)
    added = traced_sums.weighted.pop(f'actor/{kind}_loss')
    assert float(added) == pytest.approx((weight * want).sum(), rel=1e-5)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), traced_sums, sums))
