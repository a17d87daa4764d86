"""Function calls of a step on the host: a count, which is the same on a busy machine.

    python benchmarks/host_calls.py [--json] [--steps 20] [--case step-256]

A step of `host_step.py`, or of `host_step_v2.py` in cases whose names begin with v2, runs under
`sys.setprofile`. For each case, medians over steps:

=============  =====================================================================================
column         what is counted
=============  =====================================================================================
prepare        calls of Python functions in `_prepare_inputs`, itself included
prepare_c      calls of functions in C there; numba's and numpy's operators are not among them
step           calls of Python functions from `execute_model` to the end of `sample_tokens`
step_c         calls of functions in C there
upstream       as step, of upstream's V1 runner; not beside V2
=============  =====================================================================================

After `_prepare_inputs` most of the calls are upstream's, in our runner, too. A call in a loop over
requests adds their number: 256.
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import host_step_v2
from host_step import WARM_UP, compare, give, proposed, runners, stub, whole_step
from workloads import CASES, Case, Schedule

V2 = "v2-"


class Calls:
    """Counts calls, and those that are made inside of one function."""

    def __init__(self, inside: CodeType) -> None:
        self.inside, self._depth = inside, 0
        self.counts = dict.fromkeys(("prepare", "prepare_c", "step", "step_c"), 0)

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """As `sys.setprofile` calls it."""
        del arg
        if event == "call":
            self._depth += frame.f_code is self.inside
            self.counts["step"] += 1
            self.counts["prepare"] += self._depth > 0
        elif event == "return":
            self._depth -= frame.f_code is self.inside
        elif event == "c_call":
            self.counts["step_c"] += 1
            self.counts["prepare_c"] += self._depth > 0


def counted(runner: Any, run: Callable[[], Any]) -> tuple[dict[str, int], Any]:
    """Calls of one step, and its result."""
    calls = Calls(type(runner)._prepare_inputs.__code__)
    sys.setprofile(calls)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return calls.counts, result


def measure(case: Case, ours: Any, upstream: Any, steps: int) -> dict[str, int]:
    """Medians of a case; both runners must leave the same."""
    schedule, seen, upstreams = Schedule(case, ours.use_async_scheduling), [], []
    for runner in (ours, upstream):
        stub(runner)
    for step in range(WARM_UP + steps):
        output = schedule.step()
        sampled, drafts, left = schedule.sampled(), proposed(schedule), []
        for runner, counts in ((ours, seen), (upstream, upstreams)):
            give(runner, sampled, drafts)
            own = copy.deepcopy(output)
            each, result = counted(runner, lambda: whole_step(runner, own))  # noqa: B023
            left.append(result[1])
            if step >= WARM_UP:
                counts.append(each)
        compare(*left)
    row = {name: int(statistics.median(each[name] for each in seen)) for name in seen[0]}
    return row | {"upstream": int(statistics.median(each["step"] for each in upstreams))}


def measure_v2(case: Case, folder: Path, steps: int) -> dict[str, int]:
    """Medians of a case on Model Runner V2."""
    schedule, seen = Schedule(case, asynchronous=True), []
    with host_step_v2.runner_for(case, host_step_v2.model_in(folder)) as runner:
        host_step_v2.stub(runner)
        for step in range(WARM_UP + steps):
            output = host_step_v2.told_to_v2(schedule.step(), case.num_drafts)
            host_step_v2.give(runner, schedule.sampled(), proposed(schedule))
            each, _ = counted(
                runner,
                lambda: (runner.execute_model(output), runner.sample_tokens(None)),  # noqa: B023
            )
            if step >= WARM_UP:
                seen.append(each)
    return {name: int(statistics.median(each[name] for each in seen)) for name in seen[0]}


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    whole = [f"{V2}{name}" for name in host_step_v2.CASES]
    whole += [name for name, case in CASES.items() if case.whole_step]
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each case")
    parser.add_argument("--case", action="append", choices=whole, help="one case; may be repeated")
    parser.add_argument("--async-scheduling", action="store_true", help="steps as with it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.case or whole:
            if name.startswith(V2):
                case = host_step_v2.CASES[name.removeprefix(V2)]
                row = {"case": name, **measure_v2(case, Path(folder) / name, args.steps)}
                print(json.dumps(row) if args.json else row, flush=True)
                continue
            options = Path(folder), args.async_scheduling
            with runners(CASES[name], *options, {"check": "cheap"}, 1) as both:
                row = {"case": name, **measure(CASES[name], *both, args.steps)}
            print(json.dumps(row) if args.json else row, flush=True)


if __name__ == "__main__":
    main()
