"""What is refused, by name and with a reason: by the device, its kernel family, this version."""

from typing import TYPE_CHECKING

from vllm_npu_prep.attention.families import KernelFamily
from vllm_npu_prep.config import SECTION, parse_config
from vllm_npu_prep.device import CPU_KIND, DeviceKind, device_name, free_memory
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.ranks import ranks_on_host, refuse_ranks_without_device, unsupported_ranks

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

NZ_CACHE_CHIPS = "Ascend310P"
"""Chips whose kernels take KV caches in the NZ layout only."""

CONNECTOR_MODULE = "vllm_npu_prep.kv_transfer"
"""Where vLLM finds the KV connectors that `KernelFamily.kv_connectors` names."""

DEFAULT_BLOCK_SIZE = 128
"""Block size unless the user gives one: what Ascend kernels are made for."""

DRAFT_MODEL_METHODS = ("draft_model", "eagle", "eagle3")
"""Speculative methods whose drafters are models of their own."""

MODALITIES = ("image", "video")
"""Kinds of multimodal input that were tried."""

STATE_LAYERS = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Layers with a state instead of K and V, by transformers' ``layer_types``. vLLM runs transformers'
code for an architecture that it does not know, and does not know it for a hybrid then."""

DTYPE_NAMES = {"torch.float32": "float32", "torch.bfloat16": "bfloat16", "torch.float16": "float16"}


def refuse_unsupported(vllm_config: "VllmConfig", family: KernelFamily, kind: DeviceKind) -> None:
    """Raise for the first thing that the device, the kernel family or this version can't do.

    Parameters
    ----------
    vllm_config
        What the engine was asked for.
    family
        Kernel family that was chosen.
    kind
        Kind of device that was chosen.

    Raises
    ------
    PrepError
        Says what was given, what is allowed and what to do.
    """
    model = vllm_config.model_config
    name = device_name(kind.device_type)
    if name.startswith(NZ_CACHE_CHIPS):
        raise PrepError(
            f"{name}: Ascend310P keeps its KV cache in the NZ layout, which is not supported; use "
            "an Ascend910B or Ascend910_93 device"
        )
    dtypes = [DTYPE_NAMES[str(dtype)] for dtype in family.dtypes]
    if model.dtype not in family.dtypes:
        raise PrepError(
            f"--dtype {model.dtype}: kernel family {family.name} takes {', '.join(dtypes)}"
        )
    cache = vllm_config.cache_config
    if cache.cache_dtype not in ("auto", DTYPE_NAMES[str(model.dtype)]):
        raise PrepError(
            f"--kv-cache-dtype {cache.cache_dtype}: only auto is supported (the model's dtype)"
        )
    refuse_ranks_without_device(vllm_config.parallel_config, kind)
    num_ranks = ranks_on_host(vllm_config.parallel_config)
    asked = cache.kv_cache_memory_bytes
    if asked and kind == CPU_KIND and asked * num_ranks > free_memory():
        for_each = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
        raise PrepError(
            f"--kv-cache-memory-bytes {asked:,}{for_each}: only {free_memory():,} bytes of the "
            "host are free"
        )
    if cache.user_specified_block_size and cache.block_size % family.block_size_multiple:
        raise PrepError(
            f"--block-size {cache.block_size}: kernel family {family.name} takes multiples of "
            f"{family.block_size_multiple}"
        )
    chunk_size, block_size = model.attention_chunk_size, _block_size(vllm_config)
    if chunk_size is not None and chunk_size % block_size:
        raise PrepError(
            f"--block-size {block_size}: attention chunks of {chunk_size} tokens ({model.model}) "
            "have to be whole blocks; give a block size that divides them"
        )
    if parse_config(vllm_config.additional_config).triton_kernels == "keep":
        _refuse_kernels_without_triton(kind)
    for feature, needed in _family_limits(model, family):
        raise PrepError(
            f"{feature} of {model.model}: kernel family {family.name} has none ({needed}); use the "
            "CPU fallback"
        )
    unsupported = _unsupported_features(vllm_config, model)
    unsupported += unsupported_ranks(vllm_config)
    unsupported += _unsupported_transfer(vllm_config, family)
    unsupported += _unsupported_speculation(vllm_config, family)
    if model.supports_multimodal_inputs:
        unsupported += _unsupported_multimodal(vllm_config, model)
    for feature, reason in unsupported:
        raise PrepError(f"{feature} is not supported by vllm_npu_prep: {reason}")
    for each in [model, *_draft_models(vllm_config)]:
        head_size = each.get_head_size()
        if head_size > family.max_head_size or head_size % family.head_size_multiple:
            raise PrepError(
                f"head size {head_size} of {each.model}: kernel family {family.name} takes "
                f"multiples of {family.head_size_multiple} up to {family.max_head_size}"
            )


def _block_size(vllm_config: "VllmConfig") -> int:
    """Block size as asked for, or the one that the backend prefers."""
    cache = vllm_config.cache_config
    return cache.block_size if cache.user_specified_block_size else DEFAULT_BLOCK_SIZE


def _draft_models(vllm_config: "VllmConfig") -> list["ModelConfig"]:
    """The drafter's model, if it has one of its own."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in DRAFT_MODEL_METHODS:
        return []
    return [speculative.draft_model_config]


def _refuse_kernels_without_triton(kind: DeviceKind) -> None:
    """Triton's kernels run on a device that one of its drivers found, never on the CPU fallback."""
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON and kind != CPU_KIND:
        return
    why = "the CPU fallback has no Triton" if HAS_TRITON else "vLLM finds no working Triton here"
    raise PrepError(
        f'"{SECTION}.triton_kernels" = "keep": {why}; install triton-ascend on a host with NPUs, '
        'or use "replace"'
    )


def _family_limits(model: "ModelConfig", family: KernelFamily) -> list[tuple[str, str]]:
    """What the model needs and the family lacks, and what would have to be there."""
    text = model.hf_text_config
    soft_cap = getattr(text, "attn_logit_softcapping", None)
    checks = [
        (soft_cap, family.logits_soft_cap, "logits soft cap", "its operators take no cap"),
        (
            getattr(text, "num_kv_shared_layers", None),
            family.kv_sharing,
            "sharing of K and V between layers",
            'it needs mask rows for prompts too; family "fia" runs it',
        ),
        (
            model.is_moe,
            family.experts,
            "a mixture of experts",
            "it needs npu_moe_gating_top_k, npu_moe_init_routing_v2 and npu_grouped_matmul",
        ),
        (
            model.use_mla,
            family.mla,
            "MLA attention",
            "it needs npu_fused_infer_attention_score with query_rope and key_rope, and a cache "
            "of latent rows",
        ),
    ]
    return [(feature, needed) for asked, has, feature, needed in checks if asked and not has]


def _unsupported_transfer(vllm_config: "VllmConfig", family: KernelFamily) -> list[tuple[str, str]]:
    """What the engine was asked to do with its KV cache beside keeping it, with reasons."""
    transfer, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    checks = [
        (
            cache.kv_offloading_size is not None,
            "--kv-offloading-size",
            "vLLM's offloading copies whole pages by CUDA streams, and K and V are planes here",
        )
    ]
    if transfer is not None and transfer.kv_connector is not None:
        known = ", ".join(family.kv_connectors) or "none"
        checks += [
            (
                transfer.kv_connector not in family.kv_connectors
                or transfer.kv_connector_module_path not in (None, CONNECTOR_MODULE),
                f"KV connector {transfer.kv_connector}",
                f"kernel family {family.name} keeps K and V as planes, and takes {known}",
            ),
            (
                model.use_mla or model.runner_type == "pooling",
                f"KV connector {transfer.kv_connector} with MLA or pooling",
                "it stores K and V of prompts that are followed by tokens",
            ),
            (
                vllm_config.lora_config is not None or model.enable_prompt_embeds,
                f"KV connector {transfer.kv_connector} with LoRA or prompt embeddings",
                "it finds prompts by their token ids alone",
            ),
            (
                scheduler.enable_chunked_prefill or scheduler.long_prefill_token_threshold > 0,
                f"KV connector {transfer.kv_connector} with chunked prefill",
                "of a prompt in chunks it would store the first one; use "
                "--no-enable-chunked-prefill, without --long-prefill-token-threshold",
            ),
            (
                "shared_storage_path" not in transfer.kv_connector_extra_config,
                f"KV connector {transfer.kv_connector} without a folder",
                'give it "kv_connector_extra_config": {"shared_storage_path": ...}; vLLM would '
                "share /tmp with everybody",
            ),
        ]
    return [(feature, reason) for applies, feature, reason in checks if applies]


def multimodal_inputs(model: "ModelConfig") -> list[str]:
    """Kinds of input beside text that requests may have: what the model takes, unless forbidden."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    options = model.get_multimodal_config()
    takes = MULTIMODAL_REGISTRY.get_processing_info(model).supported_mm_limits
    return sorted(kind for kind in takes if options.get_limit_per_prompt(kind) > 0)


def _unsupported_multimodal(
    vllm_config: "VllmConfig", model: "ModelConfig"
) -> list[tuple[str, str]]:
    """What a multimodal model or its engine was asked for and is refused, with reasons."""
    options, lora = model.get_multimodal_config(), vllm_config.lora_config
    others = [each for each in multimodal_inputs(model) if each not in MODALITIES]
    zeros = ", ".join(f'"{each}": 0' for each in others)
    checks = [
        (
            bool(others),
            f"{' and '.join(others)} input ({model.model})",
            f"{' and '.join(MODALITIES)} input is; use --limit-mm-per-prompt '{{{zeros}}}'",
        ),
        (
            model.is_mm_prefix_lm,
            f"image spans that attend both ways ({model.model})",
            "masks are causal; --language-model-only serves its text",
        ),
        (
            model.is_multimodal_raw_input_only_model,
            f"raw multimodal input ({model.model})",
            "the encoder's output is put in place of placeholders",
        ),
        (
            model.enable_prompt_embeds,
            "--enable-prompt-embeds with a multimodal model",
            "a step's embeddings come from one of the two",
        ),
        (
            options.is_multimodal_pruning_enabled(),
            "--video-pruning-rate",
            "positions would follow from what the encoder made on the device",
        ),
        (
            options.mm_encoder_only,
            "--mm-encoder-only",
            "steps are prepared for the language model; leave the flag out",
        ),
        (
            vllm_config.ec_transfer_config is not None,
            "--ec-transfer-config",
            "the encoder's outputs stay in their engine",
        ),
        (
            lora is not None and lora.enable_tower_connector_lora,
            "--enable-tower-connector-lora",
            "adapters are applied to the language model",
        ),
    ]
    return [(feature, reason) for applies, feature, reason in checks if applies]


def _unsupported_speculation(
    vllm_config: "VllmConfig", family: KernelFamily
) -> list[tuple[str, str]]:
    """What the engine was asked of speculation that is refused, with reasons."""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    if speculative is None:
        return []
    method = speculative.method
    if method not in ("ngram", *DRAFT_MODEL_METHODS):
        known = ", ".join(("ngram", *DRAFT_MODEL_METHODS))
        return [(f"speculative method {method}", f"drafts are prepared for {known}")]
    checks = [
        (
            model.enable_prompt_embeds,
            "--enable-prompt-embeds with speculation",
            "drafts follow from token ids",
        ),
        (
            speculative.parallel_drafting,
            f"parallel drafting ({method})",
            "a draft pass drafts one token of each request",
        ),
        (
            method == "draft_model" and speculative.disable_padded_drafter_batch,
            "disable_padded_drafter_batch (draft_model)",
            "vLLM runs draft models on padded batches only; leave the key out",
        ),
        (
            method == "draft_model" and model.uses_mrope,
            f"speculative method draft_model for a model with M-RoPE ({model.model})",
            "vLLM's draft models have one position for each token; ngram and EAGLE drafts work",
        ),
        (
            speculative.rejection_sample_method != "standard",
            f"rejection_sample_method {speculative.rejection_sample_method}",
            "drafts are verified by the standard rule",
        ),
        (
            speculative.uses_dynamic_speculative_decoding(),
            "num_speculative_tokens_per_batch_size",
            "graphs and buffers are made for one number of drafts",
        ),
        (
            speculative.use_heterogeneous_vocab,
            "use_heterogeneous_vocab",
            "drafts are token ids of the model that verifies them",
        ),
        (
            speculative.use_local_argmax_reduction,
            "use_local_argmax_reduction",
            "every rank sees whole logits, and drafts from them; leave the key out",
        ),
        (
            speculative.attention_backend is not None,
            "attention_backend in --speculative-config",
            "this platform has one backend; leave the key out",
        ),
        (
            speculative.kv_cache_dtype not in (None, "auto"),
            f"kv_cache_dtype {speculative.kv_cache_dtype} in --speculative-config",
            "only auto is supported (the model's dtype)",
        ),
        (
            speculative.moe_backend is not None,
            f"moe_backend {speculative.moe_backend} in --speculative-config",
            "experts are computed in one way; leave the key out",
        ),
    ]
    for drafter in _draft_models(vllm_config):
        name = f"{drafter.model} as a drafter ({method})"
        kinds = set(getattr(drafter.hf_text_config, "layer_types", None) or ())
        lacks = ", ".join(feature for feature, _ in _family_limits(drafter, family))
        checks += [
            (
                bool(lacks),
                name,
                f"kernel family {family.name} has no {lacks}; use the CPU fallback",
            ),
            (
                model.use_mla or drafter.use_mla,
                f"speculative method {method} with MLA",
                "drafters' metadata is that of K and V; ngram drafts work",
            ),
            (
                len(kinds) > 1,
                name,
                f"its layers ({', '.join(sorted(kinds))}) would need metadata of several kinds",
            ),
            (
                drafter.is_hybrid or drafter.is_attention_free,
                name,
                "the KV cache holds K and V planes only",
            ),
            (
                drafter.attention_chunk_size is not None,
                name,
                "draft passes see whole requests, and its attention one chunk of them",
            ),
            (drafter.quantization is not None, name, f"no kernels for {drafter.quantization}"),
            (
                vllm_config.kv_transfer_config is not None,
                f"speculative method {method} with a KV connector",
                "what drafters cache is not stored; ngram drafts work",
            ),
        ]
    return [(feature, reason) for applies, feature, reason in checks if applies]


def _unsupported_features(vllm_config: "VllmConfig", model: "ModelConfig") -> list[tuple[str, str]]:
    """Features that the engine was asked for and that this version refuses, with reasons."""
    parallel = vllm_config.parallel_config
    offload, scheduler = vllm_config.offload_config, vllm_config.scheduler_config
    cache, pools = vllm_config.cache_config, model.runner_type == "pooling"
    position_embeddings = getattr(model.hf_text_config, "position_embedding_type", None)
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    checks = [
        (model.is_encoder_decoder, "an encoder-decoder model", "no cross-attention runs"),
        (
            model.uses_alibi or position_embeddings == "alibi",
            f"ALiBi ({model.model})",
            "attention takes no bias",
        ),
        (
            pools and scheduler.enable_chunked_prefill and not model.is_chunked_prefill_supported,
            "--enable-chunked-prefill with this pooling model",
            "it pools whole prompts; leave the flag out",
        ),
        (
            pools and cache.enable_prefix_caching and not model.is_prefix_caching_supported,
            "--enable-prefix-caching with this pooling model",
            "it pools whole prompts; leave the flag out",
        ),
        (
            pools and model.enable_prompt_embeds,
            "--enable-prompt-embeds with a pooling model",
            "poolers and token types read token ids",
        ),
        (
            vllm_config.lora_config is not None and model.is_moe,
            "LoRA on a mixture-of-experts model",
            "no expert kernels take adapters",
        ),
        (
            vllm_config.lora_config is not None and model.use_mla,
            "LoRA on a model with MLA",
            "its attention reads projections that were merged when the model was loaded",
        ),
        (
            hasattr(model.hf_text_config, "index_topk"),
            f"sparse attention ({model.model})",
            "attention reads the whole context, and has no indexer",
        ),
        (
            vllm_config.kernel_config.moe_backend != "auto",
            f"--moe-backend {vllm_config.kernel_config.moe_backend}",
            "experts are computed in one way; leave the flag out",
        ),
        (
            vllm_config.aux_output_config.enabled,
            "--enable-return-routed-experts",
            "no step hands its routing to the host",
        ),
        (
            model.is_hybrid or model.is_attention_free or not kinds.isdisjoint(STATE_LAYERS),
            f"a state-space or linear-attention model ({model.model})",
            "the KV cache holds K and V planes only",
        ),
        (
            "chunked_attention" in kinds and model.using_transformers_backend(),
            f"--model-impl transformers with attention chunks ({model.model})",
            "vLLM would let its layers see whole contexts; leave the flag out",
        ),
        (model.quantization is not None, f"--quantization {model.quantization}", "no kernels"),
        (model.enable_sleep_mode, "--enable-sleep-mode", "the KV cache is not in a pool"),
        (
            vllm_config.weight_transfer_config is not None,
            "--weight-transfer-config",
            "its engines speak to CUDA devices; collective_rpc reload_weights reads a folder",
        ),
        (
            cache.kv_sharing_fast_prefill,
            "--kv-sharing-fast-prefill",
            "metadata is built for whole steps",
        ),
        (
            offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0,
            "weight offloading",
            "graphs and kernels read weights from device memory",
        ),
        (parallel.use_ubatching, "dual-batch overlap", "one batch is prepared for each step"),
        (
            vllm_config.attention_config.backend is not None
            and vllm_config.attention_config.backend.name != "CUSTOM",
            "--attention-backend",
            "this platform has one backend; leave the flag out",
        ),
    ]
    return [(feature, reason) for applies, feature, reason in checks if applies]
