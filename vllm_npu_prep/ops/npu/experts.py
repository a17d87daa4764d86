"""Mixture of experts by torch_npu's grouped products: no shape depends on data, nothing is synced.

Pairs of token and expert are sorted by expert on the device, and each expert multiplies its rows in
one product that serves all experts. How many rows an expert gets stays on the device, so a graph
may contain all of it. Rows past the last pair of this rank's experts are undefined: nothing of them
may reach a result.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from vllm_npu_prep.errors import PrepError

ROWS_GROUPED = 0
"""``group_type`` of the grouped product in which each group of rows has a weight of its own."""

ENDS, SIZES = 0, 1
"""``group_list_type``: whether the group list holds each group's end or its size."""

ONE_OUTPUT = 2
"""``split_item`` with which all groups write to one tensor."""

UNQUANTISED = -1
"""``quant_mode`` of routing that copies rows as they are."""

PAST_ANY_ROW = 0x7FFFFFFF
"""Mask that turns -1, the index of a pair without a row, into an index past the end of any
tensor."""

SOME_WITHOUT_ROW = 3
"""``drop_pad_mode`` with which a pair may lack a row, and pairs of a token lie side by side."""

FINALIZED = (torch.bfloat16, torch.float32)
"""Dtypes whose rows `npu_moe_finalize_routing` adds in float32; it adds float16 in float16."""

MAX_FINALIZED_WIDTH = 8192
"""Longer rows are cut, and kernels of CANN 8.5 then lose a row of tokens with four experts."""


class Rows(NamedTuple):
    """Rows of tokens, sorted by expert: those of this rank's first expert come first.

    There are ``T * k`` after routing, and as many as may be received after an exchange.

    Attributes
    ----------
    group_list_type
        `SIZES`, or `ENDS` if there is one expert, where both are the same number: the operator
        takes a single group in this form only.
    """

    values: torch.Tensor  # [n, width]; rows past the last group are undefined
    # Number of rows of each expert, int64 [num_local_experts] on the device
    group_list: torch.Tensor
    group_list_type: int
    # Float32 [n] if rows were rounded on their way here, else None
    scales: torch.Tensor | None = None


Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes rows ``[n, width]`` and weights ``[num_local_experts, columns, width]``, or one weight for
all experts, and returns each row times its expert's weight, ``[n, columns]``."""


class ExpertWeights(Protocol):
    """Weights of a layer's experts in one format, and how rows are multiplied by them."""

    @property
    def quant_mode(self) -> int:
        """How routing quantises rows: ``quant_mode`` of ``npu_moe_init_routing_v2``."""

    @property
    def activate(self) -> "Activate":
        """What is computed between the products, of a whole row, gated or not."""

    def up(self, rows: Rows) -> torch.Tensor:
        """Return the first product, ``[n, columns]``, undefined past the last group."""

    def between(self, rows: Rows, hidden: torch.Tensor) -> Rows:
        """Activate and round the first product of `rows`, in as few launches as there can be."""

    def rounded(self, rows: Rows, activated: torch.Tensor) -> Rows:
        """Round what was activated, as the second product takes it."""

    def down(self, rows: Rows) -> torch.Tensor:
        """Return the second product, ``[n, hidden_size]``, undefined past the last group."""


class ExpertAdapters(Protocol):
    """LoRA adapters of a layer's experts."""

    @property
    def is_active(self) -> bool:
        """Whether a token of this step has an adapter."""

    @property
    def foreign(self) -> torch.Tensor:
        """Where a LoRA slot is not the token's own, bool ``[T or more, num_slots, 1]``."""

    def add_up(
        self,
        hidden: torch.Tensor,  # [n, columns], written
        x: torch.Tensor,  # [n, hidden_size]
        multiply: Multiply,
        foreign: torch.Tensor,  # [n, num_slots, 1] bool: of each row
    ) -> None:
        """Add each row's update to the first product."""

    def add_down(
        self,
        output: torch.Tensor,  # [n, hidden_size], written
        activated: torch.Tensor,  # [n, inner]
        multiply: Multiply,
        foreign: torch.Tensor,  # [n, num_slots, 1] bool: of each row
    ) -> None:
        """Add each row's update to the second product."""


def grouped_product(rows: Rows, weight: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Multiply the rows of each group by its weight, in one launch.

    The weight is ``[num_local_experts, width, n]``, contiguous or a transposed view. Further
    arguments of ``npu_grouped_matmul`` are scales of quantised weights.
    """
    return torch.ops.npu.npu_grouped_matmul(
        [rows.values],
        [weight],
        group_list=rows.group_list,
        group_list_type=rows.group_list_type,
        group_type=ROWS_GROUPED,
        split_item=ONE_OUTPUT,
        **arguments,
    )[0]


Activate = Callable[[torch.Tensor], torch.Tensor]

ONE_LAUNCH: Mapping[MoEActivation, tuple[str, Activate]] = {
    MoEActivation.SILU: ("swiglu", lambda x: torch.ops.npu.npu_swiglu(x, -1)),
    MoEActivation.GELU: (
        "geglu",
        lambda x: torch.ops.npu.npu_geglu(x, -1, 0, activate_left=True)[0],
    ),
    MoEActivation.GELU_TANH: (
        "geglu",
        lambda x: torch.ops.npu.npu_geglu(x, -1, 1, activate_left=True)[0],
    ),
}
"""Gated activations that an operator computes in one launch, each with the switch that allows
it."""


class UnquantisedExperts:
    """Experts with bfloat16 or float16 weights, as vLLM loads them.

    vLLM's `layer` has ``w13_weight`` ``[num_local_experts, 2 * inner, hidden]`` and ``w2_weight``
    ``[num_local_experts, hidden, inner]``. They are read at each call: a reload may replace them.
    `activate` takes the whole row, gated or not.
    """

    quant_mode = UNQUANTISED

    def __init__(self, layer: Any, activate: Activate) -> None:
        self.layer = layer
        self.activate = activate

    def up(self, rows: Rows) -> torch.Tensor:
        return grouped_product(rows, self.layer.w13_weight.transpose(1, 2))

    def between(self, rows: Rows, hidden: torch.Tensor) -> Rows:
        return self.rounded(rows, self.activate(hidden))

    def rounded(self, rows: Rows, activated: torch.Tensor) -> Rows:
        return rows._replace(values=activated)

    def down(self, rows: Rows) -> torch.Tensor:
        return grouped_product(rows, self.layer.w2_weight.transpose(1, 2))


@dataclass(frozen=True)
class OwnedExperts:
    """The experts of this rank, by the numbers that routing gets.

    Attributes
    ----------
    num_experts
        Experts of all ranks. As an id it means no expert, as -1 does.
    start, end
        This rank's experts have the ids ``start <= id < end``.
    numbers
        New id of each id, int32 ``[num_experts + 1]`` on the device, if this rank's experts are
        scattered; the last entry is for the ids that mean no expert, -1 and `num_experts`. None if
        ids stay.
    """

    num_experts: int
    start: int
    end: int
    numbers: torch.Tensor | None = None

    @property
    def is_all(self) -> bool:
        return self.numbers is None and self.end - self.start == self.num_experts

    @classmethod
    def of(cls, expert_map: torch.Tensor | None, num_experts: int) -> "OwnedExperts":
        """Read vLLM's map once, when weights have been loaded.

        The map has each expert's number on this rank, -1 for experts of other ranks; it is None if
        all are here.

        Raises
        ------
        PrepError
            If the map doesn't number this rank's experts from 0 on.
        """
        if expert_map is None:
            return cls(num_experts, 0, num_experts)
        numbers = expert_map.tolist()
        mine = sorted((number, expert) for expert, number in enumerate(numbers) if number >= 0)
        count = len(mine)
        if [number for number, _ in mine] != list(range(count)) or len(numbers) != num_experts:
            raise PrepError(
                f"the map of experts to this rank, {numbers}, must number the rank's experts from "
                f"0 on and cover {num_experts} experts"
            )
        experts = [expert for _, expert in mine]
        start = experts[0] if experts else 0
        if count and experts == list(range(start, start + count)):
            return cls(num_experts, start, start + count)
        nobody = num_experts
        renumbered = [number if number >= 0 else nobody for number in numbers]
        table = torch.tensor([*renumbered, nobody], dtype=torch.int32, device=expert_map.device)
        return cls(num_experts, 0, max(count, 1), table)

    def number(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Return the ids by which routing sorts, int32 ``[T, k]``."""
        return topk_ids if self.numbers is None else self.numbers[topk_ids]


def can_finalize(dtype: torch.dtype, hidden_size: int) -> bool:
    """Return whether `npu_moe_finalize_routing` adds the rows of such a layer rightly.

    The limits were read in cann/ops-transformer (``moe_finalize_routing_v2``, October 2025): its
    kernels for float16, and the one that cuts rows of tokens with four experts, with its tiling.
    """
    return dtype in FINALIZED and hidden_size <= MAX_FINALIZED_WIDTH


def finalize(
    rows: torch.Tensor,  # [T * k, hidden_size]
    weights: torch.Tensor | None,  # [T, k]; None: 1, and k is 1
    row_of_pair: torch.Tensor,  # int32 [T * k], -1 for a pair without a row
) -> torch.Tensor:
    """Add each token's rows to ``[T, hidden_size]`` in one launch; a pair without a row adds none.

    The operator allows -1 for rows of experts with a capacity, ``[E, C, H]``. Here each row belongs
    to an expert with a capacity of 1, as in sgl-project/sglang 40705, which was tried on cards.
    """
    return torch.ops.npu.npu_moe_finalize_routing(
        rows[:, None],
        skip1=None,
        skip2=None,
        bias=None,
        scales=weights,
        expanded_src_to_dst_row=row_of_pair,
        export_for_source_row=None,
        drop_pad_mode=SOME_WITHOUT_ROW,
    )


def compute_experts(
    x: torch.Tensor,  # [T, hidden_size]
    topk_weights: torch.Tensor,  # [T, k]
    topk_ids: torch.Tensor,  # [T, k] int32; -1 or num_experts for none
    owned: OwnedExperts,
    weights: ExpertWeights,
    *,
    has_padding: bool,
    is_final: bool,
    apply_router_weight_on_input: bool = False,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """Add the outputs of each token's experts on this rank, weighted by the router.

    There are five launches: routing, product, activation, product, sum. Two more come where they
    are needed: renumbering of scattered experts and, without `is_final`, indices of pairs without a
    row. `adapters` take more, `tests/npu/on_device/test_expert_adapters.py` counts them.

    Parameters
    ----------
    has_padding
        Whether there may be tokens without an expert that have a weight. The sum doesn't read the
        row of a pair whose weight is zero.
    is_final
        Whether the sum is ``npu_moe_finalize_routing``'s, which skips pairs without a row (see
        `can_finalize`). Otherwise it is ``npu_moe_token_unpermute``'s.
    apply_router_weight_on_input
        Whether weights are applied to the inputs of experts instead of their outputs; a token has
        one expert then.
    adapters
        LoRA adapters, or None if no token has one.

    Returns
    -------
    torch.Tensor
        ``[T, hidden_size]`` in the dtype of `x`. Sums are kept in float32 and rounded once. A token
        without an expert on this rank gets zeros.
    """
    if not len(x):
        return torch.zeros_like(x)
    ids = owned.number(topk_ids)
    if apply_router_weight_on_input:
        x = x * topk_weights.to(x.dtype)
    values, row_of_pair, sizes, scales = _route(x, ids, owned, weights.quant_mode)
    list_type = SIZES if owned.end - owned.start > 1 else ENDS
    is_quantised = weights.quant_mode != UNQUANTISED
    rows = Rows(values, sizes, list_type, scales if is_quantised else None)
    hidden = weights.up(rows)
    if adapters is None:
        output = weights.down(weights.between(rows, hidden))
    else:
        # Each row's mask goes where the row goes, in int8, which routing takes.
        masks = adapters.foreign[: len(x), :, 0].view(torch.int8)
        foreign = _route(masks, ids, owned)[0].view(torch.bool)[..., None]
        of_adapters = partial(_product_of_adapters, rows)
        plain = _route(x, ids, owned)[0] if is_quantised else values
        adapters.add_up(hidden, plain, of_adapters, foreign)
        activated = weights.activate(hidden)
        output = weights.down(weights.rounded(rows, activated))
        adapters.add_down(output, activated, of_adapters, foreign)
    probabilities = None if apply_router_weight_on_input else topk_weights
    if is_final:
        return finalize(output, probabilities, row_of_pair)
    if has_padding or not owned.is_all:
        # -1 would be read as a row before the first one; past the last one nothing is read.
        row_of_pair = row_of_pair.bitwise_and(PAST_ANY_ROW)
    return torch.ops.npu.npu_moe_token_unpermute(output, row_of_pair, probs=probabilities)


def _route(
    x: torch.Tensor,  # [T, width]
    ids: torch.Tensor,  # [T, k] int32
    owned: OwnedExperts,
    quant_mode: int = UNQUANTISED,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows by expert, the row of each pair, the sizes of groups, and the rows' scales."""
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = (
        torch.ops.npu.npu_moe_init_routing_v2(
            x,
            ids,
            active_num=ids.numel(),
            # One more expert than there are: padding's id must not be above it, and the active
            # range must not be the whole, because kernels would then take every pair as active.
            expert_num=owned.num_experts + 1,
            expert_tokens_num_type=SIZES,
            expert_tokens_num_flag=True,
            quant_mode=quant_mode,
            active_expert_range=[owned.start, owned.end],
        )
    )
    return results


def _product_of_adapters(rows: Rows, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows of `x` times their expert's weight; the groups are those of `rows`."""
    if len(weight) == 1:  # of all experts
        return x @ weight[0].t()
    return grouped_product(rows._replace(values=x), weight.transpose(1, 2))


UNROUNDED, ROUNDED = 0, 2
"""``quant_mode`` of the exchange: rows as they are, or int8 with a scale for each row."""


def exchange_of_pass() -> Any:
    """Return with whom this forward pass exchanges its tokens (`device.mc2.Mc2`); None if this
    rank's experts compute what they are given."""
    if not is_forward_context_available():
        return None
    return get_forward_context().additional_kwargs.get("mc2")


def compute_on_ranks(
    x: torch.Tensor,  # [T, hidden_size], this rank's tokens
    topk_weights: torch.Tensor,  # [T, k]
    topk_ids: torch.Tensor,  # [T, k] int32; of tokens without experts anything
    num_experts: int,
    ranks: Any,
    weights: ExpertWeights,
    *,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    """Add the outputs of each token's experts, on whichever rank they are.

    There are five launches, all ranks' at once: tokens go to the ranks of their experts, product,
    activation, product, and the results come back and are added. Every rank has the same number of
    tokens. A token that ``ranks.active`` leaves out goes to no expert, and its result is undefined.

    Parameters
    ----------
    num_experts
        Experts of all ranks, the same number of them on each, in the order of ranks.
    ranks
        With whom tokens are exchanged, as `exchange_of_pass` returns it.

    Returns
    -------
    torch.Tensor
        ``[T, hidden_size]`` in the dtype of `x`.
    """
    if apply_router_weight_on_input:
        x = x * topk_weights.to(x.dtype)
        topk_weights = torch.ones_like(topk_weights)
    is_rounded = weights.quant_mode != UNQUANTISED
    where = {
        "group_ep": ranks.group,
        "ep_world_size": ranks.num_ranks,
        "ep_rank_id": ranks.rank,
        "moe_expert_num": num_experts,
        "x_active_mask": ranks.active,
        "comm_alg": ranks.comm_alg,
    }
    values, scales, assist, sizes, counts, _, expand_scales = (
        torch.ops.npu.npu_moe_distribute_dispatch_v2(
            x, topk_ids, quant_mode=ROUNDED if is_rounded else UNROUNDED, **where
        )
    )
    list_type = SIZES if len(sizes) > 1 else ENDS
    rows = Rows(values, sizes, list_type, scales if is_rounded else None)
    return torch.ops.npu.npu_moe_distribute_combine_v2(
        weights.down(weights.between(rows, weights.up(rows))),
        topk_ids,
        assist,
        counts,
        topk_weights.float(),
        expand_scales=expand_scales,
        **where,
    )


def add_gated(
    routed: torch.Tensor,  # [T, hidden_size]
    shared: torch.Tensor,  # [T, hidden_size]
    gate: torch.Tensor,  # [T, 1]
) -> torch.Tensor:
    """Add the shared experts' output times the sigmoid of its gate to the routed experts' sum.

    These are two launches: ``aclnnAddcmul`` broadcasts inside of its kernel (cann/ops-math 9.1.0,
    `math/addcmul/op_api/aclnn_addcmul.cpp`).
    """
    return torch.addcmul(routed, shared, gate.sigmoid())
