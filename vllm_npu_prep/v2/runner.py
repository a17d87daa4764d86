"""NPUModelRunnerV2: vLLM's V2 runner with its input preparation replaced. Holds no arithmetic."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import BatchReqState, GPUModelRunner
from vllm.v1.worker.utils import bind_kv_cache, copy_kv_cache_blocks_inplace

from vllm_npu_prep.attention.backend import AscendAttentionBackend
from vllm_npu_prep.attention.kv_cache import (
    allocate_planes,
    single_planes,
    split_by_window,
    zero_blocks,
)
from vllm_npu_prep.attention.local_attention import find_local_groups, unwrap_backends
from vllm_npu_prep.compat import v2
from vllm_npu_prep.config import parse_config
from vllm_npu_prep.device import Device, Memory
from vllm_npu_prep.graph.counts import StepCounts
from vllm_npu_prep.observe.check import StepCheck
from vllm_npu_prep.observe.check_level import make_check
from vllm_npu_prep.observe.metrics import StepMetrics
from vllm_npu_prep.observe.recorder import StepRecorder, make_recorder
from vllm_npu_prep.ops import replace_modules
from vllm_npu_prep.prep.batch import BatchTables, StepBatch, prepare_step, warm_up
from vllm_npu_prep.prep.padding import GraphMode, no_padding
from vllm_npu_prep.quantization.fused import fuse_rounding
from vllm_npu_prep.runner.preparer import Preparer, builders_of
from vllm_npu_prep.runner.step import StepInFlight
from vllm_npu_prep.v2.block_tables import SlotBlockTables
from vllm_npu_prep.v2.buffers import SlotRows, SlotValues
from vllm_npu_prep.v2.model_state import PreparedModelState
from vllm_npu_prep.v2.order import BatchOrder
from vllm_npu_prep.v2.output import StepOutput
from vllm_npu_prep.v2.sampler import SlotSampler
from vllm_npu_prep.v2.states import SlotStates
from vllm_npu_prep.v2.watched import WatchedBatch

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only


class NPUModelRunnerV2(GPUModelRunner):
    """Prepares a step as `NPUModelRunner` does, for requests that keep a slot each.

    Upstream's V2 computes a step's inputs on the device: two copies, sixteen more without memory
    that host and device share, and seven launches of Triton. Here `SlotStates` keeps on the host
    what they are computed from, and one copy brings them. The class has only overrides.

    Parameters
    ----------
    vllm_config
        The engine's config.
    device
        As torch sees it.
    prep_device
        The same device by this plugin's interface.

    Attributes
    ----------
    in_flight
        The step from its preparation until its tokens are sampled; None in between.
    input_batch
        What checks read of the batch, by the names of V1's runner.
    cache_memory
        What the KV cache is made of.
    """

    req_states: SlotStates  # type: ignore[assignment]
    block_tables: SlotBlockTables  # type: ignore[assignment]
    model_state: PreparedModelState
    preparer: Preparer
    use_async_spec_decode = False  # checks ask V1's runner

    def __init__(self, vllm_config: VllmConfig, device: torch.device, prep_device: Device) -> None:
        self.prep_device = prep_device
        self.in_flight: StepInFlight | None = None
        with prep_device.host_streams(), self._stand_ins(device):
            super().__init__(vllm_config, device)
        self.order = BatchOrder()
        self.input_batch = WatchedBatch(self.req_states)
        self.counts = StepCounts()
        self.metrics = StepMetrics(vllm_config)
        self.recorder: StepRecorder | None = None
        self.step_check: StepCheck | None = None
        self.cache_memory: Memory = prep_device
        self._uses_mla = self.model_config.use_mla
        self._one_each = torch.arange(self.max_num_reqs + 1, dtype=torch.int32, device=device)
        self._no_positions = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self._logit_borders = np.arange(self.max_num_reqs + 1, dtype=np.int32)

    @staticmethod
    def _stand_ins(device: torch.device) -> Any:
        """Our classes under the names by which upstream makes its parts."""

        def slot_values(*args: Any, **kwargs: Any) -> SlotValues:
            return SlotValues(device, *args, **kwargs)

        return v2.stand_ins(
            RequestState=SlotStates,
            BlockTables=SlotBlockTables,
            Sampler=SlotSampler,
            UvaBackedTensor=slot_values,
            StagedWriteTensor=SlotRows,
            init_model_state=PreparedModelState,
        )

    # ----------------------------------------------------------------- requests

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """As upstream's; nothing is sent in steps in which no request arrives."""
        if self.step_check is not None:
            self.step_check.follow(scheduler_output)
        arrived = scheduler_output.scheduled_new_reqs
        if not arrived:
            return
        self.req_states.read_on_device = {
            new.req_id for new in arrived if reads_tokens(new.sampling_params)
        }
        super().add_requests(scheduler_output)

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Enter counts and blocks of the requests that stay, together."""
        cached = scheduler_output.scheduled_cached_reqs
        if cached.req_ids:
            slot_of = self.req_states.req_id_to_index
            slots = np.fromiter(map(slot_of.__getitem__, cached.req_ids), np.intp)
            self.req_states.advance(slots, cached.num_computed_tokens)
            for index, block_ids in enumerate(cached.new_block_ids):
                if block_ids is not None:
                    self.block_tables.append_block_ids(int(slots[index]), block_ids, False)
        if scheduler_output.new_block_ids_to_zero:
            zero_blocks(self.kv_caches, scheduler_output.new_block_ids_to_zero)
        if scheduler_output.kv_cache_block_copies:
            copy_kv_cache_blocks_inplace(
                self.kv_caches,
                self.kv_cache_config.num_blocks,
                scheduler_output.kv_cache_block_copies,
            )

    # ----------------------------------------------------------------- the step

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream's; ends the step in flight if it fails or if nothing is to be sampled."""
        try:
            return super().execute_model(*args, **kwargs)
        finally:
            if self.execute_model_state is None:
                self._end_step()

    def gather_batch_req_state(
        self, scheduler_output: SchedulerOutput, dummy_run: bool
    ) -> tuple[BatchReqState | None, int | None]:
        """The batch in its order, in which requests stay where they were at the last step."""
        if dummy_run:
            return super().gather_batch_req_state(scheduler_output, dummy_run)
        states = self.req_states
        num_scheduled = scheduler_output.num_scheduled_tokens
        req_ids, slots = self.order.of_step(num_scheduled, states.req_id_to_index)
        counts = np.fromiter(map(num_scheduled.__getitem__, req_ids), np.int32, len(req_ids))
        prefill = states.prefill_len.np[slots]
        computed = states.num_computed_prefill_tokens[slots]
        is_prefilling = computed < prefill
        has_prefill = bool(is_prefilling.any())
        return (
            BatchReqState(
                req_ids=req_ids,
                num_scheduled_tokens=counts,
                num_tokens=scheduler_output.total_num_scheduled_tokens,
                num_draft_tokens_np=None,
                idx_mapping_np=slots,
                prefill_len_np=prefill,
                num_computed_prefill_tokens_np=computed,
                is_prefilling_np=is_prefilling,
                max_seq_len_np=None,
                has_prefill=has_prefill,
                prefill_runs_as_decode_np=None,
                decode_graph_eligible=not has_prefill,
            ),
            None,
        )

    def prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        batch_req_state: BatchReqState,
        batch_desc: Any,
        num_active_loras: int,
    ) -> InputBatch:
        """Prepare one step; replaces upstream's version completely.

        Parameters
        ----------
        scheduler_output
            What the scheduler decided; the states have it already.
        batch_req_state
            The batch in its order.
        batch_desc
            Upstream's decision on graph and padding.
        num_active_loras
            Adapters of the batch.

        Returns
        -------
        InputBatch
            Views of the step's arrays.
        """
        started = perf_counter()
        preparer, states, now = self.preparer, self.req_states, batch_req_state
        slots, num_reqs = now.idx_mapping_np, len(now.req_ids)
        preparer.tables.slots[:num_reqs] = slots
        self.block_tables.follow(slots)
        samples = states.samples.find(slots, ~now.is_prefilling_np)
        batch = StepBatch(
            preparer.tables,
            now.num_scheduled_tokens,
            preparer.no_drafts,
            now.num_tokens,
            samples.rows,
            samples.num_rows,
        )
        # The stages of V1's runner: padding, layout, pass and state, copy, metadata
        padding = no_padding(batch_desc.num_tokens, num_reqs)
        kind = self.counts.kind(padding, now.num_tokens, not now.has_prefill, GraphMode.NONE, 0)
        self.counts.add(kind)
        layout = preparer.layout(padding)
        staged = preparer.staging.acquire(layout)
        step = prepare_step(batch, padding, layout, staged.np)
        preparer.staging.send(step, samples.token_ids)
        metadata = preparer.build_metadata(step, staged)
        self.in_flight = in_flight = StepInFlight(step, staged, metadata, (batch_desc,))
        self.model_state.metadata = self._by_layer(metadata)
        self.input_batch.now = now, samples
        self._observe(in_flight, kind, scheduler_output, started)
        arrays = staged.device
        return InputBatch(
            req_ids=now.req_ids,
            num_reqs=num_reqs,
            num_reqs_after_padding=num_reqs,
            idx_mapping=arrays.idx_mapping,
            idx_mapping_np=slots,
            expanded_idx_mapping=arrays.idx_mapping,
            expanded_local_pos=self._no_positions[:num_reqs],
            num_scheduled_tokens=now.num_scheduled_tokens,
            num_tokens=now.num_tokens,
            num_tokens_after_padding=step.num_input_tokens,
            num_draft_tokens=0,
            num_draft_tokens_per_req=None,
            query_start_loc=arrays.query_start_loc,
            query_start_loc_np=staged.np.query_start_loc,
            seq_lens=arrays.seq_lens,
            seq_lens_cpu_upper_bound=staged.cpu.seq_lens,
            dcp_local_seq_lens=None,
            num_computed_tokens_np=step.num_computed_tokens,
            prefill_len_np=now.prefill_len_np,
            num_computed_prefill_tokens_np=now.num_computed_prefill_tokens_np,
            is_prefilling_np=now.is_prefilling_np,
            has_prefill=now.has_prefill,
            decode_graph_eligible=now.decode_graph_eligible,
            input_ids=arrays.input_ids,
            positions=arrays.positions,
            is_padding=None,  # type: ignore[arg-type]  # eager steps have none
            logits_indices=arrays.logits_indices,
            cu_num_logits=self._one_each[: num_reqs + 1],
            cu_num_logits_np=self._logit_borders[: num_reqs + 1],
            has_structured_output_reqs=scheduler_output.has_structured_output_requests,
            prompt_lens=None,
        )

    def _by_layer(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Metadata as layers read it; those of latent attention have a form of their own."""
        if not self._uses_mla:
            return metadata
        return {
            name: builder.for_layers(metadata[layer_names[0]])
            for _, builder, layer_names in self.preparer.builders
            for name in layer_names
        }

    def prepare_attn(  # type: ignore[override]
        self, input_batch: InputBatch
    ) -> tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor]]:
        """Block tables and slots of the step, which are prepared already."""
        assert self.in_flight is not None
        tables = self.block_tables.device_rows(input_batch.num_reqs_after_padding)
        return tables, self.in_flight.staged.device.slot_mappings

    def _observe(
        self,
        in_flight: StepInFlight,
        kind: str,
        scheduler_output: SchedulerOutput,
        started: float,
    ) -> None:
        """Count and record the step; raise if it breaks a rule, so that it is not launched."""
        self.metrics.add(in_flight.step, kind, self.preparer.staging.waits, started)
        if self.recorder is not None:
            self.recorder.keep(in_flight.step, kind, self.input_batch.req_ids)
        if self.step_check is not None:
            self.step_check.verify(self, scheduler_output)

    def _end_step(self) -> None:
        """Clear the record of a step that has ended or failed."""
        self.in_flight = None
        if hasattr(self, "model_state"):  # not after `shutdown`
            self.model_state.metadata = None

    # ----------------------------------------------------------------- after the forward pass

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the step's tokens, and start their way to the host."""
        state = self.execute_model_state
        if state is None:  # `execute_model` has failed
            return None
        self.execute_model_state = None
        try:
            with self.prep_device.host_streams():
                return self._sample_step(state, grammar_output)
        finally:
            self._end_step()

    def _sample_step(self, state: Any, grammar_output: Any) -> StepOutput:
        assert self.in_flight is not None
        batch, hidden_states = state.input_batch, state.hidden_states
        step, staged = self.in_flight.step, self.in_flight.staged
        discard = staged.np.discard_request_mask[: step.num_reqs].copy()
        sampler_output, _, _ = self.sample(hidden_states, batch, grammar_output)
        output = ModelRunnerOutput(
            req_ids=batch.req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(batch.req_ids)},
            sampled_token_ids=None,  # type: ignore[arg-type]  # filled in later
            prompt_logprobs_dict=self._prompt_logprobs(hidden_states, batch),
            cudagraph_stats=state.cudagraph_stats,
        )
        returned = StepOutput(output, sampler_output, discard, self.output_copy_stream)
        sampled = sampler_output.sampled_token_ids[:, 0]
        slots = batch.idx_mapping_np
        self.req_states.samples.keep(sampled.to(torch.int32), batch.idx_mapping, slots, discard)
        self._note_on_device(batch, sampled, staged.device.discard_request_mask)
        return returned

    def _prompt_logprobs(self, hidden_states: torch.Tensor, batch: InputBatch) -> dict[str, Any]:
        """Log-probabilities of prompts, for requests that want some."""
        worker, states = self.prompt_logprobs_worker, self.req_states
        assert worker is not None
        if not worker.uses_prompt_logprobs[batch.idx_mapping_np].any():
            return {}
        return worker.compute_prompt_logprobs(
            self.model.compute_logits,  # type: ignore[arg-type]
            hidden_states,
            batch,
            states.all_token_ids.gpu,
            states.num_computed_tokens.copy_to_uva(),
            states.prompt_len.np,
        )

    def _note_on_device(
        self, batch: InputBatch, sampled: torch.Tensor, discard: torch.Tensor
    ) -> None:
        """Enter samples where the sampler looks for them: for penalties and bad words."""
        sampler, slots = self.sampler, batch.idx_mapping_np
        assert sampler is not None
        penalties = sampler.penalties_state
        _, _, bad_words = sampler.logits_processors[:3]
        wants_counts = penalties.use_penalty[slots].any()
        wants_tokens = bad_words.num_bad_words.np[slots].any()  # type: ignore[attr-defined]
        if not (wants_counts or wants_tokens):
            return
        idx_mapping, states = batch.idx_mapping, self.req_states
        is_kept = (~discard).to(torch.int32)
        if wants_counts:
            counts = penalties.output_bin_counts
            counts.index_put_((idx_mapping, sampled), is_kept, accumulate=True)
        if wants_tokens:
            last = states.max_model_len - 1
            places = idx_mapping, batch.seq_lens.clamp(max=last).long()
            tokens = states.all_token_ids.gpu
            there = torch.where(discard, tokens[places], sampled.to(torch.int32))
            tokens.index_put_(places, there)
            states.total_len.gpu.index_add_(0, idx_mapping, is_kept)

    # ----------------------------------------------------------------- weights and the KV cache

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As upstream's, with our sampler, states and layers."""
        with self.prep_device.host_streams(), self._stand_ins(self.device):
            super().load_model(*args, **kwargs)
        replace_modules(self.get_model(), self.vllm_config)
        fuse_rounding(self.get_model(), self.vllm_config)
        layers = self.compilation_config.static_forward_context
        unwrap_backends(layers.values(), AscendAttentionBackend)

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        """Allocate the cache, then what depends on its groups: staging ring and builders."""
        with (
            self.prep_device.host_streams(),
            self._stand_ins(self.device),
            v2.stand_ins(init_kv_cache=self._allocate_planes),
        ):
            super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        layers = self.compilation_config.static_forward_context
        self.attn_groups[:] = [split_by_window(groups, layers) for groups in self.attn_groups]
        self.kv_caches = single_planes(self._caches.values(), self._caches, layers)
        builders = builders_of(self.attn_groups)
        states, blocks = self.req_states, self.block_tables
        tables = BatchTables(
            num_computed_tokens=states.num_computed_tokens_np,
            num_prompt_tokens=states.prompt_len.np,
            num_tokens=states.num_tokens,
            token_ids=states.token_ids,
            block_table_flat=blocks.block_table_flat_np,
            max_num_blocks=blocks.max_num_blocks,
            block_sizes=blocks.block_sizes,
            num_blocks=blocks.num_blocks,
            num_synced_blocks=blocks.num_synced_blocks,
            num_device_blocks=blocks.num_device_blocks,
            chunked_prefill=self.scheduler_config.enable_chunked_prefill,
            local=find_local_groups(self.attn_groups),
        )
        self.preparer = Preparer(
            self.prep_device,
            tables,
            blocks,
            builders,
            max_num_tokens=self.max_num_tokens,
            max_num_reqs=self.max_num_reqs,
            pin_memory=is_pin_memory_available(),
            has_slots=True,
        )
        self.recorder = make_recorder(self.vllm_config, tables, builders, self.recorder)
        self.step_check = make_check(parse_config(self.vllm_config.additional_config).check, self)

    def _allocate_planes(
        self, forward_context: dict[str, Any], kv_cache_config: KVCacheConfig, *_: Any, **__: Any
    ) -> dict[str, torch.Tensor]:
        """Allocate K and V as planes, because Ascend kernels can't read upstream's interleaving."""
        self._caches = caches = allocate_planes(kv_cache_config, self.cache_memory)
        for name, layer in forward_context.items():
            target = getattr(layer, "kv_sharing_target_layer_name", None)
            if target is not None:
                caches[name] = caches[target]
        groups = kv_cache_config.kv_cache_groups
        bind_kv_cache(caches, forward_context, [], kv_cache_groups=groups)
        return caches

    def _init_kv_zero_meta(self) -> None:
        """Does nothing: upstream prepares a Triton kernel here, which is not used."""

    # ----------------------------------------------------------------- the device

    def warm_up(self) -> None:
        """Load or compile code for which the first request would otherwise wait."""
        step = warm_up(local=self.preparer.tables.local)
        if self.recorder is not None:
            self.recorder.warm_up(step)

    def refuse_new_weights(self) -> None:
        """Allowed: without graphs, new weights are read where they are."""

    def shutdown(self) -> None:
        """Log how often preparation had to wait and how steps ran."""
        if hasattr(self, "preparer") and self.preparer.staging.steps:
            ring = self.preparer.staging
            logger.info(
                "Staging: %d of %d steps waited for an earlier copy to the device.",
                ring.waits,
                ring.steps,
            )
        if self.recorder is not None:
            self.recorder.close()
        self.counts.log_summary()
        self.prep_device.synchronize()
        super().shutdown()


def reads_tokens(params: SamplingParams | None) -> bool:
    """Whether a request's parameters make the sampler read its tokens on the device."""
    return params is not None and (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or bool(params.bad_words_token_ids)
        or params.prompt_logprobs is not None
    )
