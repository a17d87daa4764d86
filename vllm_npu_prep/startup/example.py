"""Engines that refusals refuse, each beside its refusal: what a user would have to write.

Tests configure each of them, and look for its refusal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_npu_prep.config import SECTION

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
SHARED_BY_2 = "--tensor-parallel-size 2 --decode-context-parallel-size 2"
ON_V1, ON_V2 = "VLLM_USE_V2_MODEL_RUNNER=0", "VLLM_USE_V2_MODEL_RUNNER=1"
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
