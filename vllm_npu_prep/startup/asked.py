"""What an engine is asked for, in the form that refusals read.

The lists of architectures and speculative methods that steps are prepared for stand here, too.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm_npu_prep.aclnn import missing_functions
from vllm_npu_prep.attention.families import FIA, KernelFamily
from vllm_npu_prep.attention.fused_calls import block_size_of, rules_of
from vllm_npu_prep.attention.fused_releases import FusedRules
from vllm_npu_prep.config import PrepConfig, parse_config
from vllm_npu_prep.device import NPU_KIND, DeviceKind, cann_version

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ModelConfig, SpeculativeConfig, VllmConfig

DRAFT_MODEL_METHODS = ("draft_model", "eagle", "eagle3", "mtp")
"""Speculative methods whose drafters are models of their own."""

METHODS = ("ngram", *DRAFT_MODEL_METHODS)
"""Speculative methods that steps are prepared for."""

MTP_MODELS = {
    "MiMoMTPModel": ("MiMoForCausalLM",),
    "Glm4MoeMTPModel": ("Glm4MoeForCausalLM",),
    "DeepSeekMTPModel": ("DeepseekV3ForCausalLM",),
    "DeepseekV32MTPModel": ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
    "Qwen3NextMTP": ("Qwen3NextForCausalLM",),
    "Qwen3_5MTP": ("Qwen3_5ForCausalLM",),
    "Qwen3_5MoeMTP": ("Qwen3_5MoeForCausalLM",),
}
"""Architectures of MTP layers that draft, each with the models that it comes with."""

SPARSE_MODELS = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
"""Architectures whose layers attend to positions that an indexer chooses."""

STATE_MODELS = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Architectures with gated delta nets beside attention, for whose recurrent states steps are
prepared.
"""


def indexers_of(text: Any) -> str:
    """Return "F" for each layer of sparse attention that has an indexer, and "S" for others.

    These read what the nearest indexer before them chose. vLLM's `DeepseekV2MLAAttention` decides
    so by ``index_topk_pattern``, or by ``index_topk_freq`` and ``index_skip_topk_offset``.
    """
    count, pattern = text.num_hidden_layers, getattr(text, "index_topk_pattern", None)
    every, offset = getattr(text, "index_topk_freq", 1), getattr(text, "index_skip_topk_offset", 2)
    if pattern is None:
        pattern = ["S" if max(i - offset + 1, 0) % every else "F" for i in range(count)]
    return "".join("S" if each == "S" else "F" for each in pattern[:count]).ljust(count, "F")


@dataclass(frozen=True)
class RequestedEngine:
    """An engine's configuration, kernel family and device, by the names that refusals use."""

    config: "VllmConfig"  # vLLM's configuration; its model is not None
    family: KernelFamily
    kind: DeviceKind

    @property
    def model(self) -> "ModelConfig":
        return self.config.model_config

    @property
    def text(self) -> Any:
        return self.model.hf_text_config

    @cached_property
    def layer_types(self) -> set[str]:
        return layer_types(self.model)

    @property
    def has_states(self) -> bool:
        """Whether it has linear attention for whose recurrent states steps are prepared."""
        return self.model.is_hybrid and self.model.architecture in STATE_MODELS

    @property
    def is_sparse(self) -> bool:
        """Whether an indexer chooses the positions to which its layers attend."""
        return self.model.architecture in SPARSE_MODELS

    @property
    def pools(self) -> bool:
        return self.model.runner_type == "pooling"

    @property
    def block_size(self) -> int:
        """The block size that the user gave, or the one that the backend prefers."""
        return block_size_of(self.config)

    @property
    def uses_fused_operator(self) -> bool:
        return self.family is FIA

    @cached_property
    def cann(self) -> str:
        """The version of the installed CANN; empty if it is not known."""
        return cann_version(self.kind.device_type)

    @cached_property
    def fused_rules(self) -> FusedRules:
        """The rules of the installed fused attention, or of the newest if CANN's are unknown."""
        return rules_of(self.config, self.cann)

    def functions_missing_for(self, *operators: str) -> dict[str, str]:
        """Return the functions that CANN lacks, by the operators of torch_npu that call them.

        The result is empty on the CPU fallback.
        """
        return missing_functions(operators) if self.kind == NPU_KIND else {}

    @property
    def transfer(self) -> "KVTransferConfig | None":
        """The configuration of the KV connector; None without one."""
        transfer = self.config.kv_transfer_config
        return transfer if transfer is not None and transfer.kv_connector is not None else None

    @property
    def connector(self) -> "KVTransferConfig":
        """The configuration of the KV connector, which has to be present."""
        assert self.transfer is not None
        return self.transfer

    @property
    def speculative(self) -> "SpeculativeConfig":
        """The configuration of speculation, which has to be present."""
        speculative = self.config.speculative_config
        assert speculative is not None
        return speculative

    @property
    def has_drafter(self) -> bool:
        speculative = self.config.speculative_config
        return speculative is not None and speculative.method in DRAFT_MODEL_METHODS

    @property
    def drafter(self) -> "ModelConfig":
        """The drafter's model, which has to be present."""
        return self.speculative.draft_model_config

    @property
    def mtp(self) -> str:
        """The architecture of the MTP layers that are to draft; empty for other methods."""
        if self.speculative.method != "mtp":
            return ""
        return str(self.drafter.hf_config.architectures[0])

    @cached_property
    def options(self) -> PrepConfig:
        return parse_config(self.config.additional_config)


def layer_types(model: "ModelConfig") -> set[str]:
    """Return the kinds of a model's layers; empty if its config doesn't have them."""
    return set(getattr(model.hf_text_config, "layer_types", None) or ())


def multimodal_inputs(model: "ModelConfig") -> list[str]:
    """Return the kinds of input beside text that the model takes and no flag forbids."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    options = model.get_multimodal_config()
    takes = MULTIMODAL_REGISTRY.get_processing_info(model).supported_mm_limits
    return sorted(kind for kind in takes if options.get_limit_per_prompt(kind) > 0)
