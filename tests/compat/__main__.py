"""Functions of the installed vLLM that are not as their list says; mypy tells of its names."""

import argparse
import sys

from tests.compat import bodies
from vllm_npu_prep.compat.releases import installed_vllm


def main() -> int:
    """Print them; 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("--write", action="store_true", help="make the lists anew")
    options = parser.parse_args()
    version = installed_vllm()
    if options.write and version != bodies.PINNED:
        parser.error(f"vLLM {version} is installed; the list is that of {bodies.PINNED}")
    if options.write:
        bodies.write()
    found = bodies.rewritten(bodies.folder_of("vllm"), version)
    print(*found, f"vLLM {version}: {len(found)} functions are gone or rewritten", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
