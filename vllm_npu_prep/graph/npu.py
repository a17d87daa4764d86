"""Graphs on NPUs: ``torch.npu.NPUGraph``, with attention updated to each step's lengths.

Ascend's attention takes lengths from the host, so a full graph needs the new lengths for each
replay. Each layer's attention is captured as a task group, and issued again on a second stream
during the replay. Before the attention, the replay waits for an external event that the second
stream records. Sources: ``torch.npu.graph_task_group_begin`` and related functions;
vllm-project/vllm-ascend does the same (13058 measures the cost).
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch_npu

from vllm_npu_prep.attention.kernels import AttentionCall
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.device.npu import free_streams
from vllm_npu_prep.graph import CaptureNotBegunError, GraphCall, OutOfStreamsError

weak_reference = torch_npu._C._weak_ref_tensor
"""Returns a tensor over the same memory that doesn't keep it alive: other graphs can use it."""


@dataclass
class AttentionTask:
    """The attention of one layer inside a full graph."""

    call: AttentionCall  # over weak references
    handle: object  # the task group's
    event: Any  # the ExternalEvent to record after this task; None if a later task has it


class AttentionTasks:
    """The attention of every layer inside one full graph, in order.

    Recording an event costs a call. One event for all layers would leave the device idle until the
    last layer has its lengths. So the first layer has its own event, and each later event serves
    twice as many layers as the one before it.
    """

    def __init__(self, workspaces: "Workspaces") -> None:
        self.workspaces = workspaces
        self.tasks: list[AttentionTask] = []
        self._left, self._segment = 0, 1

    def capture(self, call: AttentionCall, metadata: AscendMetadata) -> None:
        """Capture one layer's attention as a task that `rebind` can change."""
        stream = torch_npu.npu.current_stream()
        if not self._left:  # the first layer of a segment waits for all of the segment
            event = torch_npu.npu.ExternalEvent()
            event.wait(stream)
            event.reset(stream)  # asked for by the documentation; some releases do it in wait()
            self._event, self._left = event, self._segment
            self._segment *= 2
        call = call.over(weak_reference, self.workspaces.take(call, metadata))
        torch_npu.npu.graph_task_group_begin(stream)
        call(metadata)
        handle = torch_npu.npu.graph_task_group_end(stream)
        self._left -= 1
        self.tasks.append(AttentionTask(call, handle, None if self._left else self._event))

    def close(self) -> None:
        """End the last segment with the last layer."""
        if self.tasks:
            self.tasks[-1].event = self._event

    def rebind(self, attn_metadata: dict[str, AscendMetadata], stream: Any) -> None:
        """Issue each layer's attention again for this step, on `stream`, the current one."""
        self.workspaces.renew()
        try:
            for task in self.tasks:
                metadata = attn_metadata[task.call.layer_name]
                call = self.workspaces.for_step(task.call, metadata)
                torch_npu.npu.graph_task_update_begin(stream, task.handle)
                try:
                    call(metadata)
                except BaseException:
                    with suppress(RuntimeError):  # an open update takes no event
                        torch_npu.npu.graph_task_update_end(stream)
                    raise
                torch_npu.npu.graph_task_update_end(stream)
                if task.event is not None:
                    task.event.record(stream)
        except BaseException:
            # The replay waits for these events. Its results are lost, but it must not hang.
            for task in self.tasks:
                if task.event is not None:
                    task.event.record(stream)
            raise


class Workspaces:
    """The workspace of attention, shared by all layers and sizes: the largest is captured first."""

    def __init__(self) -> None:
        self._largest: torch.Tensor | None = None
        self._by_shape: dict[object, torch.Tensor | None] = {}
        self._of_step: dict[object, torch.Tensor | None] = {}

    def take(self, call: AttentionCall, metadata: AscendMetadata) -> torch.Tensor | None:
        """Return the workspace to capture `call` with; None if it needs none."""
        shape = call.query.shape, call.layer
        if shape not in self._by_shape:
            wanted = call.kernels.workspace(call, metadata)
            largest = self._largest
            if wanted is not None and (largest is None or largest.numel() < wanted.numel()):
                self._largest = wanted
            self._by_shape[shape] = None if wanted is None else self._largest
        return self._by_shape[shape]

    def renew(self) -> None:
        """Begin a step: the last step's replay has ended, so its workspaces are free."""
        self._of_step.clear()

    def for_step(self, call: AttentionCall, metadata: AscendMetadata) -> AttentionCall:
        """Return the call with a workspace for this step's lengths."""
        if call.kernels.workspace_serves_all_lengths:
            return call
        shape = call.query.shape, call.layer
        if shape not in self._of_step:
            self._of_step[shape] = call.kernels.workspace(call, metadata)
        return replace(call, workspace=self._of_step[shape])


class NPUGraphPool:
    """What graphs share: memory, workspaces, and the stream that updates lengths of full graphs.

    `memory_pool` is a handle of ``torch.npu.graph_pool_handle()``. A capture takes at most
    `num_streams` streams: its own, and those of communication in it.
    """

    def __init__(self, memory_pool: Any, num_streams: int = 1) -> None:
        self.memory_pool, self.num_streams = memory_pool, num_streams
        self.workspaces = Workspaces()
        # Failed captures are kept until start-up is over: deleting the last graph would delete the
        # memory pool, and no other graph could be captured.
        self.failed: list[Any] = []
        self._update_stream: Any = None
        self._replayed = torch_npu.npu.Event()

    def new_graph(self) -> "NPUGraph":
        return NPUGraph(self)

    def close(self) -> None:
        """Free what failed captures hold; no more graphs will be captured."""
        self.failed.clear()

    @contextmanager
    def updating(self) -> Iterator[Any]:
        """Switch to the update stream, after the last replay, whose tasks may not have run yet."""
        if self._update_stream is None:
            self._update_stream = torch_npu.npu.Stream()
        stream = torch_npu.npu.current_stream()
        with torch_npu.npu.stream(self._update_stream):
            self._update_stream.wait_event(self._replayed)
            try:
                yield self._update_stream
            finally:
                self._replayed.record(stream)


class NPUGraph:
    """The graph of one captured call on an NPU."""

    def __init__(self, pool: NPUGraphPool) -> None:
        self.pool = pool
        self.graph = torch_npu.npu.NPUGraph()
        self.attention = AttentionTasks(pool.workspaces)
        self.outputs: Any = None

    def capture(self, call: GraphCall) -> Any:
        """Capture on the current stream, which `vllm_npu_prep.runner.graphs` has set.

        Raises
        ------
        OutOfStreamsError
            If fewer streams are left than the capture may take. They are counted before it: without
            a stream for a fork inside of the capture, the thread of torch_npu's task queue would
            end, and copies to the device would no longer happen.
        CaptureNotBegunError
            With torch_npu's message, for example if the device has no stream left. torch_npu then
            counts the memory pool as in use by a capture for good ("already recording").
        """
        left, wanted = free_streams(), self.pool.num_streams
        if left is not None and left < wanted:
            raise OutOfStreamsError(f"{left} left on the device, a capture may take {wanted}")
        try:
            self.graph.capture_begin(pool=self.pool.memory_pool)
        except RuntimeError as error:
            self.pool.failed.append(self.graph)
            raise CaptureNotBegunError(str(error)) from error
        for metadata in call.attn_metadata.values():
            if hasattr(metadata, "tasks"):  # operators on recurrent states take no lists of lengths
                metadata.tasks = self.attention
        try:
            outputs = call()
            self.attention.close()
        except BaseException:
            self.pool.failed.append(self.graph)
            with suppress(RuntimeError):  # the capture may be broken already
                self.graph.capture_end()
            raise
        self.graph.capture_end()
        self.outputs = torch.utils._pytree.tree_map_only(torch.Tensor, weak_reference, outputs)
        return outputs

    def replay(self, call: GraphCall) -> Any:
        """Launch the graph, then issue the lengths for which it waits."""
        self.graph.replay()
        if self.attention.tasks:
            with self.pool.updating() as stream:
                self.attention.rebind(call.attn_metadata, stream)
        return self.outputs
