"""Captures graphs at start-up, fewer if memory or streams run out, and checks fake replays."""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.logger import init_logger

from vllm_npu_prep.compat.worker import measured_as_captured
from vllm_npu_prep.device import Device
from vllm_npu_prep.graph import OutOfStreamsError
from vllm_npu_prep.graph.fake_graph import check_padding
from vllm_npu_prep.graph.wrapper import GraphWrapper
from vllm_npu_prep.prep.capture_sizes import fitting_sizes, thin_sizes
from vllm_npu_prep.prep.padding import GraphMode
from vllm_npu_prep.progress import log_while_waiting
from vllm_npu_prep.runner.preparer import Preparer
from vllm_npu_prep.runner.step import StepInFlight

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only


class CapturedGraph(NamedTuple):
    """One line of the start-up table: how long a graph's capture took, and its memory."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    seconds: float
    nbytes: int


class CaptureOne(Protocol):
    """Warms up and captures one graph: the runner's own method."""

    def __call__(self, desc: BatchDescriptor, cudagraph_runtime_mode: CUDAGraphMode) -> object: ...


class Dispatcher(Protocol):
    """The owner of the sizes of graphs: vLLM's dispatcher for V1, our graph manager for V2."""

    cudagraph_mode: CUDAGraphMode

    @property
    def cudagraph_keys(self) -> Mapping[CUDAGraphMode, Any]:
        """Sets or lists of what is to be captured, by mode."""

    def initialize_cudagraph_keys(self, mode: CUDAGraphMode, decode_query_len: int, /) -> None:
        """Make `cudagraph_keys` for the sizes that the config has now."""

    def get_capture_descs(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """Return the graphs to capture: piecewise ones first, of each kind the largest first."""


class Graphs:
    """The engine's graphs.

    Parameters
    ----------
    dispatcher, compilation
        The dispatcher and upstream's config, both of which have the sizes.
    decode_query_len
        The tokens of a decode: one and its drafts.
    largest_decode
        The tokens of the largest decode, whose size is dropped last.
    agree
        Returns the sizes that any rank has given up, from those that this rank has given up: ranks
        must pad alike.

    Attributes
    ----------
    most_rows
        The most requests of a full graph; None: no limit. It is known once the cache is allocated.
    """

    def __init__(
        self,
        device: Device,
        dispatcher: Dispatcher,
        compilation: CompilationConfig,
        *,
        decode_query_len: int = 1,
        largest_decode: int = 1,
        max_num_reqs: int = 1,
        max_model_len: int = 1,
        agree: Callable[[set[int]], set[int]] = lambda given_up: given_up,
    ) -> None:
        self.device, self.agree = device, agree
        self.dispatcher = dispatcher
        self.compilation = compilation
        self.decode_query_len, self.largest_decode = decode_query_len, largest_decode
        self.max_num_reqs, self.max_model_len = max_num_reqs, max_model_len
        self.most_rows: int | None = None

    def captured(self) -> tuple[GraphMode, int]:
        """Return the engine's graph mode, and its largest capture size in tokens."""
        mode = GraphMode(self.dispatcher.cudagraph_mode.name)
        return mode, self.compilation.max_cudagraph_capture_size or 0

    # ----------------------------------------------------------------- start-up

    def capture(
        self,
        capture_one: CaptureOne,
        without_collection: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> int:
        """Capture a graph for every descriptor of the dispatcher, the largest first.

        If memory doesn't suffice for a size, it is dropped for all kinds of graph, and so is every
        second one of the remaining sizes, except that of the largest decode. Every size takes the
        same streams. So if streams run out, sizes that were captured are dropped, evenly, and the
        capture is tried again: the largest size, that of the largest decode and that of one decode
        stay.

        Parameters
        ----------
        capture_one
            Captures one graph.
        without_collection
            Returns a context without garbage collection, which would break a capture. It is not
            entered on the CPU fallback, which captures nothing.

        Returns
        -------
        int
            The bytes of the device that the graphs took.
        """
        captured: list[CapturedGraph] = []
        given_up = self._sizes_of_too_many_rows()
        set_cudagraph_capturing_enabled(True)
        all_descriptors = self.dispatcher.get_capture_descs()
        num_all = sum(len(descriptors) for _, descriptors in all_descriptors)
        on_host = self.device.computes_on_host

        def status() -> str:
            return f"{len(captured)} of {num_all}"

        try:
            with (
                self.device.capturing(),
                contextlib.nullcontext() if on_host else without_collection(),
                log_while_waiting("Capturing graphs", logger.info, status),
            ):
                for mode, descriptors in all_descriptors:
                    for index, descriptor in enumerate(descriptors):
                        done = False
                        while not done and descriptor.num_tokens not in given_up:
                            try:
                                captured.append(self._capture(capture_one, mode, descriptor))
                                done = True
                            except torch.OutOfMemoryError as error:
                                left = self._without_memory(descriptors[index:], given_up)
                                given_up |= {descriptor.num_tokens, *left}
                                _log_left_out(descriptor.num_tokens, left, error)
                            except RuntimeError as error:
                                if not is_out_of_streams(error):
                                    raise
                                left = self._without_streams(
                                    mode, descriptor.num_tokens, captured, given_up
                                )
                                given_up |= {*left}
                                _delete_graphs(given_up)  # which gives back their streams
                                _log_left_out(descriptor.num_tokens, left, error)
        finally:
            set_cudagraph_capturing_enabled(False)
            for wrapper in GraphWrapper._all_instances:
                if isinstance(wrapper, GraphWrapper):
                    wrapper.close_pools()
        given_up = self.agree(given_up)
        if given_up:
            self._forget_sizes(given_up)
            captured = [each for each in captured if each.descriptor.num_tokens not in given_up]
        logger.info("vllm_npu_prep graphs:\n%s", table(captured, on_host))
        return sum(each.nbytes for each in captured)

    def _sizes_of_too_many_rows(self) -> set[int]:
        """Return sizes whose full graphs have more requests than one call of attention takes."""
        if self.most_rows is None:
            return set()
        sizes = {
            descriptor.num_tokens
            for mode, descriptors in self.dispatcher.get_capture_descs()
            for descriptor in descriptors
            if mode == CUDAGraphMode.FULL and (descriptor.num_reqs or 0) > self.most_rows
        }
        if sizes:
            logger.warning(
                "Graphs of %s tokens are left out: their requests have a block each at least, and "
                "fused attention of this CANN takes at most %d in a batch.",
                ", ".join(map(str, sorted(sizes))),
                self.most_rows,
            )
        return sizes

    def _without_memory(self, descriptors: list[BatchDescriptor], given_up: set[int]) -> list[int]:
        """Return sizes to give up after the first of `descriptors` had too little memory."""
        sizes = dict.fromkeys(each.num_tokens for each in descriptors)
        spared = {*given_up, descriptors[0].num_tokens, self.largest_decode}
        return [size for size in sizes if size not in spared][::2]

    def _without_streams(
        self,
        mode: CUDAGraphMode,
        num_tokens: int,
        captured: list[CapturedGraph],
        given_up: set[int],
    ) -> list[int]:
        """Return sizes to give up so that a graph of `num_tokens` has streams, or its own size.

        Graphs of the first kind take the most streams. So as many sizes fit as were captured of
        this kind, or one fewer, if all were.
        """
        all_descriptors = self.dispatcher.get_capture_descs()
        first_mode = all_descriptors[0][0]
        sizes = {each.num_tokens for _, some in all_descriptors for each in some} - given_up
        whole = {each.descriptor.num_tokens for each in captured if each.mode == first_mode} & sizes
        if mode == first_mode:
            whole.discard(num_tokens)  # with LoRA, one of its two graphs may be there
        fitting = min(len(whole), len(sizes) - 1)
        keep = [self.largest_decode, self.decode_query_len]
        kept = thin_sizes(sizes, fitting, keep) if fitting else []
        return sorted(sizes - {*kept}, reverse=True)

    def _capture(
        self, capture_one: CaptureOne, mode: CUDAGraphMode, descriptor: BatchDescriptor
    ) -> CapturedGraph:
        free, _ = self.device.memory_info()
        start = time.perf_counter()
        capture_one(descriptor, cudagraph_runtime_mode=mode)
        self.device.synchronize()
        seconds = time.perf_counter() - start
        # Memory that a first run cached may be freed in between, so clamp at 0.
        taken = max(0, free - self.device.memory_info()[0])
        return CapturedGraph(
            mode, descriptor, seconds, 0 if self.device.computes_on_host else taken
        )

    def _forget_sizes(self, sizes: set[int]) -> None:
        """Let the dispatcher pad only to sizes that were captured for every kind of graph."""
        compilation, dispatcher = self.compilation, self.dispatcher
        kept = [size for size in compilation.cudagraph_capture_sizes if size not in sizes]
        if dispatcher.cudagraph_mode == CUDAGraphMode.FULL:
            # With a smaller size gone, batches of the next larger one have more padding.
            kept = fitting_sizes(kept, self.max_num_reqs, self.max_model_len)
            sizes.update({*compilation.cudagraph_capture_sizes} - {*kept})
        compilation.cudagraph_capture_sizes = kept
        compilation.max_cudagraph_capture_size = max(kept, default=0)
        mode = dispatcher.cudagraph_mode if kept else CUDAGraphMode.NONE
        for keys in dispatcher.cudagraph_keys.values():
            keys.clear()
        _delete_graphs(sizes)
        dispatcher.initialize_cudagraph_keys(mode, self.decode_query_len)
        sizes_left = f"{', '.join(map(str, kept))} tokens" if kept else "none"
        logger.warning("Graphs that were captured: %s.", sizes_left)

    # ----------------------------------------------------------------- steps

    def check_padding(self, in_flight: StepInFlight, preparer: Preparer) -> None:
        """On the CPU fallback, check what a graph is about to read past the step."""
        step = in_flight.step
        if self.device.computes_on_host and step.padding.mode is not GraphMode.NONE:
            tables = preparer.block_tables.device_rows(step.padding.num_reqs_padded)
            local_tables: dict[int, Any] = {
                group: in_flight.metadata[layer_names[0]].block_tables
                for group, builder, layer_names in preparer.builders
                if builder.attention_chunk_size is not None
            }
            check_padding(step, in_flight.staged, tables, local_tables)


def measure_graphs(device: Device, profile: Callable[[], int]) -> int:
    """Return the bytes that graphs will take.

    It returns 0 with a warning if the device has no streams to measure it: fewer graphs will be
    captured. ``profile`` is upstream's measurement, which captures some graphs.
    """
    try:
        with device.host_streams(), device.capturing(), measured_as_captured():
            return profile()
    except RuntimeError as error:
        if not is_out_of_streams(error):
            raise
        logger.warning(
            "Out of streams while measuring the memory of graphs (%s). None is set aside for "
            "them: if they run out of it, lower --gpu-memory-utilization.",
            str(error).partition("\n")[0],
        )
        return 0


OUT_OF_STREAMS = "207008"
"""CANN's error if a device has no streams left (``ACL_ERROR_RT_NO_STREAM_RESOURCE``)."""


def is_out_of_streams(error: RuntimeError) -> bool:
    """Return whether a capture failed for want of streams.

    Where CANN doesn't tell how many are left, the capture fails; torch_npu has no class of its own
    for this error, only CANN's number in the text.
    """
    return isinstance(error, OutOfStreamsError) or OUT_OF_STREAMS in str(error)


def _delete_graphs(sizes: set[int]) -> None:
    for wrapper in GraphWrapper._all_instances:
        graphs = wrapper.concrete_cudagraph_entries
        for descriptor in [each for each in graphs if each.num_tokens in sizes]:
            del graphs[descriptor]


def _log_left_out(num_tokens: int, left: list[int], error: Exception) -> None:
    of_memory = isinstance(error, torch.OutOfMemoryError)
    logger.warning(
        "Out of %s while capturing the graph of %d tokens (%s). Left out for it: %s. %sive "
        "fewer cudagraph_capture_sizes.",
        "memory" if of_memory else "streams",
        num_tokens,
        str(error).partition("\n")[0],
        ", ".join(map(str, left)) or "nothing",
        "Lower --gpu-memory-utilization or g" if of_memory else "G",
    )


def table(captured: list[CapturedGraph], computes_on_host: bool) -> str:
    """Return the start-up table: capture time and memory of each size, and their sums.

    The memory of graphs is left out if ``computes_on_host``: it is known on devices only.
    """
    modes = list(dict.fromkeys(each.mode for each in captured))
    cells = {(each.mode, _size(each.descriptor)): each for each in captured}
    sizes = sorted({size for _, size in cells}, reverse=True)

    def columns(texts: list[str]) -> str:
        return "".join(f"{text:>26}" for text in texts)

    def cell(each: CapturedGraph | None) -> str:
        if each is None:
            return "-"
        memory = "" if computes_on_host else f"{each.nbytes / (1 << 20):>9.1f} MiB"
        return f"{each.seconds:>9.2f} s{memory}"

    lines = [f"  {'tokens':<20}{columns([mode.name for mode in modes])}"]
    lines += [
        f"  {size[1]:<20}{columns([cell(cells.get((m, size))) for m in modes])}" for size in sizes
    ]
    sums = [
        CapturedGraph(
            mode,
            captured[0].descriptor,
            sum(each.seconds for each in captured if each.mode == mode),
            sum(each.nbytes for each in captured if each.mode == mode),
        )
        for mode in modes
    ]
    lines.append(f"  {f'all {len(sizes)} sizes':<20}{columns([cell(each) for each in sums])}")
    return "\n".join(lines)


def _size(descriptor: BatchDescriptor) -> tuple[int, str]:
    adapters = ", LoRA" if descriptor.num_active_loras else ""
    return descriptor.num_tokens, f"{descriptor.num_tokens}{adapters}"
