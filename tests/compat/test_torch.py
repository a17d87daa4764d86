"""Engines with the torch that vLLM 0.33.0 pins: `make test-all` has this."""

import os
import subprocess
import sys

import pytest

from tests.compat import cuda_stubs
from tests.resume.tree import ROOT

PYTEST = [sys.executable, "-m", "pytest", "-q", "--brief"]
RUNS = {
    "cpu": [*PYTEST, "tests/engine/test_v2.py"],
    "npu": [
        *(sys.executable, "-m", "ascend_emulator", "--memory", "1G", "--delay", "equal"),
        *("--site", str(cuda_stubs.TORCH_NPU), "--", *PYTEST),
        "tests/npu/on_device/test_tokens.py",
    ],
}


@pytest.mark.parametrize("device", RUNS)
def test_engines_run_with_the_torch_that_0_33_pins(device):
    """Its CUDA build, without CUDA; on the emulated card with the torch_npu of its number."""
    cuda_stubs.ensure_made()
    paths = {
        "PYTHONPATH": (cuda_stubs.TORCH, ROOT, ROOT / "emulator"),
        "LD_LIBRARY_PATH": (cuda_stubs.STUBS, *filter(None, [os.getenv("LD_LIBRARY_PATH")])),
    }
    environment = {variable: os.pathsep.join(map(str, each)) for variable, each in paths.items()}
    environment["NPU_PREP_DEVICE"] = device
    done = subprocess.run(
        RUNS[device], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
