"""Patches of vLLM's device-specific parts: its Triton kernels and its profiler."""

import sys
import warnings
from collections.abc import Callable
from typing import Any


def override_triton_kernels(overrides: dict[str, Callable[..., Any]]) -> None:
    """Register replacements of Triton kernels with vLLM's dispatcher, once for each process.

    The dispatcher then looks for copies of the kernels in every attribute of every module:
    deprecated ones warn, and llvmlite's library object breaks the scan by answering to any name.
    """
    from vllm.triton_utils import dispatcher

    new = {name: kernel for name, kernel in overrides.items() if name not in dispatcher._registry}
    if not new:
        return
    llvmlite_ffi = sys.modules.pop("llvmlite.binding.ffi", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dispatcher.register_kernels(new)
    finally:
        if llvmlite_ffi is not None:
            sys.modules["llvmlite.binding.ffi"] = llvmlite_ffi


def let_profiler_run(device_type: str) -> None:
    """Let vLLM's profiler run on devices that it refuses: torch's records the host on any.

    What torch_npu records under ``PrivateUse1`` is untested.
    """
    from vllm.config.profiler import TorchProfilerActivity
    from vllm.profiler import wrapper

    if device_type not in wrapper._SUPPORTED_PROFILER_KINDS:
        wrapper._SUPPORTED_PROFILER_KINDS[device_type] = frozenset(("torch",))
        wrapper._DEFAULT_TORCH_PROFILER_ACTIVITIES[device_type] = ("CPU",)
        known: frozenset[TorchProfilerActivity] = frozenset(("CPU", "PrivateUse1"))
        wrapper._SUPPORTED_TORCH_PROFILER_ACTIVITIES[device_type] = known
