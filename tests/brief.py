"""What ``make test`` leaves to ``make test-all``."""

from pathlib import Path

LIST = Path(__file__).with_name("brief.txt")
LEFT_OUT = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]


def left_out(nodeids: list[str]) -> set[str]:
    """Those of some tests that ``make test`` leaves out.

    Raises
    ------
    ValueError
        If no test's id begins with a line.
    """
    out = {nodeid for nodeid in nodeids if nodeid.startswith(tuple(LEFT_OUT))}
    files = {nodeid.partition("::")[0] for nodeid in nodeids}
    stale = [line for line in LEFT_OUT if line.partition("::")[0] in files]
    stale = [line for line in stale if not any(nodeid.startswith(line) for nodeid in out)]
    if stale:
        raise ValueError(f"tests/brief.txt: no such test {stale}")
    return out
