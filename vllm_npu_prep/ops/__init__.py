"""Operators that stand in for vLLM's kernels and layers, and the functions that register them.

Three things are replaced, each through a hook of vLLM: Triton kernels (by functions of torch that
the dispatcher calls in their place), compiled kernels of experts and routing, and layers for which
torch_npu has a fused operator. A model that is already loaded is changed only where vLLM has no
hook.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from vllm_npu_prep.compat import kernels

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import VllmConfig


def register_overrides(
    triton_kernels: Literal["replace", "keep"], for_v2_runner: bool = False
) -> None:
    """Replace the kernels that a worker can reach, before it can launch one.

    Parameters
    ----------
    triton_kernels
        Whether Triton kernels are replaced or vLLM's own are kept. Experts and routing are always
        replaced: vLLM's are compiled kernels, which don't exist here.
    for_v2_runner
        Whether the worker has vLLM's V2 runner, whose sampler has kernels of its own.
    """
    from vllm_npu_prep.ops import moe_lora, moe_method, moe_topk

    if triton_kernels == "replace":
        replace_triton_kernels()
        if for_v2_runner:
            replace_v2_kernels()
    moe_topk.register_operators()
    moe_method.register_method()
    moe_lora.register_layers()


def replace_triton_kernels() -> None:
    from vllm_npu_prep.ops.triton import drafting, rejection, slot_mapping

    drafter = "vllm.v1.spec_decode.utils"
    sampler = "vllm.v1.sample.rejection_sampler"
    kernels.override_triton_kernels(
        {
            "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": (
                slot_mapping.compute_slot_mapping
            ),
            f"{drafter}.eagle_step_slot_mapping_metadata_kernel": (
                drafting.eagle_step_slot_mapping_metadata
            ),
            f"{drafter}.eagle_prepare_inputs_padded_kernel": drafting.eagle_prepare_inputs_padded,
            f"{drafter}.eagle_prepare_next_token_padded_kernel": (
                drafting.eagle_prepare_next_token_padded
            ),
            f"{drafter}.copy_and_expand_eagle_inputs_kernel": drafting.copy_and_expand_eagle_inputs,
            f"{sampler}.rejection_greedy_sample_kernel": rejection.rejection_greedy_sample,
            f"{sampler}.rejection_random_sample_kernel": rejection.rejection_random_sample,
            f"{sampler}.expand_kernel": rejection.expand,
            f"{sampler}.sample_recovered_tokens_kernel": rejection.sample_recovered_tokens,
        }
    )


def replace_v2_kernels() -> None:
    """Replace the kernels of the V2 runner's sampler; its other kernels are never launched."""
    from vllm_npu_prep.ops.triton import sampling_v2

    runner = "vllm.v1.worker.gpu"
    sampler = f"{runner}.sample"
    kernels.override_triton_kernels(
        {
            f"{sampler}.gumbel._temperature_kernel": sampling_v2.scale_by_temperature,
            f"{sampler}.min_p._min_p_kernel": sampling_v2.limit_by_min_p,
            f"{sampler}.penalties._bincount_kernel": sampling_v2.count_tokens,
            f"{sampler}.penalties._penalties_kernel": sampling_v2.apply_penalties,
            f"{sampler}.logit_bias._bias_kernel": sampling_v2.apply_logit_bias,
            f"{sampler}.bad_words._bad_words_kernel": sampling_v2.forbid_bad_words,
            f"{sampler}.output._compact_sampling_mask_kernel": sampling_v2.list_kept_tokens,
            f"{sampler}.logprob._topk_log_softmax_kernel": sampling_v2.log_softmax_of,
            f"{sampler}.logprob._ranks_kernel": sampling_v2.ranks_of,
            f"{sampler}.logprob._fill_logprob_token_ids_kernel": (
                sampling_v2.fill_logprob_token_ids
            ),
            f"{sampler}.prompt_logprob._prompt_logprobs_token_ids_kernel": (
                sampling_v2.list_prompt_tokens
            ),
            f"{runner}.structured_outputs._apply_grammar_bitmask_kernel": (
                sampling_v2.apply_grammar_bitmask
            ),
        }
    )


def register_fused(
    vllm_config: "VllmConfig",
    log: Callable[[str], object],
    is_right: "Callable[[str, torch.dtype], bool] | None" = None,
) -> None:
    """Let fused operators stand in for layers, in a worker whose model isn't made yet.

    Parameters
    ----------
    vllm_config
        The engine's config. It is changed: afterwards it says which operators are used.
    log
        Is called with one line for each operator that was asked for and isn't used because
        torch_npu or CANN lacks it.
    is_right
        Takes a switch and the model's dtype, and returns whether the device computes the operator
        rightly; it logs a line if not. With None all operators are trusted.
    """
    import torch

    from vllm_npu_prep.config import fused_operators
    from vllm_npu_prep.ops.npu.switches import missing_operators, use_only

    names = fused_operators(vllm_config)
    if not names:
        return
    missing = missing_operators(names)
    for name, why in missing.items():
        log(f"fused operator {name} is switched off: {why}")
    names -= missing.keys()
    if is_right is not None:
        dtype = vllm_config.model_config.dtype
        assert isinstance(dtype, torch.dtype)  # resolved by now
        names = frozenset(name for name in sorted(names) if is_right(name, dtype))
    use_only(vllm_config, names)
    _prefer_in_ir(names)
    _register_layers()


def models_of(model: "nn.Module", drafter: Any) -> "list[nn.Module]":
    """Return a runner's model and, if it has one, its drafter's: layers of both are alike."""
    from torch import nn

    drafting = getattr(drafter, "model", None)
    return [model, drafting] if isinstance(drafting, nn.Module) else [model]


def replace_modules(model: "nn.Module", vllm_config: "VllmConfig") -> None:
    """Let fused operators stand in for modules of a loaded model for which vLLM has no hook."""
    from vllm_npu_prep.config import fused_operators
    from vllm_npu_prep.ops.npu.latent import keep_weights_contiguous
    from vllm_npu_prep.ops.npu.rotary import replace_long_rotary
    from vllm_npu_prep.ops.npu.router_norms import cast_for_routers
    from vllm_npu_prep.ops.npu.routing import replace_routers
    from vllm_npu_prep.ops.npu.shared_experts import join_gates

    switches = fused_operators(vllm_config)
    if "rotary" in switches:
        replace_long_rotary(model)
    if "latent" in switches:
        keep_weights_contiguous(model)
    replace_routers(model, switches)
    if vllm_config.lora_config is not None:  # whose layers read the inputs of gates themselves
        return
    if "add_rms_norm_cast" in switches:
        cast_for_routers(model)
    if "experts" in switches:
        join_gates(model, switches)


def _prefer_in_ir(names: frozenset[str]) -> None:
    from vllm import ir

    from vllm_npu_prep.ops.npu.norms import IMPLEMENTATIONS, IR_OPERATORS, PROVIDER

    kernels.register_ir_operators(PROVIDER, IMPLEMENTATIONS)
    for name, operator in IR_OPERATORS.items():
        ours = [PROVIDER] if name in names else []
        getattr(ir.ops, operator).set_default([*ours, "native"])


def _register_layers() -> None:
    """Register our layers for vLLM's.

    Each layer reads from its engine's config whether it is used, so one registration serves all
    engines of a process.
    """
    from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot

    from vllm_npu_prep.ops.npu import activations, latent, norms, projection, rotary, vision

    layers: list[type[Any]] = [
        norms.FusedGemmaRMSNorm,
        activations.FusedSiluAndMul,
        activations.FusedGeluAndMul,
        activations.FusedGELU,
        activations.FusedGELUTanh,
        activations.FusedNewGELU,
        activations.FusedFastGELU,
        *rotary.ROTARY.values(),
        rotary.FusedMRotaryEmbedding,
        rotary.FusedApplyRotaryEmb,
        vision.FusedMMEncoderAttention,
        projection.FusedQKVParallelLinear,
        latent.FusedMultiHeadLatentAttentionWrapper,
    ]
    for layer in layers:
        replaced = layer.__name__.removeprefix("Fused")
        if replaced not in op_registry_oot:
            kind = CustomOp if issubclass(layer, CustomOp) else PluggableLayer
            switch = layer.name  # by which users switch vLLM's layer
            kind.register_oot(layer, name=replaced)
            layer.name = switch
