"""Fused operators of torch_npu: which operator serves each switch, and which an engine uses.

An engine asks for them by its options; an operator that torch_npu or CANN lacks is left out.
Which ones are used is written into the engine's config, where layers read it when they are made.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from vllm_npu_prep.aclnn import first_release, missing_functions
from vllm_npu_prep.config import FUSED_OPERATORS, SECTION, fused_operators

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPERATORS: Mapping[str, str] = {
    "rms_norm": "npu_rms_norm",
    "add_rms_norm": "npu_add_rms_norm",
    "add_rms_norm_cast": "npu_add_rms_norm_cast",
    "gemma_rms_norm": "npu_gemma_rms_norm",
    "rotary": "npu_mrope",
    "mrope": "npu_mrope",
    "vision_attention": "npu_fusion_attention",
    "vision_rotary": "npu_rotary_mul",
    "qkv": "npu_grouped_matmul",
    "swiglu": "npu_swiglu",
    "geglu": "npu_geglu",
    "gelu": "npu_gelu",
    "latent": "npu_transpose_batchmatmul",
    "experts": "npu_moe_init_routing_v2",
    "finalize_routing": "npu_moe_finalize_routing",
    "gating": "npu_moe_gating_top_k",
    "gating_softmax": "npu_moe_gating_top_k_softmax_v2",
    "top_k_top_p": "npu_top_k_top_p",
    "int8_norm": "npu_add_rms_norm_dynamic_quant",
    "int8_swiglu": "npu_dequant_swiglu_quant",
}
"""The operator of torch_npu that serves each switch. Experts need several; the newest one is
named."""

assert tuple(OPERATORS) == FUSED_OPERATORS


def missing_operators(names: Iterable[str]) -> dict[str, str]:
    """Return which switches the installed software can't serve, each with what it lacks."""
    found = {}
    for name in names:
        operator = OPERATORS[name]
        if not hasattr(torch.ops.npu, operator):
            found[name] = f"the installed torch_npu has no {operator}"
        elif function := missing_functions([operator]).get(operator):
            found[name] = (
                f"the installed CANN has no {function}, which {operator} calls; "
                f"CANN {first_release(function)} has it"
            )
    return found


def is_fused(name: str) -> bool:
    """Return whether the engine that is being built uses a fused operator."""
    from vllm.config import get_current_vllm_config

    return name in fused_operators(get_current_vllm_config())


def use_only(vllm_config: "VllmConfig", names: Iterable[str]) -> None:
    """Write into an engine's config which fused operators it uses, before its layers are made."""
    kept = frozenset(names)
    given = vllm_config.additional_config
    options: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    off = [name for name in FUSED_OPERATORS if name not in kept]
    options[SECTION] = {**options.get(SECTION, {}), "fused": {"off": off}}
    vllm_config.additional_config = options
