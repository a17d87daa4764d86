"""How long a sum over emulated devices takes, beside gloo's over the same processes.

    ascend-emulator --quiet --devices 2 -- python benchmarks/all_reduce.py [--ranks 2] [--mb 1 8]

Both backends sum float32 in turn, one call of each at a time, so that whatever else the machine
does hits both. A call ends when its result can be read. The medians of the slowest rank are shown,
and their ratio.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

WARM_UP = 10


def seconds_of(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    """Seconds of one sum, from a common start."""
    dist.barrier(group=GROUPS["gloo"])
    start = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    if tensor.device.type == "npu":
        torch.npu.synchronize()
    return time.perf_counter() - start


GROUPS: dict[str, dist.ProcessGroup] = {}
"""By backend, in each rank's process."""


def run_rank(rank: int, ranks: int, sizes: list[int], calls: int, folder: str) -> None:
    """Time both backends as one rank; rank 0 writes what all of them measured."""
    torch.npu.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("hccl", store=store, rank=rank, world_size=ranks)
    GROUPS["gloo"], GROUPS["hccl"] = dist.new_group(backend="gloo"), dist.group.WORLD
    found = {}
    for size in sizes:
        count = (size << 20) // 4
        tensors = {"gloo": torch.ones(count), "hccl": torch.ones(count, device="npu")}
        times: dict[str, list[float]] = {name: [] for name in tensors}
        for index in range(WARM_UP + calls):
            for name, tensor in tensors.items():
                tensor.fill_(1)
                taken = seconds_of(tensor, GROUPS[name])
                if index >= WARM_UP:
                    times[name].append(taken)
        for name, tensor in tensors.items():
            assert tensor.cpu().eq(ranks).all(), name
        found[size] = {name: statistics.median(each) for name, each in times.items()}
    of_all: list = [None] * ranks
    dist.all_gather_object(of_all, found, group=GROUPS["gloo"])
    if rank == 0:
        torch.save(of_all, f"{folder}/times")
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes, each with its device")
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 8], help="sizes in MB")
    parser.add_argument("--calls", type=int, default=200, help="measured calls of each size")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (args.ranks, args.mb, args.calls, folder)
        mp.start_processes(run_rank, arguments, args.ranks, start_method="fork")
        of_all = torch.load(Path(folder) / "times")
    table = Table("MB", "gloo, ms", "emulated HCCL, ms", "ratio")
    for size in args.mb:
        gloo, hccl = (max(found[size][name] for found in of_all) for name in ("gloo", "hccl"))
        row = (gloo * 1e3, hccl * 1e3, hccl / gloo)
        table.add_row(str(size), *(f"{value:.2f}" for value in row))
    Console().print(table)


if __name__ == "__main__":
    main()
