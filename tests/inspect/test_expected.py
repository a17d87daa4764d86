"""``explain`` compares a step with what its file expects."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers import worked_examples
from tests.helpers.scenarios import small
from vllm_npu_prep.cli import main


def with_expected(folder, **changes) -> Path:
    scenario, expected = worked_examples.load("chunked-prefill")
    file = folder / "scenario.json"
    file.write_text(json.dumps({"scenario": scenario, "expected": expected | changes}))
    return file


def test_a_step_that_is_as_its_file_expects_says_so(tmp_path, capsys):
    _, expected = worked_examples.load("chunked-prefill")
    assert main(["explain", str(with_expected(tmp_path))]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"expected: the step agrees in {len(expected)} variables"
    assert main(["explain", str(with_expected(tmp_path)), "--html", str(tmp_path / "a.html")]) == 0
    assert "agrees" in capsys.readouterr().out
    file = tmp_path / "bare.json"
    file.write_text(json.dumps(worked_examples.load("chunked-prefill")[0]))
    assert main(["explain", str(file)]) == 0
    assert "expected" not in capsys.readouterr().out


WRONG = [
    ({"num_reqs": 4}, "num_reqs", ["num_reqs", "4", "3"]),
    ({"seq_lens": [4, 3, 9]}, "seq_lens", ["seq_lens[2]", "9", "8"]),
    ({"seq_lens": [4, 3]}, "seq_lens", ["seq_lens", "2 elements", "3 elements"]),
    ({"attn_state": "DecodeOnly"}, "attn_state", ["attn_state", "DecodeOnly", "ChunkedPrefill"]),
    ({"attn_mask": None}, "attn_mask", ["attn_mask", "None", "2 keys"]),
    ({"no_such": 1}, "no_such", ["no_such", "1", "nothing"]),
    ({"max_seq_len": True}, "max_seq_len", ["max_seq_len", "True", "8"]),
]


@pytest.mark.parametrize(("changes", "name", "row"), WRONG, ids=[str(w[0]) for w in WRONG])
def test_a_step_that_is_not_as_its_file_expects_says_where(changes, name, row, tmp_path, capsys):
    file = str(with_expected(tmp_path, **changes))
    assert main(["explain", file]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("expected: ")]
    assert re.fullmatch(rf"expected: the step differs in 1 of \d+ variables: {name}", line)
    table = [re.split(r"\s{2,}", each.strip()) for each in lines[lines.index(line) :]]
    assert any(" ".join(each) == " ".join(row) for each in table), lines
    assert main(["explain", file, "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == worked_examples.load("chunked-prefill")[1], "the step, nothing else"
    assert f": {name}\n" in err and f"expected {row[1]}, prepared {row[2]}" in err


@pytest.mark.parametrize("expected", [3, [], {}, None, "x"])
def test_what_can_not_be_expected_gets_one_line(expected, tmp_path, capfd):
    file = tmp_path / "bad.json"
    file.write_text(json.dumps({"scenario": small(), "expected": expected}))
    assert main(["explain", str(file)]) == 2
    out, err = capfd.readouterr()
    assert not out and err.count("\n") == 1 and "expected: must be an object" in err
