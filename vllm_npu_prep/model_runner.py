"""NPUModelRunner: vLLM's V1 runner with its input preparation replaced. Holds no arithmetic."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import bind_kv_cache

from vllm_npu_prep.attention.backend import AscendMetadataBuilder
from vllm_npu_prep.attention.kv_cache import allocate_planes, zero_blocks
from vllm_npu_prep.attention.metadata import AscendMetadata, common_metadata
from vllm_npu_prep.device import Device
from vllm_npu_prep.device.staging import DeviceArrays, StagingRing
from vllm_npu_prep.prep.batch import PreparedStep, StepBatch, prepare_step
from vllm_npu_prep.prep.kernels import warm_up
from vllm_npu_prep.prep.layout import largest_layout, step_layout
from vllm_npu_prep.prep.mask import MaskPlan
from vllm_npu_prep.prep.padding import Padding

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only


class NPUModelRunner(GPUModelRunner):
    """Prepares a step in six steps and hands attention an `AscendMetadata`.

    Who owns what of a step, once `_prepare_inputs` has returned:

    =========================  =======================================================
    attribute                  owner
    =========================  =======================================================
    input_ids, positions       ours: views of the step's buffers, rebound each step
    query_start_loc            ours
    seq_lens                   ours; ``optimistic_seq_lens_cpu`` is their host view
    num_computed_tokens        ours
    discard_request_mask       ours
    block tables               upstream's; committed by `_build_step_metadata`
    M-RoPE, LoRA, encoder      upstream's, refused or unused so far
    the same names in          upstream's own buffers, rebound by `_dummy_run`
    a dummy run
    =========================  =======================================================

    Parameters
    ----------
    vllm_config
        The engine's config.
    device
        As torch sees it.
    prep_device
        The same device behind this plugin's interface.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, prep_device: Device) -> None:
        self.prep_device = prep_device
        with prep_device.host_streams():
            super().__init__(vllm_config, device)
        self._upstream_buffers = _step_attributes(self)
        self._padding_decision: tuple[Any, ...] | None = None
        self._attn_metadata: dict[str, AscendMetadata] | None = None
        self.last_step: PreparedStep | None = None

    # ----------------------------------------------------------------- the step

    def _prepare_inputs(
        self, scheduler_output: "SchedulerOutput", num_scheduled_tokens: np.ndarray
    ) -> tuple[torch.Tensor, SpecDecodeMetadata | None, int]:
        """Prepare one step; replaces upstream's version whole.

        Parameters
        ----------
        scheduler_output
            What the scheduler decided; `_update_states` has already brought the tables up to date.
        num_scheduled_tokens
            int32 ``[num_reqs]`` in the order of the batch.

        Returns
        -------
        logits_indices, spec_decode_metadata, max_num_sampled_tokens
            As upstream's.
        """
        batch = self._step_batch(scheduler_output, num_scheduled_tokens)
        # 1 padding: decided first, from counts alone
        padding, pad_requests = self._decide_padding(scheduler_output, batch)
        # 2 layout: where each array lives, a function of the padded sizes
        layout = step_layout(padding.num_input_tokens, padding.num_reqs_padded, batch.num_groups)
        slot, host_np, host = self.staging.acquire(layout)
        # 3 kernel and 4 state: one fused pass writes every array and decides the state
        step = prepare_step(batch, padding, layout, host_np)
        # 5 copy: all of them at once; device tensors are views of the twin
        arrays = self.staging.submit(slot, layout, layout.used_bytes(step.num_logits))
        self._bind(arrays, host)
        self._place_sampled_tokens(step, arrays)
        # 6 metadata: one for each KV-cache group, from host values at hand
        self._attn_metadata = self._build_step_metadata(step, arrays, host, pad_requests)
        self.last_step = step
        return self._sampling_inputs(step, arrays)

    def _step_batch(
        self, scheduler_output: "SchedulerOutput", num_scheduled_tokens: np.ndarray
    ) -> StepBatch:
        """Upstream's tables as the pure core reads them: views, nothing copied."""
        table = self.input_batch
        num_reqs = table.num_reqs
        num_draft_tokens = self._no_drafts[:num_reqs]
        if scheduler_output.scheduled_spec_decode_tokens:
            num_draft_tokens = np.zeros(num_reqs, np.int32)
            for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
                num_draft_tokens[table.req_id_to_index[req_id]] = len(drafts)
        self._compute_prev_positions(num_reqs)
        return StepBatch(
            num_computed_tokens=table.num_computed_tokens_cpu[:num_reqs],
            num_scheduled_tokens=num_scheduled_tokens,
            num_draft_tokens=num_draft_tokens,
            num_prompt_tokens=table.num_prompt_tokens[:num_reqs],
            num_tokens=table.num_tokens_no_spec[:num_reqs],
            token_ids=table.token_ids_cpu,
            block_tables=self._block_tables_np,
            block_sizes=self._block_sizes,
            chunked_prefill=self.scheduler_config.enable_chunked_prefill,
            previous_rows=self.prev_positions.np[:num_reqs],
        )

    def _decide_padding(
        self, scheduler_output: "SchedulerOutput", batch: StepBatch
    ) -> tuple[Padding, bool]:
        """Ask upstream's dispatcher now; its answer is kept for the one later call of this step."""
        max_num_scheduled_tokens = int(batch.num_scheduled_tokens.max())
        decision = super()._determine_batch_execution_and_padding(
            num_tokens=batch.total_num_scheduled_tokens,
            num_reqs=batch.num_reqs,
            num_scheduled_tokens_np=batch.num_scheduled_tokens,
            max_num_scheduled_tokens=max_num_scheduled_tokens,
            num_encoder_reqs=len(scheduler_output.scheduled_encoder_inputs),
            allow_microbatching=self._allow_microbatching(
                batch.num_reqs, batch.num_scheduled_tokens
            ),
        )
        self._padding_decision = decision
        mode, descriptor = decision[:2]
        full_graph = mode == CUDAGraphMode.FULL
        num_reqs_padded = descriptor.num_reqs if full_graph else batch.num_reqs
        decode_query_len = max_num_scheduled_tokens if full_graph and descriptor.uniform else 0
        padding = Padding(descriptor.num_tokens, num_reqs_padded, decode_query_len)
        return padding, full_graph

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Padding is decided once: `_prepare_inputs` left the answer here, for one use."""
        decision, self._padding_decision = self._padding_decision, None
        if decision is None:
            decision = super()._determine_batch_execution_and_padding(*args, **kwargs)
        return decision

    def _bind(self, arrays: DeviceArrays, host: DeviceArrays) -> None:
        """Let upstream's later code read the step's buffers by its own names."""
        for name in ("input_ids", "query_start_loc", "discard_request_mask"):
            buffer = getattr(self, name)
            buffer.gpu = getattr(arrays, name)
            buffer.cpu = getattr(host, name)
            buffer.np = buffer.cpu.numpy()
        self.positions = arrays.positions
        self.seq_lens = arrays.seq_lens
        self.num_computed_tokens = arrays.num_computed_tokens
        self.optimistic_seq_lens_cpu = host.seq_lens

    def _place_sampled_tokens(self, step: PreparedStep, arrays: DeviceArrays) -> None:
        """Async scheduling: the last step's samples are still on the device; place them there."""
        sampled = self.input_batch.prev_sampled_token_ids
        count = step.num_sampled_tokens_on_device
        if sampled is None or not count:
            return
        tokens = sampled[arrays.sampled_token_rows[:count], 0].to(arrays.input_ids.dtype)
        arrays.input_ids.index_copy_(0, arrays.sampled_token_indices[:count], tokens)

    def _build_step_metadata(
        self, step: PreparedStep, arrays: DeviceArrays, host: DeviceArrays, pad_requests: bool
    ) -> dict[str, AscendMetadata]:
        """One metadata object for each attention group, shared by its layers."""
        by_layer: dict[str, AscendMetadata] = {}
        masks: dict[MaskPlan, torch.Tensor | None] = {}  # groups of one window share their mask
        self.input_batch.block_table.commit_block_table(step.num_reqs)
        for group, attn_groups in enumerate(self.attn_groups):
            block_table = self.input_batch.block_table[group].block_table.gpu
            if pad_requests:  # rows of earlier, larger steps
                block_table[step.num_reqs : step.padding.num_reqs_padded] = NULL_BLOCK_ID
            for attn_group in attn_groups:
                builder: AscendMetadataBuilder = attn_group.get_metadata_builder()
                metadata = builder.build_step(
                    step, group, arrays, host, block_table, pad_requests, masks
                )
                by_layer.update(dict.fromkeys(attn_group.layer_names, metadata))
        return by_layer

    def _sampling_inputs(
        self, step: PreparedStep, arrays: DeviceArrays
    ) -> tuple[torch.Tensor, SpecDecodeMetadata | None, int]:
        """What the sampler needs of the step."""
        if self.speculative_config is None:
            return arrays.logits_indices[: step.num_logits], None, 1
        num_draft_tokens = step.batch.num_draft_tokens
        spec_decode_metadata = self._calc_spec_decode_metadata(num_draft_tokens, step.cu_num_tokens)
        max_num_sampled_tokens = int(num_draft_tokens.max()) + 1
        return spec_decode_metadata.logits_indices, spec_decode_metadata, max_num_sampled_tokens

    def _get_slot_mappings(
        self, num_tokens_padded: int, *args: Any, **kwargs: Any
    ) -> tuple[dict[int, torch.Tensor] | None, Any]:
        """Slots were computed with everything else; dummy runs take upstream's."""
        if self._attn_metadata is None:
            return super()._get_slot_mappings(num_tokens_padded, *args, **kwargs)
        by_layer = {name: each.slot_mapping for name, each in self._attn_metadata.items()}
        by_group = {
            gid: by_layer[group.layer_names[0]]
            for gid, group in enumerate(self.kv_cache_config.kv_cache_groups)
        }
        return by_group, by_layer

    def _build_attention_metadata(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Any, CommonAttentionMetadata | None]:
        """Hand the layers what `_prepare_inputs` built; dummy runs go through upstream."""
        metadata, self._attn_metadata = self._attn_metadata, None
        if metadata is None:
            return super()._build_attention_metadata(*args, **kwargs)
        common = None
        if self.speculative_config is not None:
            group = self.kv_cache_config.kv_cache_groups[0]
            common = common_metadata(metadata[group.layer_names[0]], self.positions)
        return metadata, common

    def _dummy_run(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Dummy runs use upstream's own buffers, which hold the largest sizes."""
        self._padding_decision = self._attn_metadata = None
        _restore_attributes(self, self._upstream_buffers)
        return super()._dummy_run(*args, **kwargs)

    @torch.inference_mode()
    def sample_tokens(self, *args: Any, **kwargs: Any) -> ModelRunnerOutput:
        """Upstream's asynchronous output makes a stream event.

        It also rolls back the generators of requests whose sample is discarded, by an offset that
        generators of the CPU don't have: there, they are kept from advancing instead.
        """
        generators, held = self.input_batch.generators, {}
        if self.prep_device.computes_on_host and generators:
            discarded = np.flatnonzero(self.discard_request_mask.np).tolist()
            held = {row: generators.pop(row) for row in discarded if row in generators}
        try:
            with self.prep_device.host_streams():
                return super().sample_tokens(*args, **kwargs)
        finally:
            generators.update(held)

    # ----------------------------------------------------------------- the KV cache

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        """Allocate the cache, then what depends on its groups: staging ring and table views."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        builders = [group.get_metadata_builder() for group in self._attn_group_iterator()]
        for builder in builders:  # one causal matrix for each window, not for each group
            builder.masks = builders[0].masks
        tables = self.input_batch.block_table.block_tables
        self._block_tables_np = tuple(table.block_table.np for table in tables)
        self._block_sizes = np.array([table.block_size for table in tables], np.int32)
        self._no_drafts = np.zeros(self.max_num_reqs, np.int32)
        layout = largest_layout(self.max_num_tokens, self.max_num_reqs, len(tables))
        self.staging = StagingRing(
            self.prep_device, layout.nbytes, pin_memory=is_pin_memory_available()
        )

    def initialize_kv_cache_tensors(
        self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """K and V as planes; upstream interleaves them, which Ascend kernels don't take."""
        caches = allocate_planes(kv_cache_config, self.prep_device)
        for layer_name, target in self.shared_kv_cache_layers.items():
            caches[layer_name] = caches[target]
        bind_kv_cache(
            caches,
            self.compilation_config.static_forward_context,
            self.kv_caches,
            kv_cache_groups=kv_cache_config.kv_cache_groups,
        )
        # Upstream copies and counts blocks along the first dimension: give it planes, not pairs.
        self.kv_caches[:] = [plane for cache in self.kv_caches for plane in cache]
        return caches

    def _init_kv_zero_meta(self) -> None:
        """Nothing to precompute: upstream's Triton kernel is not used."""

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        """Zero new blocks, as upstream does with a Triton kernel."""
        zero_blocks(self.kv_caches, block_ids)

    # ----------------------------------------------------------------- the device

    def warm_up(self) -> None:
        """Load or compile what the first request would otherwise wait for."""
        warm_up(len(self._block_tables_np))

    def _sync_device(self) -> None:
        """Upstream asks ``torch.accelerator``."""
        self.prep_device.synchronize()


_TENSORS = ("positions", "seq_lens", "num_computed_tokens", "optimistic_seq_lens_cpu")
_BUFFERS = ("input_ids", "query_start_loc", "discard_request_mask")


def _step_attributes(runner: NPUModelRunner) -> dict[str, Any]:
    """Upstream's own buffers of the names that `NPUModelRunner._bind` rebinds."""
    tensors = {name: getattr(runner, name) for name in _TENSORS}
    buffers = {name: dict(vars(getattr(runner, name))) for name in _BUFFERS}
    return {**tensors, **buffers}


def _restore_attributes(runner: NPUModelRunner, saved: dict[str, Any]) -> None:
    for name in _TENSORS:
        setattr(runner, name, saved[name])
    for name in _BUFFERS:
        vars(getattr(runner, name)).update(saved[name])
