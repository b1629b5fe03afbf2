"""A sample of gpu_compiled.py: kernels through XLA's own compiler for GPUs that are not there."""

import pytest
from gpu_compiled import check_kernels


@pytest.mark.slow
def test_kernels_compile_for_absent_gpus():
    check_kernels({'triton': {'A100-80GB': (256,), 'H100': (128,), 'B200': (128,)}, 'cudnn': {'H100': (128,)}})
