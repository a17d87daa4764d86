"""vLLM's V2 runner with its input preparation replaced."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.lora.layers import LoRAMappingType
from vllm.model_executor.models.interfaces import requires_raw_input_tokens
from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.eplb_utils import step_eplb_after
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.lora_utils import create_lora_capture_hook
from vllm.v1.worker.gpu.model_runner import BatchReqState
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from vllm_npu_prep.attention.kv_cache import (
    zero_new_blocks,
)
from vllm_npu_prep.compat import v2
from vllm_npu_prep.graph.wrapper import GraphWrapper
from vllm_npu_prep.prep.arrays import PAD_SLOT_ID
from vllm_npu_prep.prep.batch import StepBatch, prepare_step
from vllm_npu_prep.prep.checks import NO_LIMITS
from vllm_npu_prep.runner.graphs import measure_graphs
from vllm_npu_prep.runner.lora import StepLoRAMapping
from vllm_npu_prep.runner.padding import DispatchKey
from vllm_npu_prep.runner.step import StepInFlight
from vllm_npu_prep.runner.v2.context_ranks import gather_all, gather_sampled
from vllm_npu_prep.runner.v2.draft_passes import Images
from vllm_npu_prep.runner.v2.drawing import RowsToDraw
from vllm_npu_prep.runner.v2.graphs import GraphManager, run_model
from vllm_npu_prep.runner.v2.kept_tokens import note_samples, reads_tokens
from vllm_npu_prep.runner.v2.ngram import NPUNgramSpeculator
from vllm_npu_prep.runner.v2.order import batch_of_step
from vllm_npu_prep.runner.v2.output import PooledOutput, StepOutput, note_of_samples
from vllm_npu_prep.runner.v2.prompt_embeds import ids_of
from vllm_npu_prep.runner.v2.prompt_scores import (
    PromptScores,
    score_step,
    score_with_adapters,
    wants_scores,
)
from vllm_npu_prep.runner.v2.request_states import NOTHING_AWAITED, AwaitedSamples
from vllm_npu_prep.runner.v2.setup import RunnerSetupV2
from vllm_npu_prep.runner.v2.speculator import NPUSpeculator
from vllm_npu_prep.runner.v2.verification import AcceptedCounts, count_accepted


class NPUModelRunnerV2(RunnerSetupV2):
    """Prepares a step in six stages and gives attention an `AscendMetadata`.

    A request gets a row of the tables when it arrives, and keeps it until it is finished or
    preempted. Upstream computes a step's inputs from these rows on the device: with two copies,
    sixteen more where host and device share no memory, and seven Triton launches. Here the host
    has what they are computed from, and one copy brings them.

    The class has only overrides of upstream's methods and their helpers; `RunnerSetupV2` makes its
    parts. Upstream calls the overrides in this order, and all that it asks for after the
    preparation is in one record, `in_flight`:

    ==========================  ==================================================================
    method                      what it does with the scheduler's output
    ==========================  ==================================================================
    `add_requests`              gives rows to requests that arrive
    `update_requests`           enters new counts and blocks of the others
    `gather_batch_req_state`    puts the requests in order and calls `_prepare_inputs`
    `prepare_inputs`            hands out the step's arrays as upstream's ``InputBatch``
    `prepare_attn`              hands out block tables and slots; `model_state` the metadata
    `sample_tokens`             samples, verifies drafts and makes new ones
    ==========================  ==================================================================

    Who keeps what, and under which of upstream's names:

    ==========================  ==================================================================
    attribute                   owner
    ==========================  ==================================================================
    req_states                  `NPURequestState`: tokens and counts by row, and the last samples,
                                from which steps continue on the device
    block_tables                `NPUBlockTables`: by row on the host, in the order of the batch on
                                the device
    order                       `BatchOrder`: requests stay in their places in the batch
    model_state                 `PreparedModelState`: metadata and M-RoPE positions of the step
    lora_state                  `NPULoraState`: adapters by row
    sampler                     `NPUSampler`, and `NPURejectionSampler` where drafts are verified
    speculator                  `NPUSpeculator` or `NPUNgramSpeculator`
    draft_tokens_handler        `DraftsOfStep`: drafts for the scheduler
    cudagraph_manager           `GraphManager`: upstream's choice of graphs, our capture and replay
    inputs                      `StepInputs`: views of a step's arrays as upstream's code reads them
    input_batch                 `CheckedBatch`: what checks and records read of the batch
    ==========================  ==================================================================

    Parameters
    ----------
    device
        The device as torch sees it.
    prep_device
        The same device by this plugin's interface.
    """

    # ----------------------------------------------------------------- requests

    def update_pp_decode_requests(self) -> None:
        """Take in the samples of an earlier step that pipeline stages have sent each other."""
        due = None if self.pp_handler is None else self.pp_handler.due()
        if due is not None:
            self.req_states.samples.keep(due.token_ids, due.request_rows, due.discard)
            if self._checks_fully:
                self.input_batch.follow(due.req_ids, due.discard)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Add requests as upstream does, but send nothing in steps in which no request arrives."""
        if self.step_check is not None:
            self.step_check.follow(scheduler_output)
        arrived = scheduler_output.scheduled_new_reqs
        if not arrived:
            if self.sampler is not None and self.has_own_processors:  # called in every step
                self.sampler.apply_staged_writes()
            return
        if self._checks_fully:
            self.input_batch.forget({new.req_id for new in arrived})
        self.req_states.read_on_device = {
            new.req_id for new in arrived if reads_tokens(new.sampling_params)
        }
        self.req_states.have_ids = embedded = ids_of(arrived)
        super().add_requests(scheduler_output)
        if embedded and self.prompt_logprobs_worker is not None:  # no ids, no log-probabilities
            request_rows = self.req_states.rows_of(list(embedded))
            self.prompt_logprobs_worker.uses_prompt_logprobs[request_rows] = False

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        cached = scheduler_output.scheduled_cached_reqs
        self.req_states.some_prefill = not cached.req_ids  # else `advance` finds out
        if cached.req_ids:
            request_rows = self.req_states.running_rows(cached.req_ids)
            counts: Sequence[int] | np.ndarray = cached.num_computed_tokens
            if self.use_async_spec_decode:
                counts = self.req_states.exact_counts(request_rows, counts, self.num_valid_tokens)
            self.req_states.advance(request_rows, counts)
            if self.use_pp and self._host_has_samples:
                self.req_states.enter_samples(request_rows, cached.new_token_ids)
            self.block_tables.append_each(request_rows, cached.new_block_ids)
        if scheduler_output.new_block_ids_to_zero:
            zero_new_blocks(self.kv_caches, scheduler_output.new_block_ids_to_zero)
        if scheduler_output.kv_cache_block_copies:
            copy_kv_cache_blocks_inplace(
                self.kv_caches,
                self.kv_cache_config.num_blocks,
                scheduler_output.kv_cache_block_copies,
            )

    # ----------------------------------------------------------------- the step

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run upstream's method; end the step in flight if it fails or leaves nothing to sample."""
        try:
            if self.dp_decisions is None:
                return super().execute_model(*args, **kwargs)
            with v2.decisions_by(self.dp_decisions.take):
                return super().execute_model(*args, **kwargs)
        finally:
            if self.execute_model_state is None:
                self._end_step()

    def features_of(self, req_id: str) -> list[Any]:
        assert self.encoder_cache is not None
        return self.encoder_cache.mm_features[req_id]

    def gather_batch_req_state(
        self, scheduler_output: SchedulerOutput, dummy_run: bool
    ) -> tuple[BatchReqState | None, int | None]:
        """Put the requests in order, and prepare the step: upstream asks for its inputs later."""
        if dummy_run:
            return super().gather_batch_req_state(scheduler_output, dummy_run)
        requests = batch_of_step(self.order, self.req_states, self.block_tables, scheduler_output)
        self._prepare_inputs(scheduler_output, requests)
        return requests, None

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, requests: BatchReqState) -> None:
        """Prepare one step; this replaces what upstream computes on the device.

        Parameters
        ----------
        scheduler_output
            What the scheduler decided; `add_requests` and `update_requests` have already entered it
            in the request states.
        requests
            The requests in the order of the batch.
        """
        started = perf_counter()
        preparer = self.preparer
        samples = self._last_samples(requests)
        batch = self._step_batch(scheduler_output, requests, samples)
        # 1 padding: decided first, from counts alone; data-parallel ranks agree on it
        loras = self.lora_state.get_activate_loras(requests.req_ids) if self.lora_config else ()
        decision = self.padding.decide(batch, 0, len(loras))
        # 2 layout: where each array lives, a function of the padded sizes
        layout = preparer.layout(decision.padding)
        staged = preparer.staging.acquire(layout)
        # 3 fused pass and 4 state: one pass writes every array and decides the state
        step = prepare_step(batch, decision.padding, layout, staged.np)
        if self.model_state.prompt_embeds_state is not None:
            is_token_ids = self.req_states.is_token_ids
            self.model_state.prompt_embeds_state.follow(step, requests.idx_mapping_np, is_token_ids)
        # 5 copy: all arrays at once; then the last step's samples are scattered on the device
        preparer.staging.send(step, samples.token_ids)
        # 6 metadata: one for each KV-cache group, from host values at hand
        metadata = preparer.build_metadata(step, staged)
        in_flight = StepInFlight(step, staged, metadata, decision.dispatched)
        self._begin_step(in_flight, requests, samples)
        self._observe(in_flight, decision.kind, scheduler_output, started)

    def _last_samples(self, requests: BatchReqState) -> AwaitedSamples:
        """Return the last samples of the step's requests, if they are on the device only."""
        if self._host_has_samples:
            return NOTHING_AWAITED
        # Requests that have just arrived have no sample
        are_awaited = ~requests.is_prefilling_np if self.req_states.some_prefill else None
        return self.req_states.samples.find(requests.idx_mapping_np, are_awaited)

    def _step_batch(
        self, scheduler_output: SchedulerOutput, requests: BatchReqState, samples: AwaitedSamples
    ) -> StepBatch:
        """Return the step as the pure core reads it, whose tables are now in the batch's order."""
        preparer, states, check = self.preparer, self.req_states, self.step_check
        request_rows, num_drafts = requests.idx_mapping_np, requests.num_draft_tokens_np
        if self.model_state.rope_state is not None:
            self.model_state.rope_state.follow(request_rows)
        states.begin_step(request_rows, requests.num_scheduled_tokens, num_drafts)
        return StepBatch(
            preparer.tables,
            requests.num_scheduled_tokens,
            preparer.no_drafts if num_drafts is None else num_drafts,
            requests.num_tokens,
            samples.rows,
            samples.num_rows,
            samples.num_drafts,
            check_limits=NO_LIMITS if check is None else check.limits_in_pass,
            num_accepted_tokens=self.accepted.count(
                preparer.tables,
                requests.req_ids,
                states.req_id_to_index,
                requests.num_scheduled_tokens,
                scheduler_output,
            ),
        )

    def _begin_step(
        self, in_flight: StepInFlight, requests: BatchReqState, samples: AwaitedSamples
    ) -> None:
        """Make a prepared step available to upstream's later code."""
        self.in_flight = in_flight
        self.model_state.metadata = self.preparer.for_layers(in_flight.metadata)
        if self.model_state.rope_state is not None:
            self.model_state.positions = in_flight.staged.device.mrope_positions
        self.cudagraph_manager.decided = in_flight.dispatched[2]
        self.input_batch.requests_and_samples = requests, samples
        if samples.num_drafts and self._checks_fully:
            self._draft_token_ids = samples.by_row[:, 1:]

    def _dispatch(self, batch: StepBatch, counts: DispatchKey) -> tuple[Any, ...]:
        del batch  # upstream's choice depends on the counts alone
        return self.cudagraph_manager.ask(counts, self.dp_decisions)

    def prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        batch_req_state: BatchReqState,
        batch_desc: Any,
        num_active_loras: int,
    ) -> InputBatch:
        structured = scheduler_output.has_structured_output_requests
        return self.inputs.of_step(batch_req_state, self.prepared, structured)

    def prepare_attn(  # type: ignore[override]
        self, input_batch: InputBatch
    ) -> tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor]]:
        in_flight = self.prepared
        self.graphs.check_padding(in_flight, self.preparer)
        tables = self.block_tables.device_rows(input_batch.num_reqs_after_padding)
        return tables, in_flight.staged.device.slot_mappings

    def prepare_dummy_attn(  # type: ignore[override]
        self, input_batch: InputBatch, valid_state_slots: bool = False
    ) -> tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor] | torch.Tensor]:
        """Prepare a step that is all padding, at the addresses that graphs read; it writes no
        cache."""
        del valid_state_slots
        tables = self.block_tables.device_rows(input_batch.num_reqs)
        asked = self.cudagraph_manager.of_dummy_run
        if asked is None or asked.cg_mode == CUDAGraphMode.NONE:
            shape = len(tables), input_batch.num_tokens
            return tables, torch.full(shape, PAD_SLOT_ID, dtype=torch.int32, device=self.device)
        descriptor = self.cudagraph_manager.descriptor(asked)
        self.in_flight = in_flight = self._all_padding(asked.cg_mode, descriptor)
        if self.step_check is not None:
            self.step_check.verify(self, SchedulerOutput.make_empty())
        arrays = in_flight.staged.device
        if self.model_state.rope_state is not None:
            self.model_state.positions = arrays.mrope_positions
        input_batch.input_ids = arrays.model_input_ids
        input_batch.positions = arrays.model_positions
        input_batch.is_padding = arrays.model_is_padding
        return tables, arrays.slot_mappings

    def _end_step(self) -> None:
        self.in_flight = None
        if hasattr(self, "model_state"):  # not after `shutdown`
            self.model_state.metadata = self.model_state.positions = None
        if self.cudagraph_manager is not None:  # as before the cache is allocated
            self.cudagraph_manager.decided = None
            self.cudagraph_manager.of_dummy_run = None

    # ----------------------------------------------------------------- after the forward pass

    @step_eplb_after()
    def sample_tokens(self, grammar_output: Any) -> Any:
        state = self.execute_model_state
        if state is None:  # `execute_model` has failed
            return None
        self.execute_model_state = None
        try:
            if not self.is_last_pp_rank:
                return self._receive_samples(state)
            with self.prep_device.host_streams():
                return self._sample_step(state, grammar_output)
        finally:
            self._end_step()

    def _receive_samples(self, state: Any) -> ModelRunnerOutput | None:
        batch, step = state.input_batch, self.prepared
        assert self.pp_handler is not None
        discard = step.staged.np.discard_request_mask[: step.step.num_reqs].copy()
        self.pp_handler.exchange(None, batch.req_ids, batch.idx_mapping_np, discard)
        return self._nothing_sampled(state)

    def _nothing_sampled(self, state: Any) -> ModelRunnerOutput | None:
        """Return the output of a pipeline stage that is not the last."""
        of_connector = self.kv_connector.post_forward(state.finished_req_ids)
        output: ModelRunnerOutput | None
        output = ModelRunnerOutput.with_kv_conn_output_only(of_connector)
        return output

    def _sample_step(self, state: Any, grammar_output: Any) -> StepOutput | ModelRunnerOutput:
        batch, hidden_states = state.input_batch, state.hidden_states
        in_flight = self.prepared
        step, staged = in_flight.step, in_flight.staged
        discard = staged.np.discard_request_mask[: batch.num_reqs].copy()
        sampled_states = hidden_states
        if step.pcp.num_samples:  # with prefill context parallelism
            sampled_states = gather_sampled(hidden_states, in_flight)
        sampler_output, _, _ = self.sample(sampled_states, batch, grammar_output)
        scores = self._score_prompts(hidden_states, batch)
        output = ModelRunnerOutput(
            req_ids=batch.req_ids,
            req_id_to_index=self.order.places,
            sampled_token_ids=None,  # type: ignore[arg-type]  # filled in later
            prompt_logprobs_dict=scores.most_likely,
            prompt_token_id_logprobs_dict=scores.named,
            cudagraph_stats=state.cudagraph_stats,
        )
        masks, stream = sampler_output.sampling_mask_tensors, self.output_copy_stream
        borders = None if masks is None else batch.cu_num_logits_np
        note = None if self.recorder is None else note_of_samples(self.sampler, self.recorder)
        returned = StepOutput(output, sampler_output, discard, borders, stream, note)
        sampled = sampler_output.sampled_token_ids
        discarded = staged.device.discard_request_mask
        assert self.sampler is not None
        note_samples(self.sampler, self.req_states, batch, sampled, discarded)
        kept = batch.idx_mapping_np, discard
        if self._checks_fully and self.pp_handler is None:
            self.input_batch.follow(batch.req_ids, discard)
        if self.speculator is not None:
            accepted = count_accepted(sampled, step, staged.device, self.vocab_size)
            if self.use_async_spec_decode or self.num_speculative_steps > 1:
                self.num_valid_tokens.start(accepted.num_valid_tokens)
            drafts = self._draft(state, accepted)
            self.draft_tokens_handler.keep(
                batch.req_ids,
                drafts,
                structured=batch.has_structured_output_reqs,
                copy_stream=self.output_copy_stream,
            )
            self.req_states.samples.keep(accepted.next_token_ids, *kept, drafts)
        elif self.pp_handler is not None:
            self.pp_handler.exchange(sampled[:, 0].to(torch.int32), batch.req_ids, *kept)
        elif not self._host_has_samples:
            self.req_states.samples.keep(sampled.view(-1).to(torch.int32), *kept)
        output.kv_connector_output = self.kv_connector.post_forward(state.finished_req_ids)
        if self.use_pp or not self._host_has_samples:
            return returned
        output = returned.get_output()
        samples = returned.samples[:, 0].numpy()
        self.req_states.append_samples(*kept, batch.num_scheduled_tokens, samples)
        return output

    def _draft(self, state: Any, accepted: AcceptedCounts) -> torch.Tensor:
        """Return drafts after a step's samples, int32 ``[num_reqs, num_speculative_tokens]``."""
        if isinstance(self.speculator, NPUNgramSpeculator):
            most_known = min(self.prepared.step.max_seq_len + 1, self.max_model_len)
            return self.speculator.draft(state.input_batch.idx_mapping, accepted, most_known)
        assert isinstance(self.speculator, NPUSpeculator) and self.sampler is not None
        batch, drawn = state.input_batch, None
        if self.speculator.draft_logits is not None:
            drawn = RowsToDraw(
                self.sampler.sampling_states,
                batch.idx_mapping_np,
                batch.idx_mapping,
                self.sampler.use_fp64_gumbel,
            )
            drawn = drawn if drawn.are_random.any() else None
        images = None
        if self.speculator.passes.reads_embeds:
            images = self._images_after(batch)
        return self.speculator.draft(
            self.prepared,
            accepted,
            self.num_valid_tokens,
            state.hidden_states,
            state.aux_hidden_states,
            self.model_state.metadata,
            self.preparer.slot_mappings(self.prepared.staged)[1],
            drawn,
            images,
        )

    def _images_after(self, batch: InputBatch) -> Images:
        """Return the encoder's outputs for the tokens after a step's, which drafters read."""
        found, are_seen = self.model_state.gather_mm_embeddings(batch, draft_lookahead=1)
        padding = batch.num_tokens_after_padding - batch.num_tokens
        return found, torch.nn.functional.pad(are_seen, (0, padding))

    @torch.inference_mode()
    @step_eplb_after()
    def pool(self) -> Any:
        state = self.execute_model_state
        if state is None:  # `execute_model` has failed
            return None
        self.execute_model_state = None
        batch, hidden_states = state.input_batch, state.hidden_states
        try:
            if not self.is_last_pp_rank:
                return self._nothing_sampled(state)
            assert self.pooling_runner is not None and hidden_states is not None
            with self.prep_device.host_streams():
                states: Any = self.req_states
                pooled = self.pooling_runner.pool(hidden_states, batch, states)
                output = ModelRunnerOutput(
                    req_ids=batch.req_ids,
                    req_id_to_index=self.order.places,
                    kv_connector_output=self.kv_connector.post_forward(state.finished_req_ids),
                )
                return PooledOutput(output, *pooled, self.output_copy_stream)
        finally:
            self._end_step()

    def _score_prompts(self, hidden_states: torch.Tensor, batch: InputBatch) -> PromptScores:
        worker = self.prompt_logprobs_worker
        assert worker is not None
        if not wants_scores(worker, batch):
            return PromptScores({}, {})
        if self.prepared.step.shape.pcp:
            hidden_states = gather_all(hidden_states, self.prepared)

        def score() -> PromptScores:
            compute_logits: Any = self.model.compute_logits
            return score_step(worker, self.req_states, compute_logits, hidden_states, batch)

        if not self.lora_config:
            return score()
        return score_with_adapters(self.lora_manager, self.lora_state, worker, batch, score)

    # ----------------------------------------------------------------- adapters

    def _set_active_loras(
        self,
        prompt_lora_mapping: Sequence[int] | np.ndarray,
        token_lora_mapping: Sequence[int] | np.ndarray,
        lora_requests: Any,
        mapping_type: LoRAMappingType = LoRAMappingType.LANGUAGE,
    ) -> None:
        """Set the adapters from arrays; upstream makes tuples of the mappings to compare them."""
        of_samples = np.asarray(prompt_lora_mapping)
        if self.in_flight is not None and self.in_flight.step.num_drafts:
            of_samples = of_samples.repeat(self.in_flight.step.num_sampled_tokens)
        mapping = StepLoRAMapping(
            np.asarray(token_lora_mapping),  # type: ignore[arg-type]
            of_samples,  # type: ignore[arg-type]
            is_prefill=True,
            type=mapping_type,
        )
        self.lora_manager.set_active_adapters(lora_requests, mapping)

    # ----------------------------------------------------------------- graphs

    def _forward(
        self, in_flight: StepInFlight, mode: CUDAGraphMode, descriptor: BatchDescriptor
    ) -> Any:
        """Run the model over a prepared step: eagerly, or to capture or replay its graph."""
        _, slots = self.preparer.slot_mappings(in_flight.staged)
        metadata = self.preparer.for_layers(in_flight.metadata)
        model: Any = self.model if self._full_graphs is None else self._full_graphs
        inputs = self._model_inputs(in_flight)
        given = self.vllm_config, in_flight, inputs, metadata, slots
        return run_model(model, *given, mode, descriptor)

    def _model_inputs(self, in_flight: StepInFlight) -> dict[str, Any]:
        """Return a prepared step's inputs as upstream gives them, at the addresses of graphs."""
        arrays = in_flight.staged.device
        rotates = self.model_state.rope_state is not None
        inputs: dict[str, Any] = {
            "input_ids": arrays.model_input_ids,
            "positions": arrays.mrope_positions if rotates else arrays.model_positions,
            "inputs_embeds": None,
            "intermediate_tensors": None,
        }
        if self.intermediate_tensors is not None:  # of a stage that is not the first
            num_tokens = in_flight.step.num_rank_tokens
            inputs["input_ids"] = None
            inputs["intermediate_tensors"] = self.intermediate_tensors[:num_tokens]
        elif self.uses_inputs_embeds:
            num_tokens = in_flight.step.num_input_tokens
            inputs["inputs_embeds"] = self.model_state.dummy_inputs_embeds(num_tokens)
            if not requires_raw_input_tokens(self.model):
                inputs["input_ids"] = None
        return inputs

    def _replay(self, descriptor: BatchDescriptor) -> torch.Tensor:
        return self._forward(self.prepared, CUDAGraphMode.FULL, descriptor)

    def _all_padding(self, mode: CUDAGraphMode, desc: BatchDescriptor) -> StepInFlight:
        padding = self.padding.of_capture(mode, desc)
        step, staged, metadata = self.preparer.prepare_padding_only(padding)
        if mode != CUDAGraphMode.FULL:
            metadata = {}  # no attention: its kernels refuse a step without requests
        return StepInFlight(step, staged, metadata, (mode, desc))

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        """Run upstream's method; if it replays a graph, the step is all padding."""
        try:
            return super()._dummy_run(*args, **kwargs)
        finally:
            self._end_step()

    def _capture(self, desc: BatchDescriptor, cudagraph_runtime_mode: CUDAGraphMode) -> None:
        """Warm up and capture one graph, over steps that are all padding.

        Each run has its own metadata, because what the first layer computes for the later ones has
        to be computed within the graph, too.
        """
        select_adapters = create_lora_capture_hook(self.lora_config, self)
        if select_adapters is not None:
            num_reqs = min(desc.num_tokens, self.max_num_reqs)
            select_adapters(desc.num_active_loras, num_reqs, desc.num_tokens)
        for _ in range(self.compilation_config.cudagraph_num_of_warmups):
            warm = self._all_padding(cudagraph_runtime_mode, desc)
            self._forward(warm, CUDAGraphMode.NONE, desc)
        in_flight = self._all_padding(cudagraph_runtime_mode, desc)
        self.prep_device.synchronize()
        self._forward(in_flight, cudagraph_runtime_mode, desc)
        is_in_pieces = cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
        if is_in_pieces and isinstance(self.speculator, NPUSpeculator):
            self.speculator.capture_pass(desc.num_tokens)

    @torch.inference_mode()
    def capture_model(self, *, profile_only: bool = False) -> int:
        del profile_only
        self._refuse_to_capture(self.req_states.num_reqs)
        with self.maybe_setup_dummy_loras(self.lora_config):
            capture_one = self.cudagraph_manager.measured(self._capture)
            taken = self._capture_graphs(capture_one, freeze_gc_for_cudagraph_capture)
        if isinstance(self.speculator, NPUSpeculator):
            pieces = self.cudagraph_manager.cudagraph_keys.get(CUDAGraphMode.PIECEWISE, ())
            self.speculator.use_graphs({each.num_tokens for each in pieces})
        return taken

    def profile_cudagraph_memory(self) -> int:
        return measure_graphs(self.prep_device, super().profile_cudagraph_memory)

    def _make_graph_manager(self, *args: Any, **kwargs: Any) -> GraphManager:
        manager = GraphManager(self._replay, self.prep_device, *args, **kwargs)
        self._full_graphs = None
        if manager.cudagraph_mode.has_full_cudagraphs():
            self._full_graphs = GraphWrapper(self.model, self.vllm_config, CUDAGraphMode.FULL)
        self.graphs = self._make_graphs(manager, 1 + self.num_speculative_steps)
        return manager
