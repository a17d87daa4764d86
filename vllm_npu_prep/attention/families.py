"""What each kernel family can do. The platform reads it while vLLM loads: it imports no vLLM."""

from dataclasses import dataclass

import torch

from vllm_npu_prep.prep.mask import MaskForm


@dataclass(frozen=True)
class KernelFamily:
    """What a kernel family can do; start-up checks read this, and nothing else decides.

    Attributes
    ----------
    name
        Value of ``{"npu_prep": {"attention": name}}``.
    device_type
        Device that runs it.
    mask_forms
        Forms that it takes, the default first.
    dtypes
        Dtypes of query, key, value and cache.
    block_size_multiple
        Block sizes are multiples of this, in tokens.
    head_size_multiple, max_head_size
        Head sizes it takes.
    mask_itemsize
        Bytes of one element of a dense mask.
    logits_soft_cap, sliding_window, non_causal
        Whether it has them.
    """

    name: str
    device_type: str
    mask_forms: tuple[MaskForm, ...]
    dtypes: tuple[torch.dtype, ...]
    block_size_multiple: int
    head_size_multiple: int
    max_head_size: int
    mask_itemsize: int
    logits_soft_cap: bool
    sliding_window: bool
    non_causal: bool


REFERENCE = KernelFamily(
    name="reference",
    device_type="cpu",
    mask_forms=(MaskForm.DENSE, MaskForm.COMPRESSED),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    block_size_multiple=1,
    head_size_multiple=1,
    max_head_size=512,
    mask_itemsize=1,
    logits_soft_cap=True,
    sliding_window=True,
    non_causal=True,
)

KERNEL_FAMILIES = {REFERENCE.name: REFERENCE}
"""Every family of this version by name."""
