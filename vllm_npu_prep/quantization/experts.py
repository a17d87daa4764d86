"""Mixtures of experts with int8 or int4 weights, by compressed-tensors and ModelSlim.

Weights of each expert have a scale for each output channel, those of int4 perhaps for each group of
inputs. Its inputs, and the rows between its two products, get a scale for each token (dynamic), or
stay as they are (W4A16).
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.utils import set_weight_attrs

from vllm_npu_prep.ops.moe_method import (
    ExpertsMethod,
    GroupedExperts,
    TorchMoEMethod,
    activation_of,
    refuse_other_experts,
    sum_of_experts,
)
from vllm_npu_prep.ops.npu.experts import (
    Rows,
    grouped_product,
)
from vllm_npu_prep.ops.npu.switches import is_fused
from vllm_npu_prep.quantization.checkpoint import Int4Form
from vllm_npu_prep.quantization.int4 import (
    PACKED,
    SYMMETRIC_ZERO,
    dequantize_groups,
    levels_of_pairs,
    load_nothing,
    refuse_cut_groups,
    refuse_odd,
    unpack,
)
from vllm_npu_prep.quantization.int8 import TorchInt8Linear, swiglu_may_round
from vllm_npu_prep.quantization.loaded import check_offsets, check_scales
from vllm_npu_prep.quantization.modules import KnowsModules

BY_CHANNEL = FusedMoeWeightScaleSupported.CHANNEL
SECOND = ("weight_scale_second", "weight_offset_second")
"""What ModelSlim's groups have; offsets are 0."""


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
    """vLLM's method for experts of int8 inputs, and of int8 weights, or int4 ones kept as int8.

    ModelSlim's files have offsets of weights, compressed-tensors' don't (`has_offsets`). Its int4
    weights come in the form `int4`.
    """

    _weights: NPUInt8Experts | None = None
    apply = ExpertsMethod.routed

    def __init__(
        self,
        layer: Any,
        config: KnowsModules,
        has_offsets: bool = False,
        int4: Int4Form | None = None,
    ) -> None:
        super().__init__(layer.moe_config)
        self.config = config
        self.has_offsets = has_offsets
        self.is_int4 = int4 is not None
        self.in_pairs, self.group_size = int4 or Int4Form(in_pairs=False, group_size=0)
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
        sizes = _sizes(self.moe, hidden_size, intermediate_size_per_partition)
        for name, (outputs, inputs) in sizes.items():
            if self.group_size:
                refuse_cut_groups(layer, self.group_size, inputs, [outputs])
            if self.in_pairs:
                refuse_odd(layer, [intermediate_size_per_partition, outputs])
            rows = outputs // 2 if self.in_pairs else outputs
            made = {"weight": torch.empty(num_experts, rows, inputs, dtype=torch.int8)}
            made["weight_scale"] = torch.zeros(num_experts, outputs, 1)
            if self.has_offsets:
                made["weight_offset"] = torch.zeros(num_experts, outputs, 1)
            if self.group_size:
                sizes_of_second = num_experts, outputs, inputs // self.group_size
                for second, missing in zip(SECOND, (torch.nan, 0.0)):
                    made[second] = torch.full(sizes_of_second, missing)
            if self.is_int4:
                made["scale_bias"] = torch.empty(0)
            _register(layer, name, made, self.config, extra_weight_attrs, SECOND)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep scales in the form by which the device multiplies.

        Scales that are not positive, and weights with an offset, are refused.
        """
        for name in ("w13", "w2"):
            scale = getattr(layer, f"{name}_weight_scale").detach()
            check_scales(layer, f"weight_scale ({name})", scale)
            if self.has_offsets:
                check_offsets(layer, getattr(layer, f"{name}_weight_offset"))
            if self.is_int4:
                self._unpack(layer, name, scale)
        if self._weights is not None:
            self._weights.refresh()
        elif self._is_fused:
            self._weights = NPUInt8Experts(layer, self.dtype, self._in_one_launch)
            self.grouped = GroupedExperts.of(layer, self._weights, self._finalize)

    def _unpack(self, layer: Any, name: str, scale: torch.Tensor) -> None:
        """Replace what int4 files have by levels in int8 and a scale for each group."""
        levels = getattr(layer, f"{name}_weight").detach()
        if self.group_size:
            second = getattr(layer, f"{name}_weight_scale_second").detach()
            check_scales(layer, f"weight_scale_second ({name})", second, of_groups=True)
            check_offsets(layer, getattr(layer, f"{name}_weight_offset_second"))
            scale = scale * second
            for kind in SECOND:
                delattr(layer, f"{name}_{kind}")
        levels = levels_of_pairs(levels, 1) if self.in_pairs else levels
        for kind, data in (("weight", levels), ("weight_scale", scale)):
            setattr(layer, f"{name}_{kind}", nn.Parameter(data, requires_grad=False))

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None: no kernel of vLLM computes these experts."""
        del layer

    def one_by_one(self, layer: Any, x: torch.Tensor, *pairs: Any) -> torch.Tensor:
        topk_weights, topk_ids, activation, *rest = pairs
        activate = activation_of(activation)
        w13_scale, w2_scale = (
            each.squeeze(-1) if each.shape[-1] == 1 else each.transpose(1, 2)  # [E, N], [E, G, N]
            for each in (layer.w13_weight_scale, layer.w2_weight_scale)
        )

        def output(expert: int, rows: torch.Tensor) -> torch.Tensor:
            first = TorchInt8Linear(layer.w13_weight[expert].t(), w13_scale[expert])
            second = TorchInt8Linear(layer.w2_weight[expert].t(), w2_scale[expert])
            return second(activate(first(rows)))

        return sum_of_experts(x, len(layer.w13_weight), output, topk_weights, topk_ids, *rest)


class Int4Experts(TorchMoEMethod):
    """vLLM's method for compressed-tensors' experts of int4 weights whose inputs stay as they are.

    Weights are dequantised when they are loaded. Groups are of `group_size` inputs, or one of all
    if that is -1.
    """

    def __init__(self, layer: Any, config: KnowsModules, group_size: int) -> None:
        super().__init__(layer.moe_config)
        self.config, self.group_size = config, group_size

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
        sizes = _sizes(self.moe, hidden_size, intermediate_size_per_partition)
        for name, (outputs, inputs) in sizes.items():
            refuse_cut_groups(layer, self.group_size, inputs, [outputs])
            groups = 1 if self.group_size == -1 else inputs // self.group_size
            made = {
                "weight_packed": torch.empty(
                    num_experts, outputs, inputs // PACKED, dtype=torch.int32
                ),
                "weight_scale": torch.full(
                    (num_experts, outputs, groups), torch.nan, dtype=params_dtype
                ),
                "weight_shape": torch.empty(0),
            }
            grouped = () if self.group_size == -1 else ("weight_scale",)
            _register(layer, name, made, self.config, extra_weight_attrs, grouped)

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in ("w13", "w2"):
            packed, scale = (
                getattr(layer, f"{name}_{kind}").detach()
                for kind in ("weight_packed", "weight_scale")
            )
            check_scales(layer, f"weight_scale ({name})", scale, of_groups=True)
            for kind in ("weight_packed", "weight_scale"):
                delattr(layer, f"{name}_{kind}")
            weight = scale.new_empty(*packed.shape[:2], packed.shape[2] * PACKED, dtype=self.dtype)
            for expert, words in enumerate(packed):
                weight[expert] = dequantize_groups(unpack(words, 1), scale[expert], SYMMETRIC_ZERO)
            setattr(layer, f"{name}_weight", nn.Parameter(weight, requires_grad=False))
        super().process_weights_after_loading(layer)


def _sizes(moe: Any, hidden_size: int, inner_size: int) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of an expert's two weights on this rank."""
    parts = 2 if moe.is_act_and_mul else 1
    return {"w13": (parts * inner_size, hidden_size), "w2": (hidden_size, inner_size)}


def _register(
    layer: Any,
    name: str,
    made: dict[str, torch.Tensor],
    config: KnowsModules,
    attributes: dict[str, Any],
    of_groups: Collection[str] = (),
) -> None:
    """Add parameters of all experts; vLLM's loader cuts what groups have as it cuts weights.

    Where a parameter is empty, the files have something that follows from the others. It stays with
    the layer: a file may have it after all else.
    """
    for kind, data in made.items():
        parameter = nn.Parameter(data, requires_grad=False)
        form = FusedMoeWeightScaleSupported.GROUP if kind in of_groups else BY_CHANNEL
        loader = attributes["weight_loader"] if data.numel() else load_nothing
        own = {"quant_method": form.value, "weight_loader": config.before_loading(loader)}
        set_weight_attrs(parameter, {**attributes, **own})
        layer.register_parameter(f"{name}_{kind}", parameter)
