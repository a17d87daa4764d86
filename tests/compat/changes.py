"""Which seams of a snapshot a release of vLLM has lost or changed, as a list to read."""

import difflib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import griffe

from tests.compat.seams import UPSTREAM, Seam, Uses
from tests.compat.source import Sources, signature

SNAPSHOT = Path(__file__).with_name("seams.txt")
HEAD = """\
# Names of vLLM {version} that vllm_npu_prep relies on, and their signatures: parameters with their
# defaults, what is returned, types where upstream wrote them down. Made by `make seams`.
"""

Snapshot = Mapping[Seam, str]
"""Signatures by seam."""


@dataclass(frozen=True)
class Change:
    """A seam that isn't what it was: `now` is None where it is gone.

    `files` of the plugin rely on it; `hint` is where something of its name is now.
    """

    seam: Seam
    was: str
    now: str | None
    files: tuple[str, ...]
    hint: str = ""

    def __str__(self) -> str:
        lines = [f"{'gone' if self.now is None else 'changed':8} {self.seam}"]
        if self.hint:
            lines.append(self.hint)
        if self.now is not None:
            lines += [f"was {said}\nis  {says}" for said, says in [shortened(self.was, self.now)]]
        lines.append(f"in  {', '.join(self.files) or 'no file by that name'}")
        return "\n".join(lines).replace("\n", "\n         ")


def snapshot_of(uses: Uses) -> dict[Seam, str]:
    """What the plugin uses, as the installed vLLM has it."""
    return {seam: uses.signatures[seam] for seam in sorted(uses.signatures)}


def write(snapshot: Snapshot, version: str, path: Path = SNAPSHOT) -> None:
    """Save a snapshot, a class or module at a time."""
    lines = [HEAD.format(version=version)]
    owner = ""
    for seam, said in sorted(snapshot.items()):
        if seam.owner != owner:
            owner = seam.owner
            lines.append(f"{owner}\n")
        lines.append(f"    {seam.name}{said}\n")
    path.write_text("".join(lines))


def read(path: Path = SNAPSHOT) -> dict[Seam, str]:
    """The snapshot that a file holds."""
    found: dict[Seam, str] = {}
    owner = ""
    for line in path.read_text().splitlines():
        if line.startswith("    "):
            name = re.match(r"\w+", line.strip())
            assert name is not None
            found[Seam(owner, name[0])] = line.strip()[name.end() :]
        elif not line.startswith("#"):
            owner = line
    return found


def version_of(path: Path = SNAPSHOT) -> str:
    """The vLLM that a snapshot was made of."""
    said = re.search(r"vLLM (\S+)", path.read_text())
    assert said is not None
    return said[1]


def stale(snapshot: Snapshot, uses: Uses) -> list[str]:
    """Seams that the snapshot lacks, those that nothing uses any more, and names of nothing."""
    used = set(uses.signatures)
    return [
        *unknown(snapshot, uses),
        *(
            f"new      {seam}  in {', '.join(sorted(uses.files[seam]))}"
            for seam in sorted(used - set(snapshot))
        ),
        *(f"unused   {seam}" for seam in sorted(set(snapshot) - used)),
    ]


def unknown(snapshot: Snapshot, uses: Uses) -> list[str]:
    """Full names in strings and imports that mean nothing in vLLM and are no seams of it.

    Parts of a string that only the running program knows are a question mark: such a name has to
    be written so that it can be read.
    """
    known = set(map(str, snapshot))
    return [
        f"unknown  {name}  in {', '.join(sorted(files))}"
        for name, files in sorted(uses.unknown.items())
        if name not in known
    ]


def changes(snapshot: Snapshot, uses: Uses) -> list[Change]:
    """Compare each seam of a snapshot, on its own, with the vLLM that the plugin was read beside.

    A class that only moved is followed; whoever imports it from its old place sees that name gone.
    A class that is gone is named once, for all its members.
    """
    found, sources = [], uses.sources
    by_owner: dict[str, list[Seam]] = defaultdict(list)
    for seam in snapshot:
        by_owner[seam.owner].append(seam)

    def files(seam: Seam) -> tuple[str, ...]:
        return tuple(sorted(uses.files.get(seam) or uses.mentions[seam.name]))

    for name, seams in by_owner.items():
        owner = _owner(sources, name)
        if owner is None and _was_class(name):
            last = name.rpartition(".")[2]
            users = tuple(sorted(uses.mentions[last] or set().union(*map(files, seams))))
            members = f"with {', '.join(seam.name for seam in seams)}"
            found.append(Change(Seam(*_split(name)), "", None, users, members))
            continue
        moved = f"of  {owner.path}" if owner is not None and owner.path != name else ""
        for seam in seams:
            if str(seam) in by_owner and _owner(sources, str(seam)) is None:
                continue  # a class, named with its members
            definition = sources.member(owner, seam.name) if owner is not None else None
            if definition is None:
                hint = moved if _was_class(name) else _places(sources, seam)
                found.append(Change(seam, snapshot[seam], None, files(seam), hint))
            elif (now := signature(definition)) != snapshot[seam]:
                found.append(Change(seam, snapshot[seam], now, files(seam), moved))
    return sorted(found, key=lambda change: (change.now is not None, change.seam))


def _split(name: str) -> tuple[str, str]:
    owner, _, last = name.rpartition(".")
    return owner, last


def _was_class(name: str) -> bool:
    """Modules are lower case."""
    return not name.rpartition(".")[2].islower()


def _owner(sources: Sources, name: str) -> griffe.Object | None:
    found = sources.find(name)
    if found is None and _was_class(name):
        places = sources.places_of(UPSTREAM, name.rpartition(".")[2])
        found = sources.find(places[0]) if len(places) == 1 else None
    return found if isinstance(found, griffe.Module | griffe.Class) else None


def _places(sources: Sources, seam: Seam) -> str:
    places = sources.places_of(seam.owner.split(".")[0], seam.name)
    return f"now {', '.join(places)}" if places else ""


def shortened(was: str, now: str) -> tuple[str, str]:
    """Two signatures, without parameters that they share in a row, nor what both return."""
    parts = [re.fullmatch(r"(?::|=)? ?(.*?\()?(.*?)(\)(?: -> .*)?)?", each) for each in (was, now)]
    heads, lists, ends = ([part[index] or "" for part in parts if part] for index in (1, 2, 3))
    if ends[0] == ends[1]:
        ends = [end[:1] for end in ends]
    said: list[list[str]] = [[], []]
    names = [re.split(r"(?:, )|(?: \| )", each) for each in lists]
    joint = ", " if heads[0] else " | "
    for kind, start, end, first, last in difflib.SequenceMatcher(
        None, *names, autojunk=False
    ).get_opcodes():
        shared = kind == "equal" and end - start > 2
        for words, each, (a, b) in zip(said, names, ((start, end), (first, last))):
            words += [each[a], "...", each[b - 1]] if shared else each[a:b]
    one, other = (head + joint.join(words) + end for head, words, end in zip(heads, said, ends))
    return one or "(no type)", other or "(no type)"
