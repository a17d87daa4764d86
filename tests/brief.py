"""What ``make test`` leaves to ``make test-all``."""

from pathlib import Path

LIST = Path(__file__).with_name("brief.txt")
LEFT_OUT = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]


def left_out(nodeids: list[str]) -> set[str]:
    """Those of some tests that ``make test`` leaves out."""
    return {nodeid for nodeid in nodeids if nodeid.startswith(tuple(LEFT_OUT))}


def stale(nodeids: list[str], args: list[str]) -> list[str]:
    """Lines that no id begins with, of files that were collected; `args` are what pytest was given.

    Files of which single tests were asked for don't count.
    """
    files = {nodeid.partition("::")[0] for nodeid in nodeids}
    files -= {file for file in files for arg in args if f"{Path(file).name}::" in arg}
    lines = [line for line in LEFT_OUT if line.partition("::")[0] in files]
    return [line for line in lines if not any(nodeid.startswith(line) for nodeid in nodeids)]
