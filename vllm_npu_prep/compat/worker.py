"""Patches of vLLM's worker: memory of graphs, recurrent states, the profiler."""

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


def leave_states_in_their_blocks() -> None:
    """Let nothing copy recurrent states before a step, once for each process.

    With prefix caching, a request that enters a block begins with the state of the block before.
    Upstream's runner copies it there in every such step, by a Triton kernel. Our layers read the
    one block and write the other (`vllm_npu_prep.prep.recurrent_states`), so there is nothing to
    copy.
    """
    from vllm.v1.worker import mamba_utils

    mamba_utils.preprocess_mamba = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def let_profiler_run(device_type: str) -> None:
    """Let vLLM's profiler run on a device that it refuses: torch's records the host on any device.

    What torch_npu records under ``PrivateUse1`` is untested.
    """
    from vllm.config.profiler import TorchProfilerActivity
    from vllm.profiler import wrapper

    if device_type not in wrapper._SUPPORTED_PROFILER_KINDS:
        wrapper._SUPPORTED_PROFILER_KINDS[device_type] = frozenset(("torch",))
        wrapper._DEFAULT_TORCH_PROFILER_ACTIVITIES[device_type] = ("CPU",)
        known: frozenset[TorchProfilerActivity] = frozenset(("CPU", "PrivateUse1"))
        wrapper._SUPPORTED_TORCH_PROFILER_ACTIVITIES[device_type] = known
