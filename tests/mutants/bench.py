"""Where planted bugs are tried: a copy of the packages, one file of which is changed at a time.

Nearly all of a short run of tests is imports: torch, transformers and vLLM take 20 seconds, more on
a busy machine. So two processes import them once, and fork a child for each run
(`tests.mutants.forks`). One of them has also what needs vLLM's platform; some files of the package
are imported with it, and bugs in these are tried in the other.

Nothing of one bug reaches the next:

- the changed file is put back, and no bytecode of it is kept;
- compiled code is kept between bugs only where it can't differ: a bug in a file that compiled code
  imports gets a copy of the cache, without whatever was compiled from that file;
- each run has copies of the demo models, and a link to the real one.

A bug counts as caught if the test that failed passes without it.
"""

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
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.forks import FIRST
from tests.mutants.planted import Mutant
from tests.resume.graph import Graph

ROOT = Path(__file__).parents[2]
COPIED = ("vllm_npu_prep", "emulator", "tests", "examples", "benchmarks", "docs", "scripts")
FILES = ("pyproject.toml", "README.md", "Makefile", "setup.py", "mkdocs.yml", "constraints.txt")
PACKAGE = "vllm_npu_prep"
COMPILED = re.compile(r"^@(compiled|inlined|njit|intrinsic)\b", re.MULTILINE)
LIMIT = 3600
"""Seconds that the tests of a bug may take, on a machine that others use, too."""
ENVIRONMENT = {
    "NPU_PREP_DEVICE": os.environ.get("NPU_PREP_DEVICE", "cpu"),
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # as tests/conftest.py does, too late here
    "VLLM_NO_USAGE_STATS": "1",
    # The first test of an emulated card waits until that has begun.
    "NPU_PREP_TEST_SECONDS": "900",
}


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
def compiled_files() -> tuple[Graph, set[str]]:
    """How files of the package lead to each other, and those with compiled code."""
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).rglob("*.py")]
    return Graph(ROOT, files), {f for f in files if COMPILED.search((ROOT / f).read_text())}


def compiled_from(path: str) -> set[str]:
    """Files whose compiled code may differ when the file at `path` does."""
    graph, compiled = compiled_files()
    return compiled & set(graph.distances([f"{PACKAGE}/{path}"]))


class Forks:
    """One process that forks children, see `tests.mutants.forks`."""

    def __init__(self, kind: str, tree: Path) -> None:
        self.log = tree.parent / f"{kind}.txt"
        path = os.pathsep.join([str(tree), str(tree / "emulator")])
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.mutants.forks", kind],
                cwd=tree,
                env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for the process that starts it
            )
        self.files = set(self._answer())

    def run(self, words: Sequence[str], output: Path, limit: float, **variables: str) -> int | None:
        """Exit code of pytest, None if it took longer than `limit` seconds."""
        order = {"words": list(words), "output": str(output), "limit": limit}
        self.process.stdin.write(json.dumps(order | {"environment": variables}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            said = self.log.read_text(errors="replace")[-500:].strip()
            raise RuntimeError(f"the process that forks children has ended: {said}")
        return json.loads(line)

    def close(self) -> None:
        """End it, and the child that runs, with all that its tests have started."""
        self.process.terminate()
        self.process.communicate()


class Bench(AbstractContextManager):
    """A copy of the packages in which bugs are planted one at a time."""

    def __init__(self, folder: Path | None = None, kinds: Sequence[str] = ("warm", "bare")) -> None:
        name = hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]
        own = Path(tempfile.gettempdir()) / f"npu-prep-mutants-{os.getuid()}-{name}"
        self.folder, self.kinds, self._stack = folder or own, kinds, ExitStack()
        self.folder.mkdir(exist_ok=True)
        lock = self._stack.enter_context((self.folder / "lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                "make mutants: another process plants bugs here: wait for it"
            ) from None
        self.tree = self.folder / "tree"
        for each in (self.tree, *self.folder.glob("run-*")):  # of a bench that was killed, too
            shutil.rmtree(each, ignore_errors=True)
        self.tree.mkdir()
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, self.tree / name, ignore=ignored)
        for name in FILES:
            shutil.copy2(ROOT / name, self.tree / name)
        self.numba = self.folder / "numba"
        self._forget_compiled_code()
        self.passed: dict[str, bool] = {}
        self._forks: dict[str, Forks] = {}

    def _forget_compiled_code(self) -> None:
        """Unless it is that of these sources."""
        digest, known = hashlib.sha256(), self.numba / "digest"
        for path in sorted((self.tree / PACKAGE / "prep").glob("*.py")):
            digest.update(path.read_bytes())
        if not known.exists() or known.read_text() != digest.hexdigest():
            shutil.rmtree(self.numba, ignore_errors=True)
            self.numba.mkdir()
            known.write_text(digest.hexdigest())

    def __exit__(self, *_: object) -> None:
        for forks in self._forks.values():
            forks.close()
        self._stack.close()

    def try_out(self, mutant: Mutant, limit: float = LIMIT, examples: int = 200) -> Verdict:
        """Plant a bug and run its tests until one fails; run that one without the bug, too."""
        forks = self._forks_for(mutant.path)  # before its imports could meet the bug
        with self._planted(mutant) as there:
            if not there:
                return Verdict("stale", f"{mutant.before!r} is not once in {mutant.path}")
            deadline = time.monotonic() + limit
            for test in mutant.tests:  # one by one: what is not needed is not even collected
                seconds = max(deadline - time.monotonic(), 0)
                verdict = self._run(forks, test, seconds, examples, mutant.path)
                if verdict.outcome != "missed":
                    break
        test = f"tests/{verdict.by}"
        named = os.path.exists(self.tree / test.partition("::")[0])  # a crash names none
        if verdict.outcome == "caught" and named:
            if test not in self.passed:
                verdict_without = self._run(self._forks_for(""), test, limit, examples)
                self.passed[test] = verdict_without.outcome == "missed"
            if not self.passed[test]:
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
        whole = path.with_name(f"{path.name}.whole")
        path.rename(whole)
        try:
            self._forget_bytecode(path)
            path.write_text(text.replace(mutant.before, mutant.after))
            yield True
        finally:
            whole.replace(path)  # with its old time: compiled code is still that of this file
            self._forget_bytecode(path)

    def _forget_bytecode(self, path: Path) -> None:
        for each in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            each.unlink()

    def _run(
        self, forks: Forks, test: str, limit: float, examples: int, changed: str = ""
    ) -> Verdict:
        """Run a test, a file or a folder in the tree as it is; `changed` is the file with a bug."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="run-") as made:
            run, numba = Path(made), self.numba
            shutil.rmtree(self.tree / ".cache", ignore_errors=True)
            (self.tree / ".cache").mkdir(exist_ok=True)
            for demo in (ROOT / ".cache").glob("tiny-*"):
                shutil.copytree(demo, self.tree / ".cache" / demo.name)
            for real in (ROOT / ".cache").glob("smollm2*"):  # too large to copy, and never changed
                (self.tree / ".cache" / real.name).symlink_to(real)
            if changed and (stale := compiled_from(changed)):
                numba = run / "numba"
                left_out = shutil.ignore_patterns(*(f"{Path(each).stem}.*" for each in stale))
                shutil.copytree(self.numba, numba, ignore=left_out)
            output = run / "output.txt"
            words = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=short", test]
            variables = {"NPU_PREP_TEST_EXAMPLES": str(examples), "NUMBA_CACHE_DIR": str(numba)}
            code = forks.run([*words, f"--basetemp={run / 't'}"], output, limit, **variables)
            text = output.read_text(errors="replace") if output.exists() else ""
            return verdict_of(code, text, limit)

    def _forks_for(self, changed: str) -> Forks:
        """The process with the most imports whose children see a change of this file."""
        for kind in self.kinds:
            forks = self._forks.get(kind)
            if forks is None or forks.process.poll() is not None:
                forks = self._forks[kind] = Forks(kind, self.tree)
            if str(self.tree / PACKAGE / changed) not in forks.files:
                return forks
        raise RuntimeError(f"{changed} is imported by every process that forks: {self.kinds}")
