"""Layers on npu:0 of the emulated runtime: fused operators, experts, int8, latent rows."""

import pytest

from tests.helpers.emulator import why_no_emulator
from tests.npu.suites import assert_passed, suite, under_every_profile

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())

SUITES = under_every_profile(
    {
        "fused": suite("fused"),
        "fused families": suite("fused_families"),
        "latent": suite("latent"),
        "int8": suite("quantization"),
        "experts": suite("experts"),
        "expert budgets": suite("expert_budgets"),
        "hybrids": suite("hybrids"),
        "more hybrids": suite("more_hybrids"),
        "episodes": suite("episodes"),
        "more episodes": suite("more_episodes"),
    },
    "fused",
    "fused families",
    "latent",
)


@pytest.mark.parametrize("which", SUITES)
def test_on_the_device(cases_of, which):
    """Every test of the suite's files passes there."""
    assert_passed(SUITES[which], *cases_of(SUITES[which]))
