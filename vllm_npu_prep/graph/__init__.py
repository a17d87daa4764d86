"""Graphs of a model's forward pass: captured and replayed on NPUs, and checked on the CPU fallback.

vLLM wraps the model and the parts between attention layers in `wrapper`, which captures one of two
kinds of graph: `npu` on devices, `fake_graph` on the CPU. `vllm_npu_prep.runner.graphs` starts the
captures at start-up.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass
class GraphCall:
    """One call of the model, or of a part of it, to capture or to replay.

    A graph reads the tensors among its arguments at the addresses that they had at capture.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # The step's attention metadata by layer; empty if attention is outside of the graph
    attn_metadata: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, Any] = field(default_factory=dict)  # by name, at least those of the metadata
    num_tokens: int = 0  # the capture size; 0 if it isn't known

    def __call__(self) -> Any:
        return self.run(*self.args, **self.kwargs)


class OutOfStreamsError(RuntimeError):
    """The device has too few streams left for a capture, which was not begun."""


class CaptureNotBegunError(RuntimeError):
    """A capture could not begin, and no other capture can begin in its memory pool."""


class Graph(Protocol):
    """The graph of one captured call."""

    def capture(self, call: GraphCall) -> Any:
        """Capture `call` and return its outputs, whose values are undefined."""

    def replay(self, call: GraphCall) -> Any:
        """Run the captured call with the metadata of `call`; return the captured outputs."""


class GraphPool(Protocol):
    """What the graphs of one wrapper share."""

    memory_pool: Any  # the handle of the memory in which the next graph is captured

    def new_graph(self) -> Graph: ...

    def close(self) -> None:
        """Free what was kept for captures; no more graphs will be captured."""


def make_pool(device_type: str, memory_pool: Any, num_streams: int = 1) -> GraphPool:
    """Make the pool for the kind of graph that a device has.

    `memory_pool` is vLLM's handle of the memory that all graphs share, None on the CPU fallback. A
    capture takes at most `num_streams` streams of the device (`vllm_npu_prep.graph.modes`).
    """
    if device_type == "npu":
        return importlib.import_module(f"{__name__}.npu").NPUGraphPool(memory_pool, num_streams)
    return importlib.import_module(f"{__name__}.fake_graph").CheckedGraphPool()


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return all tensors in the arguments or the results of a call, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        value = getattr(value, "tensors", {}).values()  # vLLM's IntermediateTensors
    return [tensor for item in value for tensor in tensors_of(item)] if value else []
