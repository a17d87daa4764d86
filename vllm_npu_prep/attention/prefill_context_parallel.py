"""Prefill context parallelism: attention over the rows of one rank, and K and V of all ranks.

Each rank computes its own tokens of a step (`vllm_npu_prep.prep.pcp`) and keeps the whole KV cache.
So in each layer the ranks gather the K and V of all tokens, every rank writes all of them, and
attends with its own queries over its cache. vLLM's ``maybe_gather_mla_latent_cache_inputs`` does
the same for latent attention, which alone it allows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_npu_prep.attention.metadata import VirtualRequests
from vllm_npu_prep.device import Device
from vllm_npu_prep.device.staging import StagedArrays
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.padding import GraphMode
from vllm_npu_prep.prep.pcp import NO_PCP, PCPRank

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def find_pcp(vllm_config: "VllmConfig") -> PCPRank:
    """Return the ranks that share the tokens of a step, and which one this is."""
    if vllm_config.parallel_config.prefill_context_parallel_size == 1:
        return NO_PCP
    from vllm.distributed import get_pcp_group

    group = get_pcp_group()
    most_rows = 2 * vllm_config.scheduler_config.max_num_seqs
    return PCPRank(group.world_size, group.rank_in_group, most_rows)


def num_rows_seen(step: PreparedStep) -> int:
    """Return how many rows attention sees; padding rows are among them in full graphs only."""
    if step.padding.mode is GraphMode.FULL:
        return len(step.arrays.pcp_seq_lens)
    return step.pcp.num_rows


def rows_of_rank(step: PreparedStep, staged: StagedArrays) -> VirtualRequests:
    """Return the rows that this rank computes (`vllm_npu_prep.prep.pcp`).

    The padding rows after them are included in full graphs only.
    """
    arrays, host, num_rows = staged.device, staged.np, num_rows_seen(step)
    return VirtualRequests(
        arrays.pcp_query_start_loc[: num_rows + 1],
        host.pcp_query_start_loc[: num_rows + 1],
        arrays.pcp_seq_lens[:num_rows],
        host.pcp_seq_lens[:num_rows],
        arrays.pcp_num_computed_tokens[:num_rows],
        step.pcp.num_rows,
        step.pcp.max_query_len,
        step.pcp.max_seq_len,
    )


def gather_tokens(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of all ranks, one rank after another along the first dimension.

    All ranks have the same number of tokens, padding included.
    """
    from vllm.distributed import get_pcp_group

    group: Any = get_pcp_group()
    return [group.all_gather(tensor.contiguous(), dim=0) for tensor in tensors]


class RankBlockTables:
    """The block tables of the rows of a rank, at one address for each row of a group.

    Parameters
    ----------
    tables
        The device's tables of all requests, int32 ``[max_num_reqs + 1, max_num_blocks]`` by group;
        the last row has null blocks alone.
    most_rows
        The most rows of a step.
    """

    def __init__(self, device: Device, tables: Sequence[torch.Tensor], most_rows: int) -> None:
        self._device = device
        self._tables = [device.native(table) for table in tables]
        # They are changed in place in every step, so they must not be inference tensors.
        with torch.inference_mode(False):
            self._gathered = [table.new_zeros(most_rows, table.shape[1]) for table in tables]

    def gather(self, step: PreparedStep, staged: StagedArrays) -> tuple[torch.Tensor, ...]:
        """Return the block table of each group, int32 ``[rows, max_num_blocks]``.

        It takes one launch for each group; the next step overwrites them.
        """
        device, num_rows = self._device, num_rows_seen(step)
        gathered = tuple(table[:num_rows] for table in self._gathered)
        if num_rows:
            rows = device.native(staged.device.pcp_table_rows[:num_rows])
            for target, table in zip(gathered, self._tables):
                device.gather(device.native(target), table, rows)
        return gathered
