"""A process that has imported what children need, and forks one for each architecture."""

import json
import subprocess
import sys
from contextlib import AbstractContextManager

from tests.registry.ask import SECONDS, Came, in_child, prepare


class Walker(AbstractContextManager):
    """Asks for architectures in a process of its own: the tests' own has threads and engines."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.registry.walker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, architecture: str, seconds: float = SECONDS) -> Came:
        """What comes of an architecture."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([architecture, seconds]) + "\n")
        self._process.stdin.flush()
        return Came(**json.loads(self._process.stdout.readline()))

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def main() -> None:
    """Answer each line of standard input with a line."""
    prepare()
    for line in sys.stdin:
        architecture, seconds = json.loads(line)
        print(json.dumps(vars(in_child(architecture, seconds))), flush=True)


if __name__ == "__main__":
    main()
