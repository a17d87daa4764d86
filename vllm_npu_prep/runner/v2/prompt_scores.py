"""Log-probabilities of prompts, which upstream's worker scores for the V2 runner."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

from vllm_npu_prep.runner.lora import score_prompts
from vllm_npu_prep.runner.v2.adapters import NPULoraState
from vllm_npu_prep.runner.v2.request_states import NPURequestState


class PromptScores(NamedTuple):
    """Log-probabilities of prompts by request, as `ModelRunnerOutput` takes them."""

    most_likely: dict[str, Any]
    """Those of the prompt's tokens and of the most likely tokens, as `LogprobsTensors`."""
    named: dict[str, torch.Tensor]
    """Those of tokens that the request names, float32 ``[num_positions, num_tokens]``."""


def wants_scores(worker: PromptLogprobsWorker, batch: InputBatch) -> bool:
    if not batch.has_prefill:
        return False
    wanted = worker.uses_prompt_logprobs[batch.idx_mapping_np]
    return bool(worker.token_id_scores) or bool(wanted.any())


def score_step(
    worker: PromptLogprobsWorker,
    states: NPURequestState,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    hidden_states: torch.Tensor,  # [num_tokens or more, hidden_size]
    batch: InputBatch,
) -> PromptScores:
    prompt_lens = states.prompt_len.np
    return PromptScores(
        worker.compute_prompt_logprobs(
            compute_logits,
            hidden_states,
            batch,
            states.all_token_ids.gpu,
            states.num_computed_tokens.copy_to_uva(),
            prompt_lens,
        ),
        worker.compute_prompt_token_id_logprobs(compute_logits, hidden_states, batch, prompt_lens),
    )


def score_with_adapters(
    manager: LRUCacheWorkerLoRAManager,
    adapters: NPULoraState,
    worker: PromptLogprobsWorker,
    batch: InputBatch,
    score: Callable[[], PromptScores],
) -> PromptScores:
    """Return log-probabilities of prompts, scored one request at a time with its own adapter.

    Parameters
    ----------
    worker
        Upstream's scorer. Its requests are changed while this runs and restored at the end.
    score
        Calls `worker` for the step and returns the results by request.
    """
    wanted, tokens_of = worker.uses_prompt_logprobs, worker.token_id_scores
    request_rows = {
        req_id: request_row
        for req_id, request_row in zip(batch.req_ids, batch.idx_mapping_np.tolist())
        if wanted[request_row] or req_id in tokens_of
    }

    @contextmanager
    def alone(req_id: str) -> Iterator[None]:
        request_row = request_rows[req_id]
        worker.uses_prompt_logprobs = np.zeros_like(wanted)
        worker.uses_prompt_logprobs[request_row] = wanted[request_row]
        tokens = tokens_of.pop(req_id, None)
        worker.token_id_scores = {} if tokens is None else {req_id: tokens}
        try:
            yield
        finally:
            tokens_of.update(worker.token_id_scores)  # those of a prompt that goes on
            worker.uses_prompt_logprobs, worker.token_id_scores = wanted, tokens_of

    lora_ids = {
        req_id: int(adapters.lora_ids[request_row]) for req_id, request_row in request_rows.items()
    }
    result = PromptScores({}, {})
    for of_request in score_prompts(manager, lora_ids, alone, score):
        result.most_likely.update(of_request.most_likely)
        result.named.update(of_request.named)
    return result
