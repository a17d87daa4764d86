"""What `make test` leaves out, and lines of the list that nothing has any longer."""

import pytest

from tests import brief

IDS = ["tests/a/test_a.py::test_one[1]", "tests/a/test_a.py::test_two", "tests/b/test_b.py::test_c"]


def test_beginnings_of_ids_are_left_out(monkeypatch):
    monkeypatch.setattr(brief, "LEFT_OUT", ["tests/a/test_a.py::test_one[", "tests/b"])
    assert brief.left_out(IDS, ["tests"]) == {IDS[0], IDS[2]}


def test_a_stale_line_is_an_error_unless_tests_were_chosen(monkeypatch):
    monkeypatch.setattr(brief, "LEFT_OUT", ["tests/a/test_a.py::test_gone", "tests/c/test_c.py"])
    with pytest.raises(ValueError, match="test_gone"):
        brief.left_out(IDS, ["tests/a"])
    assert brief.left_out(IDS, ["tests/a/test_a.py::test_two"]) == set()
    assert brief.left_out(IDS[2:], ["tests/b"]) == set()
