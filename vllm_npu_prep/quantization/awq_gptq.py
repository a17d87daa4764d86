"""AWQ's and GPTQ's files of four-bit weights: vLLM's own readers, with checks of this plugin."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import (
    LinearBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.auto_awq import (
    AutoAWQConfig,
    AutoAWQMarlinLinearMethod,
)
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, AutoGPTQLinearMethod
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_linear_quant_method

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.quantization.checkpoint import (
    EXPERT,
    check_awq_gptq,
    read_headers,
    served_name,
)
from vllm_npu_prep.quantization.expert_forms import WordsOfMatrices
from vllm_npu_prep.quantization.experts import Int4Experts
from vllm_npu_prep.quantization.formats import (
    AWQ,
    EXPERTS_OPERATOR,
    LAYERS_OPERATOR,
    fault_of_awq_gptq,
)
from vllm_npu_prep.quantization.int4 import refuse_cut_groups
from vllm_npu_prep.quantization.loaded import num_layers_of
from vllm_npu_prep.quantization.modules import KnowsModules

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper


class _Checked(KnowsModules):
    """What both configs add to vLLM's: the checkpoint's files are held against each other."""

    group_size: int
    get_name: Any
    packed_operators: Collection[str] = (LAYERS_OPERATOR, EXPERTS_OPERATOR)

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return all dtypes that the device takes; float32 is the CPU fallback's."""
        return [torch.float32, torch.float16, torch.bfloat16]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Refuse what vLLM would raise a longer error for."""
        if found := fault_of_awq_gptq(config):
            raise PrepError(f"--quantization {config.get('quant_method')}: {found}")
        return super().from_config(config)  # type: ignore[misc]  # vLLM's config is beside it

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Do what vLLM does, and then hold weights against scales."""
        super().maybe_update_config(  # type: ignore[misc]
            model_name, hf_config=hf_config, revision=revision
        )
        folder = Path(model_name)
        headers, (decoders, layers) = read_headers(folder), num_layers_of(hf_config)
        modules = check_awq_gptq(folder, headers, self.get_name(), self.group_size, layers)
        self.expect({served_name(name, decoders): file for name, file in modules.items()})
        if modules:
            self.packed_operators = {
                EXPERTS_OPERATOR if EXPERT.search(name) else LAYERS_OPERATOR for name in modules
            }

    def apply_vllm_mapper(self, hf_to_vllm_mapper: "WeightsMapper") -> None:
        super().apply_vllm_mapper(hf_to_vllm_mapper)  # type: ignore[misc]
        self.rename(hf_to_vllm_mapper.apply_dict)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            self.made(prefix)
            known = getattr(self, "_expected", {})
            if known and not any(name.startswith(f"{prefix}.") for name in known):
                return UnquantizedFusedMoEMethod(layer.moe_config)
            form = WordsOfMatrices(self.group_size, is_awq=self.get_name() == AWQ)
            return Int4Experts(layer, self, form)
        if not isinstance(layer, LinearBase):
            return None
        self.made(prefix)
        return self.linear_method(layer, prefix)

    def linear_method(self, layer: LinearBase, prefix: str) -> Any:
        raise NotImplementedError


class CheckedAWQConfig(_Checked, AutoAWQConfig):  # type: ignore[misc]  # a field, a property
    def linear_method(self, layer: LinearBase, prefix: str) -> Any:
        method = AutoAWQConfig.get_quant_method(self, layer, prefix)
        is_float = isinstance(method, UnquantizedLinearMethod)
        return method if is_float else AWQLinearMethod(self, self)


class CheckedGPTQConfig(_Checked, AutoGPTQConfig):  # type: ignore[misc]  # a field, a property
    def linear_method(self, layer: LinearBase, prefix: str) -> Any:
        return get_linear_quant_method(
            self,
            layer,
            prefix,
            lambda of_layer: GPTQLinearMethod(of_layer, self),  # type: ignore[arg-type]
        )


class _LoadsChecked:
    """What both methods add to vLLM's: the model is held against the files before loading.

    vLLM's own constructors ask for kernels of CUDA.
    """

    def __init__(self, quant_config: Any, modules: KnowsModules) -> None:
        self.quant_config, self.modules = quant_config, modules
        self.quant_type, self.input_dtype = quant_config.quant_type, None

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *args: Any,
        **extra: Any,
    ) -> None:
        """Make vLLM's parameters, with scales that are NaN until a file gives them."""
        extra["weight_loader"] = self.modules.before_loading(extra["weight_loader"])
        sizes = input_size_per_partition, output_partition_sizes
        refuse_cut_groups(layer, self.quant_config.group_size, *sizes, outputs_are_packed=True)
        super().create_weights(layer, *sizes, *args, **extra)  # type: ignore[misc]
        layer.scales.data.fill_(torch.nan)


@register_weight_loader_v2_supported_method
class AWQLinearMethod(_LoadsChecked, AutoAWQMarlinLinearMethod):
    """Numbers of a word in AWQ's order, packed by outputs; vLLM puts them in order of inputs."""


@register_weight_loader_v2_supported_method
class GPTQLinearMethod(_LoadsChecked, AutoGPTQLinearMethod):
    """Numbers packed by inputs. Zero points in files are not read: symmetric weights have 8."""
