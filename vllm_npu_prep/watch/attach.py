"""Has the runner of each worker watched, once its KV cache is there.

Until then nothing else is imported. numba above all would come too early: vLLM's CPU platform
searches what is imported for kernels before it makes a worker, and fails at numba's library.
"""

import functools
from typing import Any


@functools.cache
def watch_workers(text: str) -> None:
    """Watch each worker that gets its KV cache in this process from here on.

    `text` is the value of ``NPU_PREP_WATCH``.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    initialize = WorkerWrapperBase.initialize_from_config

    @functools.wraps(initialize)
    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_npu_prep.watch.known import watch_worker

        result = initialize(self, *args, **kwargs)
        watch_worker(self.worker, text)
        return result

    WorkerWrapperBase.initialize_from_config = initialize_from_config
