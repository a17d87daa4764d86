"""Block tables by slot on the host, and in the order of the batch on the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_npu_prep.prep.arrays import PADDING_ROWS
from vllm_npu_prep.prep.batch import BatchTables
from vllm_npu_prep.prep.context_shards import ContextShards
from vllm_npu_prep.prep.latent import LatentSplit
from vllm_npu_prep.prep.local_attention import LocalGroups
from vllm_npu_prep.prep.mrope import MropeTables
from vllm_npu_prep.prep.states import StateGroups
from vllm_npu_prep.v2.states import SlotStates


class SlotBlockTables:
    """The block tables of all KV-cache groups; stands in for upstream's ``BlockTables``.

    Upstream keeps the device's tables by slot, and gathers the rows of a batch in each step. Here
    the device's rows are those of the batch already, and the step's one copy changes them entry by
    entry (`vllm_npu_prep.prep.fused_pass.list_block_changes`). A row is sent whole only when it
    gets another request: see `follow`.

    Parameters
    ----------
    block_sizes
        Of each group, in tokens.
    max_num_reqs
        Slots, and rows of a batch.
    max_num_batched_tokens
        Not used: slots of tokens are among a step's arrays.
    max_num_blocks_per_group
        Most blocks of a request.
    device
        Where the device's tables are.
    blocks_per_chunk
        Row lengths are multiples of this, for layers that view a row as chunks.
    **unused
        Of upstream's: for context parallelism, which the fused pass does, and which groups write
        slots.
    """

    redirect_writes_to_null_block = False

    def __init__(
        self,
        block_sizes: list[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: list[int],
        device: torch.device,
        blocks_per_chunk: int = 1,
        **unused: Any,
    ) -> None:
        self.block_sizes = np.array(block_sizes, np.int32)
        chunks = [-(-width // blocks_per_chunk) for width in max_num_blocks_per_group]
        self.max_num_blocks = np.array(chunks, np.int32) * np.int32(blocks_per_chunk)
        shape = (len(block_sizes), max_num_reqs)
        # See `vllm_npu_prep.prep.tables.BatchTables` for these.
        self.num_blocks = np.zeros(shape, np.int32)
        self.num_synced_blocks = np.zeros(shape, np.int32)
        self.num_device_blocks = np.zeros(shape, np.int32)
        num_rows = max_num_reqs + PADDING_ROWS
        sizes = [num_rows * width for width in self.max_num_blocks.tolist()]
        self.block_table_flat_np = np.zeros(sum(sizes), np.int32)
        with torch.inference_mode(False):  # steps change it in place
            self.block_table_flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        borders = np.cumsum(sizes)[:-1]
        self._rows = [
            part.reshape(num_rows, width)
            for part, width in zip(
                np.split(self.block_table_flat_np, borders), self.max_num_blocks.tolist()
            )
        ]
        self._on_device = [part.view(num_rows, -1) for part in self.block_table_flat.split(sizes)]
        self._device_rows: dict[int, tuple[torch.Tensor, ...]] = {}
        # A number for each request that ever had a slot: of the slots' requests, and of those to
        # which the device's rows belong
        self._arrivals = 0
        self._of_slot = np.zeros(max_num_reqs, np.int64)
        self._of_row = np.zeros(max_num_reqs, np.int64)

    def append_block_ids(
        self, req_index: int, new_block_ids: Sequence[Sequence[int]], overwrite: bool
    ) -> None:
        """Add blocks to a slot; with `overwrite`, those of the slot's new request.

        Raises
        ------
        ValueError
            If they are more than a request can have.
        """
        if overwrite:
            self._arrivals += 1
            self._of_slot[req_index] = self._arrivals
        for group, block_ids in enumerate(new_block_ids):
            start = 0 if overwrite else int(self.num_blocks[group, req_index])
            end = start + len(block_ids)
            if end > self.max_num_blocks[group]:
                raise ValueError(
                    f"{end} blocks of group {group} in slot {req_index}: a request may have "
                    f"{self.max_num_blocks[group]}"
                )
            self._rows[group][req_index, start:end] = block_ids
            self.num_blocks[group, req_index] = end

    def apply_staged_writes(self) -> None:
        """Does nothing: the step's one copy has the new entries."""

    def follow(self, slots: np.ndarray) -> None:
        """Have whole rows sent where another request was at the last step.

        Parameters
        ----------
        slots
            int ``[num_reqs]``: slot of each request of the batch.
        """
        wanted, rows = self._of_slot[slots], self._of_row[: len(slots)]
        are_others = wanted != rows
        if are_others.any():
            self.num_synced_blocks[:, : len(slots)][:, are_others] = 0
            rows[:] = wanted

    def device_rows(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Leading rows on the device, int32 ``[num_reqs, max_num_blocks]`` for each group."""
        rows = self._device_rows.get(num_reqs)
        if rows is None:
            rows = tuple(table[:num_reqs] for table in self._on_device)
            self._device_rows[num_reqs] = rows
        return rows


def tables_of(
    states: SlotStates,
    blocks: SlotBlockTables,
    *,
    chunked_prefill: bool,
    local: LocalGroups | None,
    latent: LatentSplit | None = None,
    state_groups: StateGroups | None = None,
    mrope: MropeTables | None = None,
    dcp: ContextShards | None = None,
) -> BatchTables:
    """The tables that the fused pass reads: views, which follow every change.

    Parameters
    ----------
    states, blocks
        Requests and their blocks, by slot.
    chunked_prefill
        Whether the scheduler splits prompts.
    local
        Groups with attention chunks, if there are any.
    latent
        How steps are split for latent attention.
    state_groups
        Groups that hold states.
    mrope
        Positions of the batch's prompts.
    dcp
        The part of each context that this rank keeps.
    """
    return BatchTables(
        num_computed_tokens=states.num_computed_tokens_np,
        num_prompt_tokens=states.prompt_len.np,
        num_tokens=states.num_tokens,
        token_ids=states.token_ids,
        block_table_flat=blocks.block_table_flat_np,
        max_num_blocks=blocks.max_num_blocks,
        block_sizes=blocks.block_sizes,
        num_blocks=blocks.num_blocks,
        num_synced_blocks=blocks.num_synced_blocks,
        num_device_blocks=blocks.num_device_blocks,
        chunked_prefill=chunked_prefill,
        local=local,
        latent=latent,
        states=state_groups,
        mrope=mrope,
        dcp=dcp,
    )
