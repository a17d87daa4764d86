"""Collectives of vLLM's process groups that torch lacks: those of pieces of different sizes.

NPUs (HCCL) and the CPU fallback (gloo) run the same code: torch's collectives on pieces that are
padded to one size, which both backends support. HCCL has uneven gathers of its own, but not on
every product and topology.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.parallel_state import (
    get_pcp_group,
    get_tensor_model_parallel_rank,
    get_world_group,
)
from vllm.forward_context import get_forward_context

from vllm_npu_prep.device.mc2 import MC2, Mc2

PADDING_IS_GATHERED = "padding_is_gathered"
"""A key in the forward context: its padding mask is that of the tokens of all ranks already."""


def union_over_ranks(items: set[int]) -> set[int]:
    """Return what any rank of the engine has, exchanged through the host; every rank has to call
    it."""
    world = get_world_group()
    if world.world_size == 1:
        return items
    gathered: list[set[int]] = [set()] * world.world_size
    dist.all_gather_object(gathered, items, group=world.cpu_group)
    return set().union(*gathered)


class NPUCommunicator(DeviceCommunicatorBase):
    """One rank of a process group.

    Under data parallelism, experts see the tokens of all ranks: tokens are gathered before the
    experts, and results are summed and scattered after them (vLLM's ``allgather_reducescatter``).
    With `mc2`, experts exchange the tokens of small steps themselves.
    """

    mc2: Mc2 | None = None
    may_exchange = True  # whether MC2 takes the experts of all models that were looked at

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenate the pieces of all ranks along dimension 0.

        Each input is this rank's piece ``[sizes[rank], ...]``, and each result is ``[sum(sizes),
        ...]``. Without `sizes`, the pieces are equal.
        """
        assert dim == 0, "vLLM gathers tokens, which come first"
        if isinstance(input_, list):
            return [self._gather_rows(each, sizes) for each in input_]
        return self._gather_rows(input_, sizes)

    def _gather_rows(self, rows: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        sizes = sizes or [len(rows)] * self.world_size
        most = max(sizes)
        gathered = rows.new_empty(self.world_size * most, *rows.shape[1:])
        dist.all_gather_single(gathered, _pad(rows, most), group=self.device_group)
        if min(sizes) == most:
            return gathered
        pieces = gathered.split(most)
        return torch.cat([piece[:size] for piece, size in zip(pieces, sizes)])

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Return this rank's piece ``[sizes[rank], ...]`` of the sum of all ranks' inputs.

        The inputs are ``[sum(sizes), ...]``. Without `sizes`, the pieces are equal.
        """
        assert dim == 0, "vLLM scatters tokens, which come first"
        sizes = sizes or [len(input_) // self.world_size] * self.world_size
        most = max(sizes)
        if min(sizes) < most:
            input_ = torch.cat([_pad(piece, most) for piece in input_.split(sizes)])
        mine = input_.new_empty(most, *input_.shape[1:])
        dist.reduce_scatter_single(mine, input_.contiguous(), group=self.device_group)
        return mine[: sizes[self.rank_in_group]]

    def dispatch_router_logits(
        self,
        hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        router_logits: torch.Tensor,  # [num_tokens, num_experts]
        is_sequence_parallel: bool = False,
        *args: Any,
    ) -> Any:
        """Gather tokens and their router logits from all ranks, as ``AgRsAll2AllManager`` does.

        Where experts exchange the tokens themselves, each rank keeps its own, as many as the rank
        with the most tokens has. The padding mask of the forward pass becomes that of the result.
        """
        group, sizes = self._parts(len(hidden_states), is_sequence_parallel)
        if self.mc2 is not None and (most := max(sizes)) <= self.mc2.max_tokens:
            self._exchange(self.mc2, len(hidden_states), most, is_sequence_parallel)
            return _pad(hidden_states, most), _pad(router_logits, most)
        _gather_padding(group, sizes, is_sequence_parallel)
        manager: Any = self.all2all_manager
        return manager.dispatch_router_logits(
            hidden_states, router_logits, is_sequence_parallel, *args
        )

    def _parts(self, num_tokens: int, is_sequence_parallel: bool = False) -> tuple[Any, list[int]]:
        """Return the group whose ranks have tokens for experts, and how many each of them has."""
        manager: Any = self.all2all_manager
        group = manager._get_comm_group(is_sequence_parallel)
        return group, manager._get_sizes(num_tokens, group)

    def _exchange(self, mc2: Mc2, num_tokens: int, most: int, is_sequence_parallel: bool) -> None:
        """Tell the experts of this forward pass that they exchange tokens, once."""
        context = get_forward_context()
        if MC2 in context.additional_kwargs:
            return
        active = None
        if context.is_padding is not None:
            mine = _own_padding(context.is_padding, num_tokens, is_sequence_parallel)
            context.is_padding = functional.pad(mine, (0, most - num_tokens), value=True)
            active = context.is_padding.logical_not()
        elif num_tokens < most:
            active = torch.arange(most, device=self.device) < num_tokens
        context.additional_kwargs[MC2] = replace(mc2, active=active)

    def combine(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert self.all2all_manager is not None
        if MC2 in get_forward_context().additional_kwargs:  # experts have combined them
            group, sizes = self._parts(len(hidden_states), *args, **kwargs)
            return hidden_states[: sizes[group.rank_in_group]]
        return self.all2all_manager.combine(hidden_states, *args, **kwargs)


def gather_shared_prompts(
    hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
    router_logits: torch.Tensor,  # [num_tokens, num_experts]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather tokens and their router logits from the ranks that share prompts.

    vLLM does the same, unless experts belong to one rank each: then it leaves the gathering to
    kernels. It does not gather the padding mask, which here becomes that of the gathered tokens.
    """
    group: Any = get_pcp_group()
    _gather_padding(group, [len(hidden_states)] * group.world_size)
    return group.all_gather(hidden_states, dim=0), group.all_gather(router_logits, dim=0)


def scatter_shared_prompts(hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the sum over ranks that share prompts, ``[num_tokens, hidden_size]`` of this rank.

    `hidden_states` are what the experts of this rank add to the tokens of all of them.
    """
    scattered: torch.Tensor = get_pcp_group().reduce_scatter(hidden_states, dim=0)
    return scattered


def _gather_padding(group: Any, sizes: list[int], is_sequence_parallel: bool = False) -> None:
    """Gather the padding masks of a group's ranks, once per forward pass: in its first such layer.

    `sizes` has the tokens of each rank that its experts get, as the collectives after this have.
    """
    context = get_forward_context()
    kept = context.additional_kwargs
    if context.is_padding is None or PADDING_IS_GATHERED in kept:  # the same on all ranks
        return
    mine = _own_padding(context.is_padding, sizes[group.rank_in_group], is_sequence_parallel)
    gathered = group.all_gatherv(mine.view(torch.uint8), dim=0, sizes=sizes)  # not of bool
    context.is_padding = gathered.view(torch.bool)
    kept[PADDING_IS_GATHERED] = True


def _own_padding(
    is_padding: torch.Tensor, num_tokens: int, is_sequence_parallel: bool
) -> torch.Tensor:
    """Return which of the `num_tokens` tokens that this rank passes to experts are padding.

    With sequence parallelism these are a part of the step: tensor-parallel ranks divide its tokens
    into equal parts, the last of which is padded.
    """
    if not is_sequence_parallel:
        return is_padding[:num_tokens]
    start = get_tensor_model_parallel_rank() * num_tokens
    mine = is_padding[start : start + num_tokens]
    return functional.pad(mine, (0, num_tokens - len(mine)), value=True)


def _pad(rows: torch.Tensor, length: int) -> torch.Tensor:
    if len(rows) == length:
        return rows.contiguous()
    return functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, length - len(rows)))
