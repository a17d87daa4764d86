"""Binds upstream's buffers to a step's arrays, and restores them."""

import copy
from collections.abc import Container
from typing import Any

import torch
from vllm.v1.utils import CpuGpuBuffer

from vllm_npu_prep.device.staging import CACHED_LAYOUTS, StagedArrays

GRAPH_INPUTS = ("input_ids", "positions", "mrope_positions")
"""The names of the buffers that a graph reads."""


class UpstreamBuffers:
    """Lets upstream's later code read a step's arrays by its own names.

    Each name is a parameter, so that the arguments say what of upstream's runner is replaced.

    Parameters
    ----------
    namespace
        The attributes of upstream's runner, by name.
    positions, seq_lens, num_computed_tokens, optimistic_seq_lens_cpu
        Tensors among them, which are replaced.
    input_ids, query_start_loc, discard_request_mask, mrope_positions
        Buffers among them, which are replaced by copies with other host and device sides. The last
        one exists only if the model has M-RoPE.
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
        self._own: dict[str, Any] = {
            "input_ids": input_ids,
            "query_start_loc": query_start_loc,
            "discard_request_mask": discard_request_mask,
            "positions": positions,
            "seq_lens": seq_lens,
            "num_computed_tokens": num_computed_tokens,
            "optimistic_seq_lens_cpu": optimistic_seq_lens_cpu,
        }
        if mrope_positions is not None:
            self._own["mrope_positions"] = mrope_positions
        self._of_step: dict[StagedArrays, dict[str, Any]] = {}

    def bind(self, staged: StagedArrays) -> None:
        """Point every name at the arrays of a step.

        The new values are kept for each layout, so this is one update of a dict.
        """
        names = self._of_step.get(staged)
        if names is None:
            if len(self._of_step) == CACHED_LAYOUTS:
                self._of_step.clear()
            names = self._of_step[staged] = self._names_of(staged)
        self._namespace.update(names)

    def _names_of(self, staged: StagedArrays) -> dict[str, Any]:
        host, cpu, device = staged.np, staged.cpu, staged.device
        names: dict[str, Any] = {
            "positions": device.positions,
            "seq_lens": device.seq_lens,
            "num_computed_tokens": device.num_computed_tokens,
            "optimistic_seq_lens_cpu": cpu.seq_lens,
        }
        for name in ("input_ids", "query_start_loc", "discard_request_mask"):
            buffer = names[name] = copy.copy(self._own[name])
            buffer.gpu, buffer.cpu = getattr(device, name), getattr(cpu, name)
            buffer.np = getattr(host, name)
        if "mrope_positions" in self._own:
            buffer = names["mrope_positions"] = copy.copy(self._own["mrope_positions"])
            buffer.gpu = device.mrope_positions
        return names

    def restore(self, leave: Container[str] = ()) -> None:
        """Point the names that are not in `leave` at upstream's own memory of the largest sizes."""
        for name, own in self._own.items():
            if name not in leave:
                self._namespace[name] = own
