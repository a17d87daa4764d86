"""Asks a Ray cluster for its devices before an engine begins to wait for them."""

import json
import os
import subprocess
import sys
from typing import Any

from vllm.logger import init_logger

from vllm_npu_prep.device import DEVICE_ENV_VAR, DeviceKind, visible_devices
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.progress import log_while_waiting

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

SECONDS = 60
"""The time that a cluster gets to answer."""

ASK = """
import json, ray
ray.init("auto", logging_level="error", log_to_driver=False)
print(json.dumps(ray.cluster_resources()))
"""

HOW = (
    "on every host: ray start, with --head on the first and --address on others, and "
    "--resources '{\"NPU\": N}', N its NPUs (on the CPU fallback: the ranks that it may run)"
)


def prepare_for_workers(parallel_config: Any, kind: DeviceKind) -> None:
    """Tell Ray's workers the server's kind of device, and check that the cluster has such devices.

    Ray starts workers with the environment of their host. vLLM adds its variables too late for the
    plugin's decision, and only those that the host doesn't set. So we add the kind, and the folder
    in which steps are counted, to `ray_runtime_env` of vLLM's `ParallelConfig`.

    Raises
    ------
    PrepError
        If the cluster that the engine would wait for has no NPU at all.
    """
    import ray

    from vllm_npu_prep.observe.metrics import FOLDER_ENV_VAR

    environment = dict(parallel_config.ray_runtime_env or {})
    variables = dict(environment.get("env_vars", {}))
    if variables.get(DEVICE_ENV_VAR) == kind.device_type:  # vLLM checks its config several times
        return
    if not ray.is_initialized():  # else this process is one of a cluster
        _refuse_without_npus(parallel_config.world_size, kind)
    variables[DEVICE_ENV_VAR] = kind.device_type
    if FOLDER_ENV_VAR in os.environ:
        variables[FOLDER_ENV_VAR] = os.environ[FOLDER_ENV_VAR]
    parallel_config.ray_runtime_env = {**environment, "env_vars": variables}


def _refuse_without_npus(num_ranks: int, kind: DeviceKind) -> None:
    """Raise if the cluster has no NPU at all.

    Fewer NPUs than ranks are no error: vLLM waits half an hour for other hosts to join. A missing
    cluster is no error on a host with enough NPUs, where vLLM starts its own.
    """
    offered = _resources()
    if offered is None:
        address = os.environ.get("RAY_ADDRESS")
        if address is None and num_ranks <= (visible_devices(kind.device_type) or 0):
            return
        where = f"at RAY_ADDRESS={address}" if address else "on this host"
        raise PrepError(f"--distributed-executor-backend ray: no Ray cluster {where}; {HOW}")
    if not offered.get("NPU"):
        raise PrepError(f"--distributed-executor-backend ray: the Ray cluster offers no NPU; {HOW}")


def _resources() -> dict[str, float] | None:
    """Return the resources of the cluster of ``RAY_ADDRESS`` or this host; None without one.

    A separate process asks, because a process that is connected to a cluster must not be forked, as
    engines are.
    """
    try:
        with log_while_waiting("Asking the Ray cluster for its devices", logger.info):
            ran = subprocess.run(
                [sys.executable, "-c", ASK], capture_output=True, text=True, timeout=SECONDS
            )
    except subprocess.TimeoutExpired:
        return None
    return json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else None
