"""Operator references written in Python run as kernels do."""

import json

from ascend_emulator.calls import CALLS, arguments_of
from ascend_emulator.options import Options
from ascend_emulator.run import merged_calls


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
        delay="skewed",
    )


def test_references_are_for_known_operators_on_the_device(emulate):
    emulate(
        """
        x = torch.ones(1, 4, device="npu")
        assert "CPU" in refused(torch_npu.npu_rms_norm, torch.ones(2, 8), torch.ones(8))
        error = refused(emulator.register_reference, "npu::no_such_operator", print)
        assert "has no operator npu::no_such_operator" in error
        error = refused(torch_npu.npu_group_norm_silu, x, x[0], x[0], 2)
        assert "aclnnGroupNormSilu" in error          # no reference: it fails by name
        """
    )


def test_distinct_calls_are_written(emulate, tmp_path):
    emulate(
        """
        x, table = torch.ones(4, 16).half().npu(), torch.tensor([[1], [0]], dtype=INT, device="npu")
        for rows in (4, 2, 3):
            torch_npu.npu_swiglu(x[:rows])
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            torch_npu.npu_swiglu(x[:, :8])
        graph.replay()
        lens = torch.tensor([3, 5], dtype=INT)
        cache, out = x.new_ones(2, 128, 2, 16), x.new_ones(2, 4, 16)
        torch_npu._npu_paged_attention(
            query=out, key_cache=cache, value_cache=cache, num_kv_heads=2, num_heads=4,
            scale_value=1.0, block_table=table, context_lens=lens, out=torch.empty_like(out))
        torch.npu.synchronize()
        """,
        environment={CALLS: str(tmp_path)},
    )
    calls = [json.loads(line) for line in merged_calls(tmp_path, Options()).splitlines()]
    mine = [call for call in calls if call["operator"] != "atb::_npu_matmul_add_fp32"]
    paged, eager, captured = mine
    half = {"dtype": "float16", "shape": [2, 16]}
    card = {"cann": "9.1.0", "chip": "Ascend910B1"}
    assert eager == card | {"operator": "npu::npu_swiglu", "arguments": {"input": half}}
    assert captured["captured"] and captured["arguments"]["input"]["strides"] == [16, 1]
    assert paged["arguments"]["context_lens"] == {
        **{"dtype": "int32", "shape": [2], "host": True, "values": [3, 5]}
    }
    made = arguments_of(paged)
    assert made["block_table"].tolist() == [[1], [0]] and made["num_heads"] == 4
    assert arguments_of(captured)["input"].stride() == (16, 1)


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


def test_wrong_references_are_faults_by_name(emulate):
    """At the next sync: exceptions, results of another number, type or shape, arguments."""
    emulate(
        """
        torch.inference_mode().__enter__()
        half = torch.ones(2, 4, dtype=torch.float16, device="npu")
        key, cache = torch.ones(2, 1, 16).half().npu(), torch.ones(2, 4, 1, 16).half().npu()
        slots = torch.zeros(2, dtype=INT).npu()

        def fails(input, dim=-1):
            raise ValueError("the kernel refuses this")

        def rms_norm(result):
            return ("npu_rms_norm", lambda input, gamma, epsilon=0: result(input),
                    lambda: torch_npu.npu_rms_norm(half, half[0]))

        def swiglu(reference, dim=-1):
            return "npu_swiglu", reference, lambda: torch_npu.npu_swiglu(half, dim=dim)

        def scatter():
            torch_npu.npu_scatter_pa_kv_cache(
                key, key, cache, cache.clone(), slots, cache_mode="Norm")

        cases = [
            (rms_norm(lambda x: x), "npu::npu_rms_norm returned 1 tensor, schema has 2"),
            (rms_norm(lambda x: (x, 1.5)), "returned float as result 1, schema has Tensor"),
            (rms_norm(lambda x: (x.float(), None)), "result 0 is float[2, 4], the Meta function"),
            (swiglu(fails), "the kernel refuses this"),
            (swiglu(lambda input: input[:, :2], dim=0), "has no dim"),
            (("npu_scatter_pa_kv_cache", lambda **a: a["key"], scatter),
             "returned 1 tensor, schema has 0"),
        ]
        for (name, reference, call), message in cases:
            emulator.register_reference(f"npu::{name}", reference)
            call()                                    # as on a device, the call itself succeeds
            error = sync_error()
            assert message in error and name in error, (message, error)

        name = "npu::_npu_fused_infer_attention_score_get_max_workspace"
        emulator.register_reference(name, lambda **a: None, on_host=lambda *a, **b: 3)
        workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace
        error = refused(workspace, half, half, half)
        assert "returned int as result 0, schema has Tensor" in error, error
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
        error = refused(emulator.fail_kernel, "aten::mul", times=-1)
        assert "times=-1): give numbers of runs, 0 or more" in error
        """
    )
    assert run.report["hazards"] == run.report["errors"] == []
