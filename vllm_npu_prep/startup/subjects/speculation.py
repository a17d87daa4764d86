"""Refusals of ways to speculate, and of drafters."""

from itertools import chain

from vllm_npu_prep.compat.releases import drafters_head_quantization
from vllm_npu_prep.quantization.formats import method_of
from vllm_npu_prep.startup.asked import METHODS, MTP_MODELS, RequestedEngine, layer_types
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
        "known": ", ".join(chain(*MTP_MODELS.values())),
    }


METHOD = (
    Refusal(
        "speculative-method",
        lambda c: c.speculative.method not in METHODS,
        "speculative method {method}",
        "the plugin supports {known}",
        "use one of them",
        lambda c: {**_method(c), "known": ", ".join(METHODS)},
    ),
)

SPECULATION = (
    Refusal(
        "speculation-prompt-embeds",
        lambda c: c.model.enable_prompt_embeds,
        "--enable-prompt-embeds with speculation",
        "drafts are made from token ids, which prompt embeddings don't have",
        "use one of the two",
    ),
    Refusal(
        "speculation-stages",
        lambda c: c.config.parallel_config.pipeline_parallel_size > 1,
        "speculation over pipeline stages",
        "drafters have been tried on ranks that have all layers of the model",
        "use --tensor-parallel-size",
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
    ),
    Refusal(
        "parallel-drafting",
        lambda c: c.speculative.parallel_drafting,
        "parallel drafting ({method})",
        "each draft pass makes one token for each request",
        "leave the key out",
        _method,
    ),
    Refusal(
        "mtp-model",
        lambda c: c.mtp and c.mtp not in MTP_MODELS,
        "speculative method mtp with {layers}",
        "{why}",
        "use a model whose MTP layers draft ({known}), use ngram, or leave speculation out",
        _mtp,
    ),
    Refusal(
        "mtp-layers",
        lambda c: c.mtp in MTP_MODELS and not getattr(c.drafter.hf_config, "n_predict", None),
        "speculative method mtp for {model}",
        "num_nextn_predict_layers of its config.json is absent or 0, so it has no MTP layers",
        "use a checkpoint with MTP layers, or another method",
    ),
    Refusal(
        "mtp-index-share",
        lambda c: c.speculative.index_share_for_mtp_iteration,
        "index_share_for_mtp_iteration",
        "each draft pass chooses the positions to which it attends",
        "leave the key out",
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
    ),
    Refusal(
        "rejection-sample-method",
        lambda c: c.speculative.rejection_sample_method != "standard",
        "rejection_sample_method {name}",
        "drafts are verified by the standard rule only",
        "leave the key out",
        lambda c: {"name": c.speculative.rejection_sample_method},
    ),
    Refusal(
        "dynamic-speculation",
        lambda c: c.speculative.uses_dynamic_speculative_decoding(),
        "num_speculative_tokens_per_batch_size",
        "graphs and buffers are made for a fixed number of drafts",
        "leave the key out",
    ),
    Refusal(
        "adaptive-verification",
        lambda c: c.speculative.enable_adaptive_verification,
        "enable_adaptive_verification",
        "every draft is verified",
        "leave the key out",
    ),
    Refusal(
        "heterogeneous-vocab",
        lambda c: c.speculative.use_heterogeneous_vocab,
        "use_heterogeneous_vocab",
        "drafts must be token ids of the target model",
        "use a drafter of the same vocabulary",
    ),
    Refusal(
        "local-argmax",
        lambda c: c.speculative.use_local_argmax_reduction,
        "use_local_argmax_reduction",
        "every rank drafts from the complete logits",
        "leave the key out",
    ),
    Refusal(
        "drafter-attention-backend",
        lambda c: c.speculative.attention_backend is not None,
        "attention_backend in --speculative-config",
        "the plugin chooses the attention backend",
        "leave the key out",
    ),
    Refusal(
        "drafter-kv-cache-dtype",
        lambda c: c.speculative.kv_cache_dtype not in (None, "auto"),
        "kv_cache_dtype {dtype} in --speculative-config",
        "only auto is supported (the model's dtype)",
        "leave the key out",
        lambda c: {"dtype": c.speculative.kv_cache_dtype},
    ),
    Refusal(
        "drafter-head-quantization",
        lambda c: drafters_head_quantization(c.speculative) is not None,
        "draft_lm_head_quantization {name} in --speculative-config",
        "drafters score tokens by the target's own head",
        "leave the key out",
        lambda c: {"name": drafters_head_quantization(c.speculative)},
    ),
    Refusal(
        "drafter-moe-backend",
        lambda c: c.speculative.moe_backend is not None,
        "moe_backend {name} in --speculative-config",
        "the plugin has one implementation of experts",
        "leave the key out",
        lambda c: {"name": c.speculative.moe_backend},
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
    ),
    Refusal(
        "drafter-mla",
        lambda c: not c.mtp and (c.model.use_mla or c.drafter.use_mla),
        "speculative method {method} with MLA",
        "drafters read separate K and V, or latent rows of other sizes",
        "use ngram, or mtp if the model has MTP layers",
        _drafter,
    ),
    Refusal(
        "drafter-layer-kinds",
        lambda c: not c.mtp and len(layer_types(c.drafter)) > 1,  # MTP layers are of one kind
        "{drafter} as a drafter ({method})",
        "its layers ({kinds}) are of several kinds, and drafters have been tried with one",
        "use another drafter",
        _drafter,
    ),
    Refusal(
        "drafter-mrope",
        lambda c: c.speculative.method == "draft_model" and c.drafter.uses_mrope,
        "{drafter} as a drafter ({method})",
        "it has M-RoPE, and draft models have one position for each token",
        "use a draft model of text",
        _drafter,
    ),
    Refusal(
        "drafter-states",
        lambda c: c.drafter.is_hybrid or c.drafter.is_attention_free,
        "{drafter} as a drafter ({method})",
        "draft passes prepare no recurrent states",
        "use another drafter",
        _drafter,
    ),
    Refusal(
        "drafter-attention-chunks",
        lambda c: c.drafter.attention_chunk_size is not None,
        "{drafter} as a drafter ({method})",
        "draft passes attend to whole requests, but its attention is limited to chunks",
        "use another drafter",
        _drafter,
    ),
    Refusal(
        "drafter-quantization",
        lambda c: not c.mtp and method_of(c.drafter),  # MTP layers are quantised as their target is
        "{drafter} as a drafter ({method})",
        "its weights are quantised ({quantization}), and vLLM's names of a drafter's modules are "
        "not those in its files, which say how each was quantised",
        "use a drafter with weights of 16 or 32 bits; its target can be quantised",
        lambda c: {**_drafter(c), "quantization": method_of(c.drafter)},
    ),
    Refusal(
        "drafter-head-size",
        lambda c: not c.drafter.use_mla and does_not_fit(c.drafter.get_head_size(), c.family),
        "{drafter} as a drafter ({method})",
        "its heads have size {head_size}, and kernel family {family} takes multiples of "
        "{multiple} up to {largest}",
        "try another family, or the CPU fallback",
        lambda c: {
            **_drafter(c),
            "head_size": c.drafter.get_head_size(),
            "multiple": c.family.head_size_multiple,
            "largest": c.family.max_head_size,
        },
    ),
    Refusal(
        "drafter-kv-connector",
        lambda c: c.transfer is not None,
        "speculative method {method} with a KV connector",
        "the KV cache of drafters is not stored",
        "use ngram",
        _drafter,
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
