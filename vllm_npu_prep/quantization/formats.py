"""Which quantised models can be served, told from a model's config and description alone."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.quantization.checkpoint import (
    DESCRIPTION,
    FLOAT,
    INT4,
    TYPES,
    Int4Form,
    modules_of,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

MODELSLIM, COMPRESSED_TENSORS = "ascend", "compressed-tensors"
AWQ, GPTQ = "auto_awq", "auto_gptq"
"""What vLLM makes of ``awq`` and ``gptq`` in config.json."""

FORMATS = (COMPRESSED_TENSORS, MODELSLIM, AWQ, GPTQ)
"""Values of ``--quantization`` that are served."""


def method_of(model: "ModelConfig") -> str | None:
    """Return how a model is quantised, by its config or by the description beside its weights."""
    if model.quantization is None and read_description(model.model, model.revision) is not None:
        return MODELSLIM
    return model.quantization


def find_description(vllm_config: "VllmConfig") -> None:
    """Quantise as a description beside the weights says, if nothing else was asked for.

    ModelSlim's checkpoints name no method in config.json, where vLLM looks for one.
    """
    model = vllm_config.model_config
    if model.quantization is None and method_of(model) is not None:
        model.quantization = MODELSLIM
        vllm_config.quant_config = type(vllm_config)._get_quantization_config(
            model, vllm_config.load_config
        )


GROUP_ON_NPUS = 256
"""Inputs of a group of four-bit weights by which NPUs multiply int8 inputs."""

SMALLEST_GROUP = 32
"""Inputs that share a scale of four-bit weights; larger groups are multiples of it."""

ON_NPUS = (
    "npu_dynamic_quant or npu_quantize round inputs, npu_quant_matmul multiplies; weights in ND"
)
ON_THE_CPU = "inputs are rounded in torch, products are summed in int32"
FLOAT_INPUTS = "inputs that are not rounded"
OF_INT8 = ("npu_dynamic_quant", "npu_quantize", "npu_quant_matmul")
"""What rounds inputs and multiplies int8 by int8 on NPUs."""

LAYERS_OPERATOR, EXPERTS_OPERATOR = "npu_weight_quant_batchmatmul", "npu_grouped_matmul"
"""What multiplies by packed weights on NPUs: those of linear layers, and those of experts."""
DEQUANTISED = "weights are dequantised when they are loaded"


def describe(vllm_config: "VllmConfig", on_npu: bool) -> str:
    """Return start-up's line: the format, the kinds of weights and inputs, and which operators."""
    model = vllm_config.model_config
    text = f"{model.quantization}, {_kinds(model)}"
    if model.quantization == MODELSLIM:
        kinds = Counter(modules_of(read_description(model.model, model.revision) or {}).values())
        text += f" ({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))})"
    told = [ON_NPUS if on_npu else ON_THE_CPU] if rounds_inputs(model) else []
    if leaves_inputs(model):
        operators = " and ".join(packed_operators(vllm_config))
        told.append(f"{operators} by packed weights, in ND" if on_npu else DEQUANTISED)
    return f"{text}: {'; '.join(told)}"


def rounds_inputs(model: "ModelConfig") -> bool:
    """Return whether some layers round their inputs to int8."""
    groups = _groups_of(model)
    return model.quantization == MODELSLIM or any(g.get("input_activations") for g in groups)


def leaves_inputs(model: "ModelConfig") -> bool:
    """Return whether some layers have int4 weights and inputs that are not rounded."""
    groups = _groups_of(model)
    return model.quantization in (AWQ, GPTQ) or not all(g.get("input_activations") for g in groups)


def operators_of(vllm_config: "VllmConfig") -> list[str]:
    """Return the operators by which NPUs round and multiply in the layers of a quantised model."""
    rounding = OF_INT8 if rounds_inputs(vllm_config.model_config) else ()
    return [*rounding, *packed_operators(vllm_config)]


def multiplies_int4_by_int8(model: "ModelConfig") -> bool:
    """Return whether some layers or experts have int4 weights and inputs that are rounded."""
    if model.quantization == MODELSLIM:
        description = read_description(model.model, model.revision) or {}
        return INT4 in modules_of(description).values()
    groups = _groups_of(model)
    return any(g.get("input_activations") and _bits(g.get("weights")) == 4 for g in groups)


def packed_operators(vllm_config: "VllmConfig") -> list[str]:
    """Return the operators by which NPUs multiply float inputs by packed weights."""
    if not leaves_inputs(vllm_config.model_config):
        return []
    return list(getattr(vllm_config.quant_config, "packed_operators", [LAYERS_OPERATOR]))


def _groups_of(model: "ModelConfig") -> list[Mapping[str, Any]]:
    """Return compressed-tensors' groups of modules; no other format has any."""
    is_compressed = model.quantization == COMPRESSED_TENSORS
    return list((_config_of(model).get("config_groups") or {}).values()) if is_compressed else []


def _kinds(model: "ModelConfig") -> str:
    if model.quantization in (AWQ, GPTQ):
        size = _group_size(_config_of(model))
        strategy = "channel" if size == -1 else f"group of {size}"
        return f"int4 by {strategy} with {FLOAT_INPUTS}"
    told = set()
    for group in _groups_of(model):
        inputs = "int8 inputs" if group.get("input_activations") else FLOAT_INPUTS
        told.add(f"{_words(group.get('weights') or {})} with {inputs}")
    return " and ".join(sorted(told)) or "int8 inputs"


def fault(model: "ModelConfig", on_npu: bool = False) -> str | None:
    """Say what of a model's quantisation can't be served, in a few words; None if all can."""
    method = model.quantization
    if method is None and getattr(model, "quantization_config", None) is None:
        return None
    if method not in FORMATS or getattr(model, "quantization_config", None) is not None:
        return f"there are no kernels for {method or 'quantisation at start-up'}"
    if method == MODELSLIM:
        return _fault_of_description(read_description(model.model, model.revision), on_npu)
    config = _config_of(model)
    if method != COMPRESSED_TENSORS:
        return fault_of_awq_gptq(config)
    return _fault_of_groups(config, on_npu)


def fault_of_awq_gptq(config: Mapping[str, Any]) -> str | None:
    """Say what of AWQ's or GPTQ's ``quantization_config`` can't be served; None if all can."""
    bits = config.get("bits", config.get("w_bit"))
    size = _group_size(config)
    is_awq = config.get("quant_method") == "awq"
    if bits != 4:
        return f"its weights have {bits} bits; 4 are supported"
    if not size or (size % SMALLEST_GROUP and (is_awq or size != -1)):
        return f"its groups are of {size}; {SMALLEST_GROUP} or a multiple are supported"
    if is_awq and not config.get("zero_point"):
        return "its weights have no zero points (zero_point), which AWQ's files are read with"
    if not is_awq and not config.get("sym"):
        return "its weights are asymmetric (sym); symmetric ones are supported"
    if config.get("desc_act") and size != -1:
        return "its groups follow an order of activations (desc_act)"
    if config.get("lm_head"):
        return "its head is quantised (lm_head), which is served in 16 or 32 bits"
    if config.get("dynamic"):
        return "its modules are quantised in different ways (dynamic)"
    return None


def _config_of(model: "ModelConfig") -> Mapping[str, Any]:
    text = getattr(model.hf_config, "text_config", None)
    for config in (model.hf_config, text):
        for name in ("quantization_config", "compression_config"):
            found = getattr(config, name, None)
            if found:
                return found
    return {}


def _fault_of_groups(config: Mapping[str, Any], on_npu: bool) -> str | None:
    if config.get("kv_cache_scheme"):
        return "it quantises the KV cache (kv_cache_scheme)"
    transforms = config.get("transform_config") or {}
    if transforms.get("config_groups"):
        return "it rotates inputs (transform_config)"
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "its weights are sparse (sparsity_config)"
    for name, group in (config.get("config_groups") or {}).items():
        form = group.get("format") or config.get("format")
        is_int4 = _bits(group.get("weights")) == 4
        found = _fault_of_int4(group, form, on_npu) if is_int4 else _fault_of_group(group)
        if found is not None:
            return f"{found} ({name} of its quantization_config)"
    return None


def _fault_of_group(group: Mapping[str, Any]) -> str | None:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    described = _words(weights)
    if weights.get("num_bits") != 8 or weights.get("type", "int") != "int":
        return f"its weights are {described}"
    if weights.get("strategy") not in ("channel", "tensor") or not weights.get("symmetric", True):
        return f"its weights are {described}; one symmetric scale for a channel is supported"
    if not inputs:
        return "its inputs are not quantised"
    return _fault_of_activations(group, may_be_static=True)


def _fault_of_activations(group: Mapping[str, Any], may_be_static: bool = False) -> str | None:
    inputs = group.get("input_activations") or {}
    if inputs.get("num_bits") != 8 or inputs.get("type", "int") != "int":
        return f"its inputs are {_words(inputs)}"
    if inputs.get("dynamic"):
        is_served = inputs.get("strategy") == "token" and inputs.get("symmetric", True)
    else:
        is_served = may_be_static and inputs.get("strategy") == "tensor"
    if not is_served:
        return (
            f"its inputs are {_words(inputs)}; a symmetric scale for each token, or a static one "
            "for all, is supported"
        )
    if group.get("output_activations"):
        return "it quantises outputs"
    return None


def _fault_of_int4(group: Mapping[str, Any], form: str | None, on_npu: bool) -> str | None:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    described = _words(weights)
    if weights.get("actorder") not in (None, "static", "weight"):
        return f"its weights are {described} in an order of activations (actorder)"
    size = weights.get("group_size") or -1
    is_grouped = weights.get("strategy") == "group" and size > 0 and size % SMALLEST_GROUP == 0
    if not is_grouped and weights.get("strategy") != "channel":
        return (
            f"its weights are {described}; groups of {SMALLEST_GROUP} or a multiple are supported"
        )
    if inputs and not weights.get("symmetric", True):
        return f"its weights are {described}; beside inputs of int8, symmetric ones are supported"
    if form != "pack-quantized" and not (inputs and form == "int-quantized"):
        return f"its weights are {described} in the format {form}; pack-quantized is supported"
    if inputs and (found := _fault_of_activations(group)):
        return found
    if on_npu and inputs and is_grouped and size != GROUP_ON_NPUS:
        return f"its weights are {described}; NPUs take groups of {GROUP_ON_NPUS}"
    return None


def _group_size(config: Mapping[str, Any]) -> Any:
    return config.get("group_size", config.get("q_group_size"))


def _bits(scheme: Mapping[str, Any] | None) -> int | None:
    """Return the bits of whole numbers; None for other types."""
    scheme = scheme or {}
    return scheme.get("num_bits") if scheme.get("type", "int") == "int" else None


def _words(scheme: Mapping[str, Any]) -> str:
    """Name bits, type, granularity and symmetry as compressed-tensors does."""
    symmetry = "" if scheme.get("symmetric", True) else ", asymmetric"
    strategy = scheme.get("strategy") or "?"
    if scheme.get("group_size"):
        strategy += f" of {scheme['group_size']}"
    return f"{scheme.get('type', 'int')}{scheme.get('num_bits')} by {strategy}{symmetry}"


def int4_form(description: Mapping[str, Any]) -> Int4Form:
    """Tell how ModelSlim wrote weights of four bits.

    Version 1.0.0 has two in a byte. Groups are of 256 if nothing else is said (both from
    vllm-project/vllm-ascend, ``quantization/methods/w4a8.py``); without second scales there are
    none.
    """
    is_grouped = any(name.endswith(".weight_scale_second") for name in description)
    size = int(description.get("group_size") or 256) if is_grouped else 0
    return Int4Form(description.get("version") == "1.0.0", size)


def _fault_of_description(description: Mapping[str, Any] | None, on_npu: bool) -> str | None:
    if description is None:
        return f"it has no {DESCRIPTION}"
    for name in ("kv_quant_type", "kv_cache_type", "fa_quant_type", "indexer_quant_type"):
        if str(description.get(name) or FLOAT) != FLOAT:
            return f"{name} is {description[name]}: the KV cache is not quantised here"
    size = int4_form(description).group_size if on_npu else 0
    for module, kind in modules_of(description).items():
        if kind not in TYPES:
            return f"{module} is {kind}; {', '.join(TYPES)} are supported"
        if kind == INT4 and size not in (0, GROUP_ON_NPUS):
            return f"{module} is {kind} in groups of {size}; NPUs take groups of {GROUP_ON_NPUS}"
    return None


def read_description(model: str, revision: str | None = None) -> dict[str, Any] | None:
    """Read ModelSlim's description of a model; None if it has none.

    Raises
    ------
    PrepError
        If the file is not a JSON object.
    """
    path = Path(model) / DESCRIPTION
    if not path.parent.is_dir():
        from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

        return get_hf_file_to_dict(DESCRIPTION, model, revision)
    if not path.is_file():
        return None
    try:
        read = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise PrepError(f"{path}: not readable as JSON: {error}; fetch it again") from None
    if not isinstance(read, dict):
        raise PrepError(
            f"{path}: a JSON object is expected, not {type(read).__name__}; fetch it again"
        )
    return read
