"""What several ranks can't do."""

from typing import TYPE_CHECKING

from vllm_npu_prep.compat.releases import ray_compiles_graphs
from vllm_npu_prep.device import has_collectives, visible_devices
from vllm_npu_prep.ranks import ranks_on_host
from vllm_npu_prep.startup.asked import Asked
from vllm_npu_prep.startup.refusal import Refusal, Subject

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def _parallel(asked: Asked) -> "ParallelConfig":
    return asked.config.parallel_config


def _lack_devices(asked: Asked) -> bool:
    """Each rank needs a device of its own, unless ranks compute on the CPU.

    Ray counts the devices of its nodes.
    """
    visible = visible_devices(asked.kind.device_type)
    too_many = visible is not None and ranks_on_host(_parallel(asked)) > visible
    return too_many and not _parallel(asked).use_ray


def _ray_compiles_graphs(asked: Asked) -> bool:
    return _parallel(asked).use_ray and ray_compiles_graphs()


DEVICES = (
    Refusal(
        "ranks-beyond-devices",
        _lack_devices,
        "{num_ranks} ranks on this host",
        "{visible} NPUs are visible, and each rank needs its own",
        "lower the tensor, pipeline or data parallel size, or check {variable}",
        lambda c: {
            "num_ranks": ranks_on_host(_parallel(c)),
            "visible": visible_devices(c.kind.device_type),
            "variable": c.kind.visible_env_var,
        },
    ),
    Refusal(
        "no-collectives",
        lambda c: _parallel(c).world_size > 1 and not has_collectives(c.kind.device_type),
        "{num_ranks} ranks of one engine",
        "libhccl.so has no HcclGetRootInfo, so NPUs can't exchange data",
        "install CANN's HCCL, set tensor and pipeline parallel size to 1, or use the CPU fallback",
        lambda c: {"num_ranks": _parallel(c).world_size},
    ),
)

RANKS = (
    Refusal(
        "context-parallelism",
        lambda c: (
            _parallel(c).prefill_context_parallel_size > 1
            or _parallel(c).decode_context_parallel_size > 1
        ),
        "context parallelism",
        "every rank keeps the KV cache of whole requests",
        "use --tensor-parallel-size",
    ),
    Refusal(
        "external-launcher",
        lambda c: _parallel(c).distributed_executor_backend == "external_launcher",
        "--distributed-executor-backend external_launcher",
        "only mp and Ray can start ranks",
        "use mp or ray",
    ),
    Refusal(
        "eplb",
        lambda c: _parallel(c).enable_eplb,
        "--enable-eplb",
        "experts stay on the ranks that loaded them",
        "leave the flag out",
    ),
    Refusal(
        "elastic-ep",
        lambda c: _parallel(c).enable_elastic_ep,
        "--enable-elastic-ep",
        "experts stay on the ranks that loaded them",
        "leave the flag out",
    ),
    Refusal(
        "all2all-backend",
        lambda c: (
            _parallel(c).use_all2all and _parallel(c).all2all_backend != "allgather_reducescatter"
        ),
        "--all2all-backend {name}",
        "its kernels run on CUDA devices only",
        "leave the flag out",
        lambda c: {"name": _parallel(c).all2all_backend},
    ),
    Refusal(
        "batch-sharded-sampling",
        lambda c: _parallel(c).enable_batch_sharded_sampling,
        "--enable-batch-sharded-sampling",
        "vLLM's V1 runner samples every request on every rank",
        "leave the flag out",
    ),
    Refusal(
        "fault-tolerance",
        lambda c: _parallel(c).enable_fault_tolerance,
        "--enable-fault-tolerance",
        "an engine that loses a rank stops, and has to be restarted",
        "leave the flag out",
    ),
    Refusal(
        "async-stages",
        lambda c: (
            _parallel(c).pipeline_parallel_size > 1 and c.config.scheduler_config.async_scheduling
        ),
        "--async-scheduling over pipeline stages",
        "vLLM's V1 runner does not support it",
        "leave the flag out",
    ),
    Refusal(
        "ray-data-parallel",
        lambda c: _parallel(c).data_parallel_backend == "ray",
        "--data-parallel-backend ray",
        "only mp can start engines",
        "use --distributed-executor-backend ray to spread the ranks of each engine over hosts",
    ),
    Refusal(
        "ray-compiled-graphs",
        _ray_compiles_graphs,
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0",
        "Ray's compiled graphs have not been tested",
        "unset it",
    ),
)

SUBJECTS = (Subject("devices", DEVICES, verdict=""), Subject("ranks", RANKS))
