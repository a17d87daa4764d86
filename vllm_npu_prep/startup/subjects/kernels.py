"""What a device and its kernel family can't do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_npu_prep.attention.families import KernelFamily
from vllm_npu_prep.config import SECTION
from vllm_npu_prep.device import CPU_KIND, device_name, free_memory
from vllm_npu_prep.ranks import ranks_on_host
from vllm_npu_prep.startup.asked import Asked
from vllm_npu_prep.startup.refusal import Refusal, Subject
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm.config import ModelConfig

NZ_CACHE_CHIPS = "Ascend310P"
"""Chips whose kernels take KV caches in the NZ layout only."""

DTYPE_NAMES = {"torch.float32": "float32", "torch.bfloat16": "bfloat16", "torch.float16": "float16"}


@dataclass(frozen=True)
class Need:
    """Something that models may need and a kernel family may lack."""

    id: str
    name: str
    of_model: Callable[["ModelConfig"], object]
    of_family: Callable[[KernelFamily], bool]
    needed: str  # the missing feature
    remedy: str = "use the CPU fallback"

    def is_lacking(self, asked: Asked) -> bool:
        """Whether the model needs it and the family lacks it."""
        return self in lacking(asked.model, asked.family)


NEEDS = (
    Need(
        "logits-soft-cap",
        "logits soft cap",
        lambda model: getattr(model.hf_text_config, "attn_logit_softcapping", None),
        lambda family: family.logits_soft_cap,
        "its operators take no cap",
    ),
    Need(
        "kv-sharing",
        "sharing of K and V between layers",
        lambda model: getattr(model.hf_text_config, "num_kv_shared_layers", None),
        lambda family: family.kv_sharing,
        "it needs mask rows for prompts too",
        f'use {{{{"{SECTION}": {{{{"attention": "fia"}}}}}}}}, or the CPU fallback',
    ),
    Need(
        "experts",
        "a mixture of experts",
        lambda model: model.is_moe,
        lambda family: family.experts,
        "it needs npu_moe_gating_top_k, npu_moe_init_routing_v2 and npu_grouped_matmul",
    ),
    Need(
        "mla",
        "MLA attention",
        lambda model: model.use_mla,
        lambda family: family.mla,
        "it needs npu_fused_infer_attention_score with query_rope and key_rope, and a cache of "
        "latent rows",
    ),
)


def lacking(model: "ModelConfig", family: KernelFamily) -> list[Need]:
    """What the model needs and the family lacks."""
    return [need for need in NEEDS if need.of_model(model) and not need.of_family(family)]


def does_not_fit(head_size: int, family: KernelFamily) -> bool:
    """Whether a family has no kernels for heads of that size."""
    return head_size > family.max_head_size or bool(head_size % family.head_size_multiple)


def _cache_bytes(asked: Asked) -> int:
    """Bytes of host memory that the KV caches of this host's ranks are to take."""
    each = asked.config.cache_config.kv_cache_memory_bytes or 0
    return each * ranks_on_host(asked.config.parallel_config) if asked.kind == CPU_KIND else 0


def _cache_words(asked: Asked) -> dict[str, object]:
    return {
        "bytes": f"{asked.config.cache_config.kv_cache_memory_bytes:,}",
        "ranks": counted(ranks_on_host(asked.config.parallel_config), "rank"),
        "needed": f"{_cache_bytes(asked):,}",
        "free": f"{free_memory():,}",
    }


def _has_no_triton(asked: Asked) -> bool:
    """Triton's kernels need a device that one of its drivers finds; the CPU fallback has none."""
    from vllm.triton_utils import HAS_TRITON

    return not HAS_TRITON or asked.kind == CPU_KIND


def _triton_words(asked: Asked) -> dict[str, object]:
    from vllm.triton_utils import HAS_TRITON

    missing = "vLLM finds none that works", "the CPU fallback has none"
    return {"missing": missing[HAS_TRITON]}


LIMITS = (
    Refusal(
        "nz-cache",
        lambda c: device_name(c.kind.device_type).startswith(NZ_CACHE_CHIPS),
        "NPUs of type {chip}",
        "Ascend310P keeps its KV cache in the NZ layout, which is not supported",
        "use an Ascend910B or Ascend910_93 device",
        lambda c: {"chip": device_name(c.kind.device_type)},
    ),
    Refusal(
        "dtype",
        lambda c: c.model.dtype not in c.family.dtypes,
        "--dtype {dtype}",
        "kernel family {family} takes {dtypes}",
        "give one of those; the CPU fallback takes float32, too",
        lambda c: {
            "dtype": c.model.dtype,
            "dtypes": ", ".join(DTYPE_NAMES[str(dtype)] for dtype in c.family.dtypes),
        },
    ),
    Refusal(
        "kv-cache-dtype",
        lambda c: (
            c.config.cache_config.cache_dtype not in ("auto", DTYPE_NAMES.get(str(c.model.dtype)))
        ),
        "--kv-cache-dtype {dtype}",
        "only auto is supported (the model's dtype)",
        "leave the flag out",
        lambda c: {"dtype": c.config.cache_config.cache_dtype},
    ),
    Refusal(
        "kv-cache-memory",
        lambda c: _cache_bytes(c) > free_memory(),
        "--kv-cache-memory-bytes {bytes}",
        "{ranks} on this host would take {needed} bytes, and {free} are free",
        "ask for less",
        _cache_words,
    ),
    Refusal(
        "block-size",
        lambda c: (
            c.config.cache_config.user_specified_block_size
            and c.block_size % c.family.block_size_multiple
        ),
        "--block-size {block_size}",
        "kernel family {family} takes multiples of {multiple}",
        "leave the flag out, for blocks of 128",
        lambda c: {"block_size": c.block_size, "multiple": c.family.block_size_multiple},
    ),
    Refusal(
        "attention-chunks-in-blocks",
        lambda c: (
            c.model.attention_chunk_size is not None and c.model.attention_chunk_size % c.block_size
        ),
        "--block-size {block_size}",
        "attention chunks of {chunk_size} tokens ({model}) have to be whole blocks",
        "give a block size that divides them",
        lambda c: {"block_size": c.block_size, "chunk_size": c.model.attention_chunk_size},
    ),
    Refusal(
        "head-size",
        lambda c: does_not_fit(c.model.get_head_size(), c.family),
        "head size {head_size} of {model}",
        "kernel family {family} takes multiples of {multiple} up to {largest}",
        "another family or the CPU fallback may take it",
        lambda c: {
            "head_size": c.model.get_head_size(),
            "multiple": c.family.head_size_multiple,
            "largest": c.family.max_head_size,
        },
    ),
    Refusal(
        "triton-kernels",
        lambda c: c.options.triton_kernels == "keep" and _has_no_triton(c),
        f'"{SECTION}.triton_kernels" = "keep"',
        "they need Triton on the device, and {missing}",
        'install triton-ascend on a host with NPUs, or use "replace"',
        _triton_words,
    ),
    *(
        Refusal(
            need.id,
            need.is_lacking,
            f"{need.name} of {{model}}",
            f"kernel family {{family}} has none ({need.needed})",
            need.remedy,
        )
        for need in NEEDS
    ),
)

SUBJECTS = (Subject("limits", LIMITS, verdict=""),)
