"""Tests in `on_device` run under the emulator or on an NPU, started from here."""

import json
import os
import xml.etree.ElementTree as ET
from functools import cache
from typing import Any

import pytest

from ascend_emulator import profiles
from tests.helpers.emulator import emulate, selected
from tests.matrix.collect import add

collect_ignore = [] if os.environ.get("NPU_PREP_ON_DEVICE") else ["on_device"]


@pytest.fixture(params=profiles.PROFILES)
def profile(request, monkeypatch):
    """Each profile of the emulated card, on all threads: kernels run on those of their streams.

    For tests of operators. The CANN version that the runtime reports stays that of the process.
    """
    monkeypatch.setenv(profiles.PROFILE, request.param)
    profiles._of_process.cache_clear()
    yield request.param
    monkeypatch.undo()
    profiles._of_process.cache_clear()


@pytest.fixture(scope="module")
def cases_of(request, tmp_path_factory):
    """Function of a suite: every test case of its card, and the output of the process."""
    module = request.module
    chosen = selected(request, module.test_on_the_device)
    suites = [module.SUITES[callspec["which"]] for callspec in chosen]

    @cache
    def run(memory: str, profile: str) -> tuple[list[ET.Element], str]:
        files = [file for each in suites for file in each.files if each[1:] == (memory, profile)]
        report = tmp_path_factory.mktemp("on_device") / "report.xml"
        only_first = ("-x",) if os.environ.get("NPU_PREP_TEST_FIRST_FAILURE") else ()
        brief = ("--brief",) if request.config.getoption("--brief") else ()
        result = emulate(
            *("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"),
            *(*only_first, *brief, *files),
            options=("--delay", "equal", "--memory", memory, "--profile", profile),
            timeout=1800,
            NPU_PREP_ON_DEVICE="1",
        )
        output = result.stdout + result.stderr
        assert report.exists(), output[-4000:]
        if result.returncode not in (0, 1):  # 1: tests failed, which those say
            pytest.fail(f"exit code {result.returncode}\n{output[-4000:]}")
        return [*ET.parse(report).getroot().iter("testcase")], output

    return lambda which: run(*which[1:])


@pytest.fixture(scope="module")
def on_card(request, tmp_path_factory):
    """Function of a profile and a model: what its card makes of it, all models in one process.

    A module has a fixture `case_of`: a function of a model.
    """
    chosen = selected(request, request.module.test_tokens_equal_those_of_the_fallback)
    case_of = request.getfixturevalue("case_of")

    @cache
    def run(profile: str) -> dict[str, Any]:
        names = [params["name"] for params in chosen if params["profile"] == profile]
        cases = {name: case_of(name) for name in names}
        folder = tmp_path_factory.mktemp("card")
        out, report = folder / "tokens.json", folder / "report.json"
        result = emulate(
            *("-m", "tests.npu.generate", str(out), *cases.values()),
            options=("--delay", "skewed", "--profile", profile, "--report", str(report)),
        )
        assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
        assert json.loads(report.read_text())["hazards"] == []
        results = json.loads(out.read_text())
        return {name: results[case] for name, case in cases.items()}

    def of(profile: str, name: str) -> Any:
        add(run(profile)[name]["cells"])
        return run(profile)[name]

    return of
