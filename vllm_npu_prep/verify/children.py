"""Starts the processes that run rows, and goes on after one that dies or hangs."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.verify.outcome import Result, RunResults, Verdict

CHILD = (sys.executable, "-P", "-m", "vllm_npu_prep.verify.child")
"""How a process for rows is started. With -P, files in the current folder are not modules."""

RECORDER = ("-m", "vllm_npu_prep.verify.calls.call_recorder")
"""The module that records an engine's calls, in a process of its own."""

OUR_ERROR = "vllm_npu_prep: error: "
"""Before what the plugin refuses, in what an engine prints."""

START_SECONDS = 300.0
"""Time limit for imports and for the device, before the first row."""

END_SECONDS = 10.0
"""How long a process may take to end by itself, and perhaps to write a core file."""

LAST_LINES = 4
"""How many lines of standard error a dead row is reported with."""


def record_calls(settings: dict[str, Any], target: Path, folder: Path) -> None:
    """Record the calls of an engine into a file, in a process of its own.

    Raises
    ------
    PrepError
        If the engine can't be started here, with the last lines of what it said.
    """
    with tempfile.TemporaryFile(dir=folder) as output:
        code = subprocess.run(
            [sys.executable, "-P", *RECORDER, json.dumps(settings), str(target)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "NPU_PREP_DEVICE": "npu"},
            check=False,
        ).returncode
        if code or not target.is_file():
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
            ours = [line.partition(OUR_ERROR)[2] for line in lines if OUR_ERROR in line]
            last = (ours or [line for line in lines if line.strip()] or ["no output"])[-1]
            raise PrepError(f"verify-device: the engine to record ended with code {code}: {last}")


class Child:
    """One process that runs rows alone, or one rank of a team."""

    def __init__(self, command: Sequence[str], folder: Path, arguments: Sequence[str]) -> None:
        self._stderr = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (read when it has ended)
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.process = subprocess.Popen(
            [*command, "--folder", str(folder), *arguments],
            stdin=subprocess.PIPE,  # it ends with this process: `child` waits for the end of it
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            # Without ASCEND_HOME_PATH, torch_npu looks through all files below the current folder
            cwd=folder,
            # Huge pages make tensors of hundreds of megabytes on the host in a fraction of the time
            env={"THP_MEM_ALLOC_ENABLE": "1", **os.environ, "NPU_PREP_DEVICE": "npu"},
            start_new_session=True,  # engines have processes of their own
        )
        threading.Thread(target=self._read, daemon=True, name="npu_prep rows").start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def next(self, seconds: float) -> dict[str, Any] | None:
        """Return the next line; None if the process has ended.

        Raises
        ------
        TimeoutError
            If no line came in time.
        """
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None

    def end(self) -> int:
        """End the process and all that it started, and return its exit code.

        It has closed its output or is not wanted any more, so it is about to end, or hangs.
        """
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self.kill()
        return self.process.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " / ".join(lines[-LAST_LINES:]) or "no output"


class Runner:
    """Runs rows in processes.

    Each result is handed to `log` as soon as it is there, and `begun` is called before the first.
    Tests give another command; `row_seconds` is the time limit of every row, in place of its own.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str] = CHILD,
        log: Callable[[Result], object] = lambda result: None,
        row_seconds: float | None = None,
        begun: Callable[[RunResults], object] = lambda found: None,
    ) -> None:
        self.folder, self.command, self.log = folder, command, log
        self.row_seconds, self.begun = row_seconds, begun
        self.found = RunResults()
        self._rows: dict[str, dict[str, Any]] = {}

    def run(self, selection: Sequence[str]) -> RunResults:
        """Run the rows that options of the child select, each once, whatever happens.

        Raises
        ------
        PrepError
            If there is no NPU, or no row of a name that was asked for.
        """
        child = Child(self.command, self.folder, selection)
        hello = self._hello(child)
        self._rows = {row["name"]: row for row in hello["rows"]}
        self.found.device, self.found.versions = hello["device"], hello["versions"]
        self.found.engine = hello.get("engine", {})
        self.found.keys = {name: row["key"] for name, row in self._rows.items() if "key" in row}
        try:
            self.begun(self.found)
        except PrepError:
            child.kill()
            raise
        alone = [name for name, row in self._rows.items() if row["ranks"] == 1]
        results = self._drain(child, alone)
        for ranks in sorted({row["ranks"] for row in self._rows.values()} - {1}):
            team = [name for name, row in self._rows.items() if row["ranks"] == ranks]
            results |= self._teams(team, ranks, hello["visible"])
        self.found.results = [results[name] for name in self._rows]
        return self.found

    def _hello(self, child: Child) -> dict[str, Any]:
        try:
            hello = child.next(START_SECONDS)
        except TimeoutError:
            child.kill()
            raise PrepError(
                f"verify-device: the device gave no answer in {START_SECONDS:.0f} seconds: look at "
                "npu-smi info and at dmesg"
            ) from None
        if hello is None:
            code = child.end()
            raise PrepError(
                f"verify-device: the first process ended with code {code} before a row ran: "
                f"{child.last_words()}; vllm-npu-prep doctor looks for the reason"
            )
        if "missing" in hello:
            child.end()
            if hello.get("no_row"):
                raise PrepError(
                    f"--only {hello['no_row']}: no row's name begins so{hello['hint']}; rows begin "
                    f"with {hello['groups']}"
                )
            raise PrepError(
                f"verify-device: no NPU: {hello['missing']}; vllm-npu-prep doctor says what is "
                "missing"
            )
        return hello

    def _drain(self, child: Child, names: list[str]) -> dict[str, Result]:
        results: dict[str, Result] = {}
        left = names
        while True:
            for result in self._watch(child):
                results[result.name] = result
                self.log(result)
            before, left = left, [name for name in names if name not in results]
            if not left:
                return results
            words = "" if len(left) < len(before) else f"no row was begun: {child.last_words()}"
            if not words:
                child = Child(self.command, self.folder, ["--rows", *left])
                words = _trouble(child)
            if words:
                for name in left:
                    results[name] = self._dead(name, words)
                    self.log(results[name])
                return results

    def _watch(self, child: Child) -> Iterator[Result]:
        """Yield the results of one process until it ends; a row that ends it is dead."""
        name, start = "", time.monotonic()
        form: dict[str, Any] = {}
        while True:
            limit = self._limit(name)
            try:
                line = child.next(limit)
            except TimeoutError:
                child.kill()
                if name:
                    yield self._dead(name, f"no end after {limit:g} seconds", start, **form)
                return
            if line is None:
                code = child.end()
                if name:
                    got = f"{_ended(code)}: {child.last_words()}"
                    yield self._dead(name, got, start, **form)
                return
            if "begin" in line:
                name, start, form = line["begin"], time.monotonic(), {}
            elif "form" in line:
                form = line["form"]
            elif "end" in line:
                what, seconds = self._rows[name]["what"], time.monotonic() - start
                result = Result(name, what, **line["outcome"], seconds=seconds, **form)
                if result.verdict is Verdict.FAILED:  # the reason is in what libraries have printed
                    result.got = f"{result.got} ({child.last_words()})"
                yield result
                name = ""

    def _limit(self, name: str) -> float:
        if not name:
            return START_SECONDS
        return self.row_seconds or self._rows[name]["seconds"]

    def _dead(self, name: str, got: str, start: float | None = None, **form: Any) -> Result:
        seconds = 0.0 if start is None else time.monotonic() - start
        what = self._rows[name]["what"]
        return Result(name, what, "", "an answer", got, Verdict.DEAD, seconds, **form)

    # ----------------------------------------------------------------- several ranks

    def _teams(self, names: list[str], ranks: int, visible: int) -> dict[str, Result]:
        results = {}
        for name in names:
            if visible < ranks:
                what = self._rows[name]["what"]
                got = f"needs {ranks} devices, {visible} visible"
                results[name] = Result(name, what, "", "", got, Verdict.LEFT_OUT, 0.0)
            else:
                results[name] = self._together(name, ranks)
            self.log(results[name])
        return results

    def _together(self, name: str, ranks: int) -> Result:
        """Run one row on all ranks; without a bad result, rank 0's counts.

        The first bad result ends the other ranks.
        """
        with (
            tempfile.TemporaryDirectory(dir=self.folder) as folder,
            ThreadPoolExecutor(ranks) as pool,
        ):
            team = [
                Child(
                    self.command,
                    Path(folder),
                    ["--rank", str(rank), "--ranks", str(ranks), "--rows", name],
                )
                for rank in range(ranks)
            ]
            watched = {
                pool.submit(lambda child: [*self._watch(child)], child): rank
                for rank, child in enumerate(team)
            }
            results: dict[int, Result] = {}
            for future in as_completed(watched):
                rank = watched[future]
                result = (future.result() or [self._dead(name, team[rank].last_words())])[0]
                if result.verdict.is_bad:
                    result.got = f"rank {rank}: {result.got}"
                    for child in team:
                        child.kill()
                    return result
                results[rank] = result
        return results[0]


def _trouble(child: Child) -> str:
    """Return why a process can't run rows; empty if it can."""
    try:
        told = child.next(START_SECONDS)
    except TimeoutError:
        child.kill()
        return "the device gives no answer any more"
    if told is None or "missing" in told:
        child.end()
        return f"the device is gone: {(told or {}).get('missing') or child.last_words()}"
    return ""


def _ended(code: int) -> str:
    if code < 0:
        return f"its process died of {signal.Signals(-code).name}"
    return f"its process ended with code {code}"
