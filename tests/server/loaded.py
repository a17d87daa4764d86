"""What tests load into a server: logits processors that a request asks for, methods of workers."""

import time
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from vllm_npu_prep.device import regions

AFTER = 5
"""Tokens that a request gets before it makes its step fail."""


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


class Hinder(AdapterLogitsProcessor):
    """``vllm_xargs["hinder"]`` makes a step slow, or fail: ``memory`` or ``kernel``."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        manner = (params.extra_args or {}).get("hinder")
        if not manner:
            return None

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if manner == "slow":
                time.sleep(0.2)
            elif len(output_ids) == AFTER and manner == "memory":
                raise torch.OutOfMemoryError("NPU out of memory. Tried to allocate 9.00 GiB")
            elif len(output_ids) == AFTER:
                raise RuntimeError("aclnnGatherV2 failed, error code 507015")
            return logits

        return process


class WithoutRoom:
    """Whether the host has memory for what sleeps."""

    def take_room(self) -> None:
        """From now on, none is free."""
        regions.psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=0))

    def give_room(self) -> None:
        """As it is."""
        regions.psutil = psutil
