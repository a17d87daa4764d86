"""Engines with the torch that vLLM 0.33.0 pins: `make test-all` has this."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.resume.tree import ROOT
from vllm_npu_prep.compat.releases import OTHER_TORCH

VERSION = OTHER_TORCH["0.33.0"]
FOLDER = ROOT / ".cache" / f"torch-{VERSION}"
TORCH, TORCH_NPU = FOLDER / "torch", FOLDER / "torch_npu"
"""Folders for PYTHONPATH and for ``ascend-emulator --site``."""
PYTEST = [sys.executable, "-m", "pytest", "-q", "--brief"]
RUNS = {
    "cpu": [*PYTEST, "tests/engine/test_v2.py"],
    "npu": [
        *(sys.executable, "-m", "ascend_emulator", "--memory", "1G", "--delay", "equal"),
        *("--site", str(TORCH_NPU), "--", *PYTEST),
        "tests/npu/on_device/test_tokens.py",
    ],
}


@pytest.fixture(scope="module")
def other_torch() -> None:
    """Download and unpack torch and torch_npu, and make a CPU build of torch, unless it is done."""
    done = FOLDER / "done"
    if done.exists():
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    for package, folder in (("torch", TORCH), ("torch_npu", TORCH_NPU)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", FOLDER, f"{package}=={VERSION}"], check=True)
        (wheel,) = FOLDER.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(folder)
        wheel.unlink()
    subprocess.run([sys.executable, ROOT / "scripts/cuda_stubs.py", TORCH], check=True)
    done.touch()


@pytest.mark.usefixtures("other_torch")
@pytest.mark.parametrize("device", RUNS)
def test_engines_run_with_the_torch_that_0_33_pins(device):
    """Its CUDA build, without CUDA; on the emulated card with the torch_npu of its number."""
    paths = os.pathsep.join(map(str, (TORCH, ROOT, ROOT / "emulator")))
    environment = {"PYTHONPATH": paths, "NPU_PREP_DEVICE": device}
    done = subprocess.run(
        RUNS[device], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
