"""`make test-touched`: what a change leads to, and what it doesn't."""

import subprocess

import pytest

from tests.resume import log, touched
from tests.resume.graph import Graph
from tests.resume.tree import git, tree_state

PACKAGE = "vllm_npu_prep"
FILES = {
    "setup.py": f'points = ["npu = {PACKAGE}:register"]\n',
    f"{PACKAGE}/__init__.py": f'def register():\n    return "{PACKAGE}.platform.Platform"\n',
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
    "tests/a/test_list.py": 'lines = """\n"""\nopen("lines.txt")  # not step.txt\n""" """\n',
    "tests/a/lines.txt": "",
    "tests/engine/test_engine.py": "from tests.helpers import start\n",
    "tests/golden/step.txt": "",
    "tests/test_golden.py": 'folder = ROOT / "golden"\n',
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
        (f"{PACKAGE}/deep/mask.py", {"mask": 1, "engine": 4}),
        (f"{PACKAGE}/platform.py", {"engine": 3}),
        (f"{PACKAGE}/deep/alone.py", {"child": 2}),
        ("tests/helpers/start.py", {"engine": 1}),
        ("examples/tiny_model.py", {"engine": 1, "pages": 1}),
        ("tests/helpers/plugin.py", {}),
        ("tests/conftest.py", dict.fromkeys(NAMED, 1)),
        ("tests/a/lines.txt", {"list": 1}),
        ("tests/golden/step.txt", {"golden": 1}),
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


@pytest.fixture
def repository(tmp_path, monkeypatch):
    def run(*words):
        user = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *user, *words], cwd=tmp_path, check=True, capture_output=True)

    run("init", "-b", "main")
    (tmp_path / ".gitignore").write_text(".cache\n")
    for name in ("first", "second"):
        (tmp_path / name).touch()
        run("add", ".")
        run("commit", "-m", name)
    monkeypatch.setattr(touched, "git", lambda *words: git(*words, root=tmp_path))
    monkeypatch.setattr(touched, "ROOT", tmp_path)
    monkeypatch.setattr(touched, "FILE", tmp_path / ".cache" / "touched.jsonl")
    for module in (log, touched):
        monkeypatch.setattr(module, "tree_state", lambda: tree_state(tmp_path))
    return tmp_path, run


def test_a_change_differs_from_main_or_the_commit_before(repository):
    folder, run = repository
    (folder / "new").touch()
    assert touched.changed_since(touched.base_of("")) == {"second", "new"}
    assert touched.changed_since(touched.base_of("HEAD")) == {"new"}
    run("checkout", "-b", "branch")
    for name in ("third", "fourth"):
        (folder / name).touch()
        run("add", name)
        run("commit", "-m", name)
    assert touched.changed_since(touched.base_of("")) == {"third", "fourth", "new"}


def test_an_unknown_commit_is_one_line(repository, capsys):
    assert touched.main(["--since", "nowhere"]) == 2
    assert capsys.readouterr().err == "make test-touched: git knows no commit nowhere; give one\n"


def test_slices_run_what_is_left_until_a_file_changes(repository, monkeypatch):
    folder, _ = repository
    for name in "abc":
        (folder / f"test_{name}.py").touch()
    asked = []

    def run(recorder, processes, files):
        """Run tests until the time is up, in the second one."""
        recorder.collected = [file for file in files if file not in recorder.share["done"]]
        for file in recorder.collected[:2]:
            asked.append(file)
            recorder.part.record(file, "passed", 1.0)
        return True

    monkeypatch.setattr(touched.Recorder, "run", run)
    assert touched.main([]) == 0 and asked == ["test_a.py", "test_b.py"]
    assert touched.main([]) == 0 and asked == ["test_a.py", "test_b.py", "test_c.py"]
    assert touched.main([]) == 0 and len(asked) == 3
    (folder / "test_d.py").touch()
    assert touched.main([]) == 0 and asked[3:] == ["test_a.py", "test_b.py"]
