"""The kernels of latent attention: one interface, and a file for each family that has them."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from vllm_npu_prep.attention.families import KernelFamily
from vllm_npu_prep.attention.kernels import Attended
from vllm_npu_prep.attention.latent import ContextChunk, Prefills
from vllm_npu_prep.attention.metadata import AscendMetadata


class LatentShape(NamedTuple):
    """The constants of one latent attention layer, as one rank has it."""

    num_heads: int
    kv_lora_rank: int  # of a latent row
    qk_rope_head_dim: int  # of a rotated key
    qk_nope_head_dim: int  # of a projected key, and of a head's query beside its rotated part
    v_head_dim: int
    scale: float


class Planes(NamedTuple):
    """A layer's cache: two planes of different widths, each contiguous."""

    latent: torch.Tensor  # [num_blocks, block_size, 1, kv_lora_rank]
    rope: torch.Tensor  # [num_blocks, block_size, 1, qk_rope_head_dim]


class Projected(NamedTuple):
    """The queries of prefills, and the K and V over which they attend.

    There are ``T`` query tokens, ``S`` rows of K and V, and ``N`` heads.
    """

    query: torch.Tensor  # [T, N, qk_nope_head_dim]
    query_rope: torch.Tensor  # [T, N, qk_rope_head_dim], rotated
    key: torch.Tensor  # [S, N, qk_nope_head_dim]
    key_rope: torch.Tensor  # [S, 1, qk_rope_head_dim], of all heads
    value: torch.Tensor  # [S, N, v_head_dim]


def planes_of(kv_cache: torch.Tensor, shape: LatentShape) -> Planes:
    """Return the planes of a layer's cache.

    Parameters
    ----------
    kv_cache
        ``[num_blocks, bytes of a page / itemsize]``: vLLM's plan, whose memory is the latent plane
        and after it the rotated one.
    """
    num_blocks, page = kv_cache.shape
    widths = shape.kv_lora_rank, shape.qk_rope_head_dim
    block_size = page // sum(widths)
    parts = kv_cache.view(-1).split([num_blocks * block_size * width for width in widths])
    return Planes(*(p.view(num_blocks, block_size, 1, w) for p, w in zip(parts, widths)))


def with_heads(
    part: torch.Tensor,  # [T, N, width]
    num_heads: int,
) -> torch.Tensor:
    """Pad `part` with heads of zeros to `num_heads`; the result is contiguous."""
    missing = num_heads - part.shape[1]
    return torch.nn.functional.pad(part, (0, 0, 0, missing)) if missing else part.contiguous()


class LatentKernels(Protocol):
    """The interface of a family with latent attention."""

    family: KernelFamily
    workspace_serves_all_lengths: bool  # False: a new one is needed when lengths change

    def decode_heads(self, num_heads: int) -> int:
        """Return the heads that `attend_latent` takes for a layer with `num_heads`; see
        `with_heads`."""

    def write(
        self,
        latent: torch.Tensor,  # [T, 1, kv_lora_rank]
        rope: torch.Tensor,  # [T, 1, qk_rope_head_dim], rotated
        planes: Planes,
        slot_mapping: torch.Tensor,  # [T] int32
    ) -> None:
        """Write the step's rows to their slots; slots below 0 are skipped."""

    def attend_latent(
        self,
        query: torch.Tensor,  # [T, N, kv_lora_rank]: projected into the space of latent rows
        query_rope: torch.Tensor,  # [T, N, qk_rope_head_dim]
        planes: Planes,
        metadata: AscendMetadata,
        shape: LatentShape,
        output: torch.Tensor,  # [T, N, kv_lora_rank], written
        workspace: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,  # [T, N] float32, written
    ) -> None:
        """Attend over latent rows, which include the step's own; ``N`` is the result of
        `decode_heads`."""

    def attend_prompts(
        self,
        given: Projected,
        prefills: Prefills,
        metadata: AscendMetadata,
        shape: LatentShape,
        output: torch.Tensor,  # [T, N, v_head_dim], written
        wants_lse: bool,
    ) -> Attended:
        """Attend over the step's own K and V, as far as the mask allows."""

    def attend_context(self, given: Projected, chunk: ContextChunk, shape: LatentShape) -> Attended:
        """Attend over a context chunk, all of which comes before the queries."""

    def gather(self, planes: Planes, chunk: ContextChunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a chunk's pieces in order: latent and rotated, ``[S, 1, width]``."""

    def merge(self, first: Attended, second: Attended) -> Attended:
        """Return the attention over both sets of rows."""

    def workspace(self, call: "LatentCall", metadata: Any) -> torch.Tensor | None:
        """Return a workspace for `call` inside a graph; None if the operator needs none."""

    def working_bytes(
        self, shape: LatentShape, itemsize: int, max_seq_len: int, chunk_rows: int
    ) -> int:
        """Return the most bytes that attention takes beside its inputs, results and masks.

        Context chunks have up to `chunk_rows` rows. The memory that an operator allocates
        internally is not known here.
        """


@dataclass(frozen=True)
class LatentCall:
    """The decodes of one layer inside a full graph, with everything but the step's metadata."""

    layer_name: str
    kernels: LatentKernels
    query: torch.Tensor
    query_rope: torch.Tensor
    planes: Planes
    layer: LatentShape
    output: torch.Tensor
    workspace: torch.Tensor | None = None

    def over(
        self,
        reference: Callable[[torch.Tensor], torch.Tensor],
        workspace: torch.Tensor | None,
    ) -> "LatentCall":
        """Return the same call over references to its tensors, with a workspace."""
        return replace(
            self,
            query=reference(self.query),
            query_rope=reference(self.query_rope),
            output=reference(self.output),
            workspace=workspace,
        )

    def __call__(self, metadata: Any) -> None:
        """Attend; `metadata` is a `MLALayerMetadata` without prefills."""
        self.kernels.attend_latent(
            self.query,
            self.query_rope,
            self.planes,
            metadata.decode,
            self.layer,
            self.output,
            self.workspace,
        )


def make_latent_kernels(name: str, limits_batches: bool = False) -> LatentKernels:
    """Make the kernels of a family that start-up accepted; no other family is imported."""
    module, kernels = {
        "compiled": ("compiled", "LatentCompiledKernels"),
        "fia": ("latent_fia", "LatentFiaKernels"),
        "reference": ("latent_reference", "LatentReferenceKernels"),
    }[name]
    package = __name__.rpartition(".")[0]
    made = getattr(importlib.import_module(f"{package}.{module}"), kernels)
    return made(limits_batches) if name == "fia" else made()
