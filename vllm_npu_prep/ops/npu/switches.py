"""Fused operators of torch_npu: which of them the installed software has, and an engine uses.

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


def missing_operators(names: Iterable[str]) -> dict[str, str]:
    """Return which switches the installed software can't serve, each with what it lacks."""
    found = {}
    for name in names:
        operator = FUSED_OPERATORS[name]
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
