"""``explain`` of records: a recorded step is shown as it was prepared, right or wrong."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from tests.helpers import worked_examples
from tests.helpers.records import record_of
from tests.helpers.scenarios import small, view_of, with_an_image
from tests.inspect.test_record import NAMES, scenario_of
from vllm_npu_prep.cli import main
from vllm_npu_prep.inspect.explain import explain_json, summary
from vllm_npu_prep.inspect.texts import input_texts
from vllm_npu_prep.inspect.view import StepView
from vllm_npu_prep.prep.embeds import Placeholders
from vllm_npu_prep.records.record import StepRecord
from vllm_npu_prep.records.record_file import read_record
from vllm_npu_prep.records.scenario import parse_scenario
from vllm_npu_prep.records.settings import LayerGroup


def recorded(scenario: dict, number: int = 0, **more) -> StepRecord:
    return record_of(parse_scenario(scenario).record().prepare(), number=number, **more)


def in_a_folder(folder, *scenarios: dict) -> None:
    for number, scenario in enumerate(scenarios, 7):
        path = folder / f"step-{number:06d}.npz"
        path.write_bytes(recorded(scenario, number).to_bytes())


@pytest.mark.parametrize("name", NAMES)
def test_a_record_is_explained_as_its_scenario(name, tmp_path):
    scenario, groups = scenario_of(name)
    scenario |= {"capture_sizes": [8, 256], "mask": "compressed"}
    path = tmp_path / "step-000000.npz"
    path.write_bytes(recorded(scenario, groups=groups, mask="compressed").to_bytes())
    view, expected = StepView.of_record(read_record(path), "a step"), view_of(scenario)
    explained, contract = explain_json(view), explain_json(expected)
    assert explained == contract
    # Hashed, in a real record.
    names = {f"r{row}": request["req_id"] for row, request in enumerate(scenario["requests"])}

    reasons = [
        [(key, [names.get(word, word) for word in text.split()]) for key, text in summary(each)]
        for each in (view, expected)
    ]
    for told, expected_words in zip(*reasons, strict=True):
        assert told == expected_words or told[0] == "graph"


def test_images_of_a_record_are_shown():
    scenario = with_an_image()
    expected = view_of(scenario)
    runs = [[(item.offset, item.end) for item in request.items] for request in expected.requests]
    record = recorded(scenario, placeholders=Placeholders.of_rows(runs))
    shown = [span | {"req_id": None} for span in StepView.of_record(record, "a step").spans()]
    assert shown and shown == [span | {"req_id": None} for span in expected.spans()]


def test_layers_without_a_cache_have_no_blocks(tmp_path, capsys, monkeypatch):
    """Encoder-only layers beside a group that has blocks, and alone."""
    monkeypatch.setenv("COLUMNS", "200")
    both_ways = LayerGroup(group=1, causal=False)
    record = recorded(small(), groups=(LayerGroup(group=0), both_ways))
    path = tmp_path / "step-000000.npz"
    path.write_bytes(record.to_bytes())
    for flags in ([], ["--json"], ["--html", str(tmp_path / "a.html")]):
        assert main(["explain", str(path), *flags]) == 0
    text = capsys.readouterr().out
    assert "group 1: none: tokens see both ways" in text and text.count("system level") == 1
    groups = json.loads(text.splitlines()[-1])["kv_cache_groups"]
    assert ["slot_mapping" in group for group in groups] == [True, False]
    settings = record.settings.model_copy(update={"groups": [both_ways]})
    alone = replace(StepView.of_record(record, ""), settings=settings, padded=False)
    assert "slot_mapping" not in explain_json(alone)


def test_a_wrong_step_is_shown_as_it_was(tmp_path, capsys):
    path = tmp_path / "step-000000.npz"
    path.write_bytes(recorded(small()).to_bytes())
    record = read_record(path)
    record.prepared["slot_mapping_padded"][3] += 1
    record.prepared["attn_state"] = np.array("DecodeOnly", "S")
    path.write_bytes(record.to_bytes())
    assert main(["explain", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    right = explain_json(view_of(small()))
    assert told["attn_state"] == "DecodeOnly"
    assert told["slot_mapping"] == [
        slot + (token == 3) for token, slot in enumerate(right["slot_mapping"])
    ]


def test_a_step_is_chosen_by_its_number(tmp_path, capsys):
    decode = worked_examples.load("decode-only")[0]
    in_a_folder(tmp_path, small(), decode)
    assert main(["explain", str(tmp_path), "--step", "8"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"step 8 of {tmp_path / 'step-000008.npz'}\nstate   DecodeOnly")
    assert "graph   eager: no graphs" in told
    first = str(tmp_path / "step-000007.npz")
    scenario = tmp_path / "scenario.json"
    scenario.write_text(json.dumps(decode))
    capsys.readouterr()
    for path, flags, expected in [
        (tmp_path, [], "2 records, step-000007.npz to step-000008.npz; name one, or choose"),
        (tmp_path, ["--step", "9"], "holds steps 7 to 8"),
        (first, ["--step", "8"], "is the record of another step"),
        (scenario, ["--step", "8"], "is a scenario, which has one step"),
        (scenario, ["--json", "--request", "a"], "--json prints the whole step: leave out"),
        (first, ["--json", "--tokens", "0:1"], "--json prints the whole step: leave out"),
        (tmp_path / "none.npz", [], "none.npz: No such file or directory"),
    ]:
        assert main(["explain", str(path), *flags]) == 2
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1


def test_no_engine_is_imported_and_what_draws_only_to_draw(tmp_path):
    """Scenarios and records have to be shown beside a broken engine, and at once."""
    in_a_folder(tmp_path, small())
    path, page, picture = worked_examples.path_of("decode-only"), tmp_path / "p", tmp_path / "q"
    code = (
        "import sys; from vllm_npu_prep.cli import main\n"
        "loaded = lambda *names: [name for name in names if name in sys.modules]\n"
        f"main(['explain', {str(path)!r}, '--json'])\n"
        f"assert main(['explain', {str(tmp_path)!r}]) == main(['replay', {str(tmp_path)!r}]) == 0\n"
        "assert loaded('PIL', 'jinja2') == []\n"
        f"main(['explain', {str(path)!r}, '--html', {str(page)!r}, '--png', {str(picture)!r}])\n"
        "assert loaded('PIL', 'jinja2') == ['PIL', 'jinja2']\n"
        "assert loaded('vllm', 'torch') == []\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 step: core and oracle prepare what was recorded\n" in done.stdout
    assert page.stat().st_size and picture.stat().st_size


def save_words(folder, words: dict[int, str]) -> None:
    """A tokenizer that knows these tokens."""
    model = models.WordLevel({word: token for token, word in words.items()}, unk_token="?")
    Tokenizer(model).save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("place", ["the model's folder", "beside the record"])
def test_texts_of_tokens_are_shown_where_a_tokenizer_is(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run, model = tmp_path / "run", tmp_path / "model"
    run.mkdir(), model.mkdir()
    save_words(model if place == "the model's folder" else run, {1003: " Paris", 2002: "\n\x1b"})
    in_a_folder(run, small())
    (run / "manifest.json").write_text(json.dumps({"config": {"model": str(model)}}))
    assert main(["explain", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["input_ids"][:3] == [1003, 2002, 3005]
    assert told["input_texts"][:3] == [" Paris", "\n\x1b", ""]
    assert main(["explain", str(run), "--step", "7", "--html", str(tmp_path / "page.html")]) == 0
    assert main(["explain", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "input_ids input_texts" in shown and r"1003    ' Paris'" in shown
    assert r"'\n\x1b'" in shown
    page = (tmp_path / "page.html").read_text()
    assert "&#39; Paris&#39;" in page


def test_tokens_that_the_host_did_not_know_have_no_words(tmp_path):
    """A record has rows of the last step's samples in their place, which may be a word's number."""
    save_words(tmp_path, {1003: " Paris", 2002: " Rome"})
    record = recorded(small())
    on_device = np.arange(len(record.prepared["input_ids"])) == 1
    record = replace(record, prepared=record.prepared | {"is_on_device": on_device})
    assert input_texts(tmp_path / "step-000000.npz", record)[:2] == [" Paris", None]


@pytest.mark.parametrize(
    "manifest", ["{}", "not JSON", '{"config": {"model": "Qwen/Qwen3"}}', None]
)
def test_without_a_tokenizer_explain_says_nothing_of_texts(manifest, tmp_path, capsys):
    in_a_folder(tmp_path, small())
    if manifest is None:
        (tmp_path / "tokenizer.json").write_text("{}")
    else:
        (tmp_path / "manifest.json").write_text(manifest)
    assert main(["explain", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "slot_mapping" in told.out and "input_texts" not in told.out and not told.err
