"""What the plugin relies on in vLLM, as lists that a release is compared with.

- ``seams.txt``: the names that its text uses, with their signatures.
- ``bodies.txt``: functions whose rules a few lines of the plugin repeat or rely on, with a digest
  of the code of each, without comments and docstrings, and what to look at when that changes.
- ``vllm-VERSION.json``: what another supported release has otherwise, and beside each difference
  what answers it. A difference without an answer fails ``tests/test_compat.py``, and so does a name
  that nobody looked up there.

One release is installed; the first two are those of the pinned one. ``python -m tests.compat
--write`` makes the lists, and keeps what somebody wrote into them.
"""

import ast
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.compat.seams import UPSTREAM, Uses, installed
from tests.compat.source import Sources, signature
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM

FOLDER = Path(__file__).parent
SEAMS, BODIES = FOLDER / "seams.txt", FOLDER / "bodies.txt"
CACHE = FOLDER.parents[1] / ".cache" / "sources"
"""Where sources of other releases are kept."""
PINNED, *OTHERS = SUPPORTED_VLLM
Names = dict[str, str]
"""What is known of a name: its signature; of a function (with a colon before it) its digest."""


@dataclass(frozen=True)
class Difference:
    """A name that a release has otherwise.

    It is ``gone``, ``changed`` or ``rewritten``, or ``new``: a name that the plugin uses and only
    that release has, which somebody writes into the list. `answer` is what deals with it, and how.
    """

    kind: str
    name: str
    now: str
    answer: str = ""


def read_seams() -> Names:
    """Signatures by name; the file has them a class or module at a time."""
    found, owner = {}, ""
    for line in SEAMS.read_text().splitlines():
        if line.startswith("    "):
            name, said = re.findall(r"^    (\w+)(.*)", line)[0]
            found[f"{owner}.{name}"] = said
        elif not line.startswith("#"):
            owner = line
    return found


def head_of(path: Path) -> str:
    """The comments that a list begins with, of the pinned release."""
    lines = path.read_text().splitlines(keepends=True)
    head = "".join(line for line in lines if line.startswith("#"))
    return re.sub(r"vLLM \S+", f"vLLM {PINNED}", head, count=1)


def write_seams(names: Names) -> None:
    lines, last = [head_of(SEAMS)], ""
    for full in sorted(names, key=lambda full: full.rpartition(".")[::2]):
        owner, _, name = full.rpartition(".")
        lines += [f"{owner}\n"] * (owner != last) + [f"    {name}{names[full]}\n"]
        last = owner
    SEAMS.write_text("".join(lines))


def read_bodies() -> dict[str, tuple[str, str]]:
    """Digest of each function, and what to look at."""
    lines = [line for line in BODIES.read_text().splitlines() if not line.startswith("#")]
    parts = [re.findall(r"(\w+) (\S+) in (.*)", line)[0] for line in lines]
    return {name: (digest, look_at) for digest, name, look_at in parts}


def write_bodies(sources: Sources) -> None:
    lines = [head_of(BODIES)]
    for name, (_, look_at) in read_bodies().items():
        lines.append(f"{digest_of(sources, name) or 'gone'} {name} in {look_at}\n")
    BODIES.write_text("".join(lines))


def digest_of(sources: Sources, name: str) -> str | None:
    """Digest of a function's code; None if it isn't there."""
    module, _, inside = name.partition(":")
    path = sources.path_of(module)
    node: ast.AST | None = _parsed(path.read_text()) if path else None
    for part in inside.split("."):
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        named = [each for each in getattr(node, "body", ()) if isinstance(each, kinds)]
        node = next((each for each in named if each.name == part), None)
    if node is None:
        return None
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef) and ast.get_docstring(each) is not None:
            each.body = each.body[1:]
    return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:12]


_parsed = functools.cache(ast.parse)  # of modules that hold several functions


def differences(known: Names, sources: Sources) -> list[Difference]:
    """What a release has otherwise. A class that is gone is named once, for all its members."""
    found = {}
    for name, said in known.items():
        owner = name.rpartition(".")[0]
        now: str | None = None
        if ":" in name:
            now = digest_of(sources, name)
        elif (there := sources.find(name)) is not None:
            now = signature(there)
        elif not owner.rpartition(".")[2].islower() and sources.find(owner) is None:
            name = owner  # modules are lower case
        if now != said:
            kind = "gone" if now is None else "rewritten" if ":" in name else "changed"
            found[name] = Difference(kind, name, now or "")
    return list(found.values())


def told(difference: Difference, was: str, plugin: Path) -> str:
    """A difference in a few lines, with what of the plugin relies on the name."""
    lines = [f"{difference.kind:9} {difference.name}"]
    if difference.kind == "changed":
        parts = was.split(", "), difference.now.split(", ")
        lines += [f"was {', '.join(each for each in parts[0] if each not in parts[1])}"]
        lines += [f"is  {', '.join(each for each in parts[1] if each not in parts[0])}"]
    if ":" in difference.name:
        lines += [f"look at {read_bodies()[difference.name][1]}, run its tests, then make seams"]
    else:
        word = re.compile(rf"\b{difference.name.rpartition('.')[2]}\b")
        paths = [path for path in sorted(plugin.rglob("*.py")) if word.search(path.read_text())]
        lines += [f"in  {', '.join(path.relative_to(plugin).as_posix() for path in paths)}"]
    return "\n          ".join(lines)


def unknown(known: Names, uses: Uses) -> list[str]:
    """Full names in strings and imports that mean nothing in vLLM and are no seams of it.

    Parts of a string that only the running program knows are a question mark: such a name has to
    be written so that it can be read.
    """
    names = sorted(set(uses.unknown) - set(known))
    return [f"unknown  {name}  in {', '.join(sorted(uses.unknown[name]))}" for name in names]


def stale(known: Names, uses: Uses) -> list[str]:
    """Seams that a list lacks, those that nothing uses any more, and names of nothing."""
    listed = {name for name in known if ":" not in name}
    new, unused = set(uses.signatures) - listed, listed - set(uses.signatures)
    return [
        *unknown(known, uses),
        *(f"new      {name}  in {', '.join(sorted(uses.files[name]))}" for name in sorted(new)),
        *(f"unused   {name}" for name in sorted(unused)),
    ]


def pinned() -> Names:
    """All that the plugin relies on, as the pinned release has it."""
    return read_seams() | {name: digest for name, (digest, _) in read_bodies().items()}


def of_release(version: str) -> Names:
    """All that the plugin relies on, as it has to be in a release."""
    names = pinned()
    for each in Answers.read(file_of(version)).differences if version in OTHERS else ():
        if each.kind != "gone":
            names[each.name] = each.now
        else:  # with all its members, if it is a class
            gone = [name for name in names if f"{name}.".startswith(f"{each.name}.")]
            names = {name: said for name, said in names.items() if name not in gone}
    return names


def digest_of_lists() -> str:
    """A digest of all that another release has to be compared with."""
    return hashlib.sha256(SEAMS.read_bytes() + BODIES.read_bytes()).hexdigest()[:12]


@dataclass
class Answers:
    """The list of a release: a digest of the lists that it was compared with, and differences."""

    looked_up: str
    differences: list[Difference]

    @classmethod
    def read(cls, path: Path) -> "Answers":
        said = json.loads(path.read_text())
        return cls(said["looked_up"], [Difference(**each) for each in said["differences"]])

    def write(self, path: Path) -> None:
        """Save the list, with the answers that the file has already, and what is new there."""
        known = Answers.read(path).differences if path.exists() else []
        answers = {replace(each, answer=""): each for each in known}
        listed = {each.name for each in self.differences}
        found = [answers.get(each, each) for each in self.differences]
        found += [each for each in known if each.kind == "new" and each.name not in listed]
        self.differences = found
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def file_of(version: str) -> Path:
    return FOLDER / f"vllm-{version}.json"


def write(uses: Uses) -> None:
    """Make all lists anew, those of other releases by their sources."""
    write_seams(uses.signatures)
    write_bodies(uses.sources)
    for version in OTHERS:
        beside = Sources({**installed(), UPSTREAM: source_of(version)})
        answers = Answers(digest_of_lists(), differences(pinned(), beside))
        answers.write(file_of(version))
        new = sum(not each.answer for each in answers.differences)
        print(f"vLLM {version}: {len(answers.differences)} differ, {new} without an answer")


def source_of(version: str) -> Path:
    """Folder of a release's package, fetched if need be."""
    folder = CACHE / f"vllm-{version}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--no-build-isolation", "--no-binary", UPSTREAM, "--dest", temporary]
            environment = {"VLLM_VERSION_OVERRIDE": version, "VLLM_TARGET_DEVICE": "empty"}
            ran = subprocess.run(
                [*command, f"{UPSTREAM}=={version}"], env={**os.environ, **environment}
            )
            if ran.returncode:
                raise SystemExit(f"seams: pip can't fetch the source of vLLM {version}, see above")
            archive = Path(temporary) / f"vllm-{version}.tar.gz"
            shutil.unpack_archive(archive, temporary, filter="data")
            (Path(temporary) / f"vllm-{version}").rename(folder)
    return folder / UPSTREAM
