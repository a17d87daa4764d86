"""Outputs of steps whose copies to the host are still under way."""

from collections import deque
from typing import Any

DEVICE_SIDE = ("_sampled_token_ids", "_logprobs_tensors", "_num_nans", "_raw_pooler_output")
"""The attributes of vLLM's asynchronous outputs that it copies on a stream of its own."""


class OutputsInFlight:
    """Keeps the tensors of asynchronous outputs until their copies are complete.

    An asynchronous output holds its tensors itself, but lives only as long as somebody waits for
    it. With several ranks, one of them answers; on every other rank
    `WorkerProc._execute_worker_rpc` (``vllm/v1/executor/multiproc_executor.py``) drops the output
    at once. The tensors are then freed while the copy stream still reads them, and the next
    operator may write there: a write after a read without an order. docs/changing/what-was-run.md
    says more.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[Any, list[Any]]] = deque()  # event of the copy, what it reads

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, output: Any) -> None:
        """Take note of what a step returned, and let go of copies that are complete."""
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()
        ready = getattr(output, "async_copy_ready_event", None)
        if ready is not None:
            tensors = [getattr(output, name, None) for name in DEVICE_SIDE]
            self._kept.append((ready, tensors))
