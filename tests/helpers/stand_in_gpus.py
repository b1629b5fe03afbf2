"""GPUs that are not there: what JAX says of its devices, and nothing that computes."""

import types


class Gpu(types.SimpleNamespace):
    __hash__ = object.__hash__  # a mesh keeps its devices in a table


def gpus(count, kind='NVIDIA H100 80GB HBM3', hosts=1, bytes_limit=None):
    """`count` of them in all; `bytes_limit` is JAX's pool of each, if it says one."""
    of_all = {'platform': 'gpu', 'device_kind': kind, 'compute_capability': '9.0'}
    memory = {'bytes_limit': bytes_limit} if bytes_limit else None
    host = [i * hosts // count for i in range(count)]
    return [Gpu(id=i, process_index=n, slice_index=n, memory_stats=lambda: memory, **of_all) for i, n in enumerate(host)]
