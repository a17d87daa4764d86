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


@pytest.mark.parametrize("args", [("explain", PATH), ("--help",), ("doctor",)], ids=lambda a: a[0])
def test_output_that_can_not_be_written_is_one_line(args):
    with open("/dev/full", "w") as full:
        done = command(*args, stdout=full)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("doctor: ")]
    say = "vllm-npu-prep: error: standard output can't be written: No space left on device"
    assert lines == [say]


def test_output_that_nobody_reads_to_its_end_is_no_error():
    explain = f"{sys.executable} -m vllm_npu_prep.cli explain {PATH}"
    for rest, printed in ((">&-", b""), ("--json | head -c 1; echo ${PIPESTATUS[0]}", b"{0\n")):
        done = subprocess.run(["bash", "-c", f"{explain} {rest}"], capture_output=True)
        assert (done.stdout, done.stderr) == (printed, b""), rest


def test_without_a_command_five_lines_say_what_to_type(capsys):
    assert cli.main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 5
    commands = re.findall(r"vllm-npu-prep ([a-z-]+)(.*?)(?:;|$)", said, re.MULTILINE)
    asked = [cli._parser().parse_args([name, *rest.split()]).command for name, rest in commands]
    assert asked == ["doctor", "verify-device", "record", "explain", "replay"]


def parsers(parser: argparse.ArgumentParser, name: str = "") -> dict[str, argparse.ArgumentParser]:
    found = {name: parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own, each in action.choices.items():
                found |= parsers(each, f"{name} {own}".strip())
    return found


def test_every_option_of_the_command_has_a_description():
    without = []
    for name, parser in parsers(cli._parser()).items():
        assert parser.description, name
        for action in parser._actions:
            described = re.sub(r"\(default: .*?\)", "", action.help or "").strip()
            if isinstance(action, argparse._SubParsersAction):
                without += [each.dest for each in action._choices_actions if not each.help]
            elif len(described) <= 5:
                without.append(f"{name} {action.option_strings or action.dest}")
    assert without == []


def test_every_option_of_a_script_has_a_description():
    root, options = Path(__file__).parents[1], {}
    for folder in ("examples", "benchmarks", "scripts", "tests"):
        for path in (root / folder).rglob("*.py"):
            if ".add_argument(" not in (text := path.read_text()) or path.name[:5] == "test_":
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                    option = f"{path.relative_to(root)} {ast.unparse(node.args[0])}"
                    options[option] = any(k.arg == "help" for k in node.keywords)
    assert len(options) > 50
    assert [option for option, has_help in options.items() if not has_help] == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((0, "step"), "0 steps"),
        ((1, "step"), "1 step"),
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
    never_one = {
        "{MAX_LENGTHS} requests",
        "{num_ranks} ranks",  # said of several ranks only
        "{parallel_config.world_size} ranks",
        "{len(files)} records",
    }
    package = Path(__file__).parents[1] / "vllm_npu_prep"
    found = {
        f"{path.relative_to(package)}: {text}"
        for path in package.rglob("*.py")
        if "emulator" not in path.parts
        for text in set(slip.findall(path.read_text())) - never_one
    }
    assert found == set()
