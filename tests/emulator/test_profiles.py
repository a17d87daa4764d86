"""Profiles and faults reach the processes of a command, its references and its runtime."""

from pathlib import Path

from ascend_emulator import faults, profiles
from tests.emulator.test_graphs import GROUP
from tests.helpers.emulator import import_path

PAGE = Path(__file__).parents[2] / "docs" / "changing" / "emulator.md"

ATTEND = """
    torch.inference_mode().__enter__()

    def attend(head_size=96):
        q = torch.ones(6, 4, head_size, dtype=torch.bfloat16)
        k = torch.arange(6.0)[:, None, None].expand(6, 4, head_size).to(torch.bfloat16)
        mask = torch.triu(torch.ones(2048, 2048, dtype=torch.int8), 1)
        return torch_npu.npu_fused_infer_attention_score(
            q.npu(), k.npu() * 0, k.npu(), num_heads=4, num_key_value_heads=4, scale=1.0,
            input_layout="TND", actual_seq_lengths=[6], actual_seq_lengths_kv=[6],
            atten_mask=mask.npu(), sparse_mode=4, pre_tokens=2, next_tokens=0)[0]
"""


def test_a_process_follows_the_profile_of_its_environment(emulate):
    run = emulate(
        ATTEND
        + """
    assert attend(head_size=64).cpu()[5, 0, 0] == 4   # the average of 3, 4 and 5
    attend()
    error = sync_error()
    assert "head size of PFA" in error, error
    """,
        profile="8.5",
    )
    assert run.report["hazards"] == []


def test_a_fault_changes_what_an_operator_computes(emulate):
    emulate(
        ATTEND
        + """
    assert attend().cpu()[5, 0, 0] == 3.5             # of 2, 3, 4 and 5
    """,
        faults=("wide-window",),
    )


def test_the_command_passes_its_options_and_fails_with_hazards(emulate, tmp_path, monkeypatch):
    """To the runtime, to references, and to modules with references of one's own."""
    (tmp_path / "their_references.py").write_text(
        "def install(register_reference):\n"
        "    register_reference('npu::npu_swiglu', lambda input, dim=-1: input.chunk(2, dim)[0])\n"
    )
    monkeypatch.setenv("PYTHONPATH", import_path(tmp_path))
    run = emulate(
        GROUP
        + """
    version = ctypes.create_string_buffer(64)
    acl.aclsysGetVersionStr(b"runtime", version)
    assert version.value == b"8.5.0", version.value
    for length in (5, 9, 3):
        update(length)
        graph.replay()
        torch.npu.synchronize()
        assert result.cpu()[0, 0, 0] == 5             # the length of the capture
    y = torch_npu.npu_swiglu(torch.ones(2, 4, device="npu"))
    assert torch.equal(y.cpu(), torch.ones(2, 2))
    y.add_(1)
    with torch.npu.stream(side):
        y + 1                                         # which nothing orders, and no sync reports
    emulator.let_run()
    import os; os._exit(0)
    """,
        *("--profile", "8.5", "--fault", "stale-lengths", "--references", "their_references"),
        expect_code=3,
    )
    assert run.report["profile"] == "8.5" and run.report["faults"] == ["stale-lengths"]
    assert len(run.report["hazards"]) == 1 and run.report["errors"] == []
    assert "no sync came after" in run.err
    assert "profile 8.5 (CANN 8.5.0)" in run.err
    assert "kernels misbehave on purpose: stale-lengths" in run.err


def test_every_fault_and_profile_is_documented():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    documented = {row.split("`")[1] for row in rows}
    assert {*faults.FAULTS, *profiles.PROFILES} <= documented
