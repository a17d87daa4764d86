"""Patches for engines on several hosts: Ray, addresses, and queues between hosts."""

import functools
import importlib.util
import math
import time
from typing import Any

from vllm_npu_prep.errors import PrepError

QUEUE_WAKE_MS = 500
"""Milliseconds after which a reader that waits for another host's message looks for a shutdown."""


def refuse_ray_where_it_is_missing() -> None:
    """Say what to install in one line; upstream shows a pydantic traceback."""
    if importlib.util.find_spec("ray"):
        return
    from vllm.v1.executor import ray_utils

    def assert_ray_available() -> None:
        raise PrepError(
            "--distributed-executor-backend ray: Ray is not installed; on every host "
            "pip install 'vllm_npu_prep[ray]'"
        )

    ray_utils.assert_ray_available = assert_ray_available


def keep_addresses_on_their_host() -> None:
    """Keep variables with a host's own devices and address from workers on other hosts.

    Upstream passes Ray's workers every variable of the server that their host doesn't set, except a
    list that covers only CUDA and ROCm.
    """
    from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS

    WORKER_SPECIFIC_ENV_VARS.update(("ASCEND_RT_VISIBLE_DEVICES", "HCCL_IF_IP"))


def wake_who_reads_from_another_host() -> None:
    """Wake also readers that wait for a worker on another host, when the engine shuts down.

    Upstream's `MessageQueue.shutdown` wakes readers of shared memory. If the last pipeline stage
    runs on another host, the engine reads a socket. It keeps waiting for a worker that Ray has
    reported dead until ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`` have passed.
    """
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    upstream = MessageQueue.dequeue
    if hasattr(upstream, "__wrapped__"):
        return

    def until(deadline: float) -> int:
        return int(min(QUEUE_WAKE_MS, max(0.0, 1000 * (deadline - time.monotonic()))))

    @functools.wraps(upstream)
    def dequeue(self: MessageQueue, timeout: float | None = None, indefinite: bool = False) -> Any:
        if self._is_remote_reader:
            deadline = math.inf if timeout is None else time.monotonic() + timeout
            while not self.remote_socket.poll(until(deadline)):
                if self.shutting_down:
                    raise RuntimeError("cancelled")  # as readers of shared memory
                if time.monotonic() >= deadline:
                    raise TimeoutError
        return upstream(self, timeout, indefinite)

    MessageQueue.dequeue = dequeue  # type: ignore[method-assign]
