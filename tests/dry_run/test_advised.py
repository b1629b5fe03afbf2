"""What a dry run prints beside its verdict, for GPUs by name, by memory and present: a table of settings, or what would help.

Nothing is compiled: `measure` goes by the formula.
"""

import dataclasses
import functools
import re

import pytest
from in_dry_runs import MODEL, config
from jax.sharding import AbstractMesh
from small_run import small_config
from stand_in_gpus import gpus

from bapo_jax.cluster.devices import POOL
from bapo_jax.dry_run import command as dry_run, targets
from bapo_jax.dry_run.advice import as_table, settings, what_helps
from bapo_jax.dry_run.command import chosen, measure
from bapo_jax.dry_run.targets import CARDS, GB, find_target

LARGE = dataclasses.replace(MODEL, hidden_size=2048, intermediate_size=8192)
TABLE, NONE = 'settings that fit, fastest first', 'no table of settings: the speed of'
HELP = 'what would help, each line in addition to those above, estimated:'


@pytest.fixture(autouse=True)
def by_the_formula(monkeypatch):
    monkeypatch.setattr(dry_run, 'measure', functools.partial(measure, compiles=False))
    monkeypatch.setenv(POOL, '.93')


@pytest.fixture
def said(benchmark, capsys, monkeypatch):
    """A function of a topology, present devices and fields of the quickstart's config: the lines of its dry run on GPUs."""

    monkeypatch.delenv('COLUMNS', raising=False)  # else sentences are wrapped

    def run(topology, devices=(), **changes):
        monkeypatch.setattr(targets, 'present', lambda platform='': list(devices))
        c = small_config('bapo_tuned', benchmark, learner__micro_batch_rows=8, **changes)
        c.mesh.data, c.mesh.fsdp = 0, -1
        dry_run.dry_run(c, topology)
        return capsys.readouterr().out.splitlines()

    return run


def with_fields(c, words):
    """A copy of the config with the fields of 'a.b=1 c.d=x'."""
    c, fields = c.copy_and_resolve_references(), dict(word.split('=') for word in words.split())
    values = {'True': True, 'False': False}
    c.update_from_flattened_dict({name: int(v) if v.isdigit() else values.get(v, v) for name, v in fields.items()})
    return c


def after(lines, start):
    """The lines behind the only one that starts so."""
    [at] = [i for i, line in enumerate(lines) if line.startswith(start)]
    return lines[at + 1 :]


def test_a_dry_run_for_cards_by_name_ends_in_the_table_of_settings_that_fit(said):
    lines = said('4xH100')
    header, own, best, *others = after(lines, TABLE)
    assert own.startswith('= ')  # the config's own
    assert header.split()[:6] == ['mesh.data', '×', 'fsdp', '×', 'tensor', 'micro_batch_rows']
    assert re.match(r'  \d × \d × 1 +\d+ +\w+ +~\d+\.\d ', best) and len(others) >= 5
    assert not any(line.startswith((HELP, NONE)) for line in lines)


def test_a_config_that_offloads_has_its_row_and_is_advised_what_does_not(said):
    _, own, *others = after(said('4xH100', learner__remat='offload'), TABLE)
    assert re.match('= .* offload ', own) and others and not any('offload' in line for line in others)


@pytest.mark.parametrize('fits', [True, False])
def test_gathering_once_is_advised_if_all_weights_fit_whole_also_those_that_are_not_trained(said, fits, monkeypatch):
    """With an adapter, that is the base as it is kept, and not three times in float32."""
    needs = []

    def measured(*args, **options):
        result = measure(*args, **options | {'compiles': False})
        most = result.total + result.gathered_once - (not fits)
        needs.append(result.gathered_once)
        return result._replace(target=result.target._replace(device_bytes=most))

    monkeypatch.setattr(dry_run, 'measure', measured)
    lines = said('4xH100', model__adapter__rank=2)
    whole = f'mesh.gather_once=True should also fit, with ~{needs[0] / GB:.1f} GB more: '
    assert [line.startswith(whole) for line in lines if 'gather_once' in line] == [True] * fits


def test_if_no_setting_fits_a_dry_run_for_cards_by_name_ends_in_what_would_help(said, monkeypatch):
    monkeypatch.setitem(targets.CARDS, 'H100', dataclasses.replace(CARDS['H100'], gib=0.003))
    lines = said('4xH100', model__dtype='float32')
    refused = 'no setting of mesh.data, mesh.fsdp, mesh.tensor, learner.micro_batch_rows and learner.remat fits'
    assert after(lines, refused)[0] == HELP
    assert [line.split('GB')[1] for line in after(lines, HELP)[:2]] == [' with model.dtype=bfloat16', ' with learner.remat=full']
    assert not any(line.startswith((TABLE, NONE)) for line in lines)


def test_a_config_that_fits_by_its_tensor_axis_alone_is_not_told_what_would_help(monkeypatch):
    monkeypatch.setattr(dry_run, 'chosen', lambda *_: ([], None))
    c = config(4)
    result = dry_run.measure(c, MODEL, '4xH100')
    assert result.fits
    assert [line.split()[:2] for line in dry_run.advice_of(result, c, MODEL, '4xH100', ())] == [['no', 'setting']]


def test_the_gpu_that_is_present_has_a_table_too(said):
    best = after(said('', gpus(1, bytes_limit=79 * GB)), TABLE)[2]
    assert best.startswith('  1 × 1 × 1 ')
    assert best == after(said('1xH100'), TABLE)[2]


@pytest.mark.parametrize(('topology', 'kind', 'name'), [
    ('4x80GB', None, '4 GPUs of 80 GB'), ('', 'NVIDIA H100 PCIe', '4 NVIDIA H100 PCIe'),
])  # fmt: skip
def test_gpus_of_unknown_speed_that_are_large_enough_have_a_line_in_place_of_the_table(topology, kind, name, said):
    lines = said(topology, gpus(4, kind, bytes_limit=80 * GB))
    assert any(line.startswith('fits: ') for line in lines) and f'{NONE} {name} is unknown' in lines
    assert not any(line.startswith((TABLE, HELP)) for line in lines)


def test_gpus_that_do_not_say_their_memory_have_no_advice(said):
    lines = said('', gpus(1))
    assert 'whether the run fits is unknown: the devices (1 NVIDIA H100 80GB HBM3) do not report their memory' in lines
    assert not any(line.startswith((TABLE, HELP, NONE)) for line in lines)


@pytest.mark.parametrize(('topology', 'share', 'last'), [
    ('2x4GB', '.93', '  at least 4 of these cards, '), ('', '.5', f'      ~7.3 GB fit with {POOL}=0.93, which gives JAX 7.4 GB'),
])  # fmt: skip
def test_if_gpus_of_unknown_speed_are_too_small_it_says_what_would_help_without_times(topology, share, last, monkeypatch):
    """Of those present, JAX may have more than it has: half of 8 GB."""
    monkeypatch.setenv(POOL, share)
    monkeypatch.setattr(targets, 'present', lambda platform: gpus(2, 'NVIDIA H100 PCIe', bytes_limit=4 * GB))
    c = config(2, remat='none')
    model = dataclasses.replace(LARGE, num_layers=12)
    lines = list(dry_run.advice_of(dry_run.measure(c, model, topology), c, model, topology, ()))
    assert lines[0].startswith(NONE) and lines[1] == HELP and lines[2].endswith('GB with learner.remat=full')
    assert lines[-1].startswith(last)


def test_without_the_compiler_present_cards_are_by_the_formula_and_hosts_count():
    """What is tried for the table would take a minute each to compile."""

    def found(devices, compiles):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(targets, 'present', lambda platform: devices)
            return find_target('', config(-1), compiles)

    c = config(-1)
    assert (c.mesh.data, c.mesh.fsdp) == (0, -1)
    for compiles in (True, False):
        target = found(gpus(16, hosts=2, bytes_limit=40 * GB), compiles)
        assert isinstance(target.mesh, AbstractMesh) == (not compiles)
        assert dict(target.mesh.shape) == {'data': 2, 'fsdp': 8, 'tensor': 1}
        assert target[:2] == ('16 NVIDIA H100 80GB HBM3', 'gpu') and (target.card, target.hosts) == (CARDS['H100'], 2)
        assert (target.device_bytes, target.most) == (40 * GB, 40 * GB)  # JAX's share is .93 here
    assert found(gpus(1, 'NVIDIA H100 PCIe'), True)[3:6] == (None, None, None)
    for kind, card in CARDS.items():
        assert found(gpus(1, card.kind), True).card is card, kind


def test_cudnn_is_compiled_for_the_card_that_is_present(monkeypatch):
    """Only for one that is not there it goes by the formula."""

    def compiles(*_):
        raise NotImplementedError

    monkeypatch.setattr(targets, 'present', lambda platform: gpus(1, bytes_limit=79 * GB))
    monkeypatch.setattr(dry_run, 'choose_kernel', lambda *_: 'cudnn')
    monkeypatch.setattr(dry_run, 'Learner', compiles)
    with pytest.raises(NotImplementedError):
        measure(config(1), MODEL, '')


def test_what_would_help_is_fields_that_run_together_and_need_what_each_line_says():
    """From a mesh of heads, whose rows are fewer than the cards: 2 rows do for two copies, and not for 4 cards."""
    c = config(4, remat='none', micro_batch_rows=2)
    c.mesh.data, c.mesh.fsdp, c.mesh.tensor, c.mesh.gather_once, c.model.dtype, c.rollout.engine = 2, 1, 2, True, 'float32', 'vllm'

    def memory(c):
        return dry_run._estimate(c, LARGE, '4xH100', ())

    lines = [line for line in what_helps(c, 4, memory, 0, 1) if ' GB with ' in line]
    fields = [line.split(' GB with ')[1] for line in lines]
    # Nothing was gathered, so at first nothing is freed; over all cards it would be.
    assert 'mesh.data=1 mesh.fsdp=4 mesh.tensor=1 mesh.gather_once=False learner.micro_batch_rows=4' in fields
    assert fields[-1] == 'mesh.frozen_on_host=True' and 'mesh.gather_once=False' not in fields
    for i, line in enumerate(lines):
        needs = memory(with_fields(c, ' '.join(fields[: i + 1])))
        assert line.split(' GB')[0].strip() == f'~{needs / GB:.1f}'


def test_a_tables_line_names_every_field_that_it_changes():
    c = config(4)
    c.mesh.fsdp, c.mesh.tensor = 2, 2
    found, best = chosen(find_target('4xH100', c, compiles=False), c, LARGE, '4xH100')
    assert found[0][:5] == best[:5]
    header, *lines = as_table(found, c, best)
    names = 'mesh.data={} mesh.fsdp={} mesh.tensor={} learner.micro_batch_rows={} learner.remat={}'
    assert len(lines) == 6
    for line in lines:
        *values, size = re.match(r'[* ] (\d+) × (\d+) × (\d+) +(\d+) +(\w+) +~?([\d.]+) ', line).groups()
        assert f'{dry_run.measure(with_fields(c, names.format(*values)), LARGE, "4xH100").total / GB:.1f}' == size


def test_heads_are_split_only_if_nothing_fits_without():
    """Four heads and two of keys and values: two ways at most."""
    c, card = config(4), CARDS['H100']
    found = functools.partial(settings, c, MODEL, card, 1, 4)
    halved = lambda c: 8 * GB // c.mesh.tensor  # noqa: E731
    assert {s.tensor for s in found(halved, 8 * GB)} == {1}
    assert {(s.tensor, s.data * s.fsdp) for s in found(halved, 4 * GB)} == {(2, 2)} and found(halved, 3 * GB) == []


@pytest.mark.parametrize(('topology', 'fields', 'says'), [
    ('2x8xH100', {'rollout.engine': 'jax'}, 'supports only one host; set rollout.engine=vllm'),
    ('8xH100', {'rollout.engine': 'vllm', 'rollout.gpus': (7, 8)}, r"rollout.gpus=\(7, 8\) names GPU 8, but --topology has GPUs 0 to 7; choose"),
    ('8xH100', {'mesh.platform': 'tpu'}, 'mesh.platform=tpu, but --topology=8xH100 names GPUs'),
    ('8x80GB', {'mesh.platform': 'cpu'}, 'mesh.platform=cpu, but --topology=8x80GB names GPUs'),
    ('v5e:2x4', {'mesh.platform': 'gpu'}, 'mesh.platform=gpu, but --topology=v5e:2x4 names TPUs'),
])  # fmt: skip
def test_what_a_run_on_those_devices_would_refuse_is_refused(topology, fields, says):
    c = config(-1)
    c.update_from_flattened_dict(fields)
    with pytest.raises(ValueError, match=says):
        dry_run.measure(c, MODEL, topology)


@pytest.mark.parametrize(('share', 'fits'), [('.93', True), ('.3', False)])
def test_cards_known_by_their_memory_have_jaxs_share_too(share, fits, monkeypatch):
    monkeypatch.setenv(POOL, share)
    target = find_target('1x80GB', config(1))
    assert target.device_bytes == int(float(share) * 80 * GB) and target.most == int(0.93 * 80 * GB)
    assert f'gives JAX {float(share):.0%} of the 80.0 GB of a card' in target.note
    assert (60 * GB <= target.device_bytes) == fits


@pytest.mark.parametrize('topology', ['1xH100', '1x80GB'])
def test_a_server_on_the_same_card_and_a_tenth_are_no_share_for_jax(topology, monkeypatch):
    monkeypatch.setenv(POOL, '.2')
    c = config(1)
    c.rollout.engine, c.rollout.server.memory = 'vllm', 0.5
    target = find_target(topology, c)
    assert target.most == pytest.approx(target.device_bytes / 0.2 * 0.4)
    c.rollout.server.memory = 0.8  # which leaves JAX no more than it has
    target = find_target(topology, c)
    assert target.most == target.device_bytes


def test_a_server_on_other_cards_leaves_jax_its_own(monkeypatch):
    c = config(1)
    c.rollout.engine, c.rollout.server.memory, c.rollout.gpus = 'vllm', 0.5, (1,)
    target = find_target('2xH100', c)
    assert target.most == target.device_bytes  # JAX's share is .93 here
