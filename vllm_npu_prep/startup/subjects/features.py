"""Refusals of vLLM's features, and of kinds of models, that this version doesn't support."""

from typing import Any

from vllm_npu_prep.device import NPU_KIND
from vllm_npu_prep.quantization.formats import fault
from vllm_npu_prep.startup.asked import (
    SPARSE_MODELS,
    STATE_MODELS,
    RequestedEngine,
    indexers_of,
)
from vllm_npu_prep.startup.refusal import Refusal, Subject

STATE_LAYERS = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Layers with a recurrent state instead of K and V, by transformers' ``layer_types``. For an
architecture that vLLM doesn't know, it runs transformers' code and doesn't notice that the model
is a hybrid.
"""


def _fault(asked: RequestedEngine) -> str | None:
    return fault(asked.model, on_npu=asked.kind == NPU_KIND)


OTHER_SPARSE = {
    "DeepseekV4": "its layers attend over compressed positions, too, which need caches of their "
    "own and operators that torch_npu does not have",
    "MiniMaxM3": "it chooses blocks of positions over separate K and V, which no kernel takes",
    "Glm5Next": "its indexer scores pooled keys, which need a cache of their own",
}
"""What sparse attention of other architectures would need, by how their names begin."""


def _what_sparse_attention_lacks(asked: RequestedEngine) -> str:
    for name, lacks in OTHER_SPARSE.items():
        if asked.model.architecture.startswith(name):
            return lacks
    return "its indexer has not been tried"


def _fault_of_indexers(asked: RequestedEngine) -> str:
    """Return which layer would read nothing, or have an indexer that the model does not use."""
    if not asked.is_sparse:
        return ""
    indexers, types = indexers_of(asked.text), getattr(asked.text, "indexer_types", None) or ()
    if indexers[0] == "S":
        return "layer 0 would read what an indexer before it chose, and there is none"
    for layer, (kind, indexer) in enumerate(zip(types, indexers)):
        if kind == "shared" and indexer == "F":
            return f"layer {layer} would have an indexer, and indexer_types says that it has none"
    return ""


def _only_drafts(asked: RequestedEngine) -> bool:
    from vllm.model_executor.models import registry

    return asked.model.architecture in registry._SPECULATIVE_DECODING_MODELS


MODELS = (
    Refusal(
        "drafter-alone",
        _only_drafts,
        "{architecture} as a model of its own ({model})",
        "it drafts for another model",
        'serve that one, with this as "model" in --speculative-config',
        lambda c: {"architecture": c.model.architecture},
    ),
    Refusal(
        "encoder-decoder",
        lambda c: c.model.is_encoder_decoder,
        "an encoder-decoder model",
        "cross-attention is not supported",
        "use a decoder-only model",
    ),
    Refusal(
        "alibi",
        lambda c: c.model.uses_alibi or getattr(c.text, "position_embedding_type", None) == "alibi",
        "ALiBi ({model})",
        "attention adds no bias to its scores",
        "use another model",
    ),
    Refusal(
        "sparse-attention",
        lambda c: (
            not c.is_sparse
            and (hasattr(c.text, "index_topk") or getattr(c.text, "sparse_attention_config", None))
        ),
        "sparse attention of {architecture} ({model})",
        "{lacks}",
        "use a model whose sparse attention is supported: {known}",
        lambda c: {
            "architecture": c.model.architecture,
            "lacks": _what_sparse_attention_lacks(c),
            "known": ", ".join(SPARSE_MODELS),
        },
    ),
    Refusal(
        "indexers",
        _fault_of_indexers,
        "indexers of layers {indexers} ({model}; F has one, S shares it)",
        "{fault}",
        "correct index_topk_pattern, or index_topk_freq and index_skip_topk_offset, in config.json "
        "or --hf-overrides",
        lambda c: {"indexers": indexers_of(c.text), "fault": _fault_of_indexers(c)},
    ),
    Refusal(
        "states",
        lambda c: (
            not c.has_states
            and (
                c.model.is_hybrid
                or c.model.is_attention_free
                or not c.layer_types.isdisjoint(STATE_LAYERS)
            )
        ),
        "a state-space or linear-attention model ({model})",
        "steps are prepared for the recurrent states of these only: {known}",
        "use one of them, or a model without recurrent states",
        lambda c: {"known": ", ".join(STATE_MODELS)},
    ),
    Refusal(
        "diffusion",
        lambda c: c.model.is_diffusion,
        "a diffusion model ({model})",
        "steps are prepared for models that generate one token after another",
        "use another model",
    ),
    Refusal(
        "attention-chunks-in-transformers",
        lambda c: "chunked_attention" in c.layer_types and c.model.using_transformers_backend(),
        "--model-impl transformers with attention chunks ({model})",
        "vLLM would let its layers attend to the whole context",
    ),
    Refusal(
        "quantization",
        _fault,
        "--quantization {method}",
        "{fault}",
        "use weights of 16 or 32 bits, or of a kind that docs/guides/models.md lists",
        lambda c: {"method": c.model.quantization, "fault": _fault(c)},
    ),
)


POOLING = (
    Refusal(
        "pooling-chunked-prefill",
        lambda c: (
            c.config.scheduler_config.enable_chunked_prefill
            and not c.model.is_chunked_prefill_supported
        ),
        "--enable-chunked-prefill with this pooling model",
        "the model pools whole prompts",
    ),
    Refusal(
        "pooling-prefix-caching",
        lambda c: (
            c.config.cache_config.enable_prefix_caching and not c.model.is_prefix_caching_supported
        ),
        "--enable-prefix-caching with this pooling model",
        "the model pools whole prompts",
    ),
    Refusal(
        "pooling-prompt-embeds",
        lambda c: c.model.enable_prompt_embeds,
        "--enable-prompt-embeds with a pooling model",
        "poolers and token types read token ids",
        "send token ids",
    ),
)


def _is_batch_invariant(asked: RequestedEngine) -> bool:
    from vllm import envs

    return envs.VLLM_BATCH_INVARIANT


FEATURES = (
    Refusal(
        "batch-invariance",
        _is_batch_invariant,
        "VLLM_BATCH_INVARIANT",
        "matrix products and attention may round otherwise in batches of another size",
        "set it to 0",
    ),
    Refusal(
        "routed-experts",
        lambda c: c.config.aux_output_config.enabled,
        "--enable-return-routed-experts",
        "the routing of a step is not copied to the host",
    ),
    Refusal(
        "sleep-graphs",
        lambda c: c.model.enable_sleep_mode and c.model.sleep_mode_offload_cudagraph,
        "--sleep-mode-offload-cudagraph",
        "memory of captured graphs stays with torch_npu's allocator",
        "leave the flag out; graphs stay captured while the engine sleeps",
    ),
    Refusal(
        "sleep-communicators",
        lambda c: c.model.enable_sleep_mode and c.model.enable_nccl_comm_suspend,
        "--enable-nccl-comm-suspend",
        "HCCL's buffers can't be suspended",
        "leave the flag out; communicators stay while the engine sleeps",
    ),
    Refusal(
        "weight-transfer",
        lambda c: c.config.weight_transfer_config is not None,
        "--weight-transfer-config",
        "its engines work with CUDA devices only",
        "leave the flag out; collective_rpc reload_weights reads a folder",
    ),
    Refusal(
        "fast-prefill",
        lambda c: c.config.cache_config.kv_sharing_fast_prefill,
        "--kv-sharing-fast-prefill",
        "attention metadata always covers all tokens of a step",
    ),
    Refusal(
        "moe-backend",
        lambda c: c.config.kernel_config.moe_backend != "auto",
        "--moe-backend {name}",
        "the plugin has one implementation of experts",
        "leave the flag out",
        lambda c: {"name": c.config.kernel_config.moe_backend},
    ),
    Refusal(
        "attention-backend",
        lambda c: (
            (
                c.config.attention_config.backend is not None
                and c.config.attention_config.backend.name != "CUSTOM"
            )
            or c.config.attention_config.backend_per_kind
        ),
        "--attention-backend",
        "the plugin chooses the attention backend, in place of a flag or vLLM's rule for a model",
        "leave the flag out; use another model if it was not given",
    ),
    Refusal(
        "non-causal",
        lambda c: c.config.attention_config.use_non_causal and not c.model.is_diffusion,
        "use_non_causal in --attention-config",
        "masks of generating models are causal",
        "leave the key out",
    ),
    Refusal(
        "linear-backend",
        lambda c: c.config.kernel_config.linear_backend != "auto",
        "--linear-backend {name}",
        "the plugin has one implementation of linear layers",
        "leave the flag out",
        lambda c: {"name": c.config.kernel_config.linear_backend},
    ),
    Refusal(
        "watermarking",
        lambda c: c.config.watermark_config is not None,
        "--watermark-config",
        "the kernels of Triton that mark tokens are not replaced",
    ),
    Refusal(
        "weight-offloading",
        lambda c: (
            c.config.offload_config.uva.cpu_offload_gb > 0
            or c.config.offload_config.prefetch.offload_group_size > 0
        ),
        "weight offloading",
        "graphs and kernels read weights from device memory",
        "use more ranks, or a smaller model",
    ),
    Refusal(
        "dual-batch-overlap",
        lambda c: c.config.parallel_config.use_ubatching,
        "dual-batch overlap",
        "one batch is prepared for each step",
        "leave out --enable-dbo and --ubatch-size",
    ),
    Refusal(
        "profiler",
        lambda c: c.config.profiler_config.profiler not in (None, "torch"),
        'profiler "{name}" in --profiler-config',
        "it profiles CUDA devices only",
        'use "torch"',
        lambda c: {"name": c.config.profiler_config.profiler},
    ),
    Refusal(
        "layerwise-nvtx",
        lambda c: c.config.observability_config.enable_layerwise_nvtx_tracing,
        "--enable-layerwise-nvtx-tracing",
        "NVTX works on CUDA devices only",
        'leave the flag out; --profiler-config with "torch" writes a trace of the steps',
    ),
)


def _lora(asked: RequestedEngine) -> Any:
    return asked.config.lora_config


def _adapts_experts(asked: RequestedEngine) -> bool:
    targets = _lora(asked).target_modules
    return asked.model.is_moe and (targets is None or any("experts" in each for each in targets))


ADAPTERS = (
    Refusal(
        "lora-experts-data-parallel",
        lambda c: _adapts_experts(c) and c.config.parallel_config.data_parallel_size > 1,
        "LoRA on experts with data parallelism",
        "ranks compute each other's tokens, and don't tell each other their adapters",
        "use --tensor-parallel-size, or name other layers by --lora-target-modules",
    ),
    Refusal(
        "lora-experts-eplb",
        lambda c: _adapts_experts(c) and c.config.parallel_config.enable_eplb,
        "LoRA on experts with --enable-eplb",
        "adapters stay where they are when experts move",
        "leave --enable-eplb out, or name other layers by --lora-target-modules",
    ),
    Refusal(
        "lora-experts-placement",
        lambda c: (
            _adapts_experts(c)
            and c.config.parallel_config.enable_expert_parallel
            and c.config.parallel_config.expert_placement_strategy != "linear"
        ),
        "LoRA on experts with --expert-placement-strategy {strategy}",
        "vLLM gives each rank the adapters of experts that follow each other",
        "leave the strategy out",
        lambda c: {"strategy": c.config.parallel_config.expert_placement_strategy},
    ),
    Refusal(
        "lora-experts-uneven",
        lambda c: (
            _adapts_experts(c)
            and c.config.parallel_config.enable_expert_parallel
            and c.model.get_num_experts() % c.config.parallel_config.tensor_parallel_size != 0
        ),
        "LoRA on {experts} experts over {num_ranks} ranks",
        "vLLM gives each rank the adapters of equally many experts",
        "use a number of ranks that divides {experts}, or leave --enable-expert-parallel out",
        lambda c: {
            "experts": c.model.get_num_experts(),
            "num_ranks": c.config.parallel_config.tensor_parallel_size,
        },
    ),
    Refusal(
        "lora-experts-sharded",
        lambda c: (
            _adapts_experts(c)
            and c.config.parallel_config.enable_expert_parallel
            and _lora(c).fully_sharded_loras
        ),
        "--fully-sharded-loras with --enable-expert-parallel",
        "ranks have other experts' adapters then, not other parts of the same",
        "leave one of the two out",
    ),
    Refusal(
        "lora-mla",
        lambda c: c.model.use_mla,
        "LoRA on a model with MLA",
        "its attention reads projections that were merged when the model was loaded",
        "merge the adapters into the weights",
    ),
)

SUBJECTS = (
    Subject("models", MODELS),
    Subject("pooling", POOLING, when=lambda c: c.pools),
    Subject("features", FEATURES),
    Subject("adapters", ADAPTERS, when=lambda c: c.config.lora_config is not None),
)
