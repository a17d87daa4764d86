"""Which rank a worker is, how many ranks there are, and what they do together."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from vllm_npu_prep.errors import PrepError

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM configures loggers below its own only


def rank_across_engines(parallel_config: Any) -> int:
    """Return the number of a worker among the workers of all data-parallel ranks.

    Data-parallel ranks of a model without experts know nothing of each other, but each still has an
    index of its own. `parallel_config` is vLLM's `ParallelConfig` as the worker has it.
    """
    engine = parallel_config.data_parallel_index
    return engine * parallel_config.world_size + parallel_config.rank


def is_one_of_several(parallel_config: Any) -> bool:
    """Tell whether other workers serve, too.

    The data-parallel rank 0 of a model without experts can't tell, and says False.
    """
    return parallel_config.world_size_across_dp > 1 or parallel_config.data_parallel_index > 0


def ranks_on_host(parallel_config: Any) -> int:
    """Return how many workers this host runs. With Ray only the workers know it; others get 1."""
    if parallel_config.use_ray:
        return max(1, len(parallel_config.assigned_physical_gpu_ids or ()))
    engines = max(1, parallel_config.data_parallel_size_local)
    return parallel_config.local_world_size * engines


@contextlib.contextmanager
def all_or_none(
    parallel_config: Any,  # vLLM's `ParallelConfig`, in the worker
    attempt: Callable[[], object],  # raises if this rank can't, and leaves everything as it was
) -> Iterator[bool]:
    """Let all ranks of an engine attempt something, and yield whether all of them succeeded.

    If any of them failed, each rank has to undo its part in the body of the ``with`` statement.
    This is for an attempt that one rank may refuse alone, while the others would have changed
    something. Where all ranks refuse alike, they may just raise: `vllm_npu_prep.compat.executor`
    keeps their answers apart.

    Raises
    ------
    PrepError
        At the end, on the last rank alone: the message of the first rank that could not. An error
        of the last rank that is no `PrepError` is raised as it is; other ranks log theirs.
    """
    failure: str | None = None
    unforeseen: Exception | None = None
    try:
        attempt()
    except PrepError as error:
        failure = str(error)
    except Exception as error:
        failure, unforeseen = str(error) or type(error).__name__, error
    is_last = parallel_config.rank == parallel_config.world_size - 1
    if parallel_config.world_size > 1:
        if unforeseen is not None and not is_last:
            logger.error("Rank %d failed.", parallel_config.rank, exc_info=unforeseen)
        failure = _first_of_ranks(failure)
    yield failure is None
    if failure is not None and is_last:
        raise unforeseen or PrepError(failure)


def _first_of_ranks(mine: str | None) -> str | None:
    """Return the message of the first rank of this engine that has one; None without one.

    It gathers over the tensor-parallel group and then over the pipeline stages, on the host.
    """
    import torch
    from vllm.distributed import get_pp_group, get_tp_group

    for group in (get_tp_group(), get_pp_group()):
        told: list[str | None] = [None] * group.world_size
        torch.distributed.all_gather_object(told, mine, group=group.cpu_group)
        mine = next((each for each in told if each is not None), None)
    return mine
