"""CPU references of torch_npu operators.

Plain functions on CPU tensors, one file for each family. Each refuses what the kernel would refuse,
as far as its documentation and its users tell; ``docs/changing/operators.md`` lists what is
demanded and on whose word. Nothing here was run on an NPU.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ascend_emulator.operators import (
    atb_attention,
    cache_write,
    elementwise,
    fused_attention,
    fusion_attention,
    gelu,
    grouped_matmul,
    rotary_cache,
    sampling,
)
from ascend_emulator.operators.atb_constraints import ATB_ATTENTION
from ascend_emulator.operators.constraint import Constraint, KernelRefusalError
from ascend_emulator.operators.fused_constraints import FUSED_ATTENTION
from ascend_emulator.operators.fused_kernel_constraints import KERNEL_FAMILIES
from ascend_emulator.operators.placement import HOST_ARGUMENTS, PLACEMENT, check_placement

__all__ = [
    "CONSTRAINTS",
    "HOST_ARGUMENTS",
    "REFERENCES",
    "KernelRefusalError",
    "Reference",
    "check_placement",
    "install",
]


class Reference(NamedTuple):
    """One operator and the function that computes it on the CPU."""

    name: str
    overload: str
    function: Callable[..., Any]
    on_host: Callable[..., Any] | None = None  # the form that runs on the host, without a launch
    contiguous: tuple[str, ...] | None = None  # copied if strided; None: what isn't written


REFERENCES = (
    Reference(fused_attention.V1, "", fused_attention.functional(fused_attention.V1)),
    Reference(fused_attention.V1, "out", fused_attention.out_variant(fused_attention.V1)),
    Reference(
        fused_attention.V1_WORKSPACE,
        "",
        fused_attention.max_workspace(fused_attention.V1_WORKSPACE),
        fused_attention.workspace,
    ),
    Reference(fused_attention.V2, "", fused_attention.functional(fused_attention.V2)),
    Reference(fused_attention.V2, "out", fused_attention.out_variant(fused_attention.V2)),
    Reference(
        fused_attention.V2_WORKSPACE,
        "",
        fused_attention.max_workspace(fused_attention.V2_WORKSPACE),
        fused_attention.workspace,
    ),
    Reference(fusion_attention.FUSION_ATTENTION, "", fusion_attention.fusion_attention),
    Reference(cache_write.RESHAPE_AND_CACHE, "", cache_write.reshape_and_cache),
    Reference(
        cache_write.SCATTER_PA_KV_CACHE,
        "",
        cache_write.scatter_pa_kv_cache,
        contiguous=cache_write.COPIED_IF_STRIDED,
    ),
    Reference(atb_attention.FLASH_ATTENTION, "", atb_attention.flash_attention),
    Reference(atb_attention.PAGED_ATTENTION, "", atb_attention.paged_attention),
    Reference(
        atb_attention.PAGED_ATTENTION_WORKSPACE,
        "",
        atb_attention.paged_attention_get_workspace,
        atb_attention.paged_attention_workspace,
    ),
    Reference(atb_attention.SPLITFUSE, "", atb_attention.paged_attention_splitfuse),
    Reference(elementwise.RMS_NORM, "", elementwise.rms_norm),
    Reference(elementwise.ADD_RMS_NORM, "", elementwise.add_rms_norm),
    Reference(elementwise.GEMMA_RMS_NORM, "", elementwise.gemma_rms_norm),
    Reference(elementwise.SWIGLU, "", elementwise.swiglu),
    Reference(gelu.GELU, "", gelu.gelu),
    Reference(gelu.GEGLU, "", gelu.geglu),
    Reference(elementwise.ROTARY_MUL, "", elementwise.rotary_mul),
    Reference(
        rotary_cache.MROPE, "", rotary_cache.mrope, contiguous=rotary_cache.COPIED_IF_STRIDED
    ),
    Reference(grouped_matmul.GROUPED_MATMUL, "", grouped_matmul.grouped_matmul, contiguous=()),
    Reference(sampling.TOP_K_TOP_P, "", sampling.top_k_top_p),
)
"""Every reference; an operator that is not here has none."""

FAMILIES = (
    FUSED_ATTENTION,
    *KERNEL_FAMILIES,
    fusion_attention.FUSION_ATTENTION_RULES,
    cache_write.CACHE_WRITE,
    ATB_ATTENTION,
    elementwise.NORMS,
    elementwise.SWIGLU_RULES,
    gelu.GELU_RULES,
    elementwise.ROTARY,
    rotary_cache.MROPE_RULES,
    grouped_matmul.GROUPED_MATMUL_RULES,
    sampling.TOP_K_TOP_P_RULES,
    PLACEMENT,
)

CONSTRAINTS: tuple[Constraint, ...] = tuple(
    constraint for family in FAMILIES for constraint in family.constraints.values()
)
"""Constraints by family."""


class RegisterReference(Protocol):
    """How the runtime takes a reference."""

    def __call__(
        self,
        name: str,
        function: Callable[..., Any],
        overload: str = "",
        on_host: Callable[..., Any] | None = None,
        contiguous: Sequence[str] | None = None,
    ) -> object:
        """Register `function` for ``name`` and `overload`."""


def install(register_reference: RegisterReference) -> None:
    """Register every reference with a runtime."""
    for reference in REFERENCES:
        register_reference(
            reference.name,
            reference.function,
            overload=reference.overload,
            on_host=reference.on_host,
            contiguous=reference.contiguous,
        )
