"""``vllm-npu-prep explain``: the JSON contract, the tables, and one line for every bad file."""

import io
import json
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.helpers import worked_examples
from tests.helpers.golden import explain_output, golden_path
from tests.helpers.plain_words import PYDANTICS_WORDS
from tests.helpers.scenarios import (
    IMAGE,
    PATCHES,
    example,
    in_chunks,
    many,
    small,
    view_of,
    with_an_image,
)
from vllm_npu_prep.cli import main
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.inspect.explain import explain_json, token_level
from vllm_npu_prep.inspect.terminal import explain_text
from vllm_npu_prep.prep.padding import GraphMode


def explained(scenario: dict) -> dict:
    return explain_json(view_of(scenario))


@pytest.mark.parametrize("name", worked_examples.NAMES)
def test_json_and_text_of_the_worked_examples(name, capsys):
    """The text is written anew by ``python -m tests.helpers.golden``; look at what changes."""
    path = str(worked_examples.path_of(name))
    assert main(["explain", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == worked_examples.load(name)[1]
    assert explain_output(path) == golden_path(name).read_text()


def test_capture_sizes_add_what_the_device_sees():
    scenario = worked_examples.load("decode-only")[0]
    step = explained(scenario | {"capture_sizes": [1, 2, 4, 8]})
    added = {
        "num_input_tokens": 4,
        "num_reqs_padded": 4,
        "query_start_loc_padded": [0, 1, 2, 3, 4],
        "input_ids_padded": [1004, 2003, 3008, 0],
        "positions_padded": [4, 3, 8, 0],
        "slot_mapping_padded": [18, 15, 20, -1],
        "seq_lens_padded": [5, 4, 9, 1],
    }
    assert {name: step[name] for name in added} == added
    assert step["query_start_loc"] == [0, 1, 2, 3]


WINDOWS = [[1, 1, 1, 0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("name", "change", "mask"),
    [
        ("chunked-prefill", {"mask": "compressed"}, {"form": "compressed", "shape": [2048, 2048]}),
        ("decode-only", {"mask": "compressed"}, None),
        ("decode-only", {"sliding_window": 2}, {"shape": [3, 9], "masked": WINDOWS}),
    ],
    ids=["a constant", "decodes", "a window"],
)
def test_masks_are_listed_where_they_are_no_constant(name, change, mask):
    assert explained(worked_examples.load(name)[0] | change)["attn_mask"] == mask


DRAFTS = {"num_scheduled_tokens": 3, "num_draft_tokens": 2, "draft_token_ids": [8, 9]}


def test_the_first_request_that_decides_the_state_is_named():
    scenario = small()
    first, _, third = scenario["requests"]
    known = {"token_ids": third["token_ids"][:6], "num_prompt_tokens": 5}
    scenario["requests"] = [first, third | DRAFTS | known]
    assert view_of(scenario).state_reason.endswith(": request 2 has 2 drafts")


def test_a_full_graph_has_the_state_that_it_was_captured_for():
    decodes = view_of(worked_examples.load("decode-only")[0] | {"capture_sizes": [1, 2, 4, 8]})
    decodes.step.padding = replace(decodes.step.padding, mode=GraphMode.FULL)
    assert decodes.state_reason == "the full graph of decodes was captured for it"
    assert decodes.graph == "full graph of 4 tokens"
    mixed = view_of(small() | {"capture_sizes": [2, 4]})
    assert mixed.graph == "eager: more than 4 tokens, the largest capture size"


@pytest.mark.parametrize(
    ("words", "shown", "hidden"),
    [("--request 2", "3007", "1003"), ("--tokens 0:1", "1003", "3007")],
)
def test_one_request_or_some_tokens_are_shown_alone(words, shown, hidden, capsys):
    path = str(worked_examples.path_of("chunked-prefill"))
    assert main(["explain", path, *words.split()]) == 0
    out = capsys.readouterr().out
    assert shown in out and hidden not in out


def test_a_request_or_tokens_that_are_not_there_get_one_line(capsys):
    path = str(worked_examples.path_of("chunked-prefill"))
    for words, line in (
        ("--request 9", "--request 9: no such request; there are 0, 1, 2"),
        ("--tokens 3:9", "--tokens 3:9: the step has tokens 0:5"),
    ):
        assert main(["explain", path, *words.split()]) == 2
        assert line in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", path, "--tokens", "3"])


def test_big_batches_are_folded(capsys):
    explain_text(view_of(many(200, 1, 3)), Console(width=200))
    shown = capsys.readouterr().out
    assert "136 lines in the middle are folded" in shown
    assert "cmpl-199" in shown
    assert "cmpl-100" not in shown.partition("token level")[0]


def test_images_mrope_and_groups_are_explained():
    step = explained(with_an_image())
    assert step["model_input"] == "inputs_embeds"
    assert step["multimodal"] == [
        {"req_id": "a", **IMAGE, "tokens": [0, 3]},
        {"req_id": "b", **IMAGE, "tokens": None},
    ]
    assert step["mrope_positions"] == [[*row[3:8], 10] for row in PATCHES]
    assert step["positions"] == [3, 4, 5, 6, 7, 12]
    window, full = step["kv_cache_groups"]
    assert window["block_table"] == step["block_table"] == [[3, 4] + [0] * 4, [0, 0, 5, 6, 0, 0]]
    assert window["slot_mapping"] == step["slot_mapping"] == [15, 16, 17, 18, 19, 24]
    assert full["block_table"] == [[7, 0, 0], [9, 10, 0]]
    assert full["slot_mapping"] == [59, 60, 61, 62, 63, 84]
    assert full["block_offsets"] == [3, 4, 5, 6, 7, 4]
    assert window["attn_mask"]["masked"][-1] == [1] * 9 + [0] * 4
    assert full["attn_mask"]["masked"][-1] == [0] * 13


def test_virtual_requests_of_local_attention_are_explained(capsys):
    view = view_of(in_chunks())
    step = explain_json(view)
    (group,) = step["kv_cache_groups"]
    local = view.step.local_requests(0)
    for name in ("query_start_loc", "seq_lens", "num_computed_tokens"):
        assert group["local_requests"][name] == local[name].tolist()
    for row, positions in zip(group["attn_mask"]["masked"], step["positions"]):
        assert row == [int(column > positions % 4) for column in range(len(row))]
    explain_text(view, Console(width=200))
    text = capsys.readouterr().out
    assert "chunks of 4" in text and "virtual requests" in text


IMAGE_BAD = [
    ("requests.0.multimodal.0.offset", 7, "items must not overlap"),
    ("requests.0.multimodal.0.size", 7, "unknown key; allowed: modality, offset, length"),
    ("requests.0.multimodal", [IMAGE, IMAGE], "requests.0.multimodal.1: image from 2 to 6"),
    ("requests.0.mrope_positions", PATCHES[:2], "mrope_dims 3"),
    ("requests.0.mrope_positions", [row[:5] for row in PATCHES], "num_prompt_tokens = 10"),
    ("mrope_dims", 0, "mrope_dims 0"),
    ("mrope_dims", 9, "mrope_dims:"),
    ("more_kv_cache_groups.0.block_ids", [[7]], "1 list for 2 requests"),
    (
        "more_kv_cache_groups.0.block_ids",
        [[7], [9]],
        "more_kv_cache_groups.0.block_ids.1: 1 block of 8 tokens",
    ),
    ("more_kv_cache_groups.0.block_ids", [[7], [0, 10]], "block_ids.1.0: block 0"),
    ("more_kv_cache_groups.0.block_ids", [[7], [7, 10]], "block 7 belongs to requests.0 too"),
    ("more_kv_cache_groups.0.window", 4, "(did you mean sliding_window?); allowed: block_size"),
    ("requests.1.block_ids", [0, 0, 0, 6], "requests.1.block_ids.2: block 0"),
    ("attention_chunk_size", 8, "attention_chunk_size: a group has either this or sliding_window"),
    ("more_kv_cache_groups.0.attention_chunk_size", 12, "12 in blocks of 8; chunks"),
]


def changed(path: str, value, scenario: dict) -> dict:
    """A scenario with one field changed; `...` removes it."""
    target = scenario
    *parents, last = path.split(".")
    for part in parents:
        target = target[int(part) if part.isdigit() else part]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return scenario


BAD = [
    ("block_size", ..., "block_size: missing"),
    ("requests.1.token_ids", ..., "requests.1.token_ids: missing"),
    ("requests", [], "requests:"),
    ("requests", {}, "requests:"),
    ("blocksize", 2, "blocksize: unknown key (did you mean block_size?)"),
    ("requests.0.num_computed", 2, "requests.0.num_computed: unknown key"),
    ("requests.0.num_computed_tokens", -1, "requests.0.num_computed_tokens:"),
    ("requests.0.num_scheduled_tokens", 0, "requests.0.num_scheduled_tokens:"),
    ("requests.0.num_scheduled_tokens", True, "requests.0.num_scheduled_tokens:"),
    ("requests.0.num_scheduled_tokens", 1.0, "requests.0.num_scheduled_tokens:"),
    ("requests.0.num_scheduled_tokens", 10**30, "requests.0.num_scheduled_tokens:"),
    ("requests.2.num_scheduled_tokens", 20, "max_num_batched_tokens"),
    ("requests.2.num_computed_tokens", 11, "past max_model_len 12"),
    ("requests.2.block_ids", [4, 5, 6], "requests.2.block_ids: 3 blocks"),
    ("requests.2.block_ids", [4, 5, 6, 8, 9, 10, 11], "a row holds 6"),
    ("requests.2.block_ids", [4, 5, 0, 8], "requests.2.block_ids.2: block 0"),
    ("requests.2.block_ids", [4, 5, 6, -8], "requests.2.block_ids.3:"),
    ("requests.2.block_ids", [4, 5, 6, 1 << 30], "exceed 32 bits"),
    ("requests.2.block_ids", [4, 4, 6, 8], "block 4 is listed 2 times"),
    ("requests.2.block_ids", [4, 5, 6, 7], "block 7 belongs to requests.1 too"),
    ("requests.2.token_ids", [1, 2, 3], "requests.2.token_ids: 3 ids"),
    ("requests.2.token_ids", [1] * 13, "requests.2.token_ids: 13 ids, past"),
    ("requests.2.req_id", "0", "req_id '0' is given 2 times"),
    ("requests.2.num_draft_tokens", 3, "requests.2.num_draft_tokens:"),
    ("requests.2.num_draft_tokens", 1, "requests.2.draft_token_ids:"),
    ("max_model_len", 10**18, "max_model_len:"),
    ("max_num_reqs", 2, "max_num_reqs allows 2"),
    ("capture_sizes", [], "capture_sizes: must have at least 1 entry, not []"),
    ("capture_sizes", [0], "capture_sizes.0: must be at least 1, not 0"),
    ("mask", "sparse", 'mask: must be "dense" or "compressed", not "sparse"'),
    ("capture_sizes", [1 << 24], "capture_sizes.0:"),
    ("sliding_window", 0, "sliding_window:"),
    ("name", "\ud800", "name:"),
    ("requests.0.req_id", "a\nb", "requests.0.req_id:"),
]


FAULTS = [(small, *fault) for fault in BAD] + [(with_an_image, *fault) for fault in IMAGE_BAD]
SHARDS = "world_size, rank, interleave_size"
FAULTS += [
    (partial(example, name), path, 1, f"{path}: unknown key{allowed}\n")
    for name, path, allowed in (
        ("latent", "latent.rows", "; allowed: decode_threshold, workspace_blocks"),
        ("shared-context", "dcp.ranks", f" (did you mean rank?); allowed: {SHARDS}"),
    )
]
FAULTS += [  # the length of many requests may be refused, and must not be allocated
    (lambda: many(8, 1) | {"max_num_reqs": 100}, "max_model_len", 1 << 24, "max_model_len:")
]


@pytest.mark.parametrize(("scenario_of", "path", "value", "message"), FAULTS)
def test_bad_scenarios_get_one_line_that_names_the_field(
    scenario_of, path, value, message, tmp_path, capfd
):
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(changed(path, value, scenario_of())))
    assert main(["explain", str(file), "--json"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and message in err
    assert err.count("\n") == 1 and not PYDANTICS_WORDS.search(err)


NO_SCENARIO = {
    "zeros": b"\x00\x01\x02\x03" * 100,
    "all bytes": bytes(range(256)),
    "archive": b"PK\x03\x04\x00\x00 of a record",
    "empty": b"",
    "cut": b"{",
    "list": b"[1, 2]",
    "null": b"null",
    "bytes": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "number inside": b'{"scenario": 3}',
    "long number": b"9" * 5000,
}


@pytest.mark.parametrize("content", NO_SCENARIO.values(), ids=NO_SCENARIO)
def test_what_is_no_scenario_gets_one_line(content, tmp_path, capfd):
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    assert main(["explain", str(file)]) == 2
    err = capfd.readouterr().err
    assert err.startswith("vllm-npu-prep: error: ")
    assert err.count("\n") == 1
    assert "\\x" not in err and "0x" not in err and err[:-1].isprintable(), "no content"


def test_missing_file_and_folder_get_one_line(tmp_path, capfd):
    for path, said in ((tmp_path / "none.json", "No such file"), (tmp_path, "no step-*.npz")):
        assert main(["explain", str(path)]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert said in line


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.sampled_from(FAULTS), json_values)
def test_any_value_in_any_field_is_explained_or_refused(fault, value):
    scenario_of, path, *_ = fault
    scenario = changed(path, value, scenario_of())
    try:
        step = explained(scenario)
    except PrepError as error:
        refusal = str(error)
        assert "\n" not in refusal
        assert not PYDANTICS_WORDS.search(refusal)
    else:
        assert step["num_reqs"] >= 1
        console = Console(file=io.StringIO())
        explain_text(view_of(scenario), console)
        assert "token level" in console.file.getvalue()


def test_markup_in_names_is_shown_as_it_is(capsys):
    scenario = small() | {"name": "[/bold] x"}
    scenario["requests"][0]["req_id"] = "[/red]"
    explain_text(view_of(scenario), Console(width=120))
    out = capsys.readouterr().out
    assert "[/bold] x" in out and "[/red]" in out


WIDTHS = [20, 30, 45, 60, 100, 200]


@pytest.mark.parametrize("width", WIDTHS)
def test_terminals_of_any_width_break_no_name_and_no_number(width):
    name = "mixed-200-tokens"
    lines = explain_output(str(worked_examples.path_of(name)), width=width).splitlines()
    # Long are only the lines of one word, and of its name where each stands on a line.
    assert max(map(len, lines)) <= max(width, len("  block_table_indices") + 20)
    # Every column of the tokens stands whole in some table, behind its token.
    expected = worked_examples.load(name)[1]
    tokens = lines[lines.index("token level") : lines.index("system level")]
    shown = set(" ".join(tokens).split())
    for variable in (*token_level(view_of(worked_examples.load(name)[0])), "token"):
        assert variable in shown, variable
    if width < 30:  # one below the other
        return
    assert max(map(len, lines)) <= width or width < 45
    rows = [list(map(int, line.split())) for line in tokens if line[:6].strip().isdecimal()]
    for variable in ("token_indices", "input_ids", "slot_mapping", "block_numbers"):
        for token, value in enumerate(expected[variable]):
            assert any(row[0] == token and value in row[1:] for row in rows), (variable, token)


@pytest.mark.parametrize("width", WIDTHS)
def test_long_names_of_requests_stay_whole(width):
    """As vLLM makes them: longer than a narrow terminal is wide, and with hyphens."""
    name = "chatcmpl-af0a1b2c3d4e5f60718293a4b5c6d7e8-0-ec1d2e3f"
    scenario = small() | {"name": f"{name} and others"}
    scenario["requests"][2]["req_id"] = name
    console = Console(file=io.StringIO(), width=width)
    explain_text(view_of(scenario), console)
    lines = console.file.getvalue().splitlines()
    starts = [word for line in lines for word in line.split() if word.startswith("chatcmpl")]
    assert starts and set(starts) == {name}
    for line in lines:  # longer than the terminal only where it has a word that is
        longest = max(map(len, line.split()), default=0)
        assert len(line) <= max(width, longest + 24), line
