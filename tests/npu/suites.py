"""Suites of `on_device`: test files that share a process on npu:0 of the emulated runtime.

Starting a process takes longer than most of these files: vLLM and torch_npu are imported.
"""

import xml.etree.ElementTree as ET
from typing import NamedTuple

from ascend_emulator import profiles


class Suite(NamedTuple):
    """Test files, and on which card they run."""

    files: tuple[str, ...]
    memory: str = "8G"
    profile: str = profiles.DEFAULT


def suite(*names: str, memory: str = "8G") -> Suite:
    """Files of `on_device`, by what follows ``test_`` in their names."""
    return Suite(tuple(f"tests/npu/on_device/test_{name}.py" for name in names), memory)


def under_every_profile(suites: dict[str, Suite], *names: str) -> dict[str, Suite]:
    """These suites, and some of them under the other profiles, too.

    What one profile alone takes is in `tests.npu.only_some`.
    """
    return suites | {
        f"{name} of {profile}": suites[name]._replace(profile=profile)
        for profile in profiles.PROFILES
        for name in names
        if profile != profiles.DEFAULT
    }


def assert_passed(suite: Suite, cases: list[ET.Element], output: str) -> None:
    """All tests of the suite's files were run, and passed."""
    for file in suite.files:
        module = file.removesuffix(".py").replace("/", ".")
        own = [case for case in cases if case.get("classname", "").startswith(module)]
        assert own, f"{file} had no tests\n{output[-4000:]}"
        for case in own:
            problem = next((each for each in case if each.tag in ("failure", "error")), None)
            assert problem is None, f"{file}::{case.get('name')}\n{problem.text}"
            assert case.find("skipped") is None, f"{file}::{case.get('name')} was skipped"
