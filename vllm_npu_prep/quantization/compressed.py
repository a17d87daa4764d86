"""compressed-tensors: vLLM's own reader, with kernels and checks of this plugin."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import (
    LinearBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW4A8Int,
    CompressedTensorsWNA8Int,
    CompressedTensorsWNA16,
)
from vllm.model_executor.parameter import BasevLLMParameter
from vllm.platforms.interface import PlatformEnum

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.quantization.checkpoint import (
    EXPERT,
    PACKED_WEIGHT,
    check_compressed,
    float_modules_that_draft,
    prefix_of,
    quantized_modules,
    read_headers,
    served_name,
)
from vllm_npu_prep.quantization.expert_forms import CompressedInt4, Int8Form
from vllm_npu_prep.quantization.experts import Int4Experts, Int8Experts
from vllm_npu_prep.quantization.formats import EXPERTS_OPERATOR, LAYERS_OPERATOR
from vllm_npu_prep.quantization.int4 import (
    Int4LinearKernel,
    load_nothing,
    multiplies_packed,
    refuse_cut_groups,
    refuse_unmultiplied,
)
from vllm_npu_prep.quantization.int8 import Int8Linear, QuantizedRows
from vllm_npu_prep.quantization.loaded import (
    add_int8,
    check_scales,
    num_layers_of,
)
from vllm_npu_prep.quantization.modules import KnowsModules

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper


PACKED = "pack-quantized"
"""The format in which int32 have eight numbers of four bits."""
INT4 = (CompressedTensorsWNA16, CompressedTensorsWNA8Int, CompressedTensorsW4A8Int)


class CheckedCompressedTensorsConfig(  # type: ignore[misc]  # vLLM has a field where ours is a property
    KnowsModules, CompressedTensorsConfig
):
    """vLLM's config, which also holds the checkpoint's files against each other.

    Attributes
    ----------
    packed_operators
        What multiplies by the packed weights that files have; all that may until files tell.
    """

    packed_operators: Collection[str] = (LAYERS_OPERATOR, EXPERTS_OPERATOR)

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Do what vLLM does, and then hold weights against scales."""
        super().maybe_update_config(model_name, hf_config=hf_config, revision=revision)
        folder = Path(model_name)
        headers = read_headers(folder)
        if headers:
            decoders, layers = num_layers_of(hf_config)
            packed = [group["weights"] for group in self.target_scheme_map.values()]
            check_compressed(folder, headers, self.ignore, layers, decoders, packed)
            self.packed_operators = {
                EXPERTS_OPERATOR if EXPERT.search(name) else LAYERS_OPERATOR
                for name in headers
                if name.endswith(PACKED_WEIGHT)
            }
            self.ignore = [*self.ignore, *float_modules_that_draft(headers, decoders)]
            files = {
                name: str(folder / headers[weight].file)
                for name, weight in quantized_modules(headers).items()
            }
            made = {served_name(name, decoders): file for name, file in files.items()}
            self.expect({prefix_of(name, hf_config): file for name, file in made.items()})

    def apply_vllm_mapper(self, hf_to_vllm_mapper: "WeightsMapper") -> None:
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        self.rename(hf_to_vllm_mapper.apply_dict)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return vLLM's method, except for experts, where vLLM has compiled kernels only."""
        if not isinstance(layer, RoutedExperts):
            if isinstance(layer, LinearBase):
                self.made(prefix)
                self._refuse_mixed_parts(layer, prefix)
            method = super().get_quant_method(layer, prefix)
            is_int8 = type(method) is CompressedTensorsLinearMethod
            return CheckedLinearMethod(self) if is_int8 else method
        self.made(prefix)
        self._add_fused_moe_to_target_scheme_map()
        names = [str(getattr(layer, f"ckpt_{part}_proj_name")) for part in ("gate", "up", "down")]
        schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names]
        if any(scheme != schemes[0] for scheme in schemes):
            raise PrepError(
                f"{prefix}: {', '.join(names)} are quantised in different ways; quantise the "
                "projections of experts alike"
            )
        if schemes[0] is None:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        weights: Any = schemes[0]["weights"]
        inputs: Any = schemes[0]["input_activations"]
        if weights.num_bits == 4:
            is_packed, rounds = self._format_of(schemes[0]) == PACKED, inputs is not None
            form = CompressedInt4(weights, is_packed, rounds)
            kind = Int8Experts if rounds else Int4Experts
            return kind(layer, self, form)
        if not self._is_dynamic_token_w8a8(weights, inputs) or weights.strategy != "channel":
            raise PrepError(
                f"{prefix}: experts are served with int8 weights by channel and inputs by token, "
                f"or with int4 weights; these have int{weights.num_bits} weights by "
                f"{weights.strategy} and inputs "
                f"{f'by {inputs.strategy}' if inputs else 'that are not rounded'}"
            )
        return Int8Experts(layer, self, Int8Form())

    def _format_of(self, scheme: dict[str, Any]) -> str:
        return str(scheme.get("format") or self.quant_format)

    def _refuse_mixed_parts(self, layer: LinearBase, prefix: str) -> None:
        """Refuse a fused layer whose parts have different schemes: vLLM would take the first."""
        parent, _, last = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(last, ())
        schemes = [self.get_scheme_dict(layer, f"{parent}.{part}") for part in parts]
        if any(scheme != schemes[0] for scheme in schemes):
            raise PrepError(
                f"{prefix}: {', '.join(parts)} are quantised in different ways; quantise the "
                "parts of a layer alike"
            )


@register_weight_loader_v2_supported_method
class CheckedLinearMethod(CompressedTensorsLinearMethod):
    """vLLM's method, which holds the model's modules against the files before loading."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *args: Any,
        **extra: Any,
    ) -> None:
        """Make vLLM's parameters, whose scales show whether a file has given them.

        vLLM leaves what memory held, which may pass for scales.
        """
        config: Any = self.quantization_config
        extra["weight_loader"] = config.before_loading(extra["weight_loader"])
        sizes = input_size_per_partition, output_partition_sizes
        if isinstance(scheme := layer.scheme, INT4):
            packs_outputs = not getattr(scheme, "symmetric", True)
            if isinstance(scheme, CompressedTensorsWNA16):
                packs_outputs |= multiplies_packed(layer, torch.get_default_device())
            is_packed = not isinstance(scheme, CompressedTensorsW4A8Int)
            if is_packed or scheme.group_size != -1:
                refuse_cut_groups(layer, scheme.group_size, *sizes, packs_outputs)
            if scheme.group_size != -1 and not isinstance(scheme, CompressedTensorsWNA16):
                refuse_unmultiplied(layer, scheme.group_size, *sizes)
        super().create_weights(layer, *sizes, *args, **extra)
        if isinstance(scheme, CompressedTensorsW4A8Int):
            # vLLM has the weight by two names, and would wait for both when weights are reloaded.
            del layer.weight_packed
            scheme.kernel.w_q_name = "weight"
        if hasattr(layer, "weight_shape"):
            # Each part of a layer loads it again: a reload would count it for what is missing.
            ignored = config.before_loading(load_nothing)
            layer.weight_shape = BasevLLMParameter(
                data=torch.empty(0, dtype=torch.int64), weight_loader=ignored
            )
        for name in ("weight_scale", "input_scale"):
            if (scale := getattr(layer, name, None)) is not None:
                scale.data.fill_(torch.nan if isinstance(scheme, INT4) else 0)


class Int8LinearKernel(Int8ScaledMMLinearKernel):
    """Linear layers of int8 weights and inputs, for vLLM's ``CompressedTensorsW8A8Int8``."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        del compute_capability
        return True, None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Take symmetric scales for each token only; start-up has refused others by name."""
        if c.input_symmetric or c.is_static_input_scheme:
            return True, None
        return False, "scales for each token are symmetric only"

    def process_weights_after_loading(self, layer: Any) -> None:
        weight, scale, input_scale, zero_point, _ = self._get_layer_params(layer)
        if not self.config.is_channelwise:  # one scale for each part of a fused layer
            widths = torch.tensor(layer.logical_widths, device=scale.device)
            scale = torch.repeat_interleave(scale.flatten(), widths)
        scale = scale.detach().flatten().float()
        check_scales(layer, "weight_scale", scale)
        kept = Int8Linear(weight.detach().t(), scale)
        if input_scale is not None:
            step = input_scale.detach().flatten().float()
            check_scales(layer, "input_scale", step)
            zero = torch.zeros(1, dtype=torch.int32, device=step.device)
            offset = zero if zero_point is None else zero_point.detach().flatten().int()
            total = weight.detach().sum(1, dtype=torch.int32)  # [N]
            kept = Int8Linear(kept.weight, scale * step, step, offset, -offset * total)
        add_int8(layer, kept, scale)

    def apply_weights(
        self,
        layer: Any,
        x: "torch.Tensor | QuantizedRows",
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return layer.int8(x, bias)


def register_kernel() -> None:
    from vllm.model_executor.kernels import linear

    if Int8LinearKernel not in linear._POSSIBLE_INT8_KERNELS.get(PlatformEnum.OOT, ()):
        register_linear_kernel(Int8LinearKernel, PlatformEnum.OOT, "int8")
    if Int4LinearKernel not in linear._POSSIBLE_KERNELS.get(PlatformEnum.OOT, ()):
        register_linear_kernel(Int4LinearKernel, PlatformEnum.OOT, "mp")
