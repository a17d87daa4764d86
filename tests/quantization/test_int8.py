"""Products of int8 on the CPU: sums are exact, whatever instructions a processor has."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from vllm_npu_prep.quantization.int8 import exact_sums

SUMS = """
import torch
from ascend_emulator.operators import matmul
from vllm_npu_prep.quantization import int8
rows, columns = (torch.full(shape, 127, dtype=torch.int8) for shape in ((3, 2500), (2500, 8)))
for module in (int8, matmul):
    assert (module.exact_sums(rows, columns) == 2500 * 127**2).all(), module
print(int8.torch_sums_exactly())
"""


def test_sums_are_exact_without_instructions_for_int8():
    """oneDNN then adds pairs of products in int16, and cuts off what does not fit."""
    old = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-c", SUMS]
    ran = subprocess.run(command, env=old, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(platform.machine() != "x86_64")]


@pytest.mark.parametrize("columns", [16, 1024, 1025, 4096])
def test_sums_of_random_levels_are_exact(columns, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = (5, columns), (columns, 24)
    x, weight = (torch.randint(-128, 128, each, generator=generator) for each in shapes)
    assert torch.equal(exact_sums(x.to(torch.int8), weight.to(torch.int8)).long(), x @ weight)
