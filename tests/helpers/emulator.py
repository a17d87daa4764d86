"""Whether emulated NPUs can run here."""

import importlib.util
import sys
from pathlib import Path

import torch

from vllm_npu_prep.emulator.build import is_cuda_build


def why_no_emulator() -> str:
    """Reason to skip tests of the emulated runtime, empty where it runs."""
    beside = Path(sys.prefix) / "npu-emulator" / "torch_npu"
    if not beside.is_dir() and importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed: pip install --no-deps torch_npu==2.13.0"
    if is_cuda_build(Path(torch.__file__).parent):
        return "torch is a CUDA build, beside which torch_npu does not load"
    return ""
