"""Fill empty cells on purpose: few engines, each with many features, in workers that may die.

    python -m tests.matrix.engines [--minutes 30] [--retry] [--device emulated] [--runner V2]
                                   [MODEL ...]

Which cells are empty is read from the results and from what was collected since, so that a slice
goes on where the last one ended. An engine that agrees with transformers fills its cells. One that
doesn't is tried with half of its features, and so on; a feature that fails alone is kept with what
was said, and is tried again by another state of the package, or with --retry.
"""

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.emulator import import_path, why_no_emulator
from tests.matrix.cells import EMULATED, FALLBACK, FEATURES
from tests.matrix.collect import FILE, ROOT, commit
from tests.matrix.combined import ANSWER, name_of
from tests.matrix.plan import RANKS, engines_for
from tests.matrix.results import Matrix, Table, collected_in
from tests.matrix.sense import without_sense
from tests.matrix.subjects import POOLS, SUBJECTS, folder_of
from vllm_npu_prep.compat.releases import installed_vllm

SECONDS = 300
"""Time that an engine gets to start and to answer."""
LOG = FILE.with_suffix(".engines.log")
"""What workers printed, and what failed."""
CARDS = ("--hazards", "error", "--devices", "2", "--hang-seconds", "300", "--delay", "skewed")
OWN = "tests/matrix/combined.py"
"""Where engines that are started on purpose say they come from."""


class Worker:
    """A process that serves one engine after another; another takes its place after a failure.

    Parameters
    ----------
    device
        Of the table.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.process: subprocess.Popen | None = None
        self.failed_before = False
        self.lines: queue.Queue[str] = queue.Queue()

    def _start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "tests.matrix.combined"]
        environment = {**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
        environment |= {"NUMBA_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment["VLLM_LOGGING_LEVEL"] = "ERROR"
        environment["NPU_PREP_DEVICE"] = "npu" if self.device == EMULATED else "cpu"
        environment["TMPDIR"] = tempfile.mkdtemp(prefix="npu-prep-matrix-")
        self.folder = environment["TMPDIR"]
        if self.device == EMULATED:
            command = [sys.executable, "-m", "ascend_emulator", *CARDS, "--", *command]
        LOG.parent.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.lines = queue.Queue()
        threading.Thread(target=_read, args=(process, self.lines), daemon=True).start()
        return process

    def ask(self, model: str, runner: str, features: list[str]) -> dict[str, Any]:
        """Let it serve an engine: its cells, or an error."""
        if self.process is None:
            self.process = self._start()
        asked = {"model": model, "device": self.device, "runner": runner, "features": features}
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{json.dumps(asked)}\n")
            self.process.stdin.flush()
            told = self._answer()
        except BrokenPipeError:
            told = {"error": "its process died before it was asked", "died": True}
        # What an engine leaves behind that failed may fail the next one: of a feature alone only a
        # clean process is believed
        if "error" in told and not told.get("early"):
            again, self.failed_before = self.failed_before and len(features) < 2, True
            if again or "died" in told:
                self.end()
            if again:
                return self.ask(model, runner, features)
        return told

    def _answer(self) -> dict[str, Any]:
        end = time.time() + SECONDS
        while True:
            try:
                line = self.lines.get(timeout=max(end - time.time(), 0.1))
            except queue.Empty:
                return {"error": f"no answer in {SECONDS} seconds", "died": True}
            if line == "":
                assert self.process is not None
                return {
                    "error": f"its process ended with {self.process.wait()}",
                    "died": True,
                }
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))

    def end(self) -> None:
        """End it and the processes that it started."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, 15)
            self.process.wait(10)
        except ProcessLookupError:
            pass
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        self.process, self.failed_before = None, False
        shutil.rmtree(self.folder, ignore_errors=True)


def _read(process: subprocess.Popen, lines: "queue.Queue[str]") -> None:
    assert process.stdout is not None
    with LOG.open("a") as log:
        for line in process.stdout:
            log.write(line)
            log.flush()
            lines.put(line)
    lines.put("")


def halves(features: list[str], error: str) -> list[list[str]]:
    """Two parts of what failed together; those that the error speaks of are one of them."""
    words = {each.name: {each.name, each.short, each.name.replace("-", "")} for each in FEATURES}
    guilty = [
        each for each in features if any(word.lower() in error.lower() for word in words[each])
    ]
    if guilty and len(guilty) < len(features):
        return [guilty, [each for each in features if each not in guilty]]
    half = (len(features) + 1) // 2
    return [features[:half], features[half:]]


class Filler:
    """Tries what is empty, and writes what came of it to `FILE`.

    Parameters
    ----------
    matrix
        What is known.
    deadline
        `time.time()` after which no engine is started.
    file
        Where to.
    retry
        Whether features that failed alone are tried again.
    """

    def __init__(
        self, matrix: Matrix, deadline: float, file: Path = FILE, retry: bool = False
    ) -> None:
        self.matrix, self.deadline, self.file, self.retry = matrix, deadline, file, retry
        self.commit, self.package = commit()
        self.started = self.agreed = 0
        self.filled = {
            cell
            for cell, line in matrix.filled().items()
            if line["outcome"] == "passed"
            and (line["package"] == self.package or not line["test"].startswith(OWN))
        }

    def wanted(self, table: Table, model: str) -> list[str]:
        """Features of a model whose cells are empty, and that somebody would serve."""
        told = self.answers(table, model)
        return [
            feature.name
            for feature in FEATURES
            if (table, model, feature.name) not in self.filled
            and not told.get(feature.name)
            and not without_sense(model, feature.name)
            and not self._failed(table, model, feature.name)
            and not (feature.name in RANKS and SUBJECTS[model].has(POOLS))  # those only generate
        ]

    def _failed(self, table: Table, model: str, feature: str) -> bool:
        line = self.matrix.tried.get((table, model, feature))
        return line is not None and line["package"] == self.package and not self.retry

    def answers(self, table: Table, model: str) -> dict[str, dict[str, Any]]:
        """What start-up says; it is asked if nobody has."""
        from tests.matrix.asked import answers

        key = table, model
        if key not in self.matrix.answers:
            config = self.matrix.config_of(model, table[1])
            if config is None:
                config = json.loads((folder_of(model) / "config.json").read_text())
            names = [feature.name for feature in FEATURES]
            self.matrix.answers[key] = answers(config, names, table[1], table[2])
        return self.matrix.answers[key]

    def row(self, table: Table, model: str, ranks: bool, ask: Any) -> bool:
        """Fill a model's row; False if the time is up.

        Parameters
        ----------
        table, model
            Of the row.
        ranks
            Whether to try engines of several ranks, or the others.
        ask
            As `Worker.ask`.
        """
        pending = [
            each
            for each in engines_for(self.wanted(table, model))
            if bool(set(each) & RANKS) == ranks
        ]
        looked_at_plain = ranks
        while pending:
            if time.time() > self.deadline:
                return False
            features, *pending = pending
            told = self._ask(table, model, features, ask)
            if "error" not in told:
                lacking = told["lacking"]
                if len(features) == 1:
                    self._fail(table, model, lacking, "vLLM starts the engine without it")
                else:
                    pending += [[feature] for feature in lacking]
                continue
            if not looked_at_plain:
                looked_at_plain = True
                plain = self._ask(table, model, [], ask)
                if "error" in plain:
                    every = {f: None for each in ([features, *pending]) for f in each}
                    self._fail(table, model, every, f"without it, too: {plain['error']}")
                    return True
            if len(features) == 1:
                self._fail(table, model, features, told["error"])
            else:
                pending = [*halves(features, told["error"]), *pending]
        return True

    def _ask(self, table: Table, model: str, features: list[str], ask: Any) -> dict[str, Any]:
        start = time.time()
        told = ask(model, table[2], features)
        self.started += 1
        said = "FAILED" if "error" in told else "agreed"
        print(
            f"{time.strftime('%H:%M:%S')} {said} {time.time() - start:.1f} s: {model}, "
            f"{table[1]}, {table[2]}: {', '.join(features) or 'plain'}"
            + (f": {told['error']}" if "error" in told else ""),
            flush=True,
        )
        if "error" not in told:
            self.agreed += 1
            of = {"test": name_of(model, *table[1:], features), "outcome": "passed"}
            of |= {"commit": self.commit, "package": self.package}
            self._write([of | cell for cell in told["cells"]])
            has = {feature for cell in told["cells"] for feature in cell["features"]}
            self.filled |= {(table, model, feature) for feature in has}
            told["lacking"] = [feature for feature in features if feature not in has]
        return told

    def _fail(self, table: Table, model: str, features: Iterable[str], error: str) -> None:
        lines = []
        for feature in features:
            line = {"tried": error, "model": model, "feature": feature}
            line |= dict(zip(("release", "device", "runner"), table))
            lines.append(line | {"commit": self.commit, "package": self.package})
            self.matrix.tried[table, model, feature] = lines[-1]
        self._write(lines)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("ab") as file:
            os.write(file.fileno(), "".join(f"{json.dumps(line)}\n" for line in lines).encode())


DEVICES = {"fallback": FALLBACK, "emulated": EMULATED}


def fill(
    minutes: float,
    devices: Sequence[str] = tuple(DEVICES),
    runners: Sequence[str] = ("V1", "V2"),
    models: Sequence[str] = tuple(SUBJECTS),
    retry: bool = False,
) -> Filler:
    """Fill rows until the time is up: engines of one rank everywhere, then the others."""
    if (why := why_no_emulator()) and "emulated" in devices:
        print(f"no engines on the emulated card: {why}", file=sys.stderr)
        devices = [each for each in devices if each != "emulated"]
    matrix = Matrix.read()
    matrix.merge(collected_in(FILE), commit()[1])
    filler = Filler(matrix, time.time() + 60 * minutes, retry=retry)
    for ranks in (False, True):
        for device in map(DEVICES.__getitem__, devices):
            worker = Worker(device)
            try:
                for runner in runners:
                    for model in models:
                        table = (installed_vllm(), device, runner)
                        if not filler.row(table, model, ranks, worker.ask):
                            return filler
            finally:
                worker.end()
    return filler


def main(words: list[str]) -> int:
    """Run a slice; exit code 2 if files differ from the commit."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix.engines", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=30, help="no engine starts after these")
    parser.add_argument("--retry", action="store_true", help="what failed alone, too")
    parser.add_argument("--device", choices=DEVICES, help="fill cells of this one alone")
    parser.add_argument("--runner", choices=("V1", "V2"), help="fill cells of this one alone")
    parser.add_argument("models", nargs="*", default=[], metavar="MODEL", help="their cells alone")
    args = parser.parse_args(words)
    if not all(commit()):
        print("make matrix: commit what you changed first: a cell names a commit", file=sys.stderr)
        return 2
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    devices = [args.device] if args.device else list(DEVICES)
    runners = [args.runner] if args.runner else ["V1", "V2"]
    filler = fill(args.minutes, devices, runners, args.models or list(SUBJECTS), args.retry)
    print(f"{filler.agreed:,} of {filler.started:,} engines agreed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
