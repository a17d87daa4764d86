"""The staging ring: pinned host buffers, the only device buffer, and the only copy of a step."""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_npu_prep.device import Device
from vllm_npu_prep.prep.arrays import STEP_ARRAYS, Arrays
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.layout import StepArrays, StepLayout

CACHED_LAYOUTS = 512
"""The most layouts whose views are cached: captured sizes, which are far fewer, and eager steps."""


class TypedBuffer:
    """One buffer, viewed as bytes, as int32 and int64, and as each dtype of the table of arrays."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.bytes = buffer  # [nbytes] uint8
        self.int32 = buffer.view(torch.int32)
        self.int64 = buffer.view(torch.int64)
        self.by_dtype = {
            line.dtype: buffer.view(getattr(torch, line.dtype.name))
            for line in STEP_ARRAYS.values()
        }

    def arrays(self, layout: StepLayout) -> "DeviceArrays":
        return DeviceArrays(self, layout)


class DeviceArrays(Arrays[torch.Tensor]):
    """The arrays of one layout as tensors: views of the device buffer, or of a pinned one.

    Attributes
    ----------
    model_input_ids, model_positions, model_is_padding
        What the model sees: the step's tokens, or with prefill context parallelism the rank's.
    slot_mappings
        Of each KV-cache group the slots of the K and V that layers write, ``[num_input_tokens]``;
        with prefill context parallelism those of all ranks, one rank after another.
    """

    def __init__(self, buffer: TypedBuffer, layout: StepLayout) -> None:
        for name, spec in layout.arrays.items():
            setattr(self, name, buffer.by_dtype[spec.dtype][spec.elements].view(spec.shape))
        if layout.shape.pcp:
            self.model_input_ids, self.model_positions = self.pcp_input_ids, self.pcp_positions
            self.model_is_padding = self.pcp_is_padding
            self.slot_mappings = self.pcp_slot_mapping.unbind()
        else:
            self.model_input_ids, self.model_positions = self.input_ids, self.positions
            self.model_is_padding = self.is_padding
            self.slot_mappings = self.slot_mapping.unbind()


@dataclass(frozen=True, eq=False)
class StagedArrays:
    """The arrays of one layout in a pinned buffer and on the device."""

    np: StepArrays
    cpu: DeviceArrays  # the same memory as `np`
    device: DeviceArrays  # views of the device buffer; a layout has the same addresses in all steps


class StagingBuffer:
    """One pinned buffer of the ring, and the event that guards it."""

    def __init__(self, nbytes: int, pin_memory: bool) -> None:
        self.host = TypedBuffer(torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pin_memory))
        self.host_np = self.host.bytes.numpy()
        self.event: object = None
        self.staged: dict[StepLayout, StagedArrays] = {}


class StagingRing:
    """A ring of pinned buffers, each guarded by an event, and one device buffer at a fixed address.

    A pinned buffer is written only after the copy that reads it has completed: rewriting a buffer
    in flight gives wrong tokens (vllm-project/vllm-ascend 12079, 12191, 16427).

    Parameters
    ----------
    nbytes
        The size of the largest step, a multiple of 8.
    depth
        The number of buffers in the ring.
    block_tables
        int32: the device's block tables of all groups, one after another; `send` updates them.

    Attributes
    ----------
    buffers
        The pinned buffers.
    device_buffer
        The memory to which every step is copied.
    steps, waits
        How many steps were staged, and how many of them had to wait for their buffer (rare).
    turn
        The index of the current step's buffer.
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
        # It is changed in place in every step, so it must not be an inference tensor.
        with torch.inference_mode(False):
            self.buffers = [StagingBuffer(nbytes, pin_memory) for _ in range(depth)]
            buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device.device)
        self.device_buffer = TypedBuffer(buffer)
        self._int32 = device.native(self.device_buffer.int32)
        self._int64 = device.native(self.device_buffer.int64)
        self._block_tables = None if block_tables is None else device.native(block_tables)
        self._copies = [device.copy_to_device(buffer, each.host.bytes) for each in self.buffers]
        self._on_device: dict[StepLayout, DeviceArrays] = {}
        self.turn = 0
        self.steps = 0
        self.waits = 0

    def acquire(self, layout: StepLayout) -> StagedArrays:
        """Take the next buffer; its arrays may be written until `send` copies them."""
        self.steps += 1
        self.turn = self.steps % len(self.buffers)
        buffer = self.buffers[self.turn]
        if buffer.event is not None:
            self.waits += self.device.wait_event(buffer.event)
            buffer.event = None
        staged = buffer.staged.get(layout)
        if staged is None:
            on_device = self._on_device.get(layout)
            if on_device is None:
                on_device = self.device_buffer.arrays(layout)
                _keep(self._on_device, layout, on_device)
            host_views = layout.views(buffer.host_np)
            staged = StagedArrays(host_views, buffer.host.arrays(layout), on_device)
            _keep(buffer.staged, layout, staged)
        return staged

    def send(self, step: PreparedStep, last_samples: torch.Tensor | None = None) -> None:
        """Copy a step to the device, then scatter its variable part.

        Parameters
        ----------
        step
            The step, prepared in the arrays of the last `acquire`.
        last_samples
            int32 ``[num_targets]``: the last step's samples if only the device has them
            (asynchronous scheduling, or speculation on V2), in the order of
            ``sampled_token_targets`` (`StepLayout`).
        """
        layout, device, num_changes = step.layout, self.device, step.num_block_changes
        num_targets = step.batch.num_targets
        nbytes = layout.nbytes(num_targets, num_changes)
        self.submit(nbytes)
        if last_samples is None and not num_changes:
            return
        targets, indices, ids = layout.variable_part(num_targets, num_changes)
        if last_samples is not None:  # into the token ids and the drafts
            device.scatter(self._int32, self._int64[targets], device.native(last_samples))
        if num_changes:  # into the block tables of all groups
            device.scatter(self._block_tables, self._int64[indices], self._int32[ids])

    def submit(self, nbytes: int) -> None:
        """Copy the first `nbytes` of the buffer to the device: the only copy of a step."""
        self._copies[self.turn](nbytes)
        self.buffers[self.turn].event = self.device.record_event()


def _keep(views: dict[StepLayout, Any], layout: StepLayout, made: object) -> None:
    if len(views) == CACHED_LAYOUTS:
        views.clear()  # views that are still in use are soon made again
    views[layout] = made
