"""Emulated cards: `pytest` on the host has the tests of `on_device` run by another one, on a card.

The one on the host collects them as any others, and reports them under their own ids. When the
first test of a card comes up, it starts a process there, `tests.npu.on_card`, and names test after
test to it. Files that share a card share the process: to start one takes longer than most of them.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.helpers.waiting import LIMIT

ROOT = Path(__file__).parents[2]
ON_A_CARD = "NPU_EMULATOR_DEVICES" in os.environ or os.environ.get("NPU_PREP_DEVICE") == "npu"
"""Whether this process is on one already: then its own pytest runs these tests."""
FOLDERS = {"on_device": "9.1", "on_8_5": "8.5", "on_docs": "docs"}
"""Folders of tests, and their card, which is named by its profile; the last two are links to the
first."""
UNDER_EVERY_PROFILE = (
    *("counts", "fused", "fused_families", "graphs", "kernels", "latent"),
    *("long_context", "lora", "multimodal", "pooling", "sampling", "speculation"),
    *("served", "shared_prefix", "sparse_operators", "tokens", "verify_device", "windows"),
)
OF_FILES = {
    "memory": "small",
    "prefill_decode": "skewed",
    "ranks": "skewed",
    "eplb": "skewed",
    "mc2": "skewed",
}
TOKENS = "::test_tokens_are_the_best_by_transformers["
OF_TESTS = {
    f"tests/npu/on_device/test_tokens.py{TOKENS}fia": "skewed",
    f"tests/npu/on_device/test_mc2.py{TOKENS}A3": "A3",
}
"""Cards of tests whose ids begin so: for streams of very different speed, as those of ranks need
them, and for another chip."""
SEVERAL = ("--devices", "4", "--delay", "skewed", "--hang-seconds", "300")
OPTIONS = {
    "9.1": ("--memory", "1G", "--delay", "none"),
    "skewed": SEVERAL,
    "A3": (*SEVERAL, "--soc", "Ascend910_9391"),
    "small": ("--memory", "170M", "--delay", "equal"),
    "8.5": ("--delay", "equal", "--profile", "8.5"),
    "docs": ("--delay", "equal", "--profile", "docs"),
}
"""Cards. Files are on that of their folder, or as `OF_FILES` and `OF_TESTS` say. Hazards are found
whatever the delay is. Where streams are skewed, each operator of the first one waits 2.4 ms."""
PHASE_LIMIT = 2 * LIMIT
"""Time limit of a phase of a test in seconds: what the test itself waits for is told before."""


def card_of(test: str) -> str:
    """Name of the card that a test needs, by its id; empty if it needs none."""
    parts = Path(test.partition("::")[0]).parts
    if parts[:2] != ("tests", "npu") or len(parts) < 4 or parts[2] not in FOLDERS:
        return ""
    name = Path(parts[3]).stem.removeprefix("test_")
    for beginning, card in OF_TESTS.items():
        if test.startswith(beginning):
            return card
    return OF_FILES.get(name, FOLDERS[parts[2]])


class Card:
    """A pytest on an emulated card, which has collected some tests and runs those it is told."""

    def __init__(self, name: str, tests: list[str]) -> None:
        self.output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.has_reported = False
        with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as self.tests:
            self.tests.write("\n".join(tests))
        ours, theirs = socket.socketpair()
        command = (sys.executable, "-m", "pytest", "-vv", "-p", "tests.npu.on_card")
        command = (*command, "-p", "no:cacheprovider", f"@{self.tests.name}")
        emulator = (sys.executable, "-m", "ascend_emulator", "--hazards", "error", *OPTIONS[name])
        self.process = subprocess.Popen(
            [*emulator, "--", *command],
            cwd=ROOT,
            env={**os.environ, "NPU_PREP_DEVICE": "npu"},
            stdin=theirs,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        self.connection = Connection(ours.detach())

    def run(self, test: str, following: str | None) -> Iterator[dict[str, Any]]:
        """Reports of a test's phases.

        Raises
        ------
        EOFError
            If the process ended, or did not answer in time.
        """
        try:
            self.connection.send((test, following))
            while self.connection.poll(PHASE_LIMIT):
                if (report := self.connection.recv()) is None:
                    return
                self.has_reported = True
                yield report
        except ConnectionError as error:
            raise EOFError from error
        raise EOFError(f"no answer in {PHASE_LIMIT} s")

    def close(self) -> str:
        """Let it end; what it said last, unless nothing but tests failed."""
        self.connection.close()
        try:
            code = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        os.unlink(self.tests.name)
        self.output.seek(0)
        return "" if code in (0, 1) else f"exit code {code}\n{self.output.read()[-6000:]}"
