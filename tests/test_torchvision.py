"""torchvision: models that see need it; others run without, and beside a build that is unfit."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import transformers

from tests.helpers.engine import make_model
from vllm_npu_prep.compat import TORCHVISION

ROOT = Path(__file__).parents[1]
FITS = next(Path(sys.prefix).glob("lib/python*/site-packages/psutil/*.so")).read_bytes()
"""A library that loads."""

IMPORTED = """
import torch

@torch.library.register_fake("torchvision::{name}")  # as torchvision does when it is imported
def shape(dets, scores, iou_threshold):
    return scores.new_empty(0, dtype=torch.long)
"""

PREPARE = """
import sys
import torch
from vllm_npu_prep.compat import make_torchvision_importable

make_torchvision_importable()
make_torchvision_importable()
assert "torchvision" not in sys.modules
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
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("".join(IMPORTED.format(name=n) for n in ("nms", "qnms")))
    (package / "_C.so").write_bytes(library)


def test_the_one_that_is_installed_can_be_imported(python):
    """Transformers imports it with every model."""
    code = "from transformers import Qwen2VLVideoProcessor, Qwen3ForCausalLM"
    run = python(PREPARE, "import torchvision.transforms.v2.functional", code)
    assert run.returncode == 0, run.stderr
    assert metadata.version("torchvision").partition("+")[0] == TORCHVISION.partition("==")[2]
    assert TORCHVISION in (ROOT / "constraints.txt").read_text().splitlines()


def test_a_build_whose_library_does_not_load_can_be_imported(python, tmp_path):
    write_torchvision(tmp_path, b"of another torch")
    run = python(PREPARE, "import torchvision")
    assert run.returncode == 0, run.stderr
    run = python("import torchvision")
    assert "torchvision::nms does not exist" in run.stderr, "what it would be without"


def test_a_build_that_fits_is_left_alone(python, tmp_path):
    write_torchvision(tmp_path, FITS)
    run = python(PREPARE, "assert not hasattr(torch.ops.torchvision, 'nms')")
    assert run.returncode == 0, run.stderr
    schema = "(Tensor a, Tensor b) -> Tensor"
    own = f"import torch\ntorch.library.define('torchvision::nms', {schema!r})"
    run = python(own, PREPARE, "print(torch.ops.torchvision.nms.default._schema)")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == f"torchvision::nms{schema}"


def test_without_one_text_is_served_and_a_model_that_sees_is_refused(python, tmp_path):
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
