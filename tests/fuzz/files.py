"""Files that others wrote, or that something damaged: problems, model directories, published policies, and a run's own."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
from claims import claim
from mutations import damaged, other_text
from PIL import Image

from bapo_jax import grade
from bapo_jax.config import default_config
from bapo_jax.learner.update import TrainState
from bapo_jax.machine import lock
from bapo_jax.models import hf
from bapo_jax.policies import find_policy
from bapo_jax.run.checkpoint import Checkpoints, DamagedCheckpoint
from bapo_jax.run.log.metrics import MetricsLog, read_metrics
from bapo_jax.run.state import RunState
from bapo_jax.tasks.countdown import problems as countdown_problems, task as countdown
from bapo_jax.tasks.geometry import problems as geometry_problems, task as geometry
from bapo_jax.tasks.mathematics import problems as math_problems, task as mathematics
from bapo_jax.weights.manifest import MANIFEST, WEIGHTS, RefusedPolicy, check_bytes, read_manifest, read_tensors
from bapo_jax.weights.publish import publish
from tests.fuzz.feed import Target, parsing

# ---- problems ---------------------------------------------------------------------------------------------------------

_COUNTDOWN = {'id': 'a', 'nums': [44, 19, 35], 'target': 98, 'solution': '44+19+35'}
_MATH = (
    {'problem': 'What is $2+3$?', 'answer': '5', 'dataset': 'amc23'},
    {'question': 'Two roots?', 'final_answer': ['$1$', 2, 3.5]},
    {'prompt': [{'role': 'user', 'content': 'é?'}], 'reward_model': {'ground_truth': '5', 'style': 'rule'}, 'data_source': 'x'},
    {'system': 'Be brief.', 'conversations': [{'from': 'human', 'value': '2+3?'}, {'from': 'gpt', 'value': 'So \\boxed{5}.'}]},
    {'0': {'from': 'human', 'value': '2+3?'}, '1': {'from': 'assistant', 'ground_truth': {'value': '["5"]'}}},
)
_GEOMETRY = {'annotat_text': 'Find $x$.', 'choices': ['1.0', '2.0', '3', '4'], 'answer': 'B', 'problem_text': 'Find x.'}
_GRADED = {'response': 'So \\boxed{5}', 'ground_truth': {'answers': ['5'], 'boxed': True, 'thinking': False}}


@contextmanager
def rows(folder: Path) -> Iterator[Target]:
    """Lines of JSON: problems of Countdown and mathematics, what is to be graded, and InterGPS's descriptions."""
    (folder / '7').mkdir()
    (folder / '7' / 'img_diagram.png').write_bytes(_png())
    file = folder / 'rows.jsonl'

    def parse(said: dict[str, str]) -> None:
        data = said['text'].encode('latin-1')
        if said['kind'] == 'graded':
            grade.parse_row(data, lambda row: mathematics.check_ground_truth(row['ground_truth']))
        elif said['kind'] == 'geometry':
            (folder / '7' / 'data.json').write_bytes(data)
            for problem in geometry_problems.read_problems(folder):
                geometry.prompt_text(problem, 'plain', None).encode()
        elif said['kind'] == 'math':
            file.write_bytes(data)
            for problem in math_problems.training_problems(str(file), limit=0, seed=0):
                mathematics.check_ground_truth(problem)
                json.dumps(problem, ensure_ascii=False).encode()
        else:
            file.write_bytes(data)
            for problem in countdown_problems.training_problems(str(file), limit=0, seed=0):
                countdown.prompt_text(problem, 'tinyzero', None).encode()

    def checked(said: dict[str, str]) -> None:
        """A refusal names file and row, but that of a row to be graded, whose number its caller knows."""
        try:
            parse(said)
        except ValueError as e:
            named = rf'{file}(, row \d+)?: ' if said['kind'] in ('countdown', 'math') else rf'{folder}/7/data.json: '
            if type(e) is ValueError and said['kind'] != 'graded' and not re.match(named, str(e)):
                raise AssertionError(f'names no row: {e}') from e
            raise

    yield parsing(_rows, checked, 10.0, ValueError)


def _rows(rng: Random) -> dict[str, str]:
    kind = rng.choice(('countdown', 'math', 'graded', 'geometry'))
    if kind in ('geometry', 'graded'):
        return {'kind': kind, 'text': other_text(_GEOMETRY if kind == 'geometry' else _GRADED, rng)}
    lines = [json.dumps(_COUNTDOWN if kind == 'countdown' else rng.choice(_MATH)) for _ in range(rng.randint(0, 2))]
    lines.insert(rng.randint(0, len(lines)), other_text(_COUNTDOWN if kind == 'countdown' else rng.choice(_MATH), rng))
    return {'kind': kind, 'text': '\n'.join(lines) + '\n'}


@contextmanager
def tables(folder: Path) -> Iterator[Target]:
    """Parquet files with flipped bits and other pieces: of Countdown, mathematics, and geometry with its images."""
    sound = {'countdown': [_COUNTDOWN] * 3, 'math': [_MATH[0]] * 3, 'geometry': [{**_MATH[0], 'images': [{'bytes': _png()}]}] * 2}
    texts = {kind: _parquet(rows_).decode('latin-1') for kind, rows_ in sound.items()}
    readers = {'countdown': countdown_problems, 'math': math_problems, 'geometry': geometry_problems}
    file = folder / 'rows.parquet'

    def make(rng: Random) -> dict[str, str]:
        kind = rng.choice(list(texts))
        return {'kind': kind, 'text': damaged(texts[kind], rng)}

    def parse(said: dict[str, str]) -> None:
        file.write_bytes(said['text'].encode('latin-1'))
        json.dumps(readers[said['kind']].read_problems(file), ensure_ascii=False).encode()

    yield parsing(make, parse, 10.0, ValueError, naming=f'^{re.escape(str(file))}')


def _png() -> bytes:
    data = io.BytesIO()
    Image.new('RGB', (40, 30), 'white').save(data, 'PNG')
    return data.getvalue()


def _parquet(rows_: list[dict[str, Any]]) -> bytes:
    data = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows_), data)
    return data.getvalue()


# ---- models and published policies ------------------------------------------------------------------------------------

_MODEL = {
    'model_type': 'qwen3', 'vocab_size': 12, 'hidden_size': 8, 'intermediate_size': 12, 'num_hidden_layers': 1,
    'num_attention_heads': 2, 'num_key_value_heads': 1, 'head_dim': 4, 'rope_theta': 10000.0, 'rope_scaling': None,
    'rms_norm_eps': 1e-6, 'tie_word_embeddings': False, 'hidden_act': 'silu', 'torch_dtype': 'float32',
    'max_position_embeddings': 64, 'layer_types': ['full_attention'],
}  # fmt: skip
_SEEING = {
    'model_type': 'qwen2_5_vl', 'image_token_id': 5, 'tie_word_embeddings': True,
    'text_config': {
        **{k: v for k, v in _MODEL.items() if k not in ('model_type', 'head_dim', 'rope_theta', 'rope_scaling')},
        'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e4, 'mrope_section': [1, 1, 0]},
    },
    'vision_config': {
        'depth': 3, 'hidden_size': 32, 'intermediate_size': 20, 'num_heads': 2, 'out_hidden_size': 8, 'patch_size': 4,
        'in_channels': 3, 'window_size': 16, 'fullatt_block_indexes': [1], 'spatial_merge_size': 2, 'temporal_patch_size': 2,
        'hidden_act': 'silu',
    },
}  # fmt: skip


@contextmanager
def model_config(folder: Path) -> Iterator[Target]:
    """A model directory's config.json: what is accepted has sizes and numbers from which a model can be made."""

    def parse(said: str) -> None:
        (folder / 'config.json').write_bytes(said.encode('latin-1'))
        config = hf.read_config(folder)
        c = vars(config)
        sizes = [c[name] for name in c if name.startswith('num_') or name.endswith(('_size', '_dim'))]
        if config.vision:
            sizes += [v for k, v in vars(config.vision).items() if k not in ('fullatt_block_indexes', 'image_token')]
        assert all(type(size) is int and 0 < size < 2**31 for size in sizes), sizes
        assert type(config.max_positions) is int and 0 < config.rotation.rope_theta < 1e30 and 0 < config.rms_norm_eps < 1e30
        assert config.num_heads % config.num_kv_heads == 0 and config.head_dim % 2 == 0
        json.dumps(hf.architecture(config), allow_nan=False)
        hf.stored_dtype(folder)

    def make(rng: Random) -> str:
        return other_text(rng.choice((_MODEL, _SEEING)), rng)

    yield parsing(make, parse, 10.0, ValueError, naming=re.escape(str(folder / 'config.json')))


@contextmanager
def manifests(folder: Path) -> Iterator[Target]:
    """A published policy in a run, as servers and evaluations read it: manifest, config.json, zarr's description, a part."""
    (folder / 'config.json').write_text(json.dumps(_MODEL))
    config = hf.read_config(folder)
    params = jax.tree.map(lambda x: np.ones(x.shape, np.float32), hf.abstract_params(config)[1])
    path = publish(folder / 'policy', 7, params, config, 'float32')
    (folder / 'config.json').write_text(json.dumps({'model': {'path': 'there'}}))
    described = (path / MANIFEST, folder / 'config.json', *(path / WEIGHTS / 'model.norm.weight').iterdir())
    files = {str(f.relative_to(folder)): f.read_bytes() for f in described}
    [manifest] = (name for name in files if name.endswith(MANIFEST))

    def make(rng: Random) -> dict[str, str]:
        name = manifest if rng.random() < 0.7 else rng.choice(list(files))
        if name.endswith('.json'):
            return {'file': name, 'text': other_text(json.loads(files[name]), rng)}
        return {'file': name, 'text': damaged(files[name].decode('latin-1'), rng)}

    def parse(said: dict[str, str]) -> None:
        file = folder / said['file']
        file.write_bytes(said['text'].encode('latin-1'))
        try:
            policy = find_policy(path)
            policy.check(config)
            read = read_manifest(path)
            check_bytes(path, read)
            for tensor, (name, array) in zip(read.tensors, read_tensors(path, read), strict=True):
                assert (tensor.name, tensor.shape) == (name, array.shape)
        except RefusedPolicy as e:
            str(e).encode()  # a server sends it
            raise
        finally:
            file.write_bytes(files[said['file']])

    yield parsing(make, parse, 10.0, RefusedPolicy, ValueError, naming=re.escape(str(folder)))


# ---- a run's own files ------------------------------------------------------------------------------------------------


@contextmanager
def run_config(folder: Path) -> Iterator[Target]:
    """A run's config.json, as the next trainer reads it."""
    prints = {'dataset': 'd', 'answers': 'a', 'benchmarks': {'b.jsonl': 'b'}, 'code': {'my.rewards': 'c'}, 'model': {'layers': 2}}
    config, here = default_config(), {'devices': '1 cpu'}
    claim(folder, config, prints, here)
    sound = json.loads((folder / 'config.json').read_text())

    def parse(said: dict[str, Any]) -> None:
        (folder / 'config.json').write_bytes(said['text'].encode('latin-1'))
        claim(folder, config, prints, here, amend=said['amend'])

    def make(rng: Random) -> dict[str, Any]:
        return {'text': other_text(sound, rng), 'amend': rng.random() < 0.5}

    yield parsing(make, parse, 10.0, ValueError, naming=re.escape(str(folder)))


@contextmanager
def metrics(folder: Path) -> Iterator[Target]:
    """metrics.jsonl, as the next trainer reads it and goes on."""
    lines = [{'step': i, 'critic/score/mean': 0.5, 'accuracy_bins': [1, 2], 'bapo/r_tot': None} for i in range(5)]
    sound = ''.join(json.dumps(line) + '\n' for line in lines)

    def make(rng: Random) -> str:
        if rng.random() < 0.5:
            return damaged(sound, rng)
        at = rng.randrange(len(lines))
        return ''.join(other_text(x, rng) + '\n' if i == at else json.dumps(x) + '\n' for i, x in enumerate(lines))

    def parse(said: str) -> None:
        (folder / 'metrics.jsonl').write_bytes(said.encode('latin-1'))
        log = MetricsLog(folder, 3)
        log.close()
        for file in (folder / 'tensorboard').iterdir():
            file.unlink()
        steps = [row['step'] for row in read_metrics(folder)]
        assert steps == sorted(set(steps)) and all(type(step) is int and step <= 3 for step in steps), steps

    yield parsing(make, parse, 10.0, ValueError, naming=rf'^{re.escape(str(folder))}/metrics.jsonl, line \d+ ')


@contextmanager
def checkpoints(folder: Path) -> Iterator[Target]:
    """The files of JSON in a checkpoint: what is restored is what was saved, or it is damaged."""
    arrays = {'w': np.arange(6, dtype=np.float32)}
    like = TrainState({'w': jax.numpy.asarray(arrays['w'])}, {'m': jax.numpy.zeros(2)}, None)
    saved = RunState(like, alpha=like.params, alpha_version=5, step=7, synced_after=6, unwritten={'a': 0.1})
    first = Checkpoints(folder / 'checkpoints', keep=1)
    first.save(saved, arrays, '{"position": 9}')
    first.close()
    kept = Checkpoints(folder / 'checkpoints', keep=1)
    names = ('host/metadata', '_CHECKPOINT_METADATA', 'policy/_METADATA', 'policy/_sharding')
    files = {f'checkpoints/7/{name}': (folder / 'checkpoints' / '7' / name).read_text('latin-1') for name in names}

    def make(rng: Random) -> dict[str, str]:
        name = rng.choice((list(files)[0], *files))
        return {'file': name, 'text': other_text(json.loads(files[name]), rng)}

    def parse(said: dict[str, str]) -> None:
        file = folder / said['file']
        file.write_bytes(said['text'].encode('latin-1'))
        try:
            run, replay, selector = kept.restore(7, like)
        finally:
            file.write_text(files[said['file']], 'latin-1')
        told = (run.alpha_version, run.step, run.synced_after, run.unwritten, run.totals, selector)
        assert told == (5, 7, 6, {'a': 0.1}, saved.totals, '{"position": 9}'), told
        np.testing.assert_array_equal(run.theta.params['w'], arrays['w'])
        np.testing.assert_array_equal(replay['w'], arrays['w'])

    yield parsing(make, parse, 20.0, DamagedCheckpoint, naming=re.escape(str(folder)))
    kept.close()


@contextmanager
def lock_file(folder: Path) -> Iterator[Target]:
    """The lock that another process left: the directory is taken in the end, since nobody holds it."""
    sound = {'token': 'b' * 16, 'pid': 7, 'machine': 'node3 b00t', 'host': 'node3', 'renewed': 1}

    def parse(said: str) -> None:
        (folder / lock.LOCK_FILE).write_bytes(said.encode('latin-1'))
        with lock.held(folder):
            assert json.loads((folder / lock.LOCK_FILE).read_bytes()[:512])['pid'] != 7
        assert not (folder / lock.LOCK_FILE).exists()

    with mock.patch.object(lock, 'WATCH_S', 0.0), mock.patch('builtins.print'):
        yield parsing(lambda rng: other_text(sound, rng).ljust(512), parse, 10.0)
