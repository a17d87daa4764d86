"""Load the launcher right after torch_npu, in every Python process of an emulated command.

`ascend-emulator` puts this folder on PYTHONPATH, which spawned workers inherit, so nothing
that runs in them has to know of the emulator. Triton's kernels and the operators of extensions
are replaced in the same way.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

REPLACED_BY = {
    "torch_npu": "ascend_emulator.api",
    "triton": "ascend_emulator.triton_kernels",
    "vllm_ascend.vllm_ascend_C": "ascend_emulator.extensions",
}
"""Modules, and those whose `install` is called after each was loaded."""


class LoadedBefore(importlib.abc.Loader):
    """A module's own loader, after which its kernels are replaced."""

    def __init__(self, loader, name):
        self.loader, self.name = loader, name

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        importlib.import_module(REPLACED_BY[self.name]).install()


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules as always, and wraps the loaders of those in `REPLACED_BY`."""

    def find_spec(self, name, path=None, target=None):
        if name not in REPLACED_BY:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LoadedBefore(spec.loader, name)
        return spec


def run_shadowed_sitecustomize():
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


os.environ["TRITON_INTERPRET"] = (
    "1"  # Triton asks when it is loaded; nothing compiles for a card here
)
sys.meta_path.insert(0, Finder())
run_shadowed_sitecustomize()
