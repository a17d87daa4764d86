"""The test files of `on_device` on npu:0 of the emulated runtime, in a process for each memory.

Starting a process takes longer than most of these files: vLLM and torch_npu are imported.
"""

import xml.etree.ElementTree as ET
from functools import cache

import pytest

from tests.helpers.emulator import emulate, selected, why_no_emulator

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())

ON_DEVICE = {
    "schemas": (["tests/emulator/operators/test_table.py"], "8G"),
    "staging": (["tests/npu/on_device/test_staging.py"], "8G"),
    "steps": (
        [
            "tests/npu/on_device/test_worked_examples.py",
            "tests/npu/on_device/test_counts.py",
            "tests/npu/on_device/test_graphs.py",
            "tests/npu/on_device/test_kernels.py",
            "tests/npu/on_device/test_verify_device.py",
        ],
        "8G",
    ),
    "features": (
        [
            "tests/npu/on_device/test_local_attention.py",
            "tests/npu/on_device/test_lora.py",
            "tests/npu/on_device/test_long_context.py",
            "tests/npu/on_device/test_multimodal.py",
            "tests/npu/on_device/test_pooling.py",
            "tests/npu/on_device/test_sampling.py",
            "tests/npu/on_device/test_speculation.py",
            "tests/npu/on_device/test_structured_output.py",
        ],
        "8G",
    ),
    "fused": (["tests/npu/on_device/test_fused.py"], "8G"),
    "fused families": (["tests/npu/on_device/test_fused_families.py"], "8G"),
    "profile": (["tests/npu/on_device/test_profile.py"], "8G"),
    "windows": (["tests/npu/on_device/test_windows.py"], "8G"),
    "memory": (["tests/npu/on_device/test_memory.py"], "170M"),
}
"""Files, and the memory of the device."""


@pytest.fixture(scope="module")
def cases_of(request, tmp_path_factory):
    """Function of a memory: every test case that was run on a device with it, and the output."""
    chosen = [callspec["what"] for callspec in selected(request, test_on_the_device)]

    @cache
    def run(memory: str) -> tuple[list[ET.Element], str]:
        files = [
            file for what in chosen for file in ON_DEVICE[what][0] if ON_DEVICE[what][1] == memory
        ]
        report = tmp_path_factory.mktemp("on_device") / "report.xml"
        result = emulate(
            *("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files),
            options=("--delay", "equal", "--memory", memory),
            NPU_PREP_ON_DEVICE="1",
        )
        output = result.stdout + result.stderr
        assert report.exists(), output[-4000:]
        if result.returncode not in (0, 1):  # 1: tests failed, which those say
            pytest.fail(f"exit code {result.returncode}\n{output[-4000:]}")
        return [*ET.parse(report).getroot().iter("testcase")], output

    return run


@pytest.mark.parametrize("what", ON_DEVICE)
def test_on_the_device(cases_of, what):
    """Operator schemas, worked examples through the runner, copies that take time, counts, graphs,
    pooling models, little memory."""
    files, memory = ON_DEVICE[what]
    cases, output = cases_of(memory)
    for file in files:
        module = file.removesuffix(".py").replace("/", ".")
        own = [case for case in cases if case.get("classname", "").startswith(module)]
        assert own, f"{file} had no tests\n{output[-4000:]}"
        for case in own:
            problem = next((each for each in case if each.tag in ("failure", "error")), None)
            assert problem is None, f"{file}::{case.get('name')}\n{problem.text}"
            assert case.find("skipped") is None, f"{file}::{case.get('name')} was skipped"
