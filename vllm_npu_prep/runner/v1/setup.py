"""What vLLM's V1 runner makes before its first step: parts, model, KV cache and tables."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_npu_prep.attention.device_block_tables import DeviceBlockTables
from vllm_npu_prep.attention.kv_cache import (
    encoder_only_groups,
    planes_by_layer,
    split_by_window,
)
from vllm_npu_prep.attention.local_block_tables import find_local_groups
from vllm_npu_prep.compat.eplb import states_of
from vllm_npu_prep.device import Device
from vllm_npu_prep.graph.wrapper import GraphWrapper
from vllm_npu_prep.observe.metrics import StepMetrics
from vllm_npu_prep.ops.npu.top_k_top_p import limit_drafts_by
from vllm_npu_prep.runner.common import CommonRunner
from vllm_npu_prep.runner.eplb import NPUEplbState
from vllm_npu_prep.runner.padding import Dispatch, StepPadding, depends_on_counts_only
from vllm_npu_prep.runner.step import DummyRun
from vllm_npu_prep.runner.v1.bookkeeping import Bookkeeping
from vllm_npu_prep.runner.v1.drafters import ExactLengths, make_drafter, share_builders
from vllm_npu_prep.runner.v1.model_inputs import ModelInputs
from vllm_npu_prep.runner.v1.request_updates import (
    RequestUpdates,
    request_states_are_read,
)
from vllm_npu_prep.runner.v1.sampling import (
    top_k_top_p_sampler,
)
from vllm_npu_prep.runner.v1.speculation import Speculation
from vllm_npu_prep.runner.v1.upstream_buffers import UpstreamBuffers


class RunnerSetup(GPUModelRunner, CommonRunner):
    """The base of `NPUModelRunner` that makes its parts, and ends them."""

    dummy_run: DummyRun | None  # the dummy run that is under way
    block_tables: DeviceBlockTables  # exists, like `preparer`, from `initialize_kv_cache` on

    # Methods of `NPUModelRunner`, which parts call
    _dispatch: Dispatch
    _end_step: Callable[[], None]
    _backup_next_token_ids: Callable[[], torch.Tensor]
    _block_table_of_group: Callable[[int], torch.Tensor]

    def __init__(self, vllm_config: VllmConfig, device: torch.device, prep_device: Device) -> None:
        self.prep_device = prep_device
        with prep_device.host_streams():
            super().__init__(vllm_config, device)
        self.sampler.topk_topp_sampler = top_k_top_p_sampler(
            vllm_config, self.sampler.topk_topp_sampler, lambda: self.input_batch
        )
        # Upstream would give the model embeddings in every step, which graphs can't read.
        self.enable_prompt_embeds = False
        self._end_step()
        if self.model_config.is_hybrid:  # in every step upstream copies counts that nothing reads
            counts: Any = self.num_accepted_tokens
            counts.copy_to_gpu = lambda n=None: counts.gpu
        self._experts_see_other_tokens = vllm_config.parallel_config.use_all2all
        self.buffers = UpstreamBuffers(
            self.__dict__,
            positions=self.positions,
            seq_lens=self.seq_lens,
            num_computed_tokens=self.num_computed_tokens,
            optimistic_seq_lens_cpu=self.optimistic_seq_lens_cpu,
            input_ids=self.input_ids,
            query_start_loc=self.query_start_loc,
            discard_request_mask=self.discard_request_mask,
            mrope_positions=self.mrope_positions if self.uses_mrope else None,
        )
        decode_query_len = self.uniform_decode_query_len
        self.graphs = self._make_graphs(self.cudagraph_dispatcher, decode_query_len)
        self.padding = StepPadding(
            self._dispatch,
            self.graphs.captured,
            decode_query_len,
            depends_on_counts_only(vllm_config),
        )
        assert isinstance(self.dtype, torch.dtype)
        self.inputs = ModelInputs(
            self.max_num_reqs,
            mrope_dims=self.mrope_num_dims if self.uses_mrope else 0,
            takes_items=self.supports_mm_inputs,
            dtype=self.dtype,
            encoder_cache=self.encoder_cache,
        )
        self.updates = RequestUpdates(
            self.max_num_reqs,
            self.max_model_len,
            num_spec_tokens=self.num_spec_tokens,
            asynchronous=bool(self.use_async_scheduling),
            request_states_are_read=request_states_are_read(vllm_config),
            tokens_are_sent=vllm_config.parallel_config.pipeline_parallel_size > 1,
        )
        self.bookkeeping = Bookkeeping(
            self.max_num_reqs,
            self.max_model_len,
            asynchronous=bool(self.use_async_scheduling),
            read_back=self._to_list,
            samples_np=self.sampled_token_ids_pinned_cpu.numpy(),
        )
        self.speculation = Speculation(
            prep_device,
            self.max_num_reqs,
            num_spec_tokens=self.num_spec_tokens,
            asynchronous=bool(self.use_async_spec_decode),
            pin_memory=is_pin_memory_available(),
        )
        self.num_valid_tokens = self.speculation.num_valid_tokens
        drafter = make_drafter(
            vllm_config,
            device,
            self.num_valid_tokens,
            self._backup_next_token_ids,
            self._block_table_of_group,
        )
        if drafter is not None:
            self.drafter = drafter
        self._drafting_group = 0  # KV-cache group of the drafter's layers, if it has any
        self.metrics = StepMetrics(vllm_config)
        self.cache_memory = prep_device

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with this plugin's full graphs instead of CUDA's."""
        with states_of(NPUEplbState):
            super().load_model(*args, **kwargs)
        self._replace_layers(self.get_model(), getattr(self, "drafter", None))
        if self.compilation_config.cudagraph_mode.has_full_cudagraphs():
            self.model = GraphWrapper(self.get_model(), self.vllm_config, CUDAGraphMode.FULL)

    def reload_weights(self, weights_iterator: Any = None, *args: Any, **kwargs: Any) -> None:
        drafter = self.get_draft_model() if weights_iterator is None else None
        with self._new_weights(self.get_model(), drafter):
            super().reload_weights(weights_iterator, *args, **kwargs)

    def may_add_encoder_only_layers_to_kv_cache_config(self) -> None:
        """Add groups without a cache after the others, one for each attention window.

        Upstream adds one group, whatever the windows of its layers.
        """
        groups = encoder_only_groups(self.vllm_config, self.kv_cache_dtype)
        self.kv_cache_config.kv_cache_groups.extend(groups)
        self.runner_only_attn_layers.update(*(group.layer_names for group in groups))

    def initialize_attn_backend(self, *args: Any, **kwargs: Any) -> None:
        """Make metadata for each window, even if the caches share a group."""
        super().initialize_attn_backend(*args, **kwargs)
        layers = self.compilation_config.static_forward_context
        self.attn_groups[:] = [split_by_window(groups, layers) for groups in self.attn_groups]

    def may_reinitialize_input_batch(self, kv_cache_config: KVCacheConfig) -> None:
        super().may_reinitialize_input_batch(kv_cache_config)
        local = find_local_groups(self.attn_groups)
        self.block_tables = self.input_batch.block_table = DeviceBlockTables(
            self.input_batch.block_table,
            self.max_num_reqs,
            self.device,
            local.blocks_per_chunk,
        )

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        """Allocate the cache, then what depends on its groups: tables, staging ring, builders."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        drafter = getattr(self, "drafter", None)
        if isinstance(drafter, ExactLengths):
            self._drafting_group = drafter.kv_cache_gid
            share_builders(drafter, self.attn_groups)
        batch = self.input_batch
        self._make_preparer(
            self.block_tables,
            self.max_num_tokens,
            mrope=self.inputs.mrope_tables,
            num_computed_tokens=batch.num_computed_tokens_cpu,
            num_prompt_tokens=batch.num_prompt_tokens,
            num_tokens=batch.num_tokens_no_spec,
            token_ids=batch.token_ids_cpu,
        )
        is_profiling = bool(kwargs.get("is_profiling"))
        self._follow_cache(kv_cache_config, self.kv_cache_dtype, is_profiling=is_profiling)

    def initialize_kv_cache_tensors(
        self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        caches, self.kv_caches[:] = self._allocate_caches(kv_cache_config)
        # Upstream registers these with a KV connector
        return planes_by_layer(caches, self.compilation_config.static_forward_context)

    def _init_kv_zero_meta(self) -> None:
        """Do nothing: upstream prepares a Triton kernel here, which is not used."""

    def shutdown(self) -> None:
        self._end_run(getattr(self, "drafter", None))
        self.inputs.log_summary()
        limit_drafts_by(None)
        super().shutdown()  # waits for the device first
        CUDAGraphWrapper.clear_all_graphs()
