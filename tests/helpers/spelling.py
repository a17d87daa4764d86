"""A logits processor that makes a model say what a request wants it to."""

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Spell(AdapterLogitsProcessor):
    """Only the n-th id of ``vllm_xargs["spell"]`` is left for the n-th token of a request."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        spelled = (params.extra_args or {}).get("spell")
        if not spelled:
            return None

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) < len(spelled):
                wanted = int(spelled[len(output_ids)])
                kept = logits[wanted].clone()
                logits.fill_(float("-inf"))
                logits[wanted] = kept
            return logits

        return process
