"""LoRA adapters of requests by request row."""

from collections.abc import Iterable

import numpy as np
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import LoraState


class NPULoraState(LoraState):
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
