"""Copies that operators of a device make of strided tensors are counted, apart from launches."""


def test_each_strided_input_and_result_counts_one(emulate):
    run = emulate(
        """
        torch.inference_mode().__enter__()
        wide = torch.arange(32.0).reshape(4, 8).npu()
        left, right, whole = wide[:, :4], wide[:, 4:], torch.ones(4, 4, device="npu")

        def copies(function):
            with emulator.count() as c:
                function()
            return c.hidden_copies, c.launches

        assert copies(lambda: whole + whole) == (0, 1)
        assert copies(lambda: left + whole) == (1, 1)
        assert copies(lambda: left + right) == (2, 1)
        assert copies(lambda: wide[1:3] + wide[:2]) == (0, 1)             # rows are contiguous
        assert copies(lambda: whole[:, :0] + whole[:, :0])[0] == 0        # nothing to copy
        assert copies(lambda: torch.cat([left, whole, right])) == (2, 1)
        assert copies(lambda: whole + whole[:1].expand(4, 4)) == (1, 1)
        assert copies(lambda: torch.add(whole, whole, out=left)) == (1, 1)
        assert copies(lambda: right.add_(whole)) == (2, 1)                # read and written
        assert copies(lambda: left.zero_()) == (1, 1)                     # written
        # These take strides as they are.
        assert copies(lambda: left.contiguous()) == copies(lambda: left.clone()) == (0, 1)
        assert copies(lambda: whole.copy_(left)) == copies(lambda: left.copy_(whole)) == (0, 1)
        assert copies(lambda: whole @ whole.t()) == (0, 1)
        assert copies(lambda: whole @ left) == (1, 1)
        graph = torch.npu.NPUGraph()
        with emulator.count() as c, torch.npu.graph(graph):
            y = left + 1
        assert c.hidden_copies == 1
        with emulator.count() as c:
            graph.replay()
        assert c.hidden_copies == 0                   # as launches: counted when captured
        """
    )
    kernels = run.report["kernels"]
    assert kernels["hidden copy of self for aten::add"] == 3
    assert kernels["hidden copy of other for aten::add"] == 2
    assert kernels["hidden copy of tensors for aten::cat"] == 2
    assert kernels["hidden copy to self for aten::add_"] == 1
    hidden = sum(count for name, count in kernels.items() if name.startswith("hidden copy"))
    assert hidden == run.report["counters"]["hidden_copies"]


def test_references_say_which_arguments_their_operator_copies(emulate):
    run = emulate(
        """
        torch.inference_mode().__enter__()

        def copies(function):
            with emulator.count() as c:
                function()
            return c.hidden_copies

        both = torch.randn(3, 32).half().npu()        # of one projection
        x, gamma = both[:, :16], torch.ones(32).half().npu()[::2]
        rms_norm = lambda: torch_npu.npu_rms_norm(x, gamma)
        assert copies(lambda: torch_npu.npu_rms_norm(both, both[0])) == 0
        assert copies(rms_norm) == 2                  # whatever it doesn't write
        function = lambda input, gamma, epsilon=0: (None, None)
        emulator.register_reference("npu::npu_rms_norm", function, contiguous=["gamma"])
        assert copies(rms_norm) == 1
        emulator.register_reference("npu::npu_rms_norm", function, contiguous=[])
        assert copies(rms_norm) == 0
        torch.npu.synchronize()
        """
    )
    assert run.report["kernels"]["hidden copy of input for npu::npu_rms_norm"] == 1
