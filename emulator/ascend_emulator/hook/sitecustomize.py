"""Load the launcher right after torch_npu, in every Python process of an emulated command.

`ascend-emulator` puts this folder on PYTHONPATH, which spawned workers inherit, so nothing
that runs in them has to know of the emulator.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys


class LoadedAfterTorchNpu(importlib.abc.Loader):
    """torch_npu's own loader, which loads the launcher after it."""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        from ascend_emulator.api import install

        install()


class TorchNpuFinder(importlib.abc.MetaPathFinder):
    """Finds torch_npu as always, and wraps its loader."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch_npu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LoadedAfterTorchNpu(spec.loader)
        return spec


def run_shadowed_sitecustomize():
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, TorchNpuFinder())
run_shadowed_sitecustomize()
