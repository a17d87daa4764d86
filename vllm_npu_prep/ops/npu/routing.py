"""Routers whose choice of experts is one operator of torch_npu.

vLLM has no hook for routers, so those of a loaded model, and of its drafter, are replaced. A router
that no operator computes stays vLLM's. Padding tokens get no expert either way.
"""

from collections.abc import Collection, MutableMapping
from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from vllm_npu_prep.errors import PrepError

MAX_EXPERTS = 2048
MAX_TOP_K = 1024
GROUP_MULTIPLE = 32
"""The operator pads groups of experts to a multiple of this; all together have at most
`MAX_EXPERTS`."""

SOFTMAX, SIGMOID = 0, 1
"""``norm_type``: how logits become scores."""


def padding_mask(num_tokens: int) -> torch.Tensor | None:
    """Return which tokens of this step are padding, bool ``[num_tokens]``; None if none can be."""
    if not envs.VLLM_MOE_SKIP_PADDING or not is_forward_context_available():
        return None
    is_padding = get_forward_context().is_padding
    if is_padding is None or len(is_padding) < num_tokens:
        return None  # with prefill context parallelism they are the tokens of all ranks
    return is_padding[:num_tokens]


NO_EXPERT = -1
"""Id that a padding token gets in place of an expert's."""

ANY = 0x7FFFFFFF
"""The largest int32, a limit that changes no value: the minimum of it and an id is the id."""

OF_PADDING = "padding_of_pairs"
"""Key under which a forward pass keeps the result of `_pairs_of_padding`."""


def _pairs_of_padding(is_padding: torch.Tensor, top_k: int) -> list[torch.Tensor]:
    """Return upper limits of the pairs' ids and weights, which are made once in a forward pass.

    Both are int32 ``[T, top_k]``, the second for the bits of float32 weights. The limits of a
    padding token are `NO_EXPERT` and 0, those of another token are `ANY`.
    """
    kept: MutableMapping[Any, list[torch.Tensor]]
    kept = get_forward_context().additional_kwargs.setdefault(OF_PADDING, {})
    key = len(is_padding), top_k
    if key not in kept:
        limits = torch.full((2, *key), ANY, dtype=torch.int32, device=is_padding.device)
        limits[0].masked_fill_(is_padding[:, None], NO_EXPERT)
        limits[1].masked_fill_(is_padding[:, None], 0)
        kept[key] = list(limits)
    return kept[key]


class _Router(BaseRouter):
    """A router that stands in for one of vLLM's, whose settings it keeps."""

    def __init__(self, router: BaseRouter) -> None:
        super().__init__(router.top_k, router.global_num_experts, router.eplb_state)
        self.router = router

    @property
    def routing_method_type(self) -> Any:
        return self.router.routing_method_type


class SoftmaxRouter(_Router):
    """Top-k of a softmax; padding tokens get the id ``num_experts``.

    With `renormalize`, a token's weights sum to 1: they are the softmax of the k largest logits.
    """

    def __init__(self, router: BaseRouter, renormalize: bool) -> None:
        super().__init__(router)
        self.renormalize = renormalize

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,  # [T, num_experts]
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del hidden_states, indices_type, input_ids
        weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k_softmax_v2(
            router_logits,
            k=self.top_k,
            finished=padding_mask(len(router_logits)),
            renorm=int(self.renormalize),
        )
        return weights, ids


class GatingRouter(_Router):
    """Top-k by sigmoid or softmax, with a bias and groups; padding gets the id `NO_EXPERT`.

    vLLM's ``e_score_correction_bias`` is read at each call, for it may be loaded later. If
    `padding_has_weight` is False, the sum of experts reads nothing for padding.

    Parameters
    ----------
    norm_type
        `SOFTMAX` or `SIGMOID`. The operator divides a sigmoid's weights by their sum.
    groups
        Number of groups of experts, and how many of them a token may choose from.
    factor
        Factor by which all weights are multiplied.
    """

    def __init__(
        self,
        router: BaseRouter,
        norm_type: int,
        groups: tuple[int, int] = (1, 1),
        factor: float = 1.0,
    ) -> None:
        super().__init__(router)
        self.norm_type = norm_type
        self.groups = groups
        self.factor = factor
        self.padding_has_weight = True

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,  # [T, num_experts]
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights in the wider dtype of logits and bias, and int32 ids, ``[T, k]`` each."""
        del hidden_states, indices_type, input_ids
        bias = getattr(self.router, "e_score_correction_bias", None)
        if bias is not None and bias.dtype != router_logits.dtype:
            # Its precision decides which experts are chosen.
            wider = torch.promote_types(bias.dtype, router_logits.dtype)
            router_logits, bias = router_logits.to(wider), bias.to(wider)
        number, kept = self.groups
        weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
            router_logits,
            self.top_k,
            bias=bias,
            k_group=kept,
            group_count=number,
            group_select_mode=int(bias is not None),  # by the two best, or by the best
            norm_type=self.norm_type,
            routed_scaling_factor=self.factor,
        )
        is_padding = padding_mask(len(ids))
        if is_padding is not None:
            self._leave_out(is_padding, weights, ids)
        return weights, ids

    def _leave_out(
        self, is_padding: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """Take the experts of padding away, in one launch.

        ``_foreach_minimum_`` changes ids and weights in one launch (``aclnnForeachMinimumList``,
        int32 among its dtypes): the bits of floats that aren't negative are ordered as the floats
        are.
        """
        if not self.padding_has_weight and weights.dtype == torch.float32:
            limits = _pairs_of_padding(is_padding, self.top_k)
            torch._foreach_minimum_([ids, weights.view(torch.int32)], limits)
            return
        ids.masked_fill_(is_padding[:, None], NO_EXPERT)
        if not self.padding_has_weight:
            weights.masked_fill_(is_padding[:, None], 0)


class MaskedRouter(_Router):
    """vLLM's choice with the id `NO_EXPERT` for padding, which some of its routers give experts."""

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self.router._compute_routing(
            hidden_states, router_logits, indices_type, input_ids=input_ids
        )
        is_padding = padding_mask(len(ids))
        if is_padding is None:
            return weights, ids
        return weights, ids.masked_fill(is_padding[:, None], NO_EXPERT)


def fused_router(router: Any, switches: Collection[str]) -> Any:
    """Return the router to use in place of vLLM's; it may be vLLM's own."""
    found = _by_operator(router, switches)
    if found is not None:
        return found
    masks = type(router) in (FusedTopKRouter, FusedTopKBiasRouter)  # by vLLM's own operators
    return MaskedRouter(router) if isinstance(router, BaseRouter) and not masks else router


def _by_operator(router: Any, switches: Collection[str]) -> _Router | None:
    kind = type(router)
    if kind not in (FusedTopKRouter, FusedTopKBiasRouter, GroupedTopKRouter):
        return None  # subclasses may choose otherwise
    is_sigmoid = router.scoring_func == "sigmoid"
    if not is_sigmoid and router.scoring_func != "softmax":
        return None
    if kind is FusedTopKRouter and not is_sigmoid:
        fits = "gating_softmax" in switches and router.top_k <= MAX_TOP_K
        return SoftmaxRouter(router, router.renormalize) if fits else None
    # The operator divides weights of a sigmoid by their sum, and those of a softmax never.
    if "gating" not in switches or is_sigmoid != bool(router.renormalize):
        return None
    num_experts = _num_logits(router)
    if getattr(router, "num_fused_shared_experts", 0) or num_experts > MAX_EXPERTS:
        return None
    norm_type = SIGMOID if is_sigmoid else SOFTMAX
    if kind is FusedTopKRouter:
        return GatingRouter(router, norm_type)
    if kind is FusedTopKBiasRouter:
        is_plain = router._hash_indices_table is None and router.bias_vl is None
        factor = router.routed_scaling_factor
        return GatingRouter(router, norm_type, factor=factor) if is_plain else None
    groups = (router.num_expert_group, router.topk_group)
    if not _takes_groups(num_experts, router.top_k, *groups):
        return None
    return GatingRouter(router, norm_type, groups, router.routed_scaling_factor)


def _num_logits(router: BaseRouter) -> int:
    """Return how many experts a router chooses from: redundant ones (EPLB) are copies of these."""
    counts = None if router.eplb_state is None else router.eplb_state.logical_replica_count
    return router.global_num_experts if counts is None else len(counts)


def _takes_groups(experts: int, top_k: int, number: int, kept: int) -> bool:
    """Return whether the operator takes such groups; ``operators.md`` lists its demands."""
    if number < 1 or experts % number or not 1 <= kept <= number:
        return False
    size = experts // number
    padded = number * -(-size // GROUP_MULTIPLE) * GROUP_MULTIPLE
    return size > 2 and padded <= MAX_EXPERTS and top_k <= kept * size


def refuse_routers(model: nn.Module) -> None:
    """Refuse a model, made but not loaded, that has experts that compute nothing.

    vLLM's router adds them up itself, by a kernel of Triton.
    """
    for name, module in model.named_modules():
        if isinstance(module, MoERunner) and isinstance(module.router, ZeroExpertRouter):
            raise PrepError(
                f"experts that compute nothing ({name}) are not supported by vllm_npu_prep: the "
                "kernel of Triton that adds them up is not replaced; use another model"
            )


def replace_routers(model: nn.Module, switches: Collection[str]) -> None:
    for module in model.modules():
        if isinstance(module, MoERunner):
            module.router = fused_router(module.router, switches)
            _take_factor(module)
            _weigh_no_padding(module)


def _take_factor(runner: MoERunner) -> None:
    """Let a router apply the factor of its layer's output, which saves a launch.

    In float16 vLLM divides the output of shared experts by the factor instead, and its decoder
    layers make up for that: such layers are left alone.
    """
    router, factor = runner.router, runner.routed_scaling_factor
    divides = runner.moe_config.in_dtype == torch.float16 and runner.shared_experts is not None
    if isinstance(router, GatingRouter) and factor != 1.0 and not divides:
        router.factor *= factor
        runner.routed_scaling_factor = 1.0


def _weigh_no_padding(runner: MoERunner) -> None:
    """Let a router give padding no weight where that saves the sum of experts a launch.

    A sum that skips pairs without a row needs no such weights. Where other ranks have experts,
    pairs of tokens that are no padding lack a row as well, so the launch is needed anyway.
    """
    layer: Any = runner.routed_experts
    grouped = getattr(layer.quant_method, "grouped", None)
    if grouped is None or grouped.is_final or not grouped.owned.is_all:
        return
    if grouped.apply_router_weight_on_input:
        return
    if isinstance(runner.router, GatingRouter):
        runner.router.padding_has_weight = layer.padding_has_weight = False
