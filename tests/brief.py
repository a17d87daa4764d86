"""What ``make test`` leaves to ``make test-all``."""

from pathlib import Path

LIST = Path(__file__).with_name("brief.txt")
LEFT_OUT = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]


def left_out(nodeids: list[str], args: list[str]) -> set[str]:
    """Those of some tests that ``make test`` leaves out; `args` are what pytest was given.

    A line that no id begins with is an error, unless single tests of its file were asked for.
    """
    out = {nodeid for nodeid in nodeids if nodeid.startswith(tuple(LEFT_OUT))}
    files = {nodeid.partition("::")[0] for nodeid in nodeids}
    files -= {file for file in files for arg in args if f"{Path(file).name}::" in arg}
    stale = [line for line in LEFT_OUT if line.partition("::")[0] in files]
    stale = [line for line in stale if not any(nodeid.startswith(line) for nodeid in out)]
    if stale:
        raise ValueError(f"tests/brief.txt: no such test {stale}")
    return out
