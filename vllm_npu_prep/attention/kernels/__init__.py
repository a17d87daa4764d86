"""Kernel families behind one small interface: one file for each."""

import importlib
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_npu_prep.attention.families import KernelFamily
from vllm_npu_prep.attention.metadata import AscendMetadata


@dataclass(frozen=True)
class LayerShape:
    """The constants of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    logits_soft_cap: float | None = None


class AttentionKernels(Protocol):
    """The verbs of a kernel family."""

    family: KernelFamily

    def write_kv(
        self,
        key: torch.Tensor,  # [num_actual_tokens, num_kv_heads, head_size]
        value: torch.Tensor,  # [num_actual_tokens, num_kv_heads, head_size]
        kv_cache: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_size]
        slot_mapping: torch.Tensor,  # [num_actual_tokens]
    ) -> None:
        """Write K and V of the step's tokens to their slots."""

    def attend(
        self,
        query: torch.Tensor,  # [num_actual_tokens, num_heads, head_size]
        key: torch.Tensor | None,  # [num_actual_tokens, num_kv_heads, head_size]
        value: torch.Tensor | None,  # [num_actual_tokens, num_kv_heads, head_size]
        kv_cache: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_size]
        metadata: AscendMetadata,
        layer: LayerShape,
        output: torch.Tensor,  # [num_actual_tokens, num_heads, head_size], written
    ) -> None:
        """Attend; K and V of the step are in the cache already and also given fresh."""


def make_kernels(name: str) -> AttentionKernels:
    """Kernels of a family that start-up accepted; imports that family only."""
    module, kernels = {
        "reference": ("reference", "ReferenceKernels"),
        "fia": ("fia", "FiaKernels"),
        "atb": ("atb", "AtbKernels"),
    }[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), kernels)()
