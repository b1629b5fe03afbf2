"""What a dry run for GPUs advises, by hand: times, which settings fit, what would help; and the cards that a topology names."""

import dataclasses
import re

import pytest
from in_dry_runs import MODEL, config
from jaxlib import xla_client

from bapo_jax.cluster.devices import POOL, pool_share
from bapo_jax.config.rules import full_batch_groups
from bapo_jax.dry_run import advice, command as dry_run, targets
from bapo_jax.dry_run.advice import (
    KERNEL_S,
    LAYER_KERNELS,
    SHARE,
    Setting,
    as_table,
    settings,
    step_seconds,
    tokens_of_a_step,
    what_helps,
)
from bapo_jax.dry_run.command import chosen, measure
from bapo_jax.dry_run.targets import CARDS, find_target
from bapo_jax.models import hf
from bapo_jax.models.layers import Adapter
from bapo_jax.models.remat import REMAT

GB, EARLIER = 10**9, 'XLA_PYTHON_CLIENT_MEM_FRACTION'
LARGE = dataclasses.replace(MODEL, hidden_size=2048, intermediate_size=8192)  # its products take most of the time
LAYER = 2 * 2048 * (512 + 256) + 3 * 2048 * 8192  # numbers in the matrices of a layer
WEIGHTS = 3 * LAYER + 2 * 2048 * 1000
ADAPTER = Adapter(4, 8.0, 'all')
ADAPTED = 4 * (3 * (2048 + 8192) + 2 * (2048 + 512) + 2 * (2048 + 256))  # r (I + O) of each matrix of a layer


@pytest.fixture(autouse=True)
def whole_cards_without_the_compiler(monkeypatch):
    monkeypatch.setenv(POOL, '1')
    monkeypatch.setattr(targets.importlib.util, 'find_spec', lambda name: None)


@pytest.fixture
def kernels_start_at_once(monkeypatch):
    """Or they would decide how long a model as small as `MODEL` takes."""
    monkeypatch.setattr(advice, 'KERNEL_S', 0.0)


def of_papers_size(cards=1, **learner):
    c = config(cards, **learner)
    c.mesh.data = 1
    c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 256, 256  # a row is one sequence
    return c


def test_seconds_by_hand():
    """2,048 rows of 512 tokens; a layer has W numbers in its matrices, of L layers; the head D · V."""
    c, card = of_papers_size(1, remat='none', micro_batch_rows=8), CARDS['H100']
    tokens = 2048 * 512
    forward = tokens * (2 * 3 * LAYER + 2 * 3 * 512 * 512)  # N · H = 512, and a sequence of 512 tokens
    operations = 3 * forward + 4 * 2 * 2048 * 1000 * tokens
    read = 256 * WEIGHTS * (6 + 12) / (card.gb_per_s * GB)
    assert step_seconds(c, LARGE, card, 1) == pytest.approx(operations / (SHARE * card.teraflops * 1e12) + read)
    c.learner.remat = 'full'
    assert step_seconds(c, LARGE, card, 1) == pytest.approx((operations + forward) / (SHARE * card.teraflops * 1e12) + read)


def test_seconds_of_an_adapter_by_hand():
    """Its base has no gradient: two products for each weight and token, and three for the adapter's. Weights are read alone."""
    c, card, model = of_papers_size(1, remat='none', micro_batch_rows=8), CARDS['H100'], dataclasses.replace(LARGE, adapter=ADAPTER)
    tokens, attention = 2048 * 512, 2 * 3 * 512 * 512
    products = 2 * 3 * (2 * LAYER + 3 * ADAPTED)
    operations = tokens * (products + 3 * attention + 3 * 2 * 2048 * 1000)
    read = 256 * (6 * (WEIGHTS + 3 * ADAPTED) + 12 * 3 * ADAPTED) / (card.gb_per_s * GB)
    assert step_seconds(c, model, card, 1) == pytest.approx(operations / (SHARE * card.teraflops * 1e12) + read)


def test_a_base_is_gathered_once_as_it_is_kept_and_its_adapter_in_float32():
    """In each of 4 mini-batches. The adapter's gradient is float32 too."""
    c, card, model = of_papers_size(8, micro_batch_rows=8), CARDS['H100'], dataclasses.replace(LARGE, adapter=ADAPTER)
    c.mesh.gather_once = True
    slow, fast = (step_seconds(c, model, dataclasses.replace(card, link_gb_per_s=rate), 8) for rate in (0.01, 0.02))
    assert slow - fast == pytest.approx(4 * (2 * WEIGHTS + 8 * 3 * ADAPTED) * 7 / 8 / (0.02 * GB))


def test_cards_share_the_work_until_their_links_are_the_limit():
    card, eight = CARDS['H100'], of_papers_size(8, micro_batch_rows=8)
    gathered = 256 * WEIGHTS * 8 * 7 / 8
    within, between = (step_seconds(eight, LARGE, card, n) for n in (8, 4))
    assert between - within == pytest.approx(gathered / (50 * GB) - gathered / (card.link_gb_per_s * GB))
    assert within > step_seconds(of_papers_size(1, micro_batch_rows=8), LARGE, card, 8) / 8  # so few rows at once wait for links
    eight.mesh.gather_once = True  # the mesh is crossed once a mini-batch, and not by each of its 64 micro-batches
    assert step_seconds(eight, LARGE, card, 8) < within
    once = [step_seconds(eight, LARGE, dataclasses.replace(card, link_gb_per_s=rate), 8) for rate in (1.0, 2.0)]
    assert once[0] - once[1] == pytest.approx(4 * WEIGHTS * 8 * 7 / 8 / (2 * GB))


def test_copies_sum_their_gradient_once_a_mini_batch():
    """A ring moves each number of the gradient twice, but for a card's own part."""
    card, c = CARDS['H100'], of_papers_size(1, micro_batch_rows=8)
    c.mesh.data = 8
    slow, fast = (step_seconds(c, LARGE, dataclasses.replace(card, link_gb_per_s=rate), 8) for rate in (1.0, 2.0))
    assert slow - fast == pytest.approx(4 * 2 * 7 / 8 * 4 * WEIGHTS / (2 * GB))


def test_a_small_model_waits_for_the_starts_of_its_kernels():
    c, card = of_papers_size(1, micro_batch_rows=8), CARDS['B200']
    weights = 3 * (2 * 128 * (512 + 256) + 3 * 128 * 384) + 2 * 128 * 1000
    read = 256 * weights * (6 + 12) / (card.gb_per_s * GB)
    assert step_seconds(c, MODEL, card, 1) == pytest.approx(256 * 3 * LAYER_KERNELS * KERNEL_S + read)


@pytest.mark.usefixtures('kernels_start_at_once')
@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize(('at_once', 'micro_batches'), [(16, 6), (8, 8)])  # three passes over two mini-batches; 60 rows
@pytest.mark.parametrize(('of_a_host', 'within', 'between'), [(16, 450, 450), (8, 450, 50), (4, 50, 50), (8, 10**6, 50)])
def test_seconds_of_slots_in_three_passes_on_a_mesh_of_all_axes_by_hand(of_a_host, within, between, at_once, micro_batches, tied):
    """10 groups of 8 responses, four slots of 40 tokens behind 56 of the prompt; 16 cards. With the fastest link products decide."""
    c, model = config(16, remat='full', micro_batch_rows=at_once), dataclasses.replace(MODEL, tie_embeddings=tied)
    c.mesh.data, c.mesh.fsdp, c.mesh.tensor = 2, 4, 2
    c.rollout.group_size, c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 8, 56, 40
    c.learner.slot_tokens, c.learner.row_tokens = 40, 56 + 4 * 40
    c.learner.batch_groups, c.learner.mini_batch_groups, c.learner.passes_per_batch = 10, 6, 3
    card = dataclasses.replace(CARDS['H100'], link_gb_per_s=within if within != 50 else 450)
    layer, head, tokens = 2 * 128 * (512 + 256) + 3 * 128 * 384, 128 * 1000, 60 * 216
    forward = tokens * (2 * 3 * layer + 2 * 3 * 512 * 96)
    compute = (4 * forward + 4 * 2 * head * tokens) / (16 * SHARE * card.teraflops * 1e12)
    weights = 3 * layer + (1 if tied else 2) * head
    gathered = micro_batches * weights / 2 * 8 * 3 / 4 / (within * GB)
    assert (compute > gathered) == (within == 10**6)
    read = micro_batches * weights / 2 * (6 + 12 / 4) / (card.gb_per_s * GB)
    summed = 6 * 2 * 4 * weights / 4 / 2 / 2 / (between * GB)
    of_heads = 3 * 6 * (tokens / 8 * 128 * 2) * 2 / 2 / (card.link_gb_per_s * GB)  # 2 sums forward, 2 again, 2 backward
    assert step_seconds(c, model, card, of_a_host) == pytest.approx(max(compute, gathered) + read + summed + of_heads)
    assert tokens_of_a_step(c) == 10 * 8 * 96


@pytest.mark.usefixtures('kernels_start_at_once')
def test_a_batch_of_a_part_of_a_mini_batch_more_has_one_more():
    """And one copy of the weights sums nothing between cards."""
    c, card = of_papers_size(8, micro_batch_rows=2048), CARDS['H100']
    c.mesh.data, c.mesh.fsdp = 8, 1
    layer = 2 * 128 * (512 + 256) + 3 * 128 * 384
    a_sum = 8 * 7 / 8 * (3 * layer + 2 * 128 * 1000) / (card.link_gb_per_s * GB)
    seconds = {}
    for c.learner.mini_batch_groups in (255, 256):
        seconds[c.learner.mini_batch_groups] = step_seconds(c, MODEL, card, 8)
    read = (3 * layer + 2 * 128 * 1000) * (6 + 12) / (card.gb_per_s * GB)
    assert seconds[255] - seconds[256] == pytest.approx(a_sum + read)


@pytest.mark.usefixtures('kernels_start_at_once')
def test_what_is_computed_again_costs_what_its_products_do():
    """Of Qwen2.5-1.5B's dense products q, k, v, gate and up are two thirds; norms and rotations have none."""
    none, little, most, all_ = (
        step_seconds(of_papers_size(1, remat=remat), MODEL, CARDS['H100'], 1)
        for remat in ('none', 'matrix_products', 'attention_and_mlp_inputs', 'full')
    )  # fmt: skip
    assert 0 < (little - none) / (all_ - none) < 0.1 and 0.6 < (most - none) / (all_ - none) < 0.8
    assert step_seconds(of_papers_size(1, remat='offload'), MODEL, CARDS['H100'], 1) == most  # what the host keeps is the same


def test_every_way_to_rematerialise_has_a_share():
    assert advice._AGAIN.keys() == REMAT.keys()


def test_settings_are_of_every_mesh_number_of_rows_and_remat_of_two_hosts():
    c, card, asked = of_papers_size(16), CARDS['H100'], []
    found = settings(c, MODEL, card, 2, 16, lambda trial: asked.append(trial) or 0, 0)
    meshes = {(16, 1, 1), (2, 8, 1), (1, 16, 1), (8, 1, 2), (2, 4, 2), (1, 8, 2)}  # between hosts, heads are split too
    assert {(t.mesh.data, t.mesh.fsdp, t.mesh.tensor, t.learner.micro_batch_rows, t.learner.remat) for t in asked} == {
        (*mesh, mesh[0] * mesh[1] * rows, remat) for mesh in meshes for rows in (1, 2, 4, 8, 16, 32)
        for remat in ('none', 'matrix_products', 'attention_and_mlp_inputs', 'full')
    }  # fmt: skip
    assert len(found) == len({(s.data, s.fsdp, s.tensor, s.remat) for s in found}) == 24
    for s in found:
        assert s.seconds == step_seconds(s.applied(c), MODEL, card, 8) and {(s.data, s.fsdp, s.tensor)} < meshes
    assert [s.seconds for s in found] == sorted(s.seconds for s in found)
    assert (c.mesh.data, c.mesh.fsdp, c.learner.micro_batch_rows) == (1, 16, 8)  # a trial leaves the config as it was
    assert found[0].tensor == 1  # of so small a model, the residual stream is more than the weights
    tensor = of_papers_size(16)
    tensor.mesh.tensor = 4
    assert found[0].applied(tensor).mesh.tensor == 1


def test_tokens_of_rows_are_split_only_if_no_row_fits_a_card():
    """Two hosts of two cards: within a host, or over all."""
    c = of_papers_size(4)
    needs = lambda trial: GB * trial.learner.micro_batch_rows // (trial.mesh.data * trial.mesh.fsdp / 4)  # noqa: E731
    whole, parts = (settings(c, MODEL, CARDS['H100'], 2, 4, needs, n * GB) for n in (4, 3))
    assert {s.rows * s.tensor for s in whole} == {4}
    assert {(s.data, s.fsdp, s.rows) for s in parts if s.tensor == 1} == {(2, 2, 2), (1, 4, 1)}


def test_exchanged_heads_count_if_tokens_are_split():
    """Per layer and token: queries, results, keys and values, forward, backward and again; each card keeps its part."""
    c, card, seconds = of_papers_size(4, micro_batch_rows=1), dataclasses.replace(CARDS['H100'], link_gb_per_s=0.001), {}
    for c.learner.remat in ('none', 'full'):
        seconds[c.learner.remat] = step_seconds(c, MODEL, card, 4)
    rows = full_batch_groups(c) * c.rollout.group_size
    tokens = rows * c.learner.row_tokens / 4
    copies = 4 // MODEL.num_kv_heads
    again = tokens * 2 * (MODEL.num_heads + copies * MODEL.num_kv_heads) * MODEL.head_dim * MODEL.num_layers * 3 / 4
    assert seconds['full'] - seconds['none'] == pytest.approx(again * hf.DTYPES[MODEL.dtype].itemsize / (0.001 * GB))


def test_of_settings_as_fast_the_smallest_is_shown():
    """All 2,048 rows fit one micro-batch of each of 64 cards and more: 32 rows a card are as fast as more, and take more."""
    c = of_papers_size(64)
    c.learner.mini_batch_groups = c.learner.batch_groups = 64
    found = settings(c, MODEL, CARDS['H100'], 1, 64, lambda trial: trial.learner.micro_batch_rows, 64 * 32)
    assert {s.rows for s in found} == {64 * 8}


def test_the_table_has_six_settings_and_the_best_ones_measured_size():
    c = of_papers_size(8)
    found = [Setting(1, 8, 1, 8 * rows, remat, rows * GB, float(rows)) for rows in (1, 2, 4, 8) for remat in ('none', 'full')]
    best = found[1]._replace(bytes=int(1.5 * GB))
    header, *lines = as_table(found, c, best)
    assert [line[0] for line in lines] == [' ', '*', ' ', ' ', ' ', ' ']
    assert '1 × 8 × 1 ' in lines[0] and re.search(r' ~1\.0 +1 ', lines[0]) and re.search(r'full +1\.5 +1 ', lines[1])
    assert lines[2].endswith(f'{tokens_of_a_step(c) / 2:,.0f}') and 'tokens/s' in header
    own = Setting(8, 1, 1, 8, 'full', 3 * GB, 9.0)
    assert re.match(r'= 8 × 1 × 1 .* 3\.0 ', list(as_table(found, c, best, own))[1])
    only_estimated = list(as_table(found, c, own=own))
    assert re.match('= 8 × 1 × 1 .* ~3\\.0 ', only_estimated[1]) and '*' not in ''.join(only_estimated)


def test_of_the_settings_that_fit_the_fastest_comes_first_and_says_what_it_takes():
    c = of_papers_size(1)
    target = find_target('1xH100', c)
    found, best = chosen(target, c, MODEL, '1xH100')
    assert best == found[0] and best.seconds == min(s.seconds for s in found)
    assert best.bytes == measure(best.applied(c), MODEL, '1xH100').total <= target.device_bytes
    assert len({(s.data, s.fsdp, s.remat) for s in found}) == len(found) == 4  # of one card, one row for each remat
    lines = list(as_table(found, c, best))
    assert len(lines) == 5 and lines[1].startswith('* 1 × 1') and all(line.startswith('  ') for line in lines[2:])
    needed = {'none': 9, 'matrix_products': 5, 'attention_and_mlp_inputs': 3, 'full': 1}
    fitting = settings(c, MODEL, target.card, 1, 1, lambda c: needed[c.learner.remat] * c.learner.micro_batch_rows, 6)
    assert {s.remat: (s.rows, s.bytes) for s in fitting} == {
        'matrix_products': (1, 5), 'attention_and_mlp_inputs': (2, 6), 'full': (4, 4),
    }  # fmt: skip


def test_rows_that_the_kernel_refuses_are_no_setting(monkeypatch):
    def takes_two_rows(config, *_):
        if config.learner.micro_batch_rows > 2:
            raise ValueError('the kernel counts in 32 bits')
        return 'cudnn'

    c = of_papers_size(1)
    monkeypatch.setattr(dry_run, 'choose_kernel', takes_two_rows)
    found, _ = chosen(find_target('1xH100', c), c, MODEL, '1xH100')
    assert {s.rows for s in found} == {2}


def test_if_nothing_fits_the_fields_that_would_help_come_one_on_top_of_the_other():
    def memory(c):
        return GB * (10 * (c.learner.remat != 'full') + c.learner.micro_batch_rows + 5 * (c.model.dtype == 'float32')
                     + 3 * (not c.mesh.frozen_on_host) + 40)  # fmt: skip

    c = of_papers_size(1, remat='none', micro_batch_rows=16)
    c.rollout.engine = 'vllm'
    assert list(what_helps(c, 1, memory, 46 * GB, 46 * GB)) == [
        '     ~59.0 GB with learner.remat=full', '     ~44.0 GB with learner.micro_batch_rows=1  fits',
    ]  # fmt: skip
    # By the formula it fits as it is, and the compiler said no.
    assert list(what_helps(c, 1, memory, 79 * GB, 80 * GB)) == ['     ~59.0 GB with learner.remat=full  fits']
    assert list(what_helps(c, 1, memory, 30 * GB, 37 * GB))[-1].startswith('  at least 2 of these cards, or larger ones')
    assert list(what_helps(c, 1, memory, 10 * GB, 10 * GB))[-1].startswith('  at least 8 of these cards, or larger ones')


@pytest.mark.parametrize(('share', 'device', 'most', 'lines'), [
    ('.75', 75, 93, []),  # as it is
    ('.20', 20, 90, []),
    ('.75', 70, 85, ['     ~79.0 GB with learner.remat=full']),  # no more fields than are needed
])  # fmt: skip
def test_a_larger_share_of_the_gpu_comes_before_fields_that_change_the_run(share, device, most, lines, monkeypatch):
    """89 GB are needed, and 79 with rematerialisation."""
    monkeypatch.setenv(POOL, share)
    c = of_papers_size(4, remat='none')
    needs = 79 if lines else 89
    told = f'     ~{needs:.1f} GB fit with {POOL}={round(most / device * float(share), 2):g}, which gives JAX {most:.1f} GB'
    assert list(what_helps(c, 4, lambda c: GB * (79 + 10 * (c.learner.remat == 'none')), device * GB, most * GB)) == [*lines, told]


def test_shorter_rows_are_advised_only_if_they_would_be_enough():
    c = of_papers_size(4)
    for state, said in ((5, True), (50, False)):
        lines = list(what_helps(c, 4, lambda c: GB * state + GB / 8 * c.learner.row_tokens, 40 * GB, 40 * GB))
        assert lines[-1].endswith('; or lower rollout.max_response_tokens for shorter rows') == said


def test_each_field_that_helps_is_applied_on_top_of_those_before_it_and_the_config_stays():
    """A field that frees nothing is left out, and so is host memory for the in-process engine, which reads α from the device."""
    c, seen = of_papers_size(4, remat='none', micro_batch_rows=16), []
    c.mesh.data, c.mesh.fsdp, c.mesh.tensor, c.mesh.gather_once, c.model.dtype, c.rollout.engine = 2, 1, 2, True, 'float32', 'vllm'
    before = c.to_dict()

    def fields(c):
        return (
            c.mesh.gather_once, c.model.dtype, c.learner.remat, c.learner.micro_batch_rows, (c.mesh.data, c.mesh.fsdp, c.mesh.tensor),
            c.learner.adam.first_moment_dtype, c.mesh.frozen_on_host, c.learner.adam.on_host,
        )  # fmt: skip

    def falls(c):
        seen.append(fields(c))
        return (100 - len(set(seen))) * GB

    lines = list(what_helps(c, 4, falls, 0, 1))
    changes = [
        (0, False), (1, 'bfloat16'), (2, 'full'), (3, 4), (4, (1, 4, 1)), (3, 1), (4, (1, 1, 4)), (5, 'bfloat16'), (6, True), (7, True),
    ]  # fmt: skip
    want = list(fields(c))
    assert seen[0] == tuple(want) and c.to_dict() == before
    for i, (at, value) in enumerate(changes):
        want[at] = value
        assert seen[i + 1] == tuple(want)
    names = (
        'mesh.gather_once=False', 'model.dtype=bfloat16', 'learner.remat=full', 'learner.micro_batch_rows=4',
        'mesh.data=1 mesh.fsdp=4 mesh.tensor=1', 'learner.micro_batch_rows=1', 'mesh.fsdp=1 mesh.tensor=4',
        'learner.adam.first_moment_dtype=bfloat16', 'mesh.frozen_on_host=True', 'learner.adam.on_host=True',
    )  # fmt: skip
    assert lines[:-1] == [f'     ~{98 - i:.1f} GB with {name}' for i, name in enumerate(names)]
    c.rollout.engine = 'jax'
    assert not any('frozen_on_host' in line for line in what_helps(c, 4, lambda c: 50 * GB - c.mesh.frozen_on_host, 0, GB))


@pytest.mark.parametrize(('device', 'most', 'last'), [
    (10, 10, '     ~10.0 GB with learner.remat=full  fits'),  # just
    (9, 10, f'     ~10.0 GB fit with {POOL}='),
    (9, 9.9, '  at least 8 of these cards, or larger ones'),  # 4 cards × 10 GB by 9.9, and sizes divide by powers of two
    (9, 5, '  at least 8 of these cards, or larger ones'),
    (9, 4.9, '  at least 16 of these cards, or larger ones'),
])  # fmt: skip
def test_what_the_last_line_says_is_the_least_that_is_enough(device, most, last):
    c = of_papers_size(4, remat='none')
    lines = list(what_helps(c, 4, lambda c: GB * (10 + (c.learner.remat == 'none')), device * GB, int(most * GB)))
    assert lines[-1].startswith(last) and lines[0].startswith('     ~10.0 GB with learner.remat=full')


@pytest.mark.parametrize(('topology', 'fsdp', 'cards', 'hosts', 'name'), [
    ('1xA100-40GB', 1, 1, 1, '1 A100-40GB'), ('4xH100', 4, 4, 1, '4 H100'), ('2x8xH200', 16, 16, 2, '2 × 8 H200'),
])  # fmt: skip
def test_a_topology_names_cards(topology, fsdp, cards, hosts, name):
    target = find_target(topology, config(fsdp))
    assert (target.mesh.size, target.hosts, target.name, target.platform) == (cards, hosts, name, 'gpu')
    assert target.device_bytes == int(target.card.gib * 2**30) and target.most == int(0.93 * target.card.gib * 2**30)


def test_jax_has_its_share_of_a_card_and_servers_have_theirs(monkeypatch):
    monkeypatch.delenv(POOL)
    c = config(4)
    c.rollout.gpus = (4, '5', '6,7')
    assert find_target('4xH100', c).mesh.size == 4  # the in-process engine has no GPUs of its own
    c.rollout.engine = 'vllm'
    target = find_target('8xH100', c)
    assert target.mesh.size == 4 and (target.name, target.servers) == ('4 H100', '3, on 4 other GPUs of this machine')
    assert target.device_bytes == int(0.75 * CARDS['H100'].gib * 2**30) and 'gives JAX 75% of the 84.9 GB' in target.note
    for topology in ('4xH100', '2x8xH100'):
        with pytest.raises(ValueError, match='rollout.gpus=.* must leave the trainer a GPU of --topology'):
            find_target(topology, c)
    assert find_target('8x80GB', c)[:1] + (find_target('8x80GB', c).servers,) == ('4 GPUs of 80 GB', target.servers)
    c.rollout.server.memory = 0.4  # of the trainer's own, where JAX leaves as much
    assert find_target('4xH100', c).mesh.size == 4
    c.rollout.gpus = ()
    with pytest.raises(ValueError, match='JAX takes 75% of the memory of a GPU .* rollout.server.memory=0.4, together more than all of it; lower one'):
        find_target('4xH100', c)
    monkeypatch.setenv(POOL, '.6')
    target = find_target('4xH100', c)
    assert target.mesh.size == 4 and 'server.memory=0.4' in target.servers
    c.rollout.server.memory, c.rollout.gpus = 0.0, ()
    assert find_target('4xH100', c).servers.startswith('none: the trainer uses all 4 GPUs')
    c.rollout.servers = ('http://other:8000',)
    assert find_target('4xH100', c).servers == ''


@pytest.mark.parametrize(('environment', 'share'), [
    ({}, 0.75), ({POOL: '.93'}, 0.93), ({EARLIER: '.5'}, 0.5), ({POOL: '', EARLIER: '.5'}, 0.5), ({POOL: '.4', EARLIER: ''}, 0.4),
    ({POOL: 'most'}, None), ({EARLIER: '2'}, None), ({POOL: '.4', EARLIER: '.4'}, None),
])  # fmt: skip
def test_jaxs_share_is_read_as_jax_reads_it(environment, share, monkeypatch):
    monkeypatch.delenv(POOL)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if share:
        assert pool_share() == xla_client.generate_pjrt_gpu_plugin_options().get('memory_fraction', 0.75) == share
    else:
        with pytest.raises(ValueError, match=rf'({POOL}|{EARLIER})=.*: give a fraction above 0 and at most 1|{EARLIER} are both set, but JAX uses only one'):
            pool_share()


def test_settings_that_the_compiler_refuses_do_not_mean_that_none_fits(monkeypatch):
    c = of_papers_size(1)
    target = find_target('1xH100', c)
    found, _ = chosen(target, c, MODEL, '1xH100')
    real = measure

    def refused(config, model, topology, grids=(), compiles=True):
        result = real(config, model, topology, grids, compiles=False)
        return result._replace(refused='too large') if compiles else result

    monkeypatch.setattr(dry_run, 'measure', refused)
    left, best = chosen(target, c, MODEL, '1xH100')
    assert best is None and left == found[dry_run.TRIED:]
    said = list(dry_run.advice_of(refused(c, MODEL, '1xH100'), c, MODEL, '1xH100', ()))
    assert said[0].startswith('the 3 fastest settings that fit by the formula did not compile') and len(said) == 2 + len(left) and '*' not in ''.join(said)


@pytest.mark.parametrize(
    'kind, fields, groups',
    [('bapo', {}, 256), ('fifo', {'fifo.ratio': 3}, 768), ('freshper', {'freshper.ratio': 1}, 512),
     ('relift', {'traces.demonstrations': 64}, 320), ('exgrpo', {'exgrpo.share': 0.5}, 512), ('luffy', {}, 256)],
)  # fmt: skip
def test_a_step_trains_on_all_groups_of_a_full_batch(kernels_start_at_once, kind, fields, groups):
    """Some kinds of replay add groups to the B fresh ones, and the step takes longer in proportion."""
    c = of_papers_size(1, micro_batch_rows=8)
    B, alone = c.learner.batch_groups, step_seconds(c, LARGE, CARDS['H100'], 1)
    c.replay.kind = kind
    c.replay.update_from_flattened_dict(fields)
    assert full_batch_groups(c) == groups
    assert tokens_of_a_step(c) == groups * c.rollout.group_size * 512
    assert step_seconds(c, LARGE, CARDS['H100'], 1) == pytest.approx(groups / B * alone)
