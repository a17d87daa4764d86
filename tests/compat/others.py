"""The other supported releases of vLLM: which seams differ there, and what answers each.

One release is installed; `seams.txt` and `bodies.txt` are its. For each other one,
``vllm-VERSION.json`` lists what its source has otherwise. ``python -m tests.compat --write``
fetches that source and writes the list; beside each difference somebody writes what answers it. A
difference without an answer fails ``tests/test_compat.py``, and so does a name of vLLM that the
plugin uses and nobody looked up.
"""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.compat import bodies, changes
from tests.compat.seams import UPSTREAM, Seam, installed
from tests.compat.source import Sources
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM

FOLDER = Path(__file__).parent
CACHE = FOLDER.parents[1] / ".cache" / "sources"
"""Where sources of other releases are kept."""
PINNED, *OTHERS = SUPPORTED_VLLM
"""The release of `seams.txt`, of `bodies.txt` and of constraints.txt; then the others."""


@dataclass(frozen=True)
class Difference:
    """A name or a function (with a colon before it) that another release has otherwise.

    It is ``gone``, ``changed`` or ``rewritten``, or ``new``: a name that the plugin uses and only
    that release has, which somebody writes into the list. `answer` is what deals with it, and how.
    """

    kind: str
    name: str
    now: str
    answer: str = ""


@dataclass
class Release:
    """The list of a release, and a digest of the names that were looked up for it."""

    looked_up: str
    differences: list[Difference] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Release":
        """The list that a file holds."""
        said = json.loads(path.read_text())
        return cls(said["looked_up"], [Difference(**each) for each in said["differences"]])

    def write(self, path: Path) -> None:
        """Save the list, with the answers that the file has already."""
        answers = {}
        if path.exists():
            known = Release.read(path).differences
            answers = {(each.kind, each.name, each.now): each.answer for each in known}
            listed = {each.name for each in self.differences}
            self.differences += [
                each for each in known if each.kind == "new" and each.name not in listed
            ]
        self.differences = [
            replace(each, answer=answers.get((each.kind, each.name, each.now), ""))
            for each in self.differences
        ]
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def file_of(version: str) -> Path:
    """The list of a release."""
    return FOLDER / f"vllm-{version}.json"


def digest_of(snapshot: Mapping[Seam, str]) -> str:
    """A digest of all names and functions that a list has to be made for."""
    names = [f"{seam}{said}" for seam, said in sorted(snapshot.items())]
    names += map(str, bodies.read())
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]


class _Nowhere:
    """Stands for `Uses` where nobody asks which files use a name."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.files: dict[Seam, set[str]] = defaultdict(set)
        self.mentions: dict[str, set[str]] = defaultdict(set)


def compared(source: Path, snapshot: Mapping[Seam, str]) -> Release:
    """What a release has otherwise; `source` is the folder of its package."""
    beside = _Nowhere(Sources({**installed(), UPSTREAM: source}))
    found = [
        Difference("gone" if each.now is None else "changed", str(each.seam), each.now or "")
        for each in changes.changes(snapshot, beside)  # type: ignore[arg-type]
    ]
    for body in bodies.read():
        now = bodies.digest_of(body, folder=source)
        if now != body.digest:
            kind = "gone" if now is None else "rewritten"
            found.append(Difference(kind, f"{body.module}:{body.name}", now or ""))
    return Release(digest_of(snapshot), found)


def of_installed(version: str) -> tuple[Mapping[Seam, str], list[bodies.Body]]:
    """Seams and functions as they have to be in the vLLM that is installed."""
    snapshot = changes.read()
    if version not in OTHERS:
        return snapshot, bodies.read()
    release = Release.read(file_of(version))
    return snapshot_with(snapshot, release), bodies_with(release)


def snapshot_with(snapshot: Mapping[Seam, str], release: Release) -> dict[Seam, str]:
    """The snapshot as it is in another release."""
    there = dict(snapshot)
    for each in release.differences:
        if ":" not in each.name:
            owner, _, name = each.name.rpartition(".")
            there.pop(Seam(owner, name), None)
            if each.kind in ("changed", "new"):
                there[Seam(owner, name)] = each.now
    return there


def bodies_with(release: Release) -> list[bodies.Body]:
    """The functions that are watched, with their digests in another release."""
    other = {each.name: each for each in release.differences if ":" in each.name}
    found = []
    for body in bodies.read():
        difference = other.get(f"{body.module}:{body.name}")
        if difference is None:
            found.append(body)
        elif difference.kind == "rewritten":
            found.append(replace(body, digest=difference.now))
    return found


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
            with tarfile.open(Path(temporary) / f"vllm-{version}.tar.gz") as archive:
                archive.extractall(temporary, filter="data")
            (Path(temporary) / f"vllm-{version}").rename(folder)
    return folder / UPSTREAM
