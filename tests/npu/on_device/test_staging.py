"""The staging ring on a device: no pinned buffer is rewritten while its copy is in flight.

Upstream's own event also guards a step under asynchronous scheduling; here the ring is alone.
"""

import torch

from vllm_npu_prep.device import make_device
from vllm_npu_prep.device.staging import StagingRing
from vllm_npu_prep.prep.layout import StepLayout

STEPS = 12


def test_a_buffer_is_rewritten_only_after_its_copy():
    layout = StepLayout(4096, 8)
    ring = StagingRing(make_device("npu"), layout.nbytes(), pin_memory=True)
    busy = torch.ones(1024, 1024, device="npu")
    torch.mm(busy, busy)  # copies stay in flight behind it, however quick the host is
    for step in range(STEPS):
        staged = ring.acquire(layout)
        staged.np.positions[:] = step
        ring.submit(layout.nbytes())
    torch.npu.synchronize()  # a hazard surfaces here
    assert (staged.device.positions.cpu() == STEPS - 1).all()
    assert ring.waits > 0, "nothing was in flight: this shows nothing"


def test_arrays_stay_where_they_are():
    ring = StagingRing(make_device("npu"), StepLayout(256, 8).nbytes(), pin_memory=True)
    addresses = set()
    for _ in range(5):
        layout = StepLayout(128, 4)
        (slots,) = ring.acquire(layout).device.slot_mapping
        addresses.add(slots.data_ptr())
        ring.submit(layout.nbytes())
    torch.npu.synchronize()
    assert len(addresses) == 1
