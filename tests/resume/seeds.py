"""A command that plays random episodes seed by seed, in slices or as given."""

import argparse
import gc
import os
import sys
import time
import traceback
from collections import Counter
from itertools import chain, count
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from tests.resume.log import Slice, slice_parser
from tests.resume.tree import RESULTS


def failure(seed: int, error: Exception, kept_in: Path, what: object = "") -> dict[str, Any]:
    """Print why an episode failed, and where its seed is kept; what is recorded of that."""
    traceback.print_exception(error)
    print(f"seed {seed} FAILED, kept in {kept_in}{f': {what}' if what else ''}", flush=True)
    first = str(error).partition("\n")[0][:200]
    return {"error": f"{type(error).__name__}: {first}"}


def keep_in_file(seed: int, file: Path) -> None:
    """Append a seed that failed to a file that the suite plays."""
    with file.open("a") as opened:
        opened.write(f"{seed}\n")


def print_counts(count: Counter[str]) -> None:
    """Print what happened how often, in one line."""
    print(", ".join(f"{number:,} {name}" for name, number in sorted(count.items())))


def held() -> dict[str, int]:
    """What this process holds between two episodes: a leak grows from one to the next.

    Resident memory in MiB, open descriptors; of an NPU in use the memory that is taken, in MiB.
    """
    gc.collect()  # before the next engine freezes what is left of this one, for good
    process = psutil.Process()
    found = {"rss": process.memory_info().rss >> 20, "descriptors": process.num_fds()}
    npu = getattr(sys.modules.get("torch"), "npu", None)
    if npu is not None and npu.is_initialized():
        npu.synchronize()
        npu.empty_cache()
        free, total = npu.mem_get_info()
        found["card"] = (total - free) >> 20
    return found


def growth(values: list[int]) -> float:
    """How much is held more in the last third than in the second, when most things are loaded."""
    third = len(values) // 3
    return mean(values[-third:]) - mean(values[third : 2 * third]) if third else 0


def resume(part: Slice, player: Any, steps: int) -> int:
    """Play seeds that failed, if anything changed, then ones that the run hasn't had."""

    def one(unit: str) -> None:
        start = time.perf_counter()
        outcome, recorded = player.play(int(unit), steps)
        part.record(unit, outcome, time.perf_counter() - start, **recorded, **held())

    again = [unit for unit, result in part.latest.items() if part.again(result)]
    following = count(max([part.seed, *(int(unit) + 1 for unit in part.latest)]))
    part.play(chain(again, map(str, following)), one)
    player.report()
    grown = {kind: growth([each.more.get(kind, 0) for each in part.played]) for kind in held()}
    print(*(f"{kind} grew by {most:+.1f}" for kind, most in grown.items()), sep=", ")
    return part.finish(None, "make soak")


def repeat(options: argparse.Namespace, player: Any) -> int:
    """Play given episodes; nothing is recorded."""
    failed = 0
    for seed in range(options.seed, options.seed + options.episodes):
        outcome, recorded = player.play(seed, options.steps)
        print(f"seed {seed} {outcome}: {recorded}", flush=True)
        failed += outcome == "failed"
    player.report()
    return int(failed > 0)


def run(
    player: Any,
    prog: str,
    doc: str | None,
    results: str,
    default_seed: int | None = None,
    steps: int = 1000,
) -> int:
    """A command that plays seeds: a slice of the run in `results`, or the seeds that were given.

    `player` has `play(seed, steps)`, an episode's outcome and what is recorded of it, and
    `report()`, which prints what was covered. A new run begins at `default_seed`, or by the clock;
    an episode has `steps` at least.
    """
    parser = slice_parser(prog.removeprefix("python -m "), doc, "of the first episode")
    parser.add_argument("--episodes", type=int, default=1, help="how many from --seed on")
    parser.add_argument("--steps", type=int, default=steps, help="of an episode")
    options = parser.parse_args()

    # Small products gain nothing from threads, and spinning ones disturb each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"  # which is a thread of each engine, for good
    if options.seed is not None and not options.fresh:
        return repeat(options, player)
    first = int(time.time()) if default_seed is None else default_seed
    with Slice(RESULTS / results, options, first, {"steps": options.steps}) as part:
        return resume(part, player, options.steps)
