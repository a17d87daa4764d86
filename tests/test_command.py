"""``vllm-npu-prep``: its output, its help and its words, whatever the subcommand."""

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import worked_examples
from tests.helpers.command import command
from vllm_npu_prep import cli
from vllm_npu_prep.wording import counted

PATH = worked_examples.path_of("chunked-prefill")


@pytest.mark.parametrize(
    "args",
    [("explain", PATH), ("explain", PATH, "--json"), ("--help",), ("--version",), ("doctor",)],
    ids=lambda args: " ".join(map(str, args)).replace(str(PATH), "FILE"),
)
def test_output_that_can_not_be_written_is_one_line(args):
    with open("/dev/full", "w") as full:
        done = command(*args, stdout=full)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("doctor: ")]
    say = "vllm-npu-prep: error: standard output can't be written: No space left on device"
    assert lines == [say]


def test_output_that_is_closed_and_a_reader_that_leaves_are_no_errors():
    done = subprocess.run(
        f"{sys.executable} -m vllm_npu_prep.cli explain {PATH} >&-", shell=True, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    done = subprocess.run(
        f"{sys.executable} -m vllm_npu_prep.cli explain {PATH} --json | head -c 1; "
        "echo ${PIPESTATUS[0]}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
    )
    assert (done.stdout, done.stderr) == (b"{0\n", b"")


def parsers(parser: argparse.ArgumentParser, name: str = "") -> dict[str, argparse.ArgumentParser]:
    found = {name: parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own, each in action.choices.items():
                found |= parsers(each, f"{name} {own}".strip())
    return found


@pytest.mark.parametrize("name", parsers(cli._parser()))
def test_every_option_of_the_command_has_a_description(name):
    parser = parsers(cli._parser())[name]
    assert parser.description
    for action in parser._actions:
        described = re.sub(r"\(default: .*?\)", "", action.help or "").strip()
        is_list = isinstance(action, argparse._SubParsersAction)
        assert is_list or len(described) > 5, f"{name} {action.option_strings or action.dest}"
        for choice in action._choices_actions if is_list else ():
            assert choice.help, choice.dest


SCRIPTS = [
    path
    for folder in ("examples", "benchmarks", "scripts", "tests")
    for path in sorted((Path(__file__).parents[1] / folder).rglob("*.py"))
    if ".add_argument(" in path.read_text() and path.name[:5] != "test_"
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_option_of_a_script_has_a_description(path):
    found = 0
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            found += 1
            name = ast.unparse(node.args[0])
            assert [k for k in node.keywords if k.arg == "help" and ast.unparse(k.value)], name
    assert found


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((0, "step"), "0 steps"),
        ((1, "step"), "1 step"),
        ((2, "step"), "2 steps"),
        ((1200, "query", "queries"), "1,200 queries"),
        ((1, "query", "queries"), "1 query"),
    ],
)
def test_one_thing_is_no_plural(args, words):
    assert counted(*args) == words


def test_no_message_of_the_package_counts_by_a_bare_plural():
    """`counted` knows that it is 1 step. Sizes that are never 1 may stand as they are."""
    nouns = "steps|requests|records|lists|ids|drafts|ranks|adapters|lines|functions|streams"
    slip = re.compile(rf"\{{[^{{}}]+\}} (?:{nouns})\b")
    package = Path(__file__).parents[1] / "vllm_npu_prep"
    found = [
        f"{path.relative_to(package)}: {match[0]}"
        for path in sorted(package.rglob("*.py"))
        if "emulator" not in path.parts
        for match in slip.finditer(path.read_text())
    ]
    assert [each for each in found if each.partition(": ")[2] not in NEVER_ONE] == []


NEVER_ONE = {
    "{MAX_LENGTHS} requests",
    "{num_ranks} ranks",  # said of several ranks only
    "{parallel_config.world_size} ranks",
    "{len(files)} records",
}
