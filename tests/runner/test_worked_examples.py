"""The worked examples through the real `NPUModelRunner`, fed real scheduler outputs step by step,
so that upstream's `_update_states` builds the tables."""

import pytest

from tests.helpers import worked_examples
from tests.helpers.engine import engine, make_model, runner_of
from tests.helpers.stepping import bookkeep, new_request, prepare, scheduler_output
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


ARRAYS = ("query_lens", "seq_lens", "slot_mapping", "query_start_loc", "num_computed_tokens")
NUMBERS = ("num_reqs", "num_input_tokens", "max_query_len", "max_seq_len")


def check(runner, prepared, scenario, expected):
    """Everything that the documents print, from the runner, its step and its metadata."""
    step = runner.in_flight.step
    both = {"input_ids", "positions", "query_start_loc", "seq_lens", "num_computed_tokens"}
    both |= {"logits_indices"}
    of_step = {"req_indices", "query_pos", "token_indices", "query_lens", "cu_num_tokens"}
    found = {name: getattr(step, name).tolist() for name in both | of_step}
    found |= {name: values.tolist() for name, values in group_variables(step, 0).items()}
    assert found == {name: expected[name] for name in found}
    assert {name: prepared[name] for name in both} == {name: expected[name] for name in both}
    assert prepared["slot_mapping"][0] == expected["slot_mapping"]
    columns = len(expected["block_table"][0])
    for sent, documented in zip(prepared["block_table"][0], expected["block_table"], strict=True):
        assert sent == documented[: len(sent)]
        assert not any(documented[len(sent) :])

    layers, _ = runner._build_attention_metadata()
    (metadata,) = {id(each): each for each in layers.values()}.values()
    assert metadata.attn_state.name == expected["attn_state"]
    assert metadata.num_actual_tokens == expected["total_num_scheduled_tokens"]
    assert {n: getattr(metadata, n) for n in NUMBERS} == {n: expected[n] for n in NUMBERS}
    given = {name: getattr(metadata, name).tolist() for name in ARRAYS}
    assert given == {name: expected[name] for name in ARRAYS}
    assert metadata.seq_lens_np.tolist() == expected["seq_lens"]
    assert [row[:columns] for row in metadata.block_tables.tolist()] == expected["block_table"]
    if expected["attn_mask"] is None:
        assert metadata.attn_mask is None
        return
    mask = metadata.attn_mask.int().tolist()
    assert list(metadata.attn_mask.shape) == expected["attn_mask"]["shape"]
    if "masked" in expected["attn_mask"]:
        assert mask == expected["attn_mask"]["masked"]
    else:
        first = expected["attn_mask"]["first_masked_position_by_row"]
        assert worked_examples.first_masked(mask) == first


def test_small_example_over_its_three_steps(model):
    (prefill, expected_1), (chunked, expected_2), (decode, expected_3) = (
        worked_examples.load(name) for name in ("all-prefill", "chunked-prefill", "decode-only")
    )
    prompts = {r["req_id"]: r["token_ids"][: r["num_prompt_tokens"]] for r in prefill["requests"]}
    with engine(model, load_format="dummy", **settings(prefill)) as llm:
        runner = runner_of(llm)
        step = scheduler_output(
            {"0": 3, "1": 2, "2": 5},
            new=[
                new_request(r["req_id"], prompts[r["req_id"]], r["block_ids"])
                for r in prefill["requests"]
            ],
        )
        check(runner, prepare(runner, step), prefill, expected_1)
        # Request 2 still has prompt tokens: its sample is discarded.
        assert bookkeep(runner, step, {"0": 1003, "1": 2002, "2": 7}) == [[1003], [2002], []]

        step = scheduler_output(
            {"0": 1, "1": 1, "2": 3},
            cached={"0": ([], 3, 1), "1": ([7], 2, 1), "2": ([8], 5, 0)},
        )
        check(runner, prepare(runner, step), chunked, expected_2)
        bookkeep(runner, step, {"0": 1004, "1": 2003, "2": 3008})

        step = scheduler_output(
            {"0": 1, "1": 1, "2": 1},
            cached={"0": ([9], 4, 2), "1": ([], 3, 2), "2": ([10], 8, 1)},
        )
        check(runner, prepare(runner, step), decode, expected_3)


def test_mixed_example_of_two_hundred_tokens(model):
    scenario, expected = worked_examples.load("mixed-200-tokens")
    requests = {r["req_id"]: r for r in scenario["requests"]}

    def new(*req_ids):
        return [
            new_request(
                req_id,
                requests[req_id]["token_ids"][: requests[req_id]["num_prompt_tokens"]],
                requests[req_id]["block_ids"],
            )
            for req_id in req_ids
        ]

    with engine(model, load_format="dummy", **settings(scenario)) as llm:
        runner = runner_of(llm)
        step = scheduler_output({"0": 54, "1": 145}, new=new("0", "1"))
        prepare(runner, step)
        runner._build_attention_metadata()
        bookkeep(runner, step, {"0": 1054, "1": 2145})

        step = scheduler_output(
            {"0": 1, "1": 1, "2": 93, "3": 75, "4": 30},
            new=new("2", "3", "4"),
            cached={"0": ([], 54, 1), "1": ([], 145, 1)},
        )
        check(runner, prepare(runner, step), scenario, expected)
