"""What tests load into a server: logits processors that a request asks for."""

import time
from functools import partial
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class OfRequests(AdapterLogitsProcessor):
    """What is done to the logits of a request whose ``vllm_xargs`` have a certain key."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        value = (params.extra_args or {}).get(self.key)
        return partial(self.process, value) if value else None


class Spell(OfRequests):
    """Only the n-th id of ``vllm_xargs["spell"]`` is left for the n-th token of a request."""

    key = "spell"

    def process(self, ids: list[str], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_ids) < len(ids):
            wanted = int(ids[len(output_ids)])
            kept = logits[wanted].clone()
            logits.fill_(float("-inf"))
            logits[wanted] = kept
        return logits


class Slow(OfRequests):
    """Its steps take ``vllm_xargs["seconds"]`` more."""

    key = "seconds"

    def process(self, seconds: float, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        time.sleep(float(seconds))
        return logits
