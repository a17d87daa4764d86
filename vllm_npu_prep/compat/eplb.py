"""Patches of vLLM's expert-parallel load balancing (EPLB), which knows devices of its own only."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_npu_prep.compat.patches import instead_of
from vllm_npu_prep.compat.torch import NoOpStream


class _KnowsEPLB:
    """The platform as vLLM's configuration of ranks sees it: one on which experts can move."""

    def __getattr__(self, name: str) -> Any:
        from vllm.platforms import current_platform

        return getattr(current_platform, name)

    def is_cuda_alike(self) -> bool:
        return True


def let_experts_move() -> None:
    """Let vLLM accept ``--enable-eplb`` on this platform, too.

    The check of its configuration is the only one in that module that asks for CUDA by this name.
    """
    from vllm.config import parallel

    parallel.current_platform = _KnowsEPLB()  # type: ignore[assignment]


def map_experts_by(function: Callable[..., torch.Tensor]) -> None:
    """Let vLLM's routers map logical to physical experts by a function; theirs is Triton's.

    The function has the arguments of ``eplb_map_to_physical_and_record``.
    """
    from vllm.model_executor.layers.fused_moe.router import base_router

    base_router.eplb_map_to_physical_and_record = function


def move_tensors_of(find: Callable[[Any], list[torch.Tensor] | None]) -> None:
    """Let an exchange move the tensors that `find` returns for a layer; None means vLLM's choice.

    Each tensor begins with the rank's experts, and shares its memory with what the layer reads.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    @instead_of(RoutedExperts, "get_expert_weights")
    def get_expert_weights(upstream: Any, self: Any) -> Any:
        found = find(self)
        return upstream(self) if found is None else found


@contextlib.contextmanager
def states_of(state: Any) -> Iterator[None]:
    """Let vLLM's V1 runner make its ``EplbState`` of another class while it loads its model."""
    from vllm.v1.worker import gpu_model_runner

    module: Any = gpu_model_runner
    upstream = module.EplbState
    module.EplbState = state
    try:
        yield
    finally:
        module.EplbState = upstream


def stream_of_exchange(device: torch.device) -> Any:
    """Return a stream for the thread that calls it, in which it exchanges weights.

    The CPU fallback has none. It is a ``torch.npu.Stream``, which is a ``torch.Stream``, too: while
    upstream's V1 runner makes an asynchronous output, the name ``torch.Event`` is that of NPUs
    (`CudaNames`), and such an event reads fields of its stream that no ``torch.Stream`` has.
    """
    if device.type == "cpu":
        return NoOpStream()
    torch.accelerator.set_device_index(device.index)
    return getattr(torch, device.type).Stream(device=device)
