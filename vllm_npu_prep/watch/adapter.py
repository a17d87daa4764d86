"""What the watch asks of a runner: where a step's arrays are, and when they are ready."""

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch

from vllm_npu_prep.watch.runner_step import RunnerStep


class Wraps:
    """Methods of objects that are wrapped until `undo`; classes are left as they are.

    Parameters
    ----------
    safely
        Calls what is called beside a method, so that its errors don't reach the runner.
    """

    def __init__(self, safely: Callable[..., None]) -> None:
        self._safely = safely
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Any]) -> None:
        """Replace a method of one object by what `around` makes of it."""
        own, method = vars(owner), getattr(owner, name)
        before = own.get(name)

        def undo() -> None:
            if before is None:
                own.pop(name, None)
            else:
                own[name] = before

        own[name] = around(method)
        self._undo.append(undo)

    def before(self, owner: Any, name: str, look: Callable[..., None]) -> None:
        """Have `look` called with the arguments of a method before it."""

        def around(method: Callable[..., Any]) -> Any:
            def watched(*args: Any, **kwargs: Any) -> Any:
                self._safely(look, *args)
                return method(*args, **kwargs)

            return watched

        self.put(owner, name, around)

    def after(self, owner: Any, name: str, look: Callable[..., None]) -> None:
        """Have `look` called with the result and the arguments of a method after it."""

        def around(method: Callable[..., Any]) -> Any:
            def watched(*args: Any, **kwargs: Any) -> Any:
                result = method(*args, **kwargs)
                self._safely(look, result, *args)
                return result

            return watched

        self.put(owner, name, around)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


class RunnerAdapter(Protocol):
    """Reads the steps of one kind of runner, and changes nothing.

    Attributes
    ----------
    name
        The runner, for people.
    differs
        What it does in another way than this plugin's runners, on purpose: sentences.
    """

    name: str
    differs: tuple[str, ...]

    def __init__(self, runner: Any) -> None: ...

    def tables(self) -> tuple[list[int], list[int]]:
        """Return the block size and the columns of each group's block table."""

    def before_forward(self, wraps: Wraps, see: Callable[[], None]) -> None:
        """Have `see` called in each step once its inputs are on the device or on their way."""

    def read(self, output: Any) -> RunnerStep:
        """Read the step that has just been prepared for a scheduler's output."""


def on_device(buffer: Any) -> torch.Tensor:
    """Return the device's tensor of one of vLLM's pairs of buffers, or the tensor itself."""
    return getattr(buffer, "gpu", buffer)


def to_host(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return copies of a step's arrays as int64, by one copy and one wait.

    The copy is in the order of the stream that the step runs on, so it has what the model gets.
    """
    flat = torch.cat([tensor.reshape(-1).to(torch.int64) for tensor in tensors.values()])
    parts = np.split(flat.cpu().numpy(), np.cumsum([t.numel() for t in tensors.values()])[:-1])
    return {name: p.reshape(t.shape) for (name, t), p in zip(tensors.items(), parts)}


def time_to_read(device: torch.device, num_tokens: int) -> float:
    """Return the seconds that `to_host` takes for as many tokens, once it has run before."""
    arrays = {str(n): torch.zeros(num_tokens, dtype=torch.int64, device=device) for n in range(3)}
    to_host(arrays)
    started = perf_counter()
    to_host(arrays)
    return perf_counter() - started


class LastSamples:
    """What the last step sampled, kept on the device until the next step is read."""

    def __init__(self) -> None:
        self._req_ids: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def note(
        self, req_ids: list[str], tokens: torch.Tensor, counts: torch.Tensor | None = None
    ) -> None:
        """Note tokens ``[R, 1 + drafts]``, of which each request got the first `counts`.

        Without counts there is -1 in place of the others.
        """
        self._req_ids = list(req_ids)
        counts = (tokens >= 0).sum(1) if counts is None else counts.clone()
        self.tensors = {"sampled": tokens.clone(), "counts": counts}

    def take(self, read: dict[str, np.ndarray]) -> dict[str, list[int]]:
        """Take out of what was read the tokens that each request got."""
        rows = zip(self._req_ids, read.pop("sampled", ()), read.pop("counts", ()))
        return {req_id: tokens[:count].tolist() for req_id, tokens, count in rows}


def host_lists(metadata: Any, num_reqs: int) -> dict[str, np.ndarray]:
    """Return the lists of ``AscendMetadata``, from which kernels take lengths and ends of queries.

    They are numbers on the host, and in a full graph replayed with it: no tensor of the device.
    """
    for layer in metadata.values() if isinstance(metadata, dict) else ():
        lengths = getattr(layer, "seq_lens_list", None)
        ends = getattr(layer, "actual_seq_lengths_q", None)
        if lengths is not None and ends is not None:
            starts = np.array([0, *ends[:num_reqs]])
            return {"query_start_loc": starts, "seq_lens": np.array(lengths[:num_reqs])}
    return {}


KINDS = {"FULL": "full graph", "PIECEWISE": "piecewise graphs"}
NO_GRAPH = "eager: no graph for it"
