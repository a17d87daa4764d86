"""Patch of upstream's measurement of graphs."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

CAPTURING = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.cudagraph_utils")
"""Modules of upstream's runners that capture graphs."""


@contextlib.contextmanager
def measured_as_captured() -> Iterator[None]:
    """Context in which upstream measures the memory of graphs as this plugin captures them.

    Upstream prepares the communicators of ranks for a capture, which asserts that they are CUDA's:
    two ranks on NPUs would not start. Collectives of HCCL are captured as they are.
    """
    modules: list[Any] = [sys.modules[name] for name in CAPTURING if name in sys.modules]
    upstream = [module.graph_capture for module in modules]
    for module in modules:
        module.graph_capture = lambda device: contextlib.nullcontext()
    try:
        yield
    finally:
        for module, capture in zip(modules, upstream):
            module.graph_capture = capture
