"""How many tokens each expert got in the last forward pass, counted where routers choose."""

from functools import partial

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner


class ExpertCounts:
    """Counters of a loaded model's experts.

    They lie on the device and keep their addresses, so that graphs count, too. Under data
    parallelism with all-to-all experts a rank sees the tokens of all data-parallel ranks.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        routers = {
            name: module.router
            for name, module in model.named_modules()
            if isinstance(module, MoERunner) and isinstance(module.router, BaseRouter)
        }
        sizes = [router.global_num_experts + 1 for router in routers.values()]
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        # int32 [num_experts + 1] of each layer; last: no expert
        self._counts = dict(zip(routers, self._all.split(sizes), strict=True))
        for name, router in routers.items():
            router.set_capture_fn(partial(_count, self._counts[name]))

    def read(self) -> dict[str, list[int]]:
        """Return the tokens of each expert by layer; the call waits for the device."""
        of_layers = self._all.cpu().split([len(counts) for counts in self._counts.values()])
        return {name: counts.tolist()[:-1] for name, counts in zip(self._counts, of_layers)}


def _count(counts: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Count one pass; ids that mean no expert, -1 and `num_experts`, count in the last entry."""
    experts = topk_ids.flatten().remainder(len(counts))
    counts.zero_().index_add_(0, experts, torch.ones_like(experts, dtype=counts.dtype))
