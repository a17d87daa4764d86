"""Host phases in vLLM's profile."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.engine import generate, graphs, greedy, make_model, runner_of
from tests.helpers.v2 import RUNNERS, engine_of
from vllm_npu_prep.observe import scopes

PHASES = ["prepare_inputs", *scopes.PHASES]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def recorded(folder: Path) -> list[dict]:
    """Scopes of the trace in a folder, by start."""
    (path,) = folder.glob("*rank0*.json*")
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(text)["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation"]
    return sorted(found, key=lambda event: float(event["ts"]))


def spans(events: list[dict], name: str) -> list[tuple[float, float]]:
    """Start and end of each scope of a name, in microseconds."""
    return [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event["name"] == scopes.PREFIX + name
    ]


def numbers(events: list[dict]) -> list[dict[str, int]]:
    """What the trace tells of each step."""
    names = [event["name"] for event in events]
    prefix = scopes.PREFIX + scopes.STEP
    steps = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return [{key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", step)} for step in steps]


def is_wrapped(runner) -> list[str]:
    methods = {
        runner: ("_update_states", "update_requests", "_prepare_inputs"),
        runner.padding: ("decide",),
        runner.preparer: ("build_metadata",),
        runner.preparer.staging: ("acquire", "send"),
    }
    return [name for part, names in methods.items() for name in names if name in vars(part)]


@pytest.mark.parametrize("runner_name", RUNNERS)
def test_a_profile_shows_the_phases_of_each_step(model, tmp_path, runner_name):
    settings = graphs("FULL_DECODE_ONLY", 4, 8, max_num_seqs=8)
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    with engine_of(runner_name, model, profiler_config=profiler, **settings) as llm:
        runner = runner_of(llm)
        prompts = [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
        before = generate(llm, prompts, greedy(4))
        assert is_wrapped(runner) == []
        llm.start_profile()
        assert len(is_wrapped(runner)) == 6
        steps, nbytes = runner.preparer.staging.steps, []
        submit = runner.preparer.staging.submit
        runner.preparer.staging.submit = lambda size: (nbytes.append(size), submit(size))[1]
        assert generate(llm, prompts, greedy(4)) == before
        del runner.preparer.staging.submit
        steps = runner.preparer.staging.steps - steps
        llm.stop_profile()
        assert is_wrapped(runner) == []
        assert generate(llm, prompts, greedy(4)) == before

    events = recorded(tmp_path)
    check_phases(events, steps)
    prompts_step, *decodes = numbers(events)
    assert prompts_step == {"tokens": 9, "padding": 0, "graph": 0, "bytes": nbytes[0], "waits": 0}
    assert decodes == [
        {"tokens": 3, "padding": 1, "graph": 4, "bytes": size, "waits": 0} for size in nbytes[1:]
    ]


def check_phases(events: list[dict], steps: int) -> None:
    """Phases follow one another without overlap, inside of the preparation."""
    assert len(spans(events, "update_states")) >= steps
    assert len(numbers(events)) == steps
    for phase in PHASES:
        assert len(spans(events, phase)) == steps, phase
    for whole, *parts in zip(*(spans(events, phase) for phase in PHASES)):
        edges = np.array([whole[0], *(edge for part in parts for edge in part), whole[1]])
        assert (np.diff(edges) >= -0.5).all()  # microseconds of unix time have that resolution
