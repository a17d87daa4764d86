"""NPUWorker: device, memory and life cycle of one rank."""

import contextlib
import gc
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.mem_utils import format_gib
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_npu_prep.device import make_device
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.model_runner import NPUModelRunner

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

CPU_KV_CACHE_BYTES = 2 << 30
"""KV cache of the CPU fallback unless ``--kv-cache-memory-bytes`` says otherwise. A share of the
host's memory, as on a device, would take it from everything else that runs there."""


class NPUWorker(Worker):
    """One rank of the engine."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.prep_device = make_device(vllm_config.device_config.device_type)

    def init_device(self) -> None:
        """Set up the device and the process group, then build the runner.

        Upstream's version knows CUDA only.
        """
        self.device = self.prep_device.device
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        self._init_workspace_and_model_runner()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model; upstream then leaves the host one thread, which a device needs no more.

        On the CPU fallback the host's threads do the computing (1.3 to 1.7 times as fast with two).
        """
        threads = torch.get_num_threads()
        super().load_model(load_dummy_weights=load_dummy_weights)
        if self.prep_device.computes_on_host:
            torch.set_num_threads(threads)

    def _make_model_runner(self) -> NPUModelRunner:
        """The runner of this plugin in place of upstream's choice."""
        return NPUModelRunner(self.vllm_config, self.device, self.prep_device)

    def _maybe_get_memory_pool_context(self, tag: str) -> contextlib.AbstractContextManager:
        """No pool: upstream raises here for platforms outside its tree (sleep mode is refused)."""
        del tag
        return contextlib.nullcontext()

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Memory for the KV cache in bytes.

        Upstream measures a device allocator, which the CPU has not. A profiling run still comes
        first: it allocates what a full step needs.
        """
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.profile_run()
        gc.collect()
        free, _ = self.prep_device.memory_info()
        asked = self.cache_config.kv_cache_memory_bytes
        size = asked or min(CPU_KV_CACHE_BYTES, free // 2)
        if size > free:
            raise PrepError(
                f"--kv-cache-memory-bytes {size:,} is more than the {free:,} bytes that are free"
            )
        logger.info(
            "KV cache: %s GiB of %s GiB free (%s).",
            format_gib(size),
            format_gib(free),
            "as given" if asked else "default; change it with --kv-cache-memory-bytes",
        )
        return size

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Load compiled code before the first request; there is no graph to capture.

        Upstream's version warms kernels of CUDA devices and measures device memory.
        """
        self.model_runner.warm_up()
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)
        # Static objects need no look from the garbage collector any more.
        gc.collect()
        gc.freeze()
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def sleep(self, level: int = 1) -> None:
        """Refused: planes of the KV cache are not in a pool that can be released."""
        raise PrepError("sleep mode is not supported by vllm_npu_prep: don't call /sleep")

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Refused as `sleep` is."""
        raise PrepError("sleep mode is not supported by vllm_npu_prep: don't call /wake_up")
