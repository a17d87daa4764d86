"""Streams and events: what orders work, and what happens where nothing does."""

import pytest

RACE = """
    side = torch.npu.Stream()
    x = torch.zeros(1024, device="npu")
    torch.npu.synchronize()
    MISSING = "without an ordering edge"

    def copied(tensor, host, load, work):             # on another stream, meanwhile
        torch.npu.synchronize()
        work()
        target, source = (tensor, host) if load else (host, tensor)
        with torch.npu.stream(side):
            target.copy_(source, non_blocking=True)
        return MISSING in sync_error()

    def found(parts, load, work):
        return [n for n, part in enumerate(parts) if copied(part, host, load, work)]
"""


@pytest.mark.parametrize("delay", ["none", "skewed"])
def test_a_missing_wait_stream_is_found_whatever_the_delay(emulate, delay):
    run = emulate(
        RACE
        + """
    y = x + 1
    with torch.npu.stream(side):
        z = y * 2                                     # read after write
    assert MISSING in sync_error()                    # which of the two came first is the delay's
    with torch.npu.stream(side):
        z = x * 2
    x.add_(1)                                         # write after read
    assert MISSING in sync_error()
    x.fill_(1)
    with torch.npu.stream(side):
        x.fill_(2)                                    # write after write
    assert "write after write" in sync_error()
    source = pinned(1024)
    target = torch.zeros(1024, dtype=INT, device="npu")
    torch.npu.synchronize()
    target.copy_(source, non_blocking=True)
    with torch.npu.stream(side):
        target + 1                                    # a copy that nothing waits for
    message = sync_error()
    assert MISSING in message and "copy" in message and "aten::add" in message
    """,
        delay=delay,
    )
    assert run.report["counters"]["hazards"] == 4


def test_a_hazard_that_is_allowed_passes_and_no_other(emulate):
    run = emulate(
        RACE
        + """
    y = x + 1
    with torch.npu.stream(side):
        z = y * 2
    torch.npu.synchronize()
    y = x + 1
    with torch.npu.stream(side):
        x.fill_(2)                                    # which of the two came first is a chance
    assert MISSING in sync_error()
    """,
        allowed_hazards=("*aten::mul on stream ? of*",),  # in either order
    )
    (allowed,), (found,) = run.report["allowed_hazards"], run.report["hazards"]
    assert "aten::mul" in allowed and "aten::fill_" in found
    assert run.report["counters"]["hazards"] == 1


def test_operators_over_caches_touch_the_blocks_that_they_name(emulate):
    """Another stream may copy other blocks of a plane meanwhile, and none that are read or written.

    In graphs, too: which blocks a task touches is known when it runs.
    """
    run = emulate(
        RACE
        + """
    half = dict(dtype=torch.float16, device="npu")
    keys, values = torch.zeros(8, 16, 2, 16, **half), torch.zeros(8, 16, 2, 16, **half)
    new, query = torch.ones(2, 2, 16, **half), torch.ones(2, 2, 16, **half)
    host = torch.zeros(16, 2, 16, dtype=torch.float16).pin_memory()
    slots = torch.tensor([16 * 3, 16 * 4 + 5], dtype=torch.int32).npu()
    table = torch.tensor([[5, 7], [6, 7]], dtype=torch.int32).npu()
    out = torch.empty_like(query)

    def write():
        torch_npu._npu_reshape_and_cache(
            key=new, value=new, key_cache=keys, value_cache=values, slot_indices=slots)

    def read():                                       # one block each: 5 and 6, of 7 nothing
        torch_npu._npu_paged_attention(
            query=query, key_cache=keys, value_cache=values, num_kv_heads=2, num_heads=2,
            scale_value=1.0, block_table=table, context_lens=torch.tensor([9, 16], dtype=INT),
            out=out)

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        write()
    for work in write, graph.replay:
        assert found(keys, False, work) == found(keys, True, work) == [3, 4]
    assert found(keys, False, read) == []
    assert found(keys, True, read) == [5, 6]
    slots.fill_(16 * 7)                               # a replay writes where it is told now
    slots[1:].fill_(-1)
    assert found(keys, False, graph.replay) == [7]
    """
    )
    assert run.report["counters"]["hazards"] == 11


def test_operators_over_rows_touch_those_that_their_index_names(emulate):
    """Of a contiguous tensor, in graphs, too; of a strided one they touch everything."""
    run = emulate(
        RACE
        + """
    rows, new = torch.zeros(8, 64, device="npu"), torch.ones(2, 64, device="npu")
    wide = torch.zeros(8, 128, device="npu")
    index, host = torch.tensor([5, 2]).npu(), torch.zeros(64).pin_memory()

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        rows.index_copy_(0, index, new)
    for work in lambda: rows.index_copy_(0, index, new), graph.replay:
        assert found(rows, False, work) == found(rows, True, work) == [2, 5]
    assert found(rows, False, lambda: rows.index_select(0, index)) == []
    assert found(rows, True, lambda: rows.index_select(0, index)) == [2, 5]
    index.fill_(7)                                    # a replay writes where it is told now
    assert found(rows, False, graph.replay) == [7]
    half = wide[:, :64]
    assert len(found(half, False, lambda: half.index_copy_(0, index, new))) == 8
    """
    )
    assert run.report["counters"]["hazards"] == 19


def test_memory_reused_as_the_allocator_does_is_no_hazard(emulate):
    run = emulate(
        RACE
        + """
    def use(recorded):
        block = torch.ones(1000, device="npu")
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            block + 1
        if recorded:
            block.record_stream(side)

    for _ in range(50):
        use(True)
        torch.ones(1000, device="npu")
    assert sync_error() == ""
    use(False)
    torch.ones(1000, device="npu")
    assert "record_stream" in sync_error()
    """
    )
    assert run.report["counters"]["hazards"] == 1


def test_events_order_time_and_tell(emulate):
    emulate(
        """
        x = torch.zeros(1 << 16, device="npu")
        first, second = (torch.npu.Event(enable_timing=True) for _ in range(2))
        assert first.query()                          # never recorded
        first.record()
        for _ in range(5):
            x.add_(1)
        second.record()
        assert not second.query()
        second.synchronize()
        assert second.query() and first.elapsed_time(second) > 1
        with emulator.count() as c:
            torch.npu.current_stream().wait_event(second)
            torch.npu.synchronize()
        assert (c.event_waits, c.syncs) == (1, 1), c
        """,
        delay="equal",
    )


def test_delays_and_hazard_modes_do_what_they_say(emulate):
    run = emulate(
        RACE
        + """
    import time
    event = torch.npu.ExternalEvent()
    event.wait(torch.npu.current_stream())
    for _ in range(20):
        x.add_(1)                                     # comes back, though nothing can run yet
    start = time.monotonic()
    event.record(side)
    torch.npu.synchronize()
    assert time.monotonic() - start > 0.04            # 2.4 ms each
    with torch.npu.stream(side):
        for _ in range(20):
            torch.ones(1)
    y = x + 1
    with torch.npu.stream(side):
        y + 1
    assert sync_error() == ""
    """,
        delay="skewed",
        hazards="warn",
    )
    assert run.report["counters"]["hazards"] == 1 and "HAZARD" in run.err


def test_scripts_that_are_forked_fail_as_the_command_does(emulate):
    """With a hazard that no sync reports, and with an exception of their own."""
    unreported = RACE + "    y = x + 1\n    with torch.npu.stream(side):\n        y + 1\n"
    with pytest.raises(AssertionError, match="exit code 3"):
        emulate(unreported + "    emulator.let_run()\n    import os; os._exit(0)")
    with pytest.raises(AssertionError, match=r"exit code 1\n(.|\n)*ZeroDivisionError"):
        emulate("1 / 0")


def test_kernel_errors_surface_at_the_next_sync(emulate):
    run = emulate(
        """
        index, table = torch.tensor([9], device="npu"), torch.zeros(4, 2, device="npu")
        torch.nn.functional.embedding(index, table)   # as on a device, the call itself succeeds
        assert "index out of range" in sync_error()
        assert sync_error() == ""
        """,
        trace=True,
    )
    assert "FAULT: aten::embedding" in run.err and "launch aten::embedding" in run.err
    assert run.report["kernels"]["aten::embedding"] == 1


def test_held_streams_run_only_while_the_host_waits(emulate):
    emulate("""
    x, event = torch.zeros(4, device="npu"), torch.npu.Event()
    torch.npu.synchronize()
    emulator.hold_streams(True)
    x.add_(1)
    event.record()
    assert not any(event.query() for _ in range(10_000))
    assert x.tolist() == [1] * 4 and event.query()    # a wait, in which the stream has run
    x.add_(1)
    event.record()
    emulator.hold_streams(False)
    while not event.query():
        pass
    """)


def test_host_time_in_the_emulator_leaves_out_waits(emulate):
    emulate(
        """
    import time
    x = torch.zeros(4, device="npu")
    torch.npu.synchronize()

    def measured(work):
        start, before = time.thread_time_ns(), emulator.host_ns()
        work()
        inside = emulator.host_ns() - before
        return inside, time.thread_time_ns() - start - inside

    def launches():
        for _ in range(20):
            x.add_(1)

    assert measured(launches)[0] == 0                 # streams aren't held
    torch.npu.synchronize()
    emulator.hold_streams(True)
    inside, outside = measured(launches)
    assert inside > 0 and outside > 0
    inside, outside = measured(torch.npu.synchronize)  # for 20 delays of 2.4 ms
    assert inside < 20e6
    inside, outside = measured(lambda: sum(range(100_000)))
    assert inside == 0 < outside
    cast = lambda: torch_npu.npu_format_cast(x, 2)    # its reference runs at once, on the host
    assert measured(cast)[0] > 0
    """,
        delay="skewed",
    )
