"""Which state of the tree a result belongs to."""

import hashlib
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "results"
PRODUCTS = (
    "tests/results",
    "tests/differential/seeds",
    "tests/scheduling/seeds.txt",
    "tests/soak/seeds.txt",
    "tests/soak/seeds-device.txt",
    "tests/soak/seeds-transfers.txt",
)
"""What long runs write themselves."""


class TreeState(NamedTuple):
    """The commit, with a plus where files differ from it, and a hash over all files but `PRODUCTS`.

    Two states with the same `source` behave the same, whatever their commits.
    """

    commit: str
    source: str


def tree_state(root: Path = ROOT) -> TreeState:
    """The state of the tree at `root` now."""
    files = ("--", ".", *(f":(exclude){folder}" for folder in PRODUCTS))
    commit = git("rev-parse", "--short=10", "HEAD", root=root).strip()
    if not commit:
        return TreeState("unknown", "unknown")
    if git("status", "--porcelain", *files, root=root):
        commit += "+"
    source = hashlib.sha256()
    listed = git("ls-files", "-z", "-c", "-o", "--exclude-standard", *files, root=root)
    for name in sorted({*listed.split("\0")} - {""}):
        path = root / name
        if path.is_file():  # neither deleted nor a folder that a link stands for
            content = path.read_bytes()
            source.update(f"{name}\0{len(content)}\0".encode() + content)
    return TreeState(commit, source.hexdigest()[:12])


def git(*words: str, root: Path = ROOT) -> str:
    """Output of a git command; empty if git fails or is missing."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""
