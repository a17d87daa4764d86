"""Memory of graphs: estimated before the KV cache is sized, and given up where it ends.

Runs on a device of 170 MiB.
"""

import pytest

from tests.helpers.engine import engine, generate, greedy, make_model, runner_of
from tests.helpers.logs import record_logs
from tests.helpers.v2 import engine_of
from vllm_npu_prep.runner import graphs
from vllm_npu_prep.runner.v1.runner import NPUModelRunner

SIZES = [1, 64, 256, 512, 1024]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Activations of 1024 tokens take tens of MiB."""
    folder = tmp_path_factory.mktemp("wide")
    return make_model(folder, num_hidden_layers=1, intermediate_size=12288)


def settings(mode: str, **others) -> dict:
    config = {"cudagraph_mode": mode, "cudagraph_capture_sizes": SIZES}
    return {
        "dtype": "float16",
        "max_num_batched_tokens": 1024,
        "max_model_len": 512,  # one request can hold the padding of 1024 tokens after 512
        "enforce_eager": mode == "NONE",
        "compilation_config": config if mode != "NONE" else {},
        **others,
    }


def test_sizes_that_memory_does_not_suffice_for_are_given_up(model, monkeypatch):
    prompt, lines = [[5, 6, 7, 8]], record_logs(monkeypatch)
    with engine(model, **settings("NONE")) as llm:
        expected = generate(llm, prompt, greedy(5))
    with engine(model, **settings("FULL")) as llm:
        runner = runner_of(llm)
        kept = runner.compilation_config.cudagraph_capture_sizes
        assert generate(llm, prompt, greedy(5)) == expected
        assert runner.padding.counts.by_kind["full graph"] > 0
    assert any("Out of memory while capturing the graph of 1024" in line for line in lines)
    assert 8 in kept, "the largest decode"
    assert 1024 not in kept


def test_graphs_are_part_of_the_memory_profile(model, monkeypatch):
    """Without a given size, the KV cache leaves them room."""
    estimates = []
    profile = NPUModelRunner.profile_cudagraph_memory

    def recorded(runner):
        estimates.append(profile(runner))
        return estimates[-1]

    monkeypatch.setattr(NPUModelRunner, "profile_cudagraph_memory", recorded)
    blocks = {}
    for mode in ("NONE", "FULL_DECODE_ONLY"):
        sized = settings(mode, kv_cache_memory_bytes=None, gpu_memory_utilization=0.9)
        sized |= {"max_num_batched_tokens": 256}
        with engine_of("V1", model, **sized) as llm:
            blocks[mode] = runner_of(llm).kv_cache_config.num_blocks
            wrapper = runner_of(llm).model if mode != "NONE" else None
            assert wrapper is None or len(wrapper.concrete_cudagraph_entries) == 2  # 1 and 8 tokens
    (estimate,) = estimates
    page = 2 * 128 * 2 * 16 * 2  # K and V of a block: tokens, heads, head size, bytes
    assert estimate > 0
    assert (blocks["NONE"] - blocks["FULL_DECODE_ONLY"]) * page >= estimate - page


def test_sizes_use_the_memory_of_the_largest(tmp_path, monkeypatch):
    """Graphs hold no tensor of their own: 16 sizes of up to 4 MiB a piece need no more than one."""
    captured = []
    report = graphs.table

    def recorded(rows, *args):
        captured.extend(rows)
        return report(rows, *args)

    monkeypatch.setattr(graphs, "table", recorded)
    model = make_model(tmp_path / "model", num_hidden_layers=2, hidden_size=2048)
    sizes = list(range(32, 513, 32))
    config = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": sizes}
    with engine(
        model,
        dtype="float16",
        max_num_batched_tokens=512,
        enforce_eager=False,
        compilation_config=config,
    ):
        pass
    first, *others = (each.nbytes for each in captured)
    assert len(others) == len(sizes)  # and the largest decode
    assert first > 0
    assert sum(others) <= first / 2
