"""The graph manager of the V2 runner: upstream's choice of graphs, this plugin's capture and
replay."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from vllm_npu_prep.device import Device
from vllm_npu_prep.runner.padding import DispatchKey
from vllm_npu_prep.runner.step import StepInFlight
from vllm_npu_prep.runner.v2.dp_agreement import DPDecisions


class GraphManager(ModelCudaGraphManager):
    """Chooses the graph of a step as upstream's manager does, and replays this plugin's graph.

    `vllm_npu_prep.runner.graphs.Graphs` captures the graphs of both runners. It uses this class as
    V1's dispatcher, whose methods it has.

    Parameters
    ----------
    replay
        Replays the full graph of the step in flight, given the graph's descriptor.

    Attributes
    ----------
    decided
        The decision for the step in flight. It is made before the step is prepared, and upstream
        asks for it afterwards; None outside of a step.
    of_dummy_run
        The decision for the last dummy run, which nothing prepares beforehand.
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
        if self.decided is not None:
            return self.decided
        self.of_dummy_run = super().dispatch(*args, **kwargs)
        return self.of_dummy_run

    def ask(
        self, counts: DispatchKey, shared: DPDecisions | None = None
    ) -> tuple[CUDAGraphMode, BatchDescriptor, BatchExecutionDescriptor]:
        """Return upstream's decision for a step, on which `shared` agrees with the other ranks.

        The first two values have the form of V1's dispatcher, the third is what V2's runner takes.
        """
        num_reqs, num_tokens = counts.num_reqs, counts.num_tokens
        num_loras = counts.num_active_loras
        # Of any batch of decodes, and of prompts of one token, which are padded as decodes are
        uniform = counts.query_len or None
        if shared is not None:
            found = shared.decide(
                self, num_reqs, num_tokens, uniform, num_loras, eager=counts.eager
            )
        elif counts.eager:
            none = CUDAGraphMode.NONE
            found = BatchExecutionDescriptor(none, num_tokens, num_reqs, num_active_loras=num_loras)
        else:
            found = super().dispatch(num_reqs, num_tokens, uniform, num_loras)
        return found.cg_mode, self.descriptor(found), found

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> torch.Tensor:
        return self._replay(self.descriptor(desc))

    def descriptor(self, desc: BatchExecutionDescriptor) -> BatchDescriptor:
        """Return the descriptor under which graph wrappers keep and find a graph."""
        is_full = desc.cg_mode == CUDAGraphMode.FULL
        has_lora = self.vllm_config.lora_config is not None
        return BatchDescriptor(
            desc.num_tokens,
            num_reqs=desc.num_reqs if is_full else None,
            uniform=desc.uniform_token_count is not None,
            has_lora=has_lora,  # as upstream names piecewise graphs
            num_active_loras=desc.num_active_loras,
        )

    # ----------------------------------------------------------------- capture, as V1's dispatcher

    @property
    def cudagraph_keys(self) -> dict[CUDAGraphMode, list[BatchExecutionDescriptor]]:
        return self._capture_descs

    def initialize_cudagraph_keys(self, mode: CUDAGraphMode, decode_query_len: int) -> None:
        """Find the candidates again, because the capture sizes have changed."""
        self.cudagraph_mode, self.decode_query_len = mode, decode_query_len
        self._candidates.clear()
        self._capture_descs.clear()
        self._init_candidates()

    def get_capture_descs(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """Return the graphs to capture: piecewise ones first, and of each mode the largest first.

        While upstream measures memory, full graphs are limited to the few that it captures for
        this.
        """
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
        """Return `capture_one`, wrapped to note the memory of each full graph while upstream
        measures it."""
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
    metadata, slot_mappings
        By layer. Without metadata, attention is left out.
    mode, descriptor
        The mode and the name of the graph. Graph wrappers read them to decide whether they capture,
        replay, or run eagerly.
    """
    arrays, num_tokens = in_flight.staged.device, in_flight.step.num_rank_tokens
    across, num_engines = None, vllm_config.parallel_config.data_parallel_size
    if num_engines > 1:  # all ranks capture and replay graphs of one size
        across = torch.full((num_engines,), num_tokens, dtype=torch.int32)
    with set_forward_context(
        metadata or None,
        vllm_config,
        num_tokens=num_tokens,
        num_tokens_across_dp=across,
        cudagraph_runtime_mode=mode,
        batch_descriptor=descriptor,
        slot_mapping=slot_mappings,
        is_padding=arrays.model_is_padding,
    ):
        return model(**inputs)
