"""The suite in slices, tried on a small one: with workers and without."""

import os
import subprocess
import sys

import pytest

from tests.resume.log import Log
from tests.resume.tree import ROOT

FILES = {
    "conftest.py": """\
import os
import pytest
from tests.resume.plugin import NAME, configure_worker

def pytest_configure(config):
    configure_worker(config)

@pytest.fixture(scope="module")
def server():
    yield
    open("closed", "a").write("closed")

@pytest.fixture
def time_is_up(request):
    if os.environ.get("STOP"):
        request.config.pluginmanager.get_plugin(NAME).deadline = 0
""",
    "test_a.py": """\
def test_first(server): pass
def test_last_one(server, time_is_up): pass
def test_left(server): pass
def test_wrong(server): assert False
""",
    "test_b.py": """\
import os
import pytest
@pytest.fixture
def broken(): yield; assert not os.environ.get("STOP")
def test_whose_teardown_fails(broken, time_is_up): pass
def test_dies():
    if os.environ.get("DIE"): os._exit(3)
def test_skipped(): pytest.skip("no reason")
""",
}
FEW_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
MAIN = """
import sys
from pathlib import Path
from tests.resume.suite import main
sys.exit(main(sys.argv[1:], Path("results.jsonl")))
"""


@pytest.fixture
def project(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run_slice(folder, *arguments, processes=0, **environment):
    """A slice of the small suite: exit code, outcomes that it recorded, what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", MAIN, f"--processes={processes}", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **FEW_PLUGINS, **environment},
        capture_output=True,
        text=True,
    )
    log = Log(folder / "results.jsonl")
    outcomes = {each.unit: each.outcome for each in log.results if each.slice == [*log.slices][-1]}
    return done.returncode, outcomes, done.stdout


def test_workers_stop_in_time_and_the_next_slice_goes_on(project):
    code, ran, out = run_slice(project, processes=2, STOP="1")
    assert ran == {
        "test_a.py::test_first": "passed",
        "test_a.py::test_last_one": "passed",
        "test_b.py::test_whose_teardown_fails": "failed",
    }
    assert code == 1
    assert "4 left; go on with: make test-all" in out
    assert (project / "closed").read_text() == "closed"  # what the left ones shared, too

    code, ran, out = run_slice(project, processes=2, DIE="1")
    assert ran == {
        "test_a.py::test_left": "passed",
        "test_a.py::test_wrong": "failed",
        "test_b.py::test_dies": "failed",
        "test_b.py::test_skipped": "skipped",
    }
    assert code == 1
    assert "complete, 3 failed" in out

    code, ran, out = run_slice(project, "--retry")
    assert code == 1
    assert ran == {
        "test_a.py::test_wrong": "failed",
        "test_b.py::test_dies": "passed",
        "test_b.py::test_whose_teardown_fails": "passed",
    }


def test_a_run_is_not_complete_before_all_could_be_collected(project):
    code, ran, out = run_slice(project, "test_a.py", "-k", "first or left")
    assert (code, len(ran)) == (0, 2)
    assert "more left; go on with" in out
    (project / "test_c.py").write_text("import nothing_of_this_name\n")
    code, _, out = run_slice(project, processes=2, STOP="1")
    assert code == 1
    assert "more left; go on with" in out
