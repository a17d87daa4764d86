"""Rows of ``verify-device`` for a list of recorded calls: one row for each call.

A row makes the call's arguments again, with floats by a fixed seed, and makes the call in four
ways: eagerly, on inputs that another stream has just written, in a graph that captured it, and
twenty times to time it. The first result is held against float64; the others have to equal it.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch_npu
from torch.utils._pytree import tree_leaves

from vllm_npu_prep.verify.calls import Call, made_arguments
from vllm_npu_prep.verify.expected import Expected, expected_of
from vllm_npu_prep.verify.outcome import Outcome, Verdict, worst_of
from vllm_npu_prep.verify.row import Row, RowContext, compare

SEED = 20261129
TIMED = 20
"""How often a call is timed; the median counts."""

CALL_SECONDS = 120.0
NOT_CAPTURED = ("get_max_workspace",)
"""Ends of the names of operators that run on the host."""


def rows_of(calls: Sequence[Call]) -> tuple[Row, ...]:
    """Return a row for each call, named after its operator and its place among that one's calls."""
    seen: Counter[str] = Counter()
    rows = []
    for call in calls:
        seen[call.name] += 1
        name = f"{call.name.strip('_')}-{seen[call.name]:03}"
        rows.append(Row(name, call.operator, partial(run_call, call), seconds=CALL_SECONDS))
    return tuple(rows)


def run_call(call: Call, context: RowContext) -> Outcome:
    """Make a call in all four ways, and compare."""
    made_call = _MadeCall(call, context)
    first = made_call.results()
    outcome = _against_float64(call, first, made_call.expected())
    if outcome.verdict.is_bad or call.name.endswith(NOT_CAPTURED):
        return outcome
    parts = [outcome, _same(call, "written by another stream", first, made_call.after_a_stream())]
    if call.captured:
        parts.append(_same(call, "captured and replayed", first, made_call.replayed()))
    outcome = worst_of(parts, str(call))
    return replace(outcome, microseconds=made_call.microseconds())


class _MadeCall:
    """A call with its arguments on the host and on the device."""

    def __init__(self, call: Call, context: RowContext) -> None:
        self._call, self._device = call, context.device
        self._function = call.function()
        self._host = made_arguments(call, lambda tensor: tensor, SEED)
        self._schema = self._function._schema
        self._put = context.put
        self.arguments = made_arguments(call, context.put, SEED)

    def expected(self) -> list[Expected]:
        return expected_of(self._call.operator, self._function, self._host)

    def _run(self) -> Any:
        return self._function(**self.arguments)

    def _results_of(self, returned: Any) -> list[torch.Tensor]:
        """Return what the call gives: what the schema returns, else what it writes."""
        if self._schema.returns:
            return [each for each in tree_leaves(returned) if isinstance(each, torch.Tensor)]
        written = [a.name for a in self._schema.arguments if a.alias_info and a.alias_info.is_write]
        names = written or [name for name in self.arguments if name.endswith("_cache")]
        return [each for name in names for each in tree_leaves(self.arguments[name])]

    def _fill(self) -> None:
        """Put the arguments' first values back; the operator may have written some."""
        fresh = made_arguments(self._call, self._put, SEED)
        for old, new in zip(tree_leaves(self.arguments), tree_leaves(fresh)):
            # What is expanded has several elements in one place, and is only read
            if isinstance(old, torch.Tensor) and old.device.type != "cpu" and 0 not in old.stride():
                old.copy_(new)

    def results(self) -> list[torch.Tensor]:
        return [each.clone() for each in self._results_of(self._run())]

    def after_a_stream(self) -> list[torch.Tensor]:
        other = torch_npu.npu.Stream()
        other.wait_stream(torch_npu.npu.current_stream())
        with torch_npu.npu.stream(other):
            self._fill()
        torch_npu.npu.current_stream().wait_stream(other)
        return self.results()

    def replayed(self) -> list[torch.Tensor]:
        graph = torch_npu.npu.NPUGraph()
        self._device.synchronize()
        with torch_npu.npu.graph(graph):
            returned = self._run()
        self._fill()
        graph.replay()
        return [each.clone() for each in self._results_of(returned)]

    def microseconds(self) -> float:
        taken = []
        for _ in range(TIMED):
            begin, end = (torch_npu.npu.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._run()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(taken)


def _against_float64(
    call: Call, got: Sequence[torch.Tensor], expected: Sequence[Expected]
) -> Outcome:
    parts = [
        compare(part.of(got[part.result]), part.values, str(call), tolerance=part.tolerance)
        for part in expected
    ]
    return worst_of(parts, str(call)) if parts else Outcome(str(call), "", "an answer", Verdict.RAN)


def _same(
    call: Call, how: str, first: Sequence[torch.Tensor], other: Sequence[torch.Tensor]
) -> Outcome:
    """Compare two results of the device bit by bit; NaN equals NaN."""
    pairs = [(a, b) for a, b in zip(first, other) if not torch.equal(_bits(a), _bits(b))]
    if not pairs:
        return Outcome(str(call), "the same bits", "equal", Verdict.SAME)
    one, two = pairs[0]
    number = int((_bits(one) != _bits(two)).sum())
    got = f"{how}: {number:,} of {one.numel():,} differ"
    return Outcome(str(call), "what the eager call gave", got, Verdict.DIFFERS)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().nan_to_num(nan=12345.0)
