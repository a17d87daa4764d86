"""Which rank a worker is, and how many there are."""

from typing import Any


def rank_across_engines(parallel_config: Any) -> int:
    """Number of a worker among those of all data-parallel engines.

    Engines of models without experts know of no others, but still have an index of their own.

    Parameters
    ----------
    parallel_config
        vLLM's `ParallelConfig`, in the worker.
    """
    engine = parallel_config.data_parallel_index
    return engine * parallel_config.world_size + parallel_config.rank


def is_one_of_several(parallel_config: Any) -> bool:
    """Whether other workers serve, too; the first engine of a model without experts can't tell."""
    return parallel_config.world_size_across_dp > 1 or parallel_config.data_parallel_index > 0


def ranks_on_host(parallel_config: Any) -> int:
    """Workers that this host runs; with Ray only the workers know it, other processes get 1."""
    if parallel_config.use_ray:
        return max(1, len(parallel_config.assigned_physical_gpu_ids or ()))
    engines = max(1, parallel_config.data_parallel_size_local)
    return parallel_config.local_world_size * engines
