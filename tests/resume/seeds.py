"""A command that plays random episodes seed by seed, in slices or as given."""

import gc
import os
import sys
import time
from collections.abc import Iterator
from itertools import chain, count
from typing import Any, Protocol

import psutil

from tests.resume.log import ENDLESS
from tests.resume.slice import Slice, slice_parser
from tests.resume.tree import RESULTS

COMMAND = "make soak"


class Player(Protocol):
    """Plays the episode of a seed, and tells at the end what was covered."""

    def play(self, seed: int, steps: int) -> tuple[str, dict[str, Any]]:
        """Play an episode: its outcome, and what is recorded of it."""

    def report(self) -> None:
        """Print what was covered."""


def seeds_of(part: Slice) -> Iterator[str]:
    """Seeds for a slice: those that are to be played again, then ones that the run hasn't had."""
    again = [unit for unit, result in part.latest.items() if part.again(result)]
    had = [int(unit) + 1 for unit in part.latest]
    return chain(again, map(str, count(max([part.seed, *had]))))


def held() -> dict[str, int]:
    """What this process holds between two episodes: a leak grows from one to the next.

    Resident memory in MiB, open descriptors, threads and child processes; of an NPU in use the
    memory that is taken, in MiB.
    """
    gc.collect()  # before the next engine freezes what is left of this one, for good
    process = psutil.Process()
    found = {
        "rss": process.memory_info().rss >> 20,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(process.children()),
    }
    npu = getattr(sys.modules.get("torch"), "npu", None)
    if npu is not None and npu.is_initialized():
        npu.synchronize()
        npu.empty_cache()
        free, total = npu.mem_get_info()
        found["card"] = (total - free) >> 20
    return found


def resume(part: Slice, coverage: Player, steps: int) -> int:
    """Play episodes until the time is up."""

    def one(unit: str) -> None:
        start = time.perf_counter()
        outcome, recorded = coverage.play(int(unit), steps)
        part.record(unit, outcome, time.perf_counter() - start, **recorded, **held())

    whole = part.play(seeds_of(part), one, None)
    coverage.report()
    failed = part.finish(ENDLESS, COMMAND)
    return failed if whole else 130


def repeat(first: int, episodes: int, coverage: Player, steps: int) -> int:
    """Play given episodes; nothing is recorded."""
    failed = []
    for seed in range(first, first + episodes):
        outcome, recorded = coverage.play(seed, steps)
        print(f"seed {seed} {outcome}: {recorded}", flush=True)
        failed += [seed] * (outcome == "failed")
    coverage.report()
    print(f"first seed {first}, {episodes} episodes, {len(failed)} failed: {failed}")
    return 1 if failed else 0


def run(
    player: Player,
    prog: str,
    doc: str | None,
    results: str,
    default_seed: int | None = None,
    steps: int = 1000,
) -> int:
    """A command that plays seeds: a slice of the run in `results`, or the seeds that were given.

    A new run begins at `default_seed`, or by the clock; an episode has `steps` at least.
    """
    parser = slice_parser(prog.removeprefix("python -m "), doc)
    parser.add_argument("--seed", type=int, help="of the first episode")
    parser.add_argument("--episodes", type=int, default=1, help="how many from --seed on")
    parser.add_argument("--steps", type=int, default=steps, help="of an episode")
    args = parser.parse_args()

    # Small products gain nothing from threads, and spinning ones disturb each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"  # which is a thread of each engine, for good
    if args.seed is not None and not args.fresh:
        return repeat(args.seed, args.episodes, player, args.steps)
    with Slice(
        RESULTS / results,
        args.minutes,
        seed=args.seed,
        default_seed=int(time.time()) if default_seed is None else default_seed,
        settings={"steps": args.steps},
        fresh=args.fresh,
        retry=args.retry,
    ) as part:
        return resume(part, player, args.steps)
