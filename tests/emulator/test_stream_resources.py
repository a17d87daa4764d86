"""Streams are counted: those of the program, of captured graphs and of communication."""

GRAPHS = """
    torch.npu.Stream()                                # torch_npu makes all of its own at once
    x, graphs, streams = torch.ones(2, device="npu"), [], []

    def capture(fork=False, before_end=lambda: None):
        graph, side = torch.npu.NPUGraph(), torch.npu.Stream()
        with torch.npu.graph(graph):                  # torch_npu can't use a pool after a failure
            y = x + 1
            if fork:
                side.wait_stream(torch.npu.current_stream())
                torch.npu.current_stream().wait_stream(side)
            before_end()
        return graph

    def free_streams():
        count = ctypes.c_uint32()
        assert acl.aclrtGetStreamAvailableNum(ctypes.byref(count)) == 0
        return count.value

    def leave(wanted):
        while free_streams() > wanted:
            streams.append(ctypes.c_void_p())
            assert acl.aclrtCreateStream(ctypes.byref(streams[-1])) == 0
"""


def test_spent_streams_are_error_207008(emulate):
    run = emulate(
        GRAPHS
        + """
    assert free_streams() == 2048 - 34                # torch_npu's default, secondary and pool
    leave(3)
    graphs += [capture(), capture(), capture()]
    error = refused(capture)
    assert "error code is 207008" in error and "Stream resources are insufficient" in error
    assert "npu:0 has 2048 streams, 2045 are in use by the program, 3 by captured" in error, error
    assert acl.aclrtCreateStream(ctypes.byref(ctypes.c_void_p())) == 207008
    graphs.pop().reset()
    graphs.append(capture())                          # the failed capture left nothing
    assert acl.aclrtDestroyStream(streams.pop()) == 0
    graphs.append(capture())
    graphs[-1].replay()
    torch.npu.synchronize()
    graphs.pop().reset()                              # one for the capture, none for its fork:
    assert refused(capture, fork=True)                # by torch_npu's task queue, without the code
    """
    )
    assert run.report["errors"] == []  # programs handle it, as they do memory


def test_a_graph_holds_streams_of_its_own_and_of_communication(emulate):
    """Those that were captured, and two for each group, until it is gone."""
    emulate(
        GRAPHS
        + """
    group, other = ctypes.c_void_p(1), ctypes.c_void_p(2)

    def note(*groups):
        stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
        return [acl.emulator_note_communication(stream, group) for group in groups]

    before = free_streams()
    assert note(group) == [0] and free_streams() == before        # nothing is captured
    plain = capture()
    assert free_streams() == before - 1
    forked = capture(fork=True, before_end=lambda: note(group, group, other))
    assert free_streams() == before - 1 - 2 - 2 * 2
    plain.reset()
    forked.replay()
    assert free_streams() == before - 2 - 2 * 2
    del forked
    torch.npu.synchronize()
    assert free_streams() == before
    assert acl.emulator_take_streams(0, 40, b"a group") == 0
    assert free_streams() == before - 40
    leave(2)
    answers = []
    capture(before_end=lambda: answers.extend(note(group)))
    assert answers == [207008]
    acl.emulator_give_streams(0, 40)
    """
    )


def test_the_options_set_the_numbers_and_the_driver(emulate):
    run = emulate(
        GRAPHS
        + """
    assert free_streams() == 6
    leave(4)
    graphs.append(capture(before_end=lambda: acl.emulator_note_communication(
        ctypes.c_void_p(torch.npu.current_stream().npu_stream), ctypes.c_void_p(1))))
    assert free_streams() == 0
    assert "npu:0 has 40 streams" in refused(capture)
    assert torch_npu.npu.utils.get_cann_version("DRIVER") == "24.1.RC3"
    assert torch_npu.npu.utils.get_cann_version("CANN") == "9.1.0"
    text = ctypes.create_string_buffer(128)
    assert acl.aclsysGetVersionStr(b"driver", text) == 0 and text.value == b"24.1.RC3"
    del graphs[:]

    # An update is not refused aloud: torch_npu warns, and the graph keeps its old arguments.
    graph, y = torch.npu.NPUGraph(), torch.zeros(2, device="npu")
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        torch.add(x, 1, out=y)
        handle = torch.npu.graph_task_group_end(stream)
    torch.npu.synchronize()
    stream = torch.npu.current_stream()
    torch.npu.graph_task_update_begin(stream, handle)
    torch.add(x, 41, out=y)
    torch.npu.graph_task_update_end(stream)
    assert y.tolist() == [42, 42]                     # it ran at once
    graph.replay()
    assert y.tolist() == [2, 2]                       # with the arguments of the capture
    """,
        streams=40,
        hccl_streams=3,
        driver="24.1.RC3",
    )
    assert "driver and firmware packages do not match" in run.out
    assert "driver 25.0.RC1 or later, this is 24.1.RC3" in run.report["errors"][0]
