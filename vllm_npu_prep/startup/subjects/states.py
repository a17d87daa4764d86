"""Models with states: gated delta nets beside attention."""

from vllm_npu_prep.startup.asked import Asked
from vllm_npu_prep.startup.refusal import Refusal, Subject

STATES = (
    Refusal(
        "states-on-npus",
        lambda c: c.family.device_type == "npu",
        "{model} on an NPU",
        "gated delta nets are computed by the CPU fallback only",
        "use the CPU fallback, or a model without linear attention",
    ),
    Refusal(
        "states-ranks",
        lambda c: c.config.parallel_config.world_size_across_dp > 1,
        "{model} on several ranks",
        "states that are divided among ranks have not been tried",
        "use one rank",
    ),
    Refusal(
        "states-alone",
        lambda c: c.layer_types and "full_attention" not in c.layer_types,
        "a model without full attention ({model})",
        "blocks, which hold its states, are sized by K and V of layers that attend",
        "use a model that has both",
    ),
    Refusal(
        "states-speculation",
        lambda c: c.config.speculative_config is not None,
        "speculation with {model}",
        "a state can't be taken back to the token before a rejected draft",
        "leave --speculative-config out",
    ),
    Refusal(
        "states-lora",
        lambda c: c.config.lora_config is not None,
        "LoRA with {model}",
        "adapters of linear attention have not been tried",
        "leave --enable-lora out",
    ),
    Refusal(
        "states-quantization",
        lambda c: c.model.quantization is not None,
        "quantised weights of {model}",
        "int8 projections of linear attention have not been tried",
        "use weights of 16 or 32 bits",
    ),
    Refusal(
        "states-connector",
        lambda c: c.transfer is not None,
        "a KV connector with {model}",
        "it stores K and V of tokens, not states",
        "leave --kv-transfer-config out",
    ),
    Refusal(
        "states-pooling",
        lambda c: c.pools,
        "pooling with {model}",
        "only models that generate have been tried with states",
        "use a model without linear attention",
    ),
    Refusal(
        "states-replay",
        lambda c: c.config.cache_config.use_replayssm,
        "--use-replayssm",
        "states are computed step by step, and no inputs of them are kept",
        "leave the flag out",
    ),
)


def _has_states(asked: Asked) -> bool:
    return asked.has_states


SUBJECTS = (Subject("states", STATES, when=_has_states),)
