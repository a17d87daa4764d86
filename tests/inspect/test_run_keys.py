"""Keys on the page of a run: they choose steps, ranks and requests, and open the page of a step.

Node runs the page's own script on as much of a document as it asks for (`keys.mjs`), so that this
needs no browser. How it looks there, `tests.inspect.test_run_page` asks one.
"""

import json
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.recorded_runs import record, record_two_engines
from tests.helpers.waiting import LIMIT
from vllm_npu_prep.cli import main
from vllm_npu_prep.inspect.run import read_run

NODE = shutil.which("node")
STEPS = 60
needs_node = pytest.mark.skipif(NODE is None, reason="no node: apt-get install nodejs")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Folder of a run of two ranks with pages of steps 10 to 39, and the traffic."""
    folder = tmp_path_factory.mktemp("records")
    for rank in range(2):
        traffic = record(folder, 5, STEPS, f"-rank{rank}", most_drafts=3, request_ids="plain")
    command = ["explain", str(folder), "--html", str(folder / "a run.html")]
    assert main([*command, "--step-pages", "10:40"]) == 0
    return folder, traffic


def pressed(page: Path, *events: dict) -> list[dict]:
    """What a page shows at first, and after each event."""
    command = [NODE, Path(__file__).with_name("keys.mjs"), page, json.dumps(events)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def press(run):
    """Function of events: what the page of the run shows at first, and after each of them."""
    return partial(pressed, run[0] / "a run.html")


def key(name: str, on: str = "lane 0", **more: bool) -> dict:
    return {"on": on, "key": name, **more}


@needs_node
def test_arrow_keys_go_from_step_to_step(press, run):
    moves = [
        (key("ArrowRight"), 1),
        (key("ArrowRight", shiftKey=True), 11),
        (key("ArrowLeft"), 10),
        (key("End"), STEPS - 1),
        (key("ArrowRight"), STEPS - 1),
        (key("ArrowLeft", shiftKey=True), STEPS - 11),
        (key("Home"), 0),
        (key("ArrowLeft"), 0),
        (key("PageDown"), 54),
        (key("PageUp"), 0),
    ]
    first, *told = press(*(event for event, _ in moves))
    assert first["step"] == 0 and first["title"] == "step 0, rank 0"
    assert [each["step"] for each in told] == [step for _, step in moves]
    for each in told:
        state = run[1].steps[each["step"]].state
        assert each["hash"] == f"#step={each['step']}&rank=0" and each["prevented"]
        assert each["title"] == f"step {each['step']}, rank 0"
        assert each["said"][0].startswith(f"step {each['step']}: {state}")


@needs_node
def test_up_and_down_choose_a_rank_or_a_request(press, run):
    lanes = press(key("ArrowDown"), key("ArrowDown", "lane 1"), key("ArrowUp", "lane 1"))[1:]
    assert [each["focus"] for each in lanes] == [1, 1, 0]
    assert [each["title"] for each in lanes] == [f"step 0, rank {rank}" for rank in (1, 1, 0)]
    names = [f"request {request.name}" for request in run[1].requests if request.done]
    *down, up, gone = press(
        *[key("ArrowDown", "rows")] * 3, key("ArrowUp", "rows"), key("Escape", "rows")
    )[1:]
    assert [each["request"] for each in (*down, up)] == [*names[:3], names[1]]
    assert gone["request"] == "none" and gone["prevented"] and gone["step"] == up["step"]


@needs_node
def test_zooming_keeps_the_chosen_step_in_sight(press):
    events = key("End"), key("+"), key("+"), key("-"), key("0")
    drawn = [each["drawn"] for each in press(*events)[1:]]
    assert drawn[0] == drawn[-1] == f"0-{STEPS - 1}"
    shown = [[int(end) for end in each.split("-")] for each in drawn]
    sizes = [last - first + 1 for first, last in shown]
    assert sizes[2] < sizes[1] < sizes[0] and sizes[2] < sizes[3] < sizes[0]
    assert all(last == STEPS - 1 for _, last in shown)


@needs_node
def test_enter_and_a_double_click_open_the_page_of_a_step(press, run):
    """And the panel links to it; a step without a page has the command, and other keys stay."""
    right = key("ArrowRight", shiftKey=True)
    at_0, at_10, opened, twice, other = press(
        key("Enter"), right, key("Enter"), {"on": "lane 0", "type": "dblclick"}, key("x")
    )[1:]
    assert at_0["link"] is None and at_0["opened"] == [] and not at_0["prevented"]
    assert at_0["command"][0].endswith("-rank0 --step 0 --html step.html")
    assert at_10["link"] == "a%20run-steps/step-10-rank0.html" and at_10["command"] == []
    assert opened["opened"] == [at_10["link"]] and opened["prevented"]
    assert twice["opened"] == [at_10["link"]] * 2
    assert not other["prevented"] and other["step"] == 10
    second = press(right, key("ArrowDown"), key("Enter", "lane 1"))[-1]
    assert second["opened"] == ["a%20run-steps/step-10-rank1.html"]


@needs_node
def test_a_request_is_followed_to_another_engine(tmp_path):
    """The panel says which steps a request has in the other engine, and a click goes there.

    The other lane keeps the request chosen if that engine has it.
    """
    record_two_engines(tmp_path, STEPS)
    page = tmp_path / "both.html"
    folders = [str(tmp_path / name) for name in ("prefill", "decode")]
    assert main(["explain", *folders, "--html", str(page), "--no-step-pages"]) == 0
    run = read_run(*map(Path, folders))
    rows = run.ranks[0].rows
    place = next(i for i, row in enumerate(rows) if row.name in run.shared_requests)
    alone = next(i for i, row in enumerate(rows) if row.name not in run.shared_requests)

    def after(number: int, event: dict) -> list[dict]:
        return pressed(page, *[key("ArrowDown", "rows")] * (number + 1), event)[-2:]

    chosen, there = after(place, key("ArrowDown"))
    assert chosen["request"] == there["request"] == f"request {rows[place].name}"
    spans = run.ranks[1].requests[rows[place].name].spans
    assert f"decode{spans[0].first} to {spans[-1].last}" in chosen["side"]
    assert "beside the other ranks" not in chosen["side"]
    assert there["title"].endswith(", decode")
    _, clicked = after(place, {"on": "side", "type": "click", "line": -1})
    assert clicked["title"] == f"step {spans[0].first}, decode"
    assert clicked["request"] == chosen["request"]
    chosen, there = after(alone, key("ArrowDown"))
    assert "in the other engines" not in chosen["side"] and there["request"] == "none"


def test_pages_of_steps_lead_to_each_other_and_back(run):
    pages = run[0] / "a run-steps"
    assert len([*pages.iterdir()]) == 2 * 30
    for number in (10, 25, 39):
        html = (pages / f"step-{number}-rank1.html").read_text()
        links = dict(re.findall(r'<a(?: rel="(prev|next)")? href="([^"]+)">', html))
        assert links.pop("") == f"../a%20run.html#step={number}&amp;rank=1"
        around = {"prev": number - 1, "next": number + 1}
        expected = {
            name: f"step-{other}-rank1.html" for name, other in around.items() if 10 <= other < 40
        }
        assert links == expected and all((pages / name).is_file() for name in links.values())
        assert f"step {number} of " in html


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--html", "o.html", "--step-pages", "70:80"), "no such step; it has steps 0 to 59"),
        (("--step-pages",), "--step-pages goes with --html and a folder of records"),
        (("--html", "o.html", "--step", "3", "--step-pages"), "--step-pages goes with --html"),
        (("--html", "there/o.html", "--step-pages"), "there/o-steps: can't be made: No such"),
        (("--html", "o.html", "--json"), "takes no other option; choose a step by --step N"),
        (("--html", "."), "not a file that can be replaced; name another"),
    ],
    ids=["no such step", "no page", "one step", "no folder", "JSON", "a folder"],
)
def test_what_is_asked_for_in_vain_is_one_line(run, tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", str(run[0]), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and not [*tmp_path.iterdir()]
