"""Pipeline stages of the V2 runner: how every stage gets to know what the last one has sampled.

Both classes stand in for upstream's ``PPHandler``. Stages send each other hidden states, and also
samples where scheduling is asynchronous.
"""

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group


class SentSamples(NamedTuple):
    """The samples of a step, on every stage."""

    token_ids: torch.Tensor  # [num_reqs] int32 on the device, complete when `sending` is
    req_ids: list[str]
    request_rows: np.ndarray  # [num_reqs] int
    discard: np.ndarray  # [num_reqs] bool: samples that don't count
    times_freed: np.ndarray  # [num_reqs] int32: how often each request row was freed until then
    sending: Any  # torch.distributed.Work


class SchedulerPPHandler:
    """Stages that are scheduled synchronously are told by the scheduler.

    The next step of a request is scheduled when its sample is known, and the scheduler's output has
    the sample for every stage.
    """

    def __init__(self, **unused: Any) -> None:
        del unused

    def on_req_idx_freed(self, req_idx: int) -> None:
        """Do nothing: no sample is on its way."""

    def exchange(self, *unused: Any) -> None:
        """Do nothing, because the scheduler tells the samples."""

    def due(self) -> SentSamples | None:
        """Return None, because no sample was sent."""
        return None

    def relay_aux_hidden_states(self, intermediate_tensors: Any, output: Any) -> Any:
        """Return `output` as it is: drafters that read other layers are refused with pipeline
        stages."""
        del intermediate_tensors
        return output


class BroadcastPPHandler(SchedulerPPHandler):
    """Stages that are scheduled asynchronously get each step's samples from the last stage.

    vLLM's scheduler leaves as many steps between two decodes of a request as there are stages
    (``AsyncScheduler.decode_stagger``), so each stage takes a step's samples in that many steps
    later. The device waits for them then; on the CPU fallback the host does.
    """

    def __init__(self, max_num_reqs: int, device: torch.device, **unused: Any) -> None:
        del unused
        stages = get_pp_group()
        self._last_rank, self._device = stages.last_rank, device
        # A group of its own, as upstream has: hidden states don't wait for samples
        self._group = stages.make_sibling_device_group(group_desc="pp_broadcast")
        # One entry for each of the last steps; None if a step had no sample that counts
        self._in_flight: deque[SentSamples | None] = deque([None] * stages.world_size)
        self._times_freed = np.zeros(max_num_reqs, np.int32)

    def on_req_idx_freed(self, req_idx: int) -> None:
        self._times_freed[req_idx] += 1

    def due(self) -> SentSamples | None:
        """Return the samples that a step begins with; call this once in each step.

        Samples of request rows that were freed since then don't count: another request may have
        the row by now.
        """
        found = self._in_flight.popleft()
        self._in_flight.append(None)
        if found is None:
            return None
        found.sending.wait()
        is_freed = self._times_freed[found.request_rows] != found.times_freed
        return found._replace(discard=found.discard | is_freed)

    def exchange(
        self,
        token_ids: torch.Tensor | None,  # [num_reqs] int32; None where they are received
        req_ids: list[str],
        request_rows: np.ndarray,  # [num_reqs] int
        discard: np.ndarray,  # [num_reqs] bool
    ) -> None:
        """Send a step's samples from the last stage, or receive them on another one."""
        if discard.all():
            return
        if token_ids is None:
            token_ids = torch.empty(len(req_ids), dtype=torch.int32, device=self._device)
        sending = torch.distributed.broadcast(
            token_ids, self._last_rank, self._group, async_op=True
        )
        times_freed = self._times_freed[request_rows]
        self._in_flight[-1] = SentSamples(
            token_ids, req_ids, request_rows, discard, times_freed, sending
        )
