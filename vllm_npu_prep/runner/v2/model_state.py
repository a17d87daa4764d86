"""The model states of upstream's V2 runner, which give layers the metadata that was prepared."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.encoder_only import EncoderOnlyModelState
from vllm.v1.worker.utils import AttentionGroup

from vllm_npu_prep.attention.backend import AscendAttentionBackend
from vllm_npu_prep.attention.kv_cache import encoder_only_groups
from vllm_npu_prep.runner.v2.prompt_embeds import NPUPromptEmbedsState
from vllm_npu_prep.runner.v2.rope import NPURopeState


class PreparedModelState(DefaultModelState):
    """Upstream's state of a decoder-only model, with what was prepared for the step.

    Attributes
    ----------
    metadata
        The metadata of the step in flight, by layer; None in dummy runs, which run no attention.
    encoder_attn_groups
        Attention groups of layers without a KV cache.
    positions
        M-RoPE positions of the step in flight, int64 ``[num_dims, num_input_tokens]``; None in
        dummy runs.
    """

    rope_state: NPURopeState | None
    prompt_embeds_state: NPUPromptEmbedsState | None  # type: ignore[assignment]
    metadata: dict[str, Any] | None = None
    positions: torch.Tensor | None = None
    encoder_attn_groups: Sequence[AttentionGroup] = ()

    def prepare_attn(  # type: ignore[override]
        self, input_batch: InputBatch, *args: Any, **kwargs: Any
    ) -> dict[str, Any] | None:
        return self.metadata

    def prepare_inputs(self, input_batch: InputBatch, req_states: Any) -> dict[str, Any]:
        if self.rope_state is None:
            return {}
        positions = self.positions
        if positions is None:
            positions = self.rope_state.get_positions(input_batch.num_tokens_after_padding)
        return {"positions": positions}


class PreparedEncoderState(  # type: ignore[misc]  # the attributes are the first one's
    PreparedModelState, EncoderOnlyModelState
):
    """The state of a model whose layers attend in both directions, without a cache.

    It keeps token types, too. Upstream makes one attention group of layers with the same heads;
    here there is one for each window size, as in the V1 runner.
    """

    def __init__(
        self, vllm_config: VllmConfig, model: torch.nn.Module, encoder_cache: Any, device: Any
    ) -> None:
        DefaultModelState.__init__(self, vllm_config, model, encoder_cache, device)
        self.token_type_ids: dict[str, torch.Tensor] = {}
        self.encoder_attn_groups = [
            AttentionGroup(AscendAttentionBackend, each.layer_names, each.kv_cache_spec, index)
            for index, each in enumerate(_encoder_groups(vllm_config))
        ]
        for group in self.encoder_attn_groups:
            group.create_metadata_builders(vllm_config, device)

    def prepare_inputs(self, input_batch: InputBatch, req_states: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = EncoderOnlyModelState.prepare_inputs(self, input_batch, req_states)
        return inputs


def make_model_state(
    vllm_config: VllmConfig, model: torch.nn.Module, encoder_cache: Any, device: torch.device
) -> PreparedModelState:
    kind = PreparedModelState
    if _encoder_groups(vllm_config):
        kind = PreparedEncoderState
    return kind(vllm_config, model, encoder_cache, device)


def _encoder_groups(vllm_config: VllmConfig) -> list[KVCacheGroupSpec]:
    dtype = vllm_config.model_config.dtype
    assert isinstance(dtype, torch.dtype), "vLLM has resolved names of dtypes"
    return encoder_only_groups(vllm_config, dtype)
