"""The runners that can be watched, and the watch of a worker's runner."""

import logging
import os
from importlib import metadata
from typing import Any, NamedTuple

from vllm_npu_prep import __version__
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.watch.adapter import RunnerAdapter, time_to_read
from vllm_npu_prep.watch.config import parse_watch
from vllm_npu_prep.watch.own import OwnV1Adapter, OwnV2Adapter
from vllm_npu_prep.watch.v1 import AscendV1Adapter, V1Adapter
from vllm_npu_prep.watch.v2 import AscendV2Adapter, V2Adapter
from vllm_npu_prep.watch.watch import Watch

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM configures loggers below its own only


class KnownRunner(NamedTuple):
    """A runner whose steps can be read."""

    module: str  # of its class
    adapter: type[RunnerAdapter]
    package: str
    versions: tuple[str, ...]  # with which it was tried


VLLM, ASCEND, OWN = ("0.32.0",), ("0.26.0rc1",), (__version__,)
KNOWN = (
    KnownRunner("vllm.v1.worker.gpu_model_runner", V1Adapter, "vllm", VLLM),
    KnownRunner("vllm.v1.worker.gpu.model_runner", V2Adapter, "vllm", VLLM),
    KnownRunner("vllm_ascend.worker.model_runner_v1", AscendV1Adapter, "vllm_ascend", ASCEND),
    KnownRunner("vllm_ascend.worker.v2.model_runner", AscendV2Adapter, "vllm_ascend", ASCEND),
    KnownRunner("vllm_npu_prep.runner.v1.runner", OwnV1Adapter, "vllm_npu_prep", OWN),
    KnownRunner("vllm_npu_prep.runner.v2.runner", OwnV2Adapter, "vllm_npu_prep", OWN),
)


def watch_worker(worker: Any, text: str) -> Watch | None:
    """Watch the runner of a worker; where that can't be, say why in one line, and return None.

    `text` is the value of ``NPU_PREP_WATCH``.
    """
    try:
        config, runner = parse_watch(text), worker.model_runner
        adapter, version = adapter_of(runner)
        watch = Watch(runner, adapter, config, version)
        watch.attach()
    except PrepError as error:
        logger.error("Not watching: %s", error)
        return None
    except Exception as error:
        logger.error("Not watching: %s: %s", type(error).__name__, " ".join(str(error).split()))
        return None
    worker.dump_steps = watch.dump_steps
    logger.info(
        "Watching %s (%s), check %s: a debug mode, in which each step waits until it is read from "
        "the device, for a full step %.1f ms here, and checked.",
        adapter.name,
        version,
        config.check,
        1e3 * time_to_read(runner.device, runner.max_num_tokens),
    )
    return watch


def adapter_of(runner: Any) -> tuple[RunnerAdapter, str]:
    """Return what reads a runner's steps, and the version of the runner's package.

    Raises
    ------
    PrepError
        If the runner or its version is not known.
    """
    kind = type(runner)
    package = kind.__module__.partition(".")[0]
    modules = [each.__module__ for each in kind.__mro__]
    known = [each for each in KNOWN if each.package == package and each.module in modules]
    if not known:
        names = ", ".join(each.adapter.name for each in KNOWN)
        raise PrepError(
            f"runner {kind.__module__}.{kind.__qualname__} is not known; known: {names}"
        )
    # The class that is derived from most
    found = min(known, key=lambda each: modules.index(each.module))
    version = version_of(package)
    if version not in found.versions and os.environ.get("NPU_PREP_ANY_VLLM") != "1":
        raise PrepError(
            f"{found.adapter.name} of version {version} is not known, known: "
            f"{', '.join(found.versions)}; NPU_PREP_ANY_VLLM=1 tries it"
        )
    return found.adapter(runner), version


def version_of(package: str) -> str:
    """Return the version of a package by the name that it is imported by, without its build."""
    names = metadata.packages_distributions().get(package, [package])
    return metadata.version(names[0]).partition("+")[0]
