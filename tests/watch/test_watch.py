"""The watch of vLLM's own V1 runner: it is silent in mixed traffic, and names planted faults."""

import json
import logging
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm.v1.worker.worker_base import WorkerWrapperBase

from tests.differential.upstream import UpstreamRunner
from tests.helpers.engine import engine, generate, greedy, make_model
from tests.helpers.v2 import RUNNERS, asked_for, engine_of
from tests.helpers.watch import count_preemptions, record_cached
from vllm_npu_prep import __version__
from vllm_npu_prep import watch as entry
from vllm_npu_prep.cli import main
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.watch import attach, known
from vllm_npu_prep.watch.config import parse_watch
from vllm_npu_prep.watch.v1 import V1Adapter
from vllm_npu_prep.watch.watch import Watch, layer_groups

PROMPTS = [list(range(2, 40)), list(range(2, 90)), list(range(50, 60)), list(range(2, 40))]
FAULT = re.compile(
    r"Step (?P<step>\d+) of .+? runner: step check \"(?P<rule>.+?)\": .+?: "
    r"request (?P<request>[\w-]+)(, token (?P<token>\d+))?.*: given (?P<given>.+), "
    r"allowed (?P<allowed>.+)"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """An engine whose steps vLLM's own V1 runner prepares; blocks are too few for all requests."""
    model = make_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    sizes = {"block_size": 16, "num_gpu_blocks_override": 14, "max_model_len": 160}
    with asked_for("V1"), engine(model, **sizes) as llm:
        worker = worker_of(llm)
        ours = worker.model_runner
        worker.model_runner = UpstreamRunner(ours)
        layers = ours.compilation_config.static_forward_context
        for name, cache in worker.model_runner.caches.items():
            layers[name].kv_cache = cache
        yield llm


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


@pytest.fixture
def runner(llm):
    """Its runner, and a cache in which nothing was written before a watch begins."""
    llm.reset_prefix_cache()
    return worker_of(llm).model_runner


@pytest.fixture
def watch(runner, tmp_path):
    text = json.dumps({"record": {"dir": str(tmp_path), "steps": "last 64"}})
    watch = Watch(runner, V1Adapter(runner), parse_watch(text), "0.32.0")
    watch.attach()
    yield watch
    watch.detach()


@pytest.fixture
def lines(caplog):
    """What the watch has logged."""
    caplog.set_level(logging.INFO, "vllm")
    return lambda: [r.getMessage() for r in caplog.records if "watch" in r.name]


def test_chunks_prefix_hits_and_preemptions_have_no_fault(llm, watch, lines, tmp_path, capsys):
    preempted, cached = count_preemptions(llm), record_cached(llm)
    generate(llm, PROMPTS, greedy(40))
    generate(llm, PROMPTS[:2], greedy(2))
    assert preempted["preempted"] and max(cached) >= 32
    assert watch.check is not None and watch._steps > 40
    assert [line.split("takes")[0] for line in lines()] == ["The watch "]
    assert "are in" in watch.dump_steps()
    assert main(["replay", str(tmp_path)]) == 0
    assert main(["explain", str(tmp_path), "--step", str(watch._steps - 1)]) == 0
    said = capsys.readouterr().out
    assert "core and oracle prepare what was recorded" in said
    assert "vLLM's V1 runner (0.32.0); input_ids and positions of padding" in said
    assert "mask " not in said  # its kernels have masks of their own


def test_a_runner_that_is_watched_no_more_is_as_before(runner, watch):
    assert {"execute_model", "_model_forward", "_prepare_inputs"} <= vars(runner).keys()
    watch.detach()
    assert not {"execute_model", "_model_forward", "_prepare_inputs"} & vars(runner).keys()


class Planted(NamedTuple):
    """Where a fault was put into a step."""

    rule: str
    row: int
    token: int | None
    given: str
    allowed: str


def slot_off_by_one(runner: Any) -> Planted:
    slots = runner.input_batch.block_table[0].slot_mapping.gpu
    right = int(slots[2])
    slots[2] += 1
    return Planted("table", 2, 2, f"{right + 1}", f"{right}, in its block {right // 16}")


def stale_seq_lens(runner: Any) -> Planted:
    right = int(runner.seq_lens[1])
    runner.seq_lens[1] -= 1
    at = f" of {right - 1} computed"
    return Planted("lengths", 1, None, f"{right - 1}{at}", f"{right}{at}")


def another_row_of_the_table(runner: Any) -> Planted:
    table = runner.input_batch.block_table[0].block_table.gpu
    right, wrong = int(table[1, 0]), int(table[2, 0])
    table[1] = table[2]
    owner = runner.input_batch.req_ids[2]
    return Planted(
        "write into another's block", 1, None, f"block {wrong} of request {owner}", right
    )


def another_token(runner: Any) -> Planted:
    """A decode gets another token than the one that was sampled for it."""
    right = int(runner.input_ids.gpu[1])
    runner.input_ids.gpu[1] = wrong = (right + 1) % 512
    return Planted("input_ids", 1, 1, f"{wrong}", f"{right}")


def position_not_advanced(runner: Any) -> Planted:
    right = int(runner.positions[1])
    runner.positions[1] -= 1
    return Planted("positions", 1, 1, f"{right - 1}", f"{right}")


def computed_not_advanced(runner: Any) -> Planted:
    """All that is computed from it agrees with itself, and not with the scheduler."""
    right = int(runner.num_computed_tokens[1])
    for array in (runner.num_computed_tokens, runner.seq_lens, runner.positions):
        array[1] -= 1
    runner.input_batch.block_table[0].slot_mapping.gpu[1] -= 1
    return Planted("computed tokens", 1, None, f"{right - 1}", f"{right}")


FAULTS = (
    slot_off_by_one,
    stale_seq_lens,
    another_row_of_the_table,
    another_token,
    position_not_advanced,
    computed_not_advanced,
)


@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_is_named_and_recorded(
    plant: Callable[[Any], Planted], llm, runner, watch, lines, tmp_path, capsys
):
    prepare, planted = runner._get_slot_mappings, []

    def broken(*args, **kwargs):
        mappings = prepare(*args, **kwargs)
        if watch._steps == 5:
            planted.append((plant(runner), list(runner.input_batch.req_ids)))
        return mappings

    runner._get_slot_mappings = broken
    try:
        tokens = generate(llm, [*PROMPTS[:1], PROMPTS[2], list(range(90, 120))], greedy(12))
    finally:
        del runner._get_slot_mappings
    assert list(map(len, tokens)) == [12, 12, 12], "the engine goes on"
    [(fault, req_ids)] = planted
    [found] = filter(None, map(FAULT.fullmatch, lines()))
    token = None if fault.token is None else str(fault.token)
    assert (found["step"], found["rule"]) == ("5", fault.rule)
    assert (found["request"], found["token"]) == (req_ids[fault.row], token)
    assert (found["given"], found["allowed"]) == (fault.given, str(fault.allowed))
    # The last record is the step, and replaying finds the same
    assert main(["replay", str(tmp_path), "--step", "4"]) == 0
    consistent = plant in (another_row_of_the_table, computed_not_advanced)
    assert main(["replay", str(tmp_path), "--step", "5"]) == 1 or consistent
    assert "step-000006" not in str(sorted(tmp_path.rglob("*.npz")))


@pytest.mark.parametrize("part", ["read", "samples"])
def test_a_watch_that_fails_says_so_once_and_is_off(part, llm, runner, lines):
    class Fails(V1Adapter):
        def __init__(self, runner):
            super().__init__(runner)
            setattr(self, part, self.fail if part == "read" else SimpleNamespace(note=self.fail))
            self.samples.tensors, self.samples.take = {}, lambda read: {}

        def fail(self, *args):
            raise RuntimeError("no such\narray")

    watch = Watch(runner, Fails(runner), parse_watch("{}"), "0.32.0")
    watch.attach()
    tokens = generate(llm, PROMPTS[:1], greedy(3))
    assert tokens == generate(llm, PROMPTS[:1], greedy(3))
    assert lines() == [
        "The watch has failed and is off; the engine goes on: RuntimeError: no such array"
    ]
    assert "execute_model" not in vars(runner)


@pytest.mark.parametrize("which", RUNNERS)
def test_this_plugins_own_runners_are_watched(which, tmp_path, lines):
    model = make_model(tmp_path, num_hidden_layers=1)
    sizes = {"block_size": 16, "num_gpu_blocks_override": 14, "max_model_len": 160}
    with engine_of(which, model, **sizes) as llm:
        assert known.watch_worker(worker_of(llm), "{}") is not None
        generate(llm, PROMPTS, greedy(40))
        assert [line.split(" takes")[0].split(" (")[0] for line in lines()] == [
            f"Watching vllm_npu_prep's {which} runner",
            "The watch",
        ]
        runner = worker_of(llm).model_runner
        observe = runner._observe

        def broken(*args, **kwargs):
            observe(*args, **kwargs)
            runner.prepared.staged.device.slot_mapping[0, 0] += 1

        runner._observe = broken
        generate(llm, PROMPTS[:1], greedy(2))
        [found] = filter(None, map(FAULT.fullmatch, lines()))
        assert (found["rule"], found["token"]) == ("slot", "0")
        assert int(found["given"]) == int(found["allowed"].split(",")[0]) + 1


# ----------------------------------------------------------------- without an engine


def test_without_the_variable_nothing_is_imported(monkeypatch):
    monkeypatch.delenv("NPU_PREP_WATCH", raising=False)
    monkeypatch.setitem(sys.modules, "vllm_npu_prep.watch.attach", None)
    entry.register()


def test_a_worker_is_watched_once_it_has_its_cache(monkeypatch, lines):
    """Here its runner is none that the watch knows, and its server starts all the same."""
    monkeypatch.setattr(WorkerWrapperBase, "initialize_from_config", lambda self, configs: configs)
    attach.watch_workers.__wrapped__('{"check": "cheap"}')
    wrapper = SimpleNamespace(worker=SimpleNamespace(model_runner=object()))
    assert WorkerWrapperBase.initialize_from_config(wrapper, ["config"]) == ["config"]
    [line] = lines()
    packages = "vLLM", "vllm-ascend", "vllm_npu_prep"
    names = ", ".join(f"{package}'s V{n} runner" for package in packages for n in (1, 2))
    assert line == f"Not watching: runner builtins.object is not known; known: {names}"


def as_of(module: str, *bases: type) -> Any:
    """A runner of a class of that module."""
    return type("Runner", bases, {"__module__": module, "__init__": lambda self: None})()


def test_runners_are_known_by_their_classes(monkeypatch):
    versions = {"vllm": "0.32.0", "vllm_ascend": "9.9", "vllm_npu_prep": __version__}
    monkeypatch.setattr(known, "version_of", versions.get)
    base = type(as_of("vllm.v1.worker.gpu_model_runner"))
    adapter, version = known.adapter_of(as_of("vllm.v1.worker.cpu_model_runner", base))
    assert (adapter.name, version) == ("vLLM's V1 runner", "0.32.0")
    adapter, _ = known.adapter_of(as_of("vllm.v1.worker.gpu.model_runner"))
    assert adapter.name == "vLLM's V2 runner"
    ascend = as_of("vllm_ascend.worker.model_runner_v1", base)
    with pytest.raises(PrepError, match=r"V1 runner of version 9\.9 is not known, known: 0\.26"):
        known.adapter_of(ascend)
    monkeypatch.setenv("NPU_PREP_ANY_VLLM", "1")
    assert known.adapter_of(ascend)[0].name == "vllm-ascend's V1 runner"
    adapter, _ = known.adapter_of(as_of("vllm_npu_prep.runner.v1.runner", base))
    assert adapter.name == "vllm_npu_prep's V1 runner"
    with pytest.raises(PrepError, match=r"other\.runner\.Runner is not known"):
        known.adapter_of(as_of("other.runner", base))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1", "must be an object; write"),
        ('{"chek": "full"}', "chek: unknown key; write"),
        ('{"check": "all"}', 'check: must be "off", "cheap" or "full"; write'),
        ('{"record": {}}', "record: dir: missing; write"),
    ],
)
def test_a_mistake_in_the_variable_is_one_line(text, said):
    with pytest.raises(PrepError) as error:
        parse_watch(text)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_layers_that_can_not_be_read_are_named():
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace())
    ranks = SimpleNamespace(decode_context_parallel_size=2)
    with pytest.raises(PrepError, match="SimpleNamespace, decode_context_parallel_size can't be"):
        layer_groups(SimpleNamespace(kv_cache_groups=[group]), ranks)
