"""The staging ring: pinned host buffers, the one device buffer, and the one copy of a step."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_npu_prep.device import Device
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.layout import StepArrays, StepLayout

CACHED_LAYOUTS = 512
"""Layouts whose views are kept. Captured sizes are far fewer; eager steps make new ones."""


@dataclass(frozen=True)
class DeviceArrays:
    """The arrays of one layout as tensors: views of the device buffer, or of a pinned one.

    See `StepArrays` for dtypes.
    """

    input_ids: torch.Tensor  # [num_input_tokens]
    input_ids_and_spare: torch.Tensor  # [num_input_tokens + 1]
    positions: torch.Tensor  # [num_input_tokens]
    mrope_positions: torch.Tensor  # [mrope_dims, num_input_tokens]
    slot_mapping: tuple[torch.Tensor, ...]  # one [num_input_tokens] for each group
    query_start_loc: torch.Tensor  # [num_reqs_padded + 1]
    seq_lens: torch.Tensor  # [num_reqs_padded]
    num_computed_tokens: torch.Tensor  # [num_reqs_padded]
    logits_indices: torch.Tensor  # [max_logits]
    target_logits_indices: torch.Tensor  # [max_drafts]
    draft_token_ids: torch.Tensor  # [max_drafts]
    # [num_reqs_padded], or empty without speculation
    bonus_logits_indices: torch.Tensor
    cu_num_draft_tokens: torch.Tensor
    cu_num_sampled_tokens: torch.Tensor
    backup_next_token_ids: torch.Tensor
    # Empty without chunked local attention
    local_query_start_loc: torch.Tensor  # [V + 1]
    local_seq_lens: torch.Tensor  # [V]
    local_num_computed_tokens: torch.Tensor  # [V]
    local_table_rows: torch.Tensor  # [L * V]
    discard_request_mask: torch.Tensor  # [num_reqs_padded]
    is_padding: torch.Tensor  # [num_input_tokens]


class TypedBuffer:
    """One buffer seen as bytes, as int32 and as int64."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.bytes = buffer  # [nbytes] uint8
        self.int32 = buffer.view(torch.int32)
        self.int64 = buffer.view(torch.int64)
        self._by_dtype = {
            np.dtype(np.int32): self.int32,
            np.dtype(np.int64): self.int64,
            np.dtype(np.bool_): buffer.view(torch.bool),
        }

    def arrays(self, layout: StepLayout) -> DeviceArrays:
        """Every array of `layout`."""
        views = {}
        for name, spec in layout.arrays.items():
            size = spec.dtype.itemsize
            views[name] = self._by_dtype[spec.dtype][spec.offset // size : spec.end // size]
        slots = views.pop("slot_mapping").view(layout.num_groups, layout.num_input_tokens)
        mrope_positions = views.pop("mrope_positions")
        return DeviceArrays(
            input_ids=views["input_ids_and_spare"][:-1],
            slot_mapping=slots.unbind(),
            mrope_positions=mrope_positions.view(layout.mrope_dims, layout.num_input_tokens),
            **views,
        )


@dataclass(frozen=True)
class StagedArrays:
    """The arrays of one layout in a pinned buffer and on the device."""

    np: StepArrays
    cpu: DeviceArrays  # the same memory as `np`
    device: DeviceArrays  # views of the device buffer, at the same addresses in all such steps


class StagingSlot:
    """One pinned buffer of the ring and the event that guards it."""

    def __init__(self, nbytes: int, pin_memory: bool) -> None:
        self.host = TypedBuffer(torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pin_memory))
        self.host_np = self.host.bytes.numpy()
        self.event: object = None
        self.staged: dict[StepLayout, StagedArrays] = {}


class StagingRing:
    """Pinned buffers in turn, each guarded by an event, and one device buffer at a fixed address.

    A buffer is never written before the copy that reads it is known complete: rewriting one in
    flight gives wrong tokens (vllm-project/vllm-ascend 12079, 12191, 16427).

    Parameters
    ----------
    device
        Where the device buffer lives.
    nbytes
        Size of the largest step, a multiple of 8.
    depth
        Buffers in the ring.
    block_tables
        int32, the device's block tables of all groups one after another, which `send` updates.
    pin_memory
        Whether host buffers are page-locked.

    Attributes
    ----------
    device_buffer
        What every step is copied to.
    steps, waits
        Steps that were staged, and how many of them found their buffer still in flight. Waiting is
        the exception.
    turn
        Index of the present step's buffer.
    """

    def __init__(
        self,
        device: Device,
        nbytes: int,
        depth: int = 2,
        *,
        block_tables: torch.Tensor | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.device = device
        # Mutable state of the runner: not an inference tensor, whatever mode the caller is in.
        with torch.inference_mode(False):
            self.slots = [StagingSlot(nbytes, pin_memory) for _ in range(depth)]
            buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device.device)
        self.device_buffer = TypedBuffer(buffer)
        self._int32 = device.native(self.device_buffer.int32)
        self._int64 = device.native(self.device_buffer.int64)
        self._block_tables = None if block_tables is None else device.native(block_tables)
        self._copies = [device.copy_to_device(buffer, slot.host.bytes) for slot in self.slots]
        self._on_device: dict[StepLayout, DeviceArrays] = {}
        self.turn = 0
        self.steps = 0
        self.waits = 0

    def acquire(self, layout: StepLayout) -> StagedArrays:
        """Take the next buffer; its arrays are free to be written until `send` copies them."""
        self.steps += 1
        self.turn = self.steps % len(self.slots)
        slot = self.slots[self.turn]
        if slot.event is not None:
            self.waits += self.device.wait_event(slot.event)
            slot.event = None
        staged = slot.staged.get(layout)
        if staged is None:
            on_device = self._on_device.get(layout)
            if on_device is None:
                on_device = self.device_buffer.arrays(layout)
                _keep(self._on_device, layout, on_device)
            staged = StagedArrays(layout.views(slot.host_np), slot.host.arrays(layout), on_device)
            _keep(slot.staged, layout, staged)
        return staged

    def send(self, step: PreparedStep, last_samples: torch.Tensor | None = None) -> None:
        """Copy a step to the device, then scatter what has another place in every step.

        Parameters
        ----------
        step
            The step, prepared in the arrays of the last `acquire`.
        last_samples
            int32 ``[num_targets]``: the last step's samples while these are on the device only
            (asynchronous scheduling), in the order of ``sampled_token_targets``.
        """
        self.submit(step.nbytes)
        if last_samples is not None:
            self._scatter_samples(step.layout, last_samples)
        if step.num_block_changes:
            self._scatter_block_changes(step)

    def submit(self, nbytes: int) -> None:
        """Copy the first `nbytes` of the buffer to the device: the one copy of a step."""
        self._copies[self.turn](nbytes)
        self.slots[self.turn].event = self.device.record_event()

    def _scatter_samples(self, layout: StepLayout, last_samples: torch.Tensor) -> None:
        """Samples go among the token ids and the drafts."""
        targets, _, _ = layout.tail(len(last_samples), 0)
        values = self.device.native(last_samples)
        self.device.scatter(self._int32, self._int64[targets], values)

    def _scatter_block_changes(self, step: PreparedStep) -> None:
        """New entries go into the block tables of all groups."""
        _, indices, ids = step.layout.tail(step.batch.num_targets, step.num_block_changes)
        self.device.scatter(self._block_tables, self._int64[indices], self._int32[ids])


def _keep(views: dict[StepLayout, Any], layout: StepLayout, made: object) -> None:
    if len(views) == CACHED_LAYOUTS:
        views.clear()  # made again within a step's time where they are still used
    views[layout] = made
