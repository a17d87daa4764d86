"""The worked examples through the runner on npu:0, with the block size that NPU kernels take."""

import pytest
import torch

from tests.helpers import worked_examples
from tests.helpers.engine import engine, make_model, runner_of
from tests.helpers.stepping import bookkeep, new_request, prepare, scheduler_output
from vllm_npu_prep.prep.oracle import OracleRequest, oracle_step

BLOCK_SIZE = 128
MAX_MODEL_LEN = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), vocab_size=8192, num_hidden_layers=1)


def expected_of(name: str, blocks: dict[str, list[int]]) -> dict:
    """The example's batch with our blocks, from the oracle: token ids and counts stay."""
    scenario, documented = worked_examples.load(name)
    requests = [
        OracleRequest(
            **{k: v for k, v in r.items() if k not in ("req_id", "block_ids")},
            block_ids=blocks[r["req_id"]],
        )
        for r in scenario["requests"]
    ]
    step = oracle_step(requests, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN)
    for key in ("input_ids", "positions", "query_start_loc", "seq_lens", "attn_state"):
        assert step[key] == documented[key]
    return step


def check(runner, prepared: dict, expected: dict, attention: str) -> None:
    for name in (
        "input_ids",
        "positions",
        "query_start_loc",
        "seq_lens",
        "num_computed_tokens",
        "logits_indices",
    ):
        assert prepared[name] == expected[name], name
    assert prepared["slot_mapping"][0] == expected["slot_mapping"]
    layers, _ = runner._build_attention_metadata()
    (metadata,) = {id(each): each for each in layers.values()}.values()
    assert metadata.attn_state.name == expected["attn_state"]
    for name in ("slot_mapping", "query_start_loc", "seq_lens", "num_computed_tokens"):
        tensor = getattr(metadata, name)
        assert tensor.device.type == "npu", name
        assert tensor.cpu().tolist() == expected[name], name
    columns = len(expected["block_table"][0])
    table = metadata.block_tables[:, :columns].cpu().tolist()
    assert table == expected["block_table"]
    mask = metadata.attn_mask
    if expected["attn_mask"] is None:
        assert mask is None
    elif attention == "fia":
        assert mask.dtype == torch.int8
        assert torch.equal(mask.cpu(), torch.ones(2048, 2048, dtype=torch.int8).triu_(1))
    else:
        assert mask.dtype == torch.float16
        assert (mask.cpu() == float("-inf")).int().tolist() == expected["attn_mask"]


@pytest.mark.parametrize("attention", ["fia", "atb"])
def test_small_example_over_its_three_steps(model, attention):
    settings = {
        "dtype": "float16",
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "additional_config": {"npu_prep": {"attention": attention}},
    }
    blocks = {"0": [3], "1": [1], "2": [2]}
    scenario, _ = worked_examples.load("all-prefill")
    with engine(model, load_format="dummy", **settings) as llm:
        runner = runner_of(llm)
        assert runner.device.type == "npu"
        new = [
            new_request(r["req_id"], r["token_ids"][: r["num_prompt_tokens"]], blocks[r["req_id"]])
            for r in scenario["requests"]
        ]
        step = scheduler_output({"0": 3, "1": 2, "2": 5}, new=new)
        prepared = prepare(runner, step)
        check(runner, prepared, expected_of("all-prefill", blocks), attention)
        bookkeep(runner, step, {"0": 1003, "1": 2002, "2": 7})

        cached = {"0": ([], 3, 1), "1": ([], 2, 1), "2": ([], 5, 0)}
        step = scheduler_output({"0": 1, "1": 1, "2": 3}, cached=cached)
        prepared = prepare(runner, step)
        check(runner, prepared, expected_of("chunked-prefill", blocks), attention)
        bookkeep(runner, step, {"0": 1004, "1": 2003, "2": 3008})

        cached = {"0": ([], 4, 2), "1": ([], 3, 2), "2": ([], 8, 1)}
        step = scheduler_output({"0": 1, "1": 1, "2": 1}, cached=cached)
        prepared = prepare(runner, step)
        check(runner, prepared, expected_of("decode-only", blocks), attention)
