"""Which quantised models can be served, told from a model's config and description alone."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.quantization.checkpoint import DESCRIPTION, FLOAT, TYPES, modules_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

MODELSLIM, COMPRESSED_TENSORS = "ascend", "compressed-tensors"
FORMATS = (COMPRESSED_TENSORS, MODELSLIM)
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


ON_NPUS = (
    "npu_dynamic_quant or npu_quantize round inputs, npu_quant_matmul multiplies; weights in ND"
)
ON_THE_CPU = "inputs are rounded in torch, products are summed in int32"


def describe(model: "ModelConfig", on_npu: bool) -> str:
    """Return start-up's line: the format, how many modules of each kind, and which operators."""
    text = f"{model.quantization}, int8 weights and inputs"
    if model.quantization == MODELSLIM:
        kinds = Counter(modules_of(read_description(model.model, model.revision) or {}).values())
        text += f" ({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))})"
    return f"{text}: {ON_NPUS if on_npu else ON_THE_CPU}"


def fault(model: "ModelConfig") -> str | None:
    """Say what of a model's quantisation can't be served, in a few words; None if all can."""
    method = model.quantization
    if method is None and getattr(model, "quantization_config", None) is None:
        return None
    if method not in FORMATS or getattr(model, "quantization_config", None) is not None:
        return f"there are no kernels for {method or 'quantisation at start-up'}"
    if method == MODELSLIM:
        return _fault_of_description(read_description(model.model, model.revision))
    return _fault_of_groups(_compressed_config(model))


def _compressed_config(model: "ModelConfig") -> Mapping[str, Any]:
    text = getattr(model.hf_config, "text_config", None)
    for config in (model.hf_config, text):
        for name in ("quantization_config", "compression_config"):
            found = getattr(config, name, None)
            if found:
                return found
    return {}


def _fault_of_groups(config: Mapping[str, Any]) -> str | None:
    if config.get("kv_cache_scheme"):
        return "it quantises the KV cache (kv_cache_scheme)"
    transforms = config.get("transform_config") or {}
    if transforms.get("config_groups"):
        return "it rotates inputs (transform_config)"
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "its weights are sparse (sparsity_config)"
    for name, group in (config.get("config_groups") or {}).items():
        found = _fault_of_group(group)
        if found is not None:
            return f"{found} ({name} of its quantization_config)"
    return None


def _fault_of_group(group: Mapping[str, Any]) -> str | None:
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    described = _words(weights)
    if weights.get("num_bits") != 8 or weights.get("type", "int") != "int":
        return f"its weights are {described}"
    if weights.get("strategy") not in ("channel", "tensor") or not weights.get("symmetric", True):
        return f"its weights are {described}; one symmetric scale for a channel is supported"
    if not inputs:
        return "its inputs are not quantised"
    if inputs.get("num_bits") != 8 or inputs.get("type", "int") != "int":
        return f"its inputs are {_words(inputs)}"
    if inputs.get("dynamic"):
        is_served = inputs.get("strategy") == "token" and inputs.get("symmetric", True)
    else:
        is_served = inputs.get("strategy") == "tensor"
    if not is_served:
        return (
            f"its inputs are {_words(inputs)}; a symmetric scale for each token, or a static one "
            "for all, is supported"
        )
    if group.get("output_activations"):
        return "it quantises outputs"
    return None


def _words(scheme: Mapping[str, Any]) -> str:
    """Name bits, type, granularity and symmetry as compressed-tensors does."""
    symmetry = "" if scheme.get("symmetric", True) else ", asymmetric"
    strategy = scheme.get("strategy") or "?"
    return f"{scheme.get('type', 'int')}{scheme.get('num_bits')} by {strategy}{symmetry}"


def _fault_of_description(description: Mapping[str, Any] | None) -> str | None:
    if description is None:
        return f"it has no {DESCRIPTION}"
    for name in ("kv_quant_type", "kv_cache_type", "fa_quant_type", "indexer_quant_type"):
        if str(description.get(name) or FLOAT) != FLOAT:
            return f"{name} is {description[name]}: the KV cache is not quantised here"
    for module, kind in modules_of(description).items():
        if kind not in TYPES:
            return f"{module} is {kind}; {', '.join(TYPES)} are supported"
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
        raise PrepError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(read, dict):
        raise PrepError(f"{path}: a JSON object is expected, not {type(read).__name__}")
    return read
