"""The kernel families, with one small interface and one file for each family."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from vllm_npu_prep.attention.families import KernelFamily
from vllm_npu_prep.attention.metadata import AscendMetadata

KeyValue = tuple[torch.Tensor, torch.Tensor]
"""K and V of a step's tokens, each ``[num_attended_tokens, num_kv_heads, head_size]``."""


class Attended(NamedTuple):
    """Attention over some of the keys, with what is needed to merge it with attention over others.

    There are ``T`` tokens and ``H`` heads, whose values have the size ``D``.
    """

    output: torch.Tensor  # [T, H, D]
    lse: torch.Tensor  # [T, H] float32: log-sum-exp of the scores, base e; -inf if there was no key


@dataclass(frozen=True)
class LayerShape:
    """The constants of one attention layer, as one rank has it."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    logits_soft_cap: float | None = None


class AttentionKernels(Protocol):
    """The interface of a kernel family; `latent` has that of latent attention."""

    family: KernelFamily
    workspace_serves_all_lengths: bool  # False: a new one is needed when lengths change

    def write_kv(
        self,
        key: torch.Tensor,  # [num_attended_tokens, num_kv_heads, head_size]
        value: torch.Tensor,  # [num_attended_tokens, num_kv_heads, head_size]
        kv_cache: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_size]
        slot_mapping: torch.Tensor,  # [num_attended_tokens]
    ) -> None:
        """Write K and V of the step's tokens to their slots; slots below 0 are skipped."""

    def attend(
        self,
        query: torch.Tensor,  # [num_attended_tokens, num_heads, head_size]
        own: KeyValue | None,
        kv_cache: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_size]
        metadata: AscendMetadata,
        layer: LayerShape,
        output: torch.Tensor,  # [num_attended_tokens, num_heads, head_size], written
        workspace: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,  # [num_attended_tokens, num_heads] float32, written
    ) -> None:
        """Compute attention; `own`, K and V of the step, are in the cache already.

        If ``metadata.causal`` is False, every token attends to all tokens of its request: to those
        of this step, or, if `own` is None, to the first ``seq_lens`` rows of its blocks. `lse` gets
        the log-sum-exp of the scores, base e. In full graphs, padding tokens are included and
        attend to nothing.
        """

    def workspace(self, call: "AttentionCall", metadata: AscendMetadata) -> torch.Tensor | None:
        """Return a workspace for `call` inside a graph; None if the operator needs none."""

    def working_bytes(self, layer: LayerShape, itemsize: int, max_seq_len: int) -> int:
        """Return the most bytes that attention takes beside its inputs, results and masks.

        The memory that an operator allocates internally is not known here.
        """


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention inside a full graph, with everything but the step's metadata.

    It reads K and V from the cache: no full graph is captured for an attention state that reads the
    step's own.
    """

    layer_name: str
    kernels: AttentionKernels
    query: torch.Tensor
    kv_cache: torch.Tensor
    layer: LayerShape
    output: torch.Tensor
    workspace: torch.Tensor | None = None

    def over(
        self,
        reference: Callable[[torch.Tensor], torch.Tensor],
        workspace: torch.Tensor | None,
    ) -> "AttentionCall":
        """Return the same call over references to its tensors, with a workspace."""
        return replace(
            self,
            query=reference(self.query),
            output=reference(self.output),
            workspace=workspace,
        )

    def __call__(self, metadata: AscendMetadata) -> None:
        self.kernels.attend(
            self.query,
            None,
            self.kv_cache,
            metadata,
            self.layer,
            self.output,
            self.workspace,
        )


def make_kernels(name: str, limits_batches: bool = False) -> AttentionKernels:
    """Make the kernels of a family that start-up accepted; no other family is imported.

    `limits_batches` is that of `vllm_npu_prep.attention.fused_calls`, for ``fia``.
    """
    if name == "fia":
        return importlib.import_module(f"{__name__}.fia").FiaKernels(limits_batches)
    module, kernels = {
        "compiled": ("compiled", "CompiledKernels"),
        "reference": ("reference", "ReferenceKernels"),
        "atb": ("atb", "AtbKernels"),
    }[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), kernels)()


def warm_up(name: str, dtype: torch.dtype) -> None:
    """Load or compile the code of a family for models of this dtype."""
    if name == "compiled":
        importlib.import_module(f"{__name__}.compiled_loops").compile_loops(dtype)
