"""Each row's objective, value and gradient, against a statement of its own: numpy in float64, from the formula, not the code.

A statement takes one mini-batch: `groups` of (rewards [G], responses), a response being its arrays of one number a token. The
gradient is the statement's central difference. Tolerances: 1e-5 of the value, 1e-4 of the largest entry of the gradient.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from bapo_jax.config import default_config, resolve
from bapo_jax.groups import Group, Prompt, Verdict, lanes_of, make_batch, sampled
from bapo_jax.learner import credit
from bapo_jax.learner.objective import evaluate_objective, numbers_of, objective_of, weights_of
from bapo_jax.learner.packing import cut, pack
from bapo_jax.learner.trust import factors_of
from bapo_jax.methods import METHODS, apply_method
from bapo_jax.replay.exgrpo import as_trace
from bapo_jax.tasks.traces import trace

LIMIT = 12  # most tokens of a response
BETA, ENTROPY = 0.3, 0.2  # large enough to show
M2PO_BUDGET = 0.015  # small enough to mask tokens
CAP = 1.15  # of π_prox / α in the rows areal (5) and bapo_official (3): small enough to act


@dataclasses.dataclass
class Tokens:
    """One response: log-probs under the policies, the policy's entropy and the critic's value at each token."""

    logp: np.ndarray
    behaviour: np.ndarray
    proximal: np.ndarray
    reference: np.ndarray
    previous: np.ndarray
    entropy: np.ndarray
    value: np.ndarray
    trace: bool = False  # another author wrote it; its behaviour log-probs are unknown


def mini_batch(seed):
    """Four groups of four responses, of 1 to 12 tokens; ratios on both sides of every trust region; 1, 2, 3 and 2 right."""
    rng = np.random.default_rng(seed)

    def response():
        n = int(rng.integers(1, LIMIT + 1))
        behaviour = -rng.exponential(1.0, n)
        near = [behaviour + rng.normal(0, scale, n) for scale in (0.3, 0.15, 0.3, 0.2)]
        return Tokens(near[0], behaviour, *near[1:], rng.random(n), rng.normal(0.5, 0.3, n))

    return [(np.array([1.0] * k + [0.0] * (4 - k)), [response() for _ in range(4)]) for k in (1, 2, 3, 2)]


def config_of(row, **changes) -> ConfigDict:
    c = default_config()
    c.model.path = 'somewhere'
    apply_method(c, row)
    fields = {
        'rollout.max_prompt_tokens': 4, 'rollout.max_response_tokens': LIMIT, 'learner.mini_batch_groups': 4,
        'learner.batch_groups': 4, 'learner.row_tokens': 40, 
        'learner.kl_coef': BETA, 'learner.entropy_coef': ENTROPY,
    }  # fmt: skip
    c.update_from_flattened_dict(fields | changes)
    return resolve(c)


def ours(config, groups, step=1, weights=(), led=False):
    """The trainer's own credit, packing and objective: the loss, and its gradient by group and response.

    `led`: a trace is the first response of each group, with its behaviour log-probs.
    """
    made = []
    for i, (rewards, responses) in enumerate(groups):
        verdicts = tuple(Verdict.CORRECT if r == 1 else Verdict.WRONG for r in rewards)
        stored = []
        for t in responses:
            tokens = np.arange(len(t.logp), dtype=np.int32)
            stored.append(trace(tokens) if t.trace else sampled(tokens, np.float32(t.behaviour), 'stop', 0))
        stored = (as_trace(stored[0]), *stored[1:]) if led else tuple(stored)
        made.append(Group(Prompt(i, 'countdown', np.arange(3, dtype=np.int32), {}), stored, verdicts, np.float32(rewards), 0))
    batch = make_batch(made, ['x1' if g.size > 1 else 'demonstrations' for g in made])
    batch = dataclasses.replace(batch, weights=weights)
    [part] = cut(batch, np.arange(len(made)), config.learner)
    objective = objective_of(config.learner)
    weight = weights_of(objective, config.learner, part.batch, LIMIT)
    roles = {role: [[getattr(t, role) for t in g] for _, g in groups] for role in objective.roles}
    if config.learner.advantage == 'gae':
        values, trained = [[t.value for t in g] for _, g in groups], [[r.trained_on for r in g.responses] for g in made]
        estimate, _ = credit.value_advantages(batch, values, *config.critic.gae)
        advantage = credit.whitened(estimate, trained)
    else:
        advantage = credit.advantages(batch, config.learner.advantage)
    factors = factors_of(config.learner, part.batch, advantage, roles.get('proximal'))
    rows = pack(part, lanes_of(batch), advantage, weight, roles, factors)
    numbers = numbers_of(config.learner, 1.0, step)

    def loss(logp):
        entropy = jnp.asarray(part.on_responses([[t.entropy for t in g] for _, g in groups], np.float32))
        value = 0.0
        for m in range(part.layout.filled):
            value += evaluate_objective(objective, jax.tree.map(lambda x: x[m], rows), logp[m], entropy[m], numbers)[0]
        return value

    logp = part.on_responses([[t.logp for t in g] for _, g in groups], np.float32)
    value, gradient = jax.value_and_grad(loss)(jnp.asarray(logp))
    return float(value), part.of_responses(np.asarray(gradient))


def k3(t, target):
    gap = getattr(t, target) - t.logp
    return np.exp(gap) - gap - 1


def clipped(ratio, advantage, low=0.2, high=0.2, dual=3.0, centre=1.0):
    loss = -np.minimum(ratio * advantage, np.clip(ratio, centre - low, centre + high) * advantage)
    return np.minimum(loss, -dual * advantage) if advantage < 0 else loss


def z(rewards):
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)


def token_mean(groups, advantage, token_loss):
    """Σ over all tokens of the mini-batch / how many there are; `token_loss(response, A)` has one number a token."""
    losses = [token_loss(t, a) for rewards, g in groups for t, a in zip(g, advantage(rewards))]
    return sum(x.sum() for x in losses) / sum(len(x) for x in losses)


def sequence_mean(groups, advantage, token_loss):
    return np.mean([token_loss(t, a).mean() for rewards, g in groups for t, a in zip(g, advantage(rewards))])


def grpo(groups):
    def loss(t, a):
        return clipped(np.exp(t.logp - t.proximal), a) + BETA * k3(t, 'reference') - ENTROPY * t.entropy

    return token_mean(groups, z, loss)


def grpo_v5(groups):
    def loss(t, a):
        return clipped(np.exp(t.logp - t.behaviour), a) + BETA * k3(t, 'reference') - ENTROPY * t.entropy

    return token_mean(groups, z, loss)


def bapo(groups):
    def loss(t, a):
        return clipped(np.exp(t.logp - t.behaviour), a) + BETA * k3(t, 'behaviour') - ENTROPY * t.entropy

    return token_mean(groups, z, loss)


def bapo_guarded(groups):
    def loss(t, a):
        return clipped(np.exp(t.logp - t.behaviour), a) + BETA * k3(t, 'reference') - ENTROPY * t.entropy

    return token_mean(groups, over_mean, loss)


def bapo_mini(groups):
    return token_mean(groups, z, lambda t, a: clipped(np.exp(t.logp - t.behaviour), a, high=0.28, dual=10) - ENTROPY * t.entropy)


def bapo_official(groups):
    """Decoupled: min(π_prox / α, cap) × the clipped ratio to π_prox, held close to π_prox."""

    def loss(t, a):
        weight = np.minimum(np.exp(t.proximal - t.behaviour), CAP)
        return weight * clipped(np.exp(t.logp - t.proximal), a) + BETA * k3(t, 'proximal') - ENTROPY * t.entropy

    return token_mean(groups, z, loss)


def dapo(groups):
    return token_mean(groups, z, lambda t, a: clipped(np.exp(t.logp - t.proximal), a, high=0.28, dual=10))


def mopps(groups):
    return token_mean(groups, z, lambda t, a: clipped(np.exp(t.logp - t.proximal), a, high=0.28, dual=10) - ENTROPY * t.entropy)


def repo(groups):
    """J_on + λ J_off with λ = 1: fresh and stored responses alike, each to the policy that sampled it."""
    return sequence_mean(groups, z, lambda t, a: clipped(np.exp(t.logp - t.behaviour), a) - ENTROPY * t.entropy)


def arpo(groups):
    """Clipped at 0.8 and 1.3 around the policy at the step's start; a mixed group is a group like another."""
    return sequence_mean(groups, z, lambda t, a: clipped(np.exp(t.logp - t.proximal), a, high=0.3) - ENTROPY * t.entropy)


def replayed(groups):
    """fifo, freshper: each response to the policy that sampled it; no KL."""
    return token_mean(groups, z, lambda t, a: clipped(np.exp(t.logp - t.behaviour), a) - ENTROPY * t.entropy)


def exgrpo(groups, led=False):
    """(1/N) Σ_i (1/L_max) Σ_t: -A ρ of new tokens; -A w / (w + 0.1) of those of the leading success, w = π_θ / stored π."""

    def loss(t, a, trace):
        if trace:
            w = np.exp(t.logp - t.behaviour)
            return -a * w / (w + 0.1)
        return -a * np.exp(t.logp - t.proximal) - ENTROPY * t.entropy

    losses = [loss(t, a, led and j == 0).sum() / LIMIT for r, g in groups for j, (t, a) in enumerate(zip(g, r - r.mean()))]
    return np.mean(losses)


def dots(groups):
    """min(r A, clip(r, r_old (1 - ε), r_old (1 + ε)) A) with r = π_θ / μ, r_old = π_old / μ and ε = 0.2; no dual clip."""

    def loss(t, a):
        ratio, old = np.exp(t.logp - t.behaviour), np.exp(t.proximal - t.behaviour)
        return -np.minimum(ratio * a, np.clip(ratio, 0.8 * old, 1.2 * old) * a) - ENTROPY * t.entropy

    return token_mean(groups, z, loss)


def remix(groups):
    """Step 1: λ = 1, so the KL is to the base alone. The trust region sits around π_k / π_{k-i}."""

    def loss(t, a):
        centre = np.exp(t.proximal - t.behaviour)
        return clipped(np.exp(t.logp - t.behaviour), a, centre=centre) + BETA * k3(t, 'reference') - ENTROPY * t.entropy

    return token_mean(groups, z, loss)


def dr_grpo(groups):
    """(1/N) Σ_i (1/L_max) Σ_t of the clipped surrogate of r - mean."""
    losses = [
        (clipped(np.exp(t.logp - t.proximal), a) - ENTROPY * t.entropy).sum() / LIMIT
        for rewards, g in groups
        for t, a in zip(g, rewards - rewards.mean())
    ]
    return np.mean(losses)


def gspo(groups):
    """mean_i min(s_i A_i, clip(s_i) A_i) with s_i = (π_θ(y_i) / π_prox(y_i))^(1/|y_i|)."""
    losses = []
    for rewards, g in groups:
        for t, a in zip(g, z(rewards)):
            s = np.exp((t.logp.sum() - t.proximal.sum()) / len(t.logp))
            losses.append(-min(s * a, np.clip(s, 1 - 3e-4, 1 + 4e-4) * a) - ENTROPY * t.entropy.mean())
    return np.mean(losses)


def cispo(groups, at=None):
    """-sg(min(ρ, 1.2)) A log π: `at` has the log-probs that the weight, which is not differentiated, is taken at."""
    at = at or groups
    weights = iter([np.minimum(np.exp(t.logp - t.proximal), 1.2) for _, g in at for t in g])
    return token_mean(groups, z, lambda t, a: -next(weights) * a * t.logp - ENTROPY * t.entropy)


def luffy(groups):
    """(1/N) Σ_i (1/L) Σ_t of -A p / p_old on the policy's tokens and -A p / (p + 0.1) on a trace's; A = r - mean over both."""
    losses = []
    for rewards, g in groups:
        for t, a in zip(g, rewards - rewards.mean()):
            p = np.exp(t.logp)
            loss = -a * p / (p + 0.1) if t.trace else -a * p / np.exp(t.proximal) - ENTROPY * t.entropy
            losses.append(loss.sum() / LIMIT)
    return np.mean(losses)


def relift(groups):
    """LUFFY's objective of the policy's responses, plus the mean over the tokens of traces of -log p."""
    own = [(rewards, g) for rewards, g in groups if len(g) > 1]
    return luffy(own) - np.concatenate([t.logp for _, g in groups for t in g if t.trace]).mean()


def with_traces(row, groups):
    """The groups as the row has them: a trace first in all but one of them, or two groups of a trace alone after them."""
    if row == 'luffy':
        for _, responses in groups[:-1]:
            responses[0].trace = True
    if row == 'relift':
        alone = [(np.array([float(i)]), [responses[0]]) for i, (_, responses) in enumerate(mini_batch(9)[:2])]
        for _, [response] in alone:
            response.trace = True
        groups = groups + alone
    return groups


def over_mean(rewards):
    return (rewards - rewards.mean()) / (rewards.mean() + 1e-6)


def maxrl(groups):
    return token_mean(groups, over_mean, lambda t, a: clipped(np.exp(t.logp - t.proximal), a) - ENTROPY * t.entropy)


def f_grpo(groups):
    """(1 - k/G)^γ times GRPO's advantage, γ = 0.5."""

    def focal(rewards):
        return np.sqrt(1 - (rewards == 1).sum() / len(rewards)) * z(rewards)

    return token_mean(groups, focal, lambda t, a: clipped(np.exp(t.logp - t.proximal), a) - ENTROPY * t.entropy)


def dppo(groups, at=None):
    """Dr.GRPO's sum of -sg(min(π/α, 20)) A log π, without tokens whose probability has moved by more than 0.15 in A's direction."""
    losses, at = [], [t for _, g in at or groups for t in g]
    for (t, a), there in zip(((t, a) for rewards, g in groups for t, a in zip(g, rewards - rewards.mean())), at):
        moved = np.exp(there.logp) - np.exp(there.behaviour)
        kept = moved <= 0.15 if a > 0 else moved >= -0.15
        losses.append((-a * np.minimum(np.exp(there.logp - there.behaviour), 20) * t.logp * kept).sum() / LIMIT)
    return np.mean(losses)


def gapo(groups):
    """GSPO's ratio; k of 4 right: a right response is clipped at 1 + .003 + .002 (4 - k) / 3, a wrong one at 1 - .003."""
    losses = []
    for rewards, g in groups:
        high = 0.003 + (0.005 - 0.003) * (4 - rewards.sum()) / 3
        for t, a in zip(g, rewards - rewards.mean()):
            s = np.exp((t.logp.sum() - t.proximal.sum()) / len(t.logp))
            losses.append(-min(s * a, np.clip(s, 1 - 0.003, 1 + (high if a > 0 else 0.003)) * a))
    return np.mean(losses)


def m2po(groups, budget=M2PO_BUDGET):
    """-(1/N) Σ M ρ A over all N tokens; M leaves out the largest (log π_prox / α)² until the mean of the others is the budget or less."""
    tokens = [
        [t.proximal[j] - t.behaviour[j], a, np.exp(t.logp[j] - t.behaviour[j])]
        for rewards, g in groups for t, a in zip(g, z(rewards)) for j in range(len(t.logp))
    ]  # fmt: skip
    trusted = [x for x in tokens if (x[1] > 0 and x[0] > 0) or (x[1] < 0 and x[0] < 0)]
    masked = []
    while trusted and np.mean([d**2 for d, *_ in trusted]) > budget:
        masked.append(max(trusted, key=lambda x: x[0] ** 2))
        trusted.remove(masked[-1])
    assert trusted and masked  # some of either, or nothing is tested
    return -sum(ratio * a for x in tokens for d, a, ratio in [x] if x not in masked) / len(tokens)


def sat(groups):
    """q: the 0.9-quantile of |d|, d = log π_prox / α. Beyond it the clip is narrower on the side of d, by 1 / (1 + (d/q)²)."""
    distances = np.sort(np.abs(np.concatenate([t.proximal - t.behaviour for _, g in groups for t in g])))
    at = 0.9 * (len(distances) - 1)  # between the two nearest, linearly
    q = distances[int(at)] + (at - int(at)) * (distances[int(at) + 1] - distances[int(at)])

    def loss(t, a):
        d = t.proximal - t.behaviour
        c = np.where(np.abs(d) > q, q**2 / (q**2 + d**2), 1.0)
        low, high = 0.2 * np.where(d < 0, c, 1), 0.2 * np.where(d > 0, c, 1)
        return clipped(np.exp(t.logp - t.behaviour), a, low, high, dual=np.inf) - ENTROPY * t.entropy

    return token_mean(groups, z, loss)


def ppo(groups, anchor='proximal', beta=0.0):
    """γ = λ = 1: A_t = r - V(s_t), whitened over the batch's tokens; the mean over tokens of the clipped surrogate."""
    advantage = [r - t.value for rewards, g in groups for r, t in zip(rewards, g)]
    every = np.concatenate(advantage)
    losses = []
    for t, a in zip((t for _, g in groups for t in g), advantage):
        ratio = np.exp(t.logp - getattr(t, anchor))
        surrogate = [clipped(x, y) for x, y in zip(ratio, (a - every.mean()) / (every.std() + 1e-8))]
        losses.append(np.array(surrogate) + beta * k3(t, 'behaviour') - ENTROPY * t.entropy)
    return np.concatenate(losses).mean()


def ba_ppo(groups):
    return ppo(groups, anchor='behaviour', beta=BETA)


def areal(groups):
    """Decoupled PPO; tokens with π_prox / α above the cap have no gradient, and still count in the mean."""

    def loss(t, a):
        weight = np.exp(t.proximal - t.behaviour)
        return np.where(weight > CAP, 0, weight) * clipped(np.exp(t.logp - t.proximal), a)

    return token_mean(groups, z, loss)


def kimi(groups):
    """Per response -(r - mean) log π(y) + τ/2 (log π/α of y)², over the limit of tokens; the mean over responses."""
    tau = 0.01
    return np.mean([
        (-a * t.logp.sum() + tau / 2 * (t.logp - t.behaviour).sum() ** 2) / LIMIT
        for rewards, g in groups for t, a in zip(g, rewards - rewards.mean())
    ])  # fmt: skip


STATEMENTS = {
    'areal': areal, 'kimi': kimi,
    'dr_grpo': dr_grpo, 'gspo': gspo, 'cispo': cispo, 'maxrl': maxrl, 'ppo': ppo, 'ba_ppo': ba_ppo, 'grpo': grpo,
    'grpo_v5': grpo_v5, 'dapo': dapo, 'mopps': mopps, 'repo': repo, 'remix': remix, 'bapo': bapo, 'bapo_tuned': bapo,
    'bapo_official': bapo_official, 'bapo_mini': bapo_mini, 'bapo_no_x2': bapo, 'bapo_no_x3': bapo, 'bapo_posterior': bapo,
    'bapo_continue': bapo, 'bapo_guarded': bapo_guarded, 'adaprefix': grpo, 'dots': dots,
    'arpo': arpo, 'fifo': replayed, 'freshper': replayed, 'exgrpo': exgrpo,
    'f_grpo': f_grpo, 'dppo': dppo, 'gapo': gapo, 'm2po': m2po, 'sat': sat,
    'luffy': luffy, 'relift': relift,
}  # fmt: skip
# What a row sets to 0 itself, the statement leaves out: here it is set as the row has it.
OWN = {row: {'learner.entropy_coef': 0.0} for row in ('dapo', 'dppo', 'gapo', 'm2po', 'areal', 'kimi')}
OWN['relift'] = {'learner.batch_groups': 6, 'learner.mini_batch_groups': 6}
OWN['m2po'] |= {'learner.trust.moment': M2PO_BUDGET}
OWN['areal'] |= {'learner.importance_cap': CAP}
OWN['bapo_official'] = {'learner.importance_cap': CAP}
# Parts of it are not differentiated: they are taken `at` these log-probs.
STOPPED = ('cispo', 'dppo')


def difference(statement, groups, h=1e-5):
    """The statement's gradient by group and response."""
    result = []
    for _, responses in groups:
        of_group = []
        for t in responses:
            gradient = np.zeros(len(t.logp))
            for k in range(len(t.logp)):
                at = t.logp[k]
                t.logp[k] = at + h
                above = statement(groups)
                t.logp[k] = at - h
                gradient[k] = (above - statement(groups)) / (2 * h)
                t.logp[k] = at
            of_group.append(gradient)
        result.append(of_group)
    return result


def assert_same(config, groups, statement, step=1, weights=(), led=False):
    value, gradient = ours(config, groups, step, weights, led)
    assert value == pytest.approx(statement(groups), rel=1e-5, abs=1e-6)
    want = np.concatenate([x for g in difference(statement, groups) for x in g])
    np.testing.assert_allclose(np.concatenate([x for g in gradient for x in g]), want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_every_row_has_a_statement():
    assert STATEMENTS.keys() == METHODS.keys()


@pytest.mark.parametrize('row', STATEMENTS)
def test_a_rows_objective_is_its_formula(row):
    groups, statement = with_traces(row, mini_batch(0)), STATEMENTS[row]
    if row in STOPPED:
        statement = functools.partial(statement, at=mini_batch(0))
    assert_same(config_of(row, **OWN.get(row, {})), groups, statement)


def test_maxrl_averages_over_the_right_responses():
    """K of N right: Σ A ∇log π = N (1/K) Σ_right ∇log π - Σ ∇log π: the mean over right ones, less a baseline of all."""
    for k in (1, 2, 3):
        rewards = np.array([1.0] * k + [0.0] * (4 - k))
        np.testing.assert_allclose(credit.over_mean(rewards), 4 * rewards / k - 1, rtol=1e-5)


def test_the_paper_eq2_advantage_and_the_mean_of_responses_are_eq_1():
    def eq2(rewards):
        return (rewards - rewards.mean()) / np.sqrt(rewards.var() + 1e-6)

    def statement(groups):
        return sequence_mean(groups, eq2, lambda t, a: clipped(np.exp(t.logp - t.behaviour), a) + BETA * k3(t, 'behaviour'))

    changes = {'learner.advantage': 'paper_eq2', 'learner.aggregation': 'seq_mean_token_mean', 'learner.entropy_coef': 0.0}
    assert_same(config_of('bapo', **changes), mini_batch(1), statement)


@pytest.mark.parametrize(('step', 'share'), [(50, 1.0), (51, 0.9), (60, 0.9), (75, 0.7), (100, 0.5), (1000, 0.5)])
def test_remix_moves_its_kl_from_the_base_to_the_previous_policy(step, share):
    """λ(t) = max(1 - 0.1 ⌈(t - 50)+ / 10⌉, 0.5)."""

    def statement(groups):
        def loss(t, a):
            kl = share * k3(t, 'reference') + (1 - share) * k3(t, 'previous')
            surrogate = clipped(np.exp(t.logp - t.behaviour), a, centre=np.exp(t.proximal - t.behaviour))
            return surrogate + BETA * kl - ENTROPY * t.entropy

        return token_mean(groups, z, loss)

    assert_same(config_of('remix', **{'learner.switch_step': 0}), mini_batch(2), statement, step)


def test_freshper_multiplies_what_a_group_adds_by_its_weight():
    """Σ_g w_g Σ loss / the number of all tokens, which the weights do not change."""
    weights = (1.0, 0.25, 0.5, 0.7)

    def statement(groups):
        tokens = [sum(len(t.logp) for t in g) for _, g in groups]
        means = [replayed([group]) for group in groups]
        return sum(w * n * mean for w, n, mean in zip(weights, tokens, means, strict=True)) / sum(tokens)

    assert_same(config_of('freshper'), mini_batch(4), statement, weights=weights)
    one, again = (ours(config_of('freshper'), mini_batch(4), weights=w) for w in ((), (1.0,) * 4))
    assert one[0] == again[0]  # a weight of 1 is no weight, bit for bit
    for a, b in zip([x for g in one[1] for x in g], [x for g in again[1] for x in g], strict=True):
        np.testing.assert_array_equal(a, b)


def test_exgrpos_leading_success_is_shaped_by_its_stored_log_probs():
    assert_same(config_of('exgrpo'), mini_batch(5), functools.partial(exgrpo, led=True), led=True)


def test_remix_is_held_close_to_its_new_base_alone_after_the_switch():
    assert_same(config_of('remix', **{'learner.switch_step': 60}), mini_batch(2), remix, step=61)


@pytest.mark.parametrize(
    ('row', 'off'),
    [
        ('grpo_v5', {'learner.anchor': 'proximal'}),
        ('areal', {'learner.anchor': 'proximal', 'learner.kl_target': 'reference'}),
        (
            'kimi',
            {
                'learner.anchor': 'proximal', 'learner.ratio_level': 'token', 'learner.surrogate': 'clip', 'learner.advantage': 'group_std',
                'learner.aggregation': 'token_mean', 'learner.kl_target': 'reference',
            },
        ),
        ('dapo', {'learner.clip_high': 0.2, 'learner.dual_clip': 3.0, 'learner.kl_target': 'reference'}),
        ('mopps', {'learner.clip_high': 0.2, 'learner.dual_clip': 3.0, 'learner.kl_target': 'reference'}),
        ('dr_grpo', {'learner.advantage': 'group_std', 'learner.aggregation': 'token_mean', 'learner.kl_target': 'reference'}),
        (
            'gspo',
            {
                'learner.ratio_level': 'token', 'learner.clip_low': 0.2, 'learner.clip_high': 0.2, 'learner.dual_clip': 3.0,
                'learner.aggregation': 'token_mean', 'learner.kl_target': 'reference',
            },
        ),
        (
            'cispo',
            {
                'learner.surrogate': 'clip', 'learner.clip_low': 0.2, 'learner.clip_high': 0.2, 'learner.dual_clip': 3.0,
                'learner.kl_target': 'reference',
            },
        ),
        ('adaprefix', {}),
        ('dots', {'learner.anchor': 'proximal', 'learner.dual_clip': 3.0, 'learner.kl_target': 'reference'}),
        ('maxrl', {'learner.advantage': 'group_std', 'learner.kl_target': 'reference'}),
        (
            'dppo',
            {
                'learner.surrogate': 'clip', 'learner.anchor': 'proximal', 'learner.clip_low': 0.2, 'learner.clip_high': 0.2,
                'learner.dual_clip': 3.0, 'learner.advantage': 'group_std', 'learner.aggregation': 'token_mean',
                'learner.kl_target': 'reference',
            },
        ),
        ('f_grpo', {'learner.advantage': 'group_std', 'learner.kl_target': 'reference'}),
        (
            'gapo',
            {
                'learner.trust.kind': 'fixed', 'learner.ratio_level': 'token', 'learner.clip_low': 0.2, 'learner.clip_high': 0.2,
                'learner.dual_clip': 3.0, 'learner.advantage': 'group_std', 'learner.aggregation': 'token_mean',
                'learner.kl_target': 'reference',
            },
        ),
        (
            'm2po',
            {
                'learner.trust.kind': 'fixed', 'learner.surrogate': 'clip', 'learner.anchor': 'proximal',
                'learner.kl_target': 'reference',
            },
        ),
        (
            'sat',
            {
                'learner.trust.kind': 'fixed', 'learner.anchor': 'proximal', 'learner.dual_clip': 3.0,
                'learner.kl_target': 'reference',
            },
        ),
        ('repo', {'learner.anchor': 'proximal', 'learner.aggregation': 'token_mean', 'learner.kl_target': 'reference'}),
        ('arpo', {'learner.clip_high': 0.2, 'learner.aggregation': 'token_mean', 'learner.kl_target': 'reference'}),
        (
            'exgrpo',
            {
                'replay.kind': 'bapo', 'learner.traces.loss': 'none', 'learner.surrogate': 'clip', 'learner.advantage': 'group_std',
                'learner.aggregation': 'token_mean', 'learner.kl_target': 'reference',
            },
        ),
        ('fifo', {'learner.anchor': 'proximal', 'learner.kl_target': 'reference'}),
        ('freshper', {'learner.anchor': 'proximal', 'learner.kl_target': 'reference'}),
        *(
            (
                row,  # its term is there, but no trace
                {
                    'learner.surrogate': 'clip', 'learner.advantage': 'group_std', 'learner.aggregation': 'token_mean',
                    'learner.kl_target': 'reference',
                },
            )
            for row in ('luffy', 'relift')
        ),
        ('remix', {'learner.anchor': 'proximal', 'learner.clip_centre': 'one', 'learner.kl_target': 'reference'}),
        ('bapo', {'learner.anchor': 'proximal', 'learner.kl_target': 'reference'}),
        ('bapo_official', {'learner.anchor': 'proximal', 'learner.kl_target': 'reference'}),
    ],
)
def test_a_row_with_its_switches_off_is_grpo(row, off):
    groups = mini_batch(3)
    (value, gradient), (want, want_gradient) = ours(config_of(row, **off), groups), ours(config_of('grpo'), groups)
    assert value == want
    for of_group, want_of_group in zip(gradient, want_gradient, strict=True):
        for a, b in zip(of_group, want_of_group, strict=True):
            np.testing.assert_array_equal(a, b)


def test_luffy_with_supervised_traces_is_the_authors_variant():
    """train_rl_sft_loss.sh: GRPO on the rollouts, normalised with the trace, and a token mean of -log p on the traces times a coefficient."""

    def statement(groups):
        own = [
            (-a * np.exp(t.logp - t.proximal) - ENTROPY * t.entropy).sum() / LIMIT
            for rewards, g in groups for t, a in zip(g, rewards - rewards.mean()) if not t.trace
        ]  # fmt: skip
        return np.mean(own) - 0.5 * np.concatenate([t.logp for _, g in groups for t in g if t.trace]).mean()

    changes = {'learner.traces.loss': 'cross_entropy', 'learner.traces.coef': 0.5}
    assert_same(config_of('luffy', **changes), with_traces('luffy', mini_batch(4)), statement)


def test_a_mini_batch_of_traces_alone_has_only_their_term():
    groups = with_traces('relift', mini_batch(5))[-2:]
    assert_same(config_of('relift'), groups, lambda g: -np.concatenate([t.logp for _, r in g for t in r]).mean())
