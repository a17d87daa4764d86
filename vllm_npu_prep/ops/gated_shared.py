"""Shared experts with a gate of their own: weighed and added in one launch.

vLLM multiplies what they give by the gate and adds it to the routed experts' sum, two launches.
Qwen2-MoE, Qwen3-Next and Qwen3.5 have such a gate.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from vllm_npu_prep.ops.fused_experts import add_gated


def join_gates(model: nn.Module) -> None:
    """Let the layers of a loaded model weigh their shared experts where they add them."""
    for module in model.modules():
        if isinstance(module, MoERunner) and (shared := _with_gate(module)) is not None:
            module._forward_entry = _gated(module._forward_entry, shared.expert_gate)
            shared.expert_gate = None  # the layer around both keeps it, and loads its weights


def _with_gate(runner: MoERunner) -> Any:
    """The shared experts of a layer, if they have a gate and what is added is only their output."""
    from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP

    shared = None if runner.shared_experts is None else runner.shared_experts._layer
    if type(shared) is not Qwen2MoeMLP or shared.expert_gate is None:
        return None
    config = runner.moe_config
    is_plain = (
        runner.shared_expert_gate is None  # else vLLM may compute both gates in one product
        and runner.routed_scaling_factor == 1.0
        and runner.routed_output_transform is None
        and config.hidden_dim == config.hidden_dim_unpadded
        and not runner._fused_output_is_reduced
    )
    return shared if is_plain else None


def _gated(forward: Callable[..., Any], gate: nn.Module) -> Callable[..., torch.Tensor]:
    """A layer's computation, whose two results become one.

    vLLM adds nothing to a single result, and sums it over ranks as it sums the two.
    """

    def compute(
        hidden_states: torch.Tensor,  # [T, hidden_size]
        router_logits: torch.Tensor,  # [T, num_experts]
        shared_experts_input: torch.Tensor,  # [T, hidden_size]
        *others: Any,
    ) -> torch.Tensor:
        shared, routed = forward(hidden_states, router_logits, shared_experts_input, *others)
        return add_gated(routed, shared, gate(shared_experts_input)[0])

    return compute
