"""What int8 costs SmolLM2 in perplexity, by `examples/perplexity.py`: less than bars allow."""

import re
import sys

import pytest

from tests.helpers.demo import CACHE
from tests.helpers.emulator import emulate, run, why_no_emulator

SCRIPT = "examples/perplexity.py"
SECONDS = 3600
COSTS = 0.02
"""By so much perplexity may rise."""
OF_DEVICES = 0.005
"""By so much a card may be off the fallback. The standard error of that is 0.2 % on 10,230 tokens,
and 0.6 % on a tenth of them: 16 bits are enough for inputs to be rounded otherwise."""
ON_CARD = {
    "compressed-tensors, dynamic": "smollm2-w8a8-compressed-tensors-dynamic",
    "ModelSlim, static": "smollm2-w8a8-modelslim-static",
}
"""Copies that a card serves, and their folders."""


def perplexities(done) -> list[tuple[str, float]]:
    """Names and perplexities in the table with which the script ends."""
    assert done.returncode == 0, done.stderr[-2000:]
    table = done.stdout.partition("perplexity of")[2]
    print(table)  # pages have these figures
    rows = re.findall(r"^(\S+(?: \S+)*) +([\d.]+) +[+-][\d.]+% ±", table, re.MULTILINE)
    return [(name, float(value)) for name, value in rows]


@pytest.fixture(scope="module")
def on_fallback(real_model):
    command = [sys.executable, SCRIPT]
    return dict(perplexities(run(command, timeout=SECONDS, NPU_PREP_DEVICE="cpu")))


def test_int8_copies_predict_nearly_as_well(on_fallback):
    costs = {name: value / on_fallback["float"] - 1 for name, value in on_fallback.items()}
    assert len(costs) == 5
    assert max(costs.values()) < COSTS, costs


@pytest.mark.parametrize("copy", ON_CARD)
def test_a_card_predicts_as_the_fallback_does(on_fallback, copy):
    if reason := why_no_emulator():
        pytest.skip(reason)
    model = CACHE / ON_CARD[copy]
    given = SCRIPT, "--dtype", "bfloat16", "--model", str(model)
    [(_, on_card)] = perplexities(emulate(*given, timeout=SECONDS))
    assert on_card == pytest.approx(on_fallback[copy], rel=OF_DEVICES)
