"""`make timing`: what a run cost, file by file, in tests/README.md."""

import pytest

from tests import timing

RUN = """\
<testsuites><testsuite errors="0" failures="0" time="90.0" timestamp="2026-11-22T14:31:00">
<testcase file="tests/a.py" name="test_a" time="1.5"/>
<testcase file="tests/a.py" name="test_b[1.5-x.y]" time="0.5"/>
<testcase file="tests/b.py" name="test_c" time="6.0"/>
<testcase file="tests/c.py" name="test_d" time="0.25"/>
<testcase file="tests/c.py" name="test_d" time="0.25"><error>teardown</error></testcase>
<testcase file="tests/d.py" name="test_e" time="0.5"/>
</testsuite></testsuites>"""
PAGE = "before\n<!-- timing: written by make timing -->\n{}\n<!-- timing: end -->\nafter\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "PAGE", tmp_path / "page.md")
    timing.PAGE.write_text(PAGE.format("old"))
    (tmp_path / "run.xml").write_text(RUN)
    return tmp_path / "run.xml"


def test_the_table_has_shares_and_one_row_for_small_files(run):
    for _ in range(2):  # what is written is found again
        timing.main(run)
    told, *_, b, a, small = timing.PAGE.read_text().splitlines()[2:-2]
    assert timing.PAGE.read_text().startswith("before\n") and "old" not in timing.PAGE.read_text()
    assert told.startswith("`make test` on 2026-11-22, commit ")
    assert told.endswith(": **1.5 minutes**, 5 tests, 9 s of tests.")
    assert b == "| `tests/b.py` | 1 | 6.0 | 66.7% |"
    assert a == "| `tests/a.py` | 2 | 2.0 | 22.2% |"
    assert small == "| 2 files of less than 1 s each | 2 | 1.0 | 11.1% |"


def test_a_run_that_failed_is_not_written(run):
    run.write_text(RUN.replace('failures="0"', 'failures="1"'))
    with pytest.raises(SystemExit, match="tests failed"):
        timing.main(run)
    assert timing.PAGE.read_text() == PAGE.format("old")


def test_the_page_has_one_place_for_the_table():
    assert len(timing.SECTION.findall(timing.PAGE.read_text())) == 1
