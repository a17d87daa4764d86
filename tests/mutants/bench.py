"""Where planted bugs are tried: a copy of the packages, one file of which is changed at a time.

Nearly all of a short run of tests is imports: torch, transformers and vLLM take 20 seconds, more on
a busy machine. So two processes import them once, and fork a child for each run
(`tests.mutants.forks`). One of them has also what needs vLLM's platform; some files of the package
are imported with it, and bugs in these are tried in the other.

Nothing of one bug reaches the next:

- the changed file is put back, and no bytecode of it is kept;
- compiled code is kept between bugs only where it can't differ: a bug in a file that compiled code
  imports gets a copy of the cache, without whatever was compiled from that file;
- each run has copies of the demo models.

A bug counts as caught if the test that failed passes without it.
"""

import ast
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tests.mutants.planted import Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("vllm_npu_prep", "emulator", "tests", "examples", "benchmarks", "docs", "scripts")
FILES = ("pyproject.toml", "README.md", "Makefile", "setup.py", "mkdocs.yml", "constraints.txt")
PACKAGE = "vllm_npu_prep"
LIMIT = 3600
"""Seconds that the tests of a bug may take, on a machine that others use, too."""
FIRST = "first failure: "
"""Begins the line in which `tests.mutants.order` names the test that failed."""


class BenchError(Exception):
    """Processes that can't run tests."""


@dataclass(frozen=True)
class Verdict:
    """What came of a planted bug, and the first test that failed or what went wrong.

    It is ``caught``, ``missed``, ``stale`` if the line to change isn't there exactly once, or
    ``broken`` if pytest could not run, or the test that failed also fails without the bug.
    """

    outcome: str
    by: str = ""


def verdict_of(returncode: int | None, output: str, limit: float = LIMIT) -> Verdict:
    """What pytest said of a planted bug; its code is None if it did not end."""
    if returncode is None:
        return Verdict("caught", f"no end within {limit / 60:.0f} min")
    if returncode == 0:
        return Verdict("missed")
    if returncode in (-signal.SIGALRM, -signal.SIGPROF):
        return Verdict("caught", "a test did not end")
    failures = re.findall(rf"^{FIRST}(.+)", output, re.MULTILINE)
    if not failures:
        return Verdict("broken", output[-500:].strip())
    return Verdict("caught", failures[-1].removeprefix("tests/"))


@functools.cache
def imports(path: str) -> frozenset[str]:
    """Files of the package that a file of it imports, itself or through others, and itself."""
    found, todo = set(), [path]
    while todo:
        each = todo.pop()
        if each not in found:
            found.add(each)
            todo += _imported(each)
    return frozenset(found)


@functools.cache
def _imported(path: str) -> list[str]:
    names = set()
    for node in ast.walk(ast.parse((ROOT / PACKAGE / path).read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = [name.removeprefix(f"{PACKAGE}.").replace(".", "/") for name in names]
    candidates = [f"{file}{end}" for file in files for end in (".py", "/__init__.py")]
    return [each for each in candidates if (ROOT / PACKAGE / each).is_file()]


@functools.cache
def compiled_files() -> tuple[str, ...]:
    """Files of the package with compiled code."""
    found = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        if re.search(r"^@(compiled|inlined|njit|intrinsic)\b", path.read_text(), re.MULTILINE):
            found.append(str(path.relative_to(ROOT / PACKAGE)))
    return tuple(found)


def compiled_from(path: str) -> list[str]:
    """Files whose compiled code may differ when the file at `path` does."""
    return [each for each in compiled_files() if path in imports(each)]


class Forks:
    """One process that forks children, see `tests.mutants.forks`."""

    def __init__(self, kind: str, tree: Path, environment: dict[str, str]) -> None:
        self.log = tree.parent / f"{kind}.txt"
        with self.log.open("w") as log:
            self.process = self._start(kind, tree, environment, log)
        started = self._answer()
        if started["threads"] != 1:
            self.close()
            raise BenchError(f"{started['threads']} threads run after imports: none can be forked")
        package = tree / PACKAGE
        self.files = {str(Path(file).relative_to(package)) for file in started["files"]}

    def _start(
        self, kind: str, tree: Path, environment: dict[str, str], log: TextIO
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.forks", kind],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C is for the process that starts it
        )

    def run(self, words: Sequence[str], output: Path, limit: float, **variables: str) -> int | None:
        """Exit code of pytest, None if it took longer than `limit` seconds."""
        order = {"words": list(words), "output": str(output), "limit": limit}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order | {"environment": variables}) + "\n")
        self.process.stdin.flush()
        return self._answer()["code"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            said = self.log.read_text(errors="replace")[-500:].strip()
            raise BenchError(f"the process that forks children has ended with code {code}: {said}")
        return json.loads(line)

    def close(self) -> None:
        """End it, and the child that runs, with all that its tests have started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        running = children.read_text().split() if children.exists() else []
        self.process.kill()
        self.process.communicate()
        for pid in map(int, running):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


class Bench(AbstractContextManager):
    """A copy of the packages in which bugs are planted one at a time."""

    def __init__(self, folder: Path | None = None, kinds: Sequence[str] = ("warm", "bare")) -> None:
        self.kinds, self._stack = kinds, ExitStack()
        self.folder = folder or self._own_folder()
        self.tree = self.folder / "tree"
        left = self.folder.glob("run-*")  # by a bench that was killed
        for each in (self.tree, *left):
            shutil.rmtree(each, ignore_errors=True)
        self.tree.mkdir()
        ignored = shutil.ignore_patterns("__pycache__")
        for name in COPIED:
            shutil.copytree(ROOT / name, self.tree / name, ignore=ignored)
        for name in FILES:
            shutil.copy2(ROOT / name, self.tree / name)
        self.numba = self._compiled_code()
        self.passed: dict[str, bool] = {}
        self._forks: dict[str, Forks] = {}

    def _own_folder(self) -> Path:
        """The tree's folder, or another one while a bench is in it."""
        name = hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]
        folder = Path(tempfile.gettempdir()) / f"npu-prep-mutants-{os.getuid()}-{name}"
        folder.mkdir(exist_ok=True)
        lock = self._stack.enter_context((folder / "lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = tempfile.TemporaryDirectory(prefix="npu-prep-mutants-")
            return Path(self._stack.enter_context(other))
        return folder

    def _compiled_code(self) -> Path:
        """The folder of compiled code, which is that of these sources."""
        digest = hashlib.sha256()
        for path in sorted({each for file in compiled_files() for each in imports(file)}):
            digest.update((self.tree / PACKAGE / path).read_bytes())
        kept = self.folder / f"numba-{digest.hexdigest()[:12]}"
        for other in self.folder.glob("numba-*"):
            if other != kept:
                shutil.rmtree(other)
        kept.mkdir(exist_ok=True)
        return kept

    def __exit__(self, *_: object) -> None:
        for forks in self._forks.values():
            forks.close()
        self._stack.close()

    def try_out(
        self,
        mutant: Mutant,
        limit: float = LIMIT,
        **variables: str,
    ) -> Verdict:
        """Plant a bug and run its tests until one fails; run that one without the bug, too."""
        forks = self._forks_for(mutant.path)  # before its imports could meet the bug
        with self._planted(mutant) as there:
            if not there:
                return Verdict("stale", f"{mutant.before!r} is not once in {mutant.path}")
            deadline = time.monotonic() + limit
            for test in mutant.tests:  # one by one: what is not needed is not even collected
                seconds = max(deadline - time.monotonic(), 0)
                verdict = self._run(forks, test, seconds, mutant.path, variables)
                if verdict.outcome != "missed":
                    break
        test = f"tests/{verdict.by}"
        named = (self.tree / test.partition("::")[0]).exists()
        if verdict.outcome == "caught" and named and not self._passes(test, limit, variables):
            return Verdict("broken", f"{test} fails without the bug, too")
        return verdict

    @contextmanager
    def _planted(self, mutant: Mutant) -> Iterator[bool]:
        """Change a line while the block runs; False, and no change, if it isn't there once."""
        path = self.tree / PACKAGE / mutant.path
        text = path.read_text() if path.exists() else ""
        if text.count(mutant.before) != 1:
            yield False
            return
        bytecode = list((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))
        whole = path.with_name(f"{path.name}.whole")
        path.rename(whole)
        for each in bytecode:
            each.unlink()
        try:
            path.write_text(text.replace(mutant.before, mutant.after))
            yield True
        finally:
            whole.replace(path)  # with its old time: compiled code is still that of this file
            for each in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
                each.unlink()

    def _passes(self, test: str, limit: float, variables: dict[str, str]) -> bool:
        """Whether a test passes without a bug."""
        if test not in self.passed:
            verdict = self._run(self._forks_for(""), test, limit, "", variables)
            self.passed[test] = verdict.outcome == "missed"
        return self.passed[test]

    def _run(
        self, forks: Forks, test: str, limit: float, changed: str, variables: dict[str, str]
    ) -> Verdict:
        """Run a test, a file or a folder in the tree as it is; `changed` is the file with a bug."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="run-") as made:
            run = Path(made)
            shutil.rmtree(self.tree / ".cache", ignore_errors=True)
            demos = (ROOT / ".cache").glob("tiny-*")
            (self.tree / ".cache").mkdir()
            for demo in demos:
                shutil.copytree(demo, self.tree / ".cache" / demo.name)
            numba = self.numba
            stale = compiled_from(changed) if changed else []
            if stale:
                numba = run / "numba"
                left_out = shutil.ignore_patterns(*(f"{Path(each).stem}.*" for each in stale))
                shutil.copytree(self.numba, numba, ignore=left_out)
            output = run / "output.txt"
            words = [
                *("-x", "-q", "--no-header", "-p", "tests.mutants.order", "-p", "no:cacheprovider"),
                *(f"--basetemp={run / 't'}", "--tb=short", test),
            ]
            code = forks.run(
                words,
                output,
                limit,
                **{
                    "NPU_PREP_TEST_EXAMPLES": "200",
                    "NUMBA_CACHE_DIR": str(numba),
                    **variables,
                },
            )
            text = output.read_text(errors="replace") if output.exists() else ""
            return verdict_of(code, text, limit)

    def _forks_for(self, changed: str) -> Forks:
        """The process with the most imports whose children see a change of this file."""
        for kind in self.kinds:
            forks = self._started(kind)
            if changed not in forks.files:
                return forks
        raise BenchError(f"{changed} is imported by every process that forks: {self.kinds}")

    def _started(self, kind: str) -> Forks:
        known = self._forks.get(kind)
        if known is None or known.process.poll() is not None:
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(self.tree), str(self.tree / "emulator")]),
                "NPU_PREP_DEVICE": os.environ.get("NPU_PREP_DEVICE", "cpu"),
                "OMP_NUM_THREADS": "1",
                "NUMBA_NUM_THREADS": "1",
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # as tests/conftest.py does, too late here
                "VLLM_NO_USAGE_STATS": "1",
            }
            known = self._forks[kind] = Forks(kind, self.tree, environment)
        return known
