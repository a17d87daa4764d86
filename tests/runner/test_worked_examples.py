"""The worked examples through the real `NPUModelRunner`, fed real scheduler outputs step by step,
so that upstream's `_update_states` builds the tables."""

import pytest

from tests.helpers import worked_examples
from tests.helpers.engine import make_model, runner_of
from tests.helpers.stepping import bookkeep, new_request, prepare, scheduler_output
from tests.helpers.v2 import engine_of
from vllm_npu_prep.records.contract import group_variables


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(
        tmp_path_factory.mktemp("qwen3"), "Qwen3", vocab_size=8192, num_hidden_layers=1
    )


def settings(scenario):
    return {
        "block_size": scenario["block_size"],
        "max_model_len": scenario["max_model_len"],
        "max_num_seqs": scenario["max_num_reqs"],
        "max_num_batched_tokens": scenario["max_num_batched_tokens"],
        "enable_prefix_caching": False,
        "async_scheduling": False,
    }


OF_STEP = ("req_indices", "query_pos", "token_indices", "query_lens", "cu_num_tokens")
SENT = ("input_ids", "positions", "query_start_loc", "seq_lens", "num_computed_tokens")
SENT += ("logits_indices",)
ARRAYS = ("query_lens", "seq_lens", "slot_mapping", "query_start_loc", "num_computed_tokens")
NUMBERS = ("num_reqs", "num_input_tokens", "max_query_len", "max_seq_len")


def check(runner, prepared, expected):
    """Everything that the documents print, from the runner, its step and its metadata."""
    step = runner.in_flight.step
    found = {name: getattr(step, name).tolist() for name in OF_STEP}
    found |= {name: values.tolist() for name, values in group_variables(step, 0).items()}
    assert found | {name: prepared[name] for name in SENT} == {
        name: expected[name] for name in (*found, *SENT)
    }
    assert prepared["slot_mapping"][0] == expected["slot_mapping"]
    for sent, documented in zip(prepared["block_table"][0], expected["block_table"], strict=True):
        assert sent + [0] * (len(documented) - len(sent)) == documented

    layers, _ = runner._build_attention_metadata()
    (metadata,) = {id(each): each for each in layers.values()}.values()
    given = {name: getattr(metadata, name).tolist() for name in ARRAYS}
    given |= {name: getattr(metadata, name) for name in NUMBERS}
    assert given == {name: expected[name] for name in given}
    assert metadata.attn_state.name == expected["attn_state"]
    assert metadata.num_actual_tokens == expected["total_num_scheduled_tokens"]
    columns = len(expected["block_table"][0])
    assert [row[:columns] for row in metadata.block_tables.tolist()] == expected["block_table"]
    if (documented := expected["attn_mask"]) is None:
        assert metadata.attn_mask is None
        return
    mask = metadata.attn_mask.int().tolist()
    assert list(metadata.attn_mask.shape) == documented["shape"]
    if "masked" in documented:
        assert mask == documented["masked"]
    else:
        first = documented["first_masked_position_by_row"]
        assert worked_examples.first_masked(mask) == first


def new(scenario, *req_ids):
    """Requests of a scenario that arrive, all if none are named."""
    return [
        new_request(r["req_id"], r["token_ids"][: r["num_prompt_tokens"]], r["block_ids"])
        for r in scenario["requests"]
        if r["req_id"] in req_ids or not req_ids
    ]


def test_small_example_over_its_three_steps(model):
    (prefill, expected_1), (_, expected_2), (_, expected_3) = (
        worked_examples.load(name) for name in ("all-prefill", "chunked-prefill", "decode-only")
    )
    cached = (
        {"0": ([], 3, 1), "1": ([7], 2, 1), "2": ([8], 5, 0)},
        {"0": ([9], 4, 2), "1": ([], 3, 2), "2": ([10], 8, 1)},
    )
    with engine_of("V1", model, load_format="dummy", **settings(prefill)) as llm:
        runner = runner_of(llm)
        step = scheduler_output({"0": 3, "1": 2, "2": 5}, new=new(prefill))
        check(runner, prepare(runner, step), expected_1)
        # Request 2 still has prompt tokens: its sample is discarded.
        assert bookkeep(runner, step, {"0": 1003, "1": 2002, "2": 7}) == [[1003], [2002], []]

        step = scheduler_output({"0": 1, "1": 1, "2": 3}, cached=cached[0])
        check(runner, prepare(runner, step), expected_2)
        bookkeep(runner, step, {"0": 1004, "1": 2003, "2": 3008})

        step = scheduler_output({"0": 1, "1": 1, "2": 1}, cached=cached[1])
        check(runner, prepare(runner, step), expected_3)


def test_mixed_example_of_two_hundred_tokens(model):
    scenario, expected = worked_examples.load("mixed-200-tokens")
    with engine_of("V1", model, load_format="dummy", **settings(scenario)) as llm:
        runner = runner_of(llm)
        step = scheduler_output({"0": 54, "1": 145}, new=new(scenario, "0", "1"))
        prepare(runner, step)
        runner._build_attention_metadata()
        bookkeep(runner, step, {"0": 1054, "1": 2145})

        step = scheduler_output(
            {"0": 1, "1": 1, "2": 93, "3": 75, "4": 30},
            new=new(scenario, "2", "3", "4"),
            cached={"0": ([], 54, 1), "1": ([], 145, 1)},
        )
        check(runner, prepare(runner, step), expected)
