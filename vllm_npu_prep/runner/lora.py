"""Tells vLLM's LoRA manager which token and which sample of a step has which adapter."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import numpy as np
from vllm.lora.layers import LoRAMapping, LoRAMappingType
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.worker.gpu_input_batch import InputBatch

from vllm_npu_prep.ops.triton.lora import NO_LORA, PunicaWrapperNPU

Scores = TypeVar("Scores")


class StepLoRAMapping(LoRAMapping):
    """LoRA ids as arrays, int64 ``[num_tokens]`` and ``[num_samples]``.

    Upstream makes tuples of them and compares those, which takes 0.7 ms for 8192 tokens.
    """

    index_mapping: Any  # [num_tokens]
    prompt_mapping: Any  # [num_samples]

    def __post_init__(self) -> None:
        """Keep the arrays, of which upstream makes tuples here."""

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, StepLoRAMapping)
            and self.type == other.type
            and np.array_equal(self.index_mapping, other.index_mapping)
            and np.array_equal(self.prompt_mapping, other.prompt_mapping)
        )

    __hash__ = None  # type: ignore[assignment]


def activate_adapters(
    manager: LRUCacheWorkerLoRAManager,
    batch: InputBatch,
    num_scheduled_tokens: np.ndarray,  # [num_reqs] int32
    num_sampled_tokens: np.ndarray | None = None,  # [num_reqs] int32
    mapping_type: LoRAMappingType = LoRAMappingType.LANGUAGE,
) -> None:
    """Load the adapters of the batch, and set which rows use them.

    Parameters
    ----------
    batch
        Its ``request_lora_mapping`` has the LoRA id of each request; 0 means no adapter.
    num_scheduled_tokens, num_sampled_tokens
        The counts of the step. Without the latter each request has one sample.
    mapping_type
        What the rows are.
    """
    lora_ids: Any = batch.request_lora_mapping[: batch.num_reqs]
    mapping = StepLoRAMapping(
        lora_ids.repeat(num_scheduled_tokens),
        lora_ids.repeat(1 if num_sampled_tokens is None else num_sampled_tokens),
        is_prefill=True,
        type=mapping_type,
    )
    # This is no set: adapters of one name are equal, and an adapter that was removed still has its
    # requests
    adapters: Any = batch.lora_id_to_lora_request.values()
    manager.set_active_adapters(adapters, mapping)


def score_prompts(
    manager: LRUCacheWorkerLoRAManager,
    # The LoRA id of each request whose prompt this step scores; 0 means no adapter
    lora_ids: Mapping[str, int],
    # Returns a context in which upstream scores the prompt of one request only
    alone: Callable[[str], AbstractContextManager[object]],
    score: Callable[[], Scores],  # upstream's function
) -> list[Scores]:
    """Score prompts one request at a time, each with its own adapter.

    A step's mapping covers the logits of samples only, so upstream scores prompts with the adapters
    of the first samples.

    Returns
    -------
    list
        What `score` has returned for each request.
    """
    scores = []
    for req_id, lora_id in lora_ids.items():
        with alone(req_id), logits_of(manager, lora_id):
            scores.append(score())
    return scores


def logits_of(manager: LRUCacheWorkerLoRAManager, lora_id: int) -> ExitStack:
    """Return a context in which all rows of logits use one adapter, or none if ``lora_id`` is 0."""
    adapters: Any = manager._adapter_manager
    slot = adapters.lora_index_to_id.index(lora_id) if lora_id else NO_LORA
    stack = ExitStack()
    for wrapper in adapters.punica_wrapper_mapping.values():
        assert isinstance(wrapper, PunicaWrapperNPU)
        stack.enter_context(wrapper.logits_of(slot))
    return stack
