"""Mixtures of experts with int8 weights and int8 inputs, in both formats.

Each expert's weights have a scale for each output channel; its inputs, and the rows between its two
products, get a scale for each token (dynamic).
"""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.utils import set_weight_attrs

from vllm_npu_prep.ops.moe_method import (
    ExpertsMethod,
    GroupedExperts,
    activation_of,
    refuse_other_experts,
    sum_of_experts,
)
from vllm_npu_prep.ops.npu.experts import (
    Rows,
    grouped_product,
)
from vllm_npu_prep.ops.npu.switches import is_fused
from vllm_npu_prep.quantization.int8 import TorchInt8Linear, swiglu_may_round
from vllm_npu_prep.quantization.loaded import check_offsets, check_scales
from vllm_npu_prep.quantization.modules import KnowsModules


class NPUInt8Experts:
    """Weights of a layer's experts for grouped products; routing rounds the rows.

    vLLM's layer has int8 weights in the shapes that `UnquantisedExperts` of `ops.npu.experts`
    names, and scales ``[num_local_experts, outputs, 1]``.
    """

    quant_mode = 1  # of `npu_moe_init_routing_v2`: a scale for each row

    def __init__(self, layer: Any, dtype: torch.dtype, in_one_launch: bool) -> None:
        self.layer, self.dtype = layer, dtype
        is_silu = layer.activation == MoEActivation.SILU
        columns = layer.w13_weight.shape[1] // 2
        self.in_one_launch = in_one_launch and is_silu and swiglu_may_round(columns, False)
        self.activate = activation_of(layer.activation)
        # For bfloat16 results the operator wants bfloat16 scales, for float16 results float32.
        kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        scales = layer.w13_weight_scale, layer.w2_weight_scale
        self.w13_scale, self.w2_scale = (s.detach().squeeze(-1).to(kind) for s in scales)

    def refresh(self) -> None:
        """Copy the layer's new scales to where graphs read them."""
        self.w13_scale.copy_(self.layer.w13_weight_scale.squeeze(-1))
        self.w2_scale.copy_(self.layer.w2_weight_scale.squeeze(-1))

    def up(self, rows: Rows) -> Rows:
        """Multiply, activate and round; rows past the last group stay undefined."""
        hidden = self._product(rows, self.layer.w13_weight, self.w13_scale)
        if self.in_one_launch:
            values, scales = torch.ops.npu.npu_dequant_swiglu_quant(
                hidden, activate_left=True, quant_mode=1
            )
        else:
            values, scales = torch.ops.npu.npu_dynamic_quant(self.activate(hidden))
        return rows._replace(values=values, scales=scales)

    def down(self, rows: Rows) -> torch.Tensor:
        return self._product(rows, self.layer.w2_weight, self.w2_scale)

    def _product(self, rows: Rows, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return grouped_product(
            rows,
            weight.transpose(1, 2),
            scale=[scale],
            per_token_scale=[rows.scales],
            output_dtype=self.dtype,
        )


class Int8Experts(ExpertsMethod):
    """vLLM's method for experts of int8 weights and inputs.

    ModelSlim's files have offsets of weights, compressed-tensors' don't (`has_offsets`).
    """

    _weights: NPUInt8Experts | None = None
    apply = ExpertsMethod.routed

    def __init__(self, layer: Any, config: KnowsModules, has_offsets: bool = False) -> None:
        super().__init__(layer.moe_config)
        self.config = config
        self.has_offsets = has_offsets
        self._in_one_launch = is_fused("int8_swiglu")

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        refuse_other_experts("quantised experts", layer, self.moe)
        self.dtype = params_dtype
        loader = self.config.before_loading(extra_weight_attrs["weight_loader"])
        extra_weight_attrs["weight_loader"] = loader
        parts = 2 if self.moe.is_act_and_mul else 1
        sizes = {
            "w13": (parts * intermediate_size_per_partition, hidden_size),
            "w2": (hidden_size, intermediate_size_per_partition),
        }
        by_channel = {"quant_method": FusedMoeWeightScaleSupported.CHANNEL.value}
        for name, (outputs, inputs) in sizes.items():
            made = {"weight": torch.empty(num_experts, outputs, inputs, dtype=torch.int8)}
            made["weight_scale"] = torch.zeros(num_experts, outputs, 1, dtype=torch.float32)
            if self.has_offsets:
                made["weight_offset"] = torch.zeros(num_experts, outputs, 1, dtype=torch.float32)
            for kind, data in made.items():
                parameter = nn.Parameter(data, requires_grad=False)
                attributes = extra_weight_attrs if kind == "weight" else by_channel
                set_weight_attrs(parameter, {**extra_weight_attrs, **attributes})
                layer.register_parameter(f"{name}_{kind}", parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep scales in the form by which the device multiplies.

        Scales that are not positive, and weights with an offset, are refused.
        """
        for name in ("w13", "w2"):
            scale = getattr(layer, f"{name}_weight_scale").detach()
            check_scales(layer, f"weight_scale ({name})", scale)
            if self.has_offsets:
                check_offsets(layer, getattr(layer, f"{name}_weight_offset"))
        if self._weights is not None:
            self._weights.refresh()
        elif self._is_fused:
            self._weights = NPUInt8Experts(layer, self.dtype, self._in_one_launch)
            self.grouped = GroupedExperts.of(layer, self._weights, self._finalize)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None: no kernel of vLLM computes these experts."""
        del layer

    def one_by_one(self, layer: Any, x: torch.Tensor, *pairs: Any) -> torch.Tensor:
        topk_weights, topk_ids, activation, *rest = pairs
        activate = activation_of(activation)
        w13_scale, w2_scale = layer.w13_weight_scale.squeeze(-1), layer.w2_weight_scale.squeeze(-1)

        def output(expert: int, rows: torch.Tensor) -> torch.Tensor:
            first = TorchInt8Linear(layer.w13_weight[expert].t(), w13_scale[expert])
            second = TorchInt8Linear(layer.w2_weight[expert].t(), w2_scale[expert])
            return second(activate(first(rows)))

        return sum_of_experts(x, len(layer.w13_weight), output, topk_weights, topk_ids, *rest)
