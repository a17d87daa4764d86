"""The staging ring: pinned host buffers, the one device twin, and the one copy of a step."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from vllm_npu_prep.device import Device
from vllm_npu_prep.prep.layout import StepArrays, StepLayout

CACHED_LAYOUTS = 512
"""Layouts whose views are kept. Captured sizes are far fewer; eager steps make new ones."""


@dataclass(frozen=True)
class DeviceArrays:
    """The arrays of one layout on the device: views of the twin. See `StepArrays` for dtypes."""

    input_ids: torch.Tensor  # [num_input_tokens]
    positions: torch.Tensor  # [num_input_tokens]
    slot_mapping: torch.Tensor  # [num_groups, num_input_tokens]
    query_start_loc: torch.Tensor  # [num_reqs_padded + 1]
    seq_lens: torch.Tensor  # [num_reqs_padded]
    num_computed_tokens: torch.Tensor  # [num_reqs_padded]
    discard_request_mask: torch.Tensor  # [num_reqs_padded]
    sampled_token_indices: torch.Tensor  # [num_reqs_padded]
    sampled_token_rows: torch.Tensor  # [num_reqs_padded]
    logits_indices: torch.Tensor  # [num_input_tokens]


def tensor_views(buffer: torch.Tensor, layout: StepLayout) -> DeviceArrays:
    """Every array of `layout` as a view of the uint8 tensor `buffer`."""
    return DeviceArrays(
        **{
            name: buffer[spec.offset : spec.end]
            .view(torch.from_numpy(np.empty(0, spec.dtype)).dtype)
            .view(spec.shape)
            for name, spec in layout.arrays.items()
        }
    )


class StagingSlot:
    """One pinned buffer of the ring and the event that guards it."""

    def __init__(self, nbytes: int, pin_memory: bool) -> None:
        self.host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pin_memory)
        self.host_np = self.host.numpy()
        self.event: object = None
        self.views: OrderedDict[StepLayout, tuple[StepArrays, DeviceArrays]] = OrderedDict()


class StagingRing:
    """Pinned buffers in turn, each guarded by an event, and one device buffer at a fixed address.

    A buffer is never written before the copy that reads it is known complete: rewriting one in
    flight gives wrong tokens (vllm-project/vllm-ascend 12079, 12191, 16427).

    Parameters
    ----------
    device
        Where the twin lives.
    nbytes
        Size of the largest layout.
    depth
        Buffers in the ring.
    pin_memory
        Whether host buffers are page-locked.

    Attributes
    ----------
    waits
        Times that a buffer was still in flight when its turn came. Waiting is the exception.
    """

    def __init__(self, device: Device, nbytes: int, depth: int = 2, pin_memory: bool = False):
        self.device = device
        # Mutable state of the runner: not an inference tensor, whatever mode the caller is in.
        with torch.inference_mode(False):
            self.slots = [StagingSlot(nbytes, pin_memory) for _ in range(depth)]
            self.twin = torch.zeros(nbytes, dtype=torch.uint8, device=device.device)
        self.waits = 0
        self._device_views: OrderedDict[StepLayout, DeviceArrays] = OrderedDict()
        self._turn = 0

    def acquire(self, layout: StepLayout) -> tuple[StagingSlot, StepArrays, DeviceArrays]:
        """Take the next buffer and its views for `layout`.

        Returns
        -------
        slot
            To hand to `submit`.
        host
            numpy views of the pinned buffer, free to be written.
        cpu
            The same memory as torch tensors, for readers on the host.
        """
        slot = self.slots[self._turn]
        self._turn = (self._turn + 1) % len(self.slots)
        if slot.event is not None:
            self.waits += self.device.wait_event(slot.event)
            slot.event = None
        views = slot.views.get(layout)
        if views is None:
            views = (layout.views(slot.host_np), tensor_views(slot.host, layout))
            _remember(slot.views, layout, views)
        return slot, *views

    def submit(self, slot: StagingSlot, layout: StepLayout, nbytes: int) -> DeviceArrays:
        """Copy the first `nbytes` of `slot` to the device: the one copy of a step.

        Returns
        -------
        DeviceArrays
            Views of the twin, at the same addresses for every step of this layout.
        """
        self.device.copy_to_device(self.twin[:nbytes], slot.host[:nbytes])
        slot.event = self.device.record_event()
        arrays = self._device_views.get(layout)
        if arrays is None:
            arrays = tensor_views(self.twin, layout)
            _remember(self._device_views, layout, arrays)
        return arrays


def _remember(cache: OrderedDict, layout: StepLayout, views: object) -> None:
    cache[layout] = views
    if len(cache) > CACHED_LAYOUTS:
        cache.popitem(last=False)
