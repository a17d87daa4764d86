"""What ``make test`` leaves to ``make test-all``."""

from tests import brief
from tests.matrix.collect import COLLECTED

IDS = ["tests/a/test_a.py::test_one[x]", "tests/a/test_a.py::test_two", "tests/b/test_b.py::test"]


def test_every_line_of_the_list_is_the_beginning_of_an_id(request):
    ids = [item.nodeid for item in request.config.stash[COLLECTED]]
    assert brief.stale(ids, request.config.args) == []


def test_beginnings_of_ids_are_left_out(monkeypatch):
    monkeypatch.setattr(brief, "LEFT_OUT", ["tests/a/test_a.py::test_one[", "tests/b"])
    assert brief.left_out(IDS) == {IDS[0], IDS[2]}


def test_a_line_that_no_id_begins_with_is_told(monkeypatch):
    lines = ["tests/a/test_a.py::test_gone", "tests/c/test_c.py"]
    monkeypatch.setattr(brief, "LEFT_OUT", lines)
    assert brief.stale(IDS, ["tests/a"]) == lines[:1]
    assert brief.stale(IDS, ["tests/a/test_a.py::test_two"]) == []
    assert brief.stale(IDS[2:], ["tests/b"]) == []
