"""Which rank a worker is, how many there are, and what is refused of several."""

from typing import TYPE_CHECKING, Any

from vllm_npu_prep.device import DeviceKind, has_collectives, visible_devices
from vllm_npu_prep.errors import PrepError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def rank_across_engines(parallel_config: Any) -> int:
    """Number of a worker among those of all data-parallel engines.

    Engines of models without experts know of no other; their index tells them apart all the same.

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
    """Workers that this host runs; with Ray only they themselves know, and others hear of one."""
    if parallel_config.use_ray:
        return max(1, len(parallel_config.assigned_physical_gpu_ids or ()))
    engines = max(1, parallel_config.data_parallel_size_local)
    return parallel_config.local_world_size * engines


def refuse_ranks_without_device(parallel_config: Any, kind: DeviceKind) -> None:
    """Each rank has a device of its own, where devices are what ranks compute on.

    Ray counts the devices of its nodes.

    Parameters
    ----------
    parallel_config
        vLLM's `ParallelConfig`.
    kind
        Kind of device that was chosen.

    Raises
    ------
    PrepError
        If this host has more ranks than visible devices, or nothing by which they exchange.
    """
    visible, num_ranks = visible_devices(kind.device_type), ranks_on_host(parallel_config)
    if visible is not None and num_ranks > visible and not parallel_config.use_ray:
        raise PrepError(
            f"{num_ranks} ranks on this host: {visible} NPUs are visible, and each rank needs its "
            f"own; lower the tensor, pipeline or data parallel size, or see {kind.visible_env_var}"
        )
    if parallel_config.world_size > 1 and not has_collectives(kind.device_type):
        raise PrepError(
            f"{parallel_config.world_size} ranks of one engine: libhccl.so has no HcclGetRootInfo, "
            "so that NPUs can't exchange; install CANN's HCCL, set tensor and pipeline parallel "
            "size to 1, or use the CPU fallback"
        )


def unsupported_ranks(vllm_config: "VllmConfig") -> list[tuple[str, str]]:
    """What several ranks were asked for and is refused, with reasons."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    has_stages = parallel.pipeline_parallel_size > 1
    checks = [
        (
            parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1,
            "context parallelism",
            "every rank caches whole requests",
        ),
        (
            parallel.distributed_executor_backend == "external_launcher",
            "--distributed-executor-backend external_launcher",
            "ranks are started by mp, or by Ray",
        ),
        (
            parallel.enable_eplb or parallel.enable_elastic_ep,
            "--enable-eplb" if parallel.enable_eplb else "--enable-elastic-ep",
            "experts stay with the ranks that loaded them",
        ),
        (
            parallel.use_all2all and parallel.all2all_backend != "allgather_reducescatter",
            f"--all2all-backend {parallel.all2all_backend}",
            "its kernels are CUDA's; leave the flag out",
        ),
        (
            has_stages and bool(vllm_config.scheduler_config.async_scheduling),
            "--async-scheduling over pipeline stages",
            "vLLM's V1 runner does not support it; leave the flag out",
        ),
        (
            has_stages and vllm_config.speculative_config is not None,
            "speculation over pipeline stages",
            "drafts are prepared where the model is whole; use --tensor-parallel-size",
        ),
        (
            transfer is not None and transfer.kv_connector is not None and parallel.world_size > 1,
            f"KV connector {transfer.kv_connector if transfer else None} on several ranks",
            "its files are named by layers, of which each rank has a part",
        ),
    ]
    return [(feature, reason) for applies, feature, reason in checks if applies]
