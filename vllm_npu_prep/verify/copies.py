"""Rows of copies, streams and events: how a step's arrays get to the device, and samples back."""

from collections.abc import Iterator

import numpy as np
import torch
import torch_npu

from vllm_npu_prep.attention.kv_cache import zero_blocks
from vllm_npu_prep.device.readback import ReadBack
from vllm_npu_prep.device.staging import StagingRing
from vllm_npu_prep.prep.layout import StepLayout
from vllm_npu_prep.verify.outcome import Outcome, Verdict, worst_of
from vllm_npu_prep.verify.row import Row, RowContext, compare
from vllm_npu_prep.wording import counted

STEPS = 12


def ring(context: RowContext) -> Outcome:
    """Send steps through the ring without waiting: each must find its own arrays on the device."""
    layout = StepLayout(4096, 8)
    made = StagingRing(context.device, layout.nbytes(), pin_memory=True)
    found = []
    for step in range(STEPS):
        staged = made.acquire(layout)
        staged.np.positions[:] = np.arange(4096) + step
        staged.np.seq_lens[:] = step
        made.submit(layout.nbytes())
        arrays = staged.device
        found.append(torch.cat([arrays.positions[:4096].float(), arrays.seq_lens.float()]))
    num_reqs = len(found[0]) - 4096
    expected = [
        torch.cat([torch.arange(4096.0) + step, torch.full((num_reqs,), float(step))])
        for step in range(STEPS)
    ]
    given = (
        f"{counted(STEPS, 'step')} of {layout.nbytes():,} bytes, {len(made.buffers)} pinned buffers"
    )
    return compare(torch.stack(found), torch.stack(expected), given, where=("step", "element"))


def read_back(context: RowContext) -> Outcome:
    back = ReadBack(context.device, 64, pin_memory=True)
    values = torch.arange(64, dtype=torch.int32, device=context.device.device)
    found = []
    for step in range(4):
        back.start(values + step)
        values.clone().mul_(7)  # later work, for which the copy does not wait
        found.append(torch.from_numpy(back.read()))
    expected = torch.stack([torch.arange(64, dtype=torch.int32) + step for step in range(4)])
    return compare(torch.stack(found), expected, "4 copies of 64 int32", where=("copy", "element"))


def events(context: RowContext) -> Outcome:
    """Check that an event that was waited for has happened, and the copy before it is complete."""
    large = torch.ones(1 << 22, device=context.device.device)
    host = torch.zeros(1 << 22).pin_memory()
    host.copy_(large * 3, non_blocking=True)
    event = context.device.record_event()
    context.device.wait_event(event)
    total = float(host.double().sum())
    happened = not context.device.wait_event(event)  # a second wait finds it done
    expected, got = (3.0 * (1 << 22), True), (total, happened)
    verdict = Verdict.SAME if got == expected else Verdict.DIFFERS
    return Outcome("a copy of 16 MiB to pinned memory", str(expected), str(got), verdict)


def streams(context: RowContext) -> Outcome:
    npu = torch_npu.npu
    main, others = npu.current_stream(), [npu.Stream() for _ in range(2)]
    x = torch.ones(1 << 20, device=context.device.device)
    for round_ in range(5):
        for stream in others:
            stream.wait_stream(main)
            with npu.stream(stream):
                x.mul_(2).sub_(round_)
            main.wait_stream(stream)
        x.add_(1)
    context.device.synchronize()
    expected = 1.0
    for round_ in range(5):
        for _ in others:
            expected = 2 * expected - round_
        expected += 1
    whole = torch.full((1 << 20,), expected)
    return compare(x, whole, "3 streams, 1,048,576 float32, 5 rounds", where=("element",))


def scatter(context: RowContext) -> Outcome:
    indices = torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:300]
    values = torch.arange(300, dtype=torch.int32) + 7
    target = torch.full((1000,), -5, dtype=torch.int32)
    expected = target.tolist()
    for index, value in zip(indices.tolist(), values.tolist()):
        expected[index] = value
    got = context.put(target)
    context.device.scatter(got, context.put(indices), context.put(values))
    given = "300 of 1,000 int32"
    return compare(got, torch.tensor(expected, dtype=torch.int32), given, where=("element",))


def gather(context: RowContext) -> Outcome:
    source = torch.arange(50 * 12, dtype=torch.int32).view(50, 12)
    rows = torch.randint(0, 50, (30,), generator=torch.Generator().manual_seed(1)).int()
    expected = torch.tensor([source[row].tolist() for row in rows.tolist()], dtype=torch.int32)
    got = context.put(torch.zeros(30, 12, dtype=torch.int32))
    context.device.gather(got, context.put(source), context.put(rows))
    return compare(got, expected, "30 of 50 rows of int32", where=("row", "column"))


def zeroed(context: RowContext) -> Outcome:
    buffer = context.device.zeros(1 << 20)
    empty = torch.zeros(1 << 20, dtype=torch.int8)
    parts = [compare(buffer, empty, "1 MiB of zeros", where=("byte",))]
    cache = torch.ones(2, 6, 16, 2, 16, dtype=torch.bfloat16)
    expected = cache.clone()
    expected[:, 4], expected[:, 1] = 0, 0
    got = context.put(cache)
    zero_blocks(got.unbind(), [4, 1])
    where = ("plane", "block", "slot", "head", "element")
    parts.append(compare(got, expected, "blocks 4 and 1 of 6", tolerance=0.0, where=where))
    return worst_of(parts, "1 MiB of zeros; blocks 4 and 1 of 6")


def _rows() -> Iterator[Row]:
    yield Row("copy-ring", "one copy a step through pinned buffers in turn", ring)
    yield Row("copy-back", "samples read back while later work is issued", read_back)
    yield Row("copy-events", "waiting on the host for an event", events)
    yield Row("copy-streams", "several streams, ordered by events", streams)
    yield Row("copy-scatter", "index_copy_ of samples and block ids", scatter)
    yield Row("copy-gather", "index_select of block-table rows", gather)
    yield Row("copy-zeros", "zeroed memory and zeroed blocks", zeroed)


ROWS: tuple[Row, ...] = tuple(_rows())
