"""What goes wrong on a device while an engine serves: memory, a kernel, a stream that is stuck."""

import json
import re

import pytest

from tests.helpers.emulator import emulate, why_no_emulator
from tests.helpers.engine import make_model
from tests.helpers.v2 import on_both
from tests.npu.only_some import HEAD_SIZE

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())

SIZES = r"in a step with \d+ tokens? of 4 requests"
FAILED = (
    rf"PrepError: the device failed, as was seen {SIZES} \(.*error code.*{{}}.*\); start again\."
)
MEMORY = rf"PrepError: out of memory {SIZES} \(NPU out of memory\. Tried .*\); lower --gpu-memory"
KERNEL = FAILED.format("507015") + ".*ASCEND_LAUNCH_BLOCKING=1"
REASONS = {
    "memory": MEMORY,
    "memory in sampling": MEMORY,
    "kernel": KERNEL,
    "kernels": KERNEL,
    "stuck": FAILED.format("107019"),
}
HANG = 1
"""Seconds after which the runtime calls a stream hung; CANN has minutes."""


@pytest.mark.parametrize(
    ("scheduling", "faults", "runner_name"),
    on_both({"sync": ("sync", tuple(REASONS)), "async": ("async", ("memory", "kernels", "stuck"))}),
)
def test_a_card_that_fails_ends_the_engine_with_its_reason(
    scheduling, faults, runner_name, tmp_path
):
    """In one line. Nobody got a wrong token, the last steps are on disk, and the next
    engine of the process serves as the first one did."""
    make_model(tmp_path / "model", num_hidden_layers=1, head_dim=HEAD_SIZE)
    # Slow streams: when the engine ends, kernels of the next step are still to fail
    options = ("--hang-seconds", str(HANG), "--memory", "2G", "--delay", "equal")
    command = ("-m", "tests.npu.faulty_engines", str(tmp_path), scheduling, runner_name, *faults)
    run = emulate(*command, options=options)
    output = run.stdout + run.stderr
    found = re.search(r"^told (.*)$", output, re.MULTILINE)
    assert found, output[-6000:]
    told = json.loads(found[1])
    print(json.dumps(told, indent=1))
    assert told.pop("next engine") == {"as before": True}
    assert set(told) == set(faults)
    for fault, of in told.items():
        assert of["as before"], fault
        assert re.match(REASONS[fault], of.get("error", "")), (fault, of)
        assert "\n" not in of["error"], fault
        assert of["tokens"] > 0 and of["wrong"] == {}, (fault, of)
        assert of["records"] >= 4, fault
    # With asynchronous scheduling, the next step is under way by then
    assert told["stuck"]["steps"] == (6 if scheduling == "async" else 5)
    assert ("The device fails while the engine ends" in output) == (scheduling == "async")
    assert told["stuck"]["seconds"] > HANG / 2
    # The last error is left to Python: its user sees a line
    (line,) = re.findall(r"vllm_npu_prep: error: (.*)$", run.stderr, re.MULTILINE)
    assert re.match(KERNEL, f"PrepError: {line}")
    assert "Traceback (most recent call last)" not in run.stderr
    assert run.returncode == 1
