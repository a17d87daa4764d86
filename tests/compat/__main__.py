"""What the installed vLLM has lost or changed of the names and functions that the plugin uses."""

import argparse
import sys

from tests.compat import lists
from tests.compat.requirements import unmet
from tests.compat.seams import PLUGIN, Uses
from vllm_npu_prep.compat.releases import installed_vllm


def main() -> int:
    """Print the list; 1 if there is anything in it."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("--write", action="store_true", help="make the lists anew")
    options = parser.parse_args()
    version, uses = installed_vllm(), Uses.of_environment()
    if options.write and version != lists.PINNED:
        parser.error(f"vLLM {version} is installed; the lists are those of {lists.PINNED}")
    known = uses.signatures if options.write else lists.of_release(version)
    unknown = lists.unknown(known, uses)
    print(*unknown, sep="\n", end="\n" * bool(unknown))
    if options.write:
        if not unknown:
            lists.write(uses)
        return int(bool(unknown))
    for requirement, there in unmet().items():
        print(f"needs     {requirement}, and {there or 'nothing'} is installed")
    found = lists.differences(known, uses.sources)
    for each in found:
        print(lists.told(each, known.get(each.name, ""), uses.sources.packages[PLUGIN]))
    print(f"vLLM {version}: {len(found)} of {len(known)} names and functions are gone or changed")
    return int(bool(found or unknown))


if __name__ == "__main__":
    sys.exit(main())
