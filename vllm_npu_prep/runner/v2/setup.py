"""What vLLM's V2 runner makes before its first step: parts, model, KV cache and tables."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.kv_connector import get_kv_connector
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from vllm_npu_prep.attention.kv_cache import (
    planes_by_layer,
    split_by_window,
)
from vllm_npu_prep.attention.local_block_tables import find_local_groups
from vllm_npu_prep.compat import v2
from vllm_npu_prep.config import parse_config
from vllm_npu_prep.device import Device
from vllm_npu_prep.device.readback import ReadBack
from vllm_npu_prep.graph.wrapper import GraphWrapper
from vllm_npu_prep.observe.metrics import StepMetrics
from vllm_npu_prep.prep.mrope import NO_MROPE
from vllm_npu_prep.runner.accepted import AcceptedTokens
from vllm_npu_prep.runner.common import CommonRunner
from vllm_npu_prep.runner.eplb import NPUEplbState
from vllm_npu_prep.runner.padding import Dispatch, StepPadding, depends_on_counts_only
from vllm_npu_prep.runner.v2.adapters import NPULoraState
from vllm_npu_prep.runner.v2.block_tables import NPUBlockTables
from vllm_npu_prep.runner.v2.buffers import RowValues, StagedRows
from vllm_npu_prep.runner.v2.context_ranks import NPUPCPManager
from vllm_npu_prep.runner.v2.dp_agreement import DPDecisions
from vllm_npu_prep.runner.v2.drafters import make_speculator, name_aux_layers
from vllm_npu_prep.runner.v2.graphs import GraphManager
from vllm_npu_prep.runner.v2.logit_bias import NPULogitBiasState
from vllm_npu_prep.runner.v2.model_state import PreparedModelState, make_model_state
from vllm_npu_prep.runner.v2.order import BatchOrder
from vllm_npu_prep.runner.v2.output import DraftsOfStep
from vllm_npu_prep.runner.v2.prompt_embeds import NPUPromptEmbedsState
from vllm_npu_prep.runner.v2.request_states import NPURequestState
from vllm_npu_prep.runner.v2.rope import NPURopeState, Rotations
from vllm_npu_prep.runner.v2.sampler import NPUSampler
from vllm_npu_prep.runner.v2.speculator import NPUSpeculator
from vllm_npu_prep.runner.v2.stages import BroadcastPPHandler, SchedulerPPHandler
from vllm_npu_prep.runner.v2.step_inputs import StepInputs
from vllm_npu_prep.runner.v2.thinking import NPUThinkingBudgetState
from vllm_npu_prep.runner.v2.traces import NPUTraceReplayState
from vllm_npu_prep.runner.v2.verification import NPURejectionSampler
from vllm_npu_prep.runner.v2.watched import CheckedBatch


class RunnerSetupV2(GPUModelRunner, CommonRunner):
    """The base of `NPUModelRunnerV2` that makes its parts, and ends them."""

    req_states: NPURequestState  # type: ignore[assignment]
    draft_tokens_handler: DraftsOfStep  # type: ignore[assignment]
    block_tables: NPUBlockTables  # type: ignore[assignment]
    model_state: PreparedModelState
    lora_state: NPULoraState
    pp_handler: SchedulerPPHandler | None  # type: ignore[assignment]
    cudagraph_manager: GraphManager  # as the next one, set by `initialize_kv_cache`
    order: BatchOrder
    requests: Rotations  # what checks read of models with M-RoPE
    dp_decisions: DPDecisions | None  # with data-parallel ranks that share experts

    # Methods of `NPUModelRunnerV2`, which parts call
    _dispatch: Dispatch
    _make_graph_manager: Callable[..., GraphManager]

    def __init__(self, vllm_config: VllmConfig, device: torch.device, prep_device: Device) -> None:
        self.prep_device = prep_device
        asynchronous = bool(vllm_config.scheduler_config.async_scheduling)
        stages = BroadcastPPHandler if asynchronous else SchedulerPPHandler
        with (
            prep_device.host_streams(),
            self._stand_ins(device),
            v2.stand_ins(PPHandler=stages),
        ):
            super().__init__(vllm_config, device)
        self.dcp_size = 1  # else upstream launches a kernel that counts each rank's part
        num_drafts = self.num_speculative_steps
        self.use_async_spec_decode = bool(num_drafts and asynchronous)
        # Synchronous steps without drafts wait for samples; the scheduler tells them to all stages
        self._host_has_samples = not (num_drafts or asynchronous)
        self.num_valid_tokens = ReadBack(prep_device, self.max_num_reqs, is_pin_memory_available())
        self.input_batch = CheckedBatch(self.req_states)
        self.metrics = StepMetrics(vllm_config)
        self._checks_fully = parse_config(vllm_config.additional_config).check == "full"
        self.cache_memory = prep_device
        parallel = vllm_config.parallel_config
        self.dp_decisions = DPDecisions(parallel) if self.dp_size > 1 else None
        sees_others = parallel.use_all2all or parallel.prefill_context_parallel_size > 1
        self.inputs = StepInputs(self.max_num_reqs, device, always_masks=bool(sees_others))
        self.accepted = AcceptedTokens(self.max_num_reqs)
        self.padding = StepPadding(
            self._dispatch,
            lambda: self.graphs.captured(),
            1 + num_drafts,
            depends_on_counts_only=depends_on_counts_only(vllm_config),
            num_ranks=parallel.prefill_context_parallel_size,
        )

    @staticmethod
    def _stand_ins(device: torch.device) -> Any:
        """Put this plugin's classes under the names by which upstream makes its parts."""

        def slot_values(*args: Any, **kwargs: Any) -> RowValues:
            return RowValues(device, *args, **kwargs)

        return v2.stand_ins(
            EplbState=NPUEplbState,
            RequestState=NPURequestState,
            RopeState=NPURopeState,
            BlockTables=NPUBlockTables,
            Sampler=NPUSampler,
            LogitBiasState=NPULogitBiasState,
            UvaBackedTensor=slot_values,
            StagedWriteTensor=StagedRows,
            LoraState=NPULoraState,
            init_model_state=make_model_state,
            init_speculator=make_speculator,
            RejectionSampler=NPURejectionSampler,
            DraftTokensHandler=DraftsOfStep,
            PromptEmbedsState=NPUPromptEmbedsState,
            ThinkingBudgetState=NPUThinkingBudgetState,
            TraceReplayState=NPUTraceReplayState,
        )

    @property
    def has_own_processors(self) -> bool:
        """Return whether users gave logits processors (``--logits-processors``) beside vLLM's
        three."""
        return self.sampler is not None and len(self.sampler.logits_processors) > 3

    @property
    def pcp_manager_cls(self) -> type[NPUPCPManager]:
        return NPUPCPManager

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        name_aux_layers(self.speculative_config)
        with self.prep_device.host_streams(), self._stand_ins(self.device):
            super().load_model(*args, **kwargs)
        if self.has_own_processors:  # they may read any request's tokens
            self.req_states.keeps_all_tokens = True
        self._replace_layers(self.get_model(), self.speculator)

    def _make_block_tables(self, *args: Any, **kwargs: Any) -> NPUBlockTables:
        kwargs["blocks_per_chunk"] = find_local_groups(self.attn_groups).blocks_per_chunk
        return NPUBlockTables(*args, **kwargs)

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        with (
            self.prep_device.host_streams(),
            self._stand_ins(self.device),
            v2.stand_ins(
                init_kv_cache=self._allocate_planes,
                get_kv_connector=self._connect,
                ModelCudaGraphManager=self._make_graph_manager,
                BlockTables=self._make_block_tables,
            ),
        ):
            super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        self.attn_groups[:] = [
            self._split_by_window(groups, index) for index, groups in enumerate(self.attn_groups)
        ]
        self.attn_groups += [[group] for group in self.model_state.encoder_attn_groups]
        self.kv_caches = self._planes
        states, blocks = self.req_states, self.block_tables
        rope = self.model_state.rope_state
        if rope is not None:
            self.requests = rope.of_requests(states.req_id_to_index)
        self._make_preparer(
            blocks,
            self.max_num_tokens,
            has_request_rows=True,
            mrope=NO_MROPE if rope is None else rope.tables,
            num_computed_tokens=states.num_computed_tokens_np,
            num_prompt_tokens=states.prompt_len.np,
            num_tokens=states.num_tokens,
            token_ids=states.token_ids,
        )
        tables = self.preparer.tables
        halves = tables.shape.latent or tables.shape.states  # with either, decodes come first
        self.order = BatchOrder(tables.request_rows, halves.decode_threshold if halves else 0)
        if isinstance(self.speculator, NPUSpeculator):
            self.speculator.follow(self.preparer.builders, blocks)
        assert isinstance(self.kv_cache_dtype, torch.dtype)
        is_profiling = bool(kwargs.get("is_profiling"))
        self._follow_cache(kv_cache_config, self.kv_cache_dtype, is_profiling=is_profiling)

    def _split_by_window(self, groups: list[AttentionGroup], index: int) -> list[AttentionGroup]:
        """Return groups with one window size each; upstream has made builders for the unsplit
        groups."""
        layers = self.compilation_config.static_forward_context
        split = split_by_window(groups, layers)
        if len(split) > len(groups):
            sizes = dict(enumerate(self.kernel_block_sizes))
            for group in split:
                group.create_metadata_builders(self.vllm_config, self.device, sizes.get(index))
        return split

    def _allocate_planes(
        self, forward_context: dict[str, Any], kv_cache_config: KVCacheConfig, *_: Any, **__: Any
    ) -> dict[str, torch.Tensor]:
        """Allocate the caches, and return those of which upstream asks the device."""
        self._caches, self._planes = self._allocate_caches(kv_cache_config)
        # Not the pair of a recurrent state, which has none
        caches = self._caches.items()
        return {name: cache for name, cache in caches if isinstance(cache, torch.Tensor)}

    def _connect(self, vllm_config: VllmConfig, *_: Any) -> Any:
        """Make upstream's KV connector over all caches, recurrent states included."""
        layers = self.compilation_config.static_forward_context
        return get_kv_connector(vllm_config, planes_by_layer(self._caches, layers))

    def _init_kv_zero_meta(self) -> None:
        """Do nothing: upstream prepares a Triton kernel here, which is not used."""

    def reload_weights(self, weights_iterator: Any = None, *args: Any, **kwargs: Any) -> None:
        drafter = self.get_draft_model() if weights_iterator is None else None
        with self._new_weights(self.get_model(), drafter):
            super().reload_weights(weights_iterator, *args, **kwargs)

    def shutdown(self) -> None:
        self._end_run(getattr(self, "speculator", None))
        self.prep_device.synchronize()
        super().shutdown()
        GraphWrapper.clear_all_graphs()
