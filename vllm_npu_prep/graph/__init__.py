"""Graphs of a model's forward pass: captured and replayed on NPUs, checked on the CPU fallback.

vLLM wraps the model and its pieces in `wrapper`, which captures one of two kinds of graph: `npu` on
devices, `fake_graph` on the CPU. `vllm_npu_prep.runner.graphs` captures them at start-up.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass
class GraphCall:
    """One call of the model or of a piece of it, to capture or to replay.

    Attributes
    ----------
    run
        The model, or a piece of it.
    args, kwargs
        Its arguments; a graph reads their tensors at the addresses they had at capture.
    attn_metadata
        Attention metadata of the step by layer; empty if attention is outside of the graph.
    layers
        Attention layers by name; includes all layers in `attn_metadata`.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attn_metadata: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        """Run it now."""
        return self.run(*self.args, **self.kwargs)


class OutOfStreamsError(RuntimeError):
    """The device has too few streams left for a capture, which was not begun."""


class CaptureNotBegunError(RuntimeError):
    """A capture could not begin, and no other one can in the memory that it was to use."""


class Graph(Protocol):
    """One captured call."""

    def capture(self, call: GraphCall) -> Any:
        """Capture `call` and return its outputs, whose values are undefined."""

    def replay(self, call: GraphCall) -> Any:
        """Run the captured call with the metadata of `call`; returns the captured outputs."""


class GraphPool(Protocol):
    """What the graphs of one wrapper share.

    Attributes
    ----------
    memory_pool
        Where the next graph is captured.
    """

    memory_pool: Any

    def new_graph(self) -> Graph:
        """An empty graph."""

    def close(self) -> None:
        """No more graphs will be captured."""


def make_pool(device_type: str, memory_pool: Any, num_streams: int = 1) -> GraphPool:
    """Make the pool for the kind of graph that a device has.

    Parameters
    ----------
    device_type
        As in vLLM's device config.
    memory_pool
        vLLM's handle of the memory that all graphs share; None on the CPU fallback.
    num_streams
        Streams of the device that a capture may take (`vllm_npu_prep.graph.config`).
    """
    if device_type == "npu":
        return importlib.import_module(f"{__name__}.npu").NPUGraphPool(memory_pool, num_streams)
    return importlib.import_module(f"{__name__}.fake_graph").CheckedGraphPool()


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in the arguments or the results of a call, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        value = getattr(value, "tensors", {}).values()  # vLLM's IntermediateTensors
    return [tensor for item in value for tensor in tensors_of(item)] if value else []
