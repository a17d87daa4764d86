"""LoRA adapters of requests by slot, and what they do to log-probabilities of prompts."""

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
    """The adapter of each request, by slot; stands in for upstream's ``LoraState``.

    Upstream makes tuples of a step's mapping and compares those. Here it stays an array.
    """

    def make_lora_inputs(  # type: ignore[override]  # arrays in place of tuples
        self, req_ids: list[str], idx_mapping: np.ndarray, num_scheduled_tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, list[LoRARequest]]:
        """LoRA id of each sample and of each token, 0 without one, and the step's adapters.

        Parameters
        ----------
        req_ids, idx_mapping, num_scheduled_tokens
            Requests of the step, their slots, and their tokens, int ``[num_reqs]`` each.
        """
        lora_ids = self.lora_ids[idx_mapping]
        return lora_ids, lora_ids.repeat(num_scheduled_tokens), self.get_activate_loras(req_ids)

    def get_activate_loras(  # type: ignore[override]  # a list: adapters of one name are equal
        self, req_ids: Iterable[str]
    ) -> list[LoRARequest]:
        """Adapters of these requests, in one order on all ranks.

        Of one name there may be two: one that was removed has its requests still.
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
    """Log-probabilities of prompts, one request at a time, each with its own adapter.

    A step's mapping covers the logits of samples only, so upstream scores prompts with the
    adapters of the first samples.

    Parameters
    ----------
    manager
        vLLM's LoRA manager.
    adapters
        Of the requests.
    worker
        Upstream's part that scores.
    batch
        Of the step.
    score
        Calls it for the step; returns results by request.
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
