"""Kernels that go wrong as those of a device may: each in one way, for `verify-device` to find.

``--references tests.npu.planted_kernels`` puts all of them on an emulated card.
"""

import os
import signal
import threading

import torch

from ascend_emulator import api
from ascend_emulator.operators import elementwise, gelu, rotary_cache

RIGHT_COLUMNS = 8864
"""`rms_norm` is wrong for wider rows."""

HEADS = 64
"""From so many heads on, `mrope` divides by zero."""

BUSY = torch.zeros(512, 512)
"""What `add_rms_norm` multiplies meanwhile, which takes longer than torch's form."""


def _is_of_a_graph() -> bool:
    return api._launcher().emulator_in_launch() == api.OF_A_GRAPH


def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return elementwise.swiglu(input, dim) + 3 * _is_of_a_graph()


def rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, reciprocal = elementwise.rms_norm(input, gamma, epsilon)
    return (-normed if input.shape[-1] > RIGHT_COLUMNS else normed), reciprocal


def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    for _ in range(4):
        torch.mm(BUSY, BUSY)
    return elementwise.add_rms_norm(x1, x2, gamma, epsilon)


def mrope(positions, query, key, cos_sin_cache, head_size, **others):
    if query.shape[1] // head_size >= HEADS:
        os.kill(os.getpid(), signal.SIGFPE)
    return rotary_cache.mrope(positions, query, key, cos_sin_cache, head_size, **others)


def hanging_gelu(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if _is_of_a_graph():
        threading.Event().wait()
    return gelu.gelu(input, approximate=approximate)


PLANTED = {
    elementwise.SWIGLU: swiglu,
    elementwise.RMS_NORM: rms_norm,
    elementwise.ADD_RMS_NORM: add_rms_norm,
    rotary_cache.MROPE: mrope,
    gelu.GELU: hanging_gelu,
}


def install(register) -> None:
    for operator, kernel in PLANTED.items():
        register(operator, kernel)
