"""A server's GPUs, and the tensor parallelism that follows from them."""

import re
import types

import pytest

from bapo_jax.rollout.vllm import gpus
from bapo_jax.rollout.vllm.gpus import check_there, named, parallel_flags, visible


def test_a_word_lists_gpus():
    assert named(4) == named('4') == ('4',)
    assert named('6,7') == named('6, 7') == ('6', '7')
    assert named('GPU-8f1a,MIG-2') == ('GPU-8f1a', 'MIG-2')
    for wrong in ('', '6,,7', '6,6', '4 5 6,7', '0,00', '٣'):  # 0 and 00 are one GPU
        with pytest.raises(ValueError, match="list a server's GPUs as in '6,7', each once"):
            named(wrong)


@pytest.mark.parametrize(
    'names, extra, flags',
    [
        ((), (), []),  # vLLM's choice, as on a CPU
        ((), ('--tensor-parallel-size=2',), []),
        (('4',), (), ['--tensor-parallel-size', '1']),
        (('6', '7'), ('--enforce-eager',), ['--tensor-parallel-size', '2']),
        (('6', '7'), ('--tensor-parallel-size', '2'), []),
        (('6', '7'), ('-tp=2',), []),
        (('0', '1', '2', '3'), ('--pipeline_parallel_size=2',), ['--tensor-parallel-size', '2']),
        (('0', '1', '2', '3'), ('-tp', '2', '-pp', '2', '-dp', '1'), []),
        (('0', '1', '2', '3'), ('-pcp', '2'), ['--tensor-parallel-size', '2']),
        (('6', '7'), ('-tp', '1', '--tensor-parallel_size=2'), []),  # of two vLLM takes the last
    ],
)
def test_tensor_parallelism_follows_from_the_gpus(names, extra, flags):
    assert parallel_flags(names, extra, heads=12) == flags


@pytest.mark.parametrize(
    'names, extra, message',
    [
        (('4',), ('--tensor-parallel-size', '2'), 'the server has GPU 4, but its flags use 2 GPUs; leave out --tensor-parallel-size'),
        (('4', '5'), ('--tensor_parallel_size=1',), 'the server has GPU 4,5, but its flags use 1'),
        (('4', '5', '6'), ('-pp', '2'), 'the server has GPU 4,5,6, but its flags use 2'),
        (tuple('01234567'), (), '12 attention heads cannot be split over 8 GPUs; give the server 1 or 2 or 3 or 4 or 6'),
        (('4', '5'), ('--data-parallel-size=2',), 'only the first engine would get policies; start a server for each engine'),
        ((), ('-dp', '4'), 'only the first engine would get policies'),
        (('4',), ('-tp', 'two'), '--tensor-parallel-size two: give a number of GPUs'),
        (('4',), ('-tp',), '--tensor-parallel-size : give a number of GPUs'),
        (('4',), ('-pp', '2'), 'the server has GPU 4, but its flags use 2'),
        (('4', '5'), ('-tp=2', '-pcp=2'), 'the server has GPU 4,5, but its flags use 4'),
        (('6',), ('--tensor-parallel', '2'), 'write the name of the flag in full'),
        ((), ('--data-parallel', '2'), 'write the name of the flag in full'),
    ],
)
def test_flags_that_do_not_go_with_the_gpus_are_refused(names, extra, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parallel_flags(names, extra, heads=12)


def test_all_gpus_are_those_that_cuda_shows(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '2,5')
    assert visible() == ('2', '5')
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES')
    monkeypatch.setattr(gpus.subprocess, 'run', lambda *_, **__: types.SimpleNamespace(stdout='0\n1\n'))
    assert visible() == ('0', '1')

    def missing(*_, **__):
        raise FileNotFoundError('nvidia-smi')

    monkeypatch.setattr(gpus.subprocess, 'run', missing)
    with pytest.raises(ValueError, match='cannot be listed.*name them, as in 0,1,2,3'):
        visible()


def test_a_number_that_no_gpu_of_the_machine_has_is_refused(monkeypatch):
    check_there(('7',))  # no driver here, or none that says
    monkeypatch.setattr(gpus.subprocess, 'run', lambda *_, **__: types.SimpleNamespace(stdout='0\n1\n'))
    check_there(('0', '1', 'GPU-8f1a', 'MIG-2'))
    with pytest.raises(ValueError, match='^GPU 2, 7: this machine has 2, numbered from 0; correct --gpus or SERVER_GPUS'):
        check_there(('1', '2', '7'))
    monkeypatch.setattr(gpus.subprocess, 'run', lambda *_, **__: types.SimpleNamespace(stdout=''))
    check_there(('7',))
