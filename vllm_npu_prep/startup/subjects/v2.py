"""What vLLM's Model Runner V2 can't do here yet, and V1 can."""

from vllm_npu_prep.startup.asked import Asked
from vllm_npu_prep.startup.refusal import Refusal, Subject

BY_V1 = "unset VLLM_USE_V2_MODEL_RUNNER: V1 has it"


DRAFTING = ("eagle", "eagle3", "mtp", "ngram")
"""Methods whose drafters the V2 runner has."""


def _has_other_ranks(asked: Asked) -> bool:
    parallel = asked.config.parallel_config
    return parallel.world_size_across_dp > parallel.tensor_parallel_size


def _sees(asked: Asked) -> bool:
    return asked.model.supports_multimodal_inputs or asked.model.uses_mrope


V2 = (
    Refusal(
        "v2-multimodal-adapters",
        lambda c: _sees(c) and c.config.lora_config is not None,
        "Model Runner V2 with adapters on a multimodal model ({model})",
        "it was tried without adapters",
        BY_V1,
    ),
    Refusal(
        "v2-prompt-embeds",
        lambda c: c.model.enable_prompt_embeds,
        "Model Runner V2 with --enable-prompt-embeds",
        "its steps read token ids",
        BY_V1,
    ),
    Refusal(
        "v2-states",
        lambda c: c.model.is_hybrid,
        "Model Runner V2 with a hybrid model ({model})",
        "its steps have no states",
        BY_V1,
    ),
    Refusal(
        "v2-ranks",
        _has_other_ranks,
        "Model Runner V2 with pipeline stages or data parallelism",
        "its steps agree over ranks of tensor parallelism only",
        BY_V1,
    ),
    Refusal(
        "v2-reasoning-budget",
        lambda c: c.config.reasoning_config is not None,
        "Model Runner V2 with --reasoning-config",
        "its sampler counts no thinking tokens",
        BY_V1,
    ),
    Refusal(
        "v2-replaced-samples",
        lambda c: c.model.enable_trace_replay or c.model.return_sampling_mask,
        "--enable-trace-replay or --return-sampling-mask",
        "their kernels of Triton are not replaced",
        "leave them out",
    ),
    Refusal(
        "v2-kept-kernels",
        lambda c: c.options.triton_kernels == "keep",
        "Model Runner V2 with triton_kernels keep",
        "kernels of its sampler were tested as they are replaced",
        "leave the option out, or unset VLLM_USE_V2_MODEL_RUNNER",
    ),
)


V2_SPECULATION = (
    Refusal(
        "v2-multimodal-drafts",
        _sees,
        "Model Runner V2 with drafts for a multimodal model ({model})",
        "its drafters read positions of one dimension, and token ids",
        BY_V1,
    ),
    Refusal(
        "v2-speculative-method",
        lambda c: c.speculative.method not in DRAFTING,
        "Model Runner V2 with speculative method {method}",
        "its drafters are EAGLE and EAGLE-3 heads, MTP layers and prompt lookup",
        "use one of {known}, or " + BY_V1,
        lambda c: {"method": c.speculative.method, "known": ", ".join(DRAFTING)},
    ),
    Refusal(
        "v2-mtp-layers",
        lambda c: c.speculative.use_multi_module_mtp(),
        "Model Runner V2 with several MTP layers ({model})",
        "its draft passes run one of them",
        "give num_speculative_tokens 1, or " + BY_V1,
    ),
    Refusal(
        "v2-drawn-drafts",
        lambda c: c.speculative.draft_sample_method != "greedy",
        "Model Runner V2 with draft_sample_method {name}",
        "its drafts are the most probable tokens",
        "leave the key out, or " + BY_V1,
        lambda c: {"name": c.speculative.draft_sample_method},
    ),
    Refusal(
        "v2-unpadded-drafter-batch",
        lambda c: c.speculative.disable_padded_drafter_batch,
        "Model Runner V2 with disable_padded_drafter_batch",
        "rejected tokens stay in its first draft pass",
        "leave the key out, or " + BY_V1,
    ),
)


def _is_wanted(asked: Asked) -> bool:
    """Whether somebody asked for V2; vLLM takes it by itself for watermarks, which are refused."""
    return asked.config.use_v2_model_runner and asked.config.watermark_config is None


SUBJECTS = (
    Subject("model-runner-v2", V2, when=_is_wanted),
    Subject(
        "model-runner-v2-speculation",
        V2_SPECULATION,
        when=lambda c: _is_wanted(c) and c.config.speculative_config is not None,
    ),
)
