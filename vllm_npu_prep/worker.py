"""The worker of one rank: its device, its memory and its life cycle, from start-up to sleep.

What a worker does with a step is in the runners; this module sets up what they need, measures
memory, and turns failures of the device into one line.
"""

import atexit
import contextlib
import fnmatch
import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.platforms.interface import set_assigned_physical_gpu_ids
from vllm.utils.mem_utils import format_gib
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_npu_prep.attention.layers import refuse_other_layers
from vllm_npu_prep.attention.step_memory import step_bound
from vllm_npu_prep.compat import eplb, kv_connector, v2
from vllm_npu_prep.compat.kernels import exchange_shared_prompts_by
from vllm_npu_prep.compat.models import look_at_models_before_weights, make_indexers_of
from vllm_npu_prep.compat.multimodal import items_of
from vllm_npu_prep.compat.torch import let_streams_do_nothing
from vllm_npu_prep.compat.worker import leave_states_in_their_blocks, let_profiler_run
from vllm_npu_prep.config import parse_config
from vllm_npu_prep.device import Device, make_device
from vllm_npu_prep.device.communicator import gather_shared_prompts, scatter_shared_prompts
from vllm_npu_prep.device.failures import device_failure, explained
from vllm_npu_prep.device.regions import Region
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.observe.violation import StepCheckError
from vllm_npu_prep.observe.watched_output import WatchedOutput
from vllm_npu_prep.ops import register_fused, register_overrides
from vllm_npu_prep.ops.cpu.layers import register_layers
from vllm_npu_prep.ops.cpu.linear import pack_weights, unpacked
from vllm_npu_prep.ops.moe_method import tensors_of_experts
from vllm_npu_prep.ops.npu.routing import refuse_routers
from vllm_npu_prep.ops.triton.eplb import map_to_physical_and_record
from vllm_npu_prep.progress import log_while_compiling, log_while_waiting
from vllm_npu_prep.quantization import register_kernels
from vllm_npu_prep.quantization.formats import multiplies_int4_by_int8, operators_of
from vllm_npu_prep.ranks import all_or_none, rank_across_engines, ranks_on_host
from vllm_npu_prep.runner.eplb import NPUEplbState
from vllm_npu_prep.runner.exchange import choose_exchange
from vllm_npu_prep.runner.new_weights import kept_addresses
from vllm_npu_prep.runner.outputs_in_flight import OutputsInFlight
from vllm_npu_prep.runner.v1.runner import NPUModelRunner
from vllm_npu_prep.server import one_line
from vllm_npu_prep.sleep import SleepingMemory
from vllm_npu_prep.verify.calls.start_up import table_of
from vllm_npu_prep.verify.fused import is_right
from vllm_npu_prep.verify.int8 import refuse_wrong
from vllm_npu_prep.verify.probe import probe_layers
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm_npu_prep.verify.calls.verified import VerifiedCalls

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

T = TypeVar("T")

CPU_KV_CACHE_BYTES = 2 << 30
"""The size of the CPU fallback's KV cache unless ``--kv-cache-memory-bytes`` says otherwise."""

RETURN_TOKENS = 8192
"""After steps with so many tokens, free memory is returned as soon as no request runs. On the CPU
fallback, tensors that grow with a prompt leave holes that glibc keeps, and that the next prompt
fills only in part: in one engine, 128k tokens took 658 MB after four other prompts, else 453. To
return 100 MB takes 8 ms, for which nobody's next token should wait.
"""


def look_at_model(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    """Refuse layers of a model that are not computed here, and choose how its experts exchange.

    The model is made, and its weights are not loaded yet.
    """
    refuse_other_layers(vllm_config.compilation_config.static_forward_context)
    refuse_routers(model)
    if vllm_config.device_config.device_type != "cpu":
        choose_exchange(model, vllm_config)


class NPUWorker(Worker):
    prep_device: Device  # from `init_device` on
    model_runner: NPUModelRunner
    _last_step: Any = None  # vLLM's `SchedulerOutput` of the one that was begun
    _sleeping: SleepingMemory | None = None  # with --enable-sleep-mode
    _tokens_since_return = 0  # tokens of steps since free memory was returned
    _verified: "VerifiedCalls | None" = None  # with a table of verified calls
    _peak_of_step = 0  # bytes of the largest step beside weights, without contexts

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        if vllm_config.profiler_config.profiler is not None:
            let_profiler_run(vllm_config.device_config.device_type)
        if vllm_config.use_v2_model_runner:
            v2.let_workers_run_without_triton()
        super().__init__(vllm_config, *args, **kwargs)
        self._outputs = OutputsInFlight()

    @property
    def _dtype(self) -> torch.dtype:
        dtype = self.model_config.dtype
        assert isinstance(dtype, torch.dtype)  # resolved by now
        return dtype

    def init_device(self) -> None:
        """Set up kernels, the device and the process group, then build the runner.

        Upstream's version knows CUDA only. Its hook for kernels, a platform's
        `register_triton_kernel_overrides`, comes before the worker, but without the options.
        """
        gc.freeze()  # so that collections while loading and profiling skip modules
        look_at_models_before_weights(look_at_model)
        if self.model_config.is_hybrid:
            from vllm_npu_prep.attention.gated_delta import register_layer

            register_layer()
            leave_states_in_their_blocks()
        if hasattr(self.model_config.hf_text_config, "index_topk"):
            from vllm_npu_prep.attention.sparse import LightningIndexer

            make_indexers_of(LightningIndexer)
        options = parse_config(self.vllm_config.additional_config)
        register_overrides(options.triton_kernels, self.use_v2_model_runner)
        register_kernels()
        if self.parallel_config.prefill_context_parallel_size > 1:
            exchange_shared_prompts_by(gather_shared_prompts, scatter_shared_prompts)
        if self.parallel_config.enable_eplb:
            eplb.map_experts_by(map_to_physical_and_record)
            eplb.move_tensors_of(tensors_of_experts)
            let_streams_do_nothing()
        assigned = self.parallel_config.assigned_physical_gpu_ids
        if assigned is not None:  # --device-ids, or this engine's share under data parallelism
            set_assigned_physical_gpu_ids(assigned)
        index = current_platform.logical_device_id_to_visible_device_id(self.local_rank)
        self.prep_device = make_device(self.device_config.device_type, index)
        self.device = self.prep_device.device
        if self.prep_device.computes_on_host:
            register_layers()
        if options.cpu_binding:
            bound = self.prep_device.bind_cpus()
            if bound:
                logger.info("Rank %d runs on %s (cpu_binding).", self.rank, bound)
        if self.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
            changed = self.prep_device.allow_captures()
            if changed:
                logger.info("%s.", changed)
        self._read_table()
        if options.probe and self.device.type == "npu" and self.model_config.quantization:
            operators = operators_of(self.vllm_config)
            w4a8 = multiplies_int4_by_int8(self.model_config)
            refuse_wrong(self._dtype, lambda tensor: tensor.to(self.device), operators, w4a8)
        register_fused(
            self.vllm_config, logger.warning, self._computes_rightly if options.probe else None
        )
        with log_while_waiting(
            f"Joining {counted(self.parallel_config.world_size, 'rank')}", logger.info
        ):
            init_worker_distributed_environment(
                self.vllm_config,
                self.rank,
                self.distributed_init_method,
                index,  # process groups make their device from it
                current_platform.dist_backend,
            )
        set_random_seed(self.model_config.seed)
        self._init_workspace_and_model_runner()

    def _read_table(self) -> None:
        """Let torch's own form make the calls that a table of verified calls says."""
        if (table := table_of(self.vllm_config)) is not None:
            from vllm_npu_prep.verify.calls.verified import VerifiedCalls

            self._verified = VerifiedCalls(table)
            for line in self._verified.override():
                logger.warning("%s.", line)

    def _counting_calls(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._verified is None else self._verified.counting()

    def _computes_rightly(self, name: str, dtype: torch.dtype) -> bool:
        return is_right(name, dtype, lambda tensor: tensor.to(self.device), logger.warning)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model; upstream then limits the host to one thread, which is enough for devices.

        On the CPU fallback we undo that, because the host computes (1.3 to 1.7 times as fast with
        two threads).
        """
        threads = torch.get_num_threads()
        super().load_model(load_dummy_weights=load_dummy_weights)
        if self.prep_device.computes_on_host:
            torch.set_num_threads(threads)
        model, drafter = self.model_runner.get_model(), self.get_draft_model()
        experts = self.model_runner.eplb_state
        if experts is not None and not experts.model_states:
            raise PrepError(
                f"--enable-eplb for {type(model).__name__} is not supported by vllm_npu_prep: "
                "vLLM's code of it can't move its experts; leave the flag out"
            )
        if self._sleeping is not None:
            self._sleeping.adopt(model, drafter)  # packed weights have no address that could stay
        elif self.prep_device.computes_on_host:
            pack_weights([m for m in (model, drafter) if m], self.vllm_config, logger.info)

    def _make_model_runner(self) -> Any:
        runner: Any = NPUModelRunner
        if self.use_v2_model_runner:
            from vllm_npu_prep.runner.v2.runner import NPUModelRunnerV2

            runner = NPUModelRunnerV2
        made = runner(self.vllm_config, self.device, self.prep_device)
        if self.model_config.enable_sleep_mode:
            made.cache_memory = self._sleeping = SleepingMemory(self.prep_device)
        return made

    def _maybe_get_memory_pool_context(self, tag: str) -> contextlib.AbstractContextManager:
        """Return a context without a pool: regions of `vllm_npu_prep.sleep` take its place."""
        del tag
        return contextlib.nullcontext()

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Return the memory for the KV cache in bytes.

        This is the memory that is free after a profiling run, less the peak of that run, the
        estimate for graphs, and the share of the device that is to stay free. On the CPU fallback
        it is a fixed size, because other programs share the host's memory.

        Raises
        ------
        PrepError
            If there is no room, or less than what was asked for.
        """
        self.prep_device.reset_peak_memory()
        self._run_largest_step()
        gc.collect()
        peak = self._peak_of_step = self.prep_device.peak_memory()
        free, total = self.prep_device.memory_info()
        asked = self.cache_config.kv_cache_memory_bytes
        if asked:
            size, why = asked, "as given"
        elif self.prep_device.computes_on_host:
            share = free // 2 // ranks_on_host(self.parallel_config)
            size, why = min(CPU_KV_CACHE_BYTES, share), "default of the CPU fallback"
        else:
            kept_free = int(total * (1 - self.cache_config.gpu_memory_utilization))
            size, why = free - peak - kept_free, "by --gpu-memory-utilization"
            if self.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
                size -= self.model_runner.profile_cudagraph_memory()
        if not 0 < size <= free:
            raise PrepError(
                f"no room for the KV cache: {size:,} bytes wanted ({why}), {free:,} free; change "
                "--kv-cache-memory-bytes or --gpu-memory-utilization"
            )
        logger.info(
            "KV cache: %s GiB of %s GiB free (%s; --kv-cache-memory-bytes changes it).",
            format_gib(size),
            format_gib(free),
            why,
        )
        return size

    def _run_largest_step(self) -> None:
        with (
            set_current_vllm_config(self.vllm_config),
            log_while_waiting("Running the largest step", logger.info),
            self._counting_calls(),
        ):
            self.model_runner.profile_run()

    @torch.inference_mode()
    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Load compiled code before the first request, capture graphs, and log a step's bound.

        Upstream's version warms kernels of CUDA devices and measures device memory.
        """
        with log_while_compiling(logger.info):
            self.model_runner.warm_up()
        compilation = self.vllm_config.compilation_config
        self._probe()
        if not self.model_runner.kv_caches:
            # Memory was not measured, so nothing ran yet, and the model must be traced over
            # upstream's buffers, which start at the beginning of their storage.
            self._run_largest_step()
        if compilation.cudagraph_mode != CUDAGraphMode.NONE:
            with set_current_vllm_config(self.vllm_config), self._counting_calls():
                self.model_runner.capture_model()
        if isinstance(experts := self.model_runner.eplb_state, NPUEplbState):
            experts.forget_load()
        if self._verified is not None:
            logger.info("%s", self._verified.describe())
        builders = [builder for _, builder, _ in self.model_runner.preparer.builders]
        on_host = self.prep_device.computes_on_host
        bound = step_bound(self.vllm_config, builders, self._peak_of_step, on_host)
        self.step_bytes = bound.total
        logger.info("%s", bound)
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)
        # The garbage collector can skip static objects from now on.
        gc.collect()
        gc.freeze()
        return CompilationTimes(language_model=compilation.compilation_time, encoder=0.0)

    def _probe(self) -> None:
        """Compare this device's attention with formulas, before graphs are made of it.

        The CPU fallback is left out: the project's tests compare its kernels.
        """
        config = parse_config(self.vllm_config.additional_config)
        if self.prep_device.computes_on_host or not config.probe:
            return
        compilation = self.vllm_config.compilation_config
        with log_while_waiting("Probing attention", logger.info):
            probe_layers(
                self.model_runner.attn_groups,
                compilation.static_forward_context,
                self._dtype,
                self.prep_device,
                logger.info,
                compilation.cudagraph_mode.has_full_cudagraphs(),
            )

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._last_step = scheduler_output
        nobody_runs = not scheduler_output.scheduled_cached_reqs.req_ids
        if nobody_runs and self._tokens_since_return > RETURN_TOKENS:
            self._tokens_since_return = 0
            self.prep_device.return_free_memory()
        self._tokens_since_return += scheduler_output.total_num_scheduled_tokens
        for req_id, items in items_of(scheduler_output).items():
            features = self.model_runner.features_of(req_id)
            for number, feature in items.items():
                features[number] = feature
        return self._keep(self._run(super().execute_model, scheduler_output, *args, **kwargs))

    def execute_dummy_batch(self) -> None:
        """Take part in a step of other data-parallel ranks, without requests of this one."""
        self._last_step = None
        self._run(super().execute_dummy_batch)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._keep(self._run(super().sample_tokens, *args, **kwargs))

    def take_draft_token_ids(self) -> Any:
        return self._run(super().take_draft_token_ids)

    def _run(self, part: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run upstream's part of a step; if it fails, write what was recorded.

        Raises
        ------
        PrepError
            If the device failed or ran out of memory, or another rank was lost.
        """
        try:
            return part(*args, **kwargs)
        except Exception as error:
            self._step_failed(error)
            raise

    def _step_failed(self, error: Exception) -> None:
        """Write what was recorded, and raise one line in place of an error of a device or rank.

        Other errors are not replaced: this returns, and the caller raises them again.
        """
        self._save_steps(error)
        if isinstance(error, StepCheckError):
            one_line.leave(str(error))
        step = "a step without requests"
        if self._last_step is not None:
            tokens = counted(self._last_step.total_num_scheduled_tokens, "token")
            requests = counted(len(self._last_step.num_scheduled_tokens), "request")
            step = f"a step with {tokens} of {requests}"
        if (told := explained(error, step)) is not None:
            if "\n" in str(error):
                logger.error("A step failed. The report:\n%s", error)
            raise told from error

    def _keep(self, output: Any) -> Any:
        # With one rank, vLLM reads each output; and the fallback's copies are complete at once.
        if self.parallel_config.world_size > 1 and not self.prep_device.computes_on_host:
            self._outputs.keep(output)
        if isinstance(output, AsyncModelRunnerOutput):
            return WatchedOutput(output, self._step_failed)
        return output

    def _save_steps(self, error: BaseException) -> None:
        if self.model_runner.recorder is not None:
            self.model_runner.recorder.dump(f"{type(error).__name__} in the engine")

    def load_adapters(self, adapters: list[LoRARequest]) -> dict[int, str]:
        """Hold these adapters, for `compat.lora`, which asks all ranks.

        Parameters
        ----------
        adapters
            In order of use, the most recently used last. Those that are held already are not read
            again.

        Returns
        -------
        dict
            The load of each adapter that is held then, by the adapter's number.
        """
        manager = self.model_runner.lora_manager
        for each in adapters:
            manager.add_adapter(each)
        held: Any = manager._adapter_manager
        return {number: adapter.load for number, adapter in held.list_adapters().items()}

    def dump_steps(self) -> str:
        """Write the last steps, for ``collective_rpc``; return one line that says where they are.

        Raises
        ------
        PrepError
            If none are recorded.
        """
        return self.record_steps("dump_steps")["answer"]

    def record_steps(self, reason: str) -> dict[str, Any]:
        """Write the last steps, for a server that asks all its ranks; `reason` is who asked.

        Returns
        -------
        dict
            ``rank`` across data-parallel ranks, ``folder``, number of ``steps``, and all that as
            one line, ``answer``.

        Raises
        ------
        PrepError
            If none are recorded.
        """
        if (recorder := self.model_runner.recorder) is None:
            raise PrepError(
                'no steps are recorded: start with {"npu_prep": {"record": {"dir": ..., "steps": '
                '"last 64"}}}'
            )
        written = recorder.dump(reason)
        rank = rank_across_engines(self.parallel_config)
        answer = {"rank": rank, "folder": str(written.folder), "steps": written.steps}
        return answer | {"answer": str(written)}

    def shutdown(self) -> None:
        """Shut down as upstream does; write records if an asynchronous failure appears only now."""
        atexit.register(gc.freeze)  # else Python's end collects all remaining objects twice
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and hasattr(self, "model_runner"):
            self._save_steps(error)
        self._settle()
        if self._verified is not None:
            self._verified.end()
        super().shutdown()

    def _settle(self) -> None:
        """Wait for the device; log a failed device's error, so that the shutdown goes on."""
        try:
            if hasattr(self, "prep_device"):
                self.prep_device.synchronize()
        except RuntimeError as error:
            if (reason := device_failure(error)) is None:
                raise
            logger.warning("The device fails while the engine ends (%s).", reason)

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Take weights from a transfer engine as upstream does, at the addresses that graphs read.

        Raises
        ------
        PrepError
            Beside a KV connector that can't forget, or if the new weights don't fit where the old
            ones lie.
        """
        self.model_runner.refuse_new_weights()
        with kept_addresses(self.model_runner.get_model(), self.model_config):
            super().update_weights(*args, **kwargs)

    def save_sharded_state(self, *args: Any, **kwargs: Any) -> None:
        with unpacked(self.model_runner.get_model()):
            super().save_sharded_state(*args, **kwargs)

    def save_tensorized_model(self, *args: Any, **kwargs: Any) -> None:
        with unpacked(self.model_runner.get_model()):
            super().save_tensorized_model(*args, **kwargs)

    @property
    def sleep_mode_backend(self) -> SleepingMemory:
        """The memory that sleeps.

        Raises
        ------
        PrepError
            Without ``--enable-sleep-mode``. The engine has already paused its scheduler then;
            `wake_up` resumes it.
        """
        if self._sleeping is None:
            raise PrepError(
                "sleep needs --enable-sleep-mode, and no memory was released: wake_up resumes "
                "paused requests, sleep level 0 pauses them without releasing memory"
            )
        return self._sleeping

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and of the KV cache back.

        Parameters
        ----------
        level
            1: the host keeps the weights; 2: they are lost but for a drafter's and for what
            ``--sleep-preserve-parameter-names`` names, and `reload_weights` reads them again.

        Raises
        ------
        PrepError
            Without ``--enable-sleep-mode``, or if the host has no room for the weights of a rank;
            what was awake is awake then, on all ranks.
        """
        with all_or_none(self.parallel_config, lambda: self._prepare_sleep(level)) as can:
            if not can:
                return
        memory = self.sleep_mode_backend
        before = self.prep_device.memory_info()[0]
        kv_connector.forget_caches()
        slept: list[Region] = []
        with all_or_none(self.parallel_config, lambda: slept.extend(memory.unmap(level))) as done:
            if not done:
                memory.restore(slept)
                kv_connector.restore_caches()
                return
        logger.info(
            "Sleep level %d released %s GiB.",
            level,
            format_gib(max(0, self.prep_device.memory_info()[0] - before)),
        )
        if level == 2:
            kept = [*self.model_config.sleep_preserve_parameter_names]
            if memory.drafter_bytes:
                kept.append(f"the drafter's {memory.drafter_bytes:,} bytes, by the host")
            logger.info(
                "The weights are gone (kept: %s): after wake_up, call reload_weights before the "
                "next request.",
                ", ".join(kept) or "none",
            )

    def _prepare_sleep(self, level: int) -> None:
        """Do all that may be refused, before any memory is released."""
        self.sleep_mode_backend  # noqa: B018 (refuses without the flag)
        if level == 2:
            self._save_sleep_parameters(self.model_runner.get_model())

    def _save_sleep_parameters(self, model: torch.nn.Module) -> None:
        """Save as upstream does; on the CPU fallback clone what upstream takes for safe."""
        super()._save_sleep_parameters(model)
        if self.prep_device.computes_on_host:
            patterns = self.model_config.sleep_preserve_parameter_names
            self._sleep_saved_parameters = {
                name: parameter.detach().clone()
                for name, parameter in self._get_sleep_parameters(model).items()
                if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
            }

    def wake_up(
        self,
        tags: list[str] | None = None,  # weights, kv_cache; None: both
    ) -> None:
        """Map the memory again, at the same addresses; do nothing if it doesn't sleep.

        Raises
        ------
        PrepError
            If a rank has no memory, or a tag is unknown; what slept still sleeps on all ranks then.
        """
        if (sleeping := self._sleeping) is None:
            return
        mapped: list[Region] = []
        with all_or_none(self.parallel_config, lambda: mapped.extend(sleeping.map(tags))) as done:
            if not done:
                sleeping.release(mapped)
                return
        if tags is None or "kv_cache" in tags:
            kv_connector.restore_caches()
        if self._sleep_saved_parameters and (tags is None or "weights" in tags):
            self._restore_sleep_parameters(self.model_runner.get_model())
        self.prep_device.synchronize()
