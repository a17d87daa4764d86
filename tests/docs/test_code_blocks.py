"""Every code block of the READMEs and docs/ runs, unless a comment before it says why it can't.

Blocks of a page share a folder, in which the repository's folders lie, the demo model, and
``steps``, recorded by the server. One server runs behind ``localhost:8000``, with the flags of
``docs/start/serve.md``; other ``vllm serve`` start nothing. The flags of all of them, marked or
not, are read by vLLM's own parser.
"""

import doctest
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_emulator.run import parser as emulator_parser
from tests.docs.pages import PAGES, ROOT, CodeBlock
from tests.helpers.emulator import import_path
from tests.helpers.releases import serve_parser
from tests.server.process import Server
from vllm_npu_prep import cli
from vllm_npu_prep.config import parse_config
from vllm_npu_prep.records.scenario import parse_scenario

BLOCKS = [block for page in PAGES.values() for block in page.blocks]
RUNNABLE = [block for block in BLOCKS if block.language != "text" and block.not_run is None]
SHELL = [block for block in BLOCKS if block.language in ("bash", "console")]
ASKS_A_SERVER = re.compile(r"localhost:8000|\b(?:explain|replay) steps|Path\(\"steps\"\)")
WITH_SERVER = {block.page for block in RUNNABLE if ASKS_A_SERVER.search(block.text)}
EMULATED = {block.page for block in RUNNABLE if "ascend-emulator" in block.run_with + block.text}
SERVE_PAGE = ROOT / "docs" / "start" / "serve.md"

NO_COMMANDS = """
command_not_found_handle() { printf '%s\\0' "$@" >"$NOTES/$SRANDOM"; }
PATH=/nowhere
source() { :; }
"""
"""Before a script: its commands are noted in files instead of being run."""

SECONDS = 600
IS_SHOWN = doctest.OutputChecker().check_output  # in which ``...`` is anything
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def words_of_commands(block: CodeBlock, notes: Path) -> list[list[str]]:
    """Every command of a shell block, as bash would call it."""
    notes.mkdir(exist_ok=True)
    text = block.text
    if block.language == "console":
        text = "\n".join(command for command, _ in prompts(text))
    command, environment = ["bash", "-c", NO_COMMANDS + text], {"NOTES": str(notes)}
    done = subprocess.run(command, cwd=notes, env=environment, capture_output=True, text=True)
    assert "syntax error" not in done.stderr and "unexpected" not in done.stderr, done.stderr
    return [file.read_text().split("\0")[:-1] for file in notes.iterdir() if file.is_file()]


def prompts(text: str) -> list[tuple[str, str]]:
    """Commands behind ``$`` of a console block, each with what it should print."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


def read_flags(words: list[str]) -> None:
    """Let its own parser read a command's flags; it exits, or raises, where it knows one not."""
    match words:
        case ["vllm", "serve", *flags]:
            parsed = serve_parser().parse_args(flags)
            parse_config(parsed.additional_config)
        case ["ascend-emulator", *flags] | ["vllm-npu-prep", "emulate", *flags]:
            read_flags(emulator_parser().parse_args(flags).command_line[1:])
        case ["vllm-npu-prep", *flags]:
            cli._parser().parse_args(flags)
        case ["make", *targets]:
            targets = [target for target in targets if "=" not in target]
            known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(targets) <= set(known), f"make {shlex.join(targets)}"


class Bench:
    """A page's folder, in which its blocks run in order: a checkout, with the demo model."""

    def __init__(self, folder: Path, demo_model: Path, server: Server | None) -> None:
        for name in ("tests", "examples", "benchmarks", "scripts", "docs", "Makefile"):
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / ".cache").mkdir()
        (folder / ".cache" / demo_model.name).symlink_to(demo_model)
        if server is not None:
            (folder / "steps").symlink_to(server.log_path.with_name("steps"))
        (folder / "bin").mkdir()
        stand_in = folder / "bin" / "vllm"
        stand_in.write_text("#!/bin/sh\n")
        stand_in.chmod(0o755)
        self.folder, self.port = folder, server and server.port
        path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": import_path()}
        self.ran: set[CodeBlock] = set()

    def run_up_to(self, block: CodeBlock) -> None:
        """Run the block, and those of its page before it that did not run yet."""
        for each in RUNNABLE:
            if each.page == block.page and each.line <= block.line and each not in self.ran:
                self.ran.add(each)
                self.run(each)

    def run(self, block: CodeBlock) -> None:
        text = block.text.replace("localhost:8000", f"localhost:{self.port}")
        match block.language:
            case "bash":
                self.shell(text)
            case "console":
                for command, expected in prompts(text):
                    output = self.shell(command)
                    assert not expected or IS_SHOWN(expected, output, FLAGS), (
                        f"$ {command}\n{output}"
                    )
            case "python":
                self.call([*shlex.split(block.run_with), sys.executable, "-c", text])
            case "json":
                read_json(json.loads(text))
            case _:
                raise AssertionError(f"nothing here runs {block.language!r}")

    def shell(self, text: str) -> str:
        return self.call(["bash", "-euo", "pipefail", "-c", text])

    def call(self, command: list[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout[-4000:]}"
        return done.stdout


def read_json(data: dict) -> None:
    """A JSON block is one of the files and options that this project reads."""
    if "npu_prep" in data:
        parse_config(data)
    elif "requests" in data or "scenario" in data:
        parse_scenario(data)
    else:
        raise AssertionError(f"what reads {list(data)}?")


@pytest.fixture(scope="module")
def server(demo_model, tmp_path_factory):
    """The server that the documentation starts, with a record of its first steps."""
    folder = tmp_path_factory.mktemp("server")
    (block,) = (b for b in SHELL if b.page == SERVE_PAGE and "vllm serve" in b.text)
    ((_, _, model, *flags),) = words_of_commands(block, folder / "notes")
    record = {"npu_prep": {"record": {"dir": str(folder / "steps")}}}
    profiler = {"profiler": "torch", "torch_profiler_dir": str(folder / "profile")}
    server = Server(
        Path(model),
        folder / "log",
        *flags,
        "--enforce-eager",  # is ready sooner
        *("--additional-config", json.dumps(record), "--profiler-config", json.dumps(profiler)),
        VLLM_SERVER_DEV_MODE="1",
    )
    server.complete("What is a slot mapping?", max_tokens=8)
    assert server.request("POST", "/collective_rpc", {"method": "dump_steps"})[0] == 200
    yield server
    server.kill()


@pytest.fixture(scope="module")
def benches(request, demo_model, tmp_path_factory):
    """Makes a page's bench when it is first asked for."""
    made: dict[Path, Bench] = {}

    def bench_of(page: Path) -> Bench:
        if page not in made:
            server = request.getfixturevalue("server") if page in WITH_SERVER else None
            made[page] = Bench(tmp_path_factory.mktemp(page.stem), demo_model, server)
        return made[page]

    return bench_of


def blocks_of(pages: set[Path]) -> pytest.MarkDecorator:
    """Runs a test for each block of these pages."""
    blocks = [block for block in RUNNABLE if block.page in pages]
    return pytest.mark.parametrize("block", blocks, ids=lambda block: block.name)


@blocks_of({block.page for block in RUNNABLE} - WITH_SERVER - EMULATED)
def test_it_runs(block, benches):
    benches(block.page).run_up_to(block)


@blocks_of(WITH_SERVER)
def test_it_runs_beside_a_server(block, benches):
    benches(block.page).run_up_to(block)


@blocks_of(EMULATED)
def test_it_runs_on_an_emulated_card(block, benches):
    benches(block.page).run_up_to(block)


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.name)
def test_flags_are_known(block, tmp_path):
    for words in words_of_commands(block, tmp_path / "notes"):
        try:
            read_flags(words)
        except SystemExit:
            pytest.fail(f"refused: {shlex.join(words)}")


def test_every_block_names_its_language():
    known = {"bash", "console", "diff", "python", "json", "text"}
    assert not [f"{b.name}: {b.language!r}" for b in BLOCKS if b.language not in known]
    indented = [
        name for name, page in PAGES.items() if any(t.type == "code_block" for t in page.tokens)
    ]
    assert not indented, "write ``` and a language instead of indenting"


def test_markers_stand_before_blocks_and_say_why():
    for name, page in PAGES.items():
        marked = sum(bool(block.not_run or block.run_with) for block in page.blocks)
        assert page.markers == marked, name
