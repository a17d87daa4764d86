"""`make test-touched`: what a change leads to, and what it doesn't."""

import pytest

from tests.resume import touched
from tests.resume.graph import Graph

PACKAGE = "vllm_npu_prep"
FILES = {
    f"{PACKAGE}/platform.py": "def worker():\n    from vllm_npu_prep.deep import mask\n",
    f"{PACKAGE}/deep/__init__.py": "",
    f"{PACKAGE}/deep/mask.py": '"""Beside vllm_npu_prep.deep.alone."""\n',
    f"{PACKAGE}/deep/alone.py": "import vllm.config\n",
    "examples/tiny_model.py": "",
    "tests/conftest.py": "import tests.helpers.plugin\n",
    "tests/helpers/plugin.py": "",
    "tests/helpers/start.py": "def start():\n    from vllm import LLM\n",
    "tests/helpers/child.py": "from vllm_npu_prep.deep import alone\n",
    "tests/a/test_mask.py": "from vllm_npu_prep.deep.mask import mask\n",
    "tests/a/test_child.py": 'PROGRAM = """\nimport tests.helpers.child\n"""\n',
    "tests/a/lines.txt": "",
    "tests/engine/test_engine.py": "from tests.helpers import start\n",
    "tests/docs/test_pages.py": "",
    "docs/page.md": "",
}
NAMED = {file.rpartition("/test_")[2][:-3]: file for file in FILES if "/test_" in file}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Graph(root, FILES)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("tests/a/test_mask.py", {"mask": 0}),
        (f"{PACKAGE}/deep/mask.py", {"mask": 1, "engine": 3}),
        (f"{PACKAGE}/platform.py", {"engine": 2}),
        (f"{PACKAGE}/deep/alone.py", {"child": 2}),
        ("tests/helpers/start.py", {"engine": 1}),
        ("examples/tiny_model.py", {"engine": 1, "pages": 1}),
        ("tests/helpers/plugin.py", {}),
        ("tests/conftest.py", dict.fromkeys(NAMED, 1)),
        ("tests/a/lines.txt", {"mask": 1, "child": 1}),
        ("docs/page.md", {"pages": 1}),
        ("tests/results/soak.jsonl", {}),
        (f"{PACKAGE}/removed.py", {}),
    ],
)
def test_a_change_selects_what_leads_to_it(graph, changed, expected):
    far = touched.nearest(graph, [changed])
    assert far == {NAMED[name]: steps for name, steps in expected.items()}
    assert list(far.values()) == sorted(far.values()), "the nearest first"


def test_engines_reach_the_package_and_nearer_tests_come_first():
    far = touched.nearest(touched.graph_of_tree(), [f"{PACKAGE}/prep/mask.py"])
    assert far["tests/attention/test_mask_cache.py"] < far["tests/engine/test_windows.py"]
    assert "tests/emulator/test_copies.py" not in far
