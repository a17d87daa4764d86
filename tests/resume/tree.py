"""Which state of the tree a result belongs to."""

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "results"
PRODUCTS = (
    "tests/results",
    "tests/differential/seeds",
    "tests/scheduling/seeds.txt",
    "tests/soak/seeds.txt",
    "tests/soak/seeds-device.txt",
)
"""What long runs write themselves."""


@dataclass(frozen=True)
class TreeState:
    """What was tried.

    Attributes
    ----------
    commit
        The commit that is checked out, ten digits; ``unknown`` outside of a git tree.
    dirty
        Whether files differ from that commit. What long runs write doesn't count.
    source
        Twelve digits of a hash over all files but `PRODUCTS`. Two states with the same one behave
        the same, whatever their commits.
    """

    commit: str
    dirty: bool
    source: str


def tree_state(root: Path = ROOT) -> TreeState:
    """The state of the tree at `root` now."""
    files = ("--", ".", *(f":(exclude){folder}" for folder in PRODUCTS))
    commit = _git(root, "rev-parse", "--short=10", "HEAD").strip()
    if not commit:
        return TreeState("unknown", dirty=True, source="unknown")
    dirty = bool(_git(root, "status", "--porcelain", *files))
    listed = _git(root, "ls-files", "-z", "-c", "-o", "--exclude-standard", *files)
    source = hashlib.sha256()
    for name in sorted(set(listed.split("\0")) - {""}):
        path = root / name
        if path.is_file():  # neither deleted nor a folder that a link stands for
            content = path.read_bytes()
            source.update(f"{name}\0{len(content)}\0".encode() + content)
    return TreeState(commit, dirty, source.hexdigest()[:12])


def _git(root: Path, *words: str) -> str:
    """Output of a git command; empty if git fails or is missing."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""
