"""How much memory attention takes beside what the largest step shows: a bound for every length.

The step that vLLM measures at start-up has no context, so its attention reads nothing. What real
steps take on top does not follow the length of a prompt: a mask of constant size, or dense ones
within their budget; and a piece of the work at a time (`KernelFamily` by `KernelFamily`).
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
    """Most memory that attention takes beside its inputs and results, in bytes.

    Parameters
    ----------
    layers
        vLLM's layers; those without a cache of K and V or of latent rows are passed over.
    decisions
        Of start-up.
    itemsize
        Of the cache's elements, in bytes.
    max_seq_len
        Longest sequence, in tokens.
    chunk_rows
        Most latent rows that are gathered at once.
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
