"""Rows of collectives: each operator of HCCL that process groups use, on every dtype.

Two ranks suffice to show what an operator does. The rows of more ranks send between each pair of
devices, and report how fast; they judge only whether the bytes arrive.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch_npu

from vllm_npu_prep.verify.outcome import Outcome, Verdict, worst_of
from vllm_npu_prep.verify.row import Row, RowContext, compare, normal
from vllm_npu_prep.wording import counted

REDUCED = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32),
)
"""Dtypes that HCCL reduces on A2 and A3."""
MOVED = (*REDUCED, torch.uint8, torch.bool, torch.float64)
NO_PRODUCT = (torch.int16, torch.bfloat16)
"""Dtypes whose products HCCL's reference excludes."""
SIZES = (1, 1000, 300_000)
OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
}
TEAMS = (2, 4, 8, 16)
GotAndExpected = tuple[torch.Tensor, torch.Tensor]
"""The device's result, and the expected one."""
Reductions = Iterator[GotAndExpected]
LATENCY_CALLS, BANDWIDTH_CALLS = 50, 5
BANDWIDTH_BYTES = 64 << 20


@contextmanager
def team(context: RowContext) -> Iterator[None]:
    dist.init_process_group(
        "hccl", init_method=context.rendezvous, rank=context.rank, world_size=context.num_ranks
    )
    try:
        yield
        context.device.synchronize()
    finally:
        dist.destroy_process_group()


def of_rank(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a rank's contribution, on the host: small, so that integers don't overflow."""
    generator = torch.Generator().manual_seed(1 + rank)
    numbers = normal(generator, size, dtype=torch.float32)
    if dtype.is_floating_point:
        return numbers.to(dtype)
    return (numbers * 3).round().clamp(-9, 9).abs().to(dtype)


def of_all(context: RowContext, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [of_rank(rank, size, dtype) for rank in range(context.num_ranks)]


def reduced(parts: list[torch.Tensor], name: str) -> torch.Tensor:
    """Reduce the parts in float64, or integers in int64, which is exact."""
    wide = torch.float64 if parts[0].dtype.is_floating_point else torch.int64
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = OPERATIONS[name](total, part.to(wide))
    return total


# ----------------------------------------------------------------- reductions


def _reductions(
    run: Callable[[RowContext, torch.dtype, str, int], Reductions],
    context: RowContext,
) -> Outcome:
    """Run a reduction with each operation on every dtype; it yields each pair that it compares."""
    outcomes = []
    with team(context):
        for dtype, name, size in itertools.product(REDUCED, OPERATIONS, SIZES):
            if name == "PRODUCT" and dtype in NO_PRODUCT:
                continue
            given = f"{name} of {size:,} {str(dtype).removeprefix('torch.')}"
            for got, expected in run(context, dtype, name, size):
                got = got if dtype.is_floating_point else got.to(torch.int64)
                outcomes.append(compare(got, expected, given, where=("element",)))
    given = f"{len(outcomes)} reductions, {counted(context.num_ranks, 'rank')}"
    return worst_of(outcomes, given)


def all_reduce(context: RowContext, dtype: torch.dtype, name: str, size: int) -> Reductions:
    parts = of_all(context, size, dtype)
    mine = context.put(parts[context.rank])
    dist.all_reduce(mine, getattr(dist.ReduceOp, name))
    yield mine, reduced(parts, name)


def reduce(context: RowContext, dtype: torch.dtype, name: str, size: int) -> Reductions:
    """Reduce to one rank, each rank in turn."""
    parts = of_all(context, size, dtype)
    for root in range(context.num_ranks):
        mine = context.put(parts[context.rank])
        dist.reduce(mine, root, getattr(dist.ReduceOp, name))
        if root == context.rank:
            yield mine, reduced(parts, name)


def reduce_scatter(context: RowContext, dtype: torch.dtype, name: str, size: int) -> Reductions:
    parts = of_all(context, size * context.num_ranks, dtype)
    mine = torch.empty(size, dtype=dtype, device=context.device.device)
    dist.reduce_scatter_single(mine, context.put(parts[context.rank]), getattr(dist.ReduceOp, name))
    yield mine, reduced(parts, name).chunk(context.num_ranks)[context.rank]


# ----------------------------------------------------------------- what only moves


def _moves(
    run: Callable[[RowContext, torch.dtype, int], GotAndExpected],
    context: RowContext,
    dtypes: tuple[torch.dtype, ...] = MOVED,
) -> Outcome:
    outcomes = []
    with team(context):
        for dtype, size in itertools.product(dtypes, SIZES):
            got, expected = run(context, dtype, size)
            given = f"{size:,} {str(dtype).removeprefix('torch.')}"
            outcomes.append(compare(got, expected, given, tolerance=0.0, where=("element",)))
    return worst_of(outcomes, f"{len(dtypes)} dtypes, {counted(context.num_ranks, 'rank')}")


def all_gather(context: RowContext, dtype: torch.dtype, size: int) -> GotAndExpected:
    parts = of_all(context, size, dtype)
    got = torch.empty(size * context.num_ranks, dtype=dtype, device=context.device.device)
    dist.all_gather_single(got, context.put(parts[context.rank]))
    return got, torch.cat(parts)


def gather_lists(context: RowContext, dtype: torch.dtype, size: int) -> GotAndExpected:
    """Gather into a list, which torch_npu pads to 512 bytes; the plugin doesn't do so with bool."""
    parts = of_all(context, size, dtype)
    got = [torch.empty(size, dtype=dtype, device=context.device.device) for _ in parts]
    dist.all_gather(got, context.put(parts[context.rank]))
    return torch.cat(got), torch.cat(parts)


def broadcast(context: RowContext, dtype: torch.dtype, size: int) -> GotAndExpected:
    root = context.num_ranks - 1
    got = context.put(of_rank(context.rank, size, dtype))
    dist.broadcast(got, root)
    return got, of_rank(root, size, dtype)


def all_to_all(context: RowContext, dtype: torch.dtype, size: int) -> GotAndExpected:
    """Let rank a send a + b + 1 pieces to rank b."""
    ranks = range(context.num_ranks)
    sizes = [[(a + b + 1) * size for b in ranks] for a in ranks]
    parts = [of_rank(a, sum(sizes[a]), dtype) for a in ranks]
    received = [sizes[a][context.rank] for a in ranks]
    got = torch.empty(sum(received), dtype=dtype, device=context.device.device)
    dist.all_to_all_single(got, context.put(parts[context.rank]), received, sizes[context.rank])
    return got, torch.cat([parts[a].split(sizes[a])[context.rank] for a in ranks])


# ----------------------------------------------------------------- graphs and pairs


def in_a_graph(context: RowContext) -> Outcome:
    outcomes = []
    with team(context):
        x = torch.zeros(1000, device=context.device.device)
        dist.all_reduce(x)  # makes the communicator
        graph = torch_npu.npu.NPUGraph()
        with torch_npu.npu.graph(graph):
            y = x + context.rank
            dist.all_reduce(y)
        for value in (0.0, 3.0, -2.0):
            x.fill_(value)
            graph.replay()
            total = context.num_ranks * value + sum(range(context.num_ranks))
            expected = torch.full((1000,), total, dtype=torch.float64)
            outcomes.append(compare(y.clone(), expected, f"replay with {value:g}"))
        del graph
    return worst_of(outcomes, f"3 replays of a sum, {counted(context.num_ranks, 'rank')}")


def pairs(context: RowContext) -> Outcome:
    """Let each rank send to each other rank; how fast that was is reported, but not judged."""
    outcomes, speeds, rank = [], [], context.rank
    with team(context):
        small = torch.zeros(1, device=context.device.device)
        for first in range(context.num_ranks):
            for second in range(first + 1, context.num_ranks):
                group = dist.new_group([first, second])
                if rank not in (first, second):
                    continue
                peer = second if rank == first else first
                large = context.put(of_rank(rank, BANDWIDTH_BYTES // 4, torch.float32))
                got = torch.empty_like(large)
                for sender in (first, second):
                    if rank == sender:
                        dist.send(large, peer, group=group)
                    else:
                        dist.recv(got, peer, group=group)
                given = f"ranks {first} and {second}"
                expected = of_rank(peer, BANDWIDTH_BYTES // 4, torch.float32)
                outcomes.append(compare(got, expected, given, tolerance=0.0))
                there = partial(_there_and_back, first=first, peer=peer, group=group)
                slow = _seconds(context, partial(there, small), LATENCY_CALLS)
                long = _seconds(context, partial(there, large), BANDWIDTH_CALLS)
                speeds.append((2 * BANDWIDTH_BYTES / long / 1e9, slow / 2 * 1e6))
        context.device.synchronize()
        dist.barrier()
    judged = worst_of(outcomes, f"{len(outcomes)} pairs of {counted(context.num_ranks, 'rank')}")
    if judged.verdict != Verdict.SAME:
        return judged
    slowest, latest = min(speed for speed, _ in speeds), max(wait for _, wait in speeds)
    got_text = f"equal; rank {rank}'s slowest pair {slowest:.2f} GB/s, latency {latest:.0f} us"
    return Outcome(judged.given, judged.expected, got_text, Verdict.SAME)


def _there_and_back(tensor: torch.Tensor, first: int, peer: int, group: dist.ProcessGroup) -> None:
    if dist.get_rank() == first:
        dist.send(tensor, peer, group=group)
        dist.recv(tensor, peer, group=group)
    else:
        dist.recv(tensor, peer, group=group)
        dist.send(tensor, peer, group=group)


def _seconds(context: RowContext, call: Callable[[], None], calls: int) -> float:
    """Return the mean time of a call in seconds; all calls are issued at once."""
    call()
    context.device.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    context.device.synchronize()
    return (time.perf_counter() - start) / calls


def _row(name: str, what: str, run: Callable[[RowContext], Outcome], ranks: int = 2) -> Row:
    return Row(f"hccl-{name}", what, run, ranks=ranks)


_moves_to_lists = partial(_moves, dtypes=tuple(each for each in MOVED if each != torch.bool))
EACH = "sums, products, maxima, minima; every dtype"

ROWS = (
    _row("all-reduce", EACH, partial(_reductions, all_reduce)),
    _row("reduce", "the same on one rank", partial(_reductions, reduce)),
    _row("reduce-scatter", "the same, each rank its part", partial(_reductions, reduce_scatter)),
    _row("all-gather", "what all ranks have; every dtype", partial(_moves, all_gather)),
    _row("gather-lists", "the same into a list of tensors", partial(_moves_to_lists, gather_lists)),
    _row("broadcast", "from one rank to all", partial(_moves, broadcast)),
    _row("all-to-all", "pieces of unequal size", partial(_moves, all_to_all)),
    _row("graph", "a sum inside a captured graph", in_a_graph),
    *(_row(f"pairs-{n}", "send and receive between each pair", pairs, n) for n in TEAMS),
)
