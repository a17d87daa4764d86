"""What the model reads of a step: token ids or embeddings, and its positions.

Which of the two is one rule, in `vllm_npu_prep.prep.embeds`. Graphs read token ids only: a step
with ``inputs_embeds`` runs eagerly, outside of what was compiled.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.utils import set_mm_embedding_modality
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_npu_prep.lora import LoRARunner
from vllm_npu_prep.prep.batch import BatchTables, PreparedStep
from vllm_npu_prep.prep.embeds import NO_PLACEHOLDERS, Placeholders, takes_embeds
from vllm_npu_prep.prep.mrope import MropeTables
from vllm_npu_prep.prompt_embeds import PromptEmbeds
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only


@dataclass(frozen=True)
class PlaceholderRun:
    """Neighbouring tokens of one image or video: its rows of the encoder's output, in order."""

    feature: MultiModalFeatureSpec
    start: int  # first position in the prompt
    end: int  # behind the last one
    first_row: int  # of the encoder's output
    is_last: bool  # the item's last run

    @classmethod
    def of_feature(cls, feature: MultiModalFeatureSpec) -> "list[PlaceholderRun]":
        """Runs of one item; an item has several where tokens of text lie between its rows."""
        runs: list[PlaceholderRun] = []
        row, ranges = 0, feature.mm_position.extract_embeds_range()
        for start, last in ranges:
            runs.append(cls(feature, start, last + 1, row, (start, last) == ranges[-1]))
            row += last + 1 - start
        return runs


@dataclass(frozen=True)
class RequestInputs:
    """What a request brings beside its token ids, worked out when it enters the batch."""

    runs: list[PlaceholderRun]
    mrope_positions: np.ndarray | None  # [num_dims, num_prompt_tokens] int64; None: they count up
    mrope_position_delta: int

    @classmethod
    def of_request(cls, request: CachedRequestState) -> "RequestInputs":
        """Of a request as upstream keeps it."""
        runs = [
            run for feature in request.mm_features for run in PlaceholderRun.of_feature(feature)
        ]
        delta = request.mrope_position_delta or 0
        if request.mrope_positions is None or not (request.mm_features or delta):
            return cls(runs, None, delta)
        return cls(runs, request.mrope_positions.numpy(), delta)


@dataclass
class EncoderCounts:
    """What the encoder was asked for."""

    encoded: int = 0  # images and videos that it has seen
    placed: int = 0  # items of requests whose tokens got its output; equal ones share it


class ModelInputRunner(LoRARunner):
    """Upstream's runner with embeddings for steps that have some, and M-RoPE in the one copy."""

    last_step: PreparedStep | None
    _tables: BatchTables

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        # Upstream would give the model embeddings in every step, out of graphs' reach.
        self.enable_prompt_embeds = False
        self.mrope_tables: MropeTables | None = None
        if self.uses_mrope:
            self.mrope_tables = MropeTables(self.mrope_num_dims, self.max_num_reqs)
        self.encoder_counts = EncoderCounts()
        self._prompt_embeds: PromptEmbeds | None = None
        self._placeholder_runs = NO_PLACEHOLDERS
        self._runs: list[PlaceholderRun] = []
        self._request_inputs: dict[str, RequestInputs] = {}  # by request id, in the batch's order

    @property
    def mrope_dims(self) -> int:
        """Dimensions of M-RoPE positions; 0 for a model without them."""
        return self.mrope_num_dims if self.uses_mrope else 0

    # ----------------------------------------------------------------- before the step is prepared

    def _takes_embeds(self, num_scheduled_tokens: np.ndarray) -> bool:
        """Which input the model gets in this step."""
        prompts = list(self.input_batch.req_prompt_embeds)
        return takes_embeds(self._tables, num_scheduled_tokens, prompts, self._placeholder_runs)

    def _follow_rows(self, scheduler_output: "SchedulerOutput") -> None:
        """Line up what requests bring with their rows, whenever the batch has others."""
        if not (self.supports_mm_inputs or self.uses_mrope):
            return
        req_ids, known = self.input_batch.req_ids, self._request_inputs
        new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        if not new and req_ids == list(known):
            return
        self._request_inputs = {
            req_id: known[req_id]
            if req_id in known and req_id not in new
            else RequestInputs.of_request(self.requests[req_id])
            for req_id in req_ids
        }
        rows = self._request_inputs.values()
        self._runs = [run for row in rows for run in row.runs]
        self._placeholder_runs = Placeholders.of_rows(
            [[(run.start, run.end) for run in row.runs] for row in rows]
        )
        if self.mrope_tables is not None:
            self.mrope_tables.set_rows(
                [(row.mrope_positions, row.mrope_position_delta) for row in rows]
            )

    def _collect_prompt_embeds(self, step: PreparedStep) -> None:
        """Tokens of prompts given as embeddings, if the step reads from such a prompt."""
        batch = self.input_batch
        self._prompt_embeds = None
        if step.batch.takes_embeds and batch.req_prompt_embeds:
            assert isinstance(self.dtype, torch.dtype)
            self._prompt_embeds = PromptEmbeds.of_step(
                step, batch.is_token_ids, batch.req_prompt_embeds, self.dtype
            )

    def _names_and_embeds(self) -> tuple[Any, ...]:
        """What a record tells of requests beside the step: see `KeptStep.of_step`."""
        batch = self.input_batch
        if not (self._runs or batch.req_prompt_embeds):
            return (batch.req_ids,)
        modalities = [run.feature.modality for run in self._runs]
        return batch.req_ids, self._placeholder_runs, modalities, list(batch.req_prompt_embeds)

    # ----------------------------------------------------------------- for the model

    def _preprocess(
        self,
        scheduler_output: "SchedulerOutput",
        num_input_tokens: int,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> tuple[Any, ...]:
        """The step goes in as it was prepared; upstream slices and clears what is right.

        Later stages of a pipeline read what the stage before them made, and never embed.
        """
        model_kwargs = self._init_model_kwargs()
        positions = self.mrope_positions.gpu if self.uses_mrope else self.positions
        input_ids: torch.Tensor | None = self.input_ids.gpu
        inputs_embeds: torch.Tensor | None = None
        if not get_pp_group().is_first_rank:
            received = self.sync_and_gather_intermediate_tensors(
                num_input_tokens, intermediate_tensors, sync_self=True
            )
            return input_ids, None, positions, received, model_kwargs, None
        if scheduler_output.scheduled_encoder_inputs:
            self._execute_mm_encoder(scheduler_output)
        if self._has_embeds:
            inputs_embeds = self._embed(scheduler_output, self.input_ids.gpu)
            input_ids = None
        return input_ids, inputs_embeds, positions, None, model_kwargs, None

    @property
    def _has_embeds(self) -> bool:
        """Whether the present step gives the model embeddings; a dummy run never does."""
        return self.last_step is not None and self.last_step.batch.takes_embeds

    def _embed(self, scheduler_output: "SchedulerOutput", input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of all tokens, ``[num_input_tokens, hidden_size]``."""
        if self._prompt_embeds is not None:
            return self._prompt_embeds.inputs_embeds(self.model, input_ids)
        mm_embeds, is_multimodal = self._gather_mm_embeddings(scheduler_output)
        padding = len(input_ids) - len(is_multimodal)
        model: Any = self.model
        return model.embed_input_ids(
            input_ids,
            multimodal_embeddings=mm_embeds,
            is_multimodal=torch.nn.functional.pad(is_multimodal, (0, padding)),
        )

    def _execute_mm_encoder(self, scheduler_output: "SchedulerOutput") -> list[torch.Tensor]:
        """Run the encoder on what the scheduler has room for, and count."""
        outputs = super()._execute_mm_encoder(scheduler_output)
        self.encoder_counts.encoded += len(outputs)
        return outputs

    def _gather_mm_embeddings(
        self, scheduler_output: "SchedulerOutput", shift_computed_tokens: int = 0
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Rows of the encoder's outputs for the tokens of this step, and which tokens they are.

        Upstream looks at every request; here those without images cost nothing.

        Parameters
        ----------
        scheduler_output
            The step's.
        shift_computed_tokens
            1 for a drafter, which reads the token behind each of the step's.

        Returns
        -------
        mm_embeds
            ``[tokens, hidden_size]`` on the device for each run.
        is_multimodal
            bool ``[total_num_scheduled_tokens]`` on the host, where models read it without waiting.
        """
        step = self.last_step
        assert step is not None
        is_multimodal = torch.zeros(step.total_num_scheduled_tokens, dtype=torch.bool)
        first = step.num_computed_tokens + shift_computed_tokens
        touched = self._placeholder_runs.touched(
            step.num_computed_tokens, step.query_lens, shift_computed_tokens
        )
        mm_embeds = []
        for index, start, end in zip(*(each.tolist() for each in touched)):
            run, row = self._runs[index], int(self._placeholder_runs.rows[index])
            output = self.encoder_cache.get(run.feature.identifier)
            if output is None:
                if shift_computed_tokens and run.start >= step.seq_lens[row]:
                    continue  # the drafter looks ahead of what is encoded, and reads the token
                raise RuntimeError(
                    f"the encoder's output of {run.feature.modality} {run.feature.identifier} is "
                    f"gone, and request {self.input_batch.req_ids[row]} needs it"
                )
            rows = output[run.first_row + start - run.start : run.first_row + end - run.start]
            set_mm_embedding_modality(rows, run.feature.modality)
            mm_embeds.append(rows)
            token = int(step.query_start_loc[row] - first[row])
            is_multimodal[token + start : token + end] = True
            if run.is_last and end == run.end and not shift_computed_tokens:
                self.encoder_counts.placed += 1
        return mm_embeds, is_multimodal

    def _prepare_mm_inputs(self, num_tokens: int) -> tuple[torch.Tensor, Any]:
        """Dummy runs read token ids and no embeddings, as graphs do; upstream's read embeddings."""
        return self.input_ids.gpu[:num_tokens], None

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """What was compiled takes token ids."""
        if kwargs.get("inputs_embeds") is not None:
            get_forward_context().skip_compiled = True
        return super()._model_forward(*args, **kwargs)

    def shutdown(self) -> None:
        """Say what the encoder did."""
        counts = self.encoder_counts
        if counts.encoded:
            logger.info(
                "Encoder: %s encoded, %d placed.", counted(counts.encoded, "item"), counts.placed
            )
        super().shutdown()
