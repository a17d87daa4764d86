"""What `explain` shows of the states that a step reads and writes: as text, JSON and a page."""

import io

import pytest
from rich.console import Console

from tests.helpers.scenarios import example, view_of
from tests.inspect.test_page import Page
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.inspect.drawings import state_map
from vllm_npu_prep.inspect.explain import explain_json
from vllm_npu_prep.inspect.page import explain_html
from vllm_npu_prep.inspect.terminal import explain_text
from vllm_npu_prep.inspect.view import StepView

# Blocks of four tokens. a had 9 tokens, whose state is in its block 8 // 4 = 2, and where the tenth
# belongs, too; b had 4, in block 3 // 4 = 0, and has 7 then, in block 6 // 4 = 1.
ROWS = [
    ["a", "decode", "9", "11", "10", "11"],
    ["b", "prefill", "4", "12", "7", "13"],
    ["c", "prefill", "0", "empty", "3", "14"],
]
NAMES = ["req_id", "half", "tokens before", "reads state", "tokens after", "writes state"]


def view() -> StepView:
    return view_of(example("states"))


def test_blocks_before_the_state_that_is_read_may_be_null():
    """a goes on from the state after its ninth token, in its third block."""
    scenario = example("states")
    scenario["more_kv_cache_groups"][0]["block_ids"][0] = [0, 0, 11]
    (states,) = explain_json(view_of(scenario))["states"]
    assert states["initial_state_indices"] == [11, 12, 0]
    scenario["more_kv_cache_groups"][0]["block_ids"][0] = [9, 10, 0]
    with pytest.raises(PrepError, match=r"block_ids\.0\.2: block 0 is the null block"):
        view_of(scenario)


def test_text_says_which_states_are_read_and_written():
    console = Console(width=120, file=io.StringIO())
    explain_text(view(), console)
    lines = console.file.getvalue().splitlines()
    (title,) = [n for n, line in enumerate(lines) if line.strip() == "states of group 1"]
    table = [line for line in lines[title + 1 : title + 7] if line.strip()]
    assert table[0].split() == " ".join(NAMES).split()
    assert [line.split() for line in table[2:5]] == ROWS


def test_json_says_which_states_are_read_and_written():
    (states,) = explain_json(view())["states"]
    assert states["initial_state_indices"] == [11, 12, 0]
    assert states["state_indices"] == [11, 13, 14]
    assert states["has_initial_state"] == [True, True, False]
    assert states["prefill_query_start_loc"] == [0, 3, 6]
    halves = [states[name] for name in ("num_decodes", "num_decode_tokens", "num_prefills")]
    assert halves == [1, 1, 2]


def test_states_are_drawn_as_halves_of_blocks():
    cells = [cell for line in state_map(view(), 1, [0, 1, 2]).lines for cell in line.cells]
    bars = {(bar.kind, bar.low, bar.high) for cell in cells for bar in cell.bars}
    assert bars == {("computed", 0, 1), ("written", 1, 2)}


def test_the_page_shows_the_drawing():
    page = Page(explain_html(view()))
    titles = [attrs["title"] for tag, attrs in page.elements if "data-at" in attrs]
    assert titles[-4:] == [
        "block 11: state read and state written",
        "block 12: state read",
        "block 13: state written",
        "block 14: state written",
    ]
    assert [NAMES, *ROWS] in page.tables
