"""How large blocks are in an engine whose model has recurrent states, and why."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from vllm_npu_prep.attention.fused_calls import block_size_of


def find_state_page(vllm_config: VllmConfig) -> "RecurrentStatePage | None":
    """Return how blocks are sized for a model with recurrent states; None for other models.

    The block size of `vllm_config` is the one asked for, or the default.
    """
    model = vllm_config.model_config
    if not model.is_hybrid:
        return None
    assert isinstance(model.dtype, torch.dtype)  # resolved by now
    model_class: Any
    model_class, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    spec = MambaSpec(
        shapes=model_class.get_mamba_state_shape_from_config(vllm_config),
        dtypes=model_class.get_mamba_state_dtype_from_config(vllm_config),
        block_size=1,
    )
    token = FullAttentionSpec(
        block_size=1,
        num_kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    ).page_size_bytes
    asked = block_size_of(vllm_config)
    rule = max(state_bytes(spec))
    halves = -(-2 * rule // (asked * token))
    return RecurrentStatePage(asked, asked * halves, token, state_bytes(spec))


@dataclass(frozen=True)
class RecurrentStatePage:
    """A block with room for a recurrent state in its halves, and for K and V of whole tokens."""

    asked: int  # the block size that was asked for, or the default
    block_size: int  # the smallest multiple of it whose K has room for the larger part of a state
    token_bytes: int  # the bytes of K and V of one token in one layer
    parts: list[int]  # the bytes of both parts of a state, the convolution's and the recurrence's

    @property
    def is_exact(self) -> bool:
        """Return whether the larger part of a state fills half a block, as NPUs need it."""
        return 2 * max(self.parts) == self.page_bytes

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.token_bytes

    def describe(self) -> str:
        """Return the line that tells at start-up what blocks hold, and why they have their size."""
        state, page = sum(self.parts), self.page_bytes
        larger = "rule" if self.parts[1] == max(self.parts) else "convolution"
        why = f"asked for: {self.asked}; " if self.block_size != self.asked else ""
        return (
            f"a recurrent state of {state:,} bytes in a block of {self.block_size} tokens "
            f"({page:,} bytes; {why}half a block holds the {larger}'s {max(self.parts):,} bytes)"
        )


def state_bytes(spec: MambaSpec) -> list[int]:
    """Return the bytes of each part of a state: the convolution's inputs, and the recurrence's
    state."""
    return [prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes)]
