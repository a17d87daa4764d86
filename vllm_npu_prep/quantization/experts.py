"""Mixtures of experts with int8 or int4 weights: products on NPUs, and the methods that vLLM calls.

Weights of each expert have a scale for each output channel, those of int4 perhaps for each group of
inputs. Its inputs, and the rows between its two products, get a scale for each token (dynamic), or
stay as they are (W4A16). NPUs multiply the latter by packed weights. What files have of experts is
in `expert_forms`.
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
    TorchMoEMethod,
    activation_of,
    refuse_other_experts,
    sum_of_experts,
)
from vllm_npu_prep.ops.npu.experts import Rows, UnquantisedExperts, grouped_product
from vllm_npu_prep.ops.npu.switches import is_fused
from vllm_npu_prep.quantization.expert_forms import Int8Form, WordsOfExperts
from vllm_npu_prep.quantization.int4 import load_nothing
from vllm_npu_prep.quantization.int8 import TorchInt8Linear, swiglu_may_round
from vllm_npu_prep.quantization.modules import KnowsModules

BY_CHANNEL = FusedMoeWeightScaleSupported.CHANNEL


class NPUInt8Experts:
    """Weights of a layer's experts for grouped products; routing rounds the rows.

    vLLM's layer has int8 weights in the shapes that `UnquantisedExperts` of `ops.npu.experts`
    names, and scales ``[num_local_experts, outputs, 1]``.
    """

    quant_mode = 1  # of `npu_moe_init_routing_v2`: a scale for each row

    def __init__(self, layer: Any, dtype: torch.dtype, in_one_launch: bool) -> None:
        self.layer, self.dtype = layer, dtype
        is_silu = layer.activation == MoEActivation.SILU
        columns = self.outputs() // 2
        self.in_one_launch = in_one_launch and is_silu and swiglu_may_round(columns, False)
        self.activate = activation_of(layer.activation)
        self.make()

    def outputs(self) -> int:
        """Return how many outputs an expert's first product has."""
        return int(self.layer.w13_weight.shape[1])

    def make(self) -> None:
        """Make what products take besides the layer's parameters."""
        # For bfloat16 results the operator wants bfloat16 scales, for float16 results float32.
        kind = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        scales = self.layer.w13_weight_scale, self.layer.w2_weight_scale
        self.w13_scale, self.w2_scale = (s.detach().squeeze(-1).to(kind) for s in scales)

    def refresh(self) -> None:
        """Copy the layer's new scales to where graphs read them."""
        self.w13_scale.copy_(self.layer.w13_weight_scale.squeeze(-1))
        self.w2_scale.copy_(self.layer.w2_weight_scale.squeeze(-1))

    def derived(self) -> tuple[torch.Tensor, ...]:
        return self.w13_scale, self.w2_scale

    def up(self, rows: Rows) -> torch.Tensor:
        return self._product(rows, "w13")

    def between(self, rows: Rows, hidden: torch.Tensor) -> Rows:
        """Activate and round; rows past the last group stay undefined."""
        if not self.in_one_launch:
            return self.rounded(rows, self.activate(hidden))
        values, scales = torch.ops.npu.npu_dequant_swiglu_quant(
            hidden, activate_left=True, quant_mode=1
        )
        return rows._replace(values=values, scales=scales)

    def rounded(self, rows: Rows, activated: torch.Tensor) -> Rows:
        values, scales = torch.ops.npu.npu_dynamic_quant(activated)
        return rows._replace(values=values, scales=scales)

    def down(self, rows: Rows) -> torch.Tensor:
        return self._product(rows, "w2")

    def _product(self, rows: Rows, name: str) -> torch.Tensor:
        return grouped_product(
            rows,
            getattr(self.layer, f"{name}_weight").transpose(1, 2),
            scale=[getattr(self, f"{name}_scale")],
            per_token_scale=[rows.scales],
            output_dtype=self.dtype,
        )


class NPUW4A8Experts(NPUInt8Experts):
    """Packed weights of a layer's experts for grouped products of rounded rows.

    vLLM's layer has ``w13_weight`` and ``w2_weight``, int32 ``[num_local_experts, K, N / 8]``,
    ``w13_group_scale`` and ``w2_group_scale``, int64 ``[num_local_experts, G, N]``, and
    ``w13_correction`` and ``w2_correction``, float32 ``[num_local_experts, N]``, as
    `int4.words_of_levels` makes them; vllm-project/vllm-ascend makes the same call
    (``ops/fused_moe/moe_mlp.py``).
    """

    def outputs(self) -> int:
        return int(self.layer.w13_group_scale.shape[2])

    def make(self) -> None:
        """Make nothing: products take the layer's parameters alone."""

    refresh = make

    def derived(self) -> tuple[torch.Tensor, ...]:
        return ()

    def _product(self, rows: Rows, name: str) -> torch.Tensor:
        return grouped_product(
            rows,
            getattr(self.layer, f"{name}_weight"),
            scale=[getattr(self.layer, f"{name}_group_scale")],
            bias=[getattr(self.layer, f"{name}_correction")],
            per_token_scale=[rows.scales],
            output_dtype=self.dtype,
        )


class NPUInt4Experts(UnquantisedExperts):
    """Packed weights of a layer's experts for grouped products of rows that are not rounded.

    vLLM's `layer` has ``w13_weight`` and ``w2_weight``, int32 ``[num_local_experts, K, N / 8]``,
    and scales and offsets ``[num_local_experts, G, N]`` in the dtype of the rows, without G if a
    group has all inputs. The operator wants offsets of symmetric weights, too (cann/ops-transformer
    of November 2025, ``CheckGroupedMatmulAntiQuant`` in ``aclnn_grouped_matmul.cpp``);
    vllm-project/vllm-ascend makes the same call (``ops/fused_moe/moe_mlp.py``).
    """

    def up(self, rows: Rows) -> torch.Tensor:
        return self._product(rows, "w13")

    def down(self, rows: Rows) -> torch.Tensor:
        return self._product(rows, "w2")

    def _product(self, rows: Rows, name: str) -> torch.Tensor:
        return grouped_product(
            rows,
            getattr(self.layer, f"{name}_weight"),
            antiquant_scale=[getattr(self.layer, f"{name}_group_scale")],
            antiquant_offset=[getattr(self.layer, f"{name}_group_offset")],
        )


class Int8Experts(ExpertsMethod):
    """vLLM's method for experts of int8 inputs, and of int8 weights, or int4 ones kept as int8."""

    _weights: NPUInt8Experts | None = None
    apply = ExpertsMethod.routed

    def __init__(self, layer: Any, config: KnowsModules, form: Int8Form) -> None:
        super().__init__(layer.moe_config)
        self.config, self.form = config, form
        self._in_one_launch = is_fused("int8_swiglu")

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        self.dtype = _create(self, layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep weights and scales in the form by which the device multiplies."""
        for name in ("w13", "w2"):
            self.form.finish(layer, name)
        kind = NPUInt8Experts
        if self._is_fused and self.form.pack_rounded(layer):
            kind = NPUW4A8Experts
        if self._weights is not None:
            self._weights.refresh()
        elif self._is_fused:
            self._weights = kind(layer, self.dtype, self._in_one_launch)
            self.grouped = GroupedExperts.of(layer, self._weights, self._finalize)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None: no kernel of vLLM computes these experts."""
        del layer

    def derived(self) -> tuple[torch.Tensor, ...]:
        return () if self._weights is None else self._weights.derived()

    def one_by_one(self, layer: Any, x: torch.Tensor, *pairs: Any) -> torch.Tensor:
        topk_weights, topk_ids, activation, *rest = pairs
        w13_scale, w2_scale = (
            each.squeeze(-1) if each.shape[-1] == 1 else each.transpose(1, 2)  # [E, N], [E, G, N]
            for each in (layer.w13_weight_scale, layer.w2_weight_scale)
        )

        def first(expert: int, rows: torch.Tensor) -> torch.Tensor:
            return TorchInt8Linear(layer.w13_weight[expert].t(), w13_scale[expert])(rows)

        def second(expert: int, rows: torch.Tensor) -> torch.Tensor:
            return TorchInt8Linear(layer.w2_weight[expert].t(), w2_scale[expert])(rows)

        products = first, activation_of(activation), second
        pairs = topk_weights, topk_ids, *rest
        return sum_of_experts(x, len(layer.w13_weight), *products, *pairs)


class Int4Experts(TorchMoEMethod):
    """vLLM's method for experts of int4 weights whose inputs stay as they are.

    Weights stay packed where NPUs multiply by them; else they are dequantised when they are loaded.
    """

    def __init__(self, layer: Any, config: KnowsModules, form: WordsOfExperts) -> None:
        super().__init__(layer.moe_config)
        self.config, self.form = config, form
        form.packs_outputs |= self._is_fused

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        self.dtype = _create(self, layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        bring = self.form.pack if self._is_fused else self.form.dequantize
        for name in ("w13", "w2"):
            bring(layer, name, self.dtype)
        if self._is_fused:
            weights = NPUInt4Experts(layer, self._activation(layer))
            self.grouped = GroupedExperts.of(layer, weights, self._finalize)
        else:
            super().process_weights_after_loading(layer)


def _create(
    method: Int8Experts | Int4Experts,
    layer: Any,
    num_experts: int,
    hidden_size: int,
    intermediate_size_per_partition: int,
    params_dtype: torch.dtype,
    **attributes: Any,
) -> torch.dtype:
    """Add what files fill to vLLM's layer, and return the model's dtype.

    vLLM's loader cuts what groups have as it cuts weights. Where a parameter is empty, the files
    have something that follows from the others. It stays with the layer: a file may have it after
    all else.
    """
    refuse_other_experts("quantised experts", layer, method.moe)
    inner, form = intermediate_size_per_partition, method.form
    parts = [inner] * (2 if method.moe.is_act_and_mul else 1)
    for name, outputs, inputs in (("w13", parts, hidden_size), ("w2", [hidden_size], inner)):
        form.refuse_cut(layer, outputs, inputs)
        for kind, data in form.parameters(num_experts, sum(outputs), inputs).items():
            parameter = nn.Parameter(data, requires_grad=False)
            cut = FusedMoeWeightScaleSupported.GROUP if kind in form.of_groups else BY_CHANNEL
            loader = attributes["weight_loader"] if data.numel() else load_nothing
            own = {
                "quant_method": cut.value,
                "is_transposed": form.inputs_first,
                "weight_loader": method.config.before_loading(loader),
            }
            set_weight_attrs(parameter, {**attributes, **own})
            layer.register_parameter(f"{name}_{kind}", parameter)
    return params_dtype
