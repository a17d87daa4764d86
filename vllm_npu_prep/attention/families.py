"""What each kernel family can do.

The module doesn't import vLLM, because the platform reads it while vLLM loads.
"""

from dataclasses import dataclass, field, replace

import torch

from vllm_npu_prep.prep.mask import MaskForm, MaskKind

DEFAULT_BLOCK_SIZE = 128
"""The block size if the user gives none; Ascend kernels are made for it."""

KV_CONNECTORS = (
    "ExampleConnector",
    "OffloadingConnector",
    "MooncakeConnector",
    "MooncakeStoreConnector",
)
"""The KV connectors of vLLM that read planes, as all families have them."""


@dataclass(frozen=True)
class KernelFamily:
    """What a kernel family can do: the only source of the checks at start-up.

    Attributes
    ----------
    block_size_multiple, max_block_size
        Block sizes, in tokens, are multiples of the first, up to the second. For ``fia`` a release
        of CANN may take fewer (`vllm_npu_prep.attention.fused_releases`).
    head_size_multiple, max_head_size
        The same for head sizes.
    mask_values
        The masked value of dense masks, by dtype of the model and kind of mask; the value of other
        entries is always 0. Empty for bool masks, in which True means masked.
    """

    name: str  # the value of {"npu_prep": {"attention": name}}
    device_type: str  # the device that runs it
    mask_forms: tuple[MaskForm, ...]  # the forms of masks that it takes, the default first
    dtypes: tuple[torch.dtype, ...]  # dtypes of query, key, value and cache
    block_size_multiple: int
    max_block_size: int
    head_size_multiple: int
    max_head_size: int
    logits_soft_cap: bool
    kv_sharing: bool
    mla: bool  # whether it computes latent attention
    sparse: bool  # whether it computes latent attention over chosen positions
    lse: bool  # whether it returns the log-sum-exp, by which parts of a context are merged
    # KV connectors of vLLM that can read its cache (`vllm_npu_prep.attention.kv_transfer`)
    kv_connectors: tuple[str, ...] = ()
    mask_values: dict[torch.dtype, dict[MaskKind, float]] = field(default_factory=dict)

    @property
    def mask_itemsize(self) -> int:
        return max((dtype.itemsize for dtype in self.mask_values), default=1)

    def mask_values_of(self, dtype: torch.dtype) -> dict[MaskKind, float] | None:
        """Return the values in masks for queries of this dtype; None: masks are bool.

        Raises
        ------
        KeyError
            If the family has values, but none for this dtype.
        """
        return self.mask_values[dtype] if self.mask_values else None


COMPILED = KernelFamily(
    name="compiled",
    device_type="cpu",
    mask_forms=(MaskForm.COMPRESSED,),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    block_size_multiple=1,
    max_block_size=1 << 30,
    head_size_multiple=1,
    max_head_size=576,  # latent rows of DeepSeek: 512 and a rotated key of 64
    logits_soft_cap=True,
    kv_sharing=True,
    mla=True,
    sparse=True,
    lse=True,
    kv_connectors=KV_CONNECTORS,
)

REFERENCE = replace(COMPILED, name="reference", mask_forms=(MaskForm.DENSE, MaskForm.COMPRESSED))

FIA = KernelFamily(
    name="fia",
    device_type="npu",
    mask_forms=(MaskForm.COMPRESSED,),
    dtypes=(torch.bfloat16, torch.float16),
    block_size_multiple=16,
    max_block_size=1024,
    head_size_multiple=16,
    max_head_size=256,
    logits_soft_cap=False,
    kv_sharing=True,
    mla=True,
    sparse=True,
    lse=True,
    kv_connectors=KV_CONNECTORS,
)

ATB = KernelFamily(
    name="atb",
    device_type="npu",
    mask_forms=(MaskForm.DENSE,),
    dtypes=(torch.bfloat16, torch.float16),
    block_size_multiple=16,
    max_block_size=128,
    head_size_multiple=16,
    max_head_size=128,  # block size times head size is at most 128 * 128
    logits_soft_cap=False,
    kv_sharing=False,
    mla=False,
    sparse=False,
    lse=False,
    kv_connectors=KV_CONNECTORS,
    # In bfloat16, flash attention takes its mask as flags; splitfuse adds its mask to the scores.
    mask_values={
        torch.float16: {MaskKind.MATRIX: float("-inf"), MaskKind.ROWS: float("-inf")},
        torch.bfloat16: {MaskKind.MATRIX: 1.0, MaskKind.ROWS: -10000.0},
    },
)

KERNEL_FAMILIES = {family.name: family for family in (COMPILED, REFERENCE, FIA, ATB)}
"""All families by name; ``auto`` takes the first one of a device type that takes the masks."""
