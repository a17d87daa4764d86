"""How many tokens each expert got in the last step, counted where routers choose."""

from functools import partial

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner


class ExpertCounts:
    """Counters of a loaded model's experts.

    They lie on the device and keep their addresses, so that graphs count, too. Under data
    parallelism with all-to-all experts a rank sees the tokens of all engines.

    Parameters
    ----------
    model
        With the routers that it will use.
    device
        Where it runs.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._counts: dict[str, torch.Tensor] = {}  # int32 [num_experts + 1]; last: no expert
        for name, module in model.named_modules():
            if isinstance(module, MoERunner) and isinstance(module.router, BaseRouter):
                size = module.router.global_num_experts + 1
                counts = torch.zeros(size, dtype=torch.int32, device=device)
                self._counts[name] = counts
                module.router.set_capture_fn(partial(_count, counts))

    def read(self) -> dict[str, list[int]]:
        """Tokens of each expert by layer; waits for the device."""
        return {name: counts.tolist()[:-1] for name, counts in self._counts.items()}


def _count(counts: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Count a step; ids of no expert, -1 and the number of experts, count in the last entry."""
    experts = topk_ids.flatten().remainder(len(counts))
    counts.zero_().index_add_(0, experts, torch.ones_like(experts, dtype=counts.dtype))
