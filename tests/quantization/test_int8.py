"""Products of int8 on the CPU have exact sums, whatever instructions a processor has."""

import os
import subprocess
import sys

import pytest
import torch

from ascend_emulator.operators import matmul
from vllm_npu_prep.quantization.int8 import TorchInt8Linear

SUMS = """
import torch
from ascend_emulator.operators import matmul
from vllm_npu_prep.quantization.int8 import TorchInt8Linear
largest = torch.full((64, 64), 127, dtype=torch.int8)
layer = TorchInt8Linear(largest, torch.ones(64))
for sums in (layer.sums(largest, largest), matmul.exact_sums(largest, largest)):
    print((sums == 64 * 127**2).all().item())
"""


def test_sums_are_exact_without_instructions_for_int8():
    """oneDNN then adds pairs of products in int16, and cuts off what does not fit."""
    old = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    ran = subprocess.run([sys.executable, "-c", SUMS], env=old, capture_output=True, text=True)
    assert ran.stdout.split() == ["True", "True"], ran.stderr


@pytest.mark.parametrize("columns", [16, 1024, 1025, 4096])
@pytest.mark.parametrize("by_torch", [True, False])
def test_sums_are_exact(by_torch, columns, seed, monkeypatch):
    """Numbers of one sign have the largest sums."""
    if by_torch and not matmul.torch_sums_exactly():
        pytest.skip("torch's product of int8 is not exact on this processor")
    monkeypatch.setattr(matmul, "torch_sums_exactly", lambda: by_torch)
    random = torch.Generator().manual_seed(seed)
    rows, weight = (
        torch.randint(64, 128, shape, dtype=torch.int8, generator=random)
        for shape in ((5, columns), (columns, 24))
    )
    layer = TorchInt8Linear(weight, torch.ones(24), sums_exactly=by_torch)
    expected = rows.long() @ weight.long()
    assert torch.equal(layer.sums(rows, weight).long(), expected)
    assert torch.equal(matmul.exact_sums(rows, weight).long(), expected)
