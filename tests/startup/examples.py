"""Engines that start-up refuses, by the id of the refusal: what a user would have to write."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.startup.npus import SUBJECTS
from vllm_npu_prep.config import SECTION
from vllm_npu_prep.wording import counted

Model = Mapping[str, Any]
"""The ``config.json`` of a small model, without the sizes that all small models have."""


def small_model(architecture: str, **config: Any) -> Model:
    """Return a small model by its architecture and what its ``config.json`` has beside."""
    return {"architectures": [architecture], **config}


QWEN3 = small_model("Qwen3ForCausalLM")
ONE_KV_HEAD = small_model("Qwen3ForCausalLM", num_key_value_heads=1)
EXPERTS = small_model("Qwen3MoeForCausalLM", num_experts=4, moe_intermediate_size=32)
WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
SHARED_LAYERS = small_model(
    "Gemma3nForCausalLM",
    **{**WINDOWS, "num_hidden_layers": 4, "layer_types": 2 * WINDOWS["layer_types"]},
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=512,
    altup_num_inputs=2,
    laurel_rank=8,
    activation_sparsity_pattern=[0.0] * 4,
)
"""A model whose last two layers read K and V of the two before them."""
CHUNKS = small_model(
    "Llama4ForCausalLM",
    intermediate_size_mlp=128,
    num_local_experts=0,
    moe_layers=[],
    interleave_moe_layer_step=0,
    attention_chunk_size=32,
    no_rope_layers=[1],
)
"""A model with attention chunks of 32 tokens."""
MLA = small_model(
    "DeepseekV2ForCausalLM",
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    q_lora_rank=None,
    n_routed_experts=0,
    first_k_dense_replace=1,
)
HYBRID = small_model(
    "Qwen3NextForCausalLM",
    num_hidden_layers=4,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    head_dim=64,
    num_experts=4,
    moe_intermediate_size=32,
)
"""A model with gated delta nets beside attention, of sizes that NPUs take."""
STATES = small_model("Mamba2ForCausalLM", num_heads=8, state_size=16, n_groups=1)
SOFT_CAP = small_model("Gemma2ForCausalLM")
MIMO = small_model("MiMoForCausalLM", model_type="qwen2", num_nextn_predict_layers=1)
"""A model that comes with an MTP layer, which drafts."""
VISION = small_model("Qwen2_5_VLForConditionalGeneration")

SPARSE: Model = {
    **MLA,
    "architectures": ["DeepseekV32ForCausalLM"],
    "q_lora_rank": 20,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
"""A model whose indexer chooses the positions to which a token attends."""

SPARSE_PAIR: Model = {**SPARSE, "num_hidden_layers": 2}

NGRAM = "-sc.method ngram -sc.num_speculative_tokens 2"
MTP = "-sc.method mtp -sc.num_speculative_tokens 2"
DRAFTS = "-sc.method draft_model -sc.num_speculative_tokens 2 -sc.model DRAFTER"
"""Flags in which ``DRAFTER`` stands for the folder of `Example.drafter`."""
CONNECTOR = "--kv-transfer-config.kv_role kv_both --kv-transfer-config.kv_connector"
"""Flags behind which the connector's name comes next."""
STORED = (
    f"{CONNECTOR} ExampleConnector --no-enable-chunked-prefill "
    "--kv-transfer-config.kv_connector_extra_config.shared_storage_path kv"
)
MOONCAKE = f"{CONNECTOR} MooncakeConnector"
HAS: dict[str, Any] = {
    "where": {"vllm_npu_prep.startup.subjects.cache._missing_transfer_engine": lambda _: ""}
}
"""Has Mooncake's transfer engine."""
STORE = f"{CONNECTOR} MooncakeStoreConnector"
STORE_EXTRA = "--kv-transfer-config.kv_connector_extra_config"


def store_of(**given: str) -> dict[str, Any]:
    """Has it, and a file that describes a store."""
    config = SimpleNamespace(**{"master_server_address": "here:50051", "protocol": "tcp", **given})
    read = "vllm.distributed.mooncake_store.MooncakeStoreConfig.load_from_config"
    return {"where": {**HAS["where"], read: lambda: config}}


HAS_STORE = store_of()
LACKS: dict[str, Any] = {
    "where": {
        "vllm_npu_prep.startup.subjects.cache._missing_transfer_engine": lambda _: "no mooncake"
    }
}
SHARED_BY_2 = "--tensor-parallel-size 2 --decode-context-parallel-size 2"
SHARED_PROMPTS = "--prefill-context-parallel-size 2"
ON_V1, ON_V2 = "VLLM_USE_V2_MODEL_RUNNER=0", "VLLM_USE_V2_MODEL_RUNNER=1"
ROTATES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
OPTION = f"--additional-config.{SECTION}"


@dataclass(frozen=True)
class Example:
    """An engine that is refused.

    Attributes
    ----------
    arguments
        Arguments of ``vllm serve``, behind variables of the environment, as a shell takes them.
    says
        A part of the refusal's message: what it fills in.
    model, drafter
        What is served, and what ``DRAFTER`` stands for.
    family
        Kernel family of NPUs that is asked for; empty for the CPU fallback.
    chip, cann, lacks
        The type of the NPU, its version of CANN, and functions that this CANN doesn't have.
    where
        What else has to be so, as values of dotted names of devices, packages or releases of vLLM.
    also
        Ids of refusals that apply beside it.
    until
        First release of vLLM that refuses it itself, or can't be asked for it any more.
    """

    arguments: str = ""
    says: str = ""
    model: Model = field(default_factory=lambda: QWEN3)
    drafter: Model = field(default_factory=lambda: QWEN3)
    family: str = ""
    chip: str = "Ascend910B1"
    cann: str = "9.1.0"
    lacks: tuple[str, ...] = ()
    where: Mapping[str, object] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    until: str = ""


MEANS = "--runner pooling --pooler-config.seq_pooling_type MEAN --max-num-batched-tokens 128"
"""Arguments of examples, for an engine that pools whole prompts."""
GEMMA4_ASSISTANT = small_model(
    "Gemma4AssistantForCausalLM",
    model_type="gemma4_assistant",
    text_config={
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
)
"""The drafter of an example, whose MTP layers read the target's K and V."""
EXPERT_PARALLEL = "--tensor-parallel-size 2 --enable-expert-parallel"
EXPERTS_MOVE = f"{EXPERT_PARALLEL} --enable-eplb"
EXCHANGED = f"{OPTION}.mc2 on --data-parallel-size 2 --enable-expert-parallel"
UNPADDED = f"{ON_V2} --enforce-eager -sc.disable_padded_drafter_batch true"
"""Arguments of examples."""

EXAMPLES: Mapping[str, tuple[Example, ...]] = {
    # features.py
    "drafter-alone": (
        Example(
            says="EagleLlamaForCausalLM as a model of its own",
            model=small_model("EagleLlamaForCausalLM", model_type="llama"),
        ),
    ),
    "encoder-decoder": (Example("--hf-overrides.is_encoder_decoder true"),),
    "alibi": (
        Example(model=small_model("BloomForCausalLM")),
        Example(model=small_model("BertModel", position_embedding_type="alibi")),
    ),
    "sparse-attention": (
        Example(
            says="its indexer has not been tried", model={**MLA, "q_lora_rank": 20, "index_topk": 8}
        ),
        Example(
            says="supported: DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM",
            model=small_model(
                "Qwen3ForCausalLM", sparse_attention_config={"sparse_topk_blocks": 2}
            ),
        ),
    ),
    "indexers": (
        Example(
            "--hf-overrides.index_topk_freq 1",
            "layer 1 would have an indexer, and indexer_types says that it has none; correct",
            model={
                **SPARSE_PAIR,
                "architectures": ["GlmMoeDsaForCausalLM"],
                "indexer_types": ["full", "shared"],
            },
        ),
        Example(says="indexers of layers SF", model={**SPARSE_PAIR, "index_topk_pattern": "SF"}),
    ),
    "states": (
        Example(says="these only: Qwen3NextForCausalLM, ", model=STATES),
        Example(
            model=small_model(
                "JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1, num_experts=1
            )
        ),
        # vLLM no longer knows this architecture, and would run transformers' code
        Example(
            model=small_model(
                "BambaForCausalLM", mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16
            )
        ),
    ),
    "diffusion": (Example("--hf-overrides.canvas_length 8"),),
    "attention-chunks-in-transformers": (
        Example("--model-impl transformers --block-size 16", model=CHUNKS),
    ),
    "quantization": (
        Example(
            "--quantization fp8 --dtype bfloat16",
            "--quantization fp8 is not supported by vllm_npu_prep: there are no kernels for fp8",
        ),
    ),
    "pooling-chunked-prefill": (Example(f"{MEANS} --enable-chunked-prefill"),),
    "pooling-prefix-caching": (Example(f"{MEANS} --enable-prefix-caching"),),
    "pooling-prompt-embeds": (Example("--runner pooling --enable-prompt-embeds"),),
    "batch-invariance": (Example("VLLM_BATCH_INVARIANT=1"),),
    "routed-experts": (Example("--enable-return-routed-experts", model=EXPERTS),),
    "sleep-graphs": (Example("--enable-sleep-mode --sleep-mode-offload-cudagraph"),),
    "sleep-communicators": (Example("--enable-sleep-mode --enable-nccl-comm-suspend"),),
    "weight-transfer": (Example("--weight-transfer-config.backend nccl"),),
    "fast-prefill": (Example("--kv-sharing-fast-prefill"),),
    "moe-backend": (Example("--moe-backend triton", "--moe-backend triton is"),),
    "attention-backend": (
        Example("--attention-backend TRITON_ATTN"),
        Example("--attention-config.backend_per_kind.sliding_window TRITON_ATTN"),
    ),
    "non-causal": (Example("--attention-config.use_non_causal true"),),
    "linear-backend": (Example("--linear-backend cutlass", "--linear-backend cutlass is"),),
    "watermarking": (Example("--watermark-config.key 7"),),
    "weight-offloading": (Example("--cpu-offload-gb 1"), Example("--offload-group-size 2")),
    "dual-batch-overlap": (Example("--enable-dbo --data-parallel-size 2", model=EXPERTS),),
    "profiler": (Example("--profiler-config.profiler cuda", 'profiler "cuda" in'),),
    "layerwise-nvtx": (Example("--enable-layerwise-nvtx-tracing"),),
    "lora-experts-data-parallel": (Example("--enable-lora --data-parallel-size 2", model=EXPERTS),),
    "lora-experts-eplb": (Example(f"--enable-lora {EXPERTS_MOVE}", model=EXPERTS),),
    "lora-experts-placement": (
        Example(
            f"--enable-lora {EXPERT_PARALLEL} --expert-placement-strategy round_robin",
            "--expert-placement-strategy round_robin",
            model=EXPERTS,
        ),
    ),
    "lora-experts-uneven": (
        Example(
            "--enable-lora --tensor-parallel-size 2 --enable-expert-parallel",
            "LoRA on 5 experts over 2 ranks",
            model={**EXPERTS, "num_experts": 5},
        ),
    ),
    "lora-experts-sharded": (
        Example(f"--enable-lora --fully-sharded-loras {EXPERT_PARALLEL}", model=EXPERTS),
    ),
    "lora-mla": (Example("--enable-lora", model=MLA),),
    # inputs.py
    "modality": (
        Example(
            says="only image input is supported; use --limit-mm-per-prompt '{\"video\": 0}'",
            model=VISION,
            where={f"{SUBJECTS}.inputs.MODALITIES": ("image",)},
        ),
    ),
    "mm-prefix": (Example("--hf-overrides.is_mm_prefix_lm true", model=VISION),),
    "mm-raw-input": (
        Example(
            model=VISION, where={"vllm.config.ModelConfig.is_multimodal_raw_input_only_model": True}
        ),
    ),
    "mm-prompt-embeds": (Example("--enable-prompt-embeds", model=VISION),),
    "video-pruning": (Example("--video-pruning-rate 0.5", model=VISION),),
    "mm-encoder-only": (Example("--mm-encoder-only", model=VISION),),
    "mm-encoder-attention": (Example("--mm-encoder-attn-backend FLASH_ATTN", model=VISION),),
    "ec-transfer": (
        Example(
            "--ec-transfer-config.ec_connector ECExampleConnector "
            "--ec-transfer-config.ec_role ec_consumer",
            model=VISION,
        ),
    ),
    "lora-tower": (Example("--enable-lora --enable-tower-connector-lora", model=VISION),),
    # kernels.py
    "logits-soft-cap": tuple(Example(model=SOFT_CAP, family=family) for family in ("fia", "atb")),
    "kv-sharing": (Example(model=SHARED_LAYERS, family="atb"),),
    "mla": (Example(model=MLA, family="atb"),),
    "sparse": (Example(model=SPARSE, family="atb", also=("mla",)),),
    "nz-cache": (Example(says="NPUs of type Ascend310P3: ", family="fia", chip="Ascend310P3"),),
    "chip": tuple(
        Example(says=f"NPUs of type {chip}: ", family="fia", chip=chip)
        for chip in ("Ascend950PR_9599", "Ascend910_9589", "Ascend910B", "Ascend310B1")
    ),
    "dtype": (
        Example(
            "--dtype float32",
            "--dtype torch.float32: kernel family fia takes bfloat16, float16",
            family="fia",
        ),
    ),
    "indexer-kv-dtype": (
        Example("--attention-config.indexer_kv_dtype fp8", "indexer_kv_dtype fp8 in", model=SPARSE),
    ),
    "kv-cache-dtype": (
        Example("--kv-cache-dtype fp8", "--kv-cache-dtype fp8: "),
        Example("--kv-cache-dtype bfloat16", "--kv-cache-dtype bfloat16: ", until="0.33.0"),
    ),
    "kv-cache-memory": tuple(
        Example(
            f"--kv-cache-memory-bytes {1 << 40} --tensor-parallel-size {ranks}",
            f"{counted(ranks, 'rank')} on this host would take {ranks << 40:,} bytes, and 7",
            where={f"{SUBJECTS}.kernels.free_memory": lambda: 7},
        )
        for ranks in (1, 2)
    ),
    "block-size": (
        Example("--block-size 24", "takes multiples of 16 up to 1024", family="fia"),
        Example("--block-size 256", "atb takes multiples of 16 up to 128", family="atb"),
    ),
    "cann-release": (
        Example(
            says="CANN 8.1.0: what its fused attention takes is not known before 8.3",
            family="fia",
            cann="8.1.0",
        ),
    ),
    "cann-functions": (
        Example(
            says="CANN 9.1.0: its libopapi has no aclnnScatterPaKvCache, which",
            family="fia",
            lacks=("aclnnScatterPaKvCache", "aclnnGatherPaKvCache"),
        ),
    ),
    "fused-attention": (
        Example(
            says='use {"npu_prep": {"attention": "atb"}} or CANN 9.0 or newer or the',
            model=small_model("Qwen3ForCausalLM", head_dim=96, num_key_value_heads=4),
            family="fia",
            cann="8.5.0",
        ),
        Example(
            "--block-size 768",
            "of 16 to 512 tokens for these heads; use --block-size 128 or",
            model=small_model("Qwen3ForCausalLM", head_dim=96),
            family="fia",
        ),
        Example(
            "--dtype float16",
            "takes bfloat16 for these heads; use --dtype bfloat16 or CANN 9.0",
            model=small_model("Qwen3ForCausalLM", head_dim=192, num_key_value_heads=4),
            family="fia",
            cann="8.5.0",
        ),
        Example(
            f"--block-size 64 {OPTION}.kernel_rules documented",
            'or {"npu_prep": {"kernel_rules": "release"}} or the CPU fallback',
            family="fia",
        ),
        Example(
            "--tensor-parallel-size 4",
            "1 head a rank of size 96 (bfloat16, blocks of 128)",
            model=small_model("Qwen3ForCausalLM", head_dim=96),
            family="fia",
            cann="8.5.0",
            also=("ranks-beyond-devices",),
        ),
    ),
    "latent-attention": (
        Example(says="takes up to 64 index heads of 128, not 2 of 16", model=SPARSE, family="fia"),
        Example(
            "--dtype bfloat16",
            "takes up to 2048 chosen positions, or 3072 to 8192 in steps of 1024, not 2049",
            model={**SPARSE, "index_head_dim": 128, "index_topk": 2049},
            family="fia",
        ),
        Example(says="rows of 512, not 32", model={**MLA, "kv_lora_rank": 32}, family="fia"),
        Example(says="keys of 64, not 8", model={**MLA, "qk_rope_head_dim": 8}, family="fia"),
        Example(says="not 16 and 128", model={**MLA, "qk_nope_head_dim": 16}, family="fia"),
        Example(
            says="up to 128 heads a rank, not 132",
            model={
                **MLA,
                "num_attention_heads": 132,
                "num_key_value_heads": 132,
                "hidden_size": 264,
            },
            family="fia",
        ),
        Example(
            f"--block-size 64 {OPTION}.kernel_rules documented",
            "blocks of 16 or 128 tokens, by its documentation, not 64",
            model=MLA,
            family="fia",
        ),
        Example(
            f"--max-num-seqs 4097 --max-num-batched-tokens 8192 {OPTION}.kernel_rules documented",
            "--max-num-seqs 4096, by its documentation, not 4097",
            model=MLA,
            family="fia",
        ),
    ),
    "attention-chunks-in-blocks": (
        Example(says="--block-size 128: attention chunks of 32 tokens", model=CHUNKS),
        Example("--block-size 12", "--block-size 12: attention chunks of 32 tokens", model=CHUNKS),
    ),
    "head-size": (
        Example(says="head size 1024", model=small_model("Qwen3ForCausalLM", head_dim=1024)),
        Example(
            says="multiples of 16 up to 256",
            model=small_model("Qwen3ForCausalLM", global_head_dim=512),
            family="fia",
        ),
    ),
    "triton-kernels": (
        Example(f"{OPTION}.triton_kernels keep", "vLLM finds none that works"),
        Example(
            f"{OPTION}.triton_kernels keep",
            "the CPU fallback has none",
            where={"vllm.triton_utils.HAS_TRITON": True},
        ),
    ),
    # cache.py
    "kv-offloading": (
        Example(f"{STORED} --kv-offloading-size 1", "with KV connector ExampleConnector"),
    ),
    "kv-connector": (
        Example("--kv-offloading-size 1 --kv-offloading-backend lmcache", "LMCacheMPConnector"),
        # What our connectors have to meet is not asked of others
        Example(f"{CONNECTOR} NixlConnector", "has these: ExampleConnector, "),
        Example(
            f"{STORED} --kv-transfer-config.kv_connector_module_path "
            "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"
        ),
    ),
    "kv-connector-pooling": (Example(f"{STORED} --runner pooling"),),
    "kv-connector-states": (
        Example(f"{STORED} --no-enable-prefix-caching", "/m is not supported", model=HYBRID),
    ),
    "kv-connector-lora-or-embeds": (Example(f"{STORED} --enable-lora"),),
    "kv-connector-chunked-prefill": (
        Example(f"{STORED} --enable-chunked-prefill"),
        Example(f"{STORED} --long-prefill-token-threshold 9"),
    ),
    "kv-connector-folder": (Example(f"{CONNECTOR} ExampleConnector --no-enable-chunked-prefill"),),
    "kv-offloading-bytes": (Example(f"{CONNECTOR} OffloadingConnector"),),
    "kv-offloading-spec": tuple(
        Example(
            f"{CONNECTOR} OffloadingConnector --kv-offloading-size 1 "
            f"--kv-transfer-config.kv_connector_extra_config.{key}"
        )
        for key in ("spec_name TieringOffloadingSpec", "canonical_layout true")
    ),
    "kv-offloading-states": (
        Example("--kv-offloading-size 1 --no-enable-prefix-caching", model=HYBRID),
    ),
    "kv-mooncake-engine": (
        Example(
            MOONCAKE,
            "without Mooncake's transfer engine is not supported by vllm_npu_prep: no",
            **LACKS,
        ),
    ),
    "kv-mooncake-config": tuple(
        Example(f"{MOONCAKE} --kv-transfer-config.kv_connector_extra_config.{given}", says, **HAS)
        for given, says in {
            "protocol tcp": "knows no protocol",
            "num_workers 0": "num_workers is 0",
            "mooncake_protocol ascend": "moved by tcp or rdma",
            "bootstrap_server_address 8998": "HOST:PORT",
        }.items()
    ),
    "kv-mooncake-drafts": (Example(f"{MOONCAKE} {NGRAM}", **HAS),),
    "kv-mooncake-data-parallel": (Example(f"{MOONCAKE} --data-parallel-size 2", **HAS),),
    "kv-mooncake-sleep": (Example(f"{MOONCAKE} --enable-sleep-mode", **HAS),),
    "kv-store-keys": (
        Example(f"{STORE} {STORE_EXTRA}.load_async false", "load_async in", **HAS_STORE),
    ),
    "kv-store-file": (
        Example(STORE, "'MOONCAKE_CONFIG_PATH' is not set", **HAS),
        Example(STORE, "names no master_server_address", **store_of(master_server_address="")),
        Example(STORE, "protocol is 'ascend'", **store_of(protocol="ascend")),
    ),
    "kv-store-beside": tuple(
        Example(f"{STORE} {given}", f"with {says}", **HAS_STORE)
        for says, given in {
            "drafts": NGRAM,
            "LoRA": "--enable-lora",
            "pipeline stages": "--pipeline-parallel-size 2",
            "data parallelism": "--data-parallel-size 2",
            "prompt embeddings": "--enable-prompt-embeds",
        }.items()
    ),
    "kv-store-states": (Example(f"{STORE} --no-enable-prefix-caching", model=HYBRID, **HAS_STORE),),
    "kv-offloading-stages": (Example("--kv-offloading-size 1 --pipeline-parallel-size 2"),),
    # speculation.py
    "speculative-method": (
        Example(NGRAM.replace("ngram", "suffix"), "suffix is not supported by vllm_npu_prep"),
        Example(NGRAM.replace("ngram", "ngram_gpu")),
        Example(NGRAM.replace("ngram", "extract_hidden_states").replace("2", "1")),
        Example(f"{NGRAM.replace('ngram', 'custom_class')} -sc.model a.module.Class"),
        Example(
            DRAFTS.replace("draft_model", "medusa"),
            drafter=small_model("MedusaModel", model_type="medusa"),
            until="0.33.0",
        ),
    ),
    "speculation-prompt-embeds": (Example(f"{NGRAM} --enable-prompt-embeds"),),
    "speculation-stages": (Example(f"{NGRAM} --pipeline-parallel-size 2"),),
    "many-drafts": (Example(NGRAM.replace("2", "16"), "tokens 16 is", family="fia"),),
    "parallel-drafting": (Example(f"{DRAFTS} -sc.parallel_drafting true", "(draft_model)"),),
    "mtp-model": (
        Example(
            DRAFTS.replace("draft_model", "mtp"),
            "its passes read the K and V of the target's layers, all from one position",
            drafter=GEMMA4_ASSISTANT,
        ),
        Example(
            MTP,
            "mtp with Step3p5MTP is not supported by vllm_npu_prep: its layers are in several",
            model=small_model("Step3p5ForCausalLM", model_type="qwen3"),
        ),
        Example(
            MTP,
            "its draft passes have not been tried",
            model=small_model(
                "Ernie4_5_MoeForCausalLM", num_nextn_predict_layers=1, moe_num_experts=4
            ),
        ),
    ),
    "mtp-layers": (
        Example(MTP, model={**MIMO, "num_nextn_predict_layers": 0}),
        Example(MTP, model=small_model("MiMoForCausalLM", model_type="qwen2")),
    ),
    "mtp-index-share": (Example(f"{MTP} -sc.index_share_for_mtp_iteration true", model=MIMO),),
    "unpadded-drafter-batch": (Example(f"{DRAFTS} -sc.disable_padded_drafter_batch true"),),
    "draft-model-mrope": (
        Example(
            f"{ON_V1} {DRAFTS}",
            model=VISION,
            drafter=small_model("Qwen3ForCausalLM", vocab_size=876),
        ),
    ),
    "rejection-sample-method": (
        Example(f"{DRAFTS} -sc.rejection_sample_method block", "method block is"),
        Example(
            f"{DRAFTS} -sc.rejection_sample_method synthetic "
            "-sc.synthetic_acceptance_rates [0.5,0.2]",
            "rejection_sample_method synthetic is",
        ),
    ),
    "dynamic-speculation": (
        Example(f"{DRAFTS} -sc.num_speculative_tokens_per_batch_size [[1,4,2],[5,8,1]]"),
    ),
    "adaptive-verification": (Example(f"{DRAFTS} -sc.enable_adaptive_verification true"),),
    "heterogeneous-vocab": (Example(f"{DRAFTS} -sc.use_heterogeneous_vocab true"),),
    "local-argmax": (Example(f"{DRAFTS} -sc.use_local_argmax_reduction true"),),
    "drafter-attention-backend": (Example(f"{DRAFTS} -sc.attention_backend TRITON_ATTN"),),
    "drafter-kv-cache-dtype": (
        Example(f"{DRAFTS} -sc.kv_cache_dtype fp8", "kv_cache_dtype fp8 in"),
    ),
    "drafter-head-quantization": (
        Example(
            DRAFTS,
            "draft_lm_head_quantization fp8 in",
            where={f"{SUBJECTS}.speculation.drafters_head_quantization": lambda _: "fp8"},
        ),
    ),
    "drafter-moe-backend": (Example(f"{DRAFTS} -sc.moe_backend triton", "moe_backend triton in"),),
    "drafter-needs": (
        Example(DRAFTS, "atb has no logits soft cap", drafter=SOFT_CAP, family="atb"),
    ),
    "drafter-mla": (Example(DRAFTS, model=MLA),),
    "drafter-layer-kinds": (
        Example(DRAFTS, "(full_attention, sliding_attention)", drafter={**SOFT_CAP, **WINDOWS}),
    ),
    "drafter-mrope": (
        Example(
            f"{ON_V2} {DRAFTS}",
            "it has M-RoPE",
            model=VISION,
            drafter=small_model("Qwen3ForCausalLM", vocab_size=876, rope_parameters=ROTATES),
        ),
    ),
    "drafter-states": (Example(DRAFTS, "/drafter as a drafter (draft_model)", drafter=STATES),),
    "drafter-attention-chunks": (Example(DRAFTS, drafter=CHUNKS),),
    "drafter-quantization": (Example(f"{DRAFTS} -sc.quantization fp8", "quantised (fp8)"),),
    "drafter-head-size": (
        Example(
            DRAFTS, "heads have size 1024", drafter=small_model("Qwen3ForCausalLM", head_dim=1024)
        ),
    ),
    "drafter-kv-connector": (Example(f"{STORED} {DRAFTS}"),),
    # graphs.py
    "breakable-graphs": (Example("VLLM_USE_BREAKABLE_CUDAGRAPH=1"),),
    "pieces-with-attention": (
        Example(
            "--compilation-config.splitting_ops []",
            "attention; leave the key out, or use cudagraph_mode FULL_DECODE_ONLY",
        ),
    ),
    "dense-masks-in-graphs": (
        Example(f"--compilation-config.cudagraph_mode FULL {OPTION}.mask dense"),
    ),
    "expanding-pins": (
        Example(
            "'PYTORCH_NPU_ALLOC_CONF=max_split_size_mb:64, pin_memory_expandable_segments:True'",
            "PYTORCH_NPU_ALLOC_CONF=max_split_size_mb:64,pin_memory_expandable_segments:True: ",
            family="fia",
        ),
    ),
    # ranks.py
    "ranks-beyond-devices": (
        Example(
            "--tensor-parallel-size 2 --data-parallel-size 2",
            "4 ranks on this host: 2 NPUs are visible, and each rank needs its own; lower",
            family="fia",
        ),
    ),
    "no-collectives": (
        Example(
            "--tensor-parallel-size 2",
            "2 ranks of one engine: libhccl.so",
            family="fia",
            where={f"{SUBJECTS}.ranks.has_collectives": {"cpu": True, "npu": False}.get},
        ),
    ),
    "external-launcher": (
        Example("--tensor-parallel-size 2 --distributed-executor-backend external_launcher"),
    ),
    "eplb-uneven": (
        Example(
            f"{EXPERTS_MOVE} --eplb-config.num_redundant_experts 1",
            "4 experts and 1 redundant ones on 2 ranks is",
            model=EXPERTS,
        ),
    ),
    "eplb-redundant": (
        Example(
            f"{EXPERTS_MOVE} --eplb-config.num_redundant_experts 1024",
            "num_redundant_experts 1024",
            model=EXPERTS,
        ),
    ),
    "eplb-communicator": (
        Example(
            f"{EXPERTS_MOVE} --eplb-config.use_async false --eplb-config.communicator torch_nccl",
            "communicator torch_nccl",
            model=EXPERTS,
        ),
    ),
    "eplb-stages": (Example(f"{EXPERTS_MOVE} --pipeline-parallel-size 2", model=EXPERTS),),
    "eplb-drafts": (
        Example(
            f"{EXPERTS_MOVE} -sc.method ngram -sc.num_speculative_tokens 2 -sc.prompt_lookup_max 3",
            model=EXPERTS,
        ),
    ),
    "eplb-sleep": (Example(f"{EXPERTS_MOVE} --enable-sleep-mode", model=EXPERTS),),
    "mc2-device": (Example(EXCHANGED, "the CPU fallback", model=EXPERTS),),
    "mc2-layout": (Example(f"{OPTION}.mc2 on", model=EXPERTS, family="fia"),),
    "mc2-ranks": (
        Example(
            EXCHANGED,
            "2 ranks is not supported by vllm_npu_prep: on A2 with CANN 8.5.0, its operators take "
            "multiples of 8 up to 256",
            model=EXPERTS,
            family="fia",
            cann="8.5.0",
        ),
    ),
    "mc2-functions": (
        Example(
            EXCHANGED,
            "no aclnnMoeDistributeDispatchV2",
            model=EXPERTS,
            family="fia",
            lacks=("aclnnMoeDistributeDispatchV2",),
        ),
    ),
    "mc2-beside": (
        Example(
            f"{EXCHANGED} --enable-eplb",
            "--enable-eplb",
            model=EXPERTS,
            family="fia",
        ),
    ),
    "elastic-ep": (
        Example(
            "--data-parallel-size 2 --enable-expert-parallel --enable-eplb --enable-elastic-ep "
            "--eplb-config.use_async false",
            model=EXPERTS,
            also=("eplb-communicator",),
        ),
    ),
    "all2all-backend": (
        Example(
            "--data-parallel-size 2 --all2all-backend deepep_low_latency",
            "--all2all-backend deepep_low_latency is",
            model=EXPERTS,
        ),
    ),
    "batch-sharded-sampling": (
        Example("--tensor-parallel-size 2 --enable-batch-sharded-sampling"),
    ),
    "fault-tolerance": (
        Example(
            "--enable-fault-tolerance --data-parallel-size 2 --data-parallel-rank 0", model=EXPERTS
        ),
    ),
    "async-stages": (
        Example(
            "VLLM_USE_V2_MODEL_RUNNER=0 --pipeline-parallel-size 2 --async-scheduling",
            until="0.33.0",
        ),
    ),
    "ray-data-parallel": (
        Example("--data-parallel-backend ray --distributed-executor-backend ray"),
    ),
    "ray-compiled-graphs": (
        Example(
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 "
            "--tensor-parallel-size 2 --distributed-executor-backend ray",
            until="0.33.0",
        ),
    ),
    "shared-contexts-family": (
        Example(SHARED_BY_2, "with kernel family atb", model=ONE_KV_HEAD, family="atb"),
    ),
    "sparse-stages": (
        Example(
            "--pipeline-parallel-size 2 --no-async-scheduling",
            model={**SPARSE_PAIR, "index_topk_pattern": "FS"},
        ),
    ),
    "shared-contexts-layers": (
        Example(SHARED_BY_2, model={**ONE_KV_HEAD, **WINDOWS, "use_sliding_window": True}),
    ),
    "shared-contexts-sparse": (Example(SHARED_BY_2, model=SPARSE),),
    "shared-contexts-speculation": (Example(f"{SHARED_BY_2} {NGRAM}", model=ONE_KV_HEAD),),
    "shared-contexts-connector": (Example(f"{SHARED_BY_2} {STORED}", model=ONE_KV_HEAD),),
    "shared-contexts-pooling": (Example(f"{SHARED_BY_2} --runner pooling", model=ONE_KV_HEAD),),
    "shared-contexts-beside": (
        Example(
            f"{SHARED_BY_2} --pipeline-parallel-size 2 --no-async-scheduling", model=ONE_KV_HEAD
        ),
    ),
    "shared-contexts-exchange": (
        Example(f"{SHARED_BY_2} --dcp-comm-backend a2a", model=ONE_KV_HEAD),
    ),
    "shared-contexts-older-name": (
        Example(
            f"{SHARED_BY_2} --dcp-kv-cache-interleave-size 2",
            "--dcp-kv-cache-interleave-size 2 is",
            model=ONE_KV_HEAD,
        ),
    ),
    "shared-contexts-runs": (
        Example(
            f"{SHARED_BY_2} --cp-kv-cache-interleave-size 3 --block-size 16",
            ": blocks of 16 tokens have to be whole runs",
            model=ONE_KV_HEAD,
        ),
    ),
    "shared-prompts-family": (Example(SHARED_PROMPTS, "with kernel family atb", family="atb"),),
    "shared-prompts-layers": (
        Example(SHARED_PROMPTS, model={**QWEN3, **WINDOWS, "use_sliding_window": True}),
    ),
    "shared-prompts-choices": (
        Example(
            f"{SHARED_PROMPTS} {OPTION}.record.dir /tmp {OPTION}.record.choices true",
            '"npu_prep.record.choices" with',
            model=SPARSE,
        ),
    ),
    "shared-prompts-decodes": (Example(f"{SHARED_PROMPTS} {SHARED_BY_2}", model=ONE_KV_HEAD),),
    "shared-prompts-upstream": (Example(f"{SHARED_PROMPTS} --enable-lora"),),
    "shared-prompts-speculation": (Example(f"{SHARED_PROMPTS} {NGRAM}"),),
    "shared-prompts-connector": (Example(f"{SHARED_PROMPTS} {STORED}"),),
    "shared-prompts-pooling": (Example(f"{SHARED_PROMPTS} --runner pooling"),),
    "shared-prompts-beside": (Example(f"{SHARED_PROMPTS} --data-parallel-size 2", model=EXPERTS),),
    # states.py
    "states-release": (
        Example(
            says="aclnnChunkGatedDeltaRule, which gated delta nets need; install CANN 9.1 or",
            model=HYBRID,
            family="fia",
            cann="9.0.0",
            lacks=("aclnnChunkGatedDeltaRule",),
        ),
    ),
    "states-kernels": (Example(model={**HYBRID, "head_dim": 128}, family="atb"),),
    "states-dtype": (
        Example("--dtype float16", "--dtype float16 for", model=HYBRID, family="fia"),
    ),
    "states-heads": (
        Example(
            says="linear attention with 2 heads of 16 and 4 of 8",
            model={**HYBRID, "linear_key_head_dim": 16, "linear_value_head_dim": 8},
            family="fia",
        ),
    ),
    "states-page": (
        Example(
            "--block-size 96",
            "the K of 512 tokens, which is no multiple of it; give --block-size 128",
            model=HYBRID,
            family="fia",
        ),
    ),
    "states-ranks": (Example("--pipeline-parallel-size 2", model=HYBRID),),
    "states-alone": (
        Example(model={**HYBRID, "layer_types": ["linear_attention"], "num_hidden_layers": 1}),
    ),
    "states-speculation": (
        Example(f"{DRAFTS} --no-enable-prefix-caching", "method draft_model with", model=HYBRID),
    ),
    "states-drafts": (
        Example(
            f"{NGRAM.replace('2', '8')} --no-enable-prefix-caching",
            "num_speculative_tokens 8 for",
            model=HYBRID,
            family="fia",
        ),
    ),
    "states-lora": (Example("--enable-lora", model=HYBRID),),
    "states-pooling": (Example("--runner pooling", model=HYBRID),),
    "states-replay": (Example("--use-replayssm", model=HYBRID),),
    # v2.py
    "v2-logits-processors": (
        Example(
            f"{ON_V2} --enforce-eager "
            "--logits-processors vllm.v1.sample.logits_processor:MinPLogitsProcessor",
            "processors MinPLogitsProcessor is not supported",
        ),
    ),
    "v2-kept-kernels": (
        Example(f"{ON_V2} --enforce-eager {OPTION}.triton_kernels keep", also=("triton-kernels",)),
    ),
    "v2-unpadded-drafter-batch": (
        Example(f"{UNPADDED} {MTP}", "or unset VLLM_USE_V2_MODEL_RUNNER: V1 has it", model=MIMO),
        Example(f"{UNPADDED} {DRAFTS}", "V1 has it, except for draft models"),
    ),
    # vllm_ascend.py
    "vllm-ascend-keys": (
        Example(
            "--additional-config.weight_nz_mode 1 --additional-config.enable_mlapo true",
            "enable_mlapo, weight_nz_mode in --additional-config",
        ),
    ),
}
"""At least one for each refusal, in the files of `vllm_npu_prep.startup.subjects`."""
