"""Operator references written in Python run as kernels do."""

from tests.helpers.emulator import import_path

RMS = """
    torch.inference_mode().__enter__()
    calls = []

    def rms_norm(input, gamma, epsilon=1e-6):
        calls.append((emulator.is_on_device(input), input.device.type))
        scale = torch.rsqrt(input.float().pow(2).mean(-1, keepdim=True) + epsilon)
        return (input * scale * gamma).to(input.dtype), scale

    emulator.register_reference("npu::npu_rms_norm", rms_norm)
    x, gamma = torch.randn(4, 8).npu(), torch.ones(8, device="npu")
"""


def test_a_reference_runs_in_stream_order_and_again_at_replays(emulate):
    emulate(
        RMS
        + """
    with emulator.count() as c:
        y, scale = torch_npu.npu_rms_norm(x * 2, gamma)
        z = y + 1
    assert c.launches == 3
    want = rms_norm(x.cpu() * 2, torch.ones(8))[0] + 1
    assert torch.allclose(z.cpu(), want) and calls[0] == (True, "cpu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = torch_npu.npu_rms_norm(x, gamma)[0]
    before = len(calls)
    graph.replay()
    graph.replay()
    torch.npu.synchronize()
    assert len(calls) == before + 2
    """,
        delay="equal",
    )


def test_errors_of_references_surface_at_the_next_sync(emulate):
    emulate(
        """
        def swiglu(input, dim=-1):
            raise ValueError("the kernel refuses this")
        emulator.register_reference("npu::npu_swiglu", swiglu)
        torch_npu.npu_swiglu(torch.ones(2, 4, device="npu"))
        assert "the kernel refuses this" in sync_error()

        def wrong_shape(input, dim=-1):
            return input
        emulator.register_reference("npu::npu_swiglu", wrong_shape)
        torch_npu.npu_swiglu(torch.ones(2, 4, device="npu"))
        assert "the Meta function says" in sync_error()

        def incomplete(input):
            return input[:, :2]
        emulator.register_reference("npu::npu_swiglu", incomplete)
        torch_npu.npu_swiglu(torch.ones(2, 4, device="npu"), dim=0)
        assert "has no dim" in sync_error()
        """
    )


def test_host_arguments_are_taken_at_the_call_and_told_apart(emulate):
    emulate(
        """
        seen = {}

        def paged_attention(query, key_cache, context_lens, out, **ignored):
            seen.update(lens=context_lens.tolist(), on_device=emulator.is_on_device(context_lens))
            out.copy_(query)

        def check(name, on_host, overload):
            seen.update(name=name, on_host=on_host)

        name = "atb::_npu_paged_attention"
        emulator.register_reference(name, paged_attention, check_placement=check)
        q, cache = torch.ones(2, 4, 16, device="npu"), torch.ones(8, 4, 2, 16, device="npu")
        lens, out = torch.tensor([3, 5], dtype=INT), torch.zeros_like(q)
        torch_npu._npu_paged_attention(
            query=q, key_cache=cache, value_cache=cache, num_kv_heads=2, num_heads=4,
            scale_value=1.0, block_table=torch.zeros(2, 2, dtype=INT, device="npu"),
            context_lens=lens, out=out)
        lens.fill_(9)
        torch.npu.synchronize()
        assert seen["lens"] == [3, 5] and not seen["on_device"]
        assert seen["on_host"]["context_lens"] and not seen["on_host"]["query"]
        assert torch.equal(out.cpu(), q.cpu())
        """,
        delay="equal",
    )


def test_references_are_for_known_operators_on_the_device(emulate):
    emulate(
        RMS
        + """
    try:
        torch_npu.npu_rms_norm(torch.ones(2, 8), torch.ones(8))
    except (NotImplementedError, RuntimeError) as error:
        assert "CPU" in str(error)
    else:
        raise AssertionError("ran on the CPU")
    try:
        emulator.register_reference("npu::no_such_operator", rms_norm)
    except Exception as error:
        assert "has no operator npu::no_such_operator" in str(error)
    try:
        x = torch.ones(1, 4, device="npu")
        torch_npu.npu_group_norm_silu(x, x[0], x[0], 2)
    except RuntimeError as error:
        assert "aclnnGroupNormSilu" in str(error)              # no reference: it fails by name
    else:
        raise AssertionError("an operator without a reference ran")
    """
    )


def test_modules_with_references_are_installed_in_every_process(emulate, tmp_path, monkeypatch):
    (tmp_path / "their_references.py").write_text(
        "def install(register_reference):\n"
        "    register_reference('npu::npu_swiglu', lambda input, dim=-1: input.chunk(2, dim)[0])\n"
    )
    monkeypatch.setenv("PYTHONPATH", import_path(tmp_path))
    emulate(
        """
        y = torch_npu.npu_swiglu(torch.ones(2, 4, device="npu"))
        assert torch.equal(y.cpu(), torch.ones(2, 2))
        """,
        "--references",
        "their_references",
    )


def test_norms_in_half_precision_have_float32_statistics(emulate):
    emulate(
        """
        x, weight = torch.randn(5, 8).half(), torch.randn(8).half()
        y, mean, scale = torch.native_layer_norm(x.npu(), [8], weight.npu(), None, 1e-5)
        assert mean.dtype == scale.dtype == torch.float32
        want = torch.nn.functional.layer_norm(x.float(), [8], weight.float())
        assert torch.allclose(y.cpu().float(), want, atol=5e-3)
        assert torch.allclose(mean.cpu()[:, 0], x.float().mean(-1), atol=5e-3)
        """
    )


def test_results_of_another_number_or_type_are_faults_by_name(emulate):
    emulate(
        """
        torch.inference_mode().__enter__()
        half = torch.ones(2, 4, dtype=torch.float16, device="npu")
        gamma = torch.ones(4, dtype=torch.float16, device="npu")
        cases = [
            (lambda x: x, "reference of npu::npu_rms_norm returned 1 tensor, schema has 2"),
            (lambda x: (x, x, x), "returned 3 tensors, schema has 2"),
            (lambda x: None, "returned 1 result, schema has 2"),
            (lambda x: (), "returned 0 tensors, schema has 2"),
            (lambda x: {"y": x}, "returned 1 result, schema has 2"),
            (lambda x: (x, 1.5), "returned float as result 1, schema has Tensor"),
            (lambda x: (x.float(), None), "result 0 is float[2, 4], the Meta function"),
            (lambda x: (x[:1], None), "the Meta function says"),
            (lambda x: (x.to("meta"), None), "result 0 is a tensor on meta"),
        ]
        for result, message in cases:
            emulator.register_reference(
                "npu::npu_rms_norm", lambda input, gamma, epsilon=0, result=result: result(input))
            torch_npu.npu_rms_norm(half, gamma)
            error = sync_error()
            assert message in error and "npu_rms_norm" in error, (message, error)

        emulator.register_reference("npu::npu_swiglu", lambda input, dim=-1: (input, input))
        torch_npu.npu_swiglu(half)
        assert "npu_swiglu returned 2 tensors, schema has 1" in sync_error()

        emulator.register_reference(
            "npu::npu_scatter_pa_kv_cache", lambda **arguments: arguments["key"])
        key, cache = torch.ones(2, 1, 16).half().npu(), torch.ones(2, 4, 1, 16).half().npu()
        torch_npu.npu_scatter_pa_kv_cache(
            key, key, cache, cache.clone(), torch.zeros(2, dtype=INT).npu(), cache_mode="Norm")
        assert "npu_scatter_pa_kv_cache returned 1 tensor, schema has 0" in sync_error()

        name = "npu::_npu_fused_infer_attention_score_get_max_workspace"
        emulator.register_reference(name, lambda **a: None, on_host=lambda *a, **b: 3)
        try:
            torch_npu._npu_fused_infer_attention_score_get_max_workspace(half, half, half)
        except Exception as error:
            assert "returned int as result 0, schema has Tensor" in str(error)
        else:
            raise AssertionError("a number was taken for a tensor")
        """
    )


def test_a_kernel_that_is_to_fail_does_so_when_it_runs(emulate):
    """Once, where the host waits next; what it should have written stays as it was."""
    run = emulate(
        """
        x = torch.ones(4, device="npu")
        y = torch.zeros(4, device="npu")
        emulator.fail_kernel("aten::mul", skip=1)
        torch.mul(x, 2, out=y)
        torch.mul(x, 3, out=y)
        torch.add(x, 1, out=x)                            # the stream goes on
        error = sync_error()
        assert "507015" in error and "kernel_name=aten::mul" in error, error
        assert y.tolist() == [2, 2, 2, 2] and x.tolist() == [2, 2, 2, 2]
        assert torch.mul(x, 3, out=y).tolist() == [6, 6, 6, 6]

        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            torch.mul(x, 4, out=y)
        emulator.fail_kernel("aten::mul", skip=1, times=2)
        for fails in (False, True, True, False):          # each replay runs it
            graph.replay()
            assert bool(sync_error()) == fails
        emulator.fail_kernel("aten::mul")
        emulator.fail_kernel("aten::mul", times=0)
        torch.mul(x, 5, out=y)
        assert sync_error() == ""
        try:
            emulator.fail_kernel("aten::mul", times=-1)
        except emulator.EmulatorError as error:
            assert "times=-1): give numbers of runs, 0 or more" in str(error)
        else:
            raise AssertionError("a negative number was taken")
        """
    )
    assert run.report["hazards"] == run.report["errors"] == []
