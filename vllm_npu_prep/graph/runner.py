"""GraphRunner: which steps replay graphs, how they are padded, and the capture at start-up."""

from typing import Any

import numpy as np
import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_npu_prep.attention.local_attention import LocalBlockTables
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.device import Device
from vllm_npu_prep.device.staging import StagedArrays
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.graph.capture import capture_graphs
from vllm_npu_prep.graph.counts import StepCounts
from vllm_npu_prep.graph.stand_in import check_padding
from vllm_npu_prep.graph.wrapper import GraphWrapper
from vllm_npu_prep.prep.batch import PreparedStep, StepBatch
from vllm_npu_prep.prep.local_attention import local_capture_lengths
from vllm_npu_prep.prep.padding import (
    GraphMode,
    Padding,
    capture_lengths,
    full_padding,
    no_padding,
)
from vllm_npu_prep.speculation import SpeculativeRunner
from vllm_npu_prep.wording import counted

KEPT_DECISIONS = 4096
"""Padding decisions that are kept. Decodes need as many as there are batch sizes."""

NO_REQUESTS = np.empty(0, np.int32)

TENSORS = ("positions", "seq_lens", "num_computed_tokens", "optimistic_seq_lens_cpu")
BUFFERS = ("input_ids", "query_start_loc", "discard_request_mask", "mrope_positions")
"""Upstream's attributes that hold a step's arrays once it is prepared; the last one only where the
model has M-RoPE."""
GRAPH_INPUTS = ("input_ids", "positions", "mrope_positions")
"""Those that a graph reads."""


class GraphRunner(SpeculativeRunner):
    """Upstream's runner with graphs that read the arrays of this plugin's steps.

    Padding is decided once for each step, by upstream's dispatcher, before anything is prepared.
    """

    prep_device: Device
    last_step: PreparedStep | None
    _attn_metadata: dict[str, AscendMetadata] | None
    _staged: StagedArrays
    _local_tables: LocalBlockTables

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._upstream_buffers = {
            **{name: getattr(self, name) for name in TENSORS},
            **{name: dict(vars(getattr(self, name))) for name in BUFFERS if hasattr(self, name)},
        }
        self._padding_decision: tuple[Any, ...] | None = None
        self._dummy_padding: Padding | None = None
        self._in_dummy_run = self._in_capture = self._dummy_attends = False
        self._padding_is_a_function_of_counts = (
            vllm_config.parallel_config.data_parallel_size == 1
            and not vllm_config.observability_config.cudagraph_metrics
        )
        # By counts: upstream's decision, the padding that follows, and how the step is counted
        self._padding_decisions: dict[tuple[int, ...], tuple[tuple[Any, ...], Padding, str]] = {}
        self.step_counts = StepCounts()

    # ----------------------------------------------------------------- a step

    def _decide_padding(self, scheduler_output: SchedulerOutput, batch: StepBatch) -> Padding:
        """Ask upstream's dispatcher now; its answer is kept for the one later call of this step.

        On one data-parallel rank the answer depends on these counts alone and is asked for once;
        several ranks agree on it in every step.
        """
        if self._dummy_padding is not None:
            return self._dummy_padding
        num_tokens, num_reqs = batch.total_num_scheduled_tokens, batch.num_reqs
        num_encoder_reqs = len(scheduler_output.scheduled_encoder_inputs)
        max_num_scheduled_tokens = 1
        if num_tokens != num_reqs:
            max_num_scheduled_tokens = int(batch.num_scheduled_tokens.max())
        takes_embeds = batch.takes_embeds
        key = (
            takes_embeds,
            num_tokens,
            num_reqs,
            max_num_scheduled_tokens,
            num_encoder_reqs,
            len(self.input_batch.lora_id_to_lora_request),
        )
        known = self._padding_decisions.get(key)
        if known is None:
            decision = super()._determine_batch_execution_and_padding(
                num_tokens=num_tokens,
                num_reqs=num_reqs,
                num_scheduled_tokens_np=batch.num_scheduled_tokens,
                max_num_scheduled_tokens=max_num_scheduled_tokens,
                num_encoder_reqs=num_encoder_reqs,
                force_eager=takes_embeds,
                allow_microbatching=self._allow_microbatching(num_reqs, batch.num_scheduled_tokens),
            )
            padding = self._padding_of(decision, num_reqs)
            kind = self.step_counts.kind(
                padding,
                num_tokens,
                self._is_uniform_decode(
                    max_num_scheduled_tokens, self.uniform_decode_query_len, num_tokens, num_reqs
                ),
                GraphMode(self.cudagraph_dispatcher.cudagraph_mode.name),
                self.compilation_config.max_cudagraph_capture_size,
                takes_embeds,
            )
            known = decision, padding, kind
            if self._padding_is_a_function_of_counts:
                if len(self._padding_decisions) == KEPT_DECISIONS:
                    self._padding_decisions.clear()
                self._padding_decisions[key] = known
        self._padding_decision, padding, kind = known
        self.step_counts.add(kind)
        return padding

    def _padding_of(self, decision: tuple[Any, ...], num_reqs: int) -> Padding:
        """Upstream's decision in this plugin's terms, for so many real requests."""
        mode, descriptor = decision[:2]
        if mode == CUDAGraphMode.FULL:
            decode_query_len = self.uniform_decode_query_len if descriptor.uniform else 0
            return full_padding(descriptor.num_tokens, descriptor.num_reqs, decode_query_len)
        if mode == CUDAGraphMode.PIECEWISE:
            return Padding(descriptor.num_tokens, num_reqs, mode=GraphMode.PIECEWISE)
        return no_padding(descriptor.num_tokens, num_reqs)

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Padding is decided once: `_decide_padding` left the answer here, for one use.

        A dummy run that captures or replays a graph becomes a step here, a step without requests:
        so the graph reads where steps lie, and all of it is padding, which is safe to run. So does
        the run that warms attention up for a capture; upstream would make up lengths for it beyond
        ``max_model_len``.
        """
        decision, self._padding_decision = self._padding_decision, None
        if decision is None:
            decision = super()._determine_batch_execution_and_padding(*args, **kwargs)
            if self._in_dummy_run and decision[0] != CUDAGraphMode.NONE:
                self._prepare_dummy(self._padding_of(decision, 1))
            elif self._in_dummy_run and self._dummy_attends:
                decode_query_len = 0
                if kwargs["force_uniform_decode"]:
                    decode_query_len = self.uniform_decode_query_len
                num_tokens, num_reqs = kwargs["num_tokens"], kwargs["num_reqs"]
                self._prepare_dummy(full_padding(num_tokens, num_reqs, decode_query_len))
        return decision

    def _prepare_dummy(self, padding: Padding) -> None:
        """Prepare a step without requests, and keep upstream from preparing another one."""
        self._dummy_padding = padding
        try:
            self._prepare_inputs(SchedulerOutput.make_empty(), NO_REQUESTS)
        finally:
            self._dummy_padding = None
        self._restore_upstream_buffers(leave=GRAPH_INPUTS)  # it makes up lengths in these
        self.block_tables.is_prepared = True
        if self._in_capture and padding.mode is GraphMode.FULL:
            by_chunks: dict[int | None, Any] = {None: capture_lengths(padding, self.max_model_len)}
            if self.local_groups is not None:
                chunk_size = self.local_groups.attention_chunk_size
                by_chunks[chunk_size] = local_capture_lengths(padding, self.local_groups)
            for metadata in (self._attn_metadata or {}).values():
                lengths = by_chunks[metadata.attention_chunk_size]
                metadata.query_start_loc_np, metadata.seq_lens_np = lengths

    def _dummy_run(
        self,
        num_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Dummy runs use upstream's own buffers, which hold the largest sizes; graphs use ours."""
        self._forget_step()
        self._restore_upstream_buffers()
        self._in_dummy_run = True
        self._dummy_attends = kwargs.get("force_attention", False)
        self._in_capture = kwargs.get("is_graph_capturing", False)
        try:
            return super()._dummy_run(num_tokens, *args, **kwargs)
        finally:
            self._in_dummy_run = self._in_capture = self._dummy_attends = False
            self._forget_step()
            if hasattr(self, "block_tables"):  # profiling comes before the KV cache
                self.block_tables.is_prepared = False

    def _forget_step(self) -> None:
        """What was prepared is not for the next forward pass."""
        self._padding_decision = None

    def _restore_upstream_buffers(self, leave: tuple[str, ...] = ()) -> None:
        for name, saved in self._upstream_buffers.items():
            if name in leave:
                continue
            if name in TENSORS:
                setattr(self, name, saved)
            else:
                vars(getattr(self, name)).update(saved)

    def _check_padding(self) -> None:
        """On the CPU fallback, what a graph is about to read behind the step is checked."""
        step = self.last_step
        assert step is not None
        if self.prep_device.computes_on_host and step.padding.mode is not GraphMode.NONE:
            tables = self.block_tables.device_rows(step.padding.num_reqs_padded)
            local_tables = self._local_tables.of_step if self.local_groups else {}
            check_padding(step, self._staged, tables, local_tables)

    # ----------------------------------------------------------------- start-up

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Full graphs of this plugin in place of CUDA's, which upstream takes for granted."""
        super().load_model(*args, **kwargs)
        if self.compilation_config.cudagraph_mode.has_full_cudagraphs():
            self.model = GraphWrapper(self.get_model(), self.vllm_config, CUDAGraphMode.FULL)

    def profile_cudagraph_memory(self) -> int:
        """Bytes that graphs will take, from capturing the two largest sizes of each kind."""
        with self.prep_device.host_streams(), self.prep_device.capturing():
            return super().profile_cudagraph_memory()

    def capture_model(self) -> int:
        """Capture every graph, largest first.

        Returns
        -------
        int
            Bytes of the device that they took.

        Raises
        ------
        PrepError
            With requests in flight, whose cache and tables dummy runs would disturb.
        """
        if self.requests:
            raise PrepError(
                "graphs can't be captured with "
                f"{counted(len(self.requests), 'request')} in flight: capture at start-up"
            )
        nbytes = capture_graphs(self)
        self._padding_decisions.clear()  # sizes that did not fit are gone
        return nbytes

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """As upstream's, without graphs; the prefix cache is the caller's to reset."""
        self.refuse_new_weights()
        super().reload_weights(*args, **kwargs)

    def refuse_new_weights(self) -> None:
        """Graphs read weights where these lay; whether they still lie there, nobody tried.

        Raises
        ------
        PrepError
            Unless the engine runs eagerly, and has no KV connector: what that has stored was
            computed with the old weights.
        """
        if self.vllm_config.kv_transfer_config is not None:
            raise PrepError(
                "new weights are not supported beside a KV connector, which would go on to load "
                "what the old ones computed: start another engine with an empty folder"
            )
        if self.cudagraph_dispatcher.cudagraph_mode != CUDAGraphMode.NONE:
            raise PrepError(
                "new weights are not supported under captured graphs, which read them where they "
                "lay: start with --enforce-eager"
            )

    def shutdown(self) -> None:
        """Say how steps ran, and let go of the graphs."""
        self.step_counts.log_summary()
        super().shutdown()  # waits for the device first
        CUDAGraphWrapper.clear_all_graphs()
