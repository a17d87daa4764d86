"""Adapters of a step: which token and which sample has which, told to vLLM's LoRA manager."""

from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.lora.layers import LoRAMapping, LoRAMappingType
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_npu_prep.ops.lora import NO_LORA, PunicaWrapperNPU


class StepLoRAMapping(LoRAMapping):
    """LoRA ids as arrays, int64 ``[num_tokens]`` and ``[num_samples]``.

    Upstream makes tuples of them and compares these: 0.7 ms for 8192 tokens.
    """

    index_mapping: Any  # [num_tokens]
    prompt_mapping: Any  # [num_samples]

    def __post_init__(self) -> None:
        """Keep the arrays."""

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, StepLoRAMapping)
            and self.type == other.type
            and np.array_equal(self.index_mapping, other.index_mapping)
            and np.array_equal(self.prompt_mapping, other.prompt_mapping)
        )

    __hash__ = None  # type: ignore[assignment]


class LoRARunner(GPUModelRunner):
    """Upstream's runner with mappings that cost little, and prompts scored by their own adapter."""

    num_prompt_logprobs: dict[str, int]

    def set_active_loras(
        self,
        input_batch: InputBatch,
        num_scheduled_tokens: np.ndarray,
        num_sampled_tokens: np.ndarray | None = None,
        mapping_type: LoRAMappingType = LoRAMappingType.LANGUAGE,
    ) -> None:
        """Load the adapters of the batch, and say which rows are theirs.

        Parameters
        ----------
        input_batch
            Upstream's; ``request_lora_mapping`` has the LoRA id of each request, 0: none.
        num_scheduled_tokens, num_sampled_tokens
            int32 ``[num_reqs]``; one sample for each request without the latter.
        mapping_type
            What the rows are.
        """
        lora_ids: Any = input_batch.request_lora_mapping[: input_batch.num_reqs]
        mapping = StepLoRAMapping(
            lora_ids.repeat(num_scheduled_tokens),
            lora_ids.repeat(1 if num_sampled_tokens is None else num_sampled_tokens),
            is_prefill=True,
            type=mapping_type,
        )
        adapters = input_batch.lora_id_to_lora_request
        self.lora_manager.set_active_adapters(set(adapters.values()), mapping)
        for lora_id, adapter in adapters.items():
            if adapter.load_inplace:  # once for a request; upstream reads the file in every step
                adapters[lora_id] = msgspec.structs.replace(adapter, load_inplace=False)

    def _get_prompt_logprobs_dict(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors | None]:
        """One request at a time, with its adapter: the step's mapping has rows for samples only.

        Upstream scores prompts with the adapters of the first samples.
        """
        wanted = self.num_prompt_logprobs
        if not self.lora_config or not wanted:
            return super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)
        result: dict[str, LogprobsTensors | None] = {}
        try:
            for req_id in [each for each in wanted if each in num_scheduled_tokens]:
                self.num_prompt_logprobs = {req_id: wanted[req_id]}
                with self._logits_of(req_id):
                    result |= super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)
                if req_id not in self.num_prompt_logprobs:  # its prompt is done
                    del wanted[req_id]
        finally:
            self.num_prompt_logprobs = wanted
        return result

    def _logits_of(self, req_id: str) -> ExitStack:
        """Context in which all rows of logits are of one request."""
        lora_id = self.input_batch.request_lora_mapping[self.input_batch.req_id_to_index[req_id]]
        manager: Any = self.lora_manager._adapter_manager
        slot = manager.lora_index_to_id.index(lora_id) if lora_id else NO_LORA
        stack = ExitStack()
        for wrapper in manager.punica_wrapper_mapping.values():
            assert isinstance(wrapper, PunicaWrapperNPU)
            stack.enter_context(wrapper.logits_of(slot))
        return stack
