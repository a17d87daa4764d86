"""Functions of vLLM whose rules a few lines of the plugin repeat or rely on, by release.

- ``bodies.txt``: a digest of the code of each in the pinned release, without comments and
  docstrings, and what to look at when that changes.
- ``vllm-VERSION.txt``: those that another supported release has otherwise, each with what answers
  it. A function without an answer fails ``tests/test_compat.py``.

``python -m tests.compat --write`` makes the digests anew, and keeps what stands beside them.
"""

import ast
import functools
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.archives import unpack
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM

FOLDER = Path(__file__).parent
BODIES = FOLDER / "bodies.txt"
CACHE = FOLDER.parents[1] / ".cache" / "sources"
"""Where sources of other releases are kept."""
PINNED, *OTHERS = SUPPORTED_VLLM
GONE = "gone"


def folder_of(package: str) -> Path:
    """Where a package of this environment is; it isn't imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return Path(spec.origin).parent


def modules(package: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Full names and files of a package's modules."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        yield ".".join((package, *parts)).removesuffix(".__init__"), path


def list_of(version: str) -> Path:
    return BODIES if version == PINNED else FOLDER / f"vllm-{version}.txt"


def read(path: Path) -> dict[str, tuple[str, str]]:
    """Digest of each function of a list, and what stands beside it."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    parts = [re.findall(r"(\w+) (\S+) ?(.*)", line)[0] for line in lines]
    return {name: (digest, told) for digest, name, told in parts}


def digest_of(folder: Path, name: str) -> str:
    """Digest of the code of a function of the package in `folder`."""
    module, _, inside = name.partition(":")
    path = folder.joinpath(*module.split(".")[1:]).with_suffix(".py")
    path = path if path.exists() else path.with_suffix("") / "__init__.py"
    node: ast.AST | None = _parsed(path.read_text()) if path.exists() else None
    for part in inside.split("."):
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        named = [each for each in getattr(node, "body", ()) if isinstance(each, kinds)]
        node = next((each for each in named if each.name == part), None)
    if node is None:
        return GONE
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef) and ast.get_docstring(each) is not None:
            each.body = each.body[1:]
    return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:12]


_parsed = functools.cache(ast.parse)  # of modules that hold several functions


def rewritten(folder: Path, version: str) -> list[str]:
    """Functions that a package has otherwise than a release's list says, and what to look at."""
    known = read(BODIES) | (read(list_of(version)) if version in OTHERS else {})
    found = {name: digest_of(folder, name) for name in known}
    look_at = known | read(BODIES)
    return [
        f"{'gone' if found[name] == GONE else 'rewritten'} {name}: look {look_at[name][1]}"
        for name, (digest, _) in known.items()
        if found[name] != digest
    ]


def looked_up() -> str:
    """First line of another release's list: what it was compared with."""
    return f"# Compared with bodies.txt {hashlib.sha256(BODIES.read_bytes()).hexdigest()[:12]}.\n"


def write() -> None:
    """Make the digests anew, those of other releases by their sources."""
    text, own, upstream = BODIES.read_text(), read(BODIES), folder_of("vllm")
    own = {name: (digest_of(upstream, name), told) for name, (_, told) in own.items()}
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    BODIES.write_text(head + _lines(own))
    for version in OTHERS:
        path, source = list_of(version), source_of(version)
        known = read(path) if path.exists() else {}
        there = {name: digest_of(source, name) for name in own | known}
        names = [name for name in own if there[name] != own[name][0]]
        names += [name for name in known if name not in own]  # that only this release has
        answers = {n: known[n][1] if known.get(n, "")[:1] == (there[n],) else "" for n in names}
        told = {name: (there[name], answers[name]) for name in names}
        path.write_text(looked_up() + _lines(told))
        unanswered = sum(not answer for answer in answers.values())
        print(f"vLLM {version}: {len(told)} differ, {unanswered} without an answer")


def _lines(functions: dict[str, tuple[str, str]]) -> str:
    return "".join(f"{digest} {name} {told}\n" for name, (digest, told) in functions.items())


def source_of(version: str) -> Path:
    """Folder of a release's package, fetched if need be."""
    folder = CACHE / f"vllm-{version}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--no-build-isolation", "--no-binary", "vllm", "--dest", temporary]
            environment = {"VLLM_VERSION_OVERRIDE": version, "VLLM_TARGET_DEVICE": "empty"}
            ran = subprocess.run([*command, f"vllm=={version}"], env={**os.environ, **environment})
            if ran.returncode:
                raise SystemExit(f"seams: pip can't fetch the source of vLLM {version}, see above")
            archive = Path(temporary) / f"vllm-{version}.tar.gz"
            unpack(archive, Path(temporary))
            (Path(temporary) / f"vllm-{version}").rename(folder)
    return folder / "vllm"
