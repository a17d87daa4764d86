"""What makes a server fail when a request asks for it: a step, or a wake-up."""

from types import SimpleNamespace
from typing import Any

import psutil
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from vllm_npu_prep.device import regions

AFTER = 5
"""Tokens that the request gets before."""


class Fail(AdapterLogitsProcessor):
    """``vllm_xargs["fail"]`` says how: ``memory`` or ``kernel``."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        manner = (params.extra_args or {}).get("fail")
        if not manner:
            return None

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) == AFTER:
                if manner == "memory":
                    raise torch.OutOfMemoryError("NPU out of memory. Tried to allocate 9.00 GiB")
                raise RuntimeError("aclnnGatherV2 failed, error code 507015")
            return logits

        return process


class WithoutRoom:
    """Methods that vLLM adds to a worker: whether the host has memory for what sleeps."""

    def take_room(self) -> None:
        """From now on, none is free."""
        regions.psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=0))

    def give_room(self) -> None:
        """As it is."""
        regions.psutil = psutil
