"""Commands on emulated NPUs, and whether these can run here."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch

from ascend_emulator.build import is_cuda_build


def why_no_emulator() -> str:
    """Reason to skip tests of the emulated runtime, empty where it runs."""
    beside = Path(sys.prefix) / "npu-emulator" / "torch_npu"
    if not beside.is_dir() and importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed: pip install --no-deps torch_npu==2.13.0"
    if is_cuda_build(Path(torch.__file__).parent):
        return "torch is a CUDA build, with which torch_npu does not load"
    return ""


ROOT = Path(__file__).parents[2]


def import_path(*first: Path) -> str:
    """Value of ``PYTHONPATH`` by which these folders come first, then this tree's packages."""
    return os.pathsep.join(map(str, [*first, ROOT, ROOT / "emulator"]))


def run(
    command: list[str], timeout: float = 600, given: str | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """Run a command at the root of the project; `given` is its standard input."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        input=given,
    )


def emulate(
    *command: str,
    options: tuple[str, ...] = (),
    timeout: float = 600,
    given: str | None = None,
    **environment: str,
) -> subprocess.CompletedProcess:
    """Run Python with arguments on emulated devices, where hazards are errors."""
    cli = [sys.executable, "-m", "ascend_emulator", "--hazards", "error", *options]
    environment = {"NPU_PREP_DEVICE": "npu", **environment}
    return run([*cli, "--", sys.executable, *command], timeout, given, **environment)
