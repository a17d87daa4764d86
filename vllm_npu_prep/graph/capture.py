"""Start-up: capture a graph for every size, say what it took, go on with fewer out of memory."""

import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.logger import init_logger

from vllm_npu_prep.graph.wrapper import GraphWrapper
from vllm_npu_prep.prep.capture_sizes import largest_decode
from vllm_npu_prep.progress import waiting

if TYPE_CHECKING:
    from vllm_npu_prep.graph.runner import GraphRunner

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only


class Captured(NamedTuple):
    """One line of the start-up table."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    seconds: float
    nbytes: int


def capture_graphs(runner: "GraphRunner") -> int:
    """Capture a graph for every descriptor of the runner's dispatcher, the largest first.

    A size for which memory does not suffice is given up for all kinds of graph, and so is every
    other one of those that are left, but for the largest decode.

    Returns
    -------
    int
        Bytes of the device that the graphs took.
    """
    dispatcher = runner.cudagraph_dispatcher
    captured: list[Captured] = []
    given_up: set[int] = set()
    scheduler = runner.scheduler_config
    spared = largest_decode(
        scheduler.max_num_seqs, runner.uniform_decode_query_len, scheduler.max_num_batched_tokens
    )
    set_cudagraph_capturing_enabled(True)
    all_descriptors = dispatcher.get_capture_descs()
    num_all = sum(len(descriptors) for _, descriptors in all_descriptors)

    def status() -> str:
        return f"{len(captured)} of {num_all}"

    try:
        with (
            runner.prep_device.capturing(),
            _without_garbage_collection(runner),
            waiting("Capturing graphs", logger.info, status),
        ):
            for mode, descriptors in all_descriptors:
                for index, descriptor in enumerate(descriptors):
                    if descriptor.num_tokens in given_up:
                        continue
                    try:
                        captured.append(_capture(runner, mode, descriptor))
                    except torch.OutOfMemoryError as error:
                        given_up.add(descriptor.num_tokens)
                        smaller = dict.fromkeys(d.num_tokens for d in descriptors[index + 1 :])
                        left = [size for size in smaller if size not in given_up | {spared}][::2]
                        given_up |= {*left}
                        _say_out_of_memory(descriptor.num_tokens, left, error)
    finally:
        set_cudagraph_capturing_enabled(False)
        runner.maybe_remove_all_loras(runner.lora_config)  # made up, under ids that requests use
        for wrapper in GraphWrapper._all_instances:
            if isinstance(wrapper, GraphWrapper):
                wrapper.close_pools()
    if given_up:
        _forget_sizes(runner, given_up)
        captured = [each for each in captured if each.descriptor.num_tokens not in given_up]
    logger.info("vllm_npu_prep graphs:\n%s", table(captured, runner.prep_device.computes_on_host))
    return sum(each.nbytes for each in captured)


def _without_garbage_collection(
    runner: "GraphRunner",
) -> contextlib.AbstractContextManager[None]:
    """A capture does not survive it. Where nothing is captured it would cost time only."""
    if runner.prep_device.computes_on_host:
        return contextlib.nullcontext()
    return runner._freeze_gc()


def _capture(runner: "GraphRunner", mode: CUDAGraphMode, descriptor: BatchDescriptor) -> Captured:
    device = runner.prep_device
    free, _ = device.memory_info()
    start = time.perf_counter()
    runner._warmup_and_capture(descriptor, cudagraph_runtime_mode=mode)
    device.synchronize()
    seconds = time.perf_counter() - start
    # What a first run had cached is given back in between: never less than nothing.
    taken = max(0, free - device.memory_info()[0])
    return Captured(mode, descriptor, seconds, 0 if device.computes_on_host else taken)


def _say_out_of_memory(num_tokens: int, left: list[int], error: Exception) -> None:
    logger.warning(
        "Out of memory while capturing the graph of %d tokens (%s). Left out, too: %s. Lower "
        "--gpu-memory-utilization or give fewer cudagraph_capture_sizes.",
        num_tokens,
        str(error).partition("\n")[0],
        ", ".join(map(str, left)) or "nothing",
    )


def _forget_sizes(runner: "GraphRunner", sizes: set[int]) -> None:
    """Let the dispatcher pad to the sizes that were captured for every kind of graph."""
    compilation, dispatcher = runner.compilation_config, runner.cudagraph_dispatcher
    kept = [size for size in compilation.cudagraph_capture_sizes if size not in sizes]
    compilation.cudagraph_capture_sizes = kept
    compilation.max_cudagraph_capture_size = max(kept, default=0)
    mode = dispatcher.cudagraph_mode if kept else CUDAGraphMode.NONE
    for keys in dispatcher.cudagraph_keys.values():
        keys.clear()
    for wrapper in GraphWrapper._all_instances:
        graphs = wrapper.concrete_cudagraph_entries
        for descriptor in [each for each in graphs if each.num_tokens in sizes]:
            del graphs[descriptor]
    dispatcher.initialize_cudagraph_keys(mode, runner.uniform_decode_query_len)
    logger.warning("Graphs remain for %s tokens.", ", ".join(map(str, kept)) or "no number of")


def table(captured: list[Captured], computes_on_host: bool) -> str:
    """The start-up table: capture time and memory of each size, and their sums.

    Parameters
    ----------
    captured
        In the order of capture.
    computes_on_host
        Memory of graphs is the device's: nothing is known of it where there is none.
    """
    modes = list(dict.fromkeys(each.mode for each in captured))
    cells = {(each.mode, _size(each.descriptor)): each for each in captured}
    sizes = sorted({size for _, size in cells}, reverse=True)

    def columns(texts: list[str]) -> str:
        return "".join(f"{text:>26}" for text in texts)

    def cell(each: Captured | None) -> str:
        if each is None:
            return "-"
        memory = "" if computes_on_host else f"{each.nbytes / (1 << 20):>9.1f} MiB"
        return f"{each.seconds:>9.2f} s{memory}"

    lines = [f"  {'tokens':<20}{columns([mode.name for mode in modes])}"]
    lines += [
        f"  {size[1]:<20}{columns([cell(cells.get((m, size))) for m in modes])}" for size in sizes
    ]
    sums = [
        Captured(
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
    """What a line of the table is sorted and called by."""
    adapters = ", LoRA" if descriptor.has_lora else ""
    return descriptor.num_tokens, f"{descriptor.num_tokens}{adapters}"
