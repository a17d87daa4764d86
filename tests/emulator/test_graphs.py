"""Capture, replay and task groups."""

import pytest

GRAPH = """
    torch.inference_mode().__enter__()
    x = torch.arange(4.0, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x * 2 + 1
"""


def test_forked_streams_are_captured_and_must_be_joined(emulate):
    """And must not write what another one reads."""
    run = emulate(
        GRAPH
        + """
    side = torch.npu.Stream()

    def capture(then):
        forked = torch.npu.NPUGraph()
        with torch.npu.graph(forked):
            a = x * 2
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                b = a + 1
            result = then(a, b)
        return forked, result

    def join():
        torch.npu.current_stream().wait_stream(side)

    forked, c = capture(lambda a, b: join() or b * 3)
    for _ in range(3):
        forked.replay()
    assert torch.equal(c.cpu(), (x.cpu() * 2 + 1) * 3)
    assert "107025" in refused(capture, lambda a, b: None)
    racy, _ = capture(lambda a, b: (a.add_(1), join()))
    racy.replay()
    assert "write after read" in sync_error()
    """
    )
    assert any("not joined again" in text for text in run.report["errors"])
    assert "branch 1" in run.report["hazards"][0]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("y.sum().item()", "while it is captured"),
        ("torch.npu.synchronize()", "synchronise of the device during a capture"),
        ("torch.nonzero(y)", "can't be captured"),
        ("torch.npu.current_stream().wait_event(outside)", "recorded outside the capture"),
    ],
)
def test_what_can_not_be_captured_is_refused(emulate, statement, message):
    run = emulate(
        GRAPH
        + f"""
    outside = torch.npu.Event()
    outside.record()

    def capture():
        with torch.npu.graph(torch.npu.NPUGraph()):
            a = x + 1
            {statement}

    print(refused(capture))
    """
    )
    assert message in run.out + run.err


def test_pinned_sources_of_a_graph_are_watched_at_each_replay(emulate):
    emulate(
        """
        source, device = pinned(256, 1), torch.zeros(256, dtype=INT, device="npu")
        torch.npu.synchronize()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            device.copy_(source, non_blocking=True)
        for value in (1, 2):
            source.fill_(value)
            graph.replay()
            assert sync_error() == ""
            assert device.cpu()[0] == value
        graph.replay()
        source.fill_(3)
        assert "rewritten" in sync_error()
        """
    )


GROUP = """
    torch.inference_mode().__enter__()
    def attention(query, actual_seq_lengths_kv=None, out=None, **ignored):
        result = query * sum(actual_seq_lengths_kv)
        return (result, None) if out is None else out[0].copy_(result)
    name = "npu::npu_fused_infer_attention_score"
    emulator.register_reference(name, attention)
    emulator.register_reference(name, attention, "out")
    q = torch.ones(1, 4, 16, device="npu")
    cache = torch.ones(8, 4, 32, device="npu")
    out, lse = torch.empty_like(q), torch.empty(0, device="npu")
    side = torch.npu.Stream()

    def attend(length):
        torch_npu.npu_fused_infer_attention_score.out(
            query=q, key=cache, value=cache, input_layout="TND", num_heads=4,
            actual_seq_lengths=[1], actual_seq_lengths_kv=[length], out=[out, lse])

    def update_by(tasks):
        with torch.npu.stream(side):
            torch.npu.graph_task_update_begin(side, handle)
            try:
                tasks()
            finally:
                torch.npu.graph_task_update_end(side)

    def update(length, record=True):
        update_by(lambda: attend(length))
        if record:
            event.record(side)

    graph, event = torch.npu.NPUGraph(), torch.npu.ExternalEvent()
    with torch.npu.graph(graph):
        main = torch.npu.current_stream()
        event.wait(main)
        event.reset(main)
        torch.npu.graph_task_group_begin(main)
        attend(5)
        handle = torch.npu.graph_task_group_end(main)
        result = out + 0
"""


def test_updates_that_nothing_orders_with_the_replay_are_found(emulate):
    run = emulate(
        GROUP
        + """
    update(5)
    graph.replay()
    emulator.let_run()
    update(9)                                         # the first replay isn't known to be complete
    assert "while an earlier replay may still run it" in sync_error()
    """
    )
    assert run.report["counters"]["hazards"] == 1


NOT_RECORDED = "update(5, record=False); graph.replay(); error = sync_error()"
WAITED_FOR = "error = refused(graph.replay)"


@pytest.mark.parametrize(
    ("statements", "blocking"), [(NOT_RECORDED, "0"), (WAITED_FOR, "1")], ids=["never", "waited"]
)
def test_an_event_that_is_not_recorded_hangs_the_stream(emulate, statements, blocking):
    """Never, or not yet: torch_npu waits for the replay, which gets no lengths then."""
    emulate(
        GROUP
        + f"""
    {statements}
    assert "external event" in error
    """,
        hang_seconds=1,
        environment={"ASCEND_LAUNCH_BLOCKING": blocking},
    )


def test_no_graph_is_captured_with_a_task_queue_of_level_2(emulate):
    emulate(
        """
    graph = torch.npu.NPUGraph()
    assert "TASK_QUEUE_ENABLE = 2" in refused(graph.capture_begin)
    torch.npu.set_task_queue_enable(1)
    with torch.npu.graph(torch.npu.NPUGraph()):
        torch.zeros(4, device="npu")
    """,
        environment={"TASK_QUEUE_ENABLE": "2"},
    )


def test_updates_must_match_what_was_captured(emulate):
    run = emulate(
        GROUP
        + """
    for tasks in (lambda: None), (lambda: (attend(1), attend(2))), (lambda: out.add_(1)):
        refused(update_by, tasks)
    """
    )
    errors = " ".join(run.report["errors"])
    for message in ("issued 0 tasks", "more tasks than were captured", "where npu::"):
        assert message in errors
