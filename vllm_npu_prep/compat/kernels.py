"""Patches of where vLLM gets its kernels from (Triton's, its IR's, the rejection sampler's), and of
whose tokens those of experts get.
"""

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from vllm_npu_prep.compat.patches import instead_of


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


def exchange_shared_prompts_by(
    gather: Callable[..., tuple[Any, Any]], scatter: Callable[[Any], Any]
) -> None:
    """Let ranks that share prompts exchange the tokens of experts by two functions.

    `gather` takes the tokens and router logits of a rank and returns those of all ranks, which are
    what its experts get; `scatter` takes what they make of them. The engine has neither
    data-parallel ranks nor tokens that tensor-parallel ones divide.
    """
    from vllm.model_executor.layers.fused_moe import MoERunner

    @instead_of(MoERunner, "_maybe_dispatch")
    def dispatch(
        upstream: Any, self: MoERunner, hidden_states: Any, router_logits: Any
    ) -> tuple[Any, Any]:
        if self.moe_config.pcp_size == 1:
            dispatched: tuple[Any, Any] = upstream(self, hidden_states, router_logits)
            return dispatched
        return gather(hidden_states, router_logits)

    @instead_of(MoERunner, "_maybe_combine")
    def combine(upstream: Any, self: MoERunner, shared_output: Any, hidden_states: Any) -> Any:
        if self.moe_config.pcp_size == 1:
            return upstream(self, shared_output, hidden_states)
        own = scatter(hidden_states)
        return own if self.shared_experts is None else (shared_output, own)


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
