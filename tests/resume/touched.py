"""Tests that import the files of a change, the nearest ones first, in slices.

python -m tests.resume.touched [--since COMMIT] [--minutes 30] [--retry] [--list]

Files of a change are those that differ from the merge base with main, from the commit before on
main itself, or from --since, committed or not. Tests lead to them by imports, and by full
names of modules in strings; `tests.resume.graph` tells how. Engines reach nearly all of the
package, so the nearest tests come first: a slice has what matters most. Results are kept beside the
caches until a file changes; the next slice runs the others.
"""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.resume.graph import Graph
from tests.resume.log import Log, Slice, slice_parser
from tests.resume.plugin import Recorder
from tests.resume.tree import ROOT, git, tree_state

COMMAND = "make test-touched"
FILE = ROOT / ".cache" / "touched.jsonl"
DEMOS = (
    "tests/docs",
    "tests/engine",
    "tests/examples",
    "tests/npu",
    "tests/server",
    "tests/startup",
)
OTHERS = {
    "docs/": ("tests/docs",),
    **dict.fromkeys(
        ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff"),
        ("tests/docs",),
    ),
    "tests/README.md": ("tests/docs",),
    "tests/brief.txt": ("tests/resume",),
    "tests/golden/": ("tests/test_explain",),
    "tests/soak/seeds": ("tests/soak", "tests/npu"),
    "tests/worked_examples/": ("tests/inspect", "tests/prep", "tests/runner", "tests/test_explain"),
    "tests/helpers/demo.py": DEMOS,
    "examples/tiny_": DEMOS,
    "examples/": ("tests/examples",),
    "examples/deploy/": ("tests/deploy",),
    "scripts/": ("tests/deploy",),
    "Dockerfile": ("tests/deploy",),
    "emulator/ascend_emulator/": ("tests/emulator", "tests/npu", "tests/test_walls"),
    "vllm_npu_prep/": ("tests/deploy/test_wheels", "tests/mutants", "tests/test_walls"),
    "constraints.txt": ("tests/",),
    "pyproject.toml": ("tests/",),
    "setup.py": ("tests/",),
}
"""What to run for files that no test imports, or fixtures alone, by how their paths begin."""


def base_of(chosen: str) -> str:
    """The commit that a change is compared with; empty if there is no such commit."""
    base = git("merge-base", "main", "HEAD").strip()
    chosen = chosen or (base if base != git("rev-parse", "HEAD").strip() else "") or "HEAD~1"
    return git("rev-parse", "--verify", "--quiet", f"{chosen}^{{commit}}").strip()


def changed_since(base: str) -> set[str]:
    new = git("ls-files", "--others", "--exclude-standard")
    return set(f"{git('diff', '--name-only', base)}{new}".splitlines())


def graph_of_tree() -> Graph:
    return Graph(ROOT, git("ls-files", "-co", "--exclude-standard").splitlines())


def nearest(graph: Graph, changed: Iterable[str]) -> dict[str, int]:
    """Files of tests, the nearest to a changed file first, and how far each is."""
    changed = [file for file in changed if not file.startswith("tests/results/")]
    found = graph.distances(changed)
    folders = [f for file in changed for p, fs in OTHERS.items() if file.startswith(p) for f in fs]
    data = [file for file in changed if re.match(r"tests/.+/.+(?<!\.py)$", file)]
    folders += [f"{Path(file).parent}/" for file in data]
    for file in graph.files:
        if file.startswith(tuple(folders)):
            found[file] = min(found.get(file, 1), 1)
    tests = [f for f in graph.files & set(found) if re.search(r"(^|/)test_\w+\.py$", f)]
    return {file: found[file] for file in sorted(tests, key=lambda file: (found[file], file))}


def main(arguments: list[str]) -> int:
    """Run a slice; exit code 1 if a test failed or could not be collected."""
    parser = slice_parser("tests.resume.touched", __doc__)
    parser.add_argument("--since", default="", help="commit that a change is compared with")
    parser.add_argument("--processes", default="auto", help="of pytest-xdist; 0 for none")
    parser.add_argument("--list", action="store_true", help="print files of tests, and run none")
    options = parser.parse_args(arguments)
    base = base_of(options.since)
    if not base:
        known = options.since or "HEAD~1"
        print(f"{COMMAND}: git knows no commit {known}; give one", file=sys.stderr)
        return 2
    changed = changed_since(base)
    tests = nearest(graph_of_tree(), changed)
    print(f"{len(changed)} files changed since {base[:10]} lead to {len(tests)} files of tests")
    if options.list or not tests:
        print(*(f"{far} {file}" for file, far in tests.items()), sep="\n")
        return 0
    sources = [header["source"] for header in Log(FILE).slices.values()]
    options.fresh |= sources[-1:] != [tree_state().source]
    with Slice(FILE, options) as part:
        os.environ["NPU_PREP_TEST_EXAMPLES"] = "300"
        recorder = Recorder(part)
        recorder.share["first"] += tests
        whole = recorder.run(options.processes, list(tests))
        return part.finish(recorder.left(), COMMAND) or int(not whole)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
