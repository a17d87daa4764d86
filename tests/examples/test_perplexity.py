"""What int8 costs SmolLM2 in perplexity, by `examples/perplexity.py`: less than bars allow."""

import re
import sys

import pytest

from tests.helpers.emulator import emulate, run, why_no_emulator

SCRIPT = "examples/perplexity.py"
TOKENS = ("--tokens", "1024")
SECONDS = 3000
COSTS = 0.02
"""By so much perplexity may rise; it is 0.5 % and ... % on these tokens."""
OF_DEVICES = 0.005
"""By so much a card in 16 bits may be off the fallback in float32."""


def perplexities(done) -> dict[str, float]:
    """Perplexity by name of a copy, in the table with which the script ends."""
    assert done.returncode == 0, done.stderr[-2000:]
    table = done.stdout.partition("perplexity of")[2]
    rows = re.findall(r"^(\S.*\S) +([\d.]+) +[+-][\d.]+% ±", table, re.MULTILINE)
    return {name: float(value) for name, value in rows}


@pytest.fixture(scope="module")
def on_fallback(real_model):
    command = [sys.executable, SCRIPT, *TOKENS]
    return perplexities(run(command, timeout=SECONDS, NPU_PREP_DEVICE="cpu"))


def test_int8_copies_predict_nearly_as_well(on_fallback):
    costs = {name: value / on_fallback["float"] - 1 for name, value in on_fallback.items()}
    assert len(costs) == 5
    assert max(costs.values()) < COSTS, costs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_card_computes_the_same(on_fallback, dtype):
    if reason := why_no_emulator():
        pytest.skip(reason)
    on_card = perplexities(emulate(SCRIPT, *TOKENS, "--dtype", dtype, timeout=SECONDS))
    assert on_card == pytest.approx(on_fallback, rel=OF_DEVICES)
