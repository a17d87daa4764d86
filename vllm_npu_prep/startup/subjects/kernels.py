"""Refusals of what a device, its CANN and its kernel family can't do."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_npu_prep.attention.families import ATB, DEFAULT_BLOCK_SIZE, FIA, KernelFamily
from vllm_npu_prep.attention.fused_calls import calls_of, head_sizes_of
from vllm_npu_prep.attention.fused_releases import (
    OLDEST,
    RELEASES,
    FusedCall,
    FusedRules,
    release_of,
)
from vllm_npu_prep.attention.latent_releases import (
    indexer_of,
    latent_layers_of,
    latent_refusal,
    sparse_refusal,
)
from vllm_npu_prep.config import SECTION
from vllm_npu_prep.device import CPU_KIND, NPU_KIND, device_name, free_memory
from vllm_npu_prep.quantization.formats import operators_of
from vllm_npu_prep.ranks import ranks_on_host
from vllm_npu_prep.startup.asked import RequestedEngine
from vllm_npu_prep.startup.refusal import Refusal, Subject, words_of_functions
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm.config import ModelConfig

NZ_CACHE_CHIPS = "Ascend310P"
"""Chips whose kernels take KV caches in the NZ layout only."""

OF_LATENT_ROWS = (
    "npu_fused_infer_attention_score_v2",
    "npu_gather_pa_kv_cache",
    "npu_attention_update",
)
OF_CHOSEN_ROWS = (
    "npu_lightning_indexer",
    "npu_scatter_nd_update_",
    "npu_sparse_flash_attention",
)

KNOWN_CHIPS = re.compile(r"Ascend910(B\d|_93)")
"""The chips whose operators' demands are known, from reading CANN's code: A2 and A3. CANN calls a
first 910 ``Ascend910B``, and the chips of A5 ``Ascend950PR_...`` and ``Ascend950DT_...``, once
``Ascend910_95...``.
"""

DTYPE_NAMES = {"torch.float32": "float32", "torch.bfloat16": "bfloat16", "torch.float16": "float16"}


@dataclass(frozen=True)
class ModelNeed:
    """Something that models may need and a kernel family may lack."""

    id: str
    name: str
    of_model: Callable[["ModelConfig"], object]
    of_family: Callable[[KernelFamily], bool]
    needed: str  # the missing feature
    remedy: str = "use the CPU fallback"

    def is_lacking(self, asked: RequestedEngine) -> bool:
        return self in lacking(asked.model, asked.family)


NEEDS = (
    ModelNeed(
        "logits-soft-cap",
        "logits soft cap",
        lambda model: getattr(model.hf_text_config, "attn_logit_softcapping", None),
        lambda family: family.logits_soft_cap,
        "its operators take no cap",
    ),
    ModelNeed(
        "kv-sharing",
        "sharing of K and V between layers",
        lambda model: getattr(model.hf_text_config, "num_kv_shared_layers", None),
        lambda family: family.kv_sharing,
        "it needs mask rows for prompts too",
        f'use {{{{"{SECTION}": {{{{"attention": "fia"}}}}}}}}, or the CPU fallback',
    ),
    ModelNeed(
        "mla",
        "MLA attention",
        lambda model: model.use_mla,
        lambda family: family.mla,
        "it needs npu_fused_infer_attention_score with query_rope and key_rope, and a cache of "
        "latent rows",
        f'use {{{{"{SECTION}": {{{{"attention": "fia"}}}}}}}}, or the CPU fallback',
    ),
    ModelNeed(
        "sparse",
        "sparse attention",
        lambda model: hasattr(model.hf_text_config, "index_topk"),
        lambda family: family.sparse,
        "it needs an indexer, and attention over the rows that it chooses",
        f'use {{{{"{SECTION}": {{{{"attention": "fia"}}}}}}}}, or the CPU fallback',
    ),
)


def lacking(model: "ModelConfig", family: KernelFamily) -> list[ModelNeed]:
    return [need for need in NEEDS if need.of_model(model) and not need.of_family(family)]


def does_not_fit(head_size: int, family: KernelFamily) -> bool:
    """Tell whether a family has no kernels for heads of that size."""
    return head_size > family.max_head_size or bool(head_size % family.head_size_multiple)


def _takes_blocks(family: KernelFamily, block_size: int) -> bool:
    return not block_size % family.block_size_multiple and block_size <= family.max_block_size


class RefusedCall(NamedTuple):
    call: FusedCall
    model: str
    demand: str  # what the release takes


def _refused_call(asked: RequestedEngine) -> RefusedCall | None:
    """Return the first call, of the model or its drafter, that the installed release doesn't take.

    Head sizes and block sizes that no release takes are left to the refusals of their own.
    """
    models = [asked.model, asked.drafter] if asked.has_drafter else [asked.model]
    for model in models:
        for call in calls_of(model, asked.config.parallel_config, asked.block_size):
            fits = not does_not_fit(call.head_size, FIA) and _takes_blocks(FIA, call.block_size)
            demand = asked.fused_rules.refusal(call)
            if fits and demand is not None:
                return RefusedCall(call, model.model, demand)
    return None


def _fused_words(asked: RequestedEngine) -> dict[str, object]:
    refused = _refused_call(asked)
    assert refused is not None
    call, model, demand = refused
    heads = counted(call.num_heads, "head")
    if call.num_kv_heads != call.num_heads:
        heads += f" over {call.num_kv_heads} of K and V"
    return {
        "model": model,
        "heads": f"{heads} a rank" if asked.config.parallel_config.world_size > 1 else heads,
        "head_size": call.head_size,
        "dtype": DTYPE_NAMES[call.dtype],
        "block_size": call.block_size,
        "form": call.form.value,
        "release": asked.fused_rules.release.name,
        "demand": demand,
        "remedy": f"use {_what_works(asked)}",
    }


def _latent_demand(asked: RequestedEngine) -> str | None:
    layers = latent_layers_of(asked.config, asked.block_size)
    if layers is None:
        return None
    if asked.is_sparse:
        return sparse_refusal(layers, indexer_of(asked.text), asked.fused_rules)
    return latent_refusal(layers, asked.fused_rules)


def _what_works(asked: RequestedEngine) -> str:
    """Name the single changes with each of which every call would be taken."""
    parallel, rules = asked.config.parallel_config, asked.fused_rules
    models = [asked.model, asked.drafter] if asked.has_drafter else [asked.model]
    calls = [call for each in models for call in calls_of(each, parallel, asked.block_size)]

    def work(rules: FusedRules, **changes: Any) -> bool:
        return all(rules.refusal(replace(call, **changes)) is None for call in calls)

    found = []
    if work(rules, block_size=DEFAULT_BLOCK_SIZE):
        found.append(f"--block-size {DEFAULT_BLOCK_SIZE}")
    for dtype in FIA.dtypes:
        if str(dtype) != calls[0].dtype and work(rules, dtype=str(dtype)):
            found.append(f"--dtype {DTYPE_NAMES[str(dtype)]}")
    if all(_fits_atb(call) for call in calls) and not lacking(asked.model, ATB):
        found.append(f'{{"{SECTION}": {{"attention": "atb"}}}}')
    if rules.documented and work(replace(rules, documented=False)):
        found.append(f'{{"{SECTION}": {{"kernel_rules": "release"}}}}')
    newest = replace(rules, release=RELEASES[0])
    if rules.release is not RELEASES[0] and work(newest):
        found.append(f"CANN {RELEASES[0].name} or newer")
    return " or ".join([*found, "the CPU fallback"])


def _fits_atb(call: FusedCall) -> bool:
    return not does_not_fit(call.head_size, ATB) and _takes_blocks(ATB, call.block_size)


def _cache_bytes(asked: RequestedEngine) -> int:
    """Return the bytes of host memory for the KV caches of this host's ranks; 0 on NPUs."""
    each = asked.config.cache_config.kv_cache_memory_bytes or 0
    return each * ranks_on_host(asked.config.parallel_config) if asked.kind == CPU_KIND else 0


def _cache_words(asked: RequestedEngine) -> dict[str, object]:
    return {
        "bytes": f"{asked.config.cache_config.kv_cache_memory_bytes:,}",
        "ranks": counted(ranks_on_host(asked.config.parallel_config), "rank"),
        "needed": f"{_cache_bytes(asked):,}",
        "free": f"{free_memory():,}",
    }


def _has_no_triton(asked: RequestedEngine) -> bool:
    """Tell whether Triton can't run: its kernels need a device that one of its drivers finds.

    The CPU fallback has no such device.
    """
    from vllm.triton_utils import HAS_TRITON

    return not HAS_TRITON or asked.kind == CPU_KIND


def _triton_words(asked: RequestedEngine) -> dict[str, object]:
    from vllm.triton_utils import HAS_TRITON

    missing = "vLLM finds none that works", "the CPU fallback has none"
    return {"missing": missing[HAS_TRITON]}


def _needed_operators(asked: RequestedEngine) -> list[str]:
    found: list[str] = []
    if asked.uses_fused_operator:
        found += ["npu_scatter_pa_kv_cache"]
        if asked.is_sparse:
            found += OF_CHOSEN_ROWS
        else:
            found += OF_LATENT_ROWS if asked.model.use_mla else ["npu_fused_infer_attention_score"]
    return found + operators_of(asked.config)


def _chip(asked: RequestedEngine) -> dict[str, object]:
    return {"chip": device_name(asked.kind.device_type)}


LIMITS = (
    Refusal(
        "nz-cache",
        lambda c: device_name(c.kind.device_type).startswith(NZ_CACHE_CHIPS),
        "NPUs of type {chip}",
        "Ascend310P keeps its KV cache in the NZ layout, which is not supported",
        "use an Ascend910B or Ascend910_93 device",
        _chip,
    ),
    Refusal(
        "chip",
        lambda c: (
            c.kind == NPU_KIND
            and not device_name(c.kind.device_type).startswith(NZ_CACHE_CHIPS)
            and not KNOWN_CHIPS.match(device_name(c.kind.device_type))
        ),
        "NPUs of type {chip}",
        "what operators take is known of Ascend910B (A2) and Ascend910_93 (A3) only",
        "use one of them",
        _chip,
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
        "indexer-kv-dtype",
        lambda c: c.is_sparse and c.config.attention_config.indexer_kv_dtype != "auto",
        "indexer_kv_dtype {dtype} in --attention-config",
        "an indexer keeps its keys in the model's dtype",
        "leave the key out",
        lambda c: {"dtype": c.config.attention_config.indexer_kv_dtype},
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
            and not _takes_blocks(c.family, c.block_size)
        ),
        "--block-size {block_size}",
        "kernel family {family} takes multiples of {multiple} up to {largest}",
        "leave the flag out, for blocks of 128",
        lambda c: {
            "block_size": c.block_size,
            "multiple": c.family.block_size_multiple,
            "largest": c.family.max_block_size,
        },
    ),
    Refusal(
        "cann-release",
        lambda c: c.uses_fused_operator and release_of(c.cann) is None,
        "CANN {version}",
        "what its fused attention takes is not known before {oldest}",
        "install CANN {oldest} or newer",
        lambda c: {"version": c.cann, "oldest": OLDEST.name},
    ),
    Refusal(
        "cann-functions",
        lambda c: c.functions_missing_for(*_needed_operators(c)),
        "CANN {version}",
        "its libopapi has no {functions}, which {model} needs on NPUs",
        "install CANN {release} or newer, or use the CPU fallback",
        lambda c: words_of_functions(c, _needed_operators(c)),
    ),
    Refusal(
        "fused-attention",
        lambda c: c.uses_fused_operator and release_of(c.cann) is not None and _refused_call(c),
        "{heads} of size {head_size} ({dtype}, blocks of {block_size}) in {model}",
        "for {form}, fused attention of CANN {release} takes {demand}",
        "{remedy}",
        _fused_words,
    ),
    Refusal(
        "latent-attention",
        lambda c: c.uses_fused_operator and _latent_demand(c) is not None,
        "latent attention of {model}",
        "attention of CANN {release} takes {demand}",
        "use a model, --tensor-parallel-size, --block-size, --dtype or number of drafts that fits, "
        "or the CPU fallback",
        lambda c: {"release": c.fused_rules.release.name, "demand": _latent_demand(c)},
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
        lambda c: not c.model.use_mla and does_not_fit(max(head_sizes_of(c.model)), c.family),
        "head size {head_size} of {model}",
        "kernel family {family} takes multiples of {multiple} up to {largest}",
        "try another family, or the CPU fallback",
        lambda c: {
            "head_size": max(head_sizes_of(c.model)),
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
