"""A bound of the memory that a step takes beside weights and KV cache, for contexts of any length.

The step that vLLM measures at start-up has no context, so its attention reads nothing. What
attention takes beyond it doesn't depend on the length of a prompt: a mask of constant size or dense
masks within their budget, and the working memory of kernels, which work piece by piece.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_npu_prep.attention.kernels.latent import LatentShape
from vllm_npu_prep.config import Decisions, decisions_of
from vllm_npu_prep.device.cpu import huge_page_bytes
from vllm_npu_prep.prep.mask import COMPRESSED_MASK_SIZE, MaskForm

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PROCESS_BYTES = 96 << 20
"""The bytes that a step on the CPU fallback may add to resident memory beside tensors: 32 MiB of
Python's objects, and 64 MiB that glibc keeps at the end of its heap (twice its largest mmap
threshold).
"""
PROCESS_BYTES_A_TOKEN = 256
"""The bytes that it may add for each token of the longest request: lists of ids, 40 bytes a token
each, which client, scheduler and runner keep of it. 128k tokens took 139 bytes each beside
`PROCESS_BYTES`.
"""


class StepBound(NamedTuple):
    """The most bytes that a step takes, in three parts."""

    measured: int  # by the largest step, which has no contexts
    attention: int  # masks, and the working memory of kernels
    process: int  # of this process beside tensors

    @property
    def total(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        total, *parts = (f"{-(-size // (1 << 20)):,} MiB" for size in (self.total, *self))
        measured, attention, process = parts
        return (
            f"Memory: beside weights and KV cache, a step takes at most {total} with contexts of "
            f"any length ({measured} without any, measured; masks and attention {attention}; the "
            f"process itself {process})."
        )


def step_bound(
    vllm_config: "VllmConfig",
    builders: Iterable[Any],  # the metadata builders of its attention layers
    measured: int,  # what the largest step took, in bytes
    computes_on_host: bool,
) -> StepBound:
    """Return the bound of an engine's steps."""
    splits = [split for b in builders if (split := getattr(b, "latent", None)) is not None]
    model: Any = vllm_config.model_config  # whose dtype is resolved by now
    attention = attention_bytes(
        vllm_config.compilation_config.static_forward_context.values(),
        decisions_of(vllm_config),
        model.dtype.itemsize,
        model.max_model_len,
        max((split.workspace_tokens for split in splits), default=0),
        vllm_config.scheduler_config.max_num_batched_tokens,
    )
    process = process_bytes(model.max_model_len) if computes_on_host else 0
    return StepBound(measured, attention, process)


def process_bytes(max_model_len: int) -> int:
    """Return the bytes that a step on the CPU fallback may add beside tensors.

    The heap ends somewhere in a huge page, which the kernel may make resident as a whole.
    """
    return PROCESS_BYTES + huge_page_bytes() + PROCESS_BYTES_A_TOKEN * max_model_len


def attention_bytes(
    # vLLM's layers; those without a cache of K and V or of latent rows don't count
    layers: Iterable[Any],
    decisions: Decisions,
    itemsize: int,  # the bytes of an element of the cache
    max_seq_len: int,  # the length of the longest sequence, in tokens
    chunk_rows: int,  # the most latent rows that are gathered at once
    num_tokens: int,  # the most tokens of a step
) -> int:
    """Return the most memory, in bytes, that attention takes beside its inputs and results."""
    working, choosing = [0], [0]
    for layer in layers:
        if hasattr(layer, "choosing_bytes"):  # `vllm_npu_prep.attention.sparse.IndexKeys`
            choosing.append(layer.choosing_bytes(max_seq_len, num_tokens))
        impl = getattr(layer, "impl", None)
        kernels = getattr(impl, "kernels", None)
        shape = getattr(impl, "layer_shape", None) or getattr(impl, "shape", None)
        if kernels is None or shape is None:
            continue
        more = (chunk_rows,) if isinstance(shape, LatentShape) else ()
        working.append(kernels.working_bytes(shape, itemsize, max_seq_len, *more))
    is_constant = decisions.mask_form is MaskForm.COMPRESSED
    masks = COMPRESSED_MASK_SIZE**2 if is_constant else decisions.dense_bytes
    return masks + max(working) + max(choosing)
