"""Lets PyPI's torchvision load beside a torch without CUDA. `bapo-vllm-env` puts it where each start of that Python imports it.

The wheel's operators are built for CUDA. Where they do not load, torchvision's own import fails on two of them, whose shapes it
describes. They are declared here, without an implementation: Qwen2.5-VL uses neither. Where the operators load, nothing happens.
"""

import importlib.abc
import sys


class _Declaring(importlib.abc.MetaPathFinder):
    """Finds nothing. When it is asked for the module that describes the shapes, torchvision has tried to load its operators."""

    def find_spec(self, name, path=None, target=None):
        if name == 'torchvision._meta_registrations' and not sys.modules['torchvision.extension']._has_ops():
            import torch

            self.library = torch.library.Library('torchvision', 'FRAGMENT')  # the declarations last as long as it does
            for operator in ('nms', 'qnms'):
                self.library.define(f'{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')


sys.meta_path.insert(0, _Declaring())
