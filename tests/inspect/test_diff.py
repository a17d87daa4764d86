"""``explain A --diff B``: what differs, all of it and nothing else."""

import copy
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.helpers import worked_examples
from tests.helpers.scenarios import PATCHES, example, in_chunks, small, view_of, with_an_image
from vllm_npu_prep.cli import main
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.inspect.diff import diff_json, diff_text, differences
from vllm_npu_prep.inspect.explain import explain_json


def found(a: dict, b: dict) -> list[dict]:
    a_view, b_view = view_of(a), view_of(b)
    entries = differences(a_view, b_view)
    other_way = differences(b_view, a_view)
    assert {(e.name, e.req_id) for e in entries} == {(e.name, e.req_id) for e in other_way}
    return diff_json(a_view, b_view, entries)["differences"]


def changed(scenario: dict, row: int, **fields) -> dict:
    scenario = copy.deepcopy(scenario)
    scenario["requests"][row] |= fields
    return scenario


def test_a_step_does_not_differ_from_itself(capsys):
    kinds = [example(name) for name in ("latent", "states", "shared-context")]
    padded = small() | {"capture_sizes": [8]}
    for scenario in (small(), with_an_image(), in_chunks(), padded, *kinds):
        assert found(scenario, scenario) == []
    path = str(worked_examples.path_of("all-prefill"))
    assert main(["explain", path, "--diff", path]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no difference"


def test_another_block_shows_in_the_table_and_the_slots():
    assert found(small(), changed(small(), 2, block_ids=[4, 5, 6, 9])) == [
        {"name": "block_table", "a": [4, 5, 6, 8], "b": [4, 5, 6, 9], "req_id": "2"},
        {"name": "block_numbers", "a": [8, 8], "b": [9, 9], "req_id": "2", "positions": (6, 8)},
        {"name": "slot_mapping", "a": [16, 17], "b": [18, 19], "req_id": "2", "positions": (6, 8)},
    ]


def test_other_tokens_show_in_runs():
    tokens = list(small()["requests"][2]["token_ids"])
    tokens[5], tokens[7] = 1, 2
    entries = found(small(), changed(small(), 2, token_ids=tokens))
    assert [(e["name"], e["positions"], e["a"], e["b"]) for e in entries] == [
        ("input_ids", (5, 6), [3005], [1]),
        ("input_ids", (7, 8), [3007], [2]),
    ]


def test_a_request_that_joins_leaves_the_others_alone():
    without = small()
    del without["requests"][0]
    entries = found(small(), without)
    assert {"name": "request", "a": "1 token, 3 computed", "b": None, "req_id": "0"} in entries
    assert {e.get("req_id") for e in entries} == {None, "0"}
    names = {e["name"] for e in entries}
    assert {"num_reqs", "total_num_scheduled_tokens", "state_reason"} <= names
    assert not {"slot_mapping", "input_ids"} & names


def test_another_order_is_one_difference_beside_its_reason():
    turned = small()
    turned["requests"] = turned["requests"][::-1]
    entries = found(small(), turned)
    assert [e["name"] for e in entries] == ["state_reason", "order of requests"]
    assert entries[1]["b"] == ["2", "1", "0"]


CHANGES = [
    ({"mask": "compressed"}, {"attn_mask", "attn_mask shape", "mask_reason"}),
    ({"sliding_window": 3}, {"sliding_window", "mask_reason"}),
    ({"max_model_len": 14}, {"max_model_len"}),
    ({"capture_sizes": [8]}, {"graph", "num_input_tokens", "num_reqs_padded", "attn_mask shape"}),
    ({"attention_chunk_size": 4}, {"attention_chunk_size", "attn_mask shape", "mask_reason"}),
    ({"mrope_dims": 3}, {"mrope_dims"}),
]


@pytest.mark.parametrize(("change", "names"), CHANGES, ids=lambda value: "-".join(sorted(value)))
def test_settings_that_differ_are_named(change, names):
    assert {e["name"] for e in found(small(), small() | change)} == names


def test_images_mrope_and_groups_differ_where_they_do():
    scenario = with_an_image()
    patches = copy.deepcopy(PATCHES)
    patches[1][4] = 7
    told = {"name": "mrope_positions 1", "a": [3], "b": [7], "req_id": "a", "positions": (4, 5)}
    assert found(scenario, changed(scenario, 0, mrope_positions=patches)) == [told]
    other = copy.deepcopy(scenario)
    other["more_kv_cache_groups"][0]["block_ids"][1] = [9, 11]
    assert [(e["name"], e.get("group")) for e in found(scenario, other)] == [
        ("block_table of group 1", None),
        ("block_numbers", 1),
        ("slot_mapping", 1),
    ]
    other = changed(scenario, 1, multimodal=[])
    assert "multimodal" in {e["name"] for e in found(scenario, other)}


OTHER_KINDS = [  # a setting that another engine has, and what differs of the step
    ("latent", "latent", {"decode_threshold": 1, "workspace_blocks": 3}, "latent.workspace_tokens"),
    ("latent", "latent", {"decode_threshold": 2, "workspace_blocks": 2}, "latent.num_decodes"),
    ("latent", "latent", None, "latent.num_chunks"),
    ("shared-context", "dcp", {"world_size": 2, "rank": 0}, "dcp.rank"),
    ("shared-context", "dcp", {"world_size": 2, "rank": 0}, "dcp_local_seq_lens"),
    ("shared-context", "dcp", {"world_size": 2, "rank": 1}, "dcp_ranks"),
    ("states", "more_kv_cache_groups", [], "groups with states"),
    ("states", "more_kv_cache_groups", [], "states.num_prefills"),
]


@pytest.mark.parametrize(("name", "key", "value", "expected"), OTHER_KINDS)
def test_other_kinds_of_attention_differ(name, key, value, expected):
    assert expected in {e["name"] for e in found(example(name), example(name, **{key: value}))}


def test_states_in_other_blocks_differ():
    other = example("states")
    other["more_kv_cache_groups"][0]["block_ids"][1] = [12, 15]
    assert found(example("states"), other) == [
        {"name": "block_table of states of group 1", "a": [12, 13], "b": [12, 15], "req_id": "b"},
        {"name": "state_indices of states of group 1", "a": 13, "b": 15, "req_id": "b"},
    ]


@pytest.mark.parametrize(
    ("scenario", "array", "place"),
    [
        (small() | {"capture_sizes": [8]}, "slot_mapping", (0, 6)),  # of padding
        (in_chunks(), "chunk_local_seq_lens", 0),
        (example("latent"), "context_piece_chunks", 1),
        (example("latent"), "prefill_query_start_loc", 1),
        (example("states"), "has_initial_state", 1),
        (example("states"), "initial_state_indices", (0, 1)),
        (example("shared-context"), "dcp_local_context_lens", 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_array_that_differs_alone_is_found(scenario, array, place):
    a, b = view_of(scenario), view_of(scenario)
    values = getattr(b.step.arrays, array)
    values[place] = values[place] == 0
    (entry,) = differences(a, b)
    names = {"slot_mapping": "padding of slot_mapping 0", "chunk_local_seq_lens": "seq_lens"}
    assert names.get(array, array) in entry.name


SCENARIOS = st.builds(
    dict,
    change=st.sampled_from([{}, *(change for change, _ in CHANGES)]),
    order=st.permutations(range(3)),
    left_out=st.sampled_from([0, 1, None]),
    last=st.sampled_from([{}, {"block_ids": [4, 5, 6, 9]}, {"num_scheduled_tokens": 2}]),
    first=st.sampled_from([{}, {"token_ids": [1, 2, 3, 9]}, {"num_prompt_tokens": 4}]),
)


def made(choice: dict) -> dict:
    scenario = small() | choice["change"]
    scenario["requests"][2] |= choice["last"]
    scenario["requests"][0] |= choice["first"]
    rows = [row for row in choice["order"] if row != choice["left_out"]]
    scenario["requests"] = [scenario["requests"][row] for row in rows]
    return scenario


@settings(max_examples=60)
@given(SCENARIOS, SCENARIOS)
def test_nothing_differs_only_if_all_variables_are_equal(a, b):
    try:
        a_view, b_view = view_of(made(a)), view_of(made(b))
    except PrepError:
        return
    entries = differences(a_view, b_view)
    if explain_json(a_view) != explain_json(b_view):
        assert entries
    console = Console(file=io.StringIO(), width=60)
    diff_text(a_view, b_view, entries, console)
    assert ("no difference" in console.file.getvalue()) == (not entries)


def test_the_exit_code_says_whether_anything_differs(tmp_path, capsys):
    path, other = str(worked_examples.path_of("chunked-prefill")), tmp_path / "other.json"
    other.write_text(json.dumps(changed(small(), 2, block_ids=[4, 5, 6, 9]) | {"name": "other"}))
    command = ["explain", path, "--diff", str(other)]
    assert main(command) == 1
    shown = capsys.readouterr().out
    for part in ("A  chunked-prefill", "B  other", "4 5 6 8", "16 17", "18 19"):
        assert part in shown
    assert main([*command, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["a"], data["b"], len(data["differences"])) == ("chunked-prefill", "other", 3)
    for wrong in (
        ["--html", "x.html"],
        ["--request", "1"],
        ["--diff", str(tmp_path / "none.json")],
    ):
        assert main([*command, *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
