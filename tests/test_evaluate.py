"""Evaluation: of θ rather than α, of runs, published policies and Hugging Face directories, and the same files however often it is
interrupted."""

import contextlib
import dataclasses
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from group_builders import begun
from real_servers import BASE
from small_run import ROOT, metrics, run, small_config

from bapo_jax.run import evaluation as module
from bapo_jax.config import default_config
from bapo_jax.evaluate import load_for_evaluation
from bapo_jax.groups import Prompt, Verdict
from bapo_jax.inputs import benchmark_prompts
from bapo_jax.machine import events
from bapo_jax.machine.lock import held
from bapo_jax.models import hf
from bapo_jax.models.tokenizer import character_tokenizer, load_tokenizer
from bapo_jax.rollout.engine import EVALUATION, Draw, Sampling
from bapo_jax.rollout.serve import PYTHON_VARIABLE
from bapo_jax.run.directory import fingerprint_tokenizer
from bapo_jax.run.evaluation import chunk_size, core_metrics, evaluate, evaluate_in_training, summary_of, votes
from bapo_jax.run.samples import done_before
from bapo_jax.scores import Question, summary
from bapo_jax.tasks.countdown import task as countdown
from bapo_jax.train import build
from bapo_jax.weights.publish import publish
from tests.faults.trainer import flags_of


def problems_file(path, count):
    path.write_text(''.join(json.dumps({'nums': [a, 4, 2], 'target': a + 6}) + '\n' for a in range(5, 5 + count)))
    return path


def command(*flags):
    return [sys.executable, '-m', 'bapo_jax.evaluate', *(str(flag) for flag in flags)]


def evaluated(*flags):
    """Standard output of a command that succeeds."""
    result = subprocess.run(command(*flags), cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr
    return result.stdout


def refused(*flags):
    """The message of a command that refuses."""
    result = subprocess.run(command(*flags), cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 1 and 'Traceback' not in result.stderr, result.stderr
    return result.stderr


def scores(output):
    return json.loads((output / 'summary.json').read_text())


def samples(output, name='problems'):
    return [json.loads(line) for line in (output / f'{name}.jsonl').read_text().splitlines()]


# ---- which policy


@pytest.mark.slow
def test_a_run_and_its_published_policy_score_as_the_runs_own_last_evaluation_and_a_base_as_step_0(tmp_path):
    problems = problems_file(tmp_path / 'problems.jsonl', 20)
    # v = 4 and two steps: α is still θ_0, so scoring α would repeat step 0.
    config = small_config('bapo_tuned', problems, steps=2, rollout__sync_every=4, learner__learning_rate=3e-3)
    workdir = tmp_path / 'run'
    run(config, workdir)
    name = f'val-core/{problems}/acc/mean@2'
    base, trained = metrics(workdir)[0][name], metrics(workdir)[-1][name]
    assert base != trained
    last = json.loads((workdir / 'evals' / '000002.json').read_text())['benchmarks']

    out = evaluated(f'--checkpoint={workdir}')
    of_run = scores(workdir / 'evaluation' / '000002')
    assert (of_run['step'], of_run['benchmarks']) == (2, last)
    assert last[str(problems)]['mean'] == trained
    assert 'mean@2' in out and f'{100 * trained:.1f}' in out
    rows = samples(workdir / 'evaluation' / '000002')
    assert [(row['question'], row['sample']) for row in rows] == [(i, j) for i in range(20) for j in range(2)]
    assert np.mean([row['verdict'] == 'correct' for row in rows]) == trained

    engine = load_for_evaluation(workdir, None, None, None).start(tmp_path)
    policy = publish(workdir / 'policy', 2, engine._loaded[0], hf.read_config(BASE), 'float32')
    evaluated(f'--checkpoint={policy}', f'--base={BASE}', f'--output={tmp_path}/of_policy')
    assert scores(tmp_path / 'of_policy')['benchmarks'] == last
    assert samples(tmp_path / 'of_policy') == rows
    (policy / 'manifest.json').unlink()
    with pytest.raises(ValueError, match=r'manifest\.json is missing'):
        load_for_evaluation(policy, None, None, None)

    flags = ('--config=configs/quickstart.py', f'--benchmarks={problems}', '--samples=2', f'--output={tmp_path}/of_base')
    evaluated(f'--checkpoint={BASE}', *flags)
    assert scores(tmp_path / 'of_base')['benchmarks'][str(problems)]['mean'] == base


def test_a_published_policy_of_another_model_is_refused_before_weights_are_read(tmp_path):
    config, model = quickstart(BASE / 'unused'), hf.read_config(BASE)
    policy = publish(tmp_path, 7, hf.load_params(BASE, model), model, 'float32')
    config.model.path = str(BASE)
    loaded = load_for_evaluation(policy, config, None, None)
    assert (loaded.step, loaded.title) == (7, f'{policy}, after 7 steps')
    assert load_for_evaluation(BASE, config, None, None).title == str(BASE)  # nobody knows its steps
    other = shutil.copytree(BASE, tmp_path / 'other')
    fields = json.loads((other / 'config.json').read_text())
    (other / 'config.json').write_text(json.dumps({**fields, 'num_hidden_layers': 2}))
    config.model.path = str(other)
    with pytest.raises(ValueError, match=r'000007 is of another model than its base: num_hidden_layers 4 \(the base has 2\)'):
        load_for_evaluation(policy, config, None, None)


def test_a_run_of_another_machine_is_scored_with_a_base_that_is_named_here(tmp_path):
    """Its config.json names a directory there. A base with another vocabulary is refused, though it has the shape."""
    model, there = hf.read_config(BASE), str(tmp_path / 'there')
    config = quickstart(BASE / 'unused')
    config.model.path = there
    recorded = config.to_dict() | {'fingerprints': {'tokenizer': fingerprint_tokenizer(load_tokenizer(BASE))}}
    (tmp_path / 'config.json').write_text(json.dumps(recorded))
    policy = publish(tmp_path / 'policy', 7, hf.load_params(BASE, model), model, 'float32')
    with pytest.raises(FileNotFoundError, match=rf"000007: model.path='{there}' in its run's config.json is not a directory here; give --base="):
        load_for_evaluation(policy, None, None, None)
    loaded = load_for_evaluation(policy, None, None, None, BASE)
    assert loaded.step == 7 and loaded.config.model.path == str(BASE)
    with pytest.raises(FileNotFoundError, match=rf"--base='{there}' is not a directory; give"):
        load_for_evaluation(policy, None, None, None, tmp_path / 'there')
    other = shutil.copytree(BASE, tmp_path / 'other')
    tokens = json.loads((other / 'tokenizer.json').read_text())
    vocabulary = tokens['model']['vocab']
    first, second, *_ = vocabulary
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / 'tokenizer.json').write_text(json.dumps(tokens))
    with pytest.raises(ValueError, match=r'other. has another tokenizer than the run; give the Hugging Face directory that the run'):
        load_for_evaluation(policy, None, None, None, other)


# ---- interruption


def quickstart(problems, rows=16):
    config = importlib.import_module('configs.quickstart').get_config()
    config.rollout.rows, config.evaluate.samples, config.evaluate.benchmarks = rows, 2, (str(problems),)
    config.evaluate.max_response_tokens = 24
    return config


class Watched:
    """An engine that writes down which questions it is asked."""

    def __init__(self, engine):
        self.engine, self.asked = engine, []

    def ask(self, begun, *args):
        self.asked += [one.prompt.id for one in begun]
        return self.engine.ask(begun, *args)


class Loading(Watched):
    """One that holds a policy besides."""

    def load(self, params, version):
        self.engine.load(params, version)


@pytest.fixture(autouse=True, scope='module')
def small_chunks():
    """Of 8 questions × 2 samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, '_CHUNK', 16)
        yield


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    """(engine, tokenizer, config, name, prompts, bytes of an unbroken evaluation): 21 questions, so chunks of 8, 8 and 5."""
    directory = tmp_path_factory.mktemp('prepared')
    problems = problems_file(directory / 'problems.jsonl', 21)
    policy = load_for_evaluation(BASE, quickstart(problems), None, None)
    engine = policy.start(directory)
    [(name, prompts)] = benchmark_prompts(policy.config, policy.tokenizer).items()
    evaluate(engine, policy.tokenizer, name, prompts, policy.config, directory / 'whole.jsonl', [])
    return engine, policy.tokenizer, policy.config, name, prompts, (directory / 'whole.jsonl').read_bytes()


@pytest.mark.parametrize('lines', [0, 1, 15, 16, 17, 32, 41, 42])
@pytest.mark.parametrize('half', [b'', b'{"benchmark": "x'])
def test_wherever_it_was_cut_the_rest_is_asked_and_the_file_is_the_same(tmp_path, prepared, lines, half):
    engine, tokenizer, config, name, prompts, whole = prepared
    file = tmp_path / 'cut.jsonl'
    file.write_bytes(b''.join(line + b'\n' for line in whole.split(b'\n')[:lines]) + half)
    watched, size = Watched(engine), chunk_size(config)
    assert size == 8
    done = done_before(file, len(prompts), 2, size)
    questions = evaluate(watched, tokenizer, name, prompts, config, file, done)
    kept = 21 if lines == 42 else lines // 16 * 8
    assert watched.asked == [p.id for p in prompts[kept:]]
    assert file.read_bytes() == whole
    assert summary(questions, votes=True) == summary(done_before(file, 21, 2, size), votes=True)


class Cut(Exception):
    """Ends an evaluation in its middle."""


def in_training(prepared, evals, cut_after=None, initial=5, **changes):
    """(ids of the questions asked, what was said, bytes of the result) of the evaluation after step 3, with tracked prompts."""
    engine, tokenizer, config, name, prompts, _ = prepared
    config, watched, said = config.copy_and_resolve_references(), Watched(engine), []
    config.evaluate.update(changes)

    def say(text):
        said.append(text)
        if len(said) == cut_after:
            raise Cut

    with contextlib.suppress(Cut):
        evaluate_in_training(watched, tokenizer, {name: prompts}, prompts[2:5], config, evals, 3, initial, say)
    result = evals / '000003.json'
    return watched.asked, said, result.read_bytes() if result.exists() else b''


@pytest.mark.parametrize('chunks', [1, 3, 4])
def test_an_evaluation_in_training_goes_on_where_it_was_cut_and_writes_the_same_file(tmp_path, prepared, chunks):
    *_, prompts, whole = prepared
    asked, said, result = in_training(prepared, tmp_path / 'whole')
    ids = [p.id for p in prompts]
    assert asked == ids + ids[2:5] and [path.name for path in (tmp_path / 'whole').iterdir()] == ['000003.json']
    assert said[1:] == [f'scoring the policy of step 3: {n} of 48 responses' for n in (16, 32, 42, 48)]
    assert in_training(prepared, tmp_path / 'cut', cut_after=1 + chunks)[2] == b''
    assert [path.name for path in (tmp_path / 'cut').iterdir()] == ['000003.partial']
    assert whole.startswith((tmp_path / 'cut' / '000003.partial' / '0.jsonl').read_bytes())
    asked, _, again = in_training(prepared, tmp_path / 'cut')
    assert again == result and asked == (ids + ids[2:5])[[8, 16, 21, 24][chunks - 1] :]
    assert [path.name for path in (tmp_path / 'cut').iterdir()] == ['000003.json']
    tracked = json.loads(result)['tracked']
    assert tracked['prompt_ids'] == ids[2:5] and tracked['questions'] == 3


@pytest.mark.parametrize('other', ['policy', 'temperature', 'damaged'])
def test_what_another_evaluation_has_answered_is_not_used(tmp_path, prepared, other):
    evals = tmp_path / 'evals'
    in_training(prepared, evals, cut_after=3)
    partial = evals / '000003.partial'
    if other == 'damaged':
        (partial / '0.jsonl').write_bytes((partial / '0.jsonl').read_bytes().replace(b'{', b'[', 1))
    changes = {'policy': {'initial': 6}, 'temperature': {'temperature': 0.5}}.get(other, {})
    with events.recorded(tmp_path) as said:
        asked, *_ = in_training(prepared, evals, **changes)
    assert len(asked) == 24 and [path.name for path in evals.iterdir()] == ['000003.json']
    assert said == {'evaluation begun anew': 1}


def test_a_benchmarks_copies_of_a_problem_are_one_problem():
    c = default_config()
    prompts = [Prompt(i, 'countdown', np.zeros(1, np.int32), {'numbers': [i % 3, 1], 'target': 2}) for i in range(9)]
    questions = [Question((Verdict(i % 2),), ('1',), (1,), (False,)) for i in range(9)]
    s = summary_of(questions, prompts, c)
    assert (s['problems'], s['questions']) == (3, 9) and s == summary(questions, votes(c), [0, 1, 2] * 3)


def test_greedy_decoding_and_a_limit_of_its_own(tmp_path, prepared):
    engine, tokenizer, config, name, prompts, _ = prepared
    greedy = config.copy_and_resolve_references()
    greedy.evaluate.temperature, greedy.evaluate.max_response_tokens = 0.0, 9
    evaluate(engine, tokenizer, name, prompts, greedy, tmp_path / 'x.jsonl', [])
    rows = [json.loads(line) for line in (tmp_path / 'x.jsonl').read_text().splitlines()]
    assert max(row['tokens'] for row in rows) == 9
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        assert (one['question'], one['response']) == (other['question'], other['response'])


@pytest.mark.parametrize('top_p', [0.9, 1.0])
def test_what_an_evaluation_asks_is_its_configs_own_sampling_and_draw(top_p, tmp_path):
    """Not the training's temperature or limit, and a draw of its own: equal questions get equal random keys at every step."""

    class Asked(Exception):
        pass

    class Asking:
        def ask(self, *given):
            raise Asked(*given)

    config, prompts = quickstart('unused'), [Prompt(i, 'countdown', np.array([1], np.int32), {}) for i in range(3)]
    config.seed, config.evaluate.samples, config.evaluate.temperature, config.evaluate.top_p = 5, 4, 0.7, top_p
    with pytest.raises(Asked) as asked:
        evaluate(Asking(), None, 'x', prompts, config, tmp_path / 'x.jsonl', [])
    assert asked.value.args == (begun(prompts), 4, Sampling(0.7, 24, top_p), [Draw(5, 0, EVALUATION)] * 3)


def test_what_training_logs_is_what_the_command_writes_and_a_majority_only_where_answers_are_votes(tmp_path, prepared, monkeypatch):
    engine, tokenizer, config, name, prompts, whole = prepared
    (tmp_path / 'x.jsonl').write_bytes(whole)
    questions = done_before(tmp_path / 'x.jsonl', 21, 2, 8)
    asked = evaluate(engine, tokenizer, name, prompts, config, tmp_path / 'again.jsonl', [])
    for votes, measures in ((False, ('mean', 'pass')), (True, ('mean', 'pass', 'maj'))):
        monkeypatch.setattr(countdown, 'VOTES', votes)
        s = summary_of(asked, prompts, config)
        assert s == summary(questions, votes)
        assert core_metrics({'x': s}) == {f'val-core/x/acc/{m}@2': s[m] for m in measures}


@pytest.mark.slow
def test_a_run_killed_in_its_first_evaluation_goes_on_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module, '_CHUNK', 256)  # as in the process
    problems = problems_file(tmp_path / 'problems.jsonl', 300)
    config = small_config('grpo', problems, steps=1)
    flags = [*flags_of(config), f'--workdir={tmp_path}/killed']
    quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, '-m', 'bapo_jax.train', *flags], cwd=ROOT, **quiet)
    file, deadline = tmp_path / 'killed' / 'evals' / '000000.partial' / '0.jsonl', time.monotonic() + 240
    while not (file.is_file() and file.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    there = file.read_bytes().count(b'\n') // 256 * 128
    assert 0 < there < 300

    with held(tmp_path / 'killed'):
        setup = build(config, tmp_path / 'killed')
        watched = setup.rollouts._engine = Loading(setup.rollouts._engine)
        next(setup.run.steps_left())
        assert len(watched.asked) == 300 + 4 - there
        dataclasses.replace(setup.run.evaluate, evals=tmp_path / 'whole' / 'evals')(lambda text: None)
        assert len(watched.asked) == 2 * (300 + 4) - there
    assert [path.name for path in file.parents[1].iterdir()] == ['000000.json']
    assert (file.parents[1] / '000000.json').read_bytes() == (tmp_path / 'whole' / 'evals' / '000000.json').read_bytes()


@pytest.mark.slow
def test_an_evaluation_killed_in_the_middle_ends_with_the_same_files(tmp_path):
    problems = problems_file(tmp_path / 'problems.jsonl', 160)
    few = problems_file(tmp_path / 'few.jsonl', 3)
    flags = [f'--checkpoint={BASE}', '--config=configs/quickstart.py', f'--benchmarks={problems},{few}', '--samples=2',
             '--config.rollout.rows=8']  # fmt: skip
    quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
    process = subprocess.Popen(command(*flags, f'--output={tmp_path}/killed'), cwd=ROOT, **quiet)
    file, deadline = tmp_path / 'killed' / 'problems.jsonl', time.monotonic() + 240
    while not (file.is_file() and file.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = file.read_bytes()
    assert 0 < before.count(b'\n') < 320 and not (tmp_path / 'killed' / 'summary.json').exists()
    with file.open('ab') as f:
        f.write(b'{"benchm')

    evaluated(*flags, f'--output={tmp_path}/killed')
    evaluated(*flags, f'--output={tmp_path}/whole')
    names = sorted(p.name for p in (tmp_path / 'whole').iterdir())
    assert names == ['few.jsonl', 'problems.jsonl', 'settings.json', 'summary.json']
    for name in names:
        assert (tmp_path / 'killed' / name).read_bytes() == (tmp_path / 'whole' / name).read_bytes()
    assert file.read_bytes().startswith(before)

    message = refused(*flags, '--samples=4', '--config.seed=1', f'--output={tmp_path}/whole')
    assert 'differ in config.seed (42 there, 1 now), samples (2 there, 4 now). Give another --output' in message
    assert samples(tmp_path / 'whole') == samples(tmp_path / 'killed')


# ---- what is refused


@pytest.mark.slow
def test_bad_flags_are_refused_in_one_message(tmp_path, monkeypatch):
    assert '--config=FILE' in refused(f'--checkpoint={tmp_path}')
    too_long = refused(f'--checkpoint={BASE}', '--config=configs/quickstart.py', '--max_response_tokens=5000')
    assert 'evaluate.max_response_tokens=5000 = 5016 tokens, but max_position_embeddings of' in too_long
    chats = shutil.copytree(BASE, tmp_path / 'chats')
    character_tokenizer('{% for m in messages %}{{ m.content }}</answer>{% endfor %}').save_pretrained(chats)
    flags = (f'--checkpoint={chats}', '--config=configs/quickstart.py', '--config.task.template=tinyzero_chat')
    no_stop = refused(*flags, '--max_prompt_tokens=1000')
    assert "generation_config.json: the chat template ends an answer with '</answer>' (token 260), which is not a stop token" in no_stop
    config = quickstart(problems_file(tmp_path / 'problems.jsonl', 3))
    monkeypatch.delenv('BAPO_ROLLOUT_TOKEN', raising=False)
    with pytest.raises(ValueError, match='BAPO_ROLLOUT_TOKEN is not set'):
        load_for_evaluation(BASE, config, None, ['http://127.0.0.1:9'])
    with pytest.raises(ValueError, match='--servers cannot be used with --engine=jax'):
        load_for_evaluation(BASE, config, 'jax', ['http://127.0.0.1:9'])


# ---- through a server


def test_vllms_interpreter_is_looked_for_before_anything_starts_and_the_variables_goes_before_that_of_a_run(tmp_path, monkeypatch):
    model, config = hf.read_config(BASE), quickstart('unused')
    policy = publish(tmp_path / 'policy', 7, hf.load_params(BASE, model), model, 'float32')
    config.model.path, config.rollout.server.python = str(BASE), '/of/another/machine'
    (tmp_path / 'config.json').write_text(json.dumps(config.to_dict()))
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    with pytest.raises(ValueError, match='rollout.server.python=/of/another/machine is not an executable file'):
        load_for_evaluation(policy, None, 'vllm', None)
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    assert load_for_evaluation(policy, None, 'vllm', None).config.rollout.server.python == ''


@pytest.mark.slow
def test_a_server_gives_the_scores_of_the_same_policy_and_goes_on_where_it_was_cut(tmp_path, base, server):
    problems = problems_file(tmp_path / 'problems.jsonl', 150)
    policy = publish(tmp_path / 'policy', 3, base.moved, base.config, 'float32')
    # Nearly greedy, so that both engines give the same responses but for rounding; the server was started with other weights.
    flags = [f'--checkpoint={policy}', '--config=configs/quickstart.py', f'--config.model.path={BASE}', f'--benchmarks={problems}',
             '--samples=4', '--config.evaluate.temperature=0.02']  # fmt: skip
    evaluated(*flags, f'--output={tmp_path}/jax')
    evaluated(*flags, f'--servers={server.url}', f'--output={tmp_path}/vllm')
    assert 'engine' in refused(*flags, f'--output={tmp_path}/vllm')
    file = tmp_path / 'vllm' / 'problems.jsonl'
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b''.join(lines[:300]))
    (tmp_path / 'vllm' / 'summary.json').unlink()
    evaluated(*flags, f'--servers={server.url}', f'--output={tmp_path}/vllm')

    again = file.read_bytes().splitlines(keepends=True)
    assert len(again) == len(lines) == 600 and again[:256] == lines[:256]  # a chunk is 64 questions × 4
    ours, theirs = samples(tmp_path / 'jax'), samples(tmp_path / 'vllm')
    assert [(r['question'], r['sample']) for r in theirs] == [(r['question'], r['sample']) for r in ours]
    assert np.mean([a['response'] == b['response'] for a, b in zip(ours, theirs, strict=True)]) > 0.9
    assert not (tmp_path / 'vllm' / 'policy').exists()  # what the server loaded is not left behind
    assert policy.is_dir() and scores(tmp_path / 'vllm')['step'] == 3
