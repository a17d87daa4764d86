"""Replays of traces: tokens that a request is to get in place of those that were sampled."""

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_npu_prep.runner.v2.request_states import NPURequestState


class NPUTraceReplayState:
    """The traces of requests, by request row; stands in for upstream's ``TraceReplayState``.

    Upstream keeps traces on the device, and its ``_trace_replay_kernel`` finds the place of a step
    in them. Here the host knows that place, and sends the step's tokens. A trace may not come with
    drafts (vLLM refuses it), so each request has one row of logits.

    Attributes
    ----------
    replaced
        The rows of the batch whose samples the last step replaced.
    """

    def __init__(self, req_states: NPURequestState) -> None:
        self.replaced: list[int] = []
        self._prompt_len = req_states.prompt_len.np
        self._traces: dict[int, list[int]] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        self._traces.pop(req_idx, None)  # of the row's last request
        if sampling_params.trace_decode_token_ids is not None:
            self._traces[req_idx] = sampling_params.trace_decode_token_ids

    def apply_staged_writes(self) -> None:
        """Do nothing: tokens travel with their step."""

    def replace(self, sampled: torch.Tensor, input_batch: InputBatch) -> None:
        """Put the traces' tokens in place of samples, int64 ``[num_reqs]``, which are changed."""
        request_rows = input_batch.idx_mapping_np
        ends = input_batch.seq_lens_cpu_upper_bound.numpy()[: len(request_rows)]
        replaced = [
            (index, self._traces[row][place])
            for index, (row, place) in enumerate(
                zip(request_rows, ends - self._prompt_len[request_rows])
            )
            if row in self._traces and 0 <= place < len(self._traces[row])
        ]
        self.replaced = [index for index, _ in replaced]
        if replaced:
            sent = async_tensor_h2d(np.asarray(replaced, np.int64).T.copy(), device=sampled.device)
            sampled.index_copy_(0, sent[0], sent[1])
