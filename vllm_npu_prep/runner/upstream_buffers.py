"""Binds upstream's buffers to a step's arrays, and restores them."""

from collections.abc import Container
from typing import Any

import torch
from vllm.v1.utils import CpuGpuBuffer

from vllm_npu_prep.device.staging import StagedArrays

GRAPH_INPUTS = ("input_ids", "positions", "mrope_positions")
"""Names of the buffers that a graph reads."""


class UpstreamBuffers:
    """Lets upstream's later code read a step's arrays by its own names.

    Parameters
    ----------
    namespace
        Attributes of upstream's runner, by name.
    positions, seq_lens, num_computed_tokens, optimistic_seq_lens_cpu
        Tensors among them, which are replaced.
    input_ids, query_start_loc, discard_request_mask, mrope_positions
        Buffers among them, whose host and device sides are replaced. The last one exists only if
        the model has M-RoPE.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        *,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        optimistic_seq_lens_cpu: torch.Tensor,
        input_ids: CpuGpuBuffer,
        query_start_loc: CpuGpuBuffer,
        discard_request_mask: CpuGpuBuffer,
        mrope_positions: CpuGpuBuffer | None,
    ) -> None:
        self._namespace = namespace
        self._tensors = {
            "positions": positions,
            "seq_lens": seq_lens,
            "num_computed_tokens": num_computed_tokens,
            "optimistic_seq_lens_cpu": optimistic_seq_lens_cpu,
        }
        buffers = {
            "input_ids": input_ids,
            "query_start_loc": query_start_loc,
            "discard_request_mask": discard_request_mask,
            "mrope_positions": mrope_positions,
        }
        self._sides = {name: (each, vars(each).copy()) for name, each in buffers.items() if each}
        self._input_ids = input_ids
        self._query_start_loc = query_start_loc
        self._discard_request_mask = discard_request_mask
        self._mrope_positions = mrope_positions

    def bind(self, staged: StagedArrays) -> None:
        """Point every name at the arrays of a step."""
        host, cpu, device = staged.np, staged.cpu, staged.device
        ids, starts, discard = self._input_ids, self._query_start_loc, self._discard_request_mask
        ids.gpu, ids.cpu, ids.np = device.input_ids, cpu.input_ids, host.input_ids
        starts.gpu, starts.cpu = device.query_start_loc, cpu.query_start_loc
        starts.np = host.query_start_loc
        discard.gpu, discard.cpu = device.discard_request_mask, cpu.discard_request_mask
        discard.np = host.discard_request_mask
        if self._mrope_positions is not None:
            self._mrope_positions.gpu = device.mrope_positions
        namespace = self._namespace
        namespace["positions"] = device.positions
        namespace["seq_lens"] = device.seq_lens
        namespace["num_computed_tokens"] = device.num_computed_tokens
        namespace["optimistic_seq_lens_cpu"] = cpu.seq_lens

    def restore(self, leave: Container[str] = ()) -> None:
        """Point every name at upstream's own memory, which has the largest sizes.

        Parameters
        ----------
        leave
            Names that are not changed.
        """
        for name, tensor in self._tensors.items():
            if name not in leave:
                self._namespace[name] = tensor
        for name, (buffer, sides) in self._sides.items():
            if name not in leave:
                vars(buffer).update(sides)
