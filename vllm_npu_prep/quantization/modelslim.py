"""ModelSlim's format: ``--quantization ascend``.

``quant_model_description.json`` names each weight and how it was quantised. Beside an int8
``weight`` ``[N, K]``, the files have ``weight_scale`` and ``weight_offset`` ``[N, 1]``; static
quantisation adds ``input_scale``, ``input_offset``, ``deq_scale`` (the product of both scales) and
``quant_bias`` (the layer's bias divided by ``deq_scale``, less the offset times the weights' sums).

Weights of four bits are int8 as well, or two outputs in a byte ``[N / 2, K]``. With groups, a
``weight_scale_second`` ``[N, K / group]`` multiplies ``weight_scale``. ``scale_bias``, which CANN's
operators take for such weights, follows from the others, and is not read.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.quantization.checkpoint import (
    DESCRIPTION,
    DYNAMIC,
    FLOAT,
    INT4,
    STATIC,
    Int4Form,
    check_description,
    float_modules_that_draft,
    modules_of,
    prefix_of,
    read_headers,
    served_name,
)
from vllm_npu_prep.quantization.expert_forms import Int8Form, ModelSlimInt4
from vllm_npu_prep.quantization.experts import Int8Experts
from vllm_npu_prep.quantization.formats import MODELSLIM, int4_form, read_description
from vllm_npu_prep.quantization.int4 import (
    add_levels,
    levels_of_pairs,
    load_nothing,
    refuse_cut_groups,
    refuse_odd,
    refuse_unmultiplied,
)
from vllm_npu_prep.quantization.int8 import Int8Linear, QuantizedRows
from vllm_npu_prep.quantization.loaded import (
    add_int8,
    check_offsets,
    check_scales,
    name_of,
    num_layers_of,
)
from vllm_npu_prep.quantization.modules import KnowsModules

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper


class ModelSlimConfig(  # type: ignore[misc]  # vLLM has a field where ours is a property
    KnowsModules, QuantizationConfig
):
    """vLLM's config of a model in this format: which layers are quantised, and how.

    Attributes
    ----------
    modules
        One of `TYPES` of each weight, by the module's name in vLLM.
    int4
        How the files have weights of four bits.
    scales_as_int64
        Whether the files keep ``deq_scale`` as the bits of float32 in int64, as ModelSlim does for
        float16 models; None until files tell.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[str, str] = {}
        self.scales_as_int64: bool | None = None
        self.int4 = Int4Form(in_pairs=True, group_size=0)

    def get_name(self) -> str:  # type: ignore[override]  # of the methods that vLLM brings
        return MODELSLIM

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return all dtypes that the device takes; float32 is the CPU fallback's."""
        return [torch.float32, torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 0: only CUDA devices have a capability."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return none: `maybe_update_config` reads the description, which vLLM would not find."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ModelSlimConfig":
        """Return an empty config, which `maybe_update_config` fills."""
        del config
        return cls()

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read the description and hold the files against it."""
        description = read_description(model_name, revision)
        if description is None:
            raise PrepError(
                f"--quantization {MODELSLIM}: {model_name} has no {DESCRIPTION}; leave the flag "
                "out, or name a model that ModelSlim quantised"
            )
        modules, folder = modules_of(description), Path(model_name)
        headers, (decoders, layers) = read_headers(folder), num_layers_of(hf_config)
        self.int4 = int4_form(description)
        if headers:
            check_description(folder, modules, headers, layers, self.int4)
        self.modules = dict.fromkeys(float_modules_that_draft(headers, decoders), FLOAT)
        for name, kind in modules.items():
            self.modules[prefix_of(served_name(name, decoders), hf_config)] = kind
        source = str(folder / DESCRIPTION)
        self.expect({name: source for name, kind in self.modules.items() if kind != FLOAT})
        dtypes = {entry.dtype for name, entry in headers.items() if name.endswith(".deq_scale")}
        self.scales_as_int64 = dtypes == {"I64"} if dtypes else None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: "WeightsMapper") -> None:
        self.modules = hf_to_vllm_mapper.apply_dict(self.modules)
        self.rename(hf_to_vllm_mapper.apply_dict)

    def kind_of(self, prefix: str) -> str:
        """Return how a layer was quantised, by its name in the model.

        Raises
        ------
        PrepError
            If the description lacks it, or says different things of the parts of a fused layer.
        """
        parent, _, last = prefix.rpartition(".")
        parts = [f"{parent}.{part}" for part in self.packed_modules_mapping.get(last, ())]
        parts = parts if parts and prefix not in self.modules else [prefix]
        kinds = {part: self.modules[part] for part in parts if part in self.modules}
        if not kinds:
            raise PrepError(
                f"{DESCRIPTION} does not say how {' or '.join(parts)} was quantised; use the "
                "description that was written with these weights"
            )
        if len(set(kinds.values())) > 1:
            told = ", ".join(f"{part} {kind}" for part, kind in kinds.items())
            raise PrepError(f"{DESCRIPTION}: {told}: they are one layer here, quantise them alike")
        return next(iter(kinds.values()))

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            self.made(prefix)
            return modelslim_experts(self, layer, prefix)
        if isinstance(layer, LinearBase):
            self.made(prefix)
            kind = self.kind_of(prefix)
            return UnquantizedLinearMethod() if kind == FLOAT else METHODS[kind](self)
        if isinstance(layer, VocabParallelEmbedding) and self.modules.get(prefix, FLOAT) != FLOAT:
            raise PrepError(
                f"{DESCRIPTION}: {prefix} is {self.modules[prefix]}; embeddings and heads are "
                "served in 16 or 32 bits only; leave them as they are when you quantise"
            )
        return None


def _parameter(kind: type, loader: Callable[..., Any], data: torch.Tensor, **dims: int) -> Any:
    return kind(data=data, weight_loader=loader, **dims)


@register_weight_loader_v2_supported_method
class ModelSlimDynamicLinear(LinearMethodBase):
    """vLLM's method for ``W8A8_DYNAMIC``: each token gets a scale, computed from the token."""

    def __init__(self, config: ModelSlimConfig) -> None:
        self.config = config

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        del input_size, output_size
        outputs = sum(output_partition_sizes)
        loader = self.config.before_loading(extra["weight_loader"])
        layer.logical_widths = output_partition_sizes
        layer.params_dtype = params_dtype
        weight = torch.empty(outputs, input_size_per_partition, dtype=torch.int8)
        made = {
            "weight": _parameter(ModelWeightParameter, loader, weight, input_dim=1, output_dim=0)
        }
        for name in ("weight_scale", "weight_offset"):
            data = torch.zeros(outputs, 1, dtype=torch.float32)
            made[name] = _parameter(ChannelQuantScaleParameter, loader, data, output_dim=0)
        for name, parameter in made.items():
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check scales, and bring them into the form by which the device multiplies.

        Raises
        ------
        PrepError
            For scales that are not positive, and for weights with an offset.
        """
        scale = layer.weight_scale.detach().flatten()
        check_scales(layer, "weight_scale", scale)
        check_offsets(layer, layer.weight_offset.detach())
        add_int8(layer, Int8Linear(layer.weight.detach().t(), scale), scale)

    def apply(
        self,
        layer: Any,
        x: "torch.Tensor | QuantizedRows",
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return layer.int8(x, bias)


@register_weight_loader_v2_supported_method
class ModelSlimStaticLinear(ModelSlimDynamicLinear):
    """vLLM's method for ``W8A8``: one scale and offset serve all inputs of the layer."""

    def create_weights(self, layer: Any, *args: Any, **extra: Any) -> None:
        super().create_weights(layer, *args, **extra)
        loader = self.config.before_loading(extra["weight_loader"])
        parts = len(layer.logical_widths)
        outputs = sum(layer.logical_widths)
        as_int64 = self.config.scales_as_int64
        if as_int64 is None:  # the files are not on this host yet: ModelSlim's rule
            as_int64 = layer.params_dtype == torch.float16
        single = {
            "input_scale": torch.zeros(parts, dtype=torch.float32),
            "input_offset": torch.zeros(parts, dtype=torch.float32),
        }
        channel = {
            "quant_bias": torch.zeros(outputs, dtype=torch.int32),
            "deq_scale": torch.zeros(outputs, dtype=torch.int64 if as_int64 else torch.float32),
        }
        for name, data in single.items():
            layer.register_parameter(name, _parameter(PerTensorScaleParameter, loader, data))
        for name, data in channel.items():
            made = _parameter(ChannelQuantScaleParameter, loader, data, output_dim=0)
            layer.register_parameter(name, made)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check scales, and bring them into the form by which the device multiplies.

        Raises
        ------
        PrepError
            For scales that are not positive or don't belong together.
        """
        check_offsets(layer, layer.weight_offset.detach())
        steps, offsets = layer.input_scale.detach(), layer.input_offset.detach()
        check_scales(layer, "input_scale", steps)
        if bool((steps != steps[0]).any() | (offsets != offsets[0]).any()):
            raise PrepError(
                f"{name_of(layer)}: its parts have different values of input_scale or "
                "input_offset, but they read the same input; quantise the model again"
            )
        scale = layer.deq_scale.detach().flatten()
        if scale.dtype == torch.int64:
            scale = scale.to(torch.int32).view(torch.float32)
        check_scales(layer, "deq_scale", scale)
        of_weights = layer.weight_scale.detach().flatten()
        if not torch.allclose(scale, of_weights * steps[0], rtol=0.02, atol=0):
            raise PrepError(
                f"{name_of(layer)}: deq_scale is not input_scale * weight_scale; quantise the "
                "model again"
            )
        sum_bias = layer.quant_bias.detach()
        if isinstance(layer, RowParallelLinear) and layer.tp_rank > 0:
            # Ranks add up their products: one of them takes the offset out and adds the bias.
            sum_bias = torch.zeros_like(sum_bias)
        offset = offsets[:1].round().int()
        weight = layer.weight.detach().t()
        kept = Int8Linear(weight, scale, steps[:1].clone(), offset, sum_bias)
        add_int8(layer, kept, of_weights)

    def apply(
        self,
        layer: Any,
        x: "torch.Tensor | QuantizedRows",
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute ``x @ weight`` of rounded inputs; ``quant_bias`` has the layer's bias in it."""
        del bias
        return layer.int8(x)


@register_weight_loader_v2_supported_method
class ModelSlimInt4Linear(ModelSlimDynamicLinear):
    """vLLM's method for ``W4A8_DYNAMIC``: weights of four bits, and a scale for each token."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *args: Any,
        **extra: Any,
    ) -> None:
        in_pairs, group_size = self.config.int4
        sizes = input_size_per_partition, output_partition_sizes
        if group_size:
            refuse_cut_groups(layer, group_size, *sizes)
            refuse_unmultiplied(layer, group_size, *sizes)
        super().create_weights(layer, *sizes, *args, **extra)
        loader = self.config.before_loading(extra["weight_loader"])
        outputs = sum(output_partition_sizes)
        if in_pairs:
            refuse_odd(layer, output_partition_sizes)
            packed = torch.empty(outputs // 2, input_size_per_partition, dtype=torch.int8)
            dims = {"input_dim": 1, "output_dim": 0, "packed_dim": 0, "packed_factor": 2}
            layer.weight = _parameter(PackedvLLMParameter, loader, packed, **dims)
        if group_size:
            for name in ("weight_scale_second", "weight_offset_second"):
                missing = torch.nan if name == "weight_scale_second" else 0.0
                data = torch.full((outputs, input_size_per_partition // group_size), missing)
                made = _parameter(GroupQuantScaleParameter, loader, data, input_dim=1, output_dim=0)
                layer.register_parameter(name, made)
        ignored = self.config.before_loading(load_nothing)
        layer.scale_bias = _parameter(BasevLLMParameter, ignored, torch.empty(0))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Unpack weights, and give each group the product of its scales.

        Raises
        ------
        PrepError
            For scales that are not positive, and for weights with an offset.
        """
        in_pairs, group_size = self.config.int4
        scale, levels = layer.weight_scale.detach(), layer.weight.detach()
        check_scales(layer, "weight_scale", scale)
        check_offsets(layer, layer.weight_offset.detach())
        if group_size:
            second = layer.weight_scale_second.detach()
            check_scales(layer, "weight_scale_second", second, of_groups=True)
            check_offsets(layer, layer.weight_offset_second.detach())
            scale = scale * second
        add_levels(layer, levels_of_pairs(levels, 0) if in_pairs else levels, scale)


METHODS = {
    STATIC: ModelSlimStaticLinear,
    DYNAMIC: ModelSlimDynamicLinear,
    INT4: ModelSlimInt4Linear,
}
"""The method by which each type of weight is made and called."""


def modelslim_experts(config: ModelSlimConfig, layer: Any, prefix: str) -> FusedMoEMethodBase:
    """Return how a layer's experts are made, as ModelSlim's description says.

    Raises
    ------
    PrepError
        If it doesn't name them, says different things of them, or has a type that is not served.
    """
    kinds = {name: kind for name, kind in config.modules.items() if name.startswith(f"{prefix}.")}
    if not kinds:
        raise PrepError(
            f"{DESCRIPTION} does not say how {prefix} were quantised; use the description that was "
            "written with these weights"
        )
    if len(set(kinds.values())) > 1:
        one, other = (
            next(n for n in kinds if kinds[n] == k) for k in sorted(set(kinds.values()))[:2]
        )
        raise PrepError(
            f"{DESCRIPTION}: {one} is {kinds[one]}, {other} {kinds[other]}: the experts of a layer "
            "are one module here, quantise them alike"
        )
    kind = next(iter(kinds.values()))
    if kind == FLOAT:
        return UnquantizedFusedMoEMethod(layer.moe_config)
    if kind == STATIC:
        raise PrepError(
            f"{DESCRIPTION}: experts of {prefix} are {kind}; quantise them as {DYNAMIC} or {INT4}"
        )
    form = ModelSlimInt4(config.int4) if kind == INT4 else Int8Form(has_offsets=True)
    return Int8Experts(layer, config, form)
