"""Stands in for the Triton kernel by which routers map logical to physical experts (EPLB)."""

from collections.abc import MutableMapping
from typing import Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

KNUTH_MULTIPLIER = 2654435769
"""The kernel's: the integer next to 2**32 divided by the golden ratio."""

NO_EXPERT = -1

HASHES = "eplb_hashes"
"""Key under which a forward pass keeps the result of `_hashes`."""


def _hashes(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return a number for each row, int64 ``[num_tokens, 1]``, which chooses among replicas.

    It is made once in a forward pass.
    """
    kept: MutableMapping[Any, torch.Tensor] = {}
    if is_forward_context_available():
        kept = get_forward_context().additional_kwargs.setdefault(HASHES, {})
    if num_tokens not in kept:
        rows = torch.arange(num_tokens, device=device)
        kept[num_tokens] = (rows * KNUTH_MULTIPLIER).bitwise_and(0xFFFFFFFF)[:, None]
    return kept[num_tokens]


def map_to_physical_and_record(
    topk_ids: torch.Tensor,  # [T, k] integer, logical; -1 or num_logical for none
    expert_load_view: torch.Tensor,  # int32 [num_physical], added to
    logical_to_physical_map: torch.Tensor,  # int64 [num_logical, slots], -1 past the replicas
    logical_replica_count: torch.Tensor,  # int64 [num_logical], 1 or more (`EplbState`)
    record_enabled: torch.Tensor,  # bool []
    num_unpadded_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return physical ids in the shape and dtype of `topk_ids`, -1 for none; count their tokens.

    A row takes the replica that its number hashes to, on all ranks the same. Nothing is counted
    for pairs without an expert, which padding has. `num_unpadded_tokens` counts this rank's own
    tokens, but under data parallelism the rows are those of all ranks: it is not read.
    """
    del num_unpadded_tokens
    clamped = topk_ids.clamp(0, len(logical_replica_count) - 1)
    is_pair, logical = clamped == topk_ids, clamped.long()
    replica = _hashes(len(topk_ids), topk_ids.device) % logical_replica_count[logical]
    physical = logical_to_physical_map[logical, replica]
    is_counted = is_pair & record_enabled
    expert_load_view.scatter_add_(
        0, physical.flatten(), is_counted.flatten().to(expert_load_view.dtype)
    )
    return physical.masked_fill_(~is_pair, NO_EXPERT).to(topk_ids.dtype)
