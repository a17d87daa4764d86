"""The calls of the fused attention operator that an engine makes, and the rules of its CANN."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_npu_prep.attention.families import DEFAULT_BLOCK_SIZE
from vllm_npu_prep.attention.fused_releases import (
    RELEASES,
    Form,
    FusedCall,
    FusedRules,
    release_of,
)
from vllm_npu_prep.config import decisions_of, parse_config
from vllm_npu_prep.device import cann_version

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

WINDOW_FORMS = (Form.WINDOW, Form.PAGED_WINDOW)
OTHER_FORMS = (Form.PROMPT, Form.CHUNK, Form.DECODE)


def block_size_of(vllm_config: "VllmConfig") -> int:
    cache = vllm_config.cache_config
    return cache.block_size if cache.user_specified_block_size else DEFAULT_BLOCK_SIZE


def head_sizes_of(model: "ModelConfig") -> tuple[int, ...]:
    """Return the head sizes of a model's layers; layers without a window may have larger heads."""
    larger = getattr(model.hf_text_config, "global_head_dim", None)
    return tuple(dict.fromkeys((model.get_head_size(), larger or model.get_head_size())))


def calls_of(
    model: "ModelConfig", parallel: "ParallelConfig", block_size: int
) -> Iterator[FusedCall]:
    """Yield every kind of call that a rank makes for a model, which is served or a drafter.

    `parallel` divides its heads; `block_size` is that of the cache, in tokens.
    """
    if model.attn_type == "encoder_only" or model.use_mla:  # `latent_releases` has those of MLA
        return
    heads = model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel)
    for form in _forms(model):
        for head_size in head_sizes_of(model):
            yield FusedCall(form, str(model.dtype), *heads, head_size, block_size)


def _forms(model: "ModelConfig") -> tuple[Form, ...]:
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    has_window = model.get_sliding_window() is not None or "sliding_attention" in kinds
    if not has_window:
        return OTHER_FORMS
    all_have = not kinds - {"sliding_attention"}
    return WINDOW_FORMS if all_have else (*OTHER_FORMS, *WINDOW_FORMS)


def rules_of(vllm_config: "VllmConfig", cann: str | None = None) -> FusedRules:
    """Return the rules of a version of CANN; those of the newest if it is unknown or too old.

    `cann` is the installed version if it is None.
    """
    if cann is None:
        cann = cann_version(vllm_config.device_config.device_type)
    release = release_of(cann) or RELEASES[0]
    options = parse_config(vllm_config.additional_config)
    return FusedRules(release, options.kernel_rules == "documented")


def limits_batches(vllm_config: "VllmConfig") -> bool:
    """Return whether an engine's calls have the limits of `FusedRules.limits_batches`.

    Kernel families other than ``fia`` have none.

    No kernel of latent attention is known to have any, but its documentation states both: lengths
    under "TND, TND_NTD", before it tells heads of 512 from others, and blocks wherever TND is
    paged (Ascend/op-plugin, its page of ``npu_fused_infer_attention_score_v2``).
    """
    if decisions_of(vllm_config).attention != "fia" or vllm_config.model_config is None:
        return False
    models: list[Any] = [vllm_config.model_config]
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.draft_model_config is not None:
        models.append(speculative.draft_model_config)
    sizes = vllm_config.parallel_config, block_size_of(vllm_config)
    calls = [call for model in models for call in calls_of(model, *sizes)]
    rules = rules_of(vllm_config)
    if rules.documented and any(model.use_mla for model in models):
        return True
    return bool(calls) and rules.limits_batches(calls)
