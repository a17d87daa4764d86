"""Host phases in vLLM's profiler and in a trace of their own."""

import json

import numpy as np
import pytest

from tests.helpers.engine import engine, generate, graphs, greedy, make_model, runner_of
from vllm_npu_prep.inspect import scopes

PHASES = ["prepare_inputs", *scopes.PHASES]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def spans(events: list[dict], name: str) -> list[tuple[float, float]]:
    """Start and end of each span of a name, by start."""
    found = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"] == scopes.PREFIX + name and event["ph"] == "X"
    ]
    return sorted(found)


def counters(events: list[dict], name: str) -> list[dict]:
    return [e["args"] for e in events if e["name"] == scopes.PREFIX + name and e["ph"] == "C"]


def is_wrapped(runner) -> list[str]:
    methods = {
        runner: ("_update_states", "_prepare_inputs"),
        runner.padding: ("decide",),
        runner.preparer: ("build_metadata",),
        runner.preparer.staging: ("acquire", "send"),
    }
    return [name for part, names in methods.items() for name in names if name in vars(part)]


def test_a_profile_shows_the_phases_of_each_step(model, tmp_path):
    settings = graphs("FULL_DECODE_ONLY", 4, 8, max_num_seqs=8)
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    with engine(model, profiler_config=profiler, **settings) as llm:
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
        llm.start_profile()
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        worker.profiler_config.torch_profiler_dir = "/proc/nowhere"
        llm.stop_profile()  # a folder that can't be made costs the trace and nothing else
        worker.profiler_config.torch_profiler_dir = str(tmp_path / "last")
        llm.start_profile()
        assert generate(llm, prompts, greedy(4)) == before

    assert len(list(tmp_path.glob("last/npu_prep_rank0.*"))) == 1  # it ran until shutdown
    (ours,) = tmp_path.glob("npu_prep_rank0.*.trace.json")
    torchs = sorted(set(tmp_path.glob("*rank0*.json*")) - {ours})[0]
    events = json.loads(ours.read_text())["traceEvents"]
    check_phases(events, steps)
    assert counters(events, "tokens") == [
        {"real": 9, "padding": 0},  # all prompts, eager
        *[{"real": 3, "padding": 1}] * (steps - 1),
    ]
    assert counters(events, "graph size") == [{"tokens": 0}, *[{"tokens": 4}] * (steps - 1)]
    assert [c["bytes"] for c in counters(events, "copy")] == nbytes
    assert [c["so far"] for c in counters(events, "waits")] == [0] * steps
    check_torch_has_them(torchs, events)


def check_phases(events: list[dict], steps: int) -> None:
    """Phases follow one another without gap or overlap, inside of the preparation."""
    assert len(spans(events, "update_states")) >= steps
    for phase in PHASES:
        assert len(spans(events, phase)) == steps, phase
    for whole, *parts in zip(*(spans(events, phase) for phase in PHASES)):
        edges = np.array([whole[0], *(edge for part in parts for edge in part), whole[1]])
        assert (np.diff(edges) >= -0.5).all()  # microseconds of unix time have that resolution


def check_torch_has_them(path, events: list[dict]) -> None:
    """vLLM's own trace has the same scopes, as many times, under upstream's."""
    import gzip

    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    recorded = [
        {**event, "ts": float(event["ts"])}
        for event in json.loads(text)["traceEvents"]
        if event.get("cat") == "user_annotation"
    ]
    for phase in PHASES:
        assert len(spans(recorded, phase)) == len(spans(events, phase)), phase
