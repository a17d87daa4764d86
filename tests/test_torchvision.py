"""torchvision: models that see need it; others run without, and beside a build that is unfit."""

import os
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest
import transformers

from tests.helpers.engine import make_model
from tests.helpers.waiting import LIMIT
from vllm_npu_prep.compat.models import TORCHVISION

ROOT = Path(__file__).parents[1]
FITS = next(Path(sys.prefix).glob("lib/python*/site-packages/psutil/*.so")).read_bytes()
"""A library that loads."""
UNFIT = b"of another torch"

DESCRIBED = """
import torch

@torch.library.register_fake("torchvision::{name}")  # as torchvision does when it is imported
def shape(dets, scores, iou_threshold):
    return scores.new_empty(0, dtype=torch.long)
"""

WITH_HOOK = """
import sys
from vllm_npu_prep.torchvision_import import TorchvisionFinder, install

install()
install()
assert sys.meta_path.count(TorchvisionFinder) == 1
assert not {'torch', 'torchvision', 'numpy'} & set(sys.modules)
"""

WITHOUT_HOOK = """
import sys

sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, "__name__", "") != "TorchvisionFinder"]
"""

HIDE = """
import importlib.util
import sys

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda *name: name[0] != "torchvision" and find_spec(*name) or None
sys.modules["torchvision"] = None
"""


@pytest.fixture
def python(tmp_path):
    """Runs code in a process that sees the test's own torchvision first, if it made one."""

    def run(*code: str) -> subprocess.CompletedProcess:
        path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "NPU_PREP_DEVICE": "cpu"}
        command = [sys.executable, "-c", "\n".join(code)]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return run


def write_torchvision(folder: Path, library: bytes) -> None:
    """A package that asks for what torchvision asks for, if its library has to be another one."""
    package = folder / "torchvision"
    package.mkdir(exist_ok=True)
    asks = "".join(DESCRIBED.format(name=name) for name in ("nms", "qnms"))
    (package / "__init__.py").write_text(asks if library == UNFIT else "import torch\n")
    (package / "_C.so").write_bytes(library)


def test_a_script_of_the_environment_imports_models(tmp_path):
    """Without the plugin: transformers imports torchvision with every model."""
    code = (
        "import sys, torchvision.transforms.v2.functional\n"
        "from transformers import Qwen2VLVideoProcessor, Qwen3ForCausalLM\n"
        "assert not {'vllm', 'vllm_npu_prep'} & set(sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert metadata.version("torchvision").partition("+")[0] == TORCHVISION.partition("==")[2]
    assert TORCHVISION in (ROOT / "constraints.txt").read_text().splitlines()


def test_a_build_whose_library_does_not_load_can_be_imported(python, tmp_path):
    """With the hook, which imports nothing before somebody imports torchvision."""
    write_torchvision(tmp_path, UNFIT)
    run = python(WITH_HOOK, "import torchvision\nprint(torchvision.__file__)")
    assert run.stdout.strip() == str(tmp_path / "torchvision" / "__init__.py"), run.stderr
    run = python(WITHOUT_HOOK, "import torchvision")
    assert "torchvision::nms does not exist" in run.stderr, "what it would be without"


@pytest.fixture
def environment(tmp_path) -> Path:
    """An environment with this one's torch, where pip does nothing; returns its site-packages."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "pip").mkdir()
    (site / "pip" / "__init__.py").touch()
    (site / "pip" / "__main__.py").touch()
    (site / "zz-torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return site


@pytest.mark.parametrize("library", [UNFIT, FITS], ids=["unfit", "fits"])
def test_the_installation_adds_the_hook_where_it_is_needed(environment, library):
    write_torchvision(environment, library)
    hook = environment / "_npu_prep_torchvision_import.pth"
    hook.with_suffix(".py").touch()  # of another build that was there before
    root = environment.parents[2]
    script = [ROOT / "scripts/install.sh", "--venv", root, "--python", sys.executable]
    install = subprocess.run(
        [*script, "--steps", "torchvision"], capture_output=True, text=True, timeout=LIMIT
    )
    assert install.returncode == 0, install.stderr
    assert [hook.exists(), hook.with_suffix(".py").exists()] == [library == UNFIT] * 2
    assert ("for another torch" in install.stdout) == (library == UNFIT)
    command = [root / "bin/python", "-P", "-c", "import sys, torchvision; print(torchvision)"]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=LIMIT)
    assert str(environment) in run.stdout, run.stderr


def test_without_it_text_is_served_and_a_model_that_sees_refused(python, tmp_path):
    text = make_model(tmp_path / "text", num_hidden_layers=1)
    config = transformers.Qwen2VLConfig(architectures=["Qwen2VLForConditionalGeneration"])
    config.save_pretrained(tmp_path / "sees")
    code = (
        "from tests.helpers.engine import engine, engine_config, generate, greedy\n"
        f"with engine({str(text)!r}) as llm:\n"
        "    print('TOKENS', len(generate(llm, [[3, 4]], greedy(5))[0]))\n"
        f"engine_config({str(tmp_path / 'sees')!r})"
    )
    run = python(HIDE, code)
    assert "TOKENS 5" in run.stdout, run.stderr
    assert run.returncode == 1
    line = run.stderr.splitlines()[-1]
    words = ("vllm_npu_prep: error: ", str(tmp_path), "not installed", TORCHVISION)
    assert all(word in line for word in words), line
