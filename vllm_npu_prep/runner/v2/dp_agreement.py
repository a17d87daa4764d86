"""What data-parallel ranks that share experts agree on in each step, before it is prepared."""

from typing import Any

from vllm.config import ParallelConfig
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.dp_utils import DPSyncState, dispatch_cg_and_sync_dp


class DPDecisions:
    """Decides with the other data-parallel ranks which graph a step replays, once per step.

    Upstream agrees after it has gathered a step's numbers and before it prepares the inputs. Here
    gathering prepares the inputs, so the ranks agree first, and upstream's code receives the
    result.

    Attributes
    ----------
    across
        The number of tokens of each rank in the last decision, int32 ``[data_parallel_size]`` on
        the host; None if no rank had any tokens.
    """

    def __init__(self, parallel: ParallelConfig) -> None:
        self._parallel = parallel
        self._of_step: tuple[BatchExecutionDescriptor, DPSyncState | None] | None = None
        self.across: Any = None

    def decide(
        self,
        manager: Any,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        *,
        eager: bool,
    ) -> BatchExecutionDescriptor:
        """Decide for a step with requests; every rank has to call this or run a dummy step.

        `manager` is the rank's `vllm_npu_prep.runner.v2.graphs.GraphManager`.
        `uniform_token_count` is the number of tokens of each request, or None if requests differ.
        """
        self._of_step = self._agree(
            manager,
            num_reqs,
            num_tokens,
            uniform_token_count,
            self._parallel.data_parallel_size,
            self._parallel.data_parallel_rank,
            need_eager=eager,
            num_active_loras=num_active_loras,
        )
        return self._of_step[0]

    def take(
        self, manager: Any, *args: Any, **kwargs: Any
    ) -> tuple[BatchExecutionDescriptor, DPSyncState | None]:
        """Answer upstream's ``dispatch_cg_and_sync_dp``: with the step's decision, or a new one.

        A new decision is made for dummy steps, for which `decide` was not called.
        """
        found, self._of_step = self._of_step, None
        if found is None:
            found = self._agree(manager, *args, **kwargs)
            if manager is not None:
                manager.of_dummy_run = found[0]
        return found

    def _agree(
        self, *args: Any, **kwargs: Any
    ) -> tuple[BatchExecutionDescriptor, DPSyncState | None]:
        found: tuple[BatchExecutionDescriptor, DPSyncState | None]
        found = dispatch_cg_and_sync_dp(*args, **kwargs)
        self.across = None if found[1] is None else found[1].num_tokens_across_dp
        return found
