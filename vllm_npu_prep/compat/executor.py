"""Patches of vLLM's executors: answers of ranks, Ray, what ranks of several hosts share, and a rank
without the others.
"""

import importlib.util
import math
import time
from collections.abc import Iterator
from typing import Any

from vllm_npu_prep.compat.patches import instead_of
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

    def until(deadline: float) -> int:
        return int(min(QUEUE_WAKE_MS, max(0.0, 1000 * (deadline - time.monotonic()))))

    @instead_of(MessageQueue, "dequeue")
    def dequeue(
        upstream: Any, self: MessageQueue, timeout: float | None = None, indefinite: bool = False
    ) -> Any:
        if self._is_remote_reader:
            deadline = math.inf if timeout is None else time.monotonic() + timeout
            while not self.remote_socket.poll(until(deadline)):
                if self.shutting_down:
                    raise RuntimeError("cancelled")  # as readers of shared memory
                if time.monotonic() >= deadline:
                    raise TimeoutError
        return upstream(self, timeout, indefinite)


class AnswerQueue:
    """A rank's queue of answers, which skips those that nobody read.

    vLLM's `MessageQueue` has one answer for each call, in the order of calls. `due` is the number
    of answers, not read yet, that calls are reading or should have read.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.due = 0

    def dequeue(self, timeout: float | None = None) -> Any:
        """Return the answer to the last call that is due."""
        answer = None
        while self.due:
            answer = self._queue.dequeue(timeout=timeout)
            self.due -= 1
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class OneAnswer:
    """The queue of one rank, for a call that wants that rank's answer alone."""

    def __init__(self, queue: AnswerQueue) -> None:
        self._queue = queue

    def dequeue(self, timeout: float | None = None) -> Any:
        self._queue.due += 1
        return self._queue.dequeue(timeout)


class Answers(list[Any]):
    """Queues of all ranks, in order, as vLLM's executor reads them.

    An iteration reads an answer of each rank, or stops at the first error; the answers that it
    didn't read are skipped later.
    """

    def __init__(self, queues: list[Any]) -> None:
        super().__init__(map(AnswerQueue, queues))

    def __getitem__(self, rank: Any) -> Any:
        return OneAnswer(super().__getitem__(rank))

    def __iter__(self) -> Iterator[Any]:
        for queue in super().__iter__():
            queue.due += 1
        yield from super().__iter__()


def keep_answers_with_their_calls() -> None:
    """Skip answers to a call that failed, which nobody reads after the first error.

    Upstream's executor reads the answers of all ranks in order, up to the first error. Those of
    later ranks stay in their queues, and are taken for answers to the next call. So a call that
    several ranks refuse, such as one for an adapter that isn't there, spoils whatever comes after
    it: the next steps get their predecessors' answers.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    @instead_of(MultiprocExecutor, "collective_rpc")
    def collective_rpc(upstream: Any, self: MultiprocExecutor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.response_mqs, Answers):
            self.response_mqs = Answers(self.response_mqs)
        return upstream(self, *args, **kwargs)


NOBODY_ELSE = "cpu:fake,npu:fake"
"""Backend of process groups in which no other rank has to answer."""


def be_a_rank_without_the_others() -> None:
    """Let this process be a rank of an engine of several, none of which runs.

    Collectives end at once: this rank's own numbers are their sum, and a gather has them once for
    each rank. Shapes are those of the whole engine, which is what a recording of calls needs.
    """
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore
    from vllm.config import ParallelConfig
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    stand_in: Any = FakeProcessGroup
    stand_in.get_hccl_comm_name = lambda group, rank: NOBODY_ELSE

    @instead_of(torch.distributed, "init_process_group")
    def join(upstream: Any, *, rank: int, world_size: int, **others: Any) -> None:
        upstream(NOBODY_ELSE, rank=rank, world_size=world_size, store=FakeStore())

    @instead_of(torch.distributed, "new_group")
    def new_group(upstream: Any, ranks: Any, **others: Any) -> Any:
        return upstream(ranks, backend=NOBODY_ELSE)

    @instead_of(MessageQueue, "create_from_process_group")
    def no_queue(upstream: Any, *args: Any, **kwargs: Any) -> None:
        """Have no queue, whose readers would be waited for."""

    @instead_of(ParallelConfig, "stateless_init_dp_group")
    def no_group(upstream: Any, *args: Any, **kwargs: Any) -> None:
        """Have no group of engines, which would wait for each other before they end."""
