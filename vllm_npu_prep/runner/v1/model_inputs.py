"""What the model reads of a step: token ids or embeddings, and positions.

`vllm_npu_prep.prep.embeds` decides between ids and embeddings. Graphs read token ids only: a step
with ``inputs_embeds`` runs eagerly, without the compiled model.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.utils import set_mm_embedding_modality
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_npu_prep.prep.batch import BatchTables, PreparedStep
from vllm_npu_prep.prep.embeds import NO_PLACEHOLDERS, Placeholders, takes_embeds
from vllm_npu_prep.prep.mrope import MropeTables
from vllm_npu_prep.runner.prompt_embeds import PromptEmbeds
from vllm_npu_prep.wording import counted

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only


@dataclass(frozen=True)
class PlaceholderRun:
    """Neighbouring tokens of one image or video: its rows of the encoder's output, in order."""

    feature: MultiModalFeatureSpec
    start: int  # first position in the prompt
    end: int  # past the last one
    first_row: int  # of the encoder's output
    is_last: bool  # the item's last run

    @classmethod
    def of_feature(cls, feature: MultiModalFeatureSpec) -> "list[PlaceholderRun]":
        """Return the runs of one item; it has several if there is text between its placeholders."""
        runs: list[PlaceholderRun] = []
        row, ranges = 0, feature.mm_position.extract_embeds_range()
        for start, last in ranges:
            runs.append(cls(feature, start, last + 1, row, (start, last) == ranges[-1]))
            row += last + 1 - start
        return runs


@dataclass(frozen=True)
class RequestInputs:
    """A request's inputs apart from token ids, computed when it enters the batch."""

    runs: list[PlaceholderRun]
    mrope_positions: np.ndarray | None  # [num_dims, num_prompt_tokens] int64; None: they count up
    mrope_position_delta: int

    @classmethod
    def of_request(cls, request: CachedRequestState) -> "RequestInputs":
        runs = [
            run for feature in request.mm_features for run in PlaceholderRun.of_feature(feature)
        ]
        delta = request.mrope_position_delta or 0
        if request.mrope_positions is None or not (request.mm_features or delta):
            return cls(runs, None, delta)
        return cls(runs, request.mrope_positions.numpy(), delta)


@dataclass
class EncoderCounts:
    encoded: int = 0  # images and videos that it has encoded
    placed: int = 0  # items whose placeholders got its output; equal items share one output


class ModelInputs:
    """Inputs of requests apart from token ids: M-RoPE positions, images and videos, embeddings.

    Parameters
    ----------
    mrope_dims
        The dimensions of M-RoPE positions; 0 for a model without them.
    takes_items
        Whether the model takes images or videos.
    dtype
        The dtype of embeddings.
    encoder_cache
        The outputs of the encoder by identifier, ``[rows, hidden_size]`` on the device; upstream
        adds and removes them.

    Attributes
    ----------
    mrope_tables
        The positions of the batch's prompts, for a model with M-RoPE.
    follows_rows
        Whether requests of this model can have inputs that `follow_rows` has to order.
    """

    def __init__(
        self,
        max_num_reqs: int,
        *,
        mrope_dims: int = 0,
        takes_items: bool = False,
        dtype: torch.dtype = torch.float32,
        encoder_cache: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.dtype = dtype
        self.mrope_tables = MropeTables(mrope_dims, max_num_reqs)
        self.counts = EncoderCounts()
        self.follows_rows = takes_items or mrope_dims > 0
        self._encoder_cache = {} if encoder_cache is None else encoder_cache
        self._placeholder_runs = NO_PLACEHOLDERS
        self._runs: list[PlaceholderRun] = []
        self._requests: dict[str, RequestInputs] = {}  # by request id, in the batch's order

    # ----------------------------------------------------------------- before the step is prepared

    def follow_rows(
        self,
        req_ids: Sequence[str],  # the requests of the batch, in order
        # The requests that are new in this step; an id may return with other inputs
        new_req_ids: Collection[str],
        requests: Mapping[str, CachedRequestState],  # the requests as upstream keeps them, by id
    ) -> None:
        """Put the inputs of requests in the order of the batch's rows, if these have changed."""
        known = self._requests
        if not new_req_ids and req_ids == list(known):
            return
        self._requests = {
            req_id: known[req_id]
            if req_id in known and req_id not in new_req_ids
            else RequestInputs.of_request(requests[req_id])
            for req_id in req_ids
        }
        rows = self._requests.values()
        self._runs = [run for row in rows for run in row.runs]
        self._placeholder_runs = Placeholders.of_rows(
            [[(run.start, run.end) for run in row.runs] for row in rows]
        )
        if self.mrope_tables:
            self.mrope_tables.set_rows(
                [(row.mrope_positions, row.mrope_position_delta) for row in rows]
            )

    def takes_embeds(
        self,
        tables: BatchTables,
        num_scheduled_tokens: np.ndarray,
        prompt_embeds: Mapping[int, torch.Tensor],
    ) -> bool:
        """Return whether the model gets embeddings instead of ids in this step.

        ``prompt_embeds`` has prompts given as embeddings, by row.
        """
        prompts = list(prompt_embeds)
        return takes_embeds(tables, num_scheduled_tokens, prompts, self._placeholder_runs)

    def collect_prompt_embeds(
        self,
        step: PreparedStep,
        is_token_ids: np.ndarray,  # [max_num_reqs, max_model_len] bool
        prompt_embeds: Mapping[int, torch.Tensor],
    ) -> PromptEmbeds | None:
        """Return vectors of prompts given as embeddings; None if the step reads no such prompt."""
        if not (step.batch.takes_embeds and prompt_embeds):
            return None
        return PromptEmbeds.of_step(step, is_token_ids, prompt_embeds, self.dtype)

    def for_record(
        self, req_ids: list[str], prompt_embeds: Mapping[int, torch.Tensor]
    ) -> tuple[Any, ...]:
        """Return what a record has of requests apart from the step (see `StepSnapshot.of_step`)."""
        if not (self._runs or prompt_embeds):
            return (req_ids,)
        modalities = [run.feature.modality for run in self._runs]
        return req_ids, self._placeholder_runs, modalities, list(prompt_embeds)

    # ----------------------------------------------------------------- for the model

    def embed(
        self,
        model: Any,
        input_ids: torch.Tensor,
        mm_embeds: list[torch.Tensor],
        is_multimodal: torch.Tensor,
    ) -> torch.Tensor:
        """Return the embeddings of all tokens, ``[num_input_tokens, hidden_size]``.

        ``input_ids`` is int32 ``[num_input_tokens]`` on the device; `gather_mm_embeddings` returns
        ``mm_embeds`` and ``is_multimodal``, which is padded here.
        """
        padding = len(input_ids) - len(is_multimodal)
        return model.embed_input_ids(
            input_ids,
            multimodal_embeddings=mm_embeds,
            is_multimodal=torch.nn.functional.pad(is_multimodal, (0, padding)),
        )

    def gather_mm_embeddings(
        self,
        step: PreparedStep,
        req_ids: Sequence[str],  # the requests of the batch, in order
        shift: int = 0,  # 1 for a drafter, which reads the token after each token of the step
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Find rows of the encoder's outputs for tokens of a step, and which tokens these are.

        Upstream visits every request; here requests without images cost nothing.

        Returns
        -------
        mm_embeds
            ``[tokens, hidden_size]`` on the device for each run.
        is_multimodal
            bool ``[total_num_scheduled_tokens]`` on the host: models read it without waiting.

        Raises
        ------
        RuntimeError
            If an output that a request needs is no longer in the encoder's cache.
        """
        is_multimodal = torch.zeros(step.total_num_scheduled_tokens, dtype=torch.bool)
        first = step.num_computed_tokens + shift
        touched = self._placeholder_runs.touched(step.num_computed_tokens, step.query_lens, shift)
        mm_embeds = []
        for index, start, end in zip(*(each.tolist() for each in touched)):
            run, row = self._runs[index], int(self._placeholder_runs.rows[index])
            output = self._encoder_cache.get(run.feature.identifier)
            if output is None:
                if shift and run.start >= step.seq_lens[row]:
                    continue  # the drafter is ahead of the encoder, so it reads the token id
                raise RuntimeError(
                    f"the encoder's output of {run.feature.modality} {run.feature.identifier} is "
                    f"no longer cached, but request {req_ids[row]} needs it"
                )
            rows = output[run.first_row + start - run.start : run.first_row + end - run.start]
            set_mm_embedding_modality(rows, run.feature.modality)
            mm_embeds.append(rows)
            token = int(step.query_start_loc[row] - first[row])
            is_multimodal[token + start : token + end] = True
            if run.is_last and end == run.end and not shift:
                self.counts.placed += 1
        return mm_embeds, is_multimodal

    def count_encoded(self, num_items: int) -> None:
        self.counts.encoded += num_items

    def log_summary(self) -> None:
        if self.counts.encoded:
            encoded, placed = self.counts.encoded, self.counts.placed
            logger.info("Encoder: %s encoded, %d placed.", counted(encoded, "item"), placed)
