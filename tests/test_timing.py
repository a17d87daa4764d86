"""`make timing`: what a run cost, file by file, in tests/README.md."""

import xml.etree.ElementTree as ElementTree

import pytest

from tests.timing import BEGIN, END, PAGE, caches, put, seconds_of, table

SUITE = ElementTree.fromstring("""\
<testsuite errors="0" failures="1" tests="5" time="90.0" timestamp="2026-11-22T14:31:00">
<properties><property name="processes" value="1"/><property name="processes" value="2"/>
<property name="commit" value="1f"/><property name="caches" value="warm"/></properties>
<testcase classname="tests.test_timing" name="test_a" time="1.5"/>
<testcase classname="tests.test_timing.Class" name="test_b[1.5-x.y]" time="0.5"/>
<testcase classname="tests.test_walls" name="test_c" time="6.0"/>
<testcase classname="tests.test_config" name="test_d" time="0.25"/>
<testcase classname="tests.test_config" name="test_d" time="0.25"><error>teardown</error></testcase>
<testcase classname="tests.test_compat" name="test_e" time="0.5"/>
</testsuite>""")


def test_the_table_has_shares_and_one_row_for_small_files():
    lines = table(SUITE).splitlines()
    assert lines[0] == (
        "`make test` on 2026-11-22, commit 1f: **1.5 minutes** in 2 processes, 5 tests, "
        "9 s of tests; caches: warm."
    )
    assert lines[-3:] == [
        "| `tests/test_walls.py` | 1 | 6.0 | 66.7% |",
        "| `tests/test_timing.py` | 2 | 2.0 | 22.2% |",
        "| 2 files of less than 1 s each | 2 | 1.0 | 11.1% |",
    ]
    assert seconds_of(SUITE)["tests/test_timing.py::Class::test_b[1.5-x.y]"] == 0.5


def test_only_what_stands_between_the_comments_is_replaced():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert put(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert put(put(page, "new"), "new") == put(page, "new")
    for wrong in (f"{END}\n{BEGIN}", BEGIN, END, page + page):
        with pytest.raises(ValueError, match="once, in this order"):
            put(wrong, "new")
    put(PAGE.read_text(), "new")


def test_caches_are_cold_until_a_run_has_filled_them(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.timing.ROOT", tmp_path)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    (tmp_path / ".cache" / "tiny-qwen3").mkdir(parents=True)
    assert caches() == "cold"
    (tmp_path / "vllm" / "modelinfos").mkdir(parents=True)
    (tmp_path / "vllm" / "modelinfos" / "bloom-BloomForCausalLM.json").touch()
    assert caches() == "warm"
