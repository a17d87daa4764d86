"""Shared experts with a gate of their own, weighed and added in one launch.

vLLM multiplies their output by the gate and adds it to the routed experts' sum, which is two
launches. Qwen2-MoE, Qwen3-Next and Qwen3.5 have such a gate. In Qwen2-MoE's code both gates read
the same rows, one after the other; here one launch computes both products. That gate gets another
class, for the reasons that `ops.npu.router_norms` names.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_npu_prep.ops.npu.experts import add_gated
from vllm_npu_prep.ops.npu.projection import NOT_GROUPED


class JoinedGate(GateLinear):
    """The router's gate, which computes the shared experts' gate in the same launch.

    The layer of the other gate, `beside`, is in a tuple so that it doesn't become a submodule.
    """

    beside: tuple[Any]

    def forward(self, x: torch.Tensor) -> Any:
        """Return logits ``[T, num_experts]`` and ``[T, 1]``, and None in place of a bias."""
        gates: tuple[Any, ...] = (self, *self.beside)
        logits, shared = torch.ops.npu.npu_grouped_matmul(
            [x, x],
            [gate.weight.t() for gate in gates],
            split_item=0,
            group_type=NOT_GROUPED,
        )
        return (logits, shared), None


def join_gates(model: nn.Module, switches: Collection[str]) -> None:
    """Let the layers of a loaded model weigh their shared experts where they add them.

    With the switch ``qkv``, products of one input are one launch.
    """
    for module in model.modules():
        if isinstance(module, MoERunner) and (shared := _with_gate(module)) is not None:
            module._forward_entry = _gated(module._forward_entry, shared.expert_gate)
            shared.expert_gate = None  # the layer around both keeps it, and loads its weights
    block: Any
    for block in model.modules():
        if "qkv" in switches and _may_be_joined(block):
            block.gate.__class__ = JoinedGate
            block.gate.beside = (block.shared_expert_gate,)


def _may_be_joined(block: Any) -> bool:
    """Return whether a layer hands both gates' logits on to `_gated`, and the gates are alike."""
    from vllm.model_executor.models.qwen2_moe import Qwen2MoeSparseMoeBlock

    if type(block) is not Qwen2MoeSparseMoeBlock or block.shared_expert is None:
        return False
    gates = (block.gate, block.shared_expert_gate)
    return (
        block.shared_expert.expert_gate is None  # `_gated` computes it
        and type(block.gate) is GateLinear
        and all(type(gate.quant_method) is UnquantizedLinearMethod for gate in gates)
        and {gate.weight.dtype for gate in gates} in ({torch.float16}, {torch.bfloat16})
        and all(gate.bias is None for gate in gates)
        and block.gate.out_dtype in (None, block.gate.weight.dtype)
    )


def _with_gate(runner: MoERunner) -> Any:
    """Return a layer's shared experts if they have a gate and only their output is added."""
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
    """Wrap a layer's computation so that its two results become one.

    vLLM adds nothing to a single result, and sums it over ranks as it sums the two.
    """

    def compute(
        hidden_states: torch.Tensor,  # [T, hidden_size]
        router_logits: torch.Tensor | tuple[torch.Tensor, torch.Tensor],  # [T, num_experts], [T, 1]
        shared_experts_input: torch.Tensor,  # [T, hidden_size]
        *others: Any,
    ) -> torch.Tensor:
        if isinstance(router_logits, tuple):
            router_logits, weight = router_logits
        else:
            weight = gate(shared_experts_input)[0]
        shared, routed = forward(hidden_states, router_logits, shared_experts_input, *others)
        return add_gated(routed, shared, weight)

    return compute
