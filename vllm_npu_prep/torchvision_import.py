"""Lets ``import torchvision`` succeed beside a torch that its own library was not built for.

transformers imports torchvision with every model, and processors of images and videos use its
transforms, which are Python. For x86-64 the package index has a CUDA build only: beside a torch for
the CPU its library does not load, and the import fails at two operators that torchvision's Python
code registers fake implementations of. To define these operators is enough; calling one still
fails, and says why.

The plugin installs this hook in vLLM's processes. ``scripts/install.sh`` copies this file into
environments whose torchvision needs it, and a ``.pth`` file installs the hook in each of their
processes. Therefore it imports nothing of the package, and neither torch nor torchvision before
somebody imports torchvision.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class TorchvisionLoader(SourceFileLoader):
    """Loads torchvision after it has defined the operators of a library that does not load."""

    def exec_module(self, module: ModuleType) -> None:
        name_missing_operators(Path(self.path).parent)
        super().exec_module(module)


class TorchvisionFinder:
    """An entry of `sys.meta_path` that finds torchvision alone, where Python finds it anyway."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = TorchvisionLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Install the hook in this process; a second call does nothing."""
    if TorchvisionFinder not in sys.meta_path:
        sys.meta_path.insert(0, TorchvisionFinder)


def name_missing_operators(folder: Path) -> None:
    """Define the operators that importing torchvision asks for, unless its library brings them.

    Parameters
    ----------
    folder
        Folder of the package torchvision.
    """
    import torch

    if hasattr(torch.ops.torchvision, OPERATORS[0]):
        return
    for library in folder.glob("_C*.so"):
        try:
            torch.ops.load_library(library)
        except OSError:
            continue
        return  # it fits its torch, and is loaded already when torchvision asks for it
    for name in OPERATORS:
        torch.library.define(f"torchvision::{name}", SCHEMA)
