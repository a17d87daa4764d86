"""The test files of `on_device`, each in a process of its own on npu:0 of the emulated runtime."""

import pytest

from tests.helpers.emulator import emulate, why_no_emulator

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())

ON_DEVICE = {
    "staging": (["test_staging.py"], "8G"),
    "steps": (
        ["test_worked_examples.py", "test_counts.py", "test_graphs.py", "test_kernels.py"],
        "8G",
    ),
    "features": (
        [
            "test_local_attention.py",
            "test_lora.py",
            "test_long_context.py",
            "test_multimodal.py",
            "test_pooling.py",
            "test_profile.py",
            "test_sampling.py",
            "test_speculation.py",
            "test_structured_output.py",
        ],
        "8G",
    ),
    "windows": (["test_windows.py"], "8G"),
    "memory": (["test_memory.py"], "170M"),
}


@pytest.mark.parametrize("what", ON_DEVICE)
def test_on_the_device(what):
    """Worked examples through the runner, copies that take time, counts, graphs, pooling models,
    little memory."""
    names, memory = ON_DEVICE[what]
    files = [f"tests/npu/on_device/{name}" for name in names]
    result = emulate(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", *files),
        options=("--delay", "equal", "--memory", memory),
        NPU_PREP_ON_DEVICE="1",
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert " passed" in result.stdout
