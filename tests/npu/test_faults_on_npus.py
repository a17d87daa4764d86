"""What goes wrong on a device while an engine serves: a stream that is stuck."""

import json
import re

import pytest

from tests.helpers.emulator import emulate, why_no_emulator
from tests.helpers.engine import make_model
from tests.npu.only_some import HEAD_SIZE

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())

STUCK = {
    "sync": "RuntimeError: ACL stream synchronize failed, error code:107019",
    "async": "NPU function error: aclrtSynchronizeEvent(event_), error code is 107019",
}
"""Of torch_npu, which asks for the end of a stream, or for an event after the copy of samples: the
code is that of a wait that took too long."""
HANG = 3
"""Seconds after which the runtime calls a stream hung; CANN has minutes."""

SERVE = """
import json, sys, time
from pathlib import Path
import torch
from tests.helpers.engine import engine, generate, greedy, runner_of
from tests.helpers.prompts import prompts_of
from vllm_npu_prep.inspect.record_file import record_files

folder = Path(sys.argv[1])
prompts = prompts_of(7, [30, 5, 41, 17])
record = {"dir": str(folder / "steps"), "steps": "last 4"}
told = {}
is_async = sys.argv[2] == "async"
settings = {"async_scheduling": is_async, "additional_config": {"npu_prep": {"record": record}}}
with engine(folder / "model", dtype="float16", block_size=128, **settings) as llm:
    told["served"] = generate(llm, prompts, greedy(8)) == generate(llm, prompts, greedy(8))
    runner = runner_of(llm)
    forward, at = runner._model_forward, []

    def stuck(*args, **kwargs):
        at.append(None)
        if len(at) == 5:
            torch.npu.ExternalEvent().wait(torch.npu.current_stream())  # nobody records it
        return forward(*args, **kwargs)

    runner._model_forward = stuck
    began = time.monotonic()
    try:
        generate(llm, prompts, greedy(8))
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
    told["seconds"] = time.monotonic() - began
    told["steps"] = len(at)
told["records"] = len(record_files(folder / "steps"))
print("told", json.dumps(told), flush=True)
"""


@pytest.mark.parametrize("scheduling", STUCK)
def test_a_stuck_stream_ends_the_engine_with_the_reason_of_the_runtime(scheduling, tmp_path):
    """The step that waits for it fails, nobody waits for ever, and the last steps are on disk.

    With asynchronous scheduling, the next step is under way by then.
    """
    make_model(tmp_path / "model", num_hidden_layers=1, head_dim=HEAD_SIZE)
    options = ("--hang-seconds", str(HANG))
    run = emulate("-c", SERVE, str(tmp_path), scheduling, options=options)
    output = run.stdout + run.stderr
    found = re.search(r"^told (.*)$", output, re.MULTILINE)
    assert found, output[-4000:]
    told = json.loads(found[1])
    print(told)
    assert told["served"] and "error" in told, told
    assert STUCK[scheduling] in told["error"]
    assert told["steps"] == (6 if scheduling == "async" else 5)
    assert told["seconds"] > HANG - 1
    assert told["records"] == 4
