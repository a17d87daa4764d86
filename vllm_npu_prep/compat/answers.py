"""A patch of vLLM's executor: each call reads its own answers, also after a call that failed."""

import functools
from collections.abc import Iterator
from typing import Any


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

    upstream = MultiprocExecutor.collective_rpc
    if hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    def collective_rpc(self: MultiprocExecutor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.response_mqs, Answers):
            self.response_mqs = Answers(self.response_mqs)
        return upstream(self, *args, **kwargs)

    MultiprocExecutor.collective_rpc = collective_rpc  # type: ignore[method-assign]
