"""A bound of the memory that attention takes beyond the profiled step, for any length.

The step that vLLM measures at start-up has no context, so its attention reads nothing. What real
steps take beyond it doesn't depend on the length of a prompt: a mask of constant size or dense
masks within their budget, and the working memory of kernels, which work piece by piece.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm_npu_prep.attention.kernels.latent import LatentShape
from vllm_npu_prep.prep.mask import COMPRESSED_MASK_SIZE, MaskForm

if TYPE_CHECKING:
    from vllm_npu_prep.config import Decisions


def attention_bytes(
    layers: Iterable[Any],
    decisions: "Decisions",
    itemsize: int,
    max_seq_len: int,
    chunk_rows: int,
) -> int:
    """Return the most memory, in bytes, that attention takes beside its inputs and results.

    Parameters
    ----------
    layers
        vLLM's layers; those without a cache of K and V or of latent rows don't count.
    itemsize
        The bytes of an element of the cache.
    max_seq_len
        The length of the longest sequence, in tokens.
    chunk_rows
        The most latent rows that are gathered at once.
    """
    working = [0]
    for layer in layers:
        impl = getattr(layer, "impl", None)
        kernels = getattr(impl, "kernels", None)
        shape = getattr(impl, "layer_shape", None) or getattr(impl, "shape", None)
        if kernels is None or shape is None:
            continue
        more = (chunk_rows,) if isinstance(shape, LatentShape) else ()
        working.append(kernels.working_bytes(shape, itemsize, max_seq_len, *more))
    is_constant = decisions.mask_form is MaskForm.COMPRESSED
    masks = COMPRESSED_MASK_SIZE**2 if is_constant else decisions.dense_bytes
    return masks + max(working)
