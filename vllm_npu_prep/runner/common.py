"""What both runners do around their steps: observe them, capture graphs, take new weights."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.utils import AttentionGroup, bind_kv_cache

from vllm_npu_prep.attention import kernels
from vllm_npu_prep.attention.backend import AscendAttentionBackend
from vllm_npu_prep.attention.kernel_blocks import blocks_per_block
from vllm_npu_prep.attention.kv_cache import allocate_planes, single_planes
from vllm_npu_prep.attention.latent import describe
from vllm_npu_prep.attention.local_block_tables import unwrap_backends
from vllm_npu_prep.config import decisions_of, parse_config
from vllm_npu_prep.device import Device, Memory
from vllm_npu_prep.device.communicator import union_over_ranks
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.observe.check import StepCheck
from vllm_npu_prep.observe.check_level import make_check
from vllm_npu_prep.observe.choices import watch_choices
from vllm_npu_prep.observe.metrics import StepMetrics
from vllm_npu_prep.observe.recorder import StepRecorder, make_recorder
from vllm_npu_prep.ops import models_of, replace_modules
from vllm_npu_prep.prep.batch import warm_up
from vllm_npu_prep.prep.capture_sizes import largest_decode
from vllm_npu_prep.quantization.rounding import fuse_rounding
from vllm_npu_prep.runner.eplb import NPUEplbState
from vllm_npu_prep.runner.graphs import CaptureOne, Dispatcher, Graphs
from vllm_npu_prep.runner.left_behind import forget_models
from vllm_npu_prep.runner.new_weights import followed_by_drafter, kept_addresses, refuse
from vllm_npu_prep.runner.padding import StepPadding, cache_limits
from vllm_npu_prep.runner.preparer import Preparer, StepBlockTables, builders_of, make_tables
from vllm_npu_prep.runner.step import StepInFlight
from vllm_npu_prep.wording import counted

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only


class CommonRunner:
    """The base of both runners, beside upstream's: all that doesn't depend on who keeps requests.

    A runner prepares each step in ``_prepare_inputs``, in six stages. Its overrides of upstream's
    methods call the methods here, which call none of upstream's.

    Attributes
    ----------
    padding, graphs
        Decides how steps are padded; has captured the graphs that they replay.
    """

    # Of upstream's runners
    vllm_config: VllmConfig
    device: torch.device
    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    input_batch: Any  # has `req_ids`
    attn_groups: list[list[AttentionGroup]]  # by KV-cache group

    # The step from its preparation until its tokens are sampled; None in between
    in_flight: StepInFlight | None = None
    # Lays steps out and builds their metadata; it exists from initialize_kv_cache on
    preparer: Preparer
    padding: StepPadding
    graphs: Graphs
    prep_device: Device  # the device by this plugin's interface
    cache_memory: Memory  # the memory of which the KV cache is made
    metrics: StepMetrics
    recorder: StepRecorder | None = None
    step_check: StepCheck | None = None

    # ----------------------------------------------------------------- steps

    @property
    def prepared(self) -> StepInFlight:
        """The step in flight, where there is one: between its preparation and its samples."""
        assert self.in_flight is not None
        return self.in_flight

    def _observe(
        self,
        in_flight: StepInFlight,
        kind: str,
        scheduler_output: SchedulerOutput,
        started: float,
    ) -> None:
        """Count and record the step; raise if it breaks a rule, so that it is not launched."""
        step, waits = in_flight.step, self.preparer.staging.waits
        self.metrics.add(step, kind, waits, started)
        if self.recorder is not None:
            self.recorder.note_transfers(scheduler_output.scheduled_new_reqs)
            told = self._for_record()
            self.recorder.keep(step, kind, *told, started=started, waits=waits)
        if self.step_check is not None:
            self.step_check.verify(self, scheduler_output)

    def _for_record(self) -> tuple[Any, ...]:
        """Return what a record has of the requests: their names, and what else there is of them."""
        return (self.input_batch.req_ids,)

    # ----------------------------------------------------------------- graphs

    def _make_graphs(self, dispatcher: Dispatcher, decode_query_len: int) -> Graphs:
        largest = largest_decode(self.max_num_reqs, decode_query_len, self.max_num_tokens)
        return Graphs(
            self.prep_device,
            dispatcher,
            self.vllm_config.compilation_config,
            decode_query_len=decode_query_len,
            largest_decode=largest,
            max_num_reqs=self.max_num_reqs,
            max_model_len=self.max_model_len,
            agree=union_over_ranks,
        )

    def _refuse_to_capture(self, num_reqs: int) -> None:
        """Refuse to capture beside requests, whose cache and tables dummy runs would overwrite."""
        if num_reqs:
            raise PrepError(
                f"graphs can't be captured with {counted(num_reqs, 'request')} in flight: capture "
                "at start-up"
            )

    def _capture_graphs(
        self,
        capture_one: CaptureOne,
        without_collection: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> int:
        """Capture every graph, the largest first; return the bytes of device memory they take."""
        try:
            return self.graphs.capture(capture_one, without_collection)
        finally:
            self.padding.forget()  # sizes that did not fit were dropped

    # ----------------------------------------------------------------- weights

    def _replace_layers(self, model: nn.Module, drafter: Any) -> None:
        """Replace what Ascend computes differently in a model and its drafter that were loaded.

        All layers get one backend, before vLLM asks each layer for its preferred block size.
        """
        config = self.vllm_config
        for each in models_of(model, drafter):
            replace_modules(each, config)
            fuse_rounding(each, config)
        layers = config.compilation_config.static_forward_context
        unwrap_backends(layers.values(), AscendAttentionBackend)

    @contextlib.contextmanager
    def _new_weights(self, model: nn.Module, drafter: nn.Module | None) -> Iterator[None]:
        """Return a context for a reload, after which weights are where graphs read them.

        The caller resets the prefix cache.

        Parameters
        ----------
        drafter
            The drafter, whose MTP layers follow, if the weights come from a folder; else None.
        """
        self.refuse_new_weights()
        kept = kept_addresses(model, self.vllm_config.model_config)
        with followed_by_drafter(self.vllm_config, drafter), kept:
            yield

    def refuse_new_weights(self) -> None:
        refuse(self.vllm_config)

    # ----------------------------------------------------------------- the KV cache

    def _allocate_caches(
        self, kv_cache_config: KVCacheConfig
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Allocate K and V as planes: Ascend kernels can't read upstream's interleaved form.

        Returns
        -------
        caches, planes
            The caches by layer, and their planes in the order of layers: upstream copies and counts
            blocks along the first dimension, so it gets single planes.
        """
        layers: dict[str, Any] = self.vllm_config.compilation_config.static_forward_context
        kernel_blocks_of = partial(blocks_per_block, self.vllm_config)
        caches = allocate_planes(kv_cache_config, self.cache_memory, kernel_blocks_of)
        for name, layer in layers.items():
            target = getattr(layer, "kv_sharing_target_layer_name", None)
            if target is not None:
                caches[name] = caches[target]
        in_order: list[torch.Tensor] = []
        groups = kv_cache_config.kv_cache_groups
        bind_kv_cache(caches, layers, in_order, kv_cache_groups=groups)
        return caches, single_planes(in_order, caches, layers)

    def _make_preparer(
        self, block_tables: StepBlockTables, max_num_tokens: int, **of_requests: Any
    ) -> None:
        """Make what lays steps out; `make_tables` explains the arguments."""
        builders = builders_of(self.attn_groups)
        self.preparer = Preparer(
            self.prep_device,
            make_tables(block_tables, self.attn_groups, builders, self.vllm_config, **of_requests),
            block_tables,
            builders,
            max_num_tokens=max_num_tokens,
            pin_memory=is_pin_memory_available(),
        )

    def _follow_cache(
        self,
        kv_cache_config: KVCacheConfig,
        dtype: torch.dtype,  # the cache's
        *,
        is_profiling: bool,  # whether the cache is a small one, made to measure memory
    ) -> None:
        """Make what depends on the KV cache and on `preparer`: limits, recorder and check."""
        config, tables = self.vllm_config, self.preparer.tables
        num_blocks, block_sizes = kv_cache_config.num_blocks, tables.block_sizes.tolist()
        if tables.shape.latent and not is_profiling:
            logger.info(describe(tables.shape.latent, config, dtype.itemsize))
        self.padding.forget()  # capture sizes may have changed since
        self.padding.cache_limits, self.graphs.most_rows = cache_limits(
            config,
            num_blocks,
            min(block_sizes, default=config.cache_config.block_size),
            is_profiling=is_profiling,
        )
        self.recorder = make_recorder(config, tables, self.preparer.builders, num_blocks)
        experts = getattr(self, "eplb_state", None)
        if self.recorder is not None and isinstance(experts, NPUEplbState):
            self.recorder.experts = experts.placement
        options = parse_config(config.additional_config)
        self.step_check = make_check(options.check, self)
        if any(builder.index_topk for _, builder, _ in self.preparer.builders):
            records = options.record is not None and options.record.choices
            watch_choices(self, check=options.check == "full", record=records)

    # ----------------------------------------------------------------- from start to end

    def warm_up(self) -> None:
        """Load or compile code for which the first request would otherwise wait."""
        step = warm_up(self.preparer.tables.shape)
        if self.recorder is not None:
            self.recorder.warm_up(step)
        dtype = self.vllm_config.model_config.dtype
        assert isinstance(dtype, torch.dtype)  # resolved by now
        kernels.warm_up(decisions_of(self.vllm_config).attention, dtype)

    def _end_run(self, drafter: Any) -> None:
        """Log the run's summary, and let go of what upstream's ``shutdown`` knows nothing of."""
        if hasattr(self, "preparer") and self.preparer.staging.steps:
            ring = self.preparer.staging
            logger.info(
                "Staging: %d of %d steps waited for an earlier copy to the device.",
                ring.waits,
                ring.steps,
            )
        self.metrics.close()
        self.padding.counts.log_summary()
        forget_models(getattr(self, "model", None), getattr(drafter, "model", None))
