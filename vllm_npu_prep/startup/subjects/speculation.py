"""Refusals of ways to speculate, and of drafters."""

from vllm_npu_prep.compat.releases import drafters_head_quantization
from vllm_npu_prep.quantization.formats import method_of
from vllm_npu_prep.startup.asked import METHODS, MTP_MODELS, RequestedEngine, layer_types
from vllm_npu_prep.startup.example import (
    CHUNKS,
    DRAFTS,
    MIMO,
    MLA,
    MTP,
    NGRAM,
    ON_V1,
    ON_V2,
    SOFT_CAP,
    STATES,
    STORED,
    VISION,
    WINDOWS,
    Example,
    small_model,
)
from vllm_npu_prep.startup.refusal import Refusal, Subject
from vllm_npu_prep.startup.subjects.kernels import does_not_fit, lacking

MOST_DRAFTS = 15
"""Most drafts of a decode on NPUs: vllm-project/vllm-ascend asserts a decode length of at most 16
in the layout TND (``attention_v1.py``).
"""


def _method(asked: RequestedEngine) -> dict[str, object]:
    return {"method": asked.speculative.method}


def _drafter(asked: RequestedEngine) -> dict[str, object]:
    return {
        **_method(asked),
        "drafter": asked.drafter.model,
        "lacks": ", ".join(need.name for need in lacking(asked.drafter, asked.family)),
        "kinds": ", ".join(sorted(layer_types(asked.drafter))),
    }


_MTP_REASONS = {
    "Gemma4MTPModel": "its passes read the K and V of the target's layers, all from one position",
    "Step3p5MTP": "its layers are in several KV-cache groups, and each makes a pass of its own",
}
"""Why MTP layers of these architectures don't draft; those of others have not been tried."""


def _mtp(asked: RequestedEngine) -> dict[str, object]:
    return {
        "layers": asked.mtp,
        "why": _MTP_REASONS.get(asked.mtp, "its draft passes have not been tried"),
        "known": ", ".join(MTP_MODELS.values()),
    }


ROTATES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
"""Parameters of M-RoPE, for an example."""
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

METHOD = (
    Refusal(
        "speculative-method",
        lambda c: c.speculative.method not in METHODS,
        "speculative method {method}",
        "the plugin supports {known}",
        "use one of them",
        lambda c: {**_method(c), "known": ", ".join(METHODS)},
        example=(
            Example(NGRAM.replace("ngram", "suffix"), "suffix is not supported by vllm_npu_prep"),
            Example(NGRAM.replace("ngram", "ngram_gpu")),
            Example(NGRAM.replace("ngram", "extract_hidden_states").replace("2", "1")),
            Example(f"{NGRAM.replace('ngram', 'custom_class')} -sc.model a.module.Class"),
            Example(
                DRAFTS.replace("draft_model", "medusa"),
                drafter=small_model("MedusaModel", model_type="medusa"),
            ),
        ),
    ),
)

SPECULATION = (
    Refusal(
        "speculation-prompt-embeds",
        lambda c: c.model.enable_prompt_embeds,
        "--enable-prompt-embeds with speculation",
        "drafts are made from token ids, which prompt embeddings don't have",
        "use one of the two",
        example=f"{NGRAM} --enable-prompt-embeds",
    ),
    Refusal(
        "speculation-stages",
        lambda c: c.config.parallel_config.pipeline_parallel_size > 1,
        "speculation over pipeline stages",
        "drafters have been tried on ranks that have all layers of the model",
        "use --tensor-parallel-size",
        example=f"{NGRAM} --pipeline-parallel-size 2",
    ),
    Refusal(
        "many-drafts",
        lambda c: (
            c.family.device_type == "npu" and c.speculative.num_speculative_tokens > MOST_DRAFTS
        ),
        "num_speculative_tokens {number}",
        "attention of NPUs is not known to take decodes of more than {most} tokens",
        "give at most {drafts}",
        lambda c: {
            "number": c.speculative.num_speculative_tokens,
            "most": MOST_DRAFTS + 1,
            "drafts": MOST_DRAFTS,
        },
        example=Example(NGRAM.replace("2", "16"), "tokens 16 is", family="fia"),
    ),
    Refusal(
        "parallel-drafting",
        lambda c: c.speculative.parallel_drafting,
        "parallel drafting ({method})",
        "each draft pass makes one token for each request",
        "leave the key out",
        _method,
        example=Example(f"{DRAFTS} -sc.parallel_drafting true", "(draft_model)"),
    ),
    Refusal(
        "mtp-model",
        lambda c: c.mtp and c.mtp not in MTP_MODELS,
        "speculative method mtp with {layers}",
        "{why}",
        "models whose MTP layers draft: {known}; for others use ngram, or leave speculation out",
        _mtp,
        example=(
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
    ),
    Refusal(
        "mtp-layers",
        lambda c: c.mtp in MTP_MODELS and not getattr(c.drafter.hf_config, "n_predict", None),
        "speculative method mtp for {model}",
        "num_nextn_predict_layers of its config.json is absent or 0, so it has no MTP layers",
        "use a checkpoint with MTP layers, or another method",
        example=(
            Example(MTP, model={**MIMO, "num_nextn_predict_layers": 0}),
            Example(MTP, model=small_model("MiMoForCausalLM", model_type="qwen2")),
        ),
    ),
    Refusal(
        "mtp-index-share",
        lambda c: c.speculative.index_share_for_mtp_iteration,
        "index_share_for_mtp_iteration",
        "no MTP layers with an indexer draft",
        "leave the key out",
        example=Example(f"{MTP} -sc.index_share_for_mtp_iteration true", model=MIMO),
    ),
    Refusal(
        "unpadded-drafter-batch",
        lambda c: (
            c.speculative.method == "draft_model"
            and c.speculative.disable_padded_drafter_batch
            and not c.config.use_v2_model_runner  # which refuses the key for every method
        ),
        "disable_padded_drafter_batch (draft_model)",
        "vLLM's V1 runner runs draft models on padded batches only",
        "leave the key out",
        example=f"{DRAFTS} -sc.disable_padded_drafter_batch true",
    ),
    Refusal(
        "draft-model-mrope",
        lambda c: (
            c.speculative.method == "draft_model"
            and c.model.uses_mrope
            and not c.config.use_v2_model_runner
        ),
        "speculative method draft_model for a model with M-RoPE ({model})",
        "draft models of vLLM's V1 runner have one position for each token",
        "use ngram or EAGLE, or unset VLLM_USE_V2_MODEL_RUNNER: V2 has it",
        example=Example(
            f"{ON_V1} {DRAFTS}",
            model=VISION,
            drafter=small_model("Qwen3ForCausalLM", vocab_size=876),
        ),
    ),
    Refusal(
        "rejection-sample-method",
        lambda c: c.speculative.rejection_sample_method != "standard",
        "rejection_sample_method {name}",
        "drafts are verified by the standard rule only",
        "leave the key out",
        lambda c: {"name": c.speculative.rejection_sample_method},
        example=(
            Example(f"{DRAFTS} -sc.rejection_sample_method block", "method block is"),
            Example(
                f"{DRAFTS} -sc.rejection_sample_method synthetic "
                "-sc.synthetic_acceptance_rates [0.5,0.2]",
                "rejection_sample_method synthetic is",
            ),
        ),
    ),
    Refusal(
        "dynamic-speculation",
        lambda c: c.speculative.uses_dynamic_speculative_decoding(),
        "num_speculative_tokens_per_batch_size",
        "graphs and buffers are made for a fixed number of drafts",
        "leave the key out",
        example=f"{DRAFTS} -sc.num_speculative_tokens_per_batch_size [[1,4,2],[5,8,1]]",
    ),
    Refusal(
        "adaptive-verification",
        lambda c: c.speculative.enable_adaptive_verification,
        "enable_adaptive_verification",
        "every draft is verified",
        "leave the key out",
        example=f"{DRAFTS} -sc.enable_adaptive_verification true",
    ),
    Refusal(
        "heterogeneous-vocab",
        lambda c: c.speculative.use_heterogeneous_vocab,
        "use_heterogeneous_vocab",
        "drafts must be token ids of the target model",
        "use a drafter of the same vocabulary",
        example=f"{DRAFTS} -sc.use_heterogeneous_vocab true",
    ),
    Refusal(
        "local-argmax",
        lambda c: c.speculative.use_local_argmax_reduction,
        "use_local_argmax_reduction",
        "every rank drafts from the complete logits",
        "leave the key out",
        example=f"{DRAFTS} -sc.use_local_argmax_reduction true",
    ),
    Refusal(
        "drafter-attention-backend",
        lambda c: c.speculative.attention_backend is not None,
        "attention_backend in --speculative-config",
        "the plugin chooses the attention backend",
        "leave the key out",
        example=f"{DRAFTS} -sc.attention_backend TRITON_ATTN",
    ),
    Refusal(
        "drafter-kv-cache-dtype",
        lambda c: c.speculative.kv_cache_dtype not in (None, "auto"),
        "kv_cache_dtype {dtype} in --speculative-config",
        "only auto is supported (the model's dtype)",
        "leave the key out",
        lambda c: {"dtype": c.speculative.kv_cache_dtype},
        example=Example(f"{DRAFTS} -sc.kv_cache_dtype fp8", "kv_cache_dtype fp8 in"),
    ),
    Refusal(
        "drafter-head-quantization",
        lambda c: drafters_head_quantization(c.speculative) is not None,
        "draft_lm_head_quantization {name} in --speculative-config",
        "drafters score tokens by the target's own head",
        "leave the key out",
        lambda c: {"name": drafters_head_quantization(c.speculative)},
        example=Example(
            DRAFTS,
            "draft_lm_head_quantization fp8 in",
            where={f"{__name__}.drafters_head_quantization": lambda _: "fp8"},
        ),
    ),
    Refusal(
        "drafter-moe-backend",
        lambda c: c.speculative.moe_backend is not None,
        "moe_backend {name} in --speculative-config",
        "the plugin has one implementation of experts",
        "leave the key out",
        lambda c: {"name": c.speculative.moe_backend},
        example=Example(f"{DRAFTS} -sc.moe_backend triton", "moe_backend triton in"),
    ),
)

DRAFTERS = (
    Refusal(
        "drafter-needs",
        lambda c: lacking(c.drafter, c.family),
        "{drafter} as a drafter ({method})",
        "kernel family {family} has no {lacks}",
        "use the CPU fallback",
        _drafter,
        example=Example(DRAFTS, "atb has no logits soft cap", drafter=SOFT_CAP, family="atb"),
    ),
    Refusal(
        "drafter-mla",
        lambda c: not c.mtp and (c.model.use_mla or c.drafter.use_mla),
        "speculative method {method} with MLA",
        "drafters read separate K and V, or latent rows of other sizes",
        "use ngram, or mtp if the model has MTP layers",
        _drafter,
        example=Example(DRAFTS, model=MLA),
    ),
    Refusal(
        "drafter-layer-kinds",
        lambda c: not c.mtp and len(layer_types(c.drafter)) > 1,  # MTP layers are of one kind
        "{drafter} as a drafter ({method})",
        "its layers ({kinds}) are of several kinds, and drafters have been tried with one",
        "use another drafter",
        _drafter,
        example=Example(
            DRAFTS, "(full_attention, sliding_attention)", drafter={**SOFT_CAP, **WINDOWS}
        ),
    ),
    Refusal(
        "drafter-mrope",
        lambda c: c.speculative.method == "draft_model" and c.drafter.uses_mrope,
        "{drafter} as a drafter ({method})",
        "it has M-RoPE, and draft models have one position for each token",
        "use a draft model of text",
        _drafter,
        example=Example(
            f"{ON_V2} {DRAFTS}",
            "it has M-RoPE",
            model=VISION,
            drafter=small_model("Qwen3ForCausalLM", vocab_size=876, rope_parameters=ROTATES),
        ),
    ),
    Refusal(
        "drafter-states",
        lambda c: c.drafter.is_hybrid or c.drafter.is_attention_free,
        "{drafter} as a drafter ({method})",
        "draft passes prepare no recurrent states",
        "use another drafter",
        _drafter,
        example=Example(DRAFTS, "/drafter as a drafter (draft_model)", drafter=STATES),
    ),
    Refusal(
        "drafter-attention-chunks",
        lambda c: c.drafter.attention_chunk_size is not None,
        "{drafter} as a drafter ({method})",
        "draft passes attend to whole requests, but its attention is limited to chunks",
        "use another drafter",
        _drafter,
        example=Example(DRAFTS, drafter=CHUNKS),
    ),
    Refusal(
        "drafter-quantization",
        lambda c: not c.mtp and method_of(c.drafter),  # MTP layers are quantised as their target is
        "{drafter} as a drafter ({method})",
        "its weights are quantised ({quantization}), and vLLM's names of a drafter's modules are "
        "not those in its files, which say how each was quantised",
        "use a drafter with weights of 16 or 32 bits; its target can be quantised",
        lambda c: {**_drafter(c), "quantization": method_of(c.drafter)},
        example=Example(f"{DRAFTS} -sc.quantization fp8", "quantised (fp8)"),
    ),
    Refusal(
        "drafter-head-size",
        lambda c: not c.drafter.use_mla and does_not_fit(c.drafter.get_head_size(), c.family),
        "{drafter} as a drafter ({method})",
        "its heads have size {head_size}, and kernel family {family} takes multiples of "
        "{multiple} up to {largest}",
        "another family or the CPU fallback may take it",
        lambda c: {
            **_drafter(c),
            "head_size": c.drafter.get_head_size(),
            "multiple": c.family.head_size_multiple,
            "largest": c.family.max_head_size,
        },
        example=Example(
            DRAFTS, "heads have size 1024", drafter=small_model("Qwen3ForCausalLM", head_dim=1024)
        ),
    ),
    Refusal(
        "drafter-kv-connector",
        lambda c: c.transfer is not None,
        "speculative method {method} with a KV connector",
        "the KV cache of drafters is not stored",
        "use ngram",
        _drafter,
        example=f"{STORED} {DRAFTS}",
    ),
)


def _speculates(asked: RequestedEngine) -> bool:
    return asked.config.speculative_config is not None


SUBJECTS = (
    Subject("speculative-method", METHOD, when=_speculates),
    Subject(
        "speculation",
        SPECULATION,
        when=lambda c: _speculates(c) and c.speculative.method in METHODS,
    ),
    Subject("drafters", DRAFTERS, when=lambda c: c.has_drafter),
)
