"""What is refused, by name and with a reason: by the device, its kernel family, this version."""

from typing import TYPE_CHECKING

from vllm_npu_prep.attention.families import KernelFamily
from vllm_npu_prep.device import CPU_KIND, DeviceKind, device_name, free_memory
from vllm_npu_prep.errors import PrepError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

NZ_CACHE_CHIPS = "Ascend310P"
"""Chips whose kernels take KV caches in the NZ layout only."""

CONNECTOR_MODULE = "vllm_npu_prep.kv_transfer"
"""Where vLLM finds the KV connectors that `KernelFamily.kv_connectors` names."""

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
    asked = cache.kv_cache_memory_bytes
    if asked and kind == CPU_KIND and asked > free_memory():
        raise PrepError(
            f"--kv-cache-memory-bytes {asked:,}: only {free_memory():,} bytes of the host are free"
        )
    if cache.user_specified_block_size and cache.block_size % family.block_size_multiple:
        raise PrepError(
            f"--block-size {cache.block_size}: kernel family {family.name} takes multiples of "
            f"{family.block_size_multiple}"
        )
    for feature, applies in _family_limits(model, family).items():
        if applies:
            raise PrepError(f"{feature} of {model.model}: kernel family {family.name} has none")
    for feature, reason in _unsupported_features(vllm_config, model) + _unsupported_transfer(
        vllm_config, family
    ):
        raise PrepError(f"{feature} is not supported by vllm_npu_prep: {reason}")
    head_size = model.get_head_size()
    if head_size > family.max_head_size or head_size % family.head_size_multiple:
        raise PrepError(
            f"head size {head_size} of {model.model}: kernel family {family.name} takes multiples "
            f"of {family.head_size_multiple} up to {family.max_head_size}"
        )


def _family_limits(model: "ModelConfig", family: KernelFamily) -> dict[str, bool]:
    """What the model needs of its attention and the family lacks."""
    text = model.hf_text_config
    soft_cap = getattr(text, "attn_logit_softcapping", None)
    window = model.get_sliding_window() or "sliding_attention" in (
        getattr(text, "layer_types", None) or ()
    )
    return {
        "logits soft cap": bool(soft_cap) and not family.logits_soft_cap,
        "sliding window": bool(window) and not family.sliding_window,
    }


def _unsupported_transfer(vllm_config: "VllmConfig", family: KernelFamily) -> list[tuple[str, str]]:
    """What the engine was asked to do with its KV cache beside keeping it, with reasons."""
    transfer, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
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
                vllm_config.scheduler_config.enable_chunked_prefill,
                f"KV connector {transfer.kv_connector} with chunked prefill",
                "of a prompt in chunks it would store the first one; use "
                "--no-enable-chunked-prefill",
            ),
        ]
    return [(feature, reason) for applies, feature, reason in checks if applies]


def _unsupported_features(vllm_config: "VllmConfig", model: "ModelConfig") -> list[tuple[str, str]]:
    """Features that the engine was asked for and that this version refuses, with reasons."""
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    offload = vllm_config.offload_config
    checks = [
        (model.runner_type == "pooling", "a pooling model", "only generation is prepared"),
        (
            model.is_multimodal_model,
            f"multimodal input ({model.model})",
            "only token ids are prepared; use a text-only model",
        ),
        (model.is_encoder_decoder, "an encoder-decoder model", "only decoder attention runs"),
        (model.use_mla, "MLA attention", "the KV cache holds K and V planes only"),
        (
            model.is_moe,
            "a mixture-of-experts model",
            "no expert kernels on this device",
        ),
        (
            model.is_hybrid or model.is_attention_free,
            "a state-space or linear-attention model",
            "the KV cache holds K and V planes only",
        ),
        (model.quantization is not None, f"--quantization {model.quantization}", "no kernels"),
        (model.enable_prompt_embeds, "--enable-prompt-embeds", "only token ids are prepared"),
        (model.enable_sleep_mode, "--enable-sleep-mode", "the KV cache is not in a pool"),
        (
            vllm_config.weight_transfer_config is not None,
            "--weight-transfer-config",
            "its engines speak to CUDA devices; collective_rpc reload_weights reads a folder",
        ),
        (vllm_config.lora_config is not None, "LoRA", "not prepared yet"),
        (
            parallel.world_size_across_dp > 1,
            f"more than one rank ({parallel.world_size_across_dp})",
            "set tensor, pipeline and data parallel sizes to 1",
        ),
        (
            vllm_config.cache_config.kv_sharing_fast_prefill,
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
            speculative is not None and speculative.method != "ngram",
            f"speculative method {speculative.method if speculative else ''}",
            "only ngram drafts are prepared",
        ),
        (
            vllm_config.attention_config.backend is not None
            and vllm_config.attention_config.backend.name != "CUSTOM",
            "--attention-backend",
            "this platform has one backend; leave the flag out",
        ),
    ]
    return [(feature, reason) for applies, feature, reason in checks if applies]
