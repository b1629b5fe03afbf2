"""Benchmarks of devices that are not there: what they cannot do ends in one line that names the flag or the word, and what there is."""

import pytest

from benchmarks import gpu_kernels, train_step
from benchmarks.compiled import absent, engine_kernels, fits, gpu_step


@pytest.mark.parametrize('main, words, says', [
    (gpu_step.main, '9B 4xH100 4', "no model '9B'; there are 1.5B, 8B"),
    (gpu_step.main, '8B 4xH900 4', "no cards '4xH900'; give 4xH100, or 2x8xH100 for two hosts, of A100-40GB"),
    (gpu_step.main, '8B v5e:2x2 4', "no cards 'v5e:2x2'"),
    (gpu_step.main, '8B 2x4xH100 12', "'12' rows; give a multiple of the 8 cards or, to split their tokens, a smaller one of the hosts (2)"),
    (gpu_step.main, '8B 4xH100 many', "'many' rows"),
    (gpu_step.main, '8B 4xH100', "got '8B 4xH100'; give a model, cards and the rows"),
    (gpu_kernels.main, 'triton --absent=H900', "--absent: no card 'H900'; there are A100-40GB"),
    (engine_kernels.main, '3B', "no model '3B'; there are 0.5B, 1.5B"),
    (engine_kernels.main, '--card=H900', "argument --card: no card 'H900'; there are A100-40GB"),
    (fits.main, 'H900', "no row of 'H900'; there are 1xA100-40GB, 1xH100"),
    (train_step.main, '--any-device --attention=triton', '--attention: .*only runs on GPU, and the devices are CPU; set model.attention=auto'),
    (train_step.main, '--any-device --rows=0', '--rows=0: give 1 or more'),
])  # fmt: skip
def test_a_name_that_does_not_exist_is_a_line_with_those_that_do(main, words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert says.split('.*')[0] in line and says.split('.*')[-1] in line


@pytest.mark.parametrize('main, words, platform', [
    (gpu_step.main, '8B 4xH100 4', 'gpu'), (gpu_step.main, '', 'gpu'), (gpu_kernels.main, 'triton --absent=H100', 'gpu'),
    (engine_kernels.main, '', 'gpu'), (fits.main, 'advice', 'gpu'), (fits.main, 'v5e', 'tpu'), (fits.main, '8xH200', 'gpu'),
])  # fmt: skip
def test_a_missing_compiler_is_a_line_that_says_how_to_get_it(main, words, platform, monkeypatch):
    monkeypatch.setattr(absent, 'find_spec', lambda module: None)
    with pytest.raises(SystemExit, match=f'compiler of {platform.upper()}s is missing; run `make {platform}-compiler` and set PYTHONPATH'):
        main(words.split())


def test_a_setting_is_a_mesh_of_hosts_by_their_cards():
    assert gpu_step.asked(['8B', '2x4xH100', '16']) == ((('8B', '2x4xH100', (2, 4), 16, ''),), 8192)
    assert gpu_step.asked(['8B', '2x4xH100', '2', '--response_tokens=30720']) == ((('8B', '2x4xH100', (2, 4), 2, ''),), 30720)
    assert gpu_step.asked(['8B', '4xH100', '4', '--other=LoRA']) == ((('8B', '4xH100', (1, 4), 4, 'LoRA'),), 8192)
    assert gpu_step.asked([]) == (gpu_step.SETTINGS, 8192)
