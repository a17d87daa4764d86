"""A patch of how upstream measures the memory of graphs."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def measured_as_captured() -> Iterator[None]:
    """Let upstream measure the memory of graphs as this plugin captures them.

    Upstream prepares the communicators of ranks for a capture, which asserts that they are CUDA's:
    two ranks on NPUs would not start. HCCL's collectives need no preparation. Upstream's V2
    measures by its graph manager, which is this plugin's.
    """
    from vllm.v1.worker import gpu_model_runner

    module: Any = gpu_model_runner
    upstream = module.graph_capture
    module.graph_capture = lambda device: contextlib.nullcontext()
    try:
        yield
    finally:
        module.graph_capture = upstream
