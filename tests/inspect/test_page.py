"""``explain --html``: everything is on the page, names stay text, and it works in a browser."""

import base64
import errno
import io
import itertools
import json
import os
import re
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from tests.helpers import worked_examples
from tests.helpers.browser import needs_browser, opened
from tests.helpers.scenarios import example, in_chunks, many, small, view_of, with_an_image
from vllm_npu_prep.cli import main
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.inspect.explain import explain_json, select, shard_table
from vllm_npu_prep.inspect.page import explain_html

VOID = {"meta", "img", "input"}


class Page(HTMLParser):
    """A page as its tables, elements and texts."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.of_tags = defaultdict(str)  # texts by the elements that are open around them
        self.tables: list[list[list[str]]] = []  # cells, of headings first
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID and tag != "wbr":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        for tag in set(self.open):
            self.of_tags[tag] += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    def of_class(self, name: str) -> list[dict[str, str]]:
        return [a for _, a in self.elements if name in (a.get("class") or "").split()]

    def tokens(self) -> dict[str, list[str]]:
        """Columns of the token tables by their headings."""
        own = [table for table in self.tables if table[0][0] == "token"]
        rows = [row for table in own for row in table[1:] if len(row) == len(own[0][0])]
        return dict(zip(own[0][0], (list(column) for column in zip(*rows))))

    def masks(self) -> list[np.ndarray]:
        """Masks as they are drawn, True where masked."""
        urls = [a["src"] for tag, a in self.elements if tag == "img"]
        pictures = [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in urls]
        return [np.array(Image.open(io.BytesIO(picture)))[..., 3] == 0 for picture in pictures]


def page_of(scenario: dict, *args) -> Page:
    return Page(explain_html(view_of(scenario), *args))


@pytest.mark.parametrize("name", worked_examples.NAMES)
def test_every_variable_of_the_worked_examples_is_on_the_page(name):
    scenario, expected = worked_examples.load(name)
    page = page_of(scenario)
    columns = page.tokens()
    assert len(columns) == 10
    for variable, column in columns.items():
        want = range(len(column)) if variable == "token" else expected[variable]
        assert column == [str(value) for value in want], variable
    of_requests = dict(zip(page.tables[0][0], map(list, zip(*page.tables[0][1:]))))
    names = ("query_lens", "cu_num_tokens", "seq_lens", "num_computed_tokens", "logits_indices")
    for variable in names:
        assert of_requests[variable] == [str(value) for value in expected[variable]]
    assert page.tables[0][1][0] == scenario["requests"][0]["req_id"]
    spans = [f"{a}:{b}" for a, b in itertools.pairwise(expected["query_start_loc"])]
    assert of_requests["query_start_loc"] == spans
    text = " ".join(page.texts)
    for variable in ("attn_state", "num_input_tokens", "max_query_len", "max_seq_len"):
        assert str(expected[variable]) in text
    drawn = [a["data-at"] for a in page.of_class("block")]
    blocks = enumerate(expected["block_table"])
    assert drawn == [f"0-{row}-{block}" for row, own in blocks for block in own if block]


@pytest.mark.parametrize("name", worked_examples.NAMES)
def test_the_mask_is_drawn_cell_by_cell(name):
    scenario, expected = worked_examples.load(name)
    (drawn,) = page_of(scenario).masks()
    mask = expected["attn_mask"]
    if mask is None:  # a decode: what each token sees all the same
        want = [[c > p for c in range(expected["max_seq_len"])] for p in expected["positions"]]
    elif "masked" in mask:
        want = mask["masked"]
    else:
        first = mask["first_masked_position_by_row"]
        want = [[column >= end for column in range(mask["shape"][1])] for end in first]
    assert drawn.tolist() == np.array(want, bool).tolist()


def test_the_constant_is_drawn_as_what_tokens_see():
    rows = page_of(small()).masks()
    constant = page_of(small() | {"mask": "compressed"})
    assert np.array_equal(rows, constant.masks())
    assert any("the mask is a constant, this is what they see" in text for text in constant.texts)


def test_groups_images_mrope_and_padding_are_on_the_page():
    scenario = with_an_image() | {"capture_sizes": [8]}
    page, step = page_of(scenario), explain_json(view_of(scenario))
    tokens = page.tokens()
    assert tokens["mrope_positions 2"] == [str(p) for p in step["mrope_positions"][2]]
    assert tokens["slot_mapping 1"] == [str(s) for s in step["kv_cache_groups"][1]["slot_mapping"]]
    lines = [a for tag, a in page.elements if tag == "tr" and "data-t" in a]
    assert [a["data-t"] for a in lines if a.get("class") == "item"] == ["0", "1", "2"]
    assert lines[0]["data-slots"] == "15 59"
    window, full = page.masks()
    for drawn, group in ((window, 0), (full, 1)):
        want = step["kv_cache_groups"][group]["attn_mask"]["masked"]
        assert drawn.tolist() == np.array(want, bool).tolist()
    assert not full[6:].any()  # padding masks nothing
    assert len(page.of_class("null")) == 2  # freed blocks of the window group
    # In two blocks of group 0 for a, in one of group 1 for a and b each, and in the legend.
    assert len(page.of_class("picture")) == 2 + 2 + 1


def test_what_ranks_keep_of_contexts_is_on_the_page():
    view = view_of(example("shared-context"))
    (table,) = [t for t in Page(explain_html(view)).tables if "rank 1 (this one)" in t[0]]
    assert table[1:] == [list(map(str, row)) for row in shard_table(view, select(view)).rows]


def test_virtual_requests_are_on_the_page():
    page, view = page_of(in_chunks()), view_of(in_chunks())
    (table,) = [table for table in page.tables if table[0][0] == "query_start_loc"]
    lengths = view.step.local_requests(0)["seq_lens"]
    assert [row[1] for row in table[1:]] == [str(length) for length in lengths]
    assert page.of_class("mask")[0]["data-chunk"] == "4"


def test_a_shared_block_and_a_stray_token_are_marked():
    scenario = small()
    first = scenario["requests"][2]
    other = {"req_id": "3", "block_ids": [4, 5, 9, 10], "num_computed_tokens": 4}
    scenario["requests"] = [first, first | other]
    view = view_of(scenario)
    marked = [a["data-at"] for a in Page(explain_html(view)).of_class("shared")]
    assert marked == ["0-0-4", "0-0-5", "0-1-4", "0-1-5"]
    view.step.slot_mapping[0][1] = 40  # as a record of something broken may have it
    text = " ".join(Page(explain_html(view)).texts)
    assert "1 token writes blocks that this request doesn't own: 1" in text


HOSTILE = (
    "</script><script>document.documentElement.dataset.evil=1</script>",
    "\"' onmouseover=alert(1) x='",
    "<img src=x onerror=alert(1)>&amp;&#60;",
    "\u202egnp.exe\u2066",
    "</title></style>]]>--><!--",
    "",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_stay_text(name):
    view = view_of(with_an_image())
    plain = Page(explain_html(view))
    first, *others = view.requests
    items = [replace(item, modality=name) for item in first.items]
    requests = [replace(first, req_id=name, items=items), *others]
    html = explain_html(replace(view, name=name, requests=requests))
    page = Page(html)
    shapes = [[(tag, set(a)) for tag, a in each.elements] for each in (page, plain)]
    assert shapes[0] == shapes[1]
    seen = name.replace("\u202e", "\\u202e").replace("\u2066", "\\u2066")
    assert page.tables[0][1][0] == page.of_class("owner")[0]["title"] == seen
    assert page.of_tags["title"] == page.of_tags["h1"] == seen
    assert not set("\u202e\u2066") & set(html)
    assert next(a["data-name"] for _, a in page.elements if "data-name" in a) == seen
    titles = [a["title"] for _, a in page.elements if a.get("class") == "item"]
    assert titles == [f"{seen} 0 of its request"] * 3


def test_the_page_loads_nothing():
    page = page_of(with_an_image())
    assert not {tag for tag, _ in page.elements} & {"link", "iframe", "base", "form", "object"}
    for name, value in (each for _, attributes in page.elements for each in attributes.items()):
        assert name in ("content", "src") or "//" not in value
        assert not name.startswith("on")
        assert name not in ("src", "href") or value.startswith("data:image/png;base64,")
    assert "url(" not in "".join(page.texts)
    (policy,) = [a["content"] for _, a in page.elements if "http-equiv" in a]
    assert policy.startswith("default-src 'none'; ")


@pytest.fixture
def few_lines(monkeypatch):
    """Pages that hold fewer tokens: parsing thousands takes a while."""
    monkeypatch.setattr("vllm_npu_prep.inspect.page.MAX_TOKENS", 1000)


def test_big_batches_are_folded_and_say_what_is_left_out(few_lines):
    page = page_of(many(600, 20, 12))
    assert sum(tag == "tr" and "data-t" in a for tag, a in page.elements) == 2 * 512
    text = " ".join(page.texts)
    notes = ("88 lines are left out", "18 tokens are left out: --tokens 1:19", "the tokens of 88 ")
    assert [note for note in notes if note not in text] == []
    page = page_of(many(30, 20, 12) | {"max_num_batched_tokens": 600})
    assert len(page.tokens()["token"]) == 600  # all of them, in folds
    assert page.elements.count(("details", {})) > 3


def test_a_long_prompt_and_its_blocks_are_folded(few_lines):
    html = explain_html(view_of(many(1, 40_000, 0)))
    page = Page(html)
    assert len(html) < 1 << 20 and len(page.of_class("block")) < 30
    text = " ".join(page.texts)
    assert "12-2489" in text and "1-2500" in text
    (drawn,) = page.masks()
    assert np.array_equal(drawn, ~np.tri(640, dtype=bool))


def test_one_request_or_some_tokens_are_shown_alone():
    page = page_of(small(), "2")
    assert page.tokens()["input_ids"] == ["3005", "3006", "3007"]
    assert page.of_class("mask")[0]["data-first"] == "2"
    assert page.masks()[0].shape == (3, 8)
    assert {a["data-at"][2] for a in page.of_class("block")} == {"2"}
    assert page_of(small(), None, (1, 3)).tokens()["token"] == ["1", "2"]
    with pytest.raises(PrepError, match="--request 9"):
        page_of(small(), "9")


def test_files_are_written_whole_or_refused_with_one_line(tmp_path, capsys):
    command = ["explain", str(worked_examples.path_of("chunked-prefill"))]
    page, picture = tmp_path / "a.html", tmp_path / "a.png"
    page.write_text("old")
    assert main([*command, "--html", str(page), "--png", str(picture)]) == 0
    assert page.read_text() == explain_html(view_of(small()))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a.html", "a.png"]
    assert capsys.readouterr().out == ""
    for bad in (tmp_path, tmp_path / "none" / "a.html", page / "b.html", Path("/dev/null")):
        assert main([*command, "--html", str(bad)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(bad) in line
    assert main([*command, "--json", "--html", str(page)]) == 0
    assert json.loads(capsys.readouterr().out)["num_reqs"] == 3


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr("vllm_npu_prep.files.os.replace", full)
    path = str(worked_examples.path_of("chunked-prefill"))
    assert main(["explain", path, "--html", str(tmp_path / "a.html")]) == 2
    assert "can't be written: No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------- in a browser


@needs_browser
@pytest.mark.parametrize(("name", "dark"), [("chunked-prefill", False), ("mixed-200-tokens", True)])
def test_a_browser_shows_the_page_and_traces_a_token(name, dark, network, tmp_path):
    scenario, expected = worked_examples.load(name)
    page, token = tmp_path / "page.html", len(expected["positions"]) // 2
    page.write_text(explain_html(view_of(scenario)))
    document, picture = opened(page, network, f"#t{token}", dark=dark)
    assert network[1] == []
    assert f'data-traced="{token}"' in document[:200]
    slot, block = expected["slot_mapping"][token], expected["block_numbers"][token]
    row = expected["req_indices"][token]
    place = scenario["requests"][row]["block_ids"].index(block)
    trace = re.search(r'id="trace"[^>]*>([^<]*)<', document)[1]
    assert trace.startswith(f"token {token} of request ")
    assert f"block_table[{row}][{place}] = {block}" in trace
    assert trace.endswith(f"slot {slot}")
    traced = re.findall(r'<div class="block[^"]* traced" data-at="([^"]*)"', document)
    assert traced == [f"0-{row}-{block}"]

    pixels = np.array(picture)
    ground = pixels[2, 2]
    assert (ground.max() < 60) if dark else (ground.min() > 200)
    colours = np.ptp(pixels, axis=2) > 80  # hues are those of requests: masks and blocks
    assert colours[:, 800:].mean() > 0.005


@needs_browser
def test_nothing_leaves_and_no_other_script_runs(network, tmp_path):
    """From a page with hostile names, whose batch is folded."""
    evil = (
        "<script>document.documentElement.dataset.evil = 1</script>"
        '<img src="http://example.invalid/a"></body>'
    )
    view = view_of(many(300, 20))
    requests = [replace(r, req_id=f"{HOSTILE[0]}{i}") for i, r in enumerate(view.requests)]
    html = explain_html(replace(view, name=HOSTILE[2], requests=requests))
    html, page = html.replace("</body>", evil), tmp_path / "page.html"
    page.write_text(html)
    document, _ = opened(page, network, "#t5999")
    assert network[1] == []
    assert "data-evil=" not in document[:300]
    assert 'data-traced="5999"' in document[:300]
    assert len(re.findall(r"<details open", document)) == 1  # the fold of the traced token
    # Without the policy both happen, so this test can see them.
    page.write_text(re.sub(r"<meta http-equiv[^>]*>", "", html))
    document, _ = opened(page, network)
    assert any("example.invalid" in path for path in network[1])
    assert "data-evil=" in document[:300]


PLAY = """<script>
const out = [], line = (t) => document.querySelector(`tr[data-t="${t}"]`);
const at = (element, x, y, type) => {
  const box = element.getBoundingClientRect();
  element.dispatchEvent(new MouseEvent(type, { bubbles: true,
    clientX: box.left + x * box.width, clientY: box.top + y * box.height }));
  out.push(document.documentElement.dataset.traced);
};
const press = (key) => {
  document.dispatchEvent(new KeyboardEvent("keydown", { key }));
  out.push(document.documentElement.dataset.traced);
};
at(line(1), 0.5, 0.5, "mouseover");
at(line(2), 0.5, 0.5, "click");
at(line(0), 0.5, 0.5, "mouseover");
["ArrowDown", "ArrowUp"].forEach(press);
at(document.querySelector(".mask"), 0.1, 0.9, "click");
at(document.querySelector('[data-at="0-0-2"] .slots'), 0.9, 0.5, "click");
at(document.querySelector('[data-at="0-2-8"] .slots'), 0.2, 0.5, "click");
press("Escape");
at(line(0), 0.5, 0.5, "mouseover");
const dot = document.querySelector(".dot").style, slot = document.querySelector(".traced .slot");
out.push(dot.left, dot.top, dot.width, dot.height, slot.style.left, slot.style.width);
document.documentElement.dataset.out = out.join(" ");
</script></body>"""


@needs_browser
def test_hovering_clicks_and_keys_trace(network, tmp_path):
    html = re.sub(r"<meta http-equiv[^>]*>", "", explain_html(view_of(small())))
    page = tmp_path / "page.html"
    page.write_text(html.replace("</body>", PLAY))
    document, _ = opened(page, network)
    out = re.search(r'data-out="([^"]*)"', document)[1].split()
    # Hovered 1; 2 is kept against hovering; keys; last row of the mask; slots 5 and 16; freed, 0.
    assert out[:10] == ["1", "2", "2", "3", "2", "4", "0", "3", "3", "0"]
    # Token 0: row 0 of 5, position 3 of 8, offset 1 of 2.
    assert out[10:] == ["37.5%", "0%", "12.5%", "20%", "50%", "50%"]
