"""The reference has every option, metric, refusal and format, and what it names exists."""

import argparse
import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import ascend_emulator
import vllm_npu_prep
from ascend_emulator.run import parser as emulator_parser
from tests.docs.pages import PAGES, ROOT, Page, code_of
from tests.docs.refusal_tables import render
from tests.docs.refusals import messages
from vllm_npu_prep import cli
from vllm_npu_prep.config import FUSED_OPERATORS, FusedConfig, PrepConfig, RecordConfig
from vllm_npu_prep.observe.metrics import COUNTERS, PREFIX, PREPARE_TIME
from vllm_npu_prep.records.scenario import Scenario, ScenarioGroup, ScenarioRequest

PACKAGE = ROOT / "vllm_npu_prep"
ENDING_ERRORS = {"StepCheckError", "GraphSafetyError", "EngineStoppedError"}
"""Errors that end an engine, and are no refusals."""
OPTIONS, ERRORS = PAGES["docs/reference/options.md"], PAGES["docs/reference/errors.md"]


def row_of(page: str, name: str) -> list[str]:
    """The one row of a page's tables whose first cell names `name`."""
    (row,) = [row for row in PAGES[page].rows if name in code_of(row[0])]
    return row


def options() -> list[tuple[str, FieldInfo]]:
    models = (PrepConfig, RecordConfig, FusedConfig)
    return [(name, field) for model in models for name, field in model.model_fields.items()]


@pytest.mark.parametrize(("name", "field"), options(), ids=[name for name, _ in options()])
def test_options_have_their_values_and_default(name, field):
    _, values, default, what = row_of(OPTIONS.name, name)
    if get_origin(field.annotation) is Literal:
        assert code_of(values) == list(get_args(field.annotation))
    for bound in field.metadata:  # of numbers; of strings, that they are not empty
        for limit in ("ge", "le"):
            assert not hasattr(bound, limit) or str(getattr(bound, limit)) in values
    shown = str(field.default)
    if field.default is PydanticUndefined:
        shown = "required"
    elif isinstance(field.default, FusedConfig):
        shown = "all on"
    elif field.default is None or isinstance(field.default, bool):
        shown = shown.lower()
    assert default.strip("`") == shown
    assert what


def test_no_option_is_documented_that_is_gone():
    tables = [table for table in OPTIONS.tables if table.rows[0][0] == "key"]
    named = [name for table in tables for row in table.rows[1:] for name in code_of(row[0])]
    assert sorted(named) == sorted(name for name, _ in options())


def test_variables_and_fused_operators_are_documented():
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "scripts").glob("*.*")]
    text = "\n".join(path.read_text() for path in files)
    read = set(re.findall(r"\bNPU_PREP_[A-Z_]+\b", text)) - {"NPU_PREP_NO_SUCH_DEVICES"}
    for name in (*read, *FUSED_OPERATORS):
        assert row_of(OPTIONS.name, name)[-1]


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Parsers by subcommand; that of ``emulate`` is another command's."""
    found = {"": cli._parser()}
    for action in found[""]._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    assert "emulate" in found
    return found | {"emulate": emulator_parser()}


@pytest.mark.parametrize("command", parsers())
def test_every_option_of_the_command_is_documented(command):
    page = "docs/changing/emulator.md" if command == "emulate" else "docs/reference/command.md"
    headings = [token.content for token in PAGES["docs/reference/command.md"].tokens if token.map]
    assert not command or any(heading.startswith(f"`{command}") for heading in headings)
    for action in parsers()[command]._actions:
        for option in action.option_strings:
            if option.startswith("--") and (option != "--help" or not command):
                described = [row for row in PAGES[page].rows if _names(row[0], option)]
                assert described, f"{command} {option}"


def _names(cell: str, option: str) -> bool:
    return any(code.split()[0] == option for code in code_of(cell))


def test_every_metric_is_documented_and_no_other():
    page = PAGES["docs/reference/options.md"]
    documented = {code for row in page.rows for code in code_of(row[0]) if code.startswith("vllm:")}
    counters = {f"{PREFIX}{name}_total" for name in COUNTERS}
    assert documented == counters | {PREFIX + PREPARE_TIME}


def test_every_refusal_is_documented():
    said = messages().items()
    assert [place for place, text in said if not any(map(text.fullmatch, ERRORS.code))] == []


def test_no_error_is_documented_that_is_gone():
    known = messages().values()
    documented = {code for row in ERRORS.rows for code in code_of(row[0])}
    assert documented >= ENDING_ERRORS
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert [name for name in ENDING_ERRORS if f"class {name}(" not in code] == []
    refusals = documented - ENDING_ERRORS
    assert [code for code in refusals if not any(text.fullmatch(code) for text in known)] == []


def test_no_two_rows_document_one_message():
    """Each row has a message of its own; messages that fit the fewest rows choose first."""
    left = [code for row in ERRORS.rows for code in code_of(row[0]) if code not in ENDING_ERRORS]
    fitting = [[code for code in left if text.fullmatch(code)] for text in messages().values()]
    for codes in sorted(fitting, key=len):
        if own := next((code for code in codes if code in left), None):
            left.remove(own)
    assert left == []


def test_tables_of_refusals_are_up_to_date():
    command = "python -m tests.docs.refusal_tables docs/reference/errors.md"
    assert ERRORS.text == render(ERRORS.text), f"run {command}"


@pytest.mark.parametrize("model", [Scenario, ScenarioRequest, ScenarioGroup])
def test_every_key_of_a_scenario_is_documented(model: type[BaseModel]):
    described = set(PAGES["docs/reference/files.md"].code)
    assert set(model.model_fields) <= described


def test_changes_and_citation_have_the_version():
    (newest, *_) = re.findall(r"^## (\S+)", PAGES["CHANGELOG.md"].text, re.MULTILINE)
    assert newest == vllm_npu_prep.__version__ == ascend_emulator.__version__
    assert f"version: {newest}\n" in (ROOT / "CITATION.cff").read_text()


PATH = re.compile(r"(?:[\w.-]+/)*[\w.-]+\.(?:py|md|json|txt|sh|yaml|yml|cpp|html)|(?:[\w-]+/)+")
INSTALLED = Path(importlib.util.find_spec("vllm").origin).parents[1]
BASES = (
    ROOT,
    ROOT / "tests",
    PACKAGE,
    ROOT / "docs",
    ROOT / "emulator",
    ROOT / "emulator/ascend_emulator",
    ROOT / "examples/deploy",
    INSTALLED,
)
"""Where a path on a page may begin."""
WRITTEN = re.compile(
    r"(?:try|ddp)\.py|(?:step|run)\.html|"
    r"(?:report|manifest|config|tokenizer|quant_model_description)\.json|"
    r"(?:steps|site)/"
)
"""Files that the pages tell of, and that are made."""


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_names_exists(name):
    """Files, folders and tests in code spans; tests by their function."""
    for code in PAGES[name].code:
        path, _, function = code.partition("::")
        if PATH.fullmatch(path) and not WRITTEN.fullmatch(path):
            found = [base / path for base in BASES if (base / path).exists()]
            assert found, f"{name}: {code}"
            if function:
                assert function.partition("[")[0] in functions(found[0]), f"{name}: {code}"


@cache
def functions(path: Path) -> set[str]:
    """Of a module, by name."""
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_what_is_supported_names_a_test_or_says_that_none_ran():
    columns = ["CPU fallback", "emulated NPU"]
    tables = PAGES["docs/reference/features.md"].tables
    tables = [table for table in tables if table.rows[0][-2:] == columns]
    assert len(tables) == 3, "devices, models, features"
    for row in [row for table in tables for row in table.rows[1:]]:
        for cell in row[-2:]:
            proof = any(PATH.fullmatch(code.partition("::")[0]) for code in code_of(cell))
            assert proof or re.search(r"not run|refused|^-$", cell), f"{row[0]}: {cell}"


# ------------------------------------------------------------ tests/README.md

TESTS = Page(ROOT / "tests" / "README.md")


def test_the_paths_that_the_page_of_tests_names_exist():
    """Of the repository, of the package, or of the row's folder of tests."""
    spans = [span.partition("=")[0] for span in TESTS.code]
    named = {path for span in spans for path in re.findall(r"(?<![\w./])(?:[\w-]+/)+[\w.-]*", span)}
    bases = [ROOT, PACKAGE, *filter(Path.is_dir, TESTS.path.parent.iterdir())]
    assert [path for path in named if not any((base / path).exists() for base in bases)] == []


def test_the_make_targets_that_the_page_of_tests_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    text = " ".join([*TESTS.code, *(block.text for block in TESTS.blocks)])
    for target in set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", text)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_page_of_tests_says_what_each_folder_is():
    (folders,) = [table for table in TESTS.tables if table.heading == "Folders"]
    named = {name for row in folders.rows for name in re.findall(r"`(tests/\w+)`", row[0])}
    there = {f"tests/{path.parent.name}" for path in ROOT.glob("tests/*/*") if path.is_file()}
    assert {name for name in there if "__pycache__" not in name} == named
