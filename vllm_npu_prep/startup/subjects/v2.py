"""Refusals of what vLLM's Model Runner V2 can't do here yet; V1 has most of it."""

from vllm_npu_prep.startup.asked import RequestedEngine
from vllm_npu_prep.startup.example import (
    DRAFTS,
    MIMO,
    MTP,
    NGRAM,
    ON_V2,
    OPTION,
    VISION,
    Example,
    small_model,
)
from vllm_npu_prep.startup.refusal import Refusal, Subject

BY_V1 = "unset VLLM_USE_V2_MODEL_RUNNER: V1 has it"


def _has_stages(asked: RequestedEngine) -> bool:
    return asked.config.parallel_config.pipeline_parallel_size > 1


def _has_engines(asked: RequestedEngine) -> bool:
    return asked.config.parallel_config.data_parallel_size > 1


def _sees(asked: RequestedEngine) -> bool:
    return asked.model.supports_multimodal_inputs or asked.model.uses_mrope


STAGES = f"{ON_V2} --enforce-eager --pipeline-parallel-size 2 --no-async-scheduling"
UNPADDED = f"{ON_V2} --enforce-eager -sc.disable_padded_drafter_batch true"
"""Arguments of examples, as `STAGES` is."""

V2 = (
    Refusal(
        "v2-multimodal-adapters",
        lambda c: _sees(c) and c.config.lora_config is not None,
        "Model Runner V2 with adapters on a multimodal model ({model})",
        "it was tried without adapters",
        BY_V1,
        example=Example(f"{ON_V2} --enforce-eager --enable-lora", model=VISION),
    ),
    Refusal(
        "v2-async-stages",
        lambda c: _has_stages(c) and c.config.scheduler_config.async_scheduling,
        "Model Runner V2 with asynchronous scheduling over pipeline stages",
        "the scheduler tells the stages what was sampled, so it has to know it before their step",
        "give --no-async-scheduling",
        example=f"{ON_V2} --enforce-eager --pipeline-parallel-size 2",
    ),
    Refusal(
        "v2-stages",
        lambda c: _has_stages(c) and (_sees(c) or c.model.runner_type == "pooling"),
        "Model Runner V2 with pipeline stages for {model}",
        "it was tried with models that generate from text",
        BY_V1,
        example=f"{STAGES} --runner pooling --convert embed",
    ),
    Refusal(
        "v2-stages-of-engines",
        lambda c: _has_stages(c) and _has_engines(c),
        "Model Runner V2 with pipeline stages and data parallelism",
        "each was tried without the other",
        BY_V1,
        example=f"{STAGES} --data-parallel-size 2",
    ),
    Refusal(
        "v2-replaced-samples",
        lambda c: c.model.enable_trace_replay or c.model.return_sampling_mask,
        "--enable-trace-replay or --return-sampling-mask",
        "their kernels of Triton are not replaced",
        "leave them out",
        example=f"{ON_V2} --enforce-eager --enable-trace-replay",
    ),
    Refusal(
        "v2-kept-kernels",
        lambda c: c.options.triton_kernels == "keep",
        "Model Runner V2 with triton_kernels keep",
        "kernels of its sampler were tested as they are replaced",
        "leave the option out, or unset VLLM_USE_V2_MODEL_RUNNER",
        example=Example(
            f"{ON_V2} --enforce-eager {OPTION}.triton_kernels keep", also=("triton-kernels",)
        ),
    ),
)


V2_SPECULATION = (
    Refusal(
        "v2-multimodal-drafts",
        _sees,
        "Model Runner V2 with drafts for a multimodal model ({model})",
        "its drafters read positions of one dimension, and token ids",
        BY_V1,
        example=(
            Example(f"{ON_V2} --enforce-eager {NGRAM}", model=VISION),
            Example(
                f"{ON_V2} --enforce-eager {DRAFTS}",
                model=VISION,
                drafter=small_model("Qwen3ForCausalLM", vocab_size=876),
            ),
        ),
    ),
    Refusal(
        "v2-unpadded-drafter-batch",
        lambda c: c.speculative.disable_padded_drafter_batch,
        "Model Runner V2 with disable_padded_drafter_batch",
        "rejected tokens stay in its first draft pass, which drafts the same",
        "leave the key out{or_v1}",
        lambda c: {"or_v1": "" if c.speculative.method == "draft_model" else f", or {BY_V1}"},
        example=(
            Example(
                f"{UNPADDED} {MTP}", "or unset VLLM_USE_V2_MODEL_RUNNER: V1 has it", model=MIMO
            ),
            Example(f"{UNPADDED} {DRAFTS}", "drafts the same; leave the key out"),
        ),
    ),
)


def could_run(asked: RequestedEngine) -> bool:
    """Tell whether an engine on V1 generates from text, and V2 has all that it asks for."""
    if asked.config.use_v2_model_runner or asked.pools:
        return False
    if asked.model.is_encoder_decoder or _sees(asked):
        return False
    refusals = V2 if asked.config.speculative_config is None else V2 + V2_SPECULATION
    return not any(refusal.when(asked) for refusal in refusals)


def _is_wanted(asked: RequestedEngine) -> bool:
    """Tell whether somebody asked for V2.

    vLLM takes V2 by itself for watermarks, which have a refusal of their own.
    """
    return asked.config.use_v2_model_runner and asked.config.watermark_config is None


SUBJECTS = (
    Subject("model-runner-v2", V2, when=_is_wanted),
    Subject(
        "model-runner-v2-speculation",
        V2_SPECULATION,
        when=lambda c: _is_wanted(c) and c.config.speculative_config is not None,
    ),
)
