"""CPU references of torch_npu operators.

Plain functions on CPU tensors, one file for each family. Each refuses what the kernel would refuse,
as far as its documentation and its users tell; ``emulator/operators.md`` lists what is
demanded and on whose word. Nothing here was run on an NPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ascend_emulator import functions, profiles
from ascend_emulator.operators import (
    atb_attention,
    cache_write,
    delta_rule,
    elementwise,
    formats,
    fused_attention,
    fusion_attention,
    gelu,
    grouped_matmul,
    int8,
    int8_fused,
    latent_rope,
    latent_rows,
    lightning_indexer,
    matmul,
    moe_distribute,
    moe_finalize,
    moe_gating,
    moe_routing,
    rotary_cache,
    sampling,
    sparse_flash_attention,
    transpose_matmul,
)
from ascend_emulator.operators.constraint import (
    FAMILIES,
    Constraint,
    KernelRefusalError,
    constraints_of,
)
from ascend_emulator.operators.placement import HOST_ARGUMENTS, check_placement

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
    paged: tuple[str, ...] = ()  # caches of which blocks alone are touched
    block_ids: tuple[str, ...] = ()  # arguments that say which
    written: tuple[str, ...] = ()  # arguments that the schema doesn't mark as written


def fused_references(name: str, sizes_workspace: str) -> tuple[Reference, ...]:
    """Return the references of one version of fused attention."""
    paged: dict[str, Any] = {"paged": ("key", "value", "key_rope"), "block_ids": ("block_table",)}
    of_sizes = fused_attention.max_workspace(sizes_workspace), fused_attention.workspace
    return (
        Reference(name, "", fused_attention.functional(name), **paged),
        Reference(name, "out", fused_attention.out_variant(name), **paged),
        Reference(sizes_workspace, "", *of_sizes),
    )


CACHES = ("key_cache", "value_cache"), ("block_table",)


REFERENCES = (
    *fused_references(fused_attention.V1, fused_attention.V1_WORKSPACE),
    *fused_references(fused_attention.V2, fused_attention.V2_WORKSPACE),
    Reference(fusion_attention.FUSION_ATTENTION, "", fusion_attention.fusion_attention),
    Reference(cache_write.RESHAPE_AND_CACHE, "", cache_write.reshape_and_cache, paged=CACHES[0]),
    Reference(
        cache_write.SCATTER_PA_KV_CACHE,
        "",
        cache_write.scatter_pa_kv_cache,
        contiguous=cache_write.COPIED_IF_STRIDED,
        paged=CACHES[0],
    ),
    Reference(atb_attention.FLASH_ATTENTION, "", atb_attention.flash_attention),
    Reference(atb_attention.FLASH_ATTENTION_UNPAD, "", atb_attention.flash_attention_unpad),
    Reference(
        atb_attention.PAGED_ATTENTION, "", atb_attention.paged_attention, None, None, *CACHES
    ),
    Reference(
        atb_attention.PAGED_ATTENTION_WORKSPACE,
        "",
        atb_attention.paged_attention_get_workspace,
        atb_attention.paged_attention_workspace,
    ),
    Reference(
        atb_attention.SPLITFUSE, "", atb_attention.paged_attention_splitfuse, None, None, *CACHES
    ),
    Reference(elementwise.RMS_NORM, "", elementwise.rms_norm),
    Reference(elementwise.ADD_RMS_NORM, "", elementwise.add_rms_norm),
    Reference(elementwise.ADD_RMS_NORM_CAST, "", elementwise.add_rms_norm_cast),
    Reference(elementwise.GEMMA_RMS_NORM, "", elementwise.gemma_rms_norm),
    Reference(elementwise.SWIGLU, "", elementwise.swiglu),
    Reference(elementwise.CLIPPED_SWIGLU, "", elementwise.clipped_swiglu, contiguous=()),
    Reference(gelu.GELU, "", gelu.gelu),
    Reference(gelu.GEGLU, "", gelu.geglu),
    Reference(gelu.FAST_GELU, "", gelu.fast_gelu),
    Reference(elementwise.ROTARY_MUL, "", elementwise.rotary_mul),
    Reference(
        rotary_cache.MROPE, "", rotary_cache.mrope, contiguous=rotary_cache.COPIED_IF_STRIDED
    ),
    Reference(rotary_cache.ROTARY_EMBEDDING, "", rotary_cache.rotary_embedding),
    Reference(grouped_matmul.GROUPED_MATMUL, "", grouped_matmul.grouped_matmul, contiguous=()),
    Reference(moe_gating.GATING_TOP_K, "", moe_gating.gating_top_k),
    Reference(moe_gating.GATING_TOP_K_SOFTMAX, "", moe_gating.gating_top_k_softmax),
    Reference(moe_routing.INIT_ROUTING, "", moe_routing.init_routing_v2),
    Reference(moe_routing.TOKEN_PERMUTE, "", moe_routing.token_permute),
    Reference(moe_routing.TOKEN_UNPERMUTE, "", moe_routing.token_unpermute),
    Reference(moe_finalize.FINALIZE_ROUTING, "", moe_finalize.finalize_routing),
    Reference(moe_distribute.DISPATCH, "", moe_distribute.dispatch),
    Reference(moe_distribute.COMBINE, "", moe_distribute.combine),
    Reference(sampling.TOP_K_TOP_P, "", sampling.top_k_top_p),
    Reference(transpose_matmul.TRANSPOSE_MATMUL, "", transpose_matmul.transpose_batchmatmul),
    Reference(
        delta_rule.RECURRENT, "", delta_rule.recurrent_gated_delta_rule, paged=delta_rule.STATES
    ),
    Reference(delta_rule.CHUNK, "", delta_rule.chunk_gated_delta_rule),
    Reference(latent_rope.INTERLEAVE_ROPE, "", latent_rope.interleave_rope),
    Reference(
        latent_rope.KV_RMSNORM_ROPE_CACHE,
        "",
        latent_rope.kv_rmsnorm_rope_cache,
        paged=latent_rope.CACHES,
        written=latent_rope.CACHES,
    ),
    Reference(latent_rows.GATHER, "", latent_rows.gather_pa_kv_cache, paged=CACHES[0]),
    Reference(latent_rows.UPDATE, "", latent_rows.attention_update),
    Reference(latent_rows.SCATTER, "", latent_rows.scatter_nd_update_, paged=("input",)),
    Reference(
        lightning_indexer.LIGHTNING_INDEXER,
        "",
        lightning_indexer.lightning_indexer,
        paged=("key",),
        block_ids=CACHES[1],
    ),
    Reference(
        sparse_flash_attention.SPARSE_FLASH_ATTENTION,
        "",
        sparse_flash_attention.sparse_flash_attention,
        paged=("key", "value", "key_rope"),
        block_ids=CACHES[1],
    ),
    Reference(matmul.WEIGHT_QUANT_MATMUL, "", matmul.weight_quant_batchmatmul),
    Reference(matmul.MATMUL_ADD, "", matmul.matmul_add_fp32),
    Reference(formats.FORMAT_CAST, "", formats.cast, formats.cast),
    Reference(int8.DYNAMIC_QUANT, "", int8.dynamic_quant),
    Reference(int8.QUANTIZE, "", int8.quantize),
    Reference(int8.QUANT_MATMUL, "", int8.quant_matmul, contiguous=int8.COPIED_IF_STRIDED),
    Reference(int8_fused.ADD_RMS_NORM_DYNAMIC_QUANT, "", int8_fused.add_rms_norm_dynamic_quant),
    Reference(int8_fused.ADD_RMS_NORM_QUANT, "", int8_fused.add_rms_norm_quant),
    Reference(int8_fused.DEQUANT_SWIGLU_QUANT, "", int8_fused.dequant_swiglu_quant),
)
"""Every reference; an operator that is not here has none."""

CONSTRAINTS: tuple[Constraint, ...] = tuple(
    constraint for family in FAMILIES for constraint in constraints_of(family).values()
)


OLD_NAMES = (Reference("npu::npu_moe_token_unpermute", "", moe_routing.old_token_unpermute),)
"""References of operators that have another name, or no kernel of their own, in newer releases."""


def _not_found(function: str, *given: object, **named: object) -> None:
    """Fail as op-plugin does when an operator is called whose function CANN lacks."""
    raise RuntimeError(
        f"{function} or {function}GetWorkspaceSize not in libopapi.so, or libopapi.so not found."
    )


def install(register_reference: Callable[..., object]) -> None:
    """Register every reference, by `ascend_emulator.register_reference` or what stands for it.

    torch_npu 2.10 lacks some operators.
    """
    is_old = torch.__version__.startswith("2.10.")
    release = profiles.current().release
    for reference in (*REFERENCES, *(OLD_NAMES if is_old else ())):
        if is_old and not _exists(reference):
            continue
        if function := functions.missing(release, reference.name):
            reference = reference._replace(on_host=partial(_not_found, function))
        register_reference(**reference._asdict())


def _exists(reference: Reference) -> bool:
    namespace, operator = reference.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    return hasattr(packet, reference.overload or "default")
