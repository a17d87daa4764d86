"""NPUModelRunner: vLLM's V1 runner with its input preparation replaced. Holds no arithmetic."""

from time import perf_counter
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.utils import bind_kv_cache

from vllm_npu_prep.attention.backend import AscendAttentionBackend, AscendMetadataBuilder
from vllm_npu_prep.attention.kv_cache import (
    allocate_planes,
    encoder_only_groups,
    split_by_window,
    zero_blocks,
)
from vllm_npu_prep.attention.local_attention import LocalBlockTables, unwrap_backends
from vllm_npu_prep.attention.metadata import AscendMetadata, common_metadata
from vllm_npu_prep.config import parse_config
from vllm_npu_prep.device import Device
from vllm_npu_prep.device.staging import DeviceArrays, StagedArrays, StagingRing
from vllm_npu_prep.graph.runner import GraphRunner
from vllm_npu_prep.inspect.check import StepCheck, make_check
from vllm_npu_prep.inspect.metrics import StepMetrics
from vllm_npu_prep.inspect.recorder import StepRecorder, make_recorder
from vllm_npu_prep.prep.batch import BatchTables, PreparedStep, StepBatch, prepare_step, warm_up
from vllm_npu_prep.prep.layout import largest_step, step_layout
from vllm_npu_prep.prep.mask import MaskPlan

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only


class NPUModelRunner(GraphRunner):
    """Prepares a step in six steps and hands attention an `AscendMetadata`.

    Who owns what of a step, once `_prepare_inputs` has returned:

    =========================  =======================================================
    attribute                  owner
    =========================  =======================================================
    input_ids, positions       ours: views of the step's buffers, rebound each step
    mrope_positions            ours, and read in place of positions
    query_start_loc            ours
    seq_lens                   ours; ``optimistic_seq_lens_cpu`` is their host view.
                               Drafters shorten the device's in place, after the forward
    num_computed_tokens        ours
    discard_request_mask       ours
    SpecDecodeMetadata         ours: views, made in each step
    backup_next_token_ids      ours; upstream's drafters collect their own
    block tables               `DeviceBlockTables`, on either side; encoder-only groups
                               have neither these nor slots. `LocalBlockTables` has those
                               of virtual requests
    token_type_ids             upstream's, made in `_init_model_kwargs` of our lengths
    is_padding                 ours, handed out by `_prepare_padding_mask`
    inputs_embeds              ours, made for steps with embeddings only
    encoder's outputs          upstream's, cached by the scheduler's word
    LoRA slots                 `PunicaWrapperNPU`, sent when they change
    the same names in          upstream's own buffers, rebound by `_dummy_run`; in a
    a dummy run                graph, ours again
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
        self._uses_mla = self.model_config.use_mla  # a property that looks far, 30 us a step
        self._experts_see_other_tokens = vllm_config.parallel_config.use_all2all
        self._attn_metadata: dict[str, AscendMetadata] | None = None
        self._is_padding: torch.Tensor | None = None
        self._slots: tuple[Any, ...] | None = None
        self.last_step: PreparedStep | None = None
        self.metrics = StepMetrics(vllm_config)
        self.recorder: StepRecorder | None = None
        self.step_check: StepCheck | None = None

    # ----------------------------------------------------------------- the step

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
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
        started = perf_counter()
        batch = self._step_batch(scheduler_output, num_scheduled_tokens)
        # 1 padding: decided first, from counts alone
        padding = self._decide_padding(scheduler_output, batch)
        # 2 layout: where each array lives, a function of the padded sizes
        layout = step_layout(
            padding.num_input_tokens,
            padding.num_reqs_padded,
            self._num_groups,
            self._max_logits_per_req,
            self.mrope_dims,
            self.local_groups,
        )
        staged = self.staging.acquire(layout)
        # 3 kernel and 4 state: one fused pass writes every array and decides the state
        step = prepare_step(batch, padding, layout, staged.np)
        self._collect_prompt_embeds(step)
        # 5 copy: all of them at once; then samples that are still on the device find their place
        self.staging.send(step, self._last_samples() if batch.num_sampled_rows else None)
        # 6 metadata: one for each KV-cache group, from host values at hand
        self._attn_metadata = self._build_step_metadata(step, staged)
        self._bind(staged)
        if self.lora_config and step.num_reqs:  # dummy runs choose their own adapters
            self.set_active_loras(self.input_batch, num_scheduled_tokens, step.num_sampled_tokens)
        self.last_step, self._staged = step, staged
        self._observe(step, scheduler_output, started)
        return self._sampling_inputs(step, staged.device)

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Let the check follow the scheduler on its own; upstream's lists grow later."""
        if self.step_check is not None:
            self.step_check.follow(scheduler_output)
        super()._update_states(scheduler_output)

    def _observe(
        self, step: PreparedStep, scheduler_output: SchedulerOutput, started: float
    ) -> None:
        """Count the step, keep it for a record, and raise rather than launch what breaks a rule."""
        kind = self.step_counts.last
        self.metrics.add(step, kind, self.staging.waits, started)
        if self.recorder is not None and step.num_reqs:
            self.recorder.keep(step, kind, *self._names_and_embeds())
        if self.step_check is not None:
            self.step_check.verify(self, scheduler_output)

    def _step_batch(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> StepBatch:
        """The step as the pure core reads it: views, nothing copied."""
        self._follow_rows(scheduler_output)
        num_draft_tokens, batch = self._no_drafts, self.input_batch
        if scheduler_output.scheduled_spec_decode_tokens:
            num_draft_tokens = np.zeros_like(num_scheduled_tokens)
            for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
                num_draft_tokens[batch.req_id_to_index[req_id]] = len(drafts)
        sampled = batch.prev_sampled_token_ids
        return StepBatch(
            self._tables,
            num_scheduled_tokens,
            num_draft_tokens,
            scheduler_output.total_num_scheduled_tokens,
            self.block_tables.previous_rows,
            0 if sampled is None else sampled.shape[0],
            self._num_sampled_drafts,
            self._takes_embeds(num_scheduled_tokens),
        )

    def _bind(self, staged: StagedArrays) -> None:
        """Let upstream's later code read the step's buffers by its own names."""
        host, cpu, device = staged.np, staged.cpu, staged.device
        ids, starts, discard = self.input_ids, self.query_start_loc, self.discard_request_mask
        ids.gpu, ids.cpu, ids.np = device.input_ids, cpu.input_ids, host.input_ids
        starts.gpu, starts.cpu = device.query_start_loc, cpu.query_start_loc
        starts.np = host.query_start_loc
        discard.gpu, discard.cpu = device.discard_request_mask, cpu.discard_request_mask
        discard.np = host.discard_request_mask
        self.positions = device.positions
        if self.uses_mrope:
            self.mrope_positions.gpu = device.mrope_positions
        self.seq_lens = device.seq_lens
        self.num_computed_tokens = device.num_computed_tokens
        self.optimistic_seq_lens_cpu = cpu.seq_lens
        self._is_padding = device.is_padding
        self.backup_next_token_ids = device.backup_next_token_ids

    def _build_step_metadata(
        self, step: PreparedStep, staged: StagedArrays
    ) -> dict[str, AscendMetadata]:
        """One metadata object for each attention group, shared by its layers."""
        by_layer: dict[str, AscendMetadata] = {}
        masks: dict[MaskPlan, torch.Tensor | None] = {}  # groups of one window share their mask
        block_tables = self.block_tables.device_rows(step.padding.num_reqs_padded)
        local_tables = self._gather_local_tables(staged)
        for group, builder, layer_names in self._builders:
            block_table = block_tables[group] if builder.causal else None
            if builder.attention_chunk_size is not None:
                block_table = local_tables[group]
            metadata = builder.build_step(step, group, staged, block_table, masks)
            by_layer |= dict.fromkeys(layer_names, metadata)
        return by_layer

    def _gather_local_tables(self, staged: StagedArrays) -> dict[int, torch.Tensor]:
        """Block tables of virtual requests, by KV-cache group; none without chunks."""
        if self.local_groups is None:
            return {}
        return self._local_tables.gather(staged.device.local_table_rows)

    def _sampling_inputs(
        self, step: PreparedStep, arrays: DeviceArrays
    ) -> tuple[torch.Tensor, SpecDecodeMetadata | None, int]:
        """What the sampler needs of the step."""
        if self.speculative_config is None:
            if step.num_logits == step.layout.max_logits:
                return arrays.logits_indices, None, 1
            return arrays.logits_indices[: step.num_logits], None, 1
        if not step.num_reqs:  # a dummy run, which samples nothing
            return arrays.logits_indices[:0], None, 0
        num_reqs, num_drafts = step.num_reqs, step.num_drafts
        metadata = SpecDecodeMetadata(
            draft_token_ids=arrays.draft_token_ids[:num_drafts],
            num_draft_tokens=step.batch.num_draft_tokens[:num_reqs].tolist(),
            cu_num_draft_tokens=arrays.cu_num_draft_tokens[:num_reqs],
            cu_num_sampled_tokens=arrays.cu_num_sampled_tokens[:num_reqs],
            target_logits_indices=arrays.target_logits_indices[:num_drafts],
            bonus_logits_indices=arrays.bonus_logits_indices[:num_reqs],
            logits_indices=arrays.logits_indices[: step.num_logits],
        )
        return metadata.logits_indices, metadata, step.max_num_sampled_tokens

    def _get_slot_mappings(
        self, num_tokens_padded: int, *args: Any, **kwargs: Any
    ) -> tuple[dict[int, torch.Tensor] | None, Any]:
        """Slots were computed with everything else; dummy runs take upstream's."""
        if self._attn_metadata is None:
            return super()._get_slot_mappings(num_tokens_padded, *args, **kwargs)
        slots = self._slots
        if slots is None or slots[0] is not self.positions:  # another layout than the last step's
            by_layer = {
                name: each.slot_mapping
                for name, each in self._attn_metadata.items()
                if each.slot_mapping is not None
            }
            by_group = {
                gid: by_layer[group.layer_names[0]]
                for gid, group in enumerate(self.kv_cache_config.kv_cache_groups)
                if group.layer_names[0] in by_layer
            }
            slots = self._slots = (self.positions, by_group, by_layer)
        return slots[1:]

    def _prepare_padding_mask(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Padding came with the step; dummy runs without a graph take upstream's.

        The last thing that upstream asks for before the forward pass of a step or of a dummy run.
        Routers read it. Those that choose experts for the tokens of several ranks get none, and
        treat padding as tokens: the mask would be of this rank's tokens, at other rows.
        """
        if self._is_padding is None:
            is_padding = super()._prepare_padding_mask(*args, **kwargs)
        else:
            self._check_padding()
            is_padding = self._is_padding
        return None if self._experts_see_other_tokens else is_padding

    def _build_attention_metadata(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Any, CommonAttentionMetadata | None]:
        """Hand the layers what `_prepare_inputs` built; dummy runs go through upstream."""
        metadata, self._attn_metadata = self._attn_metadata, None
        if metadata is None:
            return super()._build_attention_metadata(*args, **kwargs)
        common = None
        if self.speculative_config is not None:
            step, group = self.last_step, self._drafting_group
            assert step is not None
            block_tables = self.block_tables.device_rows(step.padding.num_reqs_padded)
            slots = self._staged.device.slot_mapping[group]
            common = common_metadata(step, self._staged, block_tables[group], slots)
        if self._uses_mla:
            for _, builder, layer_names in self._builders:
                seen = builder.for_layers(metadata[layer_names[0]])
                metadata |= dict.fromkeys(layer_names, seen)
        return metadata, common

    def _forget_step(self) -> None:
        """Also what `_prepare_inputs` left for the rest of its step."""
        super()._forget_step()
        self._attn_metadata = self._is_padding = None

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

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """All layers have one backend, before vLLM asks each for the block size it prefers."""
        super().load_model(*args, **kwargs)
        layers = self.compilation_config.static_forward_context
        unwrap_backends(layers.values(), AscendAttentionBackend)

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        """Allocate the cache, then what depends on its groups: staging ring and table views."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        self._builders: list[tuple[int, AscendMetadataBuilder, list[str]]] = [
            (group, attn_group.get_metadata_builder(), attn_group.layer_names)
            for group, attn_groups in enumerate(self.attn_groups)
            for attn_group in attn_groups
        ]
        for _, builder, _ in self._builders:  # one causal matrix for each window
            builder.masks = self._builders[0][1].masks
        self._share_builders()
        self._padding_decisions.clear()  # capture sizes may have been settled in between
        batch, tables = self.input_batch, self.block_tables
        self._tables = BatchTables(
            num_computed_tokens=batch.num_computed_tokens_cpu,
            num_prompt_tokens=batch.num_prompt_tokens,
            num_tokens=batch.num_tokens_no_spec,
            token_ids=batch.token_ids_cpu,
            block_entries=tables.entries_np,
            max_num_blocks=tables.max_num_blocks,
            block_sizes=np.array([table.block_size for table in tables.block_tables], np.int32),
            num_blocks=tables.num_blocks,
            num_known_blocks=tables.num_known_blocks,
            num_device_blocks=tables.num_device_blocks,
            chunked_prefill=self.scheduler_config.enable_chunked_prefill,
            mrope=self.mrope_tables,
            local=self.local_groups,
        )
        self._no_drafts = np.zeros(self.max_num_reqs, np.int32)
        self._num_groups = self._tables.num_groups
        self._max_logits_per_req = self.uniform_decode_query_len
        nbytes = largest_step(
            self.max_num_tokens,
            self.max_num_reqs,
            self._num_groups,
            self._max_logits_per_req,
            len(tables.entries),
            self.mrope_dims,
            self.local_groups,
        )
        if self.local_groups is not None:
            # A virtual request has a token, in padding too
            self._local_tables = LocalBlockTables(
                self.prep_device, tables.entries, self.local_groups, self.max_num_tokens
            )
        self.staging = StagingRing(
            self.prep_device,
            nbytes,
            block_tables=tables.entries,
            pin_memory=is_pin_memory_available(),
        )
        self.recorder = make_recorder(self, self.recorder)
        self.step_check = make_check(parse_config(self.vllm_config.additional_config).check, self)

    def may_add_encoder_only_layers_to_kv_cache_config(self) -> None:
        """Groups without a cache, behind those that have one: a group decides what its layers see.

        Upstream has one, whatever the windows of its layers.
        """
        groups = encoder_only_groups(self.vllm_config, self.kv_cache_dtype)
        self.kv_cache_config.kv_cache_groups.extend(groups)
        self.runner_only_attn_layers.update(*(group.layer_names for group in groups))

    def initialize_attn_backend(self, *args: Any, **kwargs: Any) -> None:
        """Metadata is for layers of one window, also where their caches share a group."""
        super().initialize_attn_backend(*args, **kwargs)
        layers = self.compilation_config.static_forward_context
        self.attn_groups[:] = [split_by_window(groups, layers) for groups in self.attn_groups]

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
        step = warm_up(self.mrope_dims, self.local_groups)
        if self.recorder is not None:
            self.recorder.warm_up(step)

    def shutdown(self) -> None:
        """Say how often preparation had to wait for the device."""
        if self.last_step is not None:
            ring = self.staging
            logger.info("Staging: %d of %d steps waited for a copy.", ring.waits, ring.steps)
        if self.recorder is not None:
            self.recorder.close()
        super().shutdown()

    def _sync_device(self) -> None:
        """Upstream asks ``torch.accelerator``."""
        self.prep_device.synchronize()
