"""The shipped bases: what the recipes show the policies, and that the directories are what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from configs.making import bases, sft
from bapo_jax.groups import Verdict
from bapo_jax.models import hf
from bapo_jax.models.tokenizer import load_tokenizer, stop_tokens
from bapo_jax.models.vision.patches import rope_positions
from bapo_jax.tasks.countdown.solutions import searched_solution
from bapo_jax.tasks.countdown import task as countdown
from bapo_jax.tasks.diagrams import task as diagrams
from bapo_jax.tasks.sight import Sight

BASE = Path(__file__).resolve().parents[2] / 'configs' / 'quickstart_base'
SEEING_BASE = BASE.parent / 'diagrams_base'


def test_every_training_solution_is_a_correct_answer_and_its_tokens_are_the_targets(tmp_path):
    tokenizer = bases.countdown_files(tmp_path, 32, 1)
    tokens, is_target, *_ = next(bases.countdown_batches(tokenizer, 40, 32, seed=1))
    for row, target in zip(tokens, is_target, strict=True):
        prompt, solution = row[: np.argmax(target)], row[target]
        assert solution[-1] == tokenizer.eos_token_id
        numbers, goal = tokenizer.decode(prompt).rstrip('\n').split('=')
        truth = {'numbers': [int(n) for n in numbers.split()], 'target': int(goal)}
        assert countdown.verify(tokenizer.decode(solution, skip_special_tokens=True), truth)[0] == Verdict.CORRECT


def test_aimless_solutions_have_right_arithmetic_and_seldom_the_target(tmp_path):
    tokenizer, right = bases.countdown_files(tmp_path, 32, 1), 0
    tokens, is_target, *_ = next(bases.countdown_batches(tokenizer, 40, 64, seed=1, aimless=1.0))
    for row, target in zip(tokens, is_target, strict=True):
        numbers, goal = tokenizer.decode(row[: np.argmax(target)]).rstrip('\n').split('=')
        solution = tokenizer.decode(row[target], skip_special_tokens=True)
        steps = solution.split('<answer>')[0].split()
        for step in steps:
            left, value = step.split('=')
            truth = {'numbers': [int(n) for n in re.findall(r'\d+', left)], 'target': int(value)}
            assert countdown.verify(f'<answer>{left}</answer>', truth)[0] == Verdict.CORRECT
        reached = int(value)
        assert countdown.verify(solution, {'numbers': [int(n) for n in numbers.split()], 'target': reached})[0] == Verdict.CORRECT
        right += reached == int(goal)
    assert right < 16


def test_a_base_that_calls_is_shown_what_the_calculator_replies(tmp_path):
    """And the end of a call, one token, ends a response; without `calling` no such file is written."""
    for name in ('plain', 'calling'):
        (tmp_path / name).mkdir()
    bases.countdown_files(tmp_path / 'plain', 32, 1)
    tokenizer = bases.countdown_files(tmp_path / 'calling', 32, 1, calling=True)
    ends = {name: stop_tokens(tmp_path / name, tokenizer) for name in ('plain', 'calling')}
    assert set(ends['calling']) - set(ends['plain']) == set(tokenizer.encode('</calc>')) and len(tokenizer.encode('<calc>')) == 1
    tokens, is_target, *_ = next(bases.countdown_batches(tokenizer, 40, 32, seed=1, calling=True))
    for row, target in zip(tokens, is_target, strict=True):
        numbers, goal = tokenizer.decode(row[: np.argmax(target)]).rstrip('\n').split('=')
        truth = {'numbers': [int(n) for n in numbers.split()], 'target': int(goal)}
        solution = tokenizer.decode(row[target], skip_special_tokens=True)
        *calls, answer = solution.split('</calc>')
        for call, after in zip(calls, [*calls[1:], answer], strict=True):
            assert after.partition('<')[0] == countdown.reply(truth, f'{call}</calc>')
        assert len(calls) == len(truth['numbers']) - 1 and countdown.verify(solution, truth)[0] == Verdict.CORRECT


def test_a_search_misses_checks_goes_on_and_is_right_or_given_up(tmp_path):
    tokenizer, right, attempts = bases.countdown_files(tmp_path, 32, 1), [], []
    tokens, is_target, *_ = next(bases.countdown_batches(tokenizer, 40, 200, seed=1, searching=True))
    assert tokens.shape[1] == 176
    for row, target in zip(tokens, is_target, strict=True):
        numbers, goal = tokenizer.decode(row[: np.argmax(target)]).rstrip('\n').split('=')
        truth = {'numbers': [int(n) for n in numbers.split()], 'target': int(goal)}
        solution = tokenizer.decode(row[target], skip_special_tokens=True)
        tried = solution.split('<answer>')[0].split(' no ')
        for attempt in tried[:-1]:
            assert len(attempt.split()) == len(truth['numbers']) - 1 and int(attempt.rsplit('=')[-1]) != truth['target']
        right.append(countdown.verify(solution, truth)[0] == Verdict.CORRECT)
        assert right[-1] == (int(tried[-1].rsplit('=')[-1]) == truth['target'])
        attempts.append(len(tried))
    assert set(attempts) == {1, 2, 3, 4}
    assert 0.6 < np.mean(right) < 0.8  # 0.3 are given up; 3 standard errors are 0.1


def test_what_misses_has_an_end():
    with pytest.raises(ValueError, match='all 100 random attempts reached the target'):
        searched_solution({'numbers': [0, 0], 'target': 0}, np.random.default_rng(0), give_up=1.0)


@pytest.mark.slow
def test_a_policy_that_is_started_from_is_the_first_step_of_the_next(tmp_path):
    """With a learning rate of nothing, what is written is what was read."""
    words = ['--steps=2', '--problems=20', '--batch=2', '--aimless=0.5', '--learning_rate=0']
    paths = [f'--start={BASE}', f'--output={tmp_path}/next']
    subprocess.run([sys.executable, '-m', 'configs.making.sft', *words, *paths], check=True, env=os.environ | {'JAX_PLATFORMS': 'cpu'})
    config = hf.read_config(tmp_path / 'next')
    assert config == hf.read_config(BASE) and len(load_tokenizer(tmp_path / 'next')) == config.vocab_size
    for a, b in zip(*(jax.tree.leaves(hf.load_params(path, config)) for path in (BASE, tmp_path / 'next')), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_start_that_holds_no_policy_leaves_nothing_behind(tmp_path):
    words = [f'--start={tmp_path}/typo', f'--output={tmp_path}/next']
    environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
    failed = subprocess.run([sys.executable, '-m', 'configs.making.sft', *words], capture_output=True, text=True, env=environment)
    assert failed.returncode != 0 and 'typo' in failed.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_training_lowers_the_loss(tmp_path):
    tokenizer = bases.countdown_files(tmp_path, 32, 1)
    config = hf.read_config(tmp_path)
    graph, _ = hf.abstract_params(config)
    params, optimizer = hf.init_params(config, 0), sft.muon(2e-2, 60)
    opt_state, stream, losses = optimizer.init(params), bases.countdown_batches(tokenizer, 40, 16, seed=1), []
    for _ in range(30):
        params, opt_state, loss = sft.train_step(params, opt_state, next(stream), graph=graph, optimizer=optimizer)
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < 0.7 * losses[0]


@pytest.mark.parametrize('experts', [0, 4])
def test_a_student_learns_its_teachers_probabilities(experts, tmp_path):
    """Σ_y p_teacher log p of the target tokens by numpy; a student that is its teacher has no gradient."""
    policies = []
    for name, of in (('teacher', 0), ('student', experts)):
        (tmp_path / name).mkdir()
        tokenizer = bases.countdown_files(tmp_path / name, 32, 1, experts=of)
        config = hf.read_config(tmp_path / name)
        params = jax.tree.map(lambda x: 10 * x if x.ndim > 1 else x, hf.init_params(config, len(policies)))
        policies.append((hf.abstract_params(config)[0], params))
    (teacher_graph, teacher), (graph, student) = policies
    batch = next(bases.countdown_batches(tokenizer, 40, 4, seed=1))

    def total(params, graph):
        return sft.distilled_logprobs(nnx.merge(graph, params), nnx.merge(teacher_graph, teacher), batch).sum()

    theirs, own = (np.asarray(sft.next_logprobs(nnx.merge(g, p), batch.tokens_BxT)) for g, p in policies)
    want = sum(
        (np.exp(theirs[row, t - 1]) * own[row, t - 1]).sum() for row, t in zip(*np.nonzero(batch.is_target_BxT), strict=True)
    )
    np.testing.assert_allclose(total(student, graph), want, rtol=1e-5)
    largest = [
        max(np.abs(x).max() for x in jax.tree.leaves(jax.grad(total)(p, g))) for g, p in ((teacher_graph, teacher), (graph, student))
    ]
    assert largest[0] < 1e-3 * largest[1]


def test_the_shipped_base_is_small_complete_and_loads_like_any_checkpoint():
    assert sum(f.stat().st_size for f in BASE.iterdir()) < 8_000_000
    config = hf.read_config(BASE)
    assert config.head_dim >= 32  # what vLLM serves on CPU
    params = hf.load_params(BASE, config)
    assert sum(x.size for x in jax.tree.leaves(params)) < 1_000_000
    tokenizer = load_tokenizer(BASE)
    assert len(tokenizer) == config.vocab_size and stop_tokens(BASE, tokenizer) == (tokenizer.eos_token_id,)


@pytest.mark.parametrize('experts', [0, 4])
def test_muon_moves_every_direction_of_each_layers_matrix_alike(experts, tmp_path):
    """Nine tenths of an update's singular values are within a factor of 2, though the gradient's are a hundredfold apart."""
    bases.countdown_files(tmp_path, 32, 2, experts=experts)
    config = hf.read_config(tmp_path)
    params, optimizer, rng = hf.init_params(config, 0), sft.muon(1e-2, 100), np.random.default_rng(0)

    def slanted(x):
        return (rng.standard_normal(x.shape) + 10 * rng.standard_normal((*x.shape[:-1], 1))).astype(np.float32)

    def evenness(x):  # of each matrix in a stack: a low singular value over the highest
        singular = np.linalg.svd(np.asarray(x), compute_uv=False)
        return np.quantile(singular, 0.1, axis=-1) / singular.max(axis=-1)

    gradient, opt_state = jax.tree.map(slanted, params), optimizer.init(params)
    for _ in range(2):  # the warm-up's first step has a learning rate of 0
        with jax.numpy_dtype_promotion('standard'):  # as in sft.train_step
            updates, opt_state = jax.jit(optimizer.update)(gradient, opt_state, params)
    before, after = gradient['layers'], updates['layers']
    if experts:
        before, after = before | before['experts'], after | after['experts']
    for name in ('q', 'k', 'v', 'o', 'gate', 'up', 'down'):
        assert (evenness(before[name]['kernel']) < 0.1).all()
        assert (evenness(after[name]['kernel']) > 0.5).all()
    assert evenness(updates['embedding']['embedding']) < 0.5  # AdamW


def test_every_diagram_is_shown_with_its_own_solution(tmp_path):
    tokenizer, truths = bases.diagrams_files(tmp_path, 64, 1), diagrams.training_problems('generated', limit=40, seed=1)
    vision, mark = hf.read_config(tmp_path).vision, tokenizer.convert_tokens_to_ids(bases.MARK)
    sight = Sight(tmp_path, mark)
    tokens, is_target, rope, feature, pixels = next(bases.diagrams_batches(tmp_path, tokenizer, 40, 16, seed=1))
    for row in range(16):
        solution = tokens[row][is_target[row]]
        assert solution[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(solution, skip_special_tokens=True)
        asked_so = [t for t in truths if diagrams.worked_diagram(t) == text]  # right triangles repeat
        # One window holds a picture, so its patches stand in their own order, and its features one behind the other.
        truth = next(t for t in asked_so if np.array_equal(pixels.patch_RxPxC[row], sight.patches(t['images'])))
        prompt = tokens[row, : np.argmax(is_target[row])]
        asked = np.array(tokenizer.encode(diagrams.prompt_text(truth, 'compact', tokenizer)))
        np.testing.assert_array_equal(sight.collapsed(prompt, truth['images']), asked)
        grid = sight.grid(truth['images'][0])
        np.testing.assert_array_equal(rope[row].T, rope_positions(tokens[row], [grid], vision)[0])
        np.testing.assert_array_equal(feature[row][tokens[row] == mark], 36 * row + np.arange(36))
        assert (feature[row][tokens[row] != mark] == -1).all()


def test_aimless_solutions_are_those_of_other_pictures(tmp_path):
    tokenizer = bases.diagrams_files(tmp_path, 64, 1)
    (own, other) = (next(bases.diagrams_batches(tmp_path, tokenizer, 40, 16, seed=1, aimless=share)) for share in (0.0, 1.0))

    def solutions(batch):
        rows = zip(batch.tokens_BxT, batch.is_target_BxT, strict=True)
        return [tokenizer.decode(tokens[is_target], skip_special_tokens=True) for tokens, is_target in rows]

    known = {diagrams.worked_diagram(t) for t in diagrams.training_problems('generated', limit=40, seed=1)}
    assert set(solutions(other)) <= known and own.pixels.patch_RxPxC.any()
    np.testing.assert_array_equal(own.pixels.patch_RxPxC, other.pixels.patch_RxPxC)
    assert sum(a == b for a, b in zip(solutions(own), solutions(other), strict=True)) <= 4


@pytest.mark.slow
def test_a_base_that_sees_learns_from_its_pictures(tmp_path):
    """Every part of it moves; with other pictures the same solutions are another loss."""
    tokenizer = bases.diagrams_files(tmp_path, 64, 1)
    config = hf.read_config(tmp_path)
    graph, _ = hf.abstract_params(config)
    optimizer, batch = sft.muon(1e-2, 60), next(bases.diagrams_batches(tmp_path, tokenizer, 40, 8, seed=1))
    other = batch._replace(pixels=batch.pixels._replace(patch_RxPxC=batch.pixels.patch_RxPxC[::-1]))

    def step(params, opt_state, batch):
        return sft.train_step(params, opt_state, batch, graph=graph, optimizer=optimizer)

    params, losses = hf.init_params(config, 0), []
    opt_state = optimizer.init(params)
    for _ in range(30):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    own, of_other = (float(step(*jax.tree.map(jax.numpy.copy, (params, opt_state)), each)[2]) for each in (batch, other))
    assert own != of_other
    for before, after in zip(jax.tree.leaves(hf.init_params(config, 0)), jax.tree.leaves(params), strict=True):
        assert np.abs(before - after).max() > 0


@pytest.mark.slow
def test_the_shipped_base_that_sees_is_small_and_the_same_model_to_hugging_face():
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    assert sum(f.stat().st_size for f in SEEING_BASE.iterdir()) < 8_000_000
    tokenizer, model = load_tokenizer(SEEING_BASE), Qwen2_5_VLForConditionalGeneration.from_pretrained(SEEING_BASE).eval()
    config = hf.read_config(SEEING_BASE)
    assert config.head_dim >= 32 and len(tokenizer) == config.vocab_size
    assert stop_tokens(SEEING_BASE, tokenizer) == (tokenizer.eos_token_id,)
    assert config.vision.image_token == tokenizer.convert_tokens_to_ids('<|image_pad|>')

    batch = next(bases.diagrams_batches(SEEING_BASE, tokenizer, 10, 2, seed=5))
    tokens, is_target = batch.tokens_BxT, batch.is_target_BxT
    graph, params = hf.abstract_params(config)[0], hf.load_params(SEEING_BASE, config)
    got = sft.target_logprobs(nnx.merge(graph, params), batch)
    inputs = {
        'input_ids': torch.tensor(tokens), 'mm_token_type_ids': torch.tensor(tokens == config.vision.image_token).int(),
        'image_grid_thw': torch.tensor([[1, 12, 12]] * 2), 'pixel_values': torch.tensor(batch.pixels.patch_RxPxC.reshape(288, -1)),
    }  # fmt: skip
    with torch.no_grad():
        logp = model(**inputs).logits.log_softmax(-1).numpy()[:, :-1]
    want = np.take_along_axis(logp, tokens[:, 1:, None], axis=2)[..., 0]
    np.testing.assert_allclose(np.asarray(got)[:, 1:][is_target[:, 1:]], want[is_target[:, 1:]], rtol=0, atol=1e-4)
