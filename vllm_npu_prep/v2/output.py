"""What a step returns: its samples, on their way to the host."""

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsTensors, ModelRunnerOutput
from vllm.v1.worker.gpu.sample.output import SamplerOutput


class StepOutput(AsyncModelRunnerOutput):
    """A step's samples, copied on a stream of their own.

    Upstream also copies how many tokens each request got. The host knows that already.

    Parameters
    ----------
    output
        What the scheduler gets; its samples are filled in by `get_output`.
    sampler_output
        Samples ``[num_reqs, 1]``, and log-probabilities if somebody wants them.
    discard
        bool ``[num_reqs]``: requests whose sample doesn't count.
    copy_stream
        On which to copy.
    """

    def __init__(
        self,
        output: ModelRunnerOutput,
        sampler_output: SamplerOutput,
        discard: np.ndarray,
        copy_stream: Any,
    ) -> None:
        self._output = output
        self._discard = np.flatnonzero(discard).tolist()
        # Kept until their copies are complete (`vllm_npu_prep.runner.outputs.OutputsInFlight`)
        self._sampled_token_ids = sampler_output.sampled_token_ids
        self._logprobs_tensors = sampler_output.logprobs_tensors
        self._prompt_logprobs = dict(output.prompt_logprobs_dict)
        self.async_copy_ready_event = torch.Event()
        main_stream = torch.cuda.current_stream()
        with torch.cuda.stream(copy_stream):
            copy_stream.wait_stream(main_stream)
            self._samples = self._sampled_token_ids.to("cpu", non_blocking=True)
            self._num_nans: torch.Tensor | None = None
            if sampler_output.num_nans is not None:
                self._num_nans = sampler_output.num_nans.to("cpu", non_blocking=True)
            self._logprobs: LogprobsTensors | None = None
            if self._logprobs_tensors is not None:
                self._logprobs = self._logprobs_tensors.to_cpu_nonblocking()
            self._prompt_logprobs_cpu = {
                req_id: None if tensors is None else tensors.to_cpu_nonblocking()
                for req_id, tensors in self._prompt_logprobs.items()
            }
            self.async_copy_ready_event.record()

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copies, and fill in what they brought."""
        self.async_copy_ready_event.synchronize()
        sampled = self._samples.tolist()
        for req in self._discard:
            sampled[req].clear()
        self._output.sampled_token_ids = sampled
        if self._num_nans is not None:
            counts = dict(zip(self._output.req_ids, self._num_nans.tolist()))
            self._output.num_nans_in_logits = counts
        if self._logprobs is not None:
            self._output.logprobs = self._logprobs.tolists()
        self._output.prompt_logprobs_dict = self._prompt_logprobs_cpu
        # Let go of what is on the device
        del self._sampled_token_ids, self._logprobs_tensors, self._prompt_logprobs
        return self._output
