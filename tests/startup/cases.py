"""Engines that are refused: what was asked for, and every refusal that it meets, by id."""

from dataclasses import dataclass, field
from typing import Any

from tests.helpers.engine import LLAMA4
from tests.helpers.hybrids import ON_NPUS
from tests.helpers.windows import SHARED_LAYERS

EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32}
CHUNKS = {key: value for key, value in LLAMA4.items() if key not in ("family", "num_hidden_layers")}
CHUNKS["no_rope_layers"] = [1]
MANY_HEADS = {"num_attention_heads": 132, "num_key_value_heads": 132, "hidden_size": 264}
MLA = {
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "n_routed_experts": 0,
    "first_k_dense_replace": 1,
}
LATENT = {
    **MLA,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": None,
}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

POOLING = {"runner": "pooling"}
MEAN_POOLING = {
    **POOLING,
    "pooler_config": {"seq_pooling_type": "MEAN"},
    "max_num_batched_tokens": 128,
}
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}


def connector(name: str = "ExampleConnector", **more: Any) -> dict[str, Any]:
    """Settings of an engine whose connector has nothing wrong; `more` is added to its config."""
    config = {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": "kv"},
        **more,
    }
    return {"kv_transfer_config": config, "enable_chunked_prefill": False}


def drafts(method: str = "draft_model", **more: Any) -> dict[str, Any]:
    """Settings of an engine that speculates; ``DRAFTER`` in its config is a folder."""
    config = {"method": method, "num_speculative_tokens": 2, **more}
    if method == "draft_model":
        config.setdefault("model", DRAFTER)
    return {"speculative_config": config}


DRAFTER = "drafter of the same kind as the model"
EDITED = "changes of config.json"
"""Key of a model's config whose value is what its file says beside what transformers writes."""
GEMMA4_ASSISTANT = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "text_config": {
        "model_type": "gemma4_text",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "layer_types": ["full_attention"],
    },
}


@dataclass(frozen=True)
class Case:
    """An engine that is refused.

    Attributes
    ----------
    ids
        Every refusal that it meets, in their order.
    parts
        What its message says.
    settings
        Of the engine.
    model
        Family and config of its model; the smallest Qwen3 by default.
    drafter
        The same of ``DRAFTER``.
    family
        Kernel family that is asked in place of the CPU fallback's, for an engine which the
        fallback runs.
    on_npu
        Whether that family is asked on an NPU.
    patches
        Attributes and what they are while it is refused: of a device that isn't there.
    environment
        Variables.
    """

    ids: tuple[str, ...]
    parts: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    model: tuple[str, dict[str, Any]] = ("Qwen3", {})
    drafter: tuple[str, dict[str, Any]] = ("Qwen3", {})
    family: str | None = None
    on_npu: bool = False
    patches: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


SUBJECTS = "vllm_npu_prep.startup.subjects"
NPUS = {
    "vllm_npu_prep.startup.asked.cann_version": lambda device_type: "9.1.0",
    f"{SUBJECTS}.kernels.device_name": lambda device_type: "Ascend910B1",
    f"{SUBJECTS}.ranks.visible_devices": {"npu": 2}.get,
    f"{SUBJECTS}.ranks.has_collectives": lambda device_type: True,
}
"""A host with two NPUs that can exchange."""
HALF = {"dtype": "bfloat16"}


def cann(version: str) -> dict[str, Any]:
    """Patches for a host with this version of CANN."""
    return {"vllm_npu_prep.startup.asked.cann_version": lambda device_type: version}


def lacking(*functions: str) -> dict[str, Any]:
    """Patches for a host whose CANN lacks these functions."""
    return {"vllm_npu_prep.aclnn.is_missing": lambda function: function in functions}


LIMITS = {
    "a chip whose caches are in another layout": Case(
        ("nz-cache",),
        ("Ascend310P3: ", "NZ layout", "use an Ascend910B"),
        HALF,
        family="fia",
        on_npu=True,
        patches={**NPUS, f"{SUBJECTS}.kernels.device_name": lambda device_type: "Ascend310P3"},
    ),
    **{
        f"a chip whose operators were not read: {name}": Case(
            ("chip",),
            (f"NPUs of type {name}: ", "Ascend910B (A2) and Ascend910_93 (A3) only"),
            HALF,
            family="fia",
            on_npu=True,
            patches={**NPUS, f"{SUBJECTS}.kernels.device_name": lambda of, name=name: name},
        )
        for name in ("Ascend950PR_9599", "Ascend910_9589", "Ascend910B", "Ascend310B1")
    },
    "a dtype that operators don't take": Case(
        ("dtype",), ("--dtype torch.float32", "bfloat16, float16"), family="fia"
    ),
    "cache dtype": Case(
        ("kv-cache-dtype",), ("--kv-cache-dtype fp8", "auto"), {"kv_cache_dtype": "fp8"}
    ),
    "cache of another dtype than the model's": Case(
        ("kv-cache-dtype",), ("--kv-cache-dtype bfloat16", "auto"), {"kv_cache_dtype": "bfloat16"}
    ),
    "more cache than memory": Case(
        ("kv-cache-memory",),
        ("--kv-cache-memory-bytes", "free"),
        {"kv_cache_memory_bytes": 1 << 50},
    ),
    "more cache than memory, on several ranks": Case(
        ("kv-cache-memory",),
        ("--kv-cache-memory-bytes", "2 ranks on this host", "free"),
        {"kv_cache_memory_bytes": 1 << 50, "tensor_parallel_size": 2},
    ),
    "blocks that operators don't take": Case(
        ("block-size",),
        ("--block-size 24", "multiples of 16"),
        {**HALF, "block_size": 24},
        family="fia",
    ),
    "blocks too large for operators": Case(
        ("block-size",),
        ("--block-size 256", "kernel family atb takes multiples of 16 up to 128"),
        {**HALF, "block_size": 256},
        family="atb",
    ),
    "a CANN whose attention is not known": Case(
        ("cann-release",),
        ("CANN 8.1.0", "not known before 8.3", "install CANN 8.3 or newer"),
        HALF,
        family="fia",
        patches=cann("8.1.0"),
    ),
    "a CANN without what attention calls": Case(
        ("cann-functions",),
        ("CANN 9.1.0: ", "no aclnnScatterPaKvCache, which", "install CANN 8.5 or newer"),
        HALF,
        family="fia",
        on_npu=True,
        patches={**NPUS, **lacking("aclnnScatterPaKvCache", "aclnnGatherPaKvCache")},
    ),
    "heads that CANN 8.5 doesn't take": Case(
        ("fused-attention",),
        (
            "4 heads of size 96 (bfloat16, blocks of 128)",
            "for prompts, fused attention of CANN 8.5 takes heads of 64, 128 and 192",
            'use {"npu_prep": {"attention": "atb"}} or CANN 9.0 or newer or the CPU fallback',
        ),
        HALF,
        ("Qwen3", {"head_dim": 96, "num_attention_heads": 4, "num_key_value_heads": 4}),
        family="fia",
        patches=cann("8.5.0"),
    ),
    "blocks that a release doesn't take": Case(
        ("fused-attention",),
        ("blocks of 768", "takes blocks of 16 to 512 tokens", "use --block-size 128"),
        {**HALF, "block_size": 768},
        ("Qwen3", {"head_dim": 96, "num_attention_heads": 4, "num_key_value_heads": 2}),
        family="fia",
    ),
    "half precision that CANN 8.5 doesn't take": Case(
        ("fused-attention",),
        ("(float16,", "takes bfloat16 for these heads", "use --dtype bfloat16 or CANN 9.0"),
        {"dtype": "float16"},
        ("Qwen3", {"head_dim": 192, "num_attention_heads": 4, "num_key_value_heads": 4}),
        family="fia",
        patches=cann("8.5.0"),
    ),
    "blocks that no documentation allows": Case(
        ("fused-attention",),
        ("blocks of 128 tokens, by its documentation", '{"npu_prep": {"kernel_rules": "release"}}'),
        {
            **HALF,
            "block_size": 64,
            "additional_config": {"npu_prep": {"kernel_rules": "documented"}},
        },
        family="fia",
    ),
    "heads of one rank": Case(
        ("fused-attention",),
        ("1 head a rank of size 96", "takes heads of 64, 128 and 192"),
        {**HALF, "tensor_parallel_size": 4},
        ("Qwen3", {"head_dim": 96, "num_attention_heads": 4, "num_key_value_heads": 2}),
        family="fia",
        patches=cann("8.5.0"),
    ),
    "larger heads in layers without a window": Case(
        ("head-size",),
        ("head size 512", "multiples of 16 up to 256"),
        HALF,
        ("Qwen3", {"global_head_dim": 512}),
        family="fia",
    ),
    "attention chunks in the default blocks": Case(
        ("attention-chunks-in-blocks",),
        ("--block-size 128", "attention chunks of 32 tokens", "whole blocks"),
        model=("Llama4", CHUNKS),
    ),
    "attention chunks in blocks that don't divide them": Case(
        ("attention-chunks-in-blocks",),
        ("--block-size 12", "attention chunks of 32 tokens"),
        {"block_size": 12},
        model=("Llama4", CHUNKS),
    ),
    "large heads": Case(("head-size",), ("head size 1024",), model=("Qwen3", {"head_dim": 1024})),
    "kernels of Triton": Case(
        ("triton-kernels",),
        ("npu_prep.triton_kernels", '"keep"', "none that works", "triton-ascend", '"replace"'),
        {"additional_config": {"npu_prep": {"triton_kernels": "keep"}}},
    ),
    "kernels of Triton where it drives no NPU": Case(
        ("triton-kernels",),
        ("the CPU fallback has none",),
        {"additional_config": {"npu_prep": {"triton_kernels": "keep"}}},
        patches={"vllm.triton_utils.HAS_TRITON": True},
    ),
    **{
        f"{name} on the kernels of {family}": Case(
            (name,),
            (*parts, f"kernel family {family}", "use the CPU fallback"),
            HALF,
            model,
            family=family,
        )
        for family in ("fia", "atb")
        for name, parts, model in (
            ("logits-soft-cap", ("logits soft cap", "no cap"), ("Gemma2", {})),
        )
    },
    "MLA on the kernels of atb": Case(
        ("mla",),
        ("MLA attention", "query_rope", "kernel family atb", '{"npu_prep": {"attention": "fia"}}'),
        HALF,
        ("DeepseekV2", LATENT),
        family="atb",
    ),
    **{
        f"latent attention of {what}": Case(
            ("latent-attention",),
            ("latent attention of", "fused attention of CANN", *parts, "or the CPU fallback"),
            {**HALF, **flags},
            ("DeepseekV2", {**LATENT, **model}),
            family="fia",
        )
        for what, parts, flags, model in (
            ("short rows", ("latent rows of 512, not 32",), {}, {"kv_lora_rank": 32}),
            ("short keys", ("rotated keys of 64, not 8",), {}, {"qk_rope_head_dim": 8}),
            (
                "small heads",
                ("projected heads of 128 (CANN 9.0", "not 16 and 128"),
                {},
                {"qk_nope_head_dim": 16},
            ),
            ("many heads", ("up to 128 heads a rank, not 132",), {}, MANY_HEADS),
            (
                "undocumented blocks",
                ("blocks of 16 or 128 tokens, by its documentation, not 64",),
                {
                    "block_size": 64,
                    "additional_config": {"npu_prep": {"kernel_rules": "documented"}},
                },
                {},
            ),
        )
    },
    "absorbed prefills on a device": Case(
        ("latent-prefill",),
        ('"npu_prep.latent_prefill" = "absorbed"', "few query tokens", '"projected"'),
        {**HALF, "additional_config": {"npu_prep": {"latent_prefill": "absorbed"}}},
        ("DeepseekV2", LATENT),
        family="fia",
    ),
    "layers that share K and V, where prompts are never read from the cache": Case(
        ("kv-sharing",),
        ("sharing of K and V between layers", "family atb", '{"npu_prep": {"attention": "fia"}}'),
        HALF,
        ("Gemma3n", SHARED_LAYERS),
        family="atb",
    ),
}

DENSE = {"npu_prep": {"mask": "dense"}}
GRAPHS = {
    "graphs that break": Case(
        ("breakable-graphs",),
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", "set it to 0"),
        {"enforce_eager": False},
        environment={"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"},
    ),
    "pieces that are not split at attention": Case(
        ("pieces-with-attention",),
        ("splitting_ops []", "FULL_DECODE_ONLY"),
        {"enforce_eager": False, "compilation_config": {"splitting_ops": []}},
    ),
    "dense masks in graphs of mixed batches": Case(
        ("dense-masks-in-graphs",),
        ("cudagraph_mode FULL: dense masks", '{"npu_prep": {"mask": "compressed"}}'),
        {
            "enforce_eager": False,
            "compilation_config": {"cudagraph_mode": "FULL"},
            "additional_config": DENSE,
        },
    ),
    "graphs beside pinned memory that expands": Case(
        ("expanding-pins",),
        ("PYTORCH_NPU_ALLOC_CONF=max_split_size_mb:64,pin_memory", "--enforce-eager"),
        {"enforce_eager": False, **HALF},
        family="fia",
        on_npu=True,
        patches=NPUS,
        environment={
            "PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64, pin_memory_expandable_segments:True"
        },
    ),
}

STATES = ("state-space or linear-attention model", "prepared for the states of these only")
NARROW_STATES = {"linear_key_head_dim": 16, "linear_value_head_dim": 8}
HYBRID = (
    "Qwen3Next",
    {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "num_experts": 4,
        "moe_intermediate_size": 32,
    },
)
MODELS = {
    "ALiBi": Case(("alibi",), ("ALiBi",), model=("Bloom", {})),
    "ALiBi of an encoder": Case(
        ("alibi",),
        ("ALiBi",),
        model=("Bert", {"head": "Model", "position_embedding_type": "alibi"}),
    ),
    "an encoder beside a decoder": Case(
        ("encoder-decoder",),
        ("encoder-decoder", "cross-attention"),
        {"hf_overrides": {"is_encoder_decoder": True}},
    ),
    "sparse attention": Case(
        ("sparse-attention",),
        ("sparse attention", "indexer"),
        model=("DeepseekV2", {**MLA, "q_lora_rank": 20, "index_topk": 8}),
    ),
    "sparse attention of another name": Case(
        ("sparse-attention",),
        ("sparse attention", "indexer"),
        model=("Qwen3", {EDITED: {"sparse_attention_config": {"sparse_topk_blocks": 2}}}),
    ),
    "a drafter without its model": Case(
        ("drafter-alone",),
        ("EagleLlamaForCausalLM as a model of its own", "--speculative-config"),
        model=("Llama", {EDITED: {"architectures": ["EagleLlamaForCausalLM"]}}),
    ),
    "states": Case(
        ("states",),
        STATES,
        model=("Mamba2", {"num_heads": 8, "state_size": 16, "n_groups": 1}),
    ),
    "states between attention": Case(
        ("states",),
        STATES,
        model=("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}),
    ),
    "linear attention alone": Case(
        ("states-alone",),
        ("without full attention", "sized by K and V"),
        model=(
            "Qwen3Next",
            {**HYBRID[1], "layer_types": ["linear_attention"], "num_hidden_layers": 1},
        ),
    ),
    "states beside atb": Case(
        ("states-kernels",),
        ("with kernel family atb", "only fia's kernels", "leave"),
        HALF,
        ("Qwen3Next", {**HYBRID[1], **ON_NPUS, "head_dim": 128}),
        family="atb",
        on_npu=True,
        patches=NPUS,
    ),
    "a CANN without the operators of states": Case(
        ("states-release",),
        ("CANN 9.0.0 for", "no aclnnChunkGatedDeltaRule", "install CANN 9.1 or newer"),
        HALF,
        ("Qwen3Next", {**HYBRID[1], **ON_NPUS, "head_dim": 64}),
        family="fia",
        on_npu=True,
        patches={**NPUS, **cann("9.0.0"), **lacking("aclnnChunkGatedDeltaRule")},
    ),
    "states in float16 on an NPU": Case(
        ("states-dtype",),
        ("--dtype float16", "take bfloat16"),
        {"dtype": "float16"},
        ("Qwen3Next", {**HYBRID[1], **ON_NPUS, "head_dim": 64}),
        family="fia",
        on_npu=True,
        patches=NPUS,
    ),
    "heads of states that no operator takes": Case(
        ("states-heads",),
        ("2 heads of 16 and 4 of 8", "of 128 elements"),
        HALF,
        ("Qwen3Next", {**HYBRID[1], **ON_NPUS, "head_dim": 64, **NARROW_STATES}),
        family="fia",
        on_npu=True,
        patches=NPUS,
    ),
    "blocks that states don't fill": Case(
        ("states-page",),
        ("blocks of 96 tokens", "the K of 512 tokens", "give --block-size 128"),
        {"dtype": "bfloat16", "block_size": 96},
        ("Qwen3Next", {**HYBRID[1], **ON_NPUS, "head_dim": 64}),
        family="fia",
        on_npu=True,
        patches=NPUS,
    ),
    "states in two stages": Case(
        ("states-ranks",),
        ("in several stages or engines", "with tensor parallelism only"),
        {"pipeline_parallel_size": 2},
        model=HYBRID,
    ),
    "drafters beside states": Case(
        ("states-speculation",),
        ("speculative method draft_model with", "mtp and ngram"),
        {**drafts("draft_model", model=DRAFTER), "enable_prefix_caching": False},
        HYBRID,
        drafter=("Qwen3", {}),
    ),
    "more drafts than states are taken for": Case(
        ("states-drafts",),
        ("num_speculative_tokens 8 for", "give at most 7"),
        {**drafts("ngram", num_speculative_tokens=8), **HALF, "enable_prefix_caching": False},
        ("Qwen3Next", {**HYBRID[1], **ON_NPUS, "head_dim": 64}),
        family="fia",
        on_npu=True,
        patches=NPUS,
    ),
    "adapters beside states": Case(
        ("lora-experts", "states-lora"),
        ("LoRA with", "linear attention"),
        {"enable_lora": True},
        model=HYBRID,
    ),
    "states that are pooled": Case(
        ("states-pooling",), ("pooling with", "models that generate"), POOLING, HYBRID
    ),
    "replayed states": Case(
        ("states-replay",),
        ("--use-replayssm", "step by step"),
        {"use_replayssm": True},
        model=HYBRID,
    ),
    # vLLM knows it no longer, and would run transformers' code
    "states in transformers' code": Case(
        ("states",),
        STATES,
        model=("Bamba", {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}),
    ),
    "diffusion": Case(
        ("diffusion",), ("a diffusion model",), {"hf_overrides": {"canvas_length": 8}}
    ),
    "attention chunks in transformers' code": Case(
        ("attention-chunks-in-transformers",),
        ("--model-impl transformers with attention chunks", "the whole context"),
        {"block_size": 16, "model_impl": "transformers"},
        model=("Llama4", CHUNKS),
    ),
    "quantised weights": Case(
        ("quantization",),
        ("--quantization fp8", "there are no kernels for fp8", "16 or 32 bits", "W8A8"),
        {**HALF, "quantization": "fp8"},
    ),
}

FEATURES = {
    "chunks of prompts that are pooled whole": Case(
        ("pooling-chunked-prefill",),
        ("--enable-chunked-prefill", "whole prompts"),
        {**MEAN_POOLING, "enable_chunked_prefill": True},
    ),
    "cached prefixes of prompts that are pooled whole": Case(
        ("pooling-prefix-caching",),
        ("--enable-prefix-caching", "whole prompts"),
        {**MEAN_POOLING, "enable_prefix_caching": True},
    ),
    "embeddings of prompts that are pooled": Case(
        ("pooling-prompt-embeds",),
        ("--enable-prompt-embeds", "token ids"),
        {**POOLING, "enable_prompt_embeds": True},
    ),
    "results that don't depend on the batch": Case(
        ("batch-invariance",),
        ("VLLM_BATCH_INVARIANT", "set it to 0"),
        environment={"VLLM_BATCH_INVARIANT": "1"},
    ),
    "routing of experts": Case(
        ("routed-experts",),
        ("--enable-return-routed-experts", "routing"),
        {"enable_return_routed_experts": True},
        model=("Qwen3Moe", EXPERTS),
    ),
    "sleep with graphs' memory": Case(
        ("sleep-graphs",),
        ("--sleep-mode-offload-cudagraph", "stay captured"),
        {"enable_sleep_mode": True, "sleep_mode_offload_cudagraph": True},
    ),
    "sleep with communicators": Case(
        ("sleep-communicators",),
        ("--enable-nccl-comm-suspend", "communicators stay"),
        {"enable_sleep_mode": True, "enable_nccl_comm_suspend": True},
    ),
    "weights from a trainer": Case(
        ("weight-transfer",),
        ("--weight-transfer-config", "reload_weights"),
        {"weight_transfer_config": {"backend": "nccl"}},
    ),
    "fast prefill": Case(
        ("fast-prefill",), ("--kv-sharing-fast-prefill",), {"kv_sharing_fast_prefill": True}
    ),
    "experts of another backend": Case(
        ("moe-backend",), ("--moe-backend triton",), {"moe_backend": "triton"}
    ),
    "another attention backend": Case(
        ("attention-backend",), ("--attention-backend",), {"attention_backend": "TRITON_ATTN"}
    ),
    "another backend for windows": Case(
        ("attention-backend",),
        ("--attention-backend",),
        {"attention_config": {"backend_per_kind": {"sliding_window": "TRITON_ATTN"}}},
    ),
    "attention both ways": Case(
        ("non-causal",),
        ("use_non_causal in --attention-config",),
        {"attention_config": {"use_non_causal": True}},
    ),
    "linear layers of another backend": Case(
        ("linear-backend",), ("--linear-backend cutlass",), {"linear_backend": "cutlass"}
    ),
    "watermarks": Case(
        ("watermarking",), ("--watermark-config", "Triton"), {"watermark_config": {"key": 7}}
    ),
    "weights on the host": Case(
        ("weight-offloading",), ("weight offloading", "device memory"), {"cpu_offload_gb": 1}
    ),
    "weights fetched ahead": Case(
        ("weight-offloading",), ("weight offloading",), {"offload_group_size": 2}
    ),
    "two batches at a time": Case(
        ("dual-batch-overlap",),
        ("dual-batch overlap", "one batch"),
        {"enable_dbo": True, "data_parallel_size": 2},
        model=("Qwen3Moe", EXPERTS),
    ),
    "a profiler of CUDA": Case(
        ("profiler",), ('profiler "cuda"', '"torch"'), {"profiler_config": {"profiler": "cuda"}}
    ),
    "marks of NVTX": Case(
        ("layerwise-nvtx",),
        ("--enable-layerwise-nvtx-tracing",),
        {"enable_layerwise_nvtx_tracing": True},
    ),
    "adapters of experts": Case(
        ("lora-experts",),
        ("LoRA on a mixture-of-experts model",),
        {"enable_lora": True},
        model=("Qwen3Moe", EXPERTS),
    ),
    "adapters of latent projections": Case(
        ("lora-mla",), ("LoRA on a model with MLA",), {"enable_lora": True}, ("DeepseekV2", MLA)
    ),
}

TWO_RANKS = {"tensor_parallel_size": 2}
SHARED = {**TWO_RANKS, "decode_context_parallel_size": 2}
ONE_KV_HEAD: tuple[str, dict[str, Any]] = ("Qwen3", {"num_key_value_heads": 1})
CUDA_ALIKE = {"vllm.platforms.current_platform.is_cuda_alike": lambda: True}
"""As another platform says, where vLLM looks into experts that move at all."""
RANKS = {
    "ranks beyond the NPUs of a host": Case(
        ("ranks-beyond-devices",),
        ("4 ranks on this host: 2 NPUs", "ASCEND_RT_VISIBLE"),
        {**HALF, **TWO_RANKS, "data_parallel_size": 2},
        family="fia",
        on_npu=True,
        patches=NPUS,
    ),
    # As on the emulated runtime, which has devices and no HCCL
    "NPUs that nothing connects": Case(
        ("no-collectives",),
        ("2 ranks of one engine: libhccl", "CANN", "CPU fallback"),
        {**HALF, **TWO_RANKS},
        family="fia",
        on_npu=True,
        patches={**NPUS, f"{SUBJECTS}.ranks.has_collectives": {"cpu": True, "npu": False}.get},
    ),
    "prompts over several ranks": Case(
        ("context-parallelism",),
        ("--prefill-context-parallel-size 2", "whole prompts"),
        {"prefill_context_parallel_size": 2},
    ),
    "shared contexts without sums": Case(
        ("shared-contexts-family",),
        ("with kernel family atb", "sums of exponentials", '{"attention": "fia"}'),
        {**HALF, **SHARED},
        ONE_KV_HEAD,
        family="atb",
        on_npu=True,
        patches=NPUS,
    ),
    "shared contexts and absorbed prompts": Case(
        ("shared-contexts-absorbed",),
        ('latent_prefill "absorbed"', "leave the option out"),
        {**SHARED, "additional_config": {"npu_prep": {"latent_prefill": "absorbed"}}},
        ("DeepseekV3", {**MLA, "q_lora_rank": None}),
    ),
    "shared contexts and windows": Case(
        ("shared-contexts-layers",),
        ("parts of contexts", "sees all of"),
        SHARED,
        (
            "Qwen3",
            {**ONE_KV_HEAD[1], **WINDOWS, "use_sliding_window": True, "num_hidden_layers": 2},
        ),
    ),
    "shared contexts and drafts": Case(
        ("shared-contexts-speculation",),
        ("with speculation", "leave it out"),
        {**SHARED, **NGRAM},
        ONE_KV_HEAD,
    ),
    "shared contexts and a connector": Case(
        ("shared-contexts-connector",),
        ("with a KV connector", "one rank"),
        {**SHARED, **connector()},
        ONE_KV_HEAD,
    ),
    "shared contexts of what pools": Case(
        ("shared-contexts-pooling",),
        ("a pooling model", "that generate"),
        {**SHARED, **POOLING},
        ONE_KV_HEAD,
    ),
    "shared contexts in stages": Case(
        ("shared-contexts-beside",),
        ("pipeline stages", "tensor parallelism and text alone"),
        {**SHARED, "pipeline_parallel_size": 2, "async_scheduling": False},
        ONE_KV_HEAD,
    ),
    "shared contexts with another exchange": Case(
        ("shared-contexts-exchange",),
        ("--dcp-comm-backend", "gathered and scattered"),
        {**SHARED, "dcp_comm_backend": "a2a"},
        ONE_KV_HEAD,
    ),
    "shared contexts by an older name": Case(
        ("shared-contexts-older-name",),
        ("--dcp-kv-cache-interleave-size 2", "use --cp-kv-cache-interleave-size"),
        {**SHARED, "dcp_kv_cache_interleave_size": 2},
        ONE_KV_HEAD,
    ),
    "runs that don't fill blocks": Case(
        ("shared-contexts-runs",),
        ("--cp-kv-cache-interleave-size 3", "blocks of 16 tokens"),
        {**SHARED, "cp_kv_cache_interleave_size": 3, "block_size": 16},
        ONE_KV_HEAD,
    ),
    "ranks of another launcher": Case(
        ("external-launcher",),
        ("--distributed-executor-backend external_launcher", "only mp and Ray"),
        {**TWO_RANKS, "distributed_executor_backend": "external_launcher"},
    ),
    "experts that move": Case(
        ("eplb",),
        ("--enable-eplb", "experts stay"),
        {**TWO_RANKS, "enable_expert_parallel": True, "enable_eplb": True},
        ("Qwen3Moe", EXPERTS),
        patches=CUDA_ALIKE,
    ),
    "ranks that come and go": Case(
        ("eplb", "elastic-ep"),
        ("--enable-eplb", "--enable-elastic-ep"),
        {
            "data_parallel_size": 2,
            "enable_expert_parallel": True,
            "enable_eplb": True,
            "enable_elastic_ep": True,
            "eplb_config": {"use_async": False},
        },
        ("Qwen3Moe", EXPERTS),
        patches=CUDA_ALIKE,
    ),
    "experts exchanged by CUDA kernels": Case(
        ("all2all-backend",),
        ("--all2all-backend deepep_low_latency", "CUDA"),
        {"data_parallel_size": 2, "all2all_backend": "deepep_low_latency"},
        ("Qwen3Moe", EXPERTS),
    ),
    "sampling shared by ranks": Case(
        ("batch-sharded-sampling",),
        ("--enable-batch-sharded-sampling", "every rank"),
        {**TWO_RANKS, "enable_batch_sharded_sampling": True},
    ),
    "engines that are to outlive a rank": Case(
        ("fault-tolerance",),
        ("--enable-fault-tolerance", "restarted"),
        {"enable_fault_tolerance": True, "data_parallel_size": 2, "data_parallel_rank": 0},
        ("Qwen3Moe", EXPERTS),
    ),
    "asynchronous stages": Case(
        ("async-stages",),
        ("--async-scheduling over pipeline stages", "V1 runner"),
        {"pipeline_parallel_size": 2, "async_scheduling": True},
    ),
    "engines that Ray starts": Case(
        ("ray-data-parallel",),
        ("--data-parallel-backend ray is not supported", "only mp can start"),
        {
            **TWO_RANKS,
            "distributed_executor_backend": "ray",
            "data_parallel_backend": "ray",
        },
    ),
    "graphs that Ray compiles": Case(
        ("ray-compiled-graphs",),
        ("VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 is not supported", "unset it"),
        {**TWO_RANKS, "distributed_executor_backend": "ray"},
        environment={"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0"},
    ),
}

CACHE = {
    "two owners of a KV cache": Case(
        ("kv-offloading",),
        ("--kv-offloading-size with KV connector ExampleConnector", "one of the two"),
        {**connector(), "kv_offloading_size": 1},
    ),
    "KV cache that LMCache offloads": Case(
        ("kv-connector",),
        ("KV connector LMCacheMPConnector", "OffloadingConnector"),
        {"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"},
    ),
    "KV offloading to nowhere": Case(
        ("kv-offloading-bytes",),
        ("KV connector OffloadingConnector without memory", "--kv-offloading-size"),
        connector("OffloadingConnector", kv_connector_extra_config={}),
    ),
    "KV offloading to other places": Case(
        ("kv-offloading-spec",),
        ("spec_name or canonical_layout of OffloadingConnector",),
        {
            **connector(
                "OffloadingConnector",
                kv_connector_extra_config={"spec_name": "TieringOffloadingSpec"},
            ),
            "kv_offloading_size": 1,
        },
    ),
    "KV offloading in another form": Case(
        ("kv-offloading-spec",),
        ("canonical_layout of OffloadingConnector",),
        {
            **connector(
                "OffloadingConnector", kv_connector_extra_config={"canonical_layout": True}
            ),
            "kv_offloading_size": 1,
        },
    ),
    "KV offloading over stages": Case(
        ("kv-offloading-stages",),
        ("KV offloading over pipeline stages", "--tensor-parallel-size"),
        {"kv_offloading_size": 1, "pipeline_parallel_size": 2},
    ),
    "KV offloading of states that no block keeps": Case(
        ("kv-offloading-states",),
        ("KV offloading of", "without the prefix cache", "--enable-prefix-caching"),
        {"kv_offloading_size": 1, "enable_prefix_caching": False},
        HYBRID,
    ),
    "KV connector of one group": Case(
        ("kv-connector-states",),
        ("KV connector ExampleConnector with", "SupportsHMA", "--kv-offloading-size"),
        {**connector(), "enable_prefix_caching": False},
        HYBRID,
    ),
    "KV connector of another cache": Case(
        ("kv-connector",),
        ("KV connector NixlConnector", "planes", "ExampleConnector"),
        # What is asked of ours is not asked of others
        {
            **connector("NixlConnector", kv_connector_extra_config={}),
            "enable_chunked_prefill": True,
        },
    ),
    "KV connector of unknown code": Case(
        ("kv-connector",),
        ("KV connector ExampleConnector", "planes"),
        connector(
            kv_connector_module_path="vllm.distributed.kv_transfer.kv_connector.v1."
            "example_connector"
        ),
    ),
    "KV connector of prompts that are pooled": Case(
        ("kv-connector-pooling",),
        ("KV connector ExampleConnector with pooling",),
        {**connector(), **POOLING},
    ),
    "KV connector that knows no adapters": Case(
        ("kv-connector-lora-or-embeds",),
        ("KV connector ExampleConnector with LoRA or prompt embeddings", "token ids"),
        {**connector(), "enable_lora": True},
    ),
    "KV connector with chunks": Case(
        ("kv-connector-chunked-prefill",),
        ("KV connector ExampleConnector", "--no-enable-chunked-prefill"),
        {**connector(), "enable_chunked_prefill": True},
    ),
    "KV connector with prompts that are cut all the same": Case(
        ("kv-connector-chunked-prefill",),
        ("KV connector ExampleConnector", "--long-prefill-token-threshold"),
        {**connector(), "long_prefill_token_threshold": 9},
    ),
    "KV connector over everybody's folder": Case(
        ("kv-connector-folder",),
        ("KV connector ExampleConnector without a folder", "shared_storage_path"),
        connector(kv_connector_extra_config={}),
    ),
}

SEEING = {
    "V2 with adapters beside images": Case(
        ("v2-multimodal-adapters",),
        ("Model Runner V2 with adapters on a multimodal model", "VLLM_USE_V2_MODEL_RUNNER"),
        {"enforce_eager": True, "enable_lora": True},
        environment={"VLLM_USE_V2_MODEL_RUNNER": "1"},
    ),
    "V2 with a draft model behind images": Case(
        ("v2-multimodal-drafts",),
        ("Model Runner V2 with drafts for a multimodal model",),
        {"enforce_eager": True, **drafts()},
        drafter=("Qwen3", {"vocab_size": 876}),
        environment={"VLLM_USE_V2_MODEL_RUNNER": "1"},
    ),
    "V2 with drafts behind images": Case(
        ("v2-multimodal-drafts",),
        ("Model Runner V2 with drafts for a multimodal model", "VLLM_USE_V2_MODEL_RUNNER"),
        {"enforce_eager": True, **NGRAM},
        environment={"VLLM_USE_V2_MODEL_RUNNER": "1"},
    ),
    "images that attend both ways": Case(
        ("mm-prefix",),
        ("bidirectional attention within images", "--language-model-only"),
        {"hf_overrides": {"is_mm_prefix_lm": True}},
    ),
    "input that no encoder read": Case(
        ("mm-raw-input",),
        ("raw multimodal input", "placeholder tokens"),
        patches={"vllm.config.ModelConfig.is_multimodal_raw_input_only_model": True},
    ),
    "input of another kind": Case(
        ("modality",),
        ("video input", "image input is", """--limit-mm-per-prompt '{"video": 0}'"""),
        patches={f"{SUBJECTS}.inputs.MODALITIES": ("image",)},
    ),
    "prompt embeddings beside images": Case(
        ("mm-prompt-embeds",),
        ("--enable-prompt-embeds with a multimodal model",),
        {"enable_prompt_embeds": True},
    ),
    "pruned videos": Case(
        ("video-pruning",), ("--video-pruning-rate",), {"video_pruning_rate": 0.5}
    ),
    "an encoder only": Case(
        ("mm-encoder-only",), ("--mm-encoder-only",), {"mm_encoder_only": True}
    ),
    "encoders that attend otherwise": Case(
        ("mm-encoder-attention",),
        ("--mm-encoder-attn-backend",),
        {"mm_encoder_attn_backend": "FLASH_ATTN"},
    ),
    "encoder's connector": Case(
        ("ec-transfer",),
        ("--ec-transfer-config",),
        {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_consumer"}},
    ),
    "adapters of the tower": Case(
        ("lora-tower",),
        ("--enable-tower-connector-lora",),
        {"enable_lora": True, "enable_tower_connector_lora": True},
    ),
    "a draft model with one position for each token": Case(
        ("draft-model-mrope",),
        ("draft_model for a model with M-RoPE", "ngram or EAGLE"),
        drafts(),
        drafter=("Qwen3", {"vocab_size": 876}),
    ),
}
"""Of the model `tests.helpers.vision` calls Qwen2.5-VL."""

SPECULATION = {
    "suffix decoding": Case(
        ("speculative-method",),
        ("speculative method suffix", "ngram", "eagle3"),
        drafts("suffix"),
    ),
    "medusa": Case(
        ("speculative-method",),
        ("speculative method medusa", "ngram", "eagle3"),
        drafts("medusa", model=DRAFTER),
        drafter=("Qwen3", {EDITED: {"architectures": ["MedusaModel"], "model_type": "medusa"}}),
    ),
    "ngrams on the device": Case(
        ("speculative-method",), ("speculative method ngram_gpu", "ngram"), drafts("ngram_gpu")
    ),
    "a class of one's own": Case(
        ("speculative-method",),
        ("speculative method custom_class",),
        drafts("custom_class", model="package.module.Class"),
    ),
    "hidden states": Case(
        ("speculative-method",),
        ("speculative method extract_hidden_states",),
        drafts("extract_hidden_states", num_speculative_tokens=1),
    ),
    "embeddings of prompts that drafts are looked up in": Case(
        ("speculation-prompt-embeds",),
        ("--enable-prompt-embeds with speculation", "token ids"),
        {**NGRAM, "enable_prompt_embeds": True},
    ),
    "drafts over stages": Case(
        ("speculation-stages",),
        ("speculation over pipeline stages", "--tensor-parallel-size"),
        {**NGRAM, "pipeline_parallel_size": 2},
    ),
    "more drafts than attention of NPUs takes": Case(
        ("many-drafts",),
        ("num_speculative_tokens 16", "more than 16 tokens", "give at most 15"),
        {**HALF, "speculative_config": {"method": "ngram", "num_speculative_tokens": 16}},
        family="fia",
    ),
    "drafts of one pass": Case(
        ("parallel-drafting",),
        ("parallel drafting", "one token for each request"),
        drafts(parallel_drafting=True),
    ),
    "MTP layers that read the target's cache": Case(
        ("mtp-model",),
        ("mtp with Gemma4MTPModel", "from one position", "MiMoForCausalLM, Glm4MoeForCausalLM"),
        drafts("mtp", model=DRAFTER),
        drafter=("Qwen3", {EDITED: GEMMA4_ASSISTANT}),
    ),
    "MTP layers of several groups": Case(
        ("mtp-model",),
        ("mtp with Step3p5MTP", "several KV-cache groups", "use ngram"),
        drafts("mtp"),
        ("Qwen3", {EDITED: {"architectures": ["Step3p5ForCausalLM"]}}),
    ),
    "MTP layers that have not been tried": Case(
        ("mtp-model",),
        ("mtp with ErnieMTPModel", "have not been tried", "use ngram"),
        drafts("mtp"),
        ("Ernie4_5_Moe", {"num_nextn_predict_layers": 1, "moe_num_experts": 4}),
    ),
    "MTP of a model without MTP layers": Case(
        ("mtp-layers",),
        ("num_nextn_predict_layers of its config.json is absent or 0",),
        drafts("mtp"),
        ("Qwen2", {EDITED: {"architectures": ["MiMoForCausalLM"]}}),
    ),
    "MTP of a model with zero MTP layers": Case(
        ("mtp-layers",),
        ("num_nextn_predict_layers of its config.json is absent or 0",),
        drafts("mtp"),
        ("Qwen2", {"num_nextn_predict_layers": 0, EDITED: {"architectures": ["MiMoForCausalLM"]}}),
    ),
    "indices shared by MTP passes": Case(
        ("mtp-index-share",),
        ("index_share_for_mtp_iteration", "leave the key out"),
        drafts("mtp", index_share_for_mtp_iteration=True),
        ("Qwen2", {"num_nextn_predict_layers": 1, EDITED: {"architectures": ["MiMoForCausalLM"]}}),
    ),
    "a draft model without padding": Case(
        ("unpadded-drafter-batch",),
        ("disable_padded_drafter_batch (draft_model)", "leave the key out"),
        drafts(disable_padded_drafter_batch=True),
    ),
    "blocks of drafts": Case(
        ("rejection-sample-method",),
        ("rejection_sample_method block", "standard"),
        drafts(rejection_sample_method="block"),
    ),
    "made-up acceptance": Case(
        ("rejection-sample-method",),
        ("rejection_sample_method synthetic", "standard"),
        drafts(rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.5, 0.2]),
    ),
    "drafts by batch size": Case(
        ("dynamic-speculation",),
        ("num_speculative_tokens_per_batch_size", "a fixed number of drafts"),
        drafts(num_speculative_tokens_per_batch_size=[[1, 4, 2], [5, 8, 1]]),
    ),
    "drafts that are verified at times": Case(
        ("adaptive-verification",),
        ("enable_adaptive_verification", "every draft"),
        drafts(enable_adaptive_verification=True),
    ),
    "another vocabulary": Case(
        ("heterogeneous-vocab",), ("use_heterogeneous_vocab",), drafts(use_heterogeneous_vocab=True)
    ),
    "argmax by rank": Case(
        ("local-argmax",),
        ("use_local_argmax_reduction", "complete logits"),
        drafts(use_local_argmax_reduction=True),
    ),
    "a drafter's other backend": Case(
        ("drafter-attention-backend",),
        ("attention_backend", "leave the key out"),
        drafts(attention_backend="TRITON_ATTN"),
    ),
    "a drafter's experts of another backend": Case(
        ("drafter-moe-backend",),
        ("moe_backend triton", "leave the key out"),
        drafts(moe_backend="triton"),
    ),
    "a drafter's cache of another dtype": Case(
        ("drafter-kv-cache-dtype",), ("kv_cache_dtype fp8", "auto"), drafts(kv_cache_dtype="fp8")
    ),
    "a drafter's head in eight bits": Case(
        ("drafter-head-quantization",),
        ("draft_lm_head_quantization fp8", "leave the key out"),
        drafts(),
        patches={f"{SUBJECTS}.speculation.drafters_head_quantization": lambda _: "fp8"},
    ),
    "a drafter that the kernels can't run": Case(
        ("drafter-needs",),
        ("as a drafter (draft_model)", "kernel family atb has no logits soft cap"),
        {**HALF, **drafts()},
        drafter=("Gemma2", {}),
        family="atb",
    ),
    "a drafter for latent rows": Case(
        ("drafter-mla",),
        ("speculative method draft_model with MLA", "ngram"),
        drafts(),
        ("DeepseekV2", MLA),
    ),
    "a drafter of several windows": Case(
        ("drafter-layer-kinds",),
        ("as a drafter", "full_attention, sliding_attention"),
        drafts(),
        drafter=("Gemma2", {**WINDOWS, "num_hidden_layers": 2}),
    ),
    "a drafter of states": Case(
        ("drafter-states",),
        ("as a drafter", "no states"),
        drafts(),
        drafter=("Mamba2", {"num_heads": 8, "state_size": 16, "n_groups": 1}),
    ),
    "a drafter of chunks": Case(
        ("drafter-attention-chunks",),
        ("as a drafter", "limited to chunks"),
        drafts(),
        drafter=("Llama4", CHUNKS),
    ),
    "a drafter of few bits": Case(
        ("drafter-quantization",),
        ("as a drafter", "its weights are quantised (fp8)"),
        drafts(quantization="fp8"),
    ),
    "a drafter of large heads": Case(
        ("drafter-head-size",),
        ("as a drafter", "heads have size 1024"),
        drafts(),
        drafter=("Qwen3", {"head_dim": 1024}),
    ),
    "a drafter beside a KV connector": Case(
        ("drafter-kv-connector",),
        ("draft_model with a KV connector", "use ngram"),
        {**connector(), **drafts()},
    ),
}

COMING = {
    "settings of vllm-ascend": Case(
        ("vllm-ascend-keys",),
        (
            "enable_flashcomm1, weight_nz_mode in --additional-config",
            "docs/start/from-vllm-ascend.md",
        ),
        {"additional_config": {"weight_nz_mode": 1, "enable_flashcomm1": True, "of_others": 1}},
    ),
}

SEVERAL = {
    "several at once": Case(
        ("kv-cache-dtype", "quantization", "sleep-communicators", "kv-connector"),
        ("4 things have to be changed:",),
        {
            **HALF,
            "kv_cache_dtype": "fp8",
            "quantization": "fp8",
            "enable_sleep_mode": True,
            "enable_nccl_comm_suspend": True,
            **connector("NixlConnector"),
        },
    ),
}

ON_V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
EAGER = {"enforce_eager": True}
WITH_MTP = (
    "Qwen2",
    {"num_nextn_predict_layers": 1, EDITED: {"architectures": ["MiMoForCausalLM"]}},
)


SYNC_STAGES = {"pipeline_parallel_size": 2, "async_scheduling": False}


def on_v2(ids: tuple[str, ...], *parts: str, **settings: Any) -> Case:
    """An engine of vLLM's Model Runner V2 that is refused, with V1 suggested."""
    more = (*parts, "VLLM_USE_V2_MODEL_RUNNER")
    model = settings.pop("model", ("Qwen3", {}))
    return Case(ids, more, {**EAGER, **settings}, model, environment=ON_V2)


V2 = {
    "V2 without padded drafts": on_v2(
        ("v2-unpadded-drafter-batch",),
        "disable_padded_drafter_batch",
        model=WITH_MTP,
        **drafts("mtp", disable_padded_drafter_batch=True),
    ),
    "V2 with a draft model without padding": Case(
        ("v2-unpadded-drafter-batch",),
        ("disable_padded_drafter_batch", "drafts the same; leave the key out"),
        {**EAGER, **drafts(disable_padded_drafter_batch=True)},
        environment=ON_V2,
    ),
    "V2 with stages scheduled ahead": Case(
        ("v2-async-stages",),
        ("stages", "give --no-async-scheduling"),
        {**EAGER, "pipeline_parallel_size": 2},
        environment=ON_V2,
    ),
    "V2 with stages that pool": on_v2(
        ("v2-stages",), "pipeline stages", runner="pooling", convert="embed", **SYNC_STAGES
    ),
    "V2 with stages in several engines": on_v2(
        ("v2-stages-of-engines",),
        "pipeline stages and data parallelism",
        data_parallel_size=2,
        **SYNC_STAGES,
    ),
    "V2 with traces": Case(
        ("v2-replaced-samples",),
        ("--enable-trace-replay", "leave them out"),
        {**EAGER, "enable_trace_replay": True},
        environment=ON_V2,
    ),
    "V2 with kept kernels": Case(
        ("triton-kernels", "v2-kept-kernels"),
        ("triton_kernels keep",),
        {**EAGER, "additional_config": {"npu_prep": {"triton_kernels": "keep"}}},
        environment=ON_V2,
    ),
}

CASES = {
    **LIMITS,
    **GRAPHS,
    **MODELS,
    **FEATURES,
    **RANKS,
    **CACHE,
    **SPECULATION,
    **V2,
    **COMING,
    **SEVERAL,
}
