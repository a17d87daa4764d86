"""Profiles and faults reach the processes of a command, its references and its runtime.

What they change is shown in `tests/npu`: `on_8_5`, `on_docs`, `on_device/test_verify_device.py`.
"""

from pathlib import Path

from ascend_emulator import faults, profiles
from tests.emulator.test_graphs import GROUP
from tests.helpers.emulator import import_path

PAGE = Path(__file__).parents[2] / "docs" / "changing" / "emulator.md"


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
