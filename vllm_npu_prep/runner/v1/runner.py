"""vLLM's V1 runner with its input preparation replaced."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.lora.layers import LoRAMappingType
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import InputBatch

from vllm_npu_prep.attention.kv_cache import (
    zero_new_blocks,
)
from vllm_npu_prep.attention.metadata import common_metadata
from vllm_npu_prep.prep.batch import StepBatch, prepare_step
from vllm_npu_prep.prep.checks import NO_LIMITS
from vllm_npu_prep.prep.padding import Padding
from vllm_npu_prep.runner.graphs import measure_graphs
from vllm_npu_prep.runner.lora import activate_adapters, score_prompts
from vllm_npu_prep.runner.padding import DispatchKey
from vllm_npu_prep.runner.prompt_embeds import with_known_ids
from vllm_npu_prep.runner.step import DummyRun, StepInFlight
from vllm_npu_prep.runner.v1.drafters import ExactLengths
from vllm_npu_prep.runner.v1.request_updates import (
    put_drafts_among_decodes,
)
from vllm_npu_prep.runner.v1.sampling import (
    drop_thinking_budgets,
    score_chosen_tokens,
)
from vllm_npu_prep.runner.v1.setup import RunnerSetup
from vllm_npu_prep.runner.v1.speculation import LastSamples
from vllm_npu_prep.runner.v1.upstream_buffers import GRAPH_INPUTS


class NPUModelRunner(RunnerSetup):
    """Prepares a step in six stages and gives attention an `AscendMetadata`.

    The class has only overrides of upstream's methods. They call its parts, which know no runner
    and are made in `RunnerSetup`: `preparer`, `padding`, `inputs`, `updates`, `bookkeeping`,
    `speculation`, `graphs`, `buffers`.
    Upstream's ``execute_model`` calls them in this order, and all that it asks for after the
    preparation is in one record, `in_flight`:

    ==============================  ==============================================================
    method                          what it does with the scheduler's output
    ==============================  ==============================================================
    `_update_states`                enters it in the input batch and in the block tables
    `_prepare_inputs`               prepares the step
    `_build_attention_metadata`     hands out its metadata
    `_preprocess`                   hands out the model's inputs
    `sample_tokens`                 samples, keeps the tokens and drafts
    ==============================  ==============================================================

    Who owns what in a step after `_prepare_inputs` has returned:

    =========================  =======================================================
    attribute                  owner
    =========================  =======================================================
    input_ids, positions       ours: views of the step's buffers, which `buffers` binds
    mrope_positions            ours, and read in place of positions
    query_start_loc            ours
    seq_lens                   ours; ``optimistic_seq_lens_cpu`` is their host view.
                               Drafters shorten the device's in place, after the forward
                               pass
    num_computed_tokens        ours
    discard_request_mask       ours
    SpecDecodeMetadata         ours: views, made in each step
    backup_next_token_ids      ours; upstream's drafters collect their own
    block tables               `DeviceBlockTables`, on either side; encoder-only groups
                               have neither these nor slots. `LocalBlockTables` has those
                               of virtual requests
    token_type_ids             upstream's, made in `_init_model_kwargs` from our lengths
    is_padding                 ours, handed out by `_prepare_padding_mask`
    inputs_embeds              ours, made for steps with embeddings only
    encoder's outputs          upstream's, cached as the scheduler decides
    LoRA slots                 `PunicaWrapperNPU`, sent when they change
    the same names in          upstream's own buffers, which `buffers` restores; in a
    a dummy run                graph, ours again
    =========================  =======================================================

    Parameters
    ----------
    device
        The device as torch sees it.
    prep_device
        The same device by this plugin's interface.
    """

    num_prompt_logprobs: dict[str, int]

    # ----------------------------------------------------------------- the step

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> Any:
        """End the step in flight if it fails or if nothing is to be sampled."""
        try:
            return super().execute_model(scheduler_output, intermediate_tensors)
        finally:
            if self.execute_model_state is None:
                self._end_step()

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Update plain requests together; upstream updates the others, if there are any.

        The full check reads the scheduler's output itself, before upstream's lists grow. The
        scheduler's optimistic counts are corrected now, on the host; upstream does that later.
        """
        if self.step_check is not None:
            self.step_check.follow(scheduler_output)
        batch = self.input_batch
        rest, updated = self.updates.update_plain_requests(
            scheduler_output, batch, self.requests, self.num_prompt_logprobs
        )
        if rest is None:  # nothing is left to do but what upstream does last
            self._may_reorder_batch(scheduler_output)
            batch.refresh_metadata()
        else:
            self._update_others(rest)
        if self.use_async_spec_decode:
            previous_rows = self.block_tables.previous_rows
            if updated is not None and batch.prev_sampled_token_ids is not None:
                ends, num_valid = self.speculation.last_ends, self.num_valid_tokens.read()
                self.updates.correct_counts(updated, batch, previous_rows, ends, num_valid)
            self.speculation.set_known_tokens(batch, previous_rows)

    def _may_reorder_batch(self, scheduler_output: SchedulerOutput) -> None:
        """Put requests that begin with drafts among the decodes, if there are recurrent states."""
        drop_thinking_budgets(self.input_batch)
        super()._may_reorder_batch(scheduler_output)
        states = self.preparer.tables.shape.states
        if states and scheduler_output.scheduled_spec_decode_tokens:
            put_drafts_among_decodes(scheduler_output, self.input_batch, states.decode_threshold)

    def _update_others(self, scheduler_output: SchedulerOutput) -> None:
        """Let upstream update requests, also those with prompts of embeddings, which have no ids.

        What upstream returns takes back drafts that it counted as accepted. It counts them so for
        requests that were in the batch and stay there. None of these is left to upstream when there
        are drafts, so it returns None.
        """
        embedded = [
            new.req_id
            for new in scheduler_output.scheduled_new_reqs
            if new.prompt_embeds is not None
        ]
        if embedded:
            scheduler_output = with_known_ids(scheduler_output, self.input_batch.vocab_size)
        super()._update_states(scheduler_output)
        for req_id in embedded:  # no ids, so no log-probabilities
            self.num_prompt_logprobs.pop(req_id, None)
        for req_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            if (states := self.requests[req_id].pooling_states) is not None:
                states.clean()  # upstream keeps rows of chunks that are computed again

    def _prepare_inputs(
        self,
        # What the scheduler decided; `_update_states` has already updated the tables
        scheduler_output: SchedulerOutput,
        num_scheduled_tokens: np.ndarray,  # int32 [num_reqs] in the order of the batch
    ) -> tuple[torch.Tensor, SpecDecodeMetadata | None, int]:
        """Prepare one step; this replaces upstream's version completely.

        Returns
        -------
        logits_indices, spec_decode_metadata, max_num_sampled_tokens
            What upstream's method returns.
        """
        started = perf_counter()
        preparer, rows = self.preparer, self.input_batch
        samples = self.speculation.last_samples(rows.prev_sampled_token_ids, self._draft_token_ids)
        batch = self._step_batch(scheduler_output, num_scheduled_tokens, samples)
        # 1 padding: decided first, from counts alone
        num_encoder_reqs = len(scheduler_output.scheduled_encoder_inputs)
        decision = self.padding.decide(batch, num_encoder_reqs, len(rows.lora_id_to_lora_request))
        # 2 layout: where each array lives, a function of the padded sizes
        layout = preparer.layout(decision.padding)
        staged = preparer.staging.acquire(layout)
        # 3 fused pass and 4 state: one pass writes every array and decides the state
        step = prepare_step(batch, decision.padding, layout, staged.np)
        embeds = None
        if batch.takes_embeds:
            embeds = self.inputs.collect_prompt_embeds(
                step, rows.is_token_ids, rows.req_prompt_embeds
            )
        # 5 copy: all arrays at once; then the last step's samples are scattered on the device
        preparer.staging.send(step, samples.token_ids)
        # 6 metadata: one for each KV-cache group, from host values at hand
        metadata = preparer.build_metadata(step, staged)
        in_flight = StepInFlight(step, staged, metadata, decision.dispatched, embeds)
        self._begin_step(in_flight)
        if self.lora_config:
            self.set_active_loras(rows, num_scheduled_tokens, step.num_sampled_tokens)
        self._observe(in_flight, decision.kind, scheduler_output, started)
        return self.speculation.sampling_inputs(step, staged.device)

    def _step_batch(
        self,
        scheduler_output: SchedulerOutput,
        num_scheduled_tokens: np.ndarray,
        samples: LastSamples,
    ) -> StepBatch:
        """Return the step as the pure core reads it: views, nothing is copied."""
        rows, preparer, inputs = self.input_batch, self.preparer, self.inputs
        takes_embeds, check = False, self.step_check
        if inputs.follows_rows:
            new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
            inputs.follow_rows(rows.req_ids, new, self.requests)
        if inputs.follows_rows or rows.req_prompt_embeds:
            takes_embeds = inputs.takes_embeds(
                preparer.tables, num_scheduled_tokens, rows.req_prompt_embeds
            )
        num_draft_tokens = preparer.no_drafts
        if drafts := scheduler_output.scheduled_spec_decode_tokens:
            num_draft_tokens = self.speculation.num_draft_tokens(drafts, rows.req_ids)
        return StepBatch(
            preparer.tables,
            num_scheduled_tokens,
            num_draft_tokens,
            scheduler_output.total_num_scheduled_tokens,
            self.block_tables.previous_rows,
            samples.num_rows,
            samples.num_drafts,
            takes_embeds,
            NO_LIMITS if check is None or takes_embeds else check.limits_in_pass,
            self.speculation.accepted.count(
                preparer.tables,
                rows.req_ids,
                self.requests,
                num_scheduled_tokens,
                scheduler_output,
            ),
        )

    def _begin_step(self, in_flight: StepInFlight) -> None:
        """Make a prepared step available to upstream's later code."""
        self.in_flight = in_flight
        self.buffers.bind(in_flight.staged)

    def _end_step(self) -> None:
        self.in_flight = self.dummy_run = None

    def _for_record(self) -> tuple[Any, ...]:
        batch = self.input_batch
        return self.inputs.for_record(batch.req_ids, batch.req_prompt_embeds)

    def _dispatch(self, batch: StepBatch, counts: DispatchKey) -> tuple[Any, ...]:
        num_reqs, num_scheduled_tokens = batch.num_reqs, batch.num_scheduled_tokens
        return super()._determine_batch_execution_and_padding(
            num_tokens=counts.num_tokens,
            num_reqs=num_reqs,
            num_scheduled_tokens_np=num_scheduled_tokens,
            max_num_scheduled_tokens=counts.query_len or counts.num_tokens,  # is it of decodes?
            num_encoder_reqs=counts.num_encoder_reqs,
            force_eager=counts.eager or counts.takes_embeds,
            allow_microbatching=self._allow_microbatching(num_reqs, num_scheduled_tokens),
        )

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the decision that was made before the step was prepared.

        Dummy runs have no step yet. If a graph is involved, we prepare one that is all padding.
        """
        if self.in_flight is not None:
            return self.in_flight.dispatched
        dispatched = super()._determine_batch_execution_and_padding(*args, **kwargs)
        if self.dummy_run is not None:
            padding = self.padding.of_dummy_run(
                self.dummy_run,
                dispatched,
                kwargs["num_tokens"],
                kwargs["num_reqs"],
                kwargs["force_uniform_decode"],
            )
            if padding is not None:
                self._prepare_dummy(padding, dispatched)
        return dispatched

    def _prepare_dummy(self, padding: Padding, dispatched: tuple[Any, ...]) -> None:
        """Prepare a step without requests in place of the one that upstream would prepare."""
        step, staged, metadata = self.preparer.prepare_padding_only(padding)
        self._begin_step(StepInFlight(step, staged, metadata, dispatched))
        if self.step_check is not None:
            self.step_check.verify(self, SchedulerOutput.make_empty())
        self.buffers.restore(leave=GRAPH_INPUTS)  # upstream writes made-up lengths to the others
        self.block_tables.is_prepared = True

    def _get_slot_mappings(
        self, num_tokens_padded: int, *args: Any, **kwargs: Any
    ) -> tuple[dict[int, torch.Tensor] | None, Any]:
        """Return the step's slots, which are computed already; dummy runs use upstream's."""
        if self.in_flight is None:
            return super()._get_slot_mappings(num_tokens_padded, *args, **kwargs)
        return self.preparer.slot_mappings(self.in_flight.staged)

    def _build_attention_metadata(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Any, CommonAttentionMetadata | None]:
        """Give the layers the metadata from `_prepare_inputs`; dummy runs use upstream's."""
        in_flight, preparer = self.in_flight, self.preparer
        if in_flight is None:
            return super()._build_attention_metadata(*args, **kwargs)
        common = None
        if self.speculative_config is not None:
            step, staged, group = in_flight.step, in_flight.staged, self._drafting_group
            block_tables = self.block_tables.device_rows(step.padding.num_reqs_padded)
            slots = staged.device.slot_mappings[group]
            common = common_metadata(step, staged, block_tables[group], slots)
        return preparer.for_layers(in_flight.metadata), common

    def _preprocess(
        self,
        scheduler_output: SchedulerOutput,
        num_input_tokens: int,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> tuple[Any, ...]:
        """Give the model the step as it was prepared; upstream would slice and clear its arrays.

        Later pipeline stages read the output of the stage before them, and never embed.
        """
        model_kwargs = self._init_model_kwargs()
        positions = self.mrope_positions.gpu if self.uses_mrope else self.positions
        input_ids, inputs_embeds = self.input_ids.gpu, None
        if not get_pp_group().is_first_rank:
            received = self.sync_and_gather_intermediate_tensors(
                num_input_tokens, intermediate_tensors, sync_self=True
            )
            return input_ids, None, positions, received, model_kwargs, None
        if scheduler_output.scheduled_encoder_inputs:
            self._execute_mm_encoder(scheduler_output)
        in_flight = self.prepared
        if in_flight.step.batch.takes_embeds:
            if in_flight.prompt_embeds is not None:
                inputs_embeds = in_flight.prompt_embeds.inputs_embeds(self.model, input_ids)
            else:
                found = self._gather_mm_embeddings(scheduler_output)
                inputs_embeds = self.inputs.embed(self.model, input_ids, *found)
            return None, inputs_embeds, positions, None, model_kwargs, None
        return input_ids, None, positions, None, model_kwargs, None

    def features_of(self, req_id: str) -> list[Any]:
        """Return the images and videos of a request, as the encoder reads them."""
        return self.requests[req_id].mm_features

    def _execute_mm_encoder(self, scheduler_output: SchedulerOutput) -> list[torch.Tensor]:
        outputs = super()._execute_mm_encoder(scheduler_output)
        self.inputs.count_encoded(len(outputs))
        return outputs

    def _gather_mm_embeddings(
        self, scheduler_output: SchedulerOutput, shift_computed_tokens: int = 0
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return encoder outputs for this step's tokens; for drafters, of the tokens after them."""
        req_ids = self.input_batch.req_ids
        return self.inputs.gather_mm_embeddings(self.prepared.step, req_ids, shift_computed_tokens)

    def _prepare_padding_mask(self, num_tokens_unpadded: int, num_tokens_padded: int) -> Any:
        """Return the step's padding mask, which routers read.

        Upstream asks for it last before the forward pass of a step or of a dummy run; dummy runs
        without a graph use upstream's mask. Without padding and without a graph there is nothing to
        mask, which saves launches in each layer of experts. Where experts see tokens of several
        ranks, these exchange their masks (`vllm_npu_prep.device.communicator`), and each rank has
        to have one.
        """
        if self.in_flight is None:
            is_padding = super()._prepare_padding_mask(num_tokens_unpadded, num_tokens_padded)
        else:
            self.graphs.check_padding(self.in_flight, self.preparer)
            is_padding = self.in_flight.staged.device.is_padding
            is_needed = (
                num_tokens_unpadded < num_tokens_padded
                or self.in_flight.dispatched[0] != CUDAGraphMode.NONE
                or self._experts_see_other_tokens
            )
            if not is_needed:
                return None
        return is_padding

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Bypass the compiled model, which takes token ids, in steps with embeddings."""
        if kwargs.get("inputs_embeds") is not None:
            get_forward_context().skip_compiled = True
        return super()._model_forward(*args, **kwargs)

    # ----------------------------------------------------------------- after the forward pass

    def sample_tokens(  # type: ignore[override]  # upstream's decorator isn't a method to mypy
        self, *args: Any, **kwargs: Any
    ) -> ModelRunnerOutput:
        """Sample with upstream's method, whose asynchronous output creates a stream event.

        Upstream also rolls back the generators of requests whose sample is discarded, by an offset
        that generators of the CPU don't have. There, we keep them from advancing instead.
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
            self._end_step()

    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        """Score chosen tokens also beside drafts and other requests."""
        if not self.input_batch.logprob_token_ids:
            return super()._sample(logits, spec_decode_metadata)
        with score_chosen_tokens(self.sampler, self.input_batch):
            return super()._sample(logits, spec_decode_metadata)

    def _bookkeeping_sync(
        self,
        scheduler_output: SchedulerOutput,
        sampler_output: SamplerOutput,
        logits: torch.Tensor | None,
        hidden_states: torch.Tensor,
        num_scheduled_tokens: int,
    ) -> tuple[Any, ...]:
        batch, wanted = self.input_batch, self.num_prompt_logprobs
        discard = self.discard_request_mask.np[: batch.num_reqs]
        if self.bookkeeping.can_append_together(batch, sampler_output, discard, wanted):
            booked = self.bookkeeping.append_sampled_tokens(batch, sampler_output, discard)
        else:
            booked = super()._bookkeeping_sync(
                scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens
            )
        if self.use_async_scheduling:
            self.block_tables.mark_rows(discard)
        return booked

    def _copy_valid_sampled_token_count(
        self, next_token_ids: torch.Tensor, valid_sampled_tokens_count: torch.Tensor
    ) -> None:
        self.speculation.count_kept_tokens(valid_sampled_tokens_count)
        if self.use_async_spec_decode:
            self.input_batch.prev_sampled_token_ids = next_token_ids.unsqueeze(1)

    def _get_valid_sampled_token_count(self) -> list[int]:
        if self.input_batch.prev_sampled_token_ids is None:
            return []
        return self.num_valid_tokens.read().tolist()

    def _copy_draft_token_ids_to_cpu(
        self, scheduler_output: SchedulerOutput, zeros_only: bool = False
    ) -> None:
        super()._copy_draft_token_ids_to_cpu(scheduler_output, zeros_only)
        if self.use_async_spec_decode:
            assert isinstance(self._draft_token_ids, torch.Tensor)
            sampled = self.input_batch.prev_sampled_token_ids
            assert sampled is not None
            self.speculation.keep_samples(sampled, self._draft_token_ids)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Return True for our drafters: passes past the end of the context write and read nothing.

        Upstream drafts for no request of a step if one of them is near the end. Then the other
        requests' tokens of this step are missing in the drafter's cache, and their later drafts are
        worse.
        """
        if (
            isinstance(getattr(self, "drafter", None), ExactLengths)
            and self.effective_drafter_max_model_len >= self.max_model_len
        ):
            return common_attn_metadata is not None
        return super()._input_fits_in_drafter(common_attn_metadata)

    def _backup_next_token_ids(self) -> torch.Tensor:
        """Return int32 ``[num_reqs_padded]`` on the device, for drafters."""
        return self.prepared.staged.device.backup_next_token_ids

    def _block_table_of_group(self, group: int) -> torch.Tensor:
        return self.block_tables.device_rows(self.prepared.step.padding.num_reqs_padded)[group]

    # ----------------------------------------------------------------- adapters

    def set_active_loras(
        self,
        input_batch: InputBatch,
        num_scheduled_tokens: np.ndarray,
        num_sampled_tokens: np.ndarray | None = None,
        mapping_type: LoRAMappingType = LoRAMappingType.LANGUAGE,
    ) -> None:
        activate_adapters(
            self.lora_manager, input_batch, num_scheduled_tokens, num_sampled_tokens, mapping_type
        )

    def _get_prompt_logprobs_dict(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        """Score prompts one request at a time if there are adapters, each with its own one."""
        batch, wanted = self.input_batch, self.num_prompt_logprobs
        score = partial(super()._get_prompt_logprobs_dict, hidden_states, num_scheduled_tokens)
        if not self.lora_config or not wanted:
            return score()
        lora_ids = {
            req_id: int(batch.request_lora_mapping[batch.req_id_to_index[req_id]])
            for req_id in wanted
            if req_id in num_scheduled_tokens
        }
        scored = score_prompts(self.lora_manager, lora_ids, self._scoring_alone, score)
        return {req_id: scores for each in scored for req_id, scores in each.items()}

    @contextmanager
    def _scoring_alone(self, req_id: str) -> Iterator[None]:
        """Return a context in which upstream scores the prompt of this request only."""
        wanted = self.num_prompt_logprobs
        self.num_prompt_logprobs = of_request = {req_id: wanted[req_id]}
        try:
            yield
        finally:
            self.num_prompt_logprobs = wanted
        if req_id not in of_request:  # its prompt is done
            del wanted[req_id]

    # ----------------------------------------------------------------- dummy runs and graphs

    def _dummy_run(
        self,
        num_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run with upstream's buffers, which have the largest sizes; graphs use ours."""
        self._end_step()
        self.buffers.restore()
        self.dummy_run = DummyRun(kwargs.get("force_attention", False))
        try:
            return super()._dummy_run(num_tokens, *args, **kwargs)
        finally:
            self._end_step()
            if hasattr(self, "block_tables"):  # profiling comes before the KV cache
                self.block_tables.is_prepared = False

    def _prepare_mm_inputs(self, num_tokens: int) -> tuple[torch.Tensor, Any]:
        """Let dummy runs read token ids, as graphs do; upstream's read embeddings."""
        return self.input_ids.gpu[:num_tokens], None

    def profile_cudagraph_memory(self) -> int:
        return measure_graphs(self.prep_device, super().profile_cudagraph_memory)

    def capture_model(self) -> int:
        self._refuse_to_capture(len(self.requests))
        try:
            return self._capture_graphs(self._warmup_and_capture, self._freeze_gc)
        finally:
            self.maybe_remove_all_loras(self.lora_config)  # dummy adapters with ids of real ones

    # ----------------------------------------------------------------- the device

    def _get_mamba_bufs(self) -> Any:
        """Return no buffers for copies of recurrent states between blocks: nothing is copied."""
        return SimpleNamespace(preprocess=None, postprocess_align=None)

    def _update_states_after_model_execute(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: accepted tokens are counted when the next step is prepared."""

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        zero_new_blocks(self.kv_caches, block_ids)

    def _sync_device(self) -> None:
        """Wait for our device, where upstream calls ``torch.accelerator``."""
        self.prep_device.synchronize()
