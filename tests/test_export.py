"""A trained or published policy leaves as a Hugging Face directory that torch reads with our logits, whole or not at all."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from stored_runs import make_run
from tiny import QWEN3

from bapo_jax.export import export
from bapo_jax.models import hf
from bapo_jax.models.attention import xla
from bapo_jax.models.tokenizer import character_tokenizer, load_tokenizer
from bapo_jax.weights.manifest import MANIFEST, WEIGHTS

ROOT = Path(__file__).resolve().parents[1]
MODELS = {'Qwen2, tied': {'vocab_size': 300}, 'Qwen3, untied': {'vocab_size': 300, 'tie_word_embeddings': False, **QWEN3}}


@pytest.fixture(scope='module')
def runs(make_policy, tmp_path_factory):
    return {name: make_run(make_policy(**fields), tmp_path_factory.mktemp('runs')) for name, fields in MODELS.items()}


@pytest.fixture
def one(runs):
    return runs['Qwen3, untied']


def logits(config, params, tokens):
    model = nnx.merge(hf.abstract_params(config)[0], params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model.logits(model(tokens, positions, functools.partial(xla, segment_BxT=jnp.ones(tokens.shape))))


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('source', ['.', 'policy/000007'])
def test_torch_reads_the_export_with_our_logits_and_so_do_we_bit_for_bit(source, name, runs, make_policy, tmp_path, monkeypatch, capsys):
    import torch
    from transformers import AutoModelForCausalLM

    run, theta = runs[name]
    assert export(run / source, tmp_path / 'out', shard_bytes=50_000) == (7, 'float32')
    assert len(list((tmp_path / 'out').glob('*.safetensors'))) > 2
    config = hf.read_config(tmp_path / 'out')
    assert config == make_policy(**MODELS[name]).config
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(tmp_path / 'out', config), theta)
    tokens = np.random.default_rng(0).integers(0, 300, (3, 20))
    with torch.no_grad():
        got = AutoModelForCausalLM.from_pretrained(tmp_path / 'out')(torch.tensor(tokens)).logits.numpy()
    assert got.std() > 0.5
    np.testing.assert_allclose(got, logits(config, theta, tokens), rtol=0, atol=2e-5)
    assert load_tokenizer(tmp_path / 'out').chat_template == 'a template'
    # The lines that the card gives to others.
    [use, _] = re.findall(r'^```python\n(.*?)^```', (tmp_path / 'out' / 'README.md').read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(use, {})
    assert capsys.readouterr().out.startswith('A conversation between User and Assistant.')  # as the run's task asks


@pytest.mark.parametrize('limit', [1, 40_000, 10**9])
def test_files_hold_no_more_than_asked_and_the_index_names_everything_once(limit, one, tmp_path):
    run, theta = one
    export(run, tmp_path / 'out', shard_bytes=limit)
    held = {}
    for file in (tmp_path / 'out').glob('*.safetensors'):
        with safe_open(file, 'numpy') as f:
            sizes = {name: f.get_tensor(name).nbytes for name in f.keys()}
        assert sum(sizes.values()) <= limit or len(sizes) == 1
        assert not held.keys() & sizes.keys()
        held |= dict.fromkeys(sizes, file.name)
    index = tmp_path / 'out' / 'model.safetensors.index.json'
    if limit == 10**9:
        assert set(held.values()) == {'model.safetensors'} and not index.exists()
    else:
        assert json.loads(index.read_text()) == {
            'metadata': {'total_size': sum(x.nbytes for x in jax.tree.leaves(theta))}, 'weight_map': held,
        }  # fmt: skip


def test_all_files_may_be_read_by_whom_the_umask_allows(one, tmp_path):
    """Even if the base's files are private or read-only."""
    base = shutil.copytree(json.loads((one[0] / 'config.json').read_text())['model']['path'], tmp_path / 'base')
    (base / 'config.json').chmod(0o400)
    before = os.umask(0o027)
    try:
        export(one[0], tmp_path / 'out', base=base, dtype='bfloat16', shard_bytes=50_000)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / 'out').iterdir()}
    assert len(modes) > 5 and set(modes.values()) == {0o640}


@pytest.mark.slow
def test_the_command_and_the_dtypes(one, tmp_path):
    """By default the weights are stored as the base's config.json says, and the export's config.json says what they are."""
    import torch
    from transformers import AutoModelForCausalLM

    run, theta = one
    base = shutil.copytree(json.loads((run / 'config.json').read_text())['model']['path'], tmp_path / 'base')
    config = json.loads((base / 'config.json').read_text())
    (base / 'config.json').write_text(json.dumps({k: v for k, v in config.items() if k != 'dtype'} | {'torch_dtype': 'bfloat16'}))

    def command(output, *flags):
        arguments = ['-m', 'bapo_jax.export', f'--checkpoint={run}', f'--base={base}', f'--output={tmp_path / output}', *flags]
        where = {'env': {**os.environ, 'PYTHONPATH': str(ROOT)}, 'cwd': tmp_path}
        return subprocess.run([sys.executable, *arguments], **where, capture_output=True, text=True, timeout=240)

    first, second = command('halves'), command('halves')
    assert first.returncode == 0 and 'after 7 steps, bfloat16' in first.stdout, first.stderr
    assert second.returncode != 0 and 'error: --output=' in second.stderr and 'not empty' in second.stderr
    assert export(run, tmp_path / 'whole', base=base, dtype='float32') == (7, 'float32')
    for output, dtype, torch_dtype in (('halves', ml_dtypes.bfloat16, torch.bfloat16), ('whole', np.float32, torch.float32)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / output)
        assert model.dtype == torch_dtype
        want = theta['layers']['q']['kernel'][1].T.astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(model.model.layers[1].self_attn.q_proj.weight.detach().float().numpy(), want)


def test_a_hugging_face_directory_is_stored_otherwise(one, make_policy, tmp_path):
    """In other files and another dtype; all files of the base come along."""
    run, _ = one
    base = Path(json.loads((run / 'config.json').read_text())['model']['path'])
    assert export(base, tmp_path / 'same') == (None, 'float32')
    assert export(base, tmp_path / 'halves', dtype='bfloat16', shard_bytes=50_000) == (None, 'bfloat16')
    assert len(list((tmp_path / 'halves').glob('*.safetensors'))) == 2
    policy = make_policy(**MODELS['Qwen3, untied'])
    read = (hf.load_params(tmp_path / name, policy.config) for name in ('same', 'halves'))
    for same, halves, want in zip(*map(jax.tree.leaves, (*read, policy.params)), strict=True):
        np.testing.assert_array_equal(same, want)
        np.testing.assert_array_equal(halves, want.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert load_tokenizer(tmp_path / 'halves').chat_template == 'a template'


def test_the_card_has_the_scores_of_the_policy_that_is_exported_and_the_license_of_its_base(one, tmp_path):
    run = shutil.copytree(one[0], tmp_path / 'run')
    base = shutil.copytree(json.loads((run / 'config.json').read_text())['model']['path'], tmp_path / 'base')
    (base / 'README.md').write_text('---\nlicense: other\nlicense_name: mine\ntags: [x]\n---\n# Base\n')
    (run / 'evals').mkdir()
    for step, mean in ((0, 0.25), (4, 0.5), (7, 0.75)):
        of = {'few': {'samples': 2, 'questions': 8, 'mean': mean, 'interval': None, 'pass': mean}}
        (run / 'evals' / f'{step:06d}.json').write_text(json.dumps({'step': step, 'benchmarks': of}))
    for source in ('.', 'policy/000007'):
        export(run / source, tmp_path / 'out', base=base, name='me/mine')
        card = (tmp_path / 'out' / 'README.md').read_text()
        assert '| few, mean@2, 8 problems | 25.0 | 75.0 |' in card and '# me/mine' in card and str(tmp_path) not in card
        assert 'license: other\nlicense_name: mine\n' in card
        assert export(tmp_path / 'out', tmp_path / 'halves', dtype='bfloat16')[1] == 'bfloat16'
        assert (tmp_path / 'halves' / 'README.md').read_text() == card  # what is known of the policy goes with it
        shutil.rmtree(tmp_path / 'out')
        shutil.rmtree(tmp_path / 'halves')
    # --base only says where the run's base lies here.
    assert '| base model | base |' in card
    elsewhere = shutil.copytree(base, tmp_path / 'elsewhere')
    export(run, tmp_path / 'out', base=elsewhere)
    assert '| base model | base |' in (tmp_path / 'out' / 'README.md').read_text()
    (elsewhere / 'README.md').write_text('# Of the base\n')
    export(tmp_path / 'out', tmp_path / 'halves', base=elsewhere, dtype='bfloat16')
    assert (tmp_path / 'halves' / 'README.md').read_text() == (tmp_path / 'out' / 'README.md').read_text()
    export(shutil.copytree(run / 'policy' / '000007', tmp_path / 'copy'), tmp_path / 'alone', base=elsewhere)
    assert 'are those of elsewhere.\n' in (tmp_path / 'alone' / 'README.md').read_text()
    for name in ('out', 'halves'):
        shutil.rmtree(tmp_path / name)
    (base / 'README.md').write_text('---\n: [\n---\n')
    with pytest.raises(ValueError, match=r'README.md begins with damaged YAML .*; correct or remove'):
        export(run, tmp_path / 'out', base=base)
    assert not list(tmp_path.glob('out*'))


def test_a_run_that_needs_a_gpu_is_exported_where_there_is_none(one, tmp_path):
    """An export computes nothing."""
    run = shutil.copytree(one[0], tmp_path / 'run')
    written = json.loads((run / 'config.json').read_text())
    (run / 'config.json').write_text(json.dumps({**written, 'mesh': {'platform': 'gpu'}}))
    assert export(run, tmp_path / 'out') == (7, 'float32')


def test_a_used_output_is_refused_and_left_alone(one, tmp_path):
    (tmp_path / 'notes.txt').write_text('mine')
    for output in (tmp_path, tmp_path / 'notes.txt'):
        with pytest.raises(FileExistsError, match='--output=.*not empty'):
            export(one[0], output)
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [('notes.txt', 'mine')]
    (tmp_path / 'empty').mkdir()
    export(one[0], tmp_path / 'empty')
    assert (tmp_path / 'empty' / 'model.safetensors').is_file()


def test_what_breaks_half_way_leaves_nothing_and_an_interrupted_export_is_done_anew(one, tmp_path, monkeypatch):
    run, _ = one
    (tmp_path / 'out.partial').mkdir()  # as a killed process leaves it
    (tmp_path / 'out.partial' / 'model.safetensors').write_text('half')
    written, save_file = [], hf.save_file

    def full_disk(tensors, path, **kwargs):
        if len(written) == 2:
            raise OSError(28, 'No space left on device')
        written.append(path)
        save_file(tensors, path, **kwargs)

    monkeypatch.setattr(hf, 'save_file', full_disk)
    with pytest.raises(OSError, match='No space left'):
        export(run, tmp_path / 'out', shard_bytes=50_000)
    assert len(written) == 2 and list(tmp_path.iterdir()) == []


def test_every_file_of_a_run_may_be_read_by_whom_the_umask_allows(make_policy, tmp_path):
    """Checkpoints and published policies, too."""
    before = os.umask(0o027)
    try:
        run, _ = make_run(make_policy(**MODELS['Qwen2, tied']), tmp_path)
    finally:
        os.umask(before)
    files = [file for file in run.rglob('*') if file.is_file()]
    assert len(files) > 40 and [file for file in files if file.stat().st_mode & 0o777 != 0o640] == []


def policy_copy(run, tmp_path):
    return shutil.copytree(run / 'policy' / '000007', tmp_path / 'copy')


def without_manifest(run, tmp_path):
    policy = policy_copy(run, tmp_path)
    (policy / MANIFEST).unlink()
    return {'checkpoint': policy}


def damaged(run, tmp_path):
    policy = policy_copy(run, tmp_path)
    next((policy / WEIGHTS / 'model.norm.weight').glob('[0-9]*')).unlink()
    return {'checkpoint': policy, 'base': Path(json.loads((run / 'config.json').read_text())['model']['path'])}


def without_tensor(run, tmp_path):
    policy = policy_copy(run, tmp_path)
    manifest = json.loads((policy / MANIFEST).read_text())
    del manifest['tensors']['lm_head.weight']
    (policy / MANIFEST).write_text(json.dumps(manifest))
    return {'checkpoint': policy, 'base': Path(json.loads((run / 'config.json').read_text())['model']['path'])}


@pytest.mark.parametrize(
    'spoil, error, message',
    [
        (lambda run, tmp: {'checkpoint': tmp / 'nowhere'}, FileNotFoundError, '--checkpoint=.*nowhere.* is not a directory'),
        (lambda run, tmp: {'checkpoint': tmp}, FileNotFoundError, 'no config.json there'),
        (without_manifest, ValueError, 'copy/manifest.json is missing, so no complete policy'),
        (lambda run, tmp: {'checkpoint': policy_copy(run, tmp)}, FileNotFoundError, 'config.json is missing.*--base'),
        (lambda run, tmp: {'checkpoint': run, 'base': tmp / 'nowhere'}, FileNotFoundError, '--base=.*nowhere.* is not a directory; give'),
        (lambda run, tmp: {'checkpoint': run, 'dtype': 'float16'}, ValueError, "'float16'.*--dtype.*bfloat16"),
        (lambda run, tmp: {'checkpoint': run, 'base': tmp}, FileNotFoundError, '--base=.* has no config.json; give'),
        (damaged, ValueError, r'model\.norm\.weight/0 cannot be read'),
        (without_tensor, ValueError, r'manifest.json has no tensor lm_head\.weight'),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(spoil, error, message, one, tmp_path):
    with pytest.raises(error, match=message):
        export(**spoil(one[0], tmp_path), output=tmp_path / 'out')
    assert not list(tmp_path.glob('out*'))


@pytest.mark.parametrize(
    'source, fields, message',
    [
        ('.', {'hidden_size': 16}, r'another model: embedding\.embedding has shape \(300, 32\) there and \(300, 16\) in its base, .*--base'),
        ('.', {'tie_word_embeddings': True}, r'another model: head\.kernel has shape \(32, 300\) there and None'),
        ('.', {'model_type': 'qwen2'}, r'another model: layers\.k\.bias has shape None there and \(2, 32\)'),
        ('policy/000007', {'model_type': 'qwen2'}, "model_type 'qwen3' .the base has 'qwen2'"),
        ('policy/000007', {'head_dim': 8}, 'head_dim 16 .the base has 8'),
    ],
)
def test_a_base_of_another_model_is_refused(source, fields, message, runs, make_policy, tmp_path):
    other = shutil.copytree(make_policy(**{**MODELS['Qwen3, untied'], **fields}).path, tmp_path / 'base')
    character_tokenizer().save_pretrained(other)
    with pytest.raises(ValueError, match=message):
        export(runs['Qwen3, untied'][0] / source, tmp_path / 'out', base=other)
    assert list(tmp_path.iterdir()) == [other]


def test_a_base_whose_tokenizer_is_missing_is_refused(one, tmp_path):
    """Else the export would be a model that reads every question as nothing."""
    base = shutil.copytree(json.loads((one[0] / 'config.json').read_text())['model']['path'], tmp_path / 'base')
    (base / 'tokenizer.json').unlink()
    with pytest.raises(ValueError, match='base.: no tokenizer.json there'):
        export(one[0], tmp_path / 'out', base=base)
    assert list(tmp_path.iterdir()) == [base]
