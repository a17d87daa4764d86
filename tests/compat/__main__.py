"""The list of seams that the installed vLLM has lost or changed, and whether the plugin starts."""

import argparse
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from tests.compat import bodies, changes, others, start
from tests.compat.requirements import unmet
from tests.compat.seams import Uses

SECONDS = 900
"""For a start, which inspects a model and captures graphs."""


def main() -> int:
    """Print the list; 1 if there is anything in it."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("--write", action="store_true", help="save what is used now as seams.txt")
    parser.add_argument("--start", type=Path, metavar="MODEL", help="import and start the plugin")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what the start says")
    options = parser.parse_args()
    version = metadata.version("vllm").partition("+")[0]
    if options.write and version != others.PINNED:
        parser.error(f"vLLM {version} is installed; the list is that of {others.PINNED}")
    uses = Uses.of_environment()
    if options.write:
        snapshot = changes.snapshot_of(uses)
        if unknown := changes.unknown(snapshot, uses):
            print(*unknown, sep="\n")
            return 1
        changes.write(snapshot, version)
        print(f"{len(snapshot)} seams of vLLM {version} in {changes.SNAPSHOT.name}")
        print(f"{bodies.write(version)} functions of vLLM {version} in {bodies.FILE.name}")
        for other in others.OTHERS:
            release = others.compared(others.source_of(other), snapshot)
            release.write(others.file_of(other))
            new = sum(not each.answer for each in release.differences)
            print(
                f"{len(release.differences)} of them differ in vLLM {other}, {new} without an "
                f"answer in {others.file_of(other).name}"
            )
        return 0
    snapshot, functions = others.of_installed(version)
    found = changes.changes(snapshot, uses)
    rewritten = [*changes.unknown(snapshot, uses), *bodies.changed(functions)]
    failures = start_apart(options.start, options.log) if options.start else []
    needs = [
        f"needs    {requirement}, and {there or 'nothing'} is installed"
        for requirement, there in unmet().items()
    ]
    for line in (*needs, *found, *rewritten, *failures):
        print(line)
    gone = sum(change.now is None for change in found)
    print(
        f"vLLM {version}: {gone} gone, {len(found) - gone} changed, of {len(snapshot)} seams of "
        f"vLLM {changes.version_of()}"
        + (f"; {'does not start' if failures else 'starts'}" if options.start else "")
    )
    return bool(found or rewritten or failures)


def start_apart(model: Path, log: Path) -> list[str]:
    """Import and start the plugin in another process, and return what failed."""
    command = [sys.executable, "-m", start.__name__, str(model)]
    environment = {**os.environ, "NPU_PREP_ANY_VLLM": "1", "NPU_PREP_DEVICE": "cpu"}
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return [f"start: not done after {SECONDS} s"]
        file.write(done.stdout)
    failures = [
        line.removeprefix(start.PREFIX)
        for line in done.stdout.splitlines()
        if line.startswith(start.PREFIX)
    ]
    if done.returncode and not failures:
        failures = [f"start: the process ended with code {done.returncode}"]
    return failures


if __name__ == "__main__":
    sys.exit(main())
