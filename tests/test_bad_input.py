"""Whatever is wrong with data or model is said with file and row or field, before weights are read, and leaves no run directory."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from absl import app
from real_servers import BASE
from safetensors.numpy import load_file, save_file
from small_run import ROOT, metrics, run, small_config

from bapo_jax import command as run_command, evaluate, export, inputs, train
from bapo_jax.config import default_config
from bapo_jax.evaluate import load_for_evaluation
from bapo_jax.inputs import read_inputs
from bapo_jax.models import hf
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.run.start import claim_directory
from bapo_jax.train import build
from configs.making import sft

GOOD = '{"problem": "What is 1+1?", "answer": "2"}\n'
LONG = json.dumps({'problem': 'p' * 300, 'answer': '2'})  # 370 tokens
NOT_UTF8 = GOOD.encode() + b'{"problem": "caf\xe9", "answer": "2"}\n'


@pytest.fixture
def model(tmp_path):
    """A copy of the quickstart's policy to spoil, whose tokenizer can chat."""
    path = shutil.copytree(BASE, tmp_path / 'model')
    character_tokenizer('{% for m in messages %}{{ m.content }}{% endfor %}\n').save_pretrained(path)
    return path


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """A function of a config: why it is refused. No weights are read and no run directory is made."""

    def why(config):
        monkeypatch.setattr(hf, 'load_params', lambda *_: pytest.fail('weights were read'))
        with pytest.raises((ValueError, OSError)) as e:
            build(config, tmp_path / 'run')
        assert not (tmp_path / 'run').exists()
        return str(e.value)

    return why


def file(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def math_config(model, train, benchmark, **changes):
    """The quickstart's small run, on mathematics."""
    fields = {'model__path': str(model), 'task__name': 'math', 'task__train': str(train), 'task__template': 'chat',
              'rollout__max_prompt_tokens': 200, 'learner__row_tokens': 0, 'evaluate__track_prompts': 0}  # fmt: skip
    return small_config('bapo_tuned', benchmark, **fields | changes)


@pytest.mark.parametrize(
    ('train', 'message'),
    [
        ('{"problem": "p", "answer": ""}\n' * 9, 'bad.jsonl: none of its 9 rows has an answer; fill in the column'),
        (GOOD + '{"problem": "p"}\n', "bad.jsonl, row 2: column 'answer' is missing; the row has problem; rename or add it"),
        (NOT_UTF8, 'bad.jsonl, row 2: not UTF-8 text; save the file as UTF-8'),
        (GOOD + '{"problem": \n', 'bad.jsonl, row 2: not a line of JSON'),
        (LONG, 'all 1 prompts are longer than rollout.max_prompt_tokens=200 (the shortest has 370 tokens); raise it'),
    ],
)
def test_training_problems(tmp_path, model, refused, train, message):
    bad, good = file(tmp_path / 'bad.jsonl', train), file(tmp_path / 'good.jsonl', GOOD)
    assert message in refused(math_config(model, bad, good))


@pytest.mark.parametrize(
    ('rows', 'message'),
    [
        (GOOD + '{"problem": "p", "answer": ""}\n', 'few.jsonl, row 2: "answer" must be an answer'),
        (NOT_UTF8, 'few.jsonl, row 2: not UTF-8 text'),
        (GOOD + LONG, 'few.jsonl, problem 2 of 2: the prompt has 370 tokens, but evaluate.max_prompt_tokens is 200; raise it'),
        (None, 'few.jsonl: no such file'),
    ],
)
def test_benchmarks(tmp_path, model, refused, rows, message):
    train = file(tmp_path / 'train.jsonl', GOOD * 8)
    if rows:
        file(tmp_path / 'few.jsonl', rows)
    assert message in refused(math_config(model, train, tmp_path / 'few.jsonl'))


def test_changed_answers_and_benchmarks_of_a_run_are_refused_by_file(tmp_path, model, monkeypatch):
    """The questions stay what they were, so no token of a prompt tells. `build` reads all that a run reads."""
    train, few, rewards = (tmp_path / name for name in ('train.jsonl', 'few.jsonl', 'rewards_that_change.py'))
    function = 'def half(data_source, response, ground_truth, extra):\n    return 0.5\n'
    questions = [GOOD.replace('1+1', f'{i}+1') for i in range(8)]
    before = {train: ''.join(questions), few: GOOD, rewards: function}
    for path, text in before.items():
        file(path, text)
    monkeypatch.syspath_prepend(tmp_path)
    config = math_config(model, train, few, task__reward='rewards_that_change:half')
    build(config, tmp_path / 'run')
    for path, text, what in (
        (train, before[train].replace('"2"', '"3"', 1), f'the answers of task.train={train}'),
        (few, GOOD.replace('"2"', '"3"'), f'fingerprints.benchmarks.{few}: questions and answers of a benchmark'),
        (few, GOOD.replace('1+1', '1+0'), f'fingerprints.benchmarks.{few}: questions and answers of a benchmark'),
        (rewards, function.replace('.5', '.6'), 'fingerprints.code.rewards_that_change: the source of one of your modules'),
    ):
        file(path, text)
        with pytest.raises(ValueError, match=re.escape(what)):
            build(config, tmp_path / 'run')
        file(path, before[path])
    assert claim_directory(read_inputs(config), tmp_path / 'run', amend=False).changed == {}


def test_an_unknown_benchmark(tmp_path, model, refused):
    train = file(tmp_path / 'train.jsonl', GOOD * 8)
    message = refused(math_config(model, train, 'aime23'))
    assert "unknown math benchmark 'aime23'; choose one of aime24, amc23, math500, minerva, olympiadbench, a file" in message


def without_shard(model):
    hf.save(model / 'sharded', load_file(model / 'model.safetensors').items(), like=model, shard_bytes=10**6)
    (model / 'model.safetensors').unlink()
    for name in ('model.safetensors.index.json', *(p.name for p in (model / 'sharded').glob('*.safetensors'))):
        (model / 'sharded' / name).rename(model / name)
    (model / 'model-00002-of-00004.safetensors').unlink()


def wrong_shape(model):
    tensors = load_file(model / 'model.safetensors')
    tensors['model.norm.weight'] = tensors['model.norm.weight'][:-1]
    save_file(tensors, model / 'model.safetensors')


def truncated(model):
    os.truncate(model / 'model.safetensors', 10**6)


def unknown_family(model):
    config = json.loads((model / 'config.json').read_text())
    (model / 'config.json').write_text(json.dumps({**config, 'model_type': 'mixtral'}))


SPOILED = [
    (without_shard, "the index names missing files ['model-00002-of-00004.safetensors']; fetch them again"),
    (wrong_shape, 'model.norm.weight has shape (127,), but config.json implies (128,)'),
    (truncated, 'the file is truncated or of another model'),
    (unknown_family, "config.json: model_type='mixtral' is not supported; supported: qwen2, qwen3"),
]


@pytest.mark.parametrize(('spoil', 'message'), SPOILED)
def test_a_model_is_checked_before_any_problem_is_read(model, refused, monkeypatch, benchmark, spoil, message):
    spoil(model)
    monkeypatch.setattr(inputs, 'encode_prompts', lambda *_, **__: pytest.fail('prompts were encoded'))
    assert message in refused(small_config('bapo_tuned', benchmark, model__path=str(model)))


@pytest.mark.parametrize(('spoil', 'message'), SPOILED)
def test_evaluation_refuses_such_a_model_too(model, benchmark, spoil, message):
    spoil(model)
    with pytest.raises((ValueError, OSError)) as e:
        load_for_evaluation(model, small_config('bapo_tuned', benchmark), None, None)
    assert message in str(e.value)


@pytest.mark.slow
def test_a_run_directory_of_another_model(tmp_path, model, benchmark, monkeypatch):
    run(small_config('bapo_tuned', benchmark, steps=1, model__path=str(model)), tmp_path / 'run')
    monkeypatch.setattr(hf, 'load_params', lambda *_: pytest.fail('weights were read'))
    # where other weights were put into the same place
    config = json.loads((model / 'config.json').read_text())
    last = config['num_hidden_layers'] - 1
    (model / 'config.json').write_text(json.dumps({**config, 'num_hidden_layers': last}))
    weights = load_file(model / 'model.safetensors')
    save_file({name: x for name, x in weights.items() if f'.layers.{last}.' not in name}, model / 'model.safetensors')
    with pytest.raises(ValueError, match=r'differ in fingerprints\.model\.num_hidden_layers\. Give another'):
        build(small_config('bapo_tuned', benchmark, steps=1, model__path=str(model)), tmp_path / 'run')


def missing(file):
    file.unlink()


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def without_policy(file):
    shutil.rmtree(file.parents[2])


TRAIN = SimpleNamespace(main=lambda _: run_command.conduct(train.build, train.train))
COMMANDS = [(TRAIN, 'workdir'), (evaluate, 'output'), (export, 'output'), (sft, 'output')]


def flags(monkeypatch, command, **given):
    """The flags of a command, as its module reads them."""
    others = {
        'config': default_config(), 'dry_run': False, 'fields': False, 'completion': None, 'topology': '', 'hosts': 1, 'host': 0, 'coordinator': None, 'amend': False, 'start': None,
        'searching': False, 'calling': False, 'checkpoint': str(BASE), 'base': None, 'dtype': None, 'shard_gb': 1.0, 'push': None, 'adapter': False,
    }  # fmt: skip
    monkeypatch.setattr(run_command if command is TRAIN else command, 'FLAGS', SimpleNamespace(**others | given))


@pytest.mark.parametrize(('command', 'flag'), COMMANDS)
def test_an_empty_directory_flag_is_a_missing_one(tmp_path, monkeypatch, command, flag):
    """As of a variable of the shell that is not set: the current folder is not meant."""
    monkeypatch.chdir(tmp_path)
    flags(monkeypatch, command, **{flag: ''})
    with pytest.raises(app.UsageError, match=f'--{flag} is (missing|empty); give '):
        command.main(None)
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_config_is_told_what_to_type(monkeypatch):
    flags(monkeypatch, TRAIN, config=None)
    with pytest.raises(app.UsageError, match='--config is missing; choose one of arithmetic, .*`bapo-train --config=quickstart --workdir=runs/quickstart`'):
        TRAIN.main(None)


def test_a_topology_without_a_dry_run_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    """Else the run would begin on the devices that are here."""
    flags(monkeypatch, TRAIN, workdir=str(tmp_path / 'run'), topology='4xH100')
    with pytest.raises(app.UsageError, match='--topology=4xH100 is only for a dry run; add --dry_run'):
        TRAIN.main(None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('below', ['', '/deep'])
@pytest.mark.parametrize(('command', 'flag'), [c for c in COMMANDS if c[0] is not evaluate])
def test_a_file_in_the_place_of_a_directory_flag_is_named(tmp_path, monkeypatch, command, flag, below):
    file(tmp_path / 'file', 'mine')
    flags(monkeypatch, command, **{flag: f'{tmp_path}/file{below}'})
    with pytest.raises(SystemExit, match=rf'error: --{flag}=.*{tmp_path}/file.*; give (another path|a new directory)'):
        command.main(None)
    assert (tmp_path / 'file').read_text() == 'mine'


def test_a_sink_that_is_not_installed_is_named(benchmark, refused, monkeypatch):
    def version_of(name, installed=importlib.metadata.version):
        return installed('no such package' if name == 'wandb' else name)

    monkeypatch.setattr(importlib.metadata, 'version', version_of)
    config = small_config('bapo_tuned', benchmark, log__sinks=('wandb',))
    assert refused(config) == "log.sinks has 'wandb', which is not installed; run `pip install wandb`, or leave it out"


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # Orbax leaves futures behind
def test_a_damaged_checkpoint_is_put_aside_and_the_run_goes_on_before_it(tmp_path, benchmark):
    config = small_config('bapo_tuned', benchmark, steps=2, checkpoint__every=1)
    run(config, tmp_path / 'run')
    for damage in (missing, cut, without_policy):
        workdir = shutil.copytree(tmp_path / 'run', tmp_path / damage.__name__)
        newest = workdir / 'checkpoints' / '2'
        damage(max((newest / 'policy' / 'ocdbt.process_0' / 'd').iterdir(), key=lambda f: f.stat().st_size))
        assert run(config, workdir).step == 2
        assert metrics(workdir) == metrics(tmp_path / 'run')
        [event] = [json.loads(line) for line in (workdir / 'events.jsonl').read_text().splitlines()]
        assert (event['event'], event['step']) == ('checkpoint damaged', 2)
        assert re.search(r'checkpoints/2 cannot be read .*It was moved to .*damaged-2; continuing after step 1$', event['message'])


def command(module, *flags, **environment):
    """What a command that refuses says."""
    done = subprocess.run([sys.executable, '-m', module, *map(str, flags)], cwd=ROOT, capture_output=True, text=True, timeout=240,
                          env={**os.environ, **environment})  # fmt: skip
    assert done.returncode == 1 and 'Traceback' not in done.stderr, done.stderr
    return done.stderr


@pytest.mark.slow
def test_both_commands_say_it_in_one_message_and_make_no_directory(tmp_path, model):
    train, few = file(tmp_path / 'train.jsonl', GOOD * 300), file(tmp_path / 'few.jsonl', GOOD + '{"problem": "p"}\n')
    config = ['--config=configs/math.py', f'--config.model.path={model}', '--config.model.max_positions=16384',
              '--config.task.template=chat']  # fmt: skip
    training = [*config, f'--workdir={tmp_path}/run', f'--config.task.train={train}']
    assert f"error: {few}, row 2: column 'answer' is missing" in command(
        'bapo_jax.train', *training, f"--config.evaluate.benchmarks=('{few}',)"
    )
    unreachable = command('bapo_jax.train', *training, "--config.evaluate.benchmarks=('aime24',)", HF_HUB_OFFLINE='1', BAPO_DATA='')
    assert "error: evaluate.benchmarks='HuggingFaceH4/aime_2024:train' is not a local file" in unreachable
    assert 'BAPO_DATA' in unreachable
    truncated(model)
    evaluation = [f'--checkpoint={model}', *config, f'--benchmarks={train}', f'--output={tmp_path}/out']
    assert 'the file is truncated or of another model' in command('bapo_jax.evaluate', *evaluation)
    assert not (tmp_path / 'run').exists() and not (tmp_path / 'out').exists()
