"""Engines with the torch that vLLM 0.33.0 pins: `make test-all` has this."""

import os
import subprocess
import sys

import pytest

from tests.resume.tree import ROOT
from vllm_npu_prep.compat.releases import OTHER_TORCH

VERSION = OTHER_TORCH["0.33.0"]
FOLDER = ROOT / ".cache" / f"torch-{VERSION}"
PYTEST = [sys.executable, "-m", "pytest", "-q", "--brief"]
RUNS = {
    "cpu": [*PYTEST, "tests/engine/test_v2.py"],
    "npu": [
        *(sys.executable, "-m", "ascend_emulator", "--memory", "1G", "--delay", "equal"),
        *("--site", str(FOLDER / "torch_npu"), "--", *PYTEST),
        "tests/npu/on_device/test_tokens.py",
    ],
}


@pytest.fixture(scope="module")
def torch():
    """Folder with its CUDA build, made one for CPUs; torch_npu is in a folder beside it."""
    for package in ("torch", "torch_npu"):
        if not (FOLDER / package).exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            target = ["--target", FOLDER / package, f"{package}=={VERSION}"]
            subprocess.run([*command, *target], check=True)
    command = [sys.executable, "scripts/cuda_stubs.py", FOLDER / "torch"]
    subprocess.run(command, cwd=ROOT, check=True)
    return FOLDER / "torch"


@pytest.mark.parametrize("device", RUNS)
def test_engines_run_with_the_torch_that_0_33_pins(torch, device):
    """On the emulated card with the torch_npu of its number."""
    paths = os.pathsep.join(map(str, (torch, ROOT, ROOT / "emulator")))
    environment = os.environ | {"PYTHONPATH": paths, "NPU_PREP_DEVICE": device}
    done = subprocess.run(RUNS[device], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
