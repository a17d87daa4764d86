"""Triton kernels on the emulated card: `test_peer` runs this file where `make peer` put Triton."""

import pytest
import torch
import torch_npu  # noqa: F401
import triton
import triton.language as tl

import ascend_emulator

MISSING = "without an ordering edge"


@triton.jit
def add(x, y, out, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    rows = at < n
    tl.store(out + at, tl.load(x + at, mask=rows) + tl.load(y + at, mask=rows), mask=rows)


@triton.jit
def fill_rows(table, n, size: tl.constexpr):
    row = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    at = tl.arange(0, size)
    tl.store(row + at, 1.0 + tl.program_id(0), mask=at < n)


@triton.jit
def count(out):
    tl.atomic_add(out, 1)


def tensors(*lengths):
    return [torch.arange(n, dtype=torch.float32).npu() for n in lengths]


def table_of(*rows):
    return torch.tensor([row.data_ptr() for row in rows]).npu()


def sync_error():
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_launch_is_one_task_and_computes():
    x, y, out = tensors(100, 100, 128)
    torch.npu.synchronize()
    with ascend_emulator.count() as counts:
        add[(2,)](x, y, out, 100, size=64)
    assert counts.launches == 1 and counts.h2d_copies == counts.syncs == 0
    assert torch.equal(out[:100].cpu(), 2 * torch.arange(100.0))
    assert torch.equal(out[100:].cpu(), torch.arange(100.0, 128))


def test_a_graph_runs_it_again():
    x, y, out = tensors(64, 64, 64)
    add[(1,)](x, y, out, 64, size=64)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        add[(1,)](x, y, out, 64, size=64)
    y.fill_(7)
    with ascend_emulator.count() as counts:
        graph.replay()
    assert counts.launches == 0
    assert torch.equal(out.cpu(), torch.arange(64.0) + 7)


def test_pointers_in_a_table_are_followed():
    rows = tensors(16, 16, 16)
    fill_rows[(2,)](table_of(rows[0], rows[2]), 16, size=16)
    assert [row.cpu()[0].item() for row in rows] == [1, 0, 2]


def test_atomics_count_every_program():
    out = torch.zeros(1, dtype=torch.int32).npu()
    count[(5,)](out)
    assert out.item() == 5


@pytest.mark.parametrize("through_table", [False, True], ids=["argument", "table"])
def test_a_write_that_nothing_orders_is_a_hazard(through_table):
    x, y, out = tensors(64, 64, 64)
    table, side = table_of(out), torch.npu.Stream()
    torch.npu.synchronize()
    if through_table:
        fill_rows[(1,)](table, 64, size=64)
    else:
        add[(1,)](x, y, out, 64, size=64)
    with torch.npu.stream(side):
        out + 1
    message = sync_error()
    assert MISSING in message and "triton::" in message and "aten::add" in message


def test_bytes_that_a_kernel_leaves_alone_need_no_order():
    x, y, out = tensors(64, 64, 64)
    side = torch.npu.Stream()
    torch.npu.synchronize()
    add[(1,)](x, y, out, 32, size=64)
    with torch.npu.stream(side):
        out[32:] + 1
        x + 1
    assert sync_error() == ""


def test_an_address_without_memory_is_a_fault():
    fill_rows[(1,)](torch.tensor([64]).npu(), 16, size=16)
    assert "triton::fill_rows: it writes 64 bytes at 0x40, without memory" in sync_error()


def test_a_tensor_of_the_host_is_refused():
    x, y, out = tensors(64, 64, 64)
    with pytest.raises(ValueError, match="triton::add: y cannot be accessed"):
        add[(1,)](x, y.cpu(), out, 64, size=64)
