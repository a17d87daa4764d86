"""Mixture of experts: the method that vLLM's layers call, and a computation in torch for the CPU.

On NPUs the method calls the grouped products of `vllm_npu_prep.ops.npu.experts`. The computation
here is the CPU fallback's, and an NPU's if the switch ``experts`` is off.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.ops.npu.experts import (
    ONE_LAUNCH,
    Activate,
    ExpertAdapters,
    ExpertWeights,
    OwnedExperts,
    UnquantisedExperts,
    can_finalize,
    compute_experts,
    compute_on_ranks,
    exchange_of_pass,
)
from vllm_npu_prep.ops.npu.routing import padding_mask
from vllm_npu_prep.ops.npu.switches import is_fused

ACTIVATIONS: dict[MoEActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU_NO_MUL: functional.silu,
    MoEActivation.GELU_NO_MUL: functional.gelu,
    MoEActivation.GELU_TANH_NO_MUL: partial(functional.gelu, approximate="tanh"),
    MoEActivation.RELU2_NO_MUL: lambda x: functional.relu(x).square(),
}
"""Activations without gating, by vLLM's name. A gated one multiplies the result by the second
half."""


def activation_of(activation: MoEActivation) -> Activate:
    """Return the function between the two products; a gate is the first half of a row."""
    activate = ACTIVATIONS[activation.without_mul()]
    if not activation.is_gated:
        return activate

    def gated(hidden: torch.Tensor) -> torch.Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return activate(gate) * up

    return gated


def apply_experts(
    x: torch.Tensor,  # [T, hidden_size]
    w13: torch.Tensor,  # [num_local_experts, 2 * intermediate_size, hidden_size]; not gated: 1 *
    w2: torch.Tensor,  # [num_local_experts, hidden_size, intermediate_size]
    topk_weights: torch.Tensor,  # [T, k] float32
    topk_ids: torch.Tensor,  # [T, k] integer, -1 for none
    activation: MoEActivation,
    expert_map: torch.Tensor | None = None,  # [num_experts] integer
    apply_router_weight_on_input: bool = False,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """Compute each token's experts and add their outputs, weighted by the router.

    `sum_of_experts` says what the other arguments are. A gated activation uses the first half of
    ``w13``'s rows as its gate. The result has the shape and dtype of `x`; sums are kept in float32
    and rounded once.
    """

    def first(expert: int, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, w13[expert])

    def second(expert: int, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, w2[expert])

    return sum_of_experts(
        x,
        len(w13),
        first,
        activation_of(activation),
        second,
        topk_weights,
        topk_ids,
        expert_map,
        apply_router_weight_on_input,
        adapters,
    )


def sum_of_experts(
    x: torch.Tensor,  # [T, hidden_size]
    num_local_experts: int,
    first: Callable[[int, torch.Tensor], torch.Tensor],
    activate: Activate,
    second: Callable[[int, torch.Tensor], torch.Tensor],
    topk_weights: torch.Tensor,  # [T, k] float32
    topk_ids: torch.Tensor,  # [T, k] integer, -1 for none
    expert_map: torch.Tensor | None,  # [num_experts] integer
    apply_router_weight_on_input: bool,
    adapters: ExpertAdapters | None,
) -> torch.Tensor:
    """Add what each token's experts make of it, weighted by the router.

    Pairs of token and expert are sorted by expert, and experts without a token are skipped. The
    host reads once how many rows each expert gets. A device graph could not contain that; the CPU
    fallback's fake graph runs everything again. The result has the shape and dtype of `x`; sums are
    kept in float32 and rounded once.

    Parameters
    ----------
    first, activate, second
        The expert's two products, and what is between them. A product takes an expert's number on
        this rank and its rows.
    topk_weights, topk_ids
        Each token's experts, numbered over all ranks, and their weights.
    expert_map
        Number on this rank of each expert, -1 for those of other ranks; None if all are here.
    apply_router_weight_on_input
        Whether weights are applied to the inputs of experts instead of their outputs.
    adapters
        LoRA adapters, or None if no token has one.
    """
    experts = topk_ids.flatten().long()  # [T * k]
    if expert_map is not None:
        experts = torch.where(experts < 0, experts, expert_map.long()[experts.clamp(min=0)])
    order = experts.argsort(stable=True)  # [T * k], those without an expert here first
    tokens = order // topk_ids.shape[1]
    weights = topk_weights.flatten()[order, None]  # [T * k, 1]
    elsewhere, *counts = torch.bincount(experts + 1, minlength=num_local_experts + 1).tolist()
    total = torch.zeros_like(x, dtype=torch.float32)
    end = elsewhere
    for expert, count in enumerate(counts):
        if not count:
            continue
        start, end = end, end + count
        mine, weight = tokens[start:end], weights[start:end]
        rows = x.index_select(0, mine)
        if apply_router_weight_on_input:
            rows = rows * weight.to(rows.dtype)
        hidden = first(expert, rows)
        if adapters is None:
            result = second(expert, activate(hidden)).float()
        else:
            of_expert, foreign = partial(_product_of_adapters, expert), adapters.foreign[mine]
            adapters.add_up(hidden, rows, of_expert, foreign)
            activated = activate(hidden)
            output = second(expert, activated)
            adapters.add_down(output, activated, of_expert, foreign)
            result = output.float()
        if not apply_router_weight_on_input:
            result *= weight
        total.index_add_(0, mine, result)
    return total.to(x.dtype)


def _product_of_adapters(expert: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows of `x` times the expert's weight, or times the one of all experts."""
    return functional.linear(x, weight[expert if len(weight) > 1 else 0])


@dataclass(frozen=True)
class GroupedExperts:
    """A layer's experts on this rank, computed by grouped products.

    If `is_final`, the sum is ``npu_moe_finalize_routing``'s, which skips pairs without a row.
    vLLM's `layer` has ``padding_has_weight`` False if its router gives padding no weight.
    """

    weights: ExpertWeights
    owned: OwnedExperts
    apply_router_weight_on_input: bool
    is_final: bool
    layer: Any

    @classmethod
    def of(cls, layer: Any, weights: ExpertWeights, finalize: bool) -> "GroupedExperts":
        """Make them from vLLM's layer, after its weights were loaded.

        `finalize` is the switch ``finalize_routing``.
        """
        owned = OwnedExperts.of(layer.expert_map, layer.global_num_experts)
        is_final = finalize and can_finalize(layer.moe_config.in_dtype, layer.hidden_size)
        return cls(weights, owned, layer.apply_router_weight_on_input, is_final, layer)

    def __call__(
        self,
        x: torch.Tensor,  # [num_input_tokens, hidden_size]
        topk_weights: torch.Tensor,  # [num_input_tokens, k] float32
        topk_ids: torch.Tensor,  # [num_input_tokens, k] integer
        adapters: ExpertAdapters | None,
    ) -> torch.Tensor:
        """Return each token's sum over this rank's experts; padding is sent to no expert."""
        if (ranks := exchange_of_pass()) is not None:
            return compute_on_ranks(
                x,
                topk_weights,
                topk_ids,
                self.owned.num_experts,
                ranks,
                self.weights,
                apply_router_weight_on_input=self.apply_router_weight_on_input,
            )
        has_weight = getattr(self.layer, "padding_has_weight", True)
        return compute_experts(
            x,
            topk_weights,
            topk_ids,
            self.owned,
            self.weights,
            has_padding=has_weight and padding_mask(len(x)) is not None,
            is_final=self.is_final,
            apply_router_weight_on_input=self.apply_router_weight_on_input,
            adapters=adapters,
        )


def refuse_other_experts(kind: str, layer: Any, moe: Any) -> None:
    """Refuse experts with other activations than `ACTIVATIONS`, biases, or a variant of SwiGLU."""
    extras = {
        f"activation {layer.activation.value}": layer.activation.without_mul() not in ACTIVATIONS,
        "biases": moe.has_bias,
        "a limit of SwiGLU": layer.swiglu_limit is not None,
        "an alpha of SwiGLU": layer.swiglu_alpha is not None,
        "a beta of SwiGLU": layer.swiglu_beta is not None,
    }
    for extra, applies in extras.items():
        if applies:
            raise PrepError(
                f"{kind} with {extra} ({layer.layer_name}) are not supported; use another model"
            )


class ExpertsMethod(FusedMoEMethodBase):
    """What our methods of experts share: grouped products on NPUs, else expert by expert."""

    is_monolithic = False  # vLLM's routers choose experts, and call shared ones
    supports_eplb = True
    grouped: GroupedExperts | None = None
    adapters: ExpertAdapters | None = None  # of a layer that can have some

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        self._is_fused, self._finalize = is_fused("experts"), is_fused("finalize_routing")
        if not self._is_fused:
            check_sync_is_possible()

    def derived(self) -> tuple[torch.Tensor, ...]:
        """Return tensors ``[num_local_experts, ...]`` that were made of the layer's parameters."""
        return ()

    def one_by_one(
        self,
        layer: Any,
        x: torch.Tensor,  # [num_input_tokens, hidden_size]
        *pairs: Any,  # what `sum_of_experts` takes behind `second`, the activation before the map
    ) -> torch.Tensor:
        raise NotImplementedError

    def routed(
        self,
        layer: Any,
        x: torch.Tensor,  # [num_input_tokens, hidden_size]
        topk_weights: torch.Tensor,  # [num_input_tokens, k] float32
        topk_ids: torch.Tensor,  # [num_input_tokens, k] integer
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the routed experts; vLLM has called the shared ones before (``NO_OVERLAP``)."""
        del shared_experts, shared_experts_input
        adapters = self.adapters if self.adapters is not None and self.adapters.is_active else None
        if self.grouped is not None:
            return self.grouped(x, topk_weights, topk_ids, adapters)
        return self.one_by_one(
            layer,
            x,
            topk_weights,
            topk_ids,
            layer.activation,
            layer.expert_map,
            layer.apply_router_weight_on_input,
            adapters,
        )


def sizes_of_experts(model: Any) -> set[tuple[int, int, int]] | None:
    """Return experts, experts of a token and width of a row of each layer of experts.

    None stands for a model that has none, or whose experts other methods compute.
    """
    runners: list[Any] = [each for each in model.modules() if isinstance(each, MoERunner)]
    if not runners or not all(_is_grouped(each.routed_experts) for each in runners):
        return None
    return {
        (each.routed_experts.global_num_experts, each.router.top_k, each.moe_config.hidden_dim)
        for each in runners
    }


def _is_grouped(layer: Any) -> bool:
    return isinstance(layer.quant_method, ExpertsMethod) and layer.quant_method._is_fused


def tensors_of_experts(layer: Any) -> list[torch.Tensor] | None:
    """Return what moves with each of a layer's experts (EPLB), ``[num_local_experts, ...]``.

    These are its weights, their scales, and what our method has derived from them. None stands for
    a method of vLLM's.
    """
    method = layer.quant_method
    if not isinstance(method, ExpertsMethod):
        return None
    held = [
        parameter.detach()
        for name, parameter in layer.named_parameters()
        if name.startswith(("w13_", "w2_")) and parameter.numel()
    ]
    return [each.view(len(each), -1) for each in (*held, *method.derived())]


class TorchMoEMethod(ExpertsMethod, UnquantizedFusedMoEMethod):
    """vLLM's method of unquantised experts."""

    forward_native = ExpertsMethod.routed

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        self._one_launch = {name for name in ("swiglu", "geglu") if is_fused(name)}

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        refuse_other_experts("experts", layer, self.moe)
        super().create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the layout in which weights were loaded: grouped products read it."""
        super().process_weights_after_loading(layer)
        if self._is_fused:
            weights = UnquantisedExperts(layer, self._activation(layer))
            self.grouped = GroupedExperts.of(layer, weights, self._finalize)

    def _activation(self, layer: Any) -> Activate:
        """Return what comes between the products, in one launch if there is an operator."""
        switch, activate = ONE_LAUNCH.get(layer.activation, (None, None))
        is_one = activate is not None and switch in self._one_launch
        return activate if activate is not None and is_one else activation_of(layer.activation)

    def one_by_one(self, layer: Any, x: torch.Tensor, *pairs: Any) -> torch.Tensor:
        return apply_experts(x, layer.w13_weight, layer.w2_weight, *pairs)


def check_sync_is_possible() -> None:
    """Refuse graphs on NPUs while ``experts`` is off: counts are read back to the host."""
    from vllm.config import CUDAGraphMode, get_current_vllm_config

    config = get_current_vllm_config()
    on_device = config.device_config.device_type != "cpu"
    if on_device and config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
        raise PrepError(
            "a mixture of experts in graphs needs the fused operators of experts, which are "
            'switched off: take "experts" out of {"npu_prep": {"fused": {"off": [...]}}}, or use '
            "--enforce-eager"
        )


def register_method() -> None:
    if UnquantizedFusedMoEMethod.__name__ not in op_registry_oot:
        CustomOp.register_oot(TorchMoEMethod, name=UnquantizedFusedMoEMethod.__name__)
