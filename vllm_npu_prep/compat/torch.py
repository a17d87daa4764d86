"""Names of torch: private ones that the plugin uses, and patches of those that vLLM uses on every
device without checking.
"""

import contextlib
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch


class NoOpEvent:
    """Replaces a CUDA event on devices whose calls return with their work complete."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    _recorded = 0.0

    def record(self, *args: object) -> None:
        self._recorded = perf_counter()

    def elapsed_time(self, end: "NoOpEvent") -> float:
        """Return milliseconds, as torch does."""
        return 1000 * (end._recorded - self._recorded)

    def synchronize(self) -> None: ...

    def wait(self, *args: object) -> None: ...

    def query(self) -> bool:
        return True


class NoOpStream:
    """Replaces a CUDA stream on devices whose calls return with their work complete."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...


def silence_accelerator_calls() -> None:
    """Let upstream's ``torch.accelerator`` calls do nothing if there is no accelerator.

    Engine, worker and API process call these at shutdown and after profiling
    (``cleanup_dist_env_and_memory``, ``GPUModelRunner.shutdown``), and they raise. So does a KV
    connector that asks for the number of its device.
    """
    if torch.accelerator.is_available():
        return

    def synchronize(*args: object, **kwargs: object) -> None: ...

    def empty_cache(*args: object, **kwargs: object) -> None: ...

    def empty_host_cache(*args: object, **kwargs: object) -> None: ...

    def current_device_index() -> int:
        return 0

    # Distinct objects: Dynamo keys its handlers on them.
    torch.accelerator.synchronize = synchronize
    torch.accelerator.empty_cache = empty_cache
    torch.accelerator.empty_host_cache = empty_host_cache
    torch.accelerator.current_device_index = current_device_index


def let_streams_do_nothing() -> None:
    """Let upstream ask for streams and events of an accelerator if there is none.

    Its exchange of experts does, in a thread of its own, and torch raises.
    """
    if torch.accelerator.is_available():
        return

    def set_stream(stream: object) -> None: ...

    torch.accelerator.current_stream = NoOpStream  # type: ignore[assignment]
    torch.accelerator.set_stream = set_stream
    torch.Event = NoOpEvent  # type: ignore[assignment,misc]


def no_op_cuda_streams() -> contextlib.AbstractContextManager[None]:
    return CudaNames(
        Event=NoOpEvent,
        Stream=NoOpStream,
        current_stream=NoOpStream,
        stream=lambda stream: contextlib.nullcontext(),
    )


class CudaNames(contextlib.AbstractContextManager[None]):
    """Gives names of ``torch.cuda`` to another device's streams and events.

    Upstream's runner names ``torch.cuda`` directly in its constructor and in its asynchronous
    outputs. The context covers those calls alone, so that nothing else in the process sees the
    stand-ins. Each step enters one, so it is no generator, which would take three times as long.
    """

    def __init__(self, **stand_ins: Any) -> None:
        self._stand_ins = stand_ins

    def __enter__(self) -> None:
        names = vars(torch.cuda)
        self._saved = {name: names[name] for name in self._stand_ins}
        self._saved_event = torch.Event
        names.update(self._stand_ins)
        torch.Event = self._stand_ins["Event"]  # type: ignore[misc]

    def __exit__(self, *_: object) -> None:
        vars(torch.cuda).update(self._saved)
        torch.Event = self._saved_event  # type: ignore[misc]


class PackedLinear(NamedTuple):
    """Operators of oneDNN, which torch keeps for its own compiler."""

    pack: Callable[[torch.Tensor], torch.Tensor]  # [N, K] to an opaque tensor of this shape
    multiply: Callable[..., torch.Tensor]  # x, packed weight, bias, "none", [], ""


def packed_linear() -> PackedLinear | None:
    """Return the operators, or None if the installed torch lacks one."""
    names = "_reorder_linear_weight", "_linear_pointwise"
    found: list[Any] = [getattr(torch.ops.mkldnn, name, None) for name in names]
    return PackedLinear(*(each.default for each in found)) if all(found) else None
