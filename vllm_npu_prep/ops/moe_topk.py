"""Top-k routing in torch: the two operators of ``vllm._moe_C`` that vLLM's routers call.

In vLLM these two are compiled kernels, which a build for NPUs lacks; its grouped top-k and its
custom routing functions are written in torch already.
"""

import torch

_LIBRARY = torch.library.Library("_moe_C", "FRAGMENT")  # operators live as long as this object


def topk_softmax(
    topk_weights: torch.Tensor,  # [T, k] float32, written
    topk_indices: torch.Tensor,  # [T, k] integer, written
    token_expert_indices: torch.Tensor,  # [T, k]: routers drop it, it stays as it is
    gating_output: torch.Tensor,  # [T, num_experts]
    renormalize: bool,
    bias: torch.Tensor | None,  # [num_experts]
    is_padding: torch.Tensor | None,  # [T] bool
) -> None:
    del token_expert_indices
    scores = gating_output.float().softmax(-1)
    _select(topk_weights, topk_indices, scores, renormalize, bias, 1.0, is_padding)


def topk_sigmoid(
    topk_weights: torch.Tensor,  # [T, k] float32, written
    topk_indices: torch.Tensor,  # [T, k] integer, written
    token_expert_indices: torch.Tensor,  # [T, k]: routers drop it, it stays as it is
    gating_output: torch.Tensor,  # [T, num_experts]
    renormalize: bool,
    bias: torch.Tensor | None,  # [num_experts]
    routed_scaling_factor: float,
    is_padding: torch.Tensor | None,  # [T] bool
) -> None:
    del token_expert_indices
    scores = gating_output.float().sigmoid()
    _select(
        topk_weights, topk_indices, scores, renormalize, bias, routed_scaling_factor, is_padding
    )


def _select(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    scores: torch.Tensor,  # [T, num_experts] float32
    renormalize: bool,
    bias: torch.Tensor | None,
    routed_scaling_factor: float,
    is_padding: torch.Tensor | None,
) -> None:
    """Choose experts by score; a bias changes the choice but not the weights (DeepSeek-V3)."""
    choice = scores if bias is None else scores + bias
    chosen = choice.topk(topk_weights.shape[1]).indices
    weights = scores.gather(1, chosen)
    if renormalize:
        weights /= weights.sum(-1, keepdim=True)
    weights *= routed_scaling_factor
    if is_padding is not None:  # padding tokens get no expert
        chosen = chosen.masked_fill(is_padding[:, None], -1)
        weights = weights.masked_fill(is_padding[:, None], 0)
    topk_weights.copy_(weights)
    topk_indices.copy_(chosen)


SCHEMAS = {
    topk_softmax: (
        "(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, "
        "Tensor gating_output, bool renormalize, Tensor? bias, Tensor? is_padding) -> ()"
    ),
    topk_sigmoid: (
        "(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, "
        "Tensor gating_output, bool renormalize, Tensor? bias, float routed_scaling_factor, "
        "Tensor? is_padding) -> ()"
    ),
}
"""Schemas by operator, with arguments in the order in which ``vllm._custom_ops`` passes them."""


def register_operators() -> None:
    """Define the operators of ``vllm._moe_C``, unless the installed build has them."""
    for operator, schema in SCHEMAS.items():
        name = operator.__name__
        if not hasattr(torch.ops._moe_C, name):
            _LIBRARY.define(name + schema)
            _LIBRARY.impl(name, operator, "CompositeExplicitAutograd")
