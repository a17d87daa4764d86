"""KV caches that are stored, moved or shared: connectors and offloading."""

from vllm_npu_prep.startup.asked import Asked
from vllm_npu_prep.startup.refusal import Refusal, Subject

CONNECTOR_MODULE = "vllm_npu_prep.attention.kv_transfer"
"""Where vLLM finds the KV connectors that `KernelFamily.kv_connectors` names."""


def _is_known(asked: Asked) -> bool:
    """Whether the kernel family has this connector, and the code is ours."""
    transfer = asked.transfer
    return (
        transfer is not None
        and transfer.kv_connector in asked.family.kv_connectors
        and transfer.kv_connector_module_path in (None, CONNECTOR_MODULE)
    )


def _has_no_folder(asked: Asked) -> bool:
    transfer = asked.transfer
    return transfer is not None and "shared_storage_path" not in transfer.kv_connector_extra_config


def _words(asked: Asked) -> dict[str, object]:
    assert asked.transfer is not None
    return {
        "name": asked.transfer.kv_connector,
        "known": ", ".join(asked.family.kv_connectors) or "none",
    }


OFFLOADING = (
    Refusal(
        "kv-offloading",
        lambda c: c.config.cache_config.kv_offloading_size is not None,
        "--kv-offloading-size",
        "vLLM's offloading copies pages that hold K and V together, with CUDA streams; here K "
        "and V are separate planes",
        "leave the flag out",
    ),
    Refusal(
        "kv-connector",
        lambda c: c.transfer is not None and not _is_known(c),
        "KV connector {name}",
        "kernel family {family} keeps K and V as separate planes, and supports only these: {known}",
        "leave --kv-transfer-config out, or use one of those",
        _words,
    ),
)

CONNECTOR = (
    Refusal(
        "kv-connector-mla-or-pooling",
        lambda c: c.model.use_mla or c.pools,
        "KV connector {name} with MLA or pooling",
        "it stores K and V, not latent rows, and only of requests that generate tokens",
        "leave --kv-transfer-config out",
        _words,
    ),
    Refusal(
        "kv-connector-lora-or-embeds",
        lambda c: c.config.lora_config is not None or c.model.enable_prompt_embeds,
        "KV connector {name} with LoRA or prompt embeddings",
        "it identifies prompts by their token ids alone",
        "use one of the two",
        _words,
    ),
    Refusal(
        "kv-connector-chunked-prefill",
        lambda c: (
            c.config.scheduler_config.enable_chunked_prefill
            or c.config.scheduler_config.long_prefill_token_threshold > 0
        ),
        "KV connector {name} with chunked prefill",
        "it would store only the first chunk of a prompt",
        "use --no-enable-chunked-prefill, without --long-prefill-token-threshold",
        _words,
    ),
    Refusal(
        "kv-connector-folder",
        _has_no_folder,
        "KV connector {name} without a folder",
        "vLLM would use /tmp, which all users share",
        'give it "kv_connector_extra_config": {{"shared_storage_path": ...}}',
        _words,
    ),
    Refusal(
        "kv-connector-stages",
        lambda c: c.config.parallel_config.pipeline_parallel_size > 1,
        "KV connector {name} over pipeline stages",
        "its scheduler would look for files of all layers, of which each stage stores its own",
        "use --tensor-parallel-size instead of --pipeline-parallel-size",
        _words,
    ),
)

SUBJECTS = (
    Subject("offloading", OFFLOADING),
    Subject("connector", CONNECTOR, when=_is_known),
)
