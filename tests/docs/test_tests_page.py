"""tests/README.md: what it names exists, and it leaves no folder and no part of the package out."""

import re
from pathlib import Path

from tests.docs.pages import ROOT, Page

PAGE = Page(ROOT / "tests" / "README.md")
PACKAGE = ROOT / "vllm_npu_prep"


def paths(span: str) -> list[str]:
    """Paths in a code span: of the repository, or of the package."""
    return re.findall(r"(?<![\w./])(?:[\w-]+/)+[\w.-]*", span.partition("=")[0])


def test_the_paths_it_names_exist():
    named = {path for span in PAGE.code for path in paths(span)} - {".venv/bin/python"}
    bases = [ROOT, PACKAGE, *filter(Path.is_dir, PAGE.path.parent.iterdir())]  # of the row's folder
    assert [path for path in named if not any((base / path).exists() for base in bases)] == []


def test_the_make_targets_it_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    text = " ".join([*PAGE.code, *(block.text for block in PAGE.blocks)])
    for target in set(re.findall(r"\bmake ([a-z][a-z-]*)", text)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_it_says_what_each_folder_is():
    (folders,) = [table for table in PAGE.tables if table.heading == "Folders"]
    named = {name for row in folders.rows for name in re.findall(r"`(tests/\w+)`", row[0])}
    there = {f"tests/{path.parent.name}" for path in ROOT.glob("tests/*/*") if path.is_file()}
    assert {name for name in there if "__pycache__" not in name} == named
