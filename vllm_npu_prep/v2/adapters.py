"""LoRA adapters of requests by request row, and log-probabilities of prompts that use them."""

from collections.abc import Callable, Iterable

import numpy as np
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

from vllm_npu_prep.runner.lora import logits_of
from vllm_npu_prep.v2.kept_tokens import PromptScores


class SlotAdapters(LoraState):
    """The adapter of each request, by request row; a stand-in for upstream's ``LoraState``.

    Upstream turns a step's mapping into tuples and compares these. Here the mapping stays an array.
    """

    def make_lora_inputs(  # type: ignore[override]  # arrays in place of tuples
        self, req_ids: list[str], idx_mapping: np.ndarray, num_scheduled_tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, list[LoRARequest]]:
        """Return the LoRA id of each sample and of each token, and the adapters of the step.

        An id of 0 means that the request has no adapter. `idx_mapping` holds the request rows of
        the step, int ``[num_reqs]``.
        """
        lora_ids = self.lora_ids[idx_mapping]
        return lora_ids, lora_ids.repeat(num_scheduled_tokens), self.get_activate_loras(req_ids)

    def get_activate_loras(  # type: ignore[override]  # a list: adapters of one name are equal
        self, req_ids: Iterable[str]
    ) -> list[LoRARequest]:
        """Return the adapters of these requests, in the same order on all ranks.

        Two of them can have the same name, because requests of a removed adapter may still run.
        """
        if not self.lora_requests:
            return []
        asked = [self.lora_requests[each] for each in req_ids if each in self.lora_requests]
        return list({each.lora_int_id: each for each in asked}.values())


def score_with_adapters(
    manager: LRUCacheWorkerLoRAManager,
    adapters: SlotAdapters,
    worker: PromptLogprobsWorker,
    batch: InputBatch,
    score: Callable[[], PromptScores],
) -> PromptScores:
    """Return log-probabilities of prompts, scored one request at a time with its own adapter.

    A step's LoRA mapping covers only the logits of samples, so upstream scores prompts with the
    adapters of the first samples.

    Parameters
    ----------
    worker
        Upstream's scorer. Its requests are changed while this runs and restored at the end.
    score
        Calls `worker` for the step and returns the results by request.
    """
    wanted, tokens_of = worker.uses_prompt_logprobs, worker.token_id_scores
    result = PromptScores({}, {})
    try:
        for req_id, slot in zip(batch.req_ids, batch.idx_mapping_np.tolist()):
            if not (wanted[slot] or req_id in tokens_of):
                continue
            worker.uses_prompt_logprobs = np.zeros_like(wanted)
            worker.uses_prompt_logprobs[slot] = wanted[slot]
            tokens = tokens_of.pop(req_id, None)
            worker.token_id_scores = {} if tokens is None else {req_id: tokens}
            with logits_of(manager, int(adapters.lora_ids[slot])):
                of_request = score()
            tokens_of |= worker.token_id_scores  # those of a prompt that goes on
            result.most_likely.update(of_request.most_likely)
            result.named.update(of_request.named)
    finally:
        worker.uses_prompt_logprobs, worker.token_id_scores = wanted, tokens_of
    return result
