"""Patches of where vLLM gets its kernels from: Triton's, its IR's, the rejection sampler's."""

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def override_triton_kernels(overrides: dict[str, Callable[..., Any]]) -> None:
    """Register replacements of Triton kernels with vLLM's dispatcher, once for each process.

    The dispatcher then looks for copies of the kernels in every attribute of every module.
    Deprecated attributes warn, and llvmlite's library object breaks the scan, because it answers to
    any name: the warnings are ignored, and llvmlite's module is hidden meanwhile.
    """
    from vllm.triton_utils import dispatcher

    new = {name: kernel for name, kernel in overrides.items() if name not in dispatcher._registry}
    if not new:
        return
    llvmlite_ffi = sys.modules.pop("llvmlite.binding.ffi", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dispatcher.register_kernels(new)
    finally:
        if llvmlite_ffi is not None:
            sys.modules["llvmlite.binding.ffi"] = llvmlite_ffi


def register_ir_operators(
    provider: str, operators: Mapping[str, tuple[Callable[..., Any], Callable[..., bool]]]
) -> None:
    """Register implementations of operators of vLLM's IR, once for each process.

    Each comes with a function that tells whether it takes given arguments; others are left to
    vLLM's own.
    """
    from vllm import ir

    for name, (implementation, takes) in operators.items():
        operator = getattr(ir.ops, name)
        if provider not in operator.impls:
            operator.register_impl(provider, supports_args=takes)(implementation)


def use_lora_layers(layers: Mapping[type[Any], type[Any]]) -> None:
    """Let layers of vLLM's that have adapters be of other classes, given by vLLM's own."""
    from vllm.lora import utils

    utils._all_lora_classes = tuple(layers.get(each, each) for each in utils._all_lora_classes)


def limit_drafts_by(limit: Callable[..., Any] | None) -> None:
    """Let the rejection sampler apply top-k and top-p by another function; None means vLLM's.

    It imports the function by name and takes no other. The function takes logits ``[num_drafts,
    vocab_size]``, k and p ``[num_drafts]`` or None, and returns the logits with -inf for tokens
    that are left out.
    """
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    rejection_sampler.apply_top_k_top_p = limit or apply_top_k_top_p
