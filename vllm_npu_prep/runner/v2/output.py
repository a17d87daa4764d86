"""What a step returns: its samples or pooled vectors, while they are copied to the host."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm import envs
from vllm.v1.outputs import (
    AsyncModelRunnerOutput,
    DraftTokenIds,
    KVConnectorOutput,
    LogprobsTensors,
    ModelRunnerOutput,
    PoolerOutput,
    SamplingMaskLists,
)
from vllm.v1.worker.gpu.sample.output import SamplerOutput, SamplingMaskTensors
from vllm.v1.worker.utils import raise_if_nan_logits

from vllm_npu_prep.observe.recorder import Sampled, StepRecorder
from vllm_npu_prep.runner.v2.sampler import NPUSampler


def note_of_samples(
    sampler: Any, recorder: StepRecorder
) -> Callable[[ModelRunnerOutput], None] | None:
    """Return what notes a step's samples for its record.

    The result is None in engines without masks of sampling and traces.
    """
    assert isinstance(sampler, NPUSampler)
    traces = sampler.trace_replay_state
    if traces is None and not sampler.return_sampling_mask:
        return None
    number, from_trace = recorder.steps - 1, () if traces is None else traces.replaced

    def note(output: ModelRunnerOutput) -> None:
        token_ids = [[*tokens] for tokens in output.sampled_token_ids]
        recorder.note_sampled(number, Sampled(token_ids, from_trace, output.sampling_masks))

    return note


class StepOutput(AsyncModelRunnerOutput):
    """The samples of a step, which are copied to the host on a separate stream.

    Upstream also copies how many tokens each request got. Here the host knows that already, or sees
    it in the samples, because -1 follows a request's last token.

    Parameters
    ----------
    output
        What the scheduler gets; `get_output` fills in the samples.
    sampler_output
        Samples ``[num_reqs, width]``, and log-probabilities if a request wants them.
    discard
        bool ``[num_reqs]``: the requests whose sample doesn't count.
    cu_num_logits
        int ``[num_reqs + 1]``: the borders between the rows of logits of requests; None if nobody
        asks for the tokens that samples were drawn from.

    Attributes
    ----------
    samples
        The samples on the host, complete when `get_output` has returned.
    """

    def __init__(
        self,
        output: ModelRunnerOutput,
        sampler_output: SamplerOutput,
        discard: np.ndarray,
        cu_num_logits: np.ndarray | None,
        copy_stream: Any,
        note: Callable[[ModelRunnerOutput], None] | None = None,
    ) -> None:
        self._output, self._cu_num_logits, self._note = output, cu_num_logits, note
        self._discard = discard.nonzero()[0].tolist()
        # Kept until their copies are complete (`runner.outputs_in_flight.OutputsInFlight`)
        self._sampled_token_ids = sampler_output.sampled_token_ids
        self._logprobs_tensors = sampler_output.logprobs_tensors
        self._sampling_masks = sampler_output.sampling_mask_tensors
        self._prompt_scores = output.prompt_logprobs_dict, output.prompt_token_id_logprobs_dict
        self.async_copy_ready_event = torch.Event()
        main_stream = torch.cuda.current_stream()
        with torch.cuda.stream(copy_stream):
            copy_stream.wait_stream(main_stream)
            self.samples = self._sampled_token_ids.to("cpu", non_blocking=True)
            self._kept_tokens: SamplingMaskTensors | None = None
            if self._sampling_masks is not None:
                self._kept_tokens = self._sampling_masks.to_cpu_nonblocking()
            self._num_nans: torch.Tensor | None = None
            if sampler_output.num_nans is not None:
                self._num_nans = sampler_output.num_nans.to("cpu", non_blocking=True)
            self._logprobs: LogprobsTensors | None = None
            if self._logprobs_tensors is not None:
                self._logprobs = self._logprobs_tensors.to_cpu_nonblocking()
            self._most_likely: dict[str, LogprobsTensors | None] = {}
            self._named: dict[str, torch.Tensor] = {}
            most_likely, named = self._prompt_scores
            if most_likely or named:  # two empty loops take as long as the copy of samples
                self._most_likely = {
                    req_id: None if tensors is None else tensors.to_cpu_nonblocking()
                    for req_id, tensors in most_likely.items()
                }
                self._named = {
                    req_id: scores.to("cpu", non_blocking=True) for req_id, scores in named.items()
                }
            self.async_copy_ready_event.record()

    def get_output(self) -> ModelRunnerOutput:
        self.async_copy_ready_event.synchronize()
        sampled: list[list[int]] = self.samples.tolist()
        if self.samples.shape[1] > 1:  # drafts were verified
            kept = (self.samples >= 0).sum(1).tolist()
            sampled = [tokens[:count] for tokens, count in zip(sampled, kept)]
        if self._kept_tokens is not None:
            self._output.sampling_masks = self._masks_of(self._kept_tokens, sampled)
        for req in self._discard:
            sampled[req].clear()
        self._output.sampled_token_ids = sampled
        if self._num_nans is not None:
            counts = dict(zip(self._output.req_ids, self._num_nans.tolist()))
            self._output.num_nans_in_logits = counts
            if envs.VLLM_RAISE_ON_LOGIT_NANS:
                raise_if_nan_logits(counts)
        if self._logprobs is not None:
            self._output.logprobs = self._logprobs.tolists()
        self._output.prompt_logprobs_dict = self._most_likely
        self._output.prompt_token_id_logprobs_dict = self._named
        # Let go of what is on the device
        del self._sampled_token_ids, self._logprobs_tensors, self._prompt_scores
        del self._sampling_masks
        if self._note is not None:
            self._note(self._output)
        return self._output

    def _masks_of(
        self, of_rows: SamplingMaskTensors, sampled: list[list[int]]
    ) -> SamplingMaskLists:
        """Return the tokens from which those of each request were sampled.

        `of_rows` has a row for each row of logits: the rows of rejected drafts are left out.
        """
        counts = [len(tokens) for tokens in sampled]
        if len(of_rows.counts) == len(sampled):
            return of_rows.tolists()
        assert self._cu_num_logits is not None
        starts = self._cu_num_logits[:-1]
        rows = np.concatenate([np.arange(*each) for each in zip(starts, starts + counts)])
        kept = (of_rows.token_ids[rows], of_rows.packed_mask[rows], of_rows.counts[rows])
        borders = np.concatenate(([0], np.cumsum(counts))).tolist()
        of_samples = SamplingMaskTensors(*kept, of_rows.vocab_size).tolists()
        return of_samples._replace(cu_num_generated_tokens=borders)

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """Return what vLLM 0.33.0 keeps of a step whose `get_output` fails."""
        return self._output.kv_connector_output


class PooledOutput(AsyncModelRunnerOutput):
    """The pooled vectors of a step, copied on a separate stream for requests that are complete.

    Parameters
    ----------
    output
        What the scheduler gets; `get_output` fills in the rows of requests.
    pooled
        A tensor ``[num_reqs, size]``, or a list with None for requests without a pooled vector.
    finished
        For each request, whether its prompt is complete.
    """

    def __init__(
        self,
        output: ModelRunnerOutput,
        pooled: PoolerOutput,
        finished: list[bool],
        copy_stream: Any,
    ) -> None:
        self._output = output
        self._raw_pooler_output = pooled  # kept until its copies are complete, as of samples
        self.async_copy_ready_event = torch.Event()
        main_stream = torch.cuda.current_stream()
        with torch.cuda.stream(copy_stream):
            copy_stream.wait_stream(main_stream)
            if isinstance(pooled, torch.Tensor) and all(finished):
                self._rows: Any = pooled.to("cpu", non_blocking=True)  # together
            else:
                self._rows = [
                    row.to("cpu", non_blocking=True) if row is not None and is_finished else None
                    for row, is_finished in zip(pooled, finished, strict=True)
                ]
            self.async_copy_ready_event.record()

    def get_output(self) -> ModelRunnerOutput:
        self.async_copy_ready_event.synchronize()
        self._output.pooler_output = list(self._rows)
        del self._raw_pooler_output
        return self._output

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        return self._output.kv_connector_output


class DraftsOfStep:
    """The last step's drafts for the scheduler; stands in for upstream's ``DraftTokensHandler``.

    The scheduler reads the tokens only if a request has a grammar; else only their number counts,
    and nothing is copied.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._req_ids: list[str] = []
        self._num_drafts = 0
        self._drafts: torch.Tensor | None = None  # on the host, once the event has passed
        self._event: Any = None
        self._copied: torch.Tensor | None = None  # what is copied, until the event has passed

    def keep(
        self, req_ids: list[str], drafts: torch.Tensor, *, structured: bool, copy_stream: Any
    ) -> None:
        """Keep a step's drafts, int32 ``[num_reqs, num_drafts]``; copy them only for grammars.

        `structured` says whether a request of the step has a grammar.
        """
        self._finish_copy()  # of an earlier step, whose drafts nobody has asked for
        self._req_ids, self._num_drafts, self._drafts = req_ids, drafts.shape[1], None
        if structured:
            self._event, self._copied = torch.Event(), drafts
            main_stream = torch.cuda.current_stream()
            with torch.cuda.stream(copy_stream):
                copy_stream.wait_stream(main_stream)
                self._drafts = drafts.to("cpu", non_blocking=True)
                self._event.record()

    def get_draft_tokens(self) -> DraftTokenIds:
        """Return the drafts by request; each is -1 if no grammar reads them."""
        if self._drafts is None:
            return DraftTokenIds(self._req_ids, [[-1] * self._num_drafts for _ in self._req_ids])
        self._finish_copy()
        return DraftTokenIds(self._req_ids, self._drafts.tolist())

    def _finish_copy(self) -> None:
        if self._copied is not None:
            self._event.synchronize()
            self._copied = None
