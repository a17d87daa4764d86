"""The graph manager of the V2 runner: upstream's candidates, this plugin's graphs."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from vllm_npu_prep.device import Device
from vllm_npu_prep.runner.step import StepInFlight
from vllm_npu_prep.v2.engines import SharedDecisions


class GraphManager(ModelCudaGraphManager):
    """Says which graph a step replays, as upstream's manager does, and replays it by ours.

    `vllm_npu_prep.runner.graphs.Graphs` captures for both runners and takes this class for V1's
    dispatcher: it has its methods.

    Parameters
    ----------
    replay
        Replays the full graph of the step in flight; its argument is the graph's descriptor.
    device
        Where graphs run.
    *args, **kwargs
        As upstream's.

    Attributes
    ----------
    decided
        Decision for the step in flight, which upstream asks for when the step is prepared; None
        outside of a step.
    of_dummy_run
        Decision for the last dummy run, for which nothing is prepared before.
    """

    decided: BatchExecutionDescriptor | None = None
    of_dummy_run: BatchExecutionDescriptor | None = None

    def __init__(
        self,
        replay: Callable[[BatchDescriptor], torch.Tensor],
        device: Device,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._replay, self._prep_device = replay, device
        self._graphs_captured = True  # steps come after capture

    # ----------------------------------------------------------------- steps

    def dispatch(self, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        """The decision for the step in flight, which was made before it was prepared."""
        if self.decided is not None:
            return self.decided
        self.of_dummy_run = super().dispatch(*args, **kwargs)
        return self.of_dummy_run

    def ask(
        self,
        num_reqs: int,
        num_tokens: int,
        max_query_len: int,
        num_active_loras: int,
        eager: bool,
        shared: SharedDecisions | None = None,
    ) -> tuple[CUDAGraphMode, BatchDescriptor, BatchExecutionDescriptor]:
        """Upstream's decision for a step.

        Parameters
        ----------
        num_reqs, num_tokens, max_query_len, num_active_loras
            Of the step.
        eager
            Whether the step has to run without a graph.
        shared
            With engines that have to agree.

        Returns
        -------
        mode, descriptor, decision
            As V1's dispatcher says it, and as V2's runner takes it.
        """
        # Any batch of decodes, and prompts of one token, which are padded as decodes are
        is_uniform = num_tokens == num_reqs * max_query_len
        uniform = max_query_len if is_uniform else None
        if shared is not None:
            found = shared.decide(
                self, num_reqs, num_tokens, uniform, num_active_loras, eager=eager
            )
        elif eager:
            none = CUDAGraphMode.NONE
            found = BatchExecutionDescriptor(
                none, num_tokens, num_reqs, num_active_loras=num_active_loras
            )
        else:
            found = super().dispatch(num_reqs, num_tokens, uniform, num_active_loras)
        return found.cg_mode, self.descriptor(found), found

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> torch.Tensor:
        """Replay a full graph for the step in flight; hidden states ``[num_tokens, size]``."""
        return self._replay(self.descriptor(desc))

    def descriptor(self, desc: BatchExecutionDescriptor) -> BatchDescriptor:
        """The name of a graph, by which wrappers keep and find it."""
        is_full = desc.cg_mode == CUDAGraphMode.FULL
        has_lora = self.vllm_config.lora_config is not None
        return BatchDescriptor(
            desc.num_tokens,
            num_reqs=desc.num_reqs if is_full else None,
            uniform=desc.uniform_token_count is not None,
            has_lora=has_lora,  # as upstream names pieces
            num_active_loras=desc.num_active_loras,
        )

    # ----------------------------------------------------------------- capture, as V1's dispatcher

    @property
    def cudagraph_keys(self) -> dict[CUDAGraphMode, list[BatchExecutionDescriptor]]:
        """Graphs to capture, by mode."""
        return self._capture_descs

    def initialize_cudagraph_keys(self, mode: CUDAGraphMode, decode_query_len: int) -> None:
        """Find the candidates again, because capture sizes have changed."""
        self.cudagraph_mode, self.decode_query_len = mode, decode_query_len
        self._candidates.clear()
        self._capture_descs.clear()
        self._init_candidates()

    def get_capture_descs(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """Graphs to capture: piecewise ones first, of each kind the largest first."""
        found = []
        for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            some = self._capture_descs.get(mode, [])
            some = sorted(some, key=lambda d: (d.num_tokens, d.num_active_loras), reverse=True)
            if mode == CUDAGraphMode.FULL:
                some = some[: self._max_full_descs_to_capture]  # fewer when memory is measured
            if some:
                found.append((mode, [self.descriptor(each) for each in some]))
        return found

    def measured(self, capture_one: Callable[..., Any]) -> Callable[..., Any]:
        """A capture that notes the memory of each full graph, when upstream measures it."""
        samples = self._capture_mem_samples
        if samples is None:
            return capture_one

        def capture(desc: BatchDescriptor, cudagraph_runtime_mode: CUDAGraphMode) -> None:
            before, _ = self._prep_device.memory_info()
            capture_one(desc, cudagraph_runtime_mode=cudagraph_runtime_mode)
            self._prep_device.synchronize()
            if cudagraph_runtime_mode == CUDAGraphMode.FULL:
                samples.append(before - self._prep_device.memory_info()[0])

        return capture


def run_model(
    model: Any,
    vllm_config: VllmConfig,
    in_flight: StepInFlight,
    inputs: dict[str, Any],
    metadata: dict[str, Any],
    slot_mappings: dict[str, torch.Tensor],
    mode: CUDAGraphMode,
    descriptor: BatchDescriptor,
) -> Any:
    """Run a model over a prepared step outside of upstream's ``execute_model``.

    Parameters
    ----------
    model
        The model, or its wrapper for full graphs.
    vllm_config
        The engine's config.
    in_flight
        The step.
    inputs
        Of the model.
    metadata, slot_mappings
        By layer; without metadata, attention is left out.
    mode, descriptor
        The kind of graph and its name, which wrappers read: capture, replay, or neither.
    """
    arrays, num_tokens = in_flight.staged.device, in_flight.step.num_input_tokens
    across, num_engines = None, vllm_config.parallel_config.data_parallel_size
    if num_engines > 1:  # all capture and replay graphs of one size
        across = torch.full((num_engines,), num_tokens, dtype=torch.int32)
    with set_forward_context(
        metadata or None,
        vllm_config,
        num_tokens=num_tokens,
        num_tokens_across_dp=across,
        cudagraph_runtime_mode=mode,
        batch_descriptor=descriptor,
        slot_mapping=slot_mappings,
        is_padding=arrays.is_padding,
    ):
        return model(**inputs)
