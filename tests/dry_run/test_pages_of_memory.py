"""The pages' numbers of memory and of modelled time: those of a formula are what it gives. Those of the compiler are by command."""

import ast
import json
import re
import shlex

import pytest
from small_run import ROOT

from bapo_jax.cluster.devices import POOL
from bapo_jax.config import resolve, value as value_of_field
from bapo_jax.dry_run.advice import settings, step_seconds, tokens_of_a_step
from bapo_jax.dry_run.command import _estimate, measure
from bapo_jax.dry_run.targets import CARDS, GB
from bapo_jax.learner.packing import most_groups
from bapo_jax.machine import cli
from bapo_jax.models import hf
from benchmarks.compiled.fits import LARGEST, MODELS, OTHER, SETTINGS, prepared, utilisation
from configs import math, one_gpu


def page(name):
    return (ROOT / 'docs' / name).read_text('utf-8')


def rows(name, heading):
    """The cells of the table's rows, of the only table whose head begins with these cells."""
    [table] = re.findall(rf'^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)', page(name), re.MULTILINE)
    return [[cell.strip() for cell in line.split('|')[1:-1]] for line in table.splitlines()]


TABLE = rows('reference/memory.md', r'model \| devices \| data × fsdp × tensor')
FITS = [row for row in TABLE if ':' not in row[1]]  # GPUs
CHOSEN = [row for row in rows('reference/performance.md', r'model \| cards \| data × fsdp × tensor \| micro_batch_rows') if row[3]]


@pytest.fixture(autouse=True)
def share(monkeypatch):
    monkeypatch.setenv(POOL, '.93')  # as the pages say


def numbers(cell):
    return tuple(int(n) for n in cell.split(' × '))


def test_the_table_of_what_fits_has_the_rows_of_its_command():
    assert not any(row[6] for row in TABLE if row not in FITS)  # the formula is of GPUs
    shown = []
    for what, devices, mesh, at_once, remat, *_ in TABLE:
        model, *other = what.split(', ')
        shown.append((model, devices, numbers(mesh), int(at_once), remat, *other))
    assert sorted(shown) == sorted(SETTINGS)


@pytest.mark.parametrize('row', FITS, ids=lambda row: ' '.join(row[:5]))
def test_the_formulas_column_is_the_formula(row):
    what, devices, mesh, at_once, remat, compiled, formula, size, fits = row
    name, *other = what.split(', ')
    c, model = prepared(name, numbers(mesh), int(at_once), remat, *(OTHER[part] for part in other))
    result = measure(c, model, devices, [LARGEST] * most_groups(c.learner) if model.vision else [], compiles=False)
    assert (f'{result.total / GB:.1f}', f'{result.target.device_bytes / GB:.1f}') == (formula, size)
    assert fits == ('yes' if float(compiled) <= float(size) else 'no')


def test_how_far_the_formula_lies_from_the_compiler_is_what_the_table_shows():
    over = {' '.join(row[:5]): 100 * (float(row[6]) / float(row[5]) - 1) for row in FITS}
    experts, images = ([x for name, x in over.items() if name.startswith(kind)] for kind in ('30B-A3B', 'VL'))
    text = [x for name, x in over.items() if not name.startswith(('30B-A3B', 'VL'))]
    assert (
        f'the formula is {-min(text):.1f} % too low to {max(text):.1f} % too high for text models, '
        f'{min(images):.0f} and {max(images):.0f} % too high with images, and '
        f'{-min(experts):.1f} % too low to {max(experts):.1f} % too high with experts'
    ) in ' '.join(page('reference/memory.md').split())


@pytest.mark.parametrize('row', CHOSEN, ids=lambda row: ' '.join(row[:2]))
def test_modelled_seconds_are_the_models(row):
    what, devices, mesh, at_once, remat, _, _, seconds, rate, share = row
    name, *other = what.split(', ')
    c, model = prepared(name, numbers(mesh), int(at_once), remat, *(OTHER[part] for part in other))
    of_a_host, card = devices.split('x')[-2:]
    modelled = step_seconds(c, model, CARDS[card], int(of_a_host))
    assert (f'{modelled:.0f}', f'{tokens_of_a_step(c) / modelled:,.0f}') == (seconds, rate)
    assert share == f'{utilisation(c, model, devices, modelled):.0%}'


def commands(name, word):
    """(variables, flags) of each of the page's commands that train and have the word."""
    lines = [line for line in re.sub(r'\\\n *', '', page(name)).splitlines() if line.startswith('    ') and word in line]
    found = [re.fullmatch(r' +((?:\w+=\S+ )*)(?:python -m bapo_jax\.train|bapo-train) ([^#]+).*', line) for line in lines]
    return [(dict(v.split('=') for v in f[1].split()), shlex.split(f[2])) for f in found if f]


def config_of(words, config=math):
    """The module's config with the command's fields."""
    c = config.get_config()
    cli.check_overrides(c, words)
    for field, value in (word.removeprefix('--config.').split('=', 1) for word in words if word.startswith('--config.')):
        was = value_of_field(c, field)
        c.update_from_flattened_dict({field: value if isinstance(was, str) else ast.literal_eval(value)})
    return c


def test_8b_on_eight_cards_as_the_first_page_says(tmp_path):
    """Both commands are one config, which the trainer's four cards hold; the figure is that of the table's row."""
    (_, tried), (variables, run) = commands('start.md', 'Qwen3-8B')
    assert [w for w in tried if w.startswith('--config')] == [w for w in run if w.startswith('--config')]
    flags = {w.split('=')[0] for w in tried + run if not w.startswith('--config.')}
    defined = re.findall(r"DEFINE_\w+\(\s*'(\w+)'", (ROOT / 'bapo_jax' / 'command.py').read_text('utf-8'))
    assert flags <= {'--config', *(f'--{name}' for name in defined)}
    c = config_of(tried)
    assert not {str(gpu) for gpu in c.rollout.gpus} & set(variables['CUDA_VISIBLE_DEVICES'].split(','))
    (tmp_path / 'config.json').write_text(json.dumps(MODELS['8B']))
    c.model.path = str(tmp_path)
    c = resolve(c)
    [topology] = [word.removeprefix('--topology=') for word in tried if word.startswith('--topology=')]
    result = measure(c, hf.read_config(tmp_path, c.model.dtype), topology, compiles=False)
    assert result.target.servers.startswith('4, on 4 other GPUs')
    mesh, l = ' × '.join(str(n) for n in result.target.mesh.shape.values()), c.learner
    [row] = [r for r in FITS if r[:5] == ['8B', result.target.name.replace(' ', 'x'), mesh, str(l.micro_batch_rows), l.remat]]
    assert f'{result.total / GB:.1f}' == row[6]
    assert f'takes {row[5]} of their {row[7]} GB each by the compiler' in page('start.md')


@pytest.fixture
def of_one_gpu(tmp_path):
    """A function of a command's flags: configs/one_gpu.py, resolved, and a model of Qwen2.5-1.5B-Instruct's sizes."""
    (tmp_path / 'config.json').write_text(json.dumps(MODELS['1.5B'] | {'tie_word_embeddings': True}))

    def resolved(words=()):
        c = config_of(words, one_gpu)
        c.model.path = str(tmp_path)
        return resolve(c), hf.read_config(tmp_path, c.model.dtype)

    return resolved


def test_one_gpu_as_its_page_says(of_one_gpu):
    """What is of the formula; what the compiler says is by the page's command."""
    text, (c, model) = ' '.join(page('your_data.md').split()), of_one_gpu()
    assert f'export {POOL}=.93 ' in text
    result = measure(c, model, '1xH100', compiles=False)
    kept = sum(n for what, n in result.memory.items() if what.startswith(('α', 'θ')))
    beyond = result.memory['the in-process engine, beyond what the update needs before and after it']
    engine, update = result.total - kept, result.total - kept - beyond
    assert f'of the {result.target.device_bytes / GB:.1f} that JAX has' in text
    assert f'then the in-process engine | {kept / GB:.1f} + {engine / GB:.1f} = {result.total / GB:.1f} | |' in text
    assert f'takes turns with the engine | {update / GB:.1f} |' in text and beyond > 0

    def bytes_of(c):
        return _estimate(c, model, '1xH100', ())

    card = CARDS['H100']
    fastest = settings(c, model, card, 1, 1, bytes_of, result.target.device_bytes)[0]
    said = f'`learner.micro_batch_rows={fastest.rows} learner.remat={fastest.remat}`'
    assert f'the fastest setting, modelled to take a fifth less time: {said} | {fastest.bytes / GB:.1f} |' in text
    c.mesh.data = c.mesh.fsdp = 1
    assert round(fastest.seconds / step_seconds(c, model, card, 1), 1) == 0.8


def test_the_faster_command_of_one_gpu_fits_by_the_formula_beside_its_server(of_one_gpu, monkeypatch):
    [(variables, words)] = commands('your_data.md', 'runs/faster')
    monkeypatch.setenv(POOL, variables[POOL])
    c, model = of_one_gpu(words)
    result = measure(c, model, '1xH100', compiles=False)
    assert result.fits and "on the trainer's GPUs, each with rollout.server.memory=0.35" in result.target.servers
