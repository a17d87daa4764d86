"""``explain DIR --html``: the page of a run holds what the records say, and stays small."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.browser import needs_browser, opened
from tests.helpers.recorded_runs import Request, record, record_two_engines
from tests.inspect.test_page import Page
from vllm_npu_prep.cli import main
from vllm_npu_prep.inspect import run_steps
from vllm_npu_prep.inspect.run import RankRun, Run, Step, read_run
from vllm_npu_prep.inspect.run_data import run_json
from vllm_npu_prep.inspect.run_page import run_html
from vllm_npu_prep.prep.state import AttentionState
from vllm_npu_prep.records.record_file import read_record, record_files


def data_of(html: str) -> dict:
    (text,) = re.findall(
        r'<script type="application/json" id="run">(.*?)</script>', html, re.DOTALL
    )
    return json.loads(text)


def numbers_of(runs: list[list[int]]) -> list[int]:
    return [first + i for first, count in runs for i in range(count)]


def steps_of(row: list) -> list[tuple]:
    """A request's steps as its spans say: step, computed before, scheduled, drafts, accepted."""
    found = []
    for first, steps, stride, in_prompt, computed, scheduled, drafts, *accepted in row[2]:
        for place in range(steps):
            assert in_prompt == int(computed < row[1])
            known = accepted[0][place] if accepted else "0"
            count = None if known == "?" else int(known)
            found.append((first + place * stride, computed, scheduled, drafts, count))
            computed += scheduled - drafts + (count or 0)
    return found


def told(request: Request) -> list[tuple]:
    """What records can tell of it: not what came of drafts of its last step before a gap."""
    ends = {step for step, *_ in request.done[-1:]}
    for number in request.preemptions:
        ends.add(max(step for step, *_ in request.done if step < number))
    return [(*step[:4], None if step[3] and step[0] in ends else step[4]) for step in request.done]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of two ranks, what is true of it, and its page."""
    folder = tmp_path_factory.mktemp("records")
    how = {"most_drafts": 3, "request_ids": "plain"}
    traffics = [record(folder, 5, 150, f"-rank{rank}", **how) for rank in range(2)]
    page = folder / "run.html"
    assert main(["explain", str(folder), "--html", str(page), "--no-step-pages"]) == 0
    return folder, traffics[0], page.read_text()


def test_the_page_says_of_each_step_what_was_recorded(recorded):
    _, traffic, html = recorded
    data, truth = data_of(html), traffic.steps
    assert numbers_of(data["numbers"]) == list(range(150))
    for rank in data["ranks"]:
        assert numbers_of(rank["steps"]) == list(range(150))
        assert [data["states"][state] for state in rank["state"]] == [step.state for step in truth]
        assert [data["kinds"][kind] for kind in rank["kind"]] == [step.kind for step in truth]
        for name in ("requests", "tokens", "padding", "drafts"):
            assert rank[name] == [getattr(step, name) for step in truth], name
        assert rank["blocks"] == [[step.blocks for step in truth]]
        begin = truth[0].times[0]
        assert rank["times"] == [
            [round(1e6 * (started - begin)), round(1e6 * prepared), waits]
            for started, prepared, waits in (step.times for step in truth)
        ]
        assert rank["config"]["num_blocks"] == traffic.num_blocks
    kinds = {step.kind.partition(":")[0] for step in truth}
    assert kinds == {"full graph", "piecewise graphs", "eager"} and any(s.drafts for s in truth)


def test_the_page_says_of_each_request_what_happened_to_it(recorded):
    _, traffic, html = recorded
    first, second = data_of(html)["ranks"]
    done = [request for request in traffic.requests if request.done]
    assert [row[0] for row in first["rows"]] == [request.name for request in done]
    for row, request in zip(first["rows"], done):
        assert row[1] == request.num_prompt_tokens
        assert steps_of(row) == told(request), request.name
        assert row[3] == [list(hit) for hit in request.hits]
        assert row[4] == request.preemptions
    assert sum(len(request.hits) for request in done) > 5
    assert sum(len(request.preemptions) for request in done) > 3
    assert second["rows_like"] == 0 and second["rows"] == [row[0] for row in first["rows"]]


def test_ranks_are_lines_beside_each_other(recorded):
    folder, traffic, html = recorded
    table = Page(html).tables[0]
    first, second = (dict(zip(table[0], line)) for line in table[1:])
    most = max(step.blocks for step in traffic.steps)
    known = [step for request in traffic.requests for step in told(request) if step[4] is not None]
    expected = {
        "rank": "0",
        "tokens": f"{sum(step.tokens for step in traffic.steps):,}",
        "most KV blocks": f"{most} of {traffic.num_blocks}",
        "drafts accepted": f"{sum(s[4] for s in known):,} of {sum(s[3] for s in known):,}",
        "compared with the first rank": "-",
    }
    assert first | expected == first
    assert second == first | {"rank": "1", "compared with the first rank": "same steps"}
    run = read_run(folder)
    steps = run.ranks[1].steps
    steps[17] = steps[17]._replace(tokens=steps[17].tokens + 1)
    assert "differs from step 17" in Page(run_html(run)).tables[0][2]


def test_two_engines_are_on_one_page(tmp_path, capsys):
    """A request whose K and V were moved has the same name on both; the others have their own."""
    traffics = record_two_engines(tmp_path, 40)
    page, folders = tmp_path / "both.html", [tmp_path / "prefill", tmp_path / "decode"]
    assert main(["explain", *map(str, folders), "--html", str(page)]) == 0
    names = [{r.name for r in traffic.requests if r.done} for traffic in traffics]
    moved = sum(int(name.split()[1]) % 2 == 0 for name in names[0] & names[1])
    number = sum(map(len, names)) - moved
    shown, of_steps, *_ = capsys.readouterr().out.splitlines()
    assert moved > 3 and f": 40 steps of 2 ranks, {number} requests; " in shown
    assert of_steps.endswith("both-steps: 80 pages of steps")
    assert (tmp_path / "both-steps" / "step-7-decode.html").is_file()
    data = data_of(page.read_text())
    assert [rank["title"] for rank in data["ranks"]] == ["prefill", "decode"]
    rows = [{row[0] for row in rank["rows"]} for rank in data["ranks"]]
    assert len(rows[0] & rows[1]) == moved
    assert f"prefill, decode; {moved} requests in several of them" in page.read_text()
    table = Page(page.read_text()).tables[0]
    assert [line[0] for line in table[1:]] == ["prefill", "decode"]
    assert [line[-1] for line in table] == ["compared with the first rank", "-", "-"]


def test_times_of_two_engines_are_those_of_the_clock(tmp_path):
    """Each host counts its seconds from another moment, which the manifest tells."""
    record_two_engines(tmp_path, 4)
    folders = [tmp_path / name for name in ("prefill", "decode")]
    manifests = [next(folder.glob("*/manifest.json")) for folder in folders]
    contents = [json.loads(manifest.read_text()) for manifest in manifests]
    recorded = [content.pop("clock") for content in contents]
    assert abs(recorded[0] - recorded[1]) < 60  # both are of this host

    def first_times(*clocks: float) -> list[int]:
        for manifest, content, clock in zip(manifests, contents, clocks, strict=True):
            manifest.write_text(json.dumps(content | ({"clock": clock} if clock else {})))
        return [rank["times"][0][0] for rank in run_json(read_run(*folders))["ranks"]]

    assert first_times(1000.0, 1100.0) == [0, 100_000_000]
    assert first_times(1100.0, 1000.0) == [100_000_000, 0]
    assert first_times(1000.0, 0.0) == [0, 0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("decode",), "give one, or, to see several engines on one page, the folder of each"),
        (
            ("decode", "--html", "o.html", "--step", "2"),
            "several files are given: prefill, decode; give one",
        ),
        (("prefill", "--html", "o.html"), "the same folder is given twice"),
        (("there", "--html", "o.html"), "the folder of each with --html FILE and without --step"),
    ],
)
def test_engines_that_can_not_be_shown_together_are_one_line(
    tmp_path, monkeypatch, capsys, words, says
):
    record_two_engines(tmp_path, 2)
    capsys.readouterr()  # where the records are, if a logger is there already
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "prefill", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and not (tmp_path / "o.html").exists()


def test_records_of_older_versions_have_no_times(tmp_path):
    record(tmp_path, 7, 5, times=False)
    (folder,) = tmp_path.iterdir()
    assert read_record(record_files(folder)[0]).settings.times is None
    run = read_run(tmp_path)
    assert run_json(run)["ranks"][0]["times"] == [None] * 5
    line = dict(zip(*Page(run_html(run)).tables[0][:2]))
    assert line["host time, median"] == line["waits"] == "-" and line["steps"] == "5"


def test_a_request_of_before_the_record_is_no_prefix_hit(tmp_path):
    record(tmp_path, 11, 30, steps="last 9")
    (rank,) = read_run(tmp_path).ranks
    computed = [row for row in rank.rows if row.spans[0].first == 0 and row.spans[0].computed]
    assert computed and not any(row.hits for row in computed)
    assert run_json(read_run(tmp_path))["numbers"] == [[21, 9]]


def test_the_last_run_is_shown_and_the_others_are_named(tmp_path, capsys):
    for name, seed in (("20260101-000000", 1), ("20260102-000000", 2)):
        record(tmp_path / name, seed, 3 + seed)
        (folder,) = (tmp_path / name).iterdir()
        folder.rename(tmp_path / f"{name}-1")
        (tmp_path / name).rmdir()
    page = tmp_path / "run.html"
    assert main(["explain", str(tmp_path), "--html", str(page)]) == 0
    shown, of_steps, not_shown = capsys.readouterr().out.splitlines()
    assert shown.startswith(f"{page}: 5 steps of 1 rank, ")
    assert shown.endswith(f"; {page.stat().st_size:,} bytes")
    assert of_steps == f"{tmp_path / 'run-steps'}: 5 pages of steps"
    assert not_shown.startswith("not shown: 20260101-000000-1, an older run in ")
    assert data_of(page.read_text())["older"] == ["20260101-000000-1"]


def test_older_runs_of_each_engine_are_named(tmp_path):
    folders = [tmp_path / name for name in ("prefill", "decode")]
    for folder in folders:
        folder.mkdir()
        for number in (1, 2):
            record(tmp_path / "new", 1, 2)
            (made,) = (tmp_path / "new").iterdir()
            made.rename(folder / f"{folder.name} {number}")
    assert read_run(*folders).older == ["prefill 1", "decode 1"]


@pytest.mark.parametrize(
    ("words", "most", "pages", "says"),
    [
        ([], 6, 6, "run-steps: 6 pages of steps"),
        ([], 5, 0, "no pages of 6 steps: --step-pages writes them, --step-pages A:B some"),
        (["--step-pages"], 5, 6, "run-steps: 6 pages of steps"),
        (["--no-step-pages"], 6, 0, None),
    ],
    ids=["by itself", "too many", "forced", "off"],
)
def test_pages_of_steps_are_written_unless_there_are_too_many(
    tmp_path, capsys, monkeypatch, words, most, pages, says
):
    """Of all ranks together; the page of the run links to those that are there."""
    monkeypatch.setattr(run_steps, "MOST_UNASKED", most)
    for rank in range(2):
        record(tmp_path, 5, 3, f"-rank{rank}")
    assert main(["explain", str(tmp_path), "--html", str(tmp_path / "run.html"), *words]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("/")[2] for line in lines] == ([says] if says else [])
    assert len([*tmp_path.glob("run-steps/step-*.html")]) == pages
    ranks = data_of((tmp_path / "run.html").read_text())["ranks"]
    expected = [[0, 3]] if pages else None
    assert [rank["pages"] and rank["pages"]["steps"] for rank in ranks] == [expected] * 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-300])


def without_groups(path: Path) -> None:
    """The record of a step that has no groups, among those of steps that have one."""
    record = read_record(path)
    none = {"block_sizes": [], "max_num_blocks": [], "groups": []}
    settings, batch = record.settings.model_copy(update=none), record.batch
    batch = replace(batch, num_blocks=batch.num_blocks[:0], block_ids=batch.block_ids[:0])
    path.write_bytes(replace(record, settings=settings, batch=batch).to_bytes())


WRONG = {
    "step-000002.npz: not a record: BadZipFile": lambda file: file.write_bytes(b"PK\x03\x04 no"),
    "step-000002.npz: not a record": cut,
    "is the record of step 2": lambda file: file.rename(file.with_name("step-000009.npz")),
    "not the manifest of a run (clock is no number": lambda file: file.with_name(
        "manifest.json"
    ).write_text('{"clock": "late"}'),
    "not the manifest of a run": lambda file: file.with_name("manifest.json").write_text('["a"]'),
    "step 2 has 0 block tables, and the steps before it 1": without_groups,
    "no step-*.npz here": lambda file: [each.unlink() for each in file.parent.glob("*.npz")],
}


@pytest.mark.parametrize("says", WRONG)
def test_bad_folders_and_files_are_one_line(says, tmp_path, capsys):
    record(tmp_path, 3, 4)
    WRONG[says](record_files(tmp_path)[2])
    capsys.readouterr()  # where the records are, if a logger is there already
    assert main(["explain", str(tmp_path), "--html", str(tmp_path / "o.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and not (tmp_path / "o.html").exists()
    assert not [*tmp_path.glob("*-steps")]


@pytest.fixture(scope="module")
def long_run() -> str:
    """The page of 10,000 steps, in which 64 requests at a time decode with drafts."""
    rank = RankRun(None, Path("folder"), {"num_blocks": 4096})
    states = [state.name for state in AttentionState]
    rng = np.random.default_rng(1)
    for number in range(10_000):
        turn, age = divmod(number, 256)
        names = [f"{64 * turn + row:016x}" for row in range(64)]
        before = 32 + 2 * (age - 1) if age else 0  # one draft of three is accepted
        requests = [(name, 32, before, 4 if age else 32, 3 if age else 0) for name in names]
        kind = ["full graph", "eager: why"][number % 2]
        times = number / 50, float(rng.random()) / 1000, int(number % 900 == 0)
        blocks = [int(rng.integers(4096))]
        state = states[number % 5]
        drafts = sum(request[-1] for request in requests)
        step = Step(number, state, kind, 64, 0, 256, number % 9, drafts, blocks, times)
        rank.add(number, step, requests)
    return run_html(Run("a long run", list(range(10_000)), [rank], []))


def test_a_long_run_has_as_few_elements_as_a_short_one(recorded, long_run):
    many, few = (len(re.findall(r"<[a-z]", html)) for html in (long_run, recorded[2]))
    assert many <= few < 200
    assert len(long_run) < 2_000_000  # 640,000 times a request takes part in a step


def test_names_stay_text(tmp_path):
    name = "</script><img src=x onerror=alert(1)>&\u2028<!--"
    rank = RankRun(0, tmp_path / "a 'folder'; rm -rf", {"model": name, "num_blocks": "many"})
    step = Step(0, "DecodeOnly", name, 1, 0, 1, 0, 0, [1], None)
    rank.add(0, step, [(name, 4, 5, 1, 0)])
    html = run_html(Run(name, [0], [rank], [name]))
    page = Page(html)
    assert data_of(html)["ranks"][0]["rows"][0][0] == name
    assert not [tag for tag, _ in page.elements if tag == "img"]
    scripts = [attrs for tag, attrs in page.elements if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "run"}, {}]
    assert data_of(html)["ranks"][0]["quoted_folder"].count("'\"'\"'") == 2


def in_a_browser(html: str, folder: Path, network, address: str, **how) -> tuple[str, np.ndarray]:
    """The page of a run after it was opened, and what is seen."""
    page = folder / "run.html"
    page.write_text(html)
    dom, picture = opened(page, network, address, **how)
    assert not network[1]
    return dom, np.asarray(picture)


@needs_browser
def test_in_a_browser_a_step_is_chosen_by_its_address(recorded, network, tmp_path):
    _, traffic, html = recorded
    dom, picture = in_a_browser(html, tmp_path, network, "#step=60&rank=1", dark=True)
    assert 'data-step="60"' in dom and 'data-drawn="0-149"' in dom
    side, step = dom[dom.index('id="side"') :], traffic.steps[60]
    present = [r.name for r in traffic.requests if any(done[0] == 60 for done in r.done)]
    shown = [f"<dd>{step.state}</dd>", f"<dd>{step.blocks} of {traffic.num_blocks}</dd>"]
    for text in ("<h2>step 60, rank 1</h2>", *shown, *(f"<td>{name}</td>" for name in present)):
        assert text in side
    assert present and picture.mean() < 100
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 20


@needs_browser
def test_a_browser_draws_a_run_of_10_000_steps(long_run, network, tmp_path):
    """With the start of the browser it took 2 to 4 seconds on two busy cores."""
    dom, picture = in_a_browser(long_run, tmp_path, network, "#step=9000")
    assert picture.mean() > 100
    assert 'data-drawn="0-9999"' in dom
    side = dom[dom.index('id="side"') :]
    assert "<h2>step 9000</h2>" in side and side.count("<td>decode</td>") > 50
