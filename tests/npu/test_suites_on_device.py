"""Operators, steps, copies, features and little memory on npu:0 of the emulated runtime."""

import pytest

from tests.helpers.emulator import why_no_emulator
from tests.npu.suites import Suite, assert_passed, suite, under_every_profile

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())

SUITES = under_every_profile(
    {
        "schemas": Suite(("tests/emulator/operators/test_table.py",)),
        "staging": suite("staging"),
        "steps": suite("worked_examples", "counts", "graphs", "kernels", "verify_device"),
        "features": suite(
            "local_attention",
            "lora",
            "long_context",
            "multimodal",
            "pooling",
            "sampling",
            "speculation",
            "structured_output",
        ),
        "longer context": suite("longer_context"),
        "profile": suite("profile"),
        "windows": suite("windows"),
        "memory": suite("memory", memory="170M"),
        "sleep": suite("sleep", memory="1G"),
        "connectors": suite("kv_transfer", "offloading", "own_connector"),
    },
    "steps",
    "features",
    "windows",
)


@pytest.mark.parametrize("which", SUITES)
def test_on_the_device(cases_of, which):
    """Every test of the suite's files passes there."""
    assert_passed(SUITES[which], *cases_of(SUITES[which]))
