"""Rows of ``verify-device`` for a list of recorded calls: one row for each call.

A row makes the call's arguments again, with floats by a fixed seed. torch's own form of the
operator comes first, if there is one. Then the operator is called on inputs that another stream has
just written, once more, in a graph that captured it, and up to twenty times to time it. The first
result is held against float64, or against torch's form; the others have to equal it. A graph is
captured with other lengths, blocks or experts than the call has, and told new ones before each
replay. What takes longer than 5 seconds, as long prompts do without a real card, is called once
eagerly.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch_npu
from torch.utils._pytree import tree_leaves

from vllm_npu_prep.verify.calls.call import (
    Call,
    made_arguments,
    moved,
    moved_arguments,
    told_arguments,
)
from vllm_npu_prep.verify.calls.expected import Expected, expected_of
from vllm_npu_prep.verify.calls.expected_part import LEVELS, ONE_LEVEL
from vllm_npu_prep.verify.calls.forms import form_of
from vllm_npu_prep.verify.outcome import (
    NotHereError,
    Outcome,
    TorchOutcome,
    Verdict,
    first_line_of,
    worst_of,
)
from vllm_npu_prep.verify.row import Row, RowContext, compare

SEED = 20261129
TIMED = 20
"""How often a call is timed; the median counts."""

ENOUGH = 1e5
"""Microseconds after which a call was timed long enough, however often it ran."""

LONG = 5e6
"""Microseconds that no kernel takes on a card, unless it is compiled first: such a call is not made
again, and its time is not judged."""

SLOWER = 1.1
"""How many times as long as torch's form a call may take before it counts as slower."""

CALL_SECONDS = 120.0
NOT_CAPTURED = ("get_max_workspace",)
"""Ends of the names of operators that run on the host."""

OWN: Mapping[str, Any] = {}
"""A call has no other numbers than its own."""


def rows_of(calls: Sequence[Call]) -> tuple[Row, ...]:
    """Return a row for each call, named after its operator and its place among that one's calls."""
    seen: Counter[str] = Counter()
    rows = []
    for call in calls:
        operator = call.name.strip("_")  # silu and silu_ are counted together
        seen[operator] += 1
        name, tried = f"{operator}-{seen[operator]:03}", TriedCall(call)
        rows.append(
            Row(
                name, call.operator, tried.run, seconds=CALL_SECONDS, key=call.key, first=tried.form
            )
        )
    return tuple(rows)


class TriedCall:
    """A call that a row tries: first by torch's form, then by its operator."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._host: dict[str, Any] = {}  # arguments on the host, for both
        self._of_torch: list[torch.Tensor] = []  # what torch's form gave, if that is right
        self._found = TorchOutcome()

    def form(self, context: RowContext) -> TorchOutcome:
        """Make the call by torch's own form, and compare it with float64."""
        try:
            if (form := form_of(self._call)) is None:
                return self._found
            self._host = made_arguments(self._call, SEED)
            made = _MadeCall(self._call, context, self._host, form)
            results, taken = made.timed_results()
            read = [part for part in made.expected() if results[part.result].numel()]
            outcome = _against_float64(self._call, results, read)
            wrong = outcome.got if outcome.verdict.is_bad else ""
            self._found = TorchOutcome(wrong, made.microseconds(taken if taken > LONG else None))
        except Exception as error:  # a form is no reason not to try the operator
            self._found = TorchOutcome(first_line_of(error))
        if self._found.torch_got == "":
            self._of_torch = results
        return self._found

    def run(self, context: RowContext) -> Outcome:
        """Make the call in all ways, and compare.

        Raises
        ------
        NotHereError
            If the device has too little memory, which says nothing about the operator: results are
            held several times, and an engine holds them once.
        """
        try:
            return self._compared(context)
        except torch.OutOfMemoryError as error:
            why = "this device's memory does not hold the call and what is compared"
            raise NotHereError(f"{why}: {first_line_of(error)}") from error

    def _compared(self, context: RowContext) -> Outcome:
        call, host, of_torch = self._call, self._host, self._of_torch
        self._host, self._of_torch = {}, []  # a list has thousands of rows
        made = _MadeCall(call, context, host or made_arguments(call, SEED))
        results, taken = made.after_a_stream()
        first = [each.cpu() for each in results]  # where it is compared several times
        outcome = _against_float64(call, first, made.expected())
        if outcome.verdict is Verdict.RAN and of_torch:
            outcome = _against_torch(call, first, of_torch)
        if outcome.verdict.is_bad or call.name.endswith(NOT_CAPTURED):
            return outcome
        parts = [outcome]
        if taken <= LONG:
            again, taken = made.again()
            parts.append(_same(call, "made again", first, again))
        if call.captured:
            parts += made.replayed(first)
        outcome = worst_of(parts, str(call))
        if outcome.verdict.is_bad:
            return outcome
        taken, of_form = made.microseconds(taken), self._found.torch_microseconds
        is_slower = of_form is not None and SLOWER * of_form < taken <= LONG
        if is_slower and self._found.torch_got == "":
            got = f"{outcome.got}, in {taken:.1f} us; torch's form takes {of_form:.1f}"
            outcome = replace(outcome, got=got, verdict=Verdict.SLOWER)
        return replace(outcome, microseconds=taken)


class _MadeCall:
    """A call with its arguments on the host and on the device."""

    def __init__(
        self,
        call: Call,
        context: RowContext,
        host: dict[str, Any],
        form: Callable[..., Any] | None = None,
    ) -> None:
        self._call, self._device = call, context.device
        self._operator = call.function()
        self._function = form or self._operator
        self._host = host
        self._schema = self._operator._schema
        self._put = context.put
        self._task: Any = None
        self.arguments = moved_arguments(call, host, context.put)

    def expected(self) -> list[Expected]:
        return expected_of(self._call.operator, self._operator, self._host)

    def _run(self, numbers: Mapping[str, Any] = OWN) -> Any:
        """Make the call, with other numbers that the host tells; tensors are filled before."""
        told = {name: each for name, each in numbers.items() if isinstance(each, list)}
        return self._function(**{**self.arguments, **told})

    def _results_of(self, returned: Any) -> list[torch.Tensor]:
        """Return what the call gives: what the schema returns, then what it writes besides."""
        results = [each for each in tree_leaves(returned) if isinstance(each, torch.Tensor)]
        if any(each.alias_info for each in self._schema.returns):  # these are what it writes
            return results
        written = [self.arguments[name] for name in self._written()]
        return results + [each for argument in written for each in tree_leaves(argument)]

    def _written(self) -> list[str]:
        """Return names of arguments that the call writes; schemas don't say it of all caches."""
        given = [each for each in self._schema.arguments if each.name in self.arguments]
        infos = {each.name: each.alias_info for each in given}
        written = [n for n, info in infos.items() if n == "out" or (info and info.is_write)]
        if not self._schema.returns and not written:
            written = [name for name in self.arguments if name.endswith("_cache")]
        return written

    def _fill(self, names: Iterable[str], numbers: Mapping[str, Any] = OWN) -> None:
        """Put some arguments' first values back, or other numbers."""
        for name in names:  # one at a time: weights are large
            argument = self.arguments[name]
            fresh = moved(self._call.arguments[name], {**self._host, **numbers}[name], self._put)
            for old, new in zip(tree_leaves(argument), tree_leaves(fresh)):
                # What is expanded has several elements in one place, and is only read
                is_there = isinstance(old, torch.Tensor) and old.device.type != "cpu"
                if is_there and 0 not in old.stride():
                    old.copy_(new)

    def results(self, numbers: Mapping[str, Any] = OWN) -> list[torch.Tensor]:
        return [each.clone() for each in self._results_of(self._run(numbers))]

    def timed_results(self) -> tuple[list[torch.Tensor], float]:
        """Return the results, and the microseconds that the call took."""
        returned, taken = self._timed()
        return [each.clone() for each in self._results_of(returned)], taken

    def again(self) -> tuple[list[torch.Tensor], float]:
        self._fill(self._written())
        return self.timed_results()

    def after_a_stream(self) -> tuple[list[torch.Tensor], float]:
        """Make the call on inputs that another stream has just written."""
        other = _other_stream()
        other.wait_stream(torch_npu.npu.current_stream())
        with torch_npu.npu.stream(other):
            self._fill(self.arguments)
        torch_npu.npu.current_stream().wait_stream(other)
        return self.timed_results()

    def replayed(self, first: Sequence[torch.Tensor]) -> list[Outcome]:
        """Capture the call and replay it; it has to give what it gave eagerly.

        If a graph is told numbers of this call at a replay, it is captured with other ones, whose
        eager result is compared with float64, too, and replayed with these and with its own.
        """
        other = told_arguments(self._call, self._host, SEED + 1)
        changing = {*other, *self._written()}
        parts, replays = [], [("captured and replayed", OWN, first)]
        if other:
            self._fill(changing, other)
            eager = self.results(other)
            expected = expected_of(self._call.operator, self._operator, {**self._host, **other})
            parts.append(_against_float64(self._call, eager, expected))
            replays = [
                ("replayed with other numbers", other, eager),
                ("replayed with its own numbers", OWN, first),
            ]
        graph = self._captured(other)
        for how, numbers, wanted in replays:
            self._fill(changing, numbers)
            graph.replay()
            if self._task is not None:
                self._update(numbers)
            got = [each.clone() for each in self._results_of(self._returned)]
            parts.append(_same(self._call, how, wanted, got))
        return parts

    def _captured(self, numbers: Mapping[str, Any]) -> Any:
        """Capture the call; one whose lengths are lists becomes a task that an update finds."""
        is_a_task = any(isinstance(each, list) for each in numbers.values())
        graph = torch_npu.npu.NPUGraph()
        self._device.synchronize()
        with torch_npu.npu.graph(graph):
            self._returned = self._as_a_task(numbers) if is_a_task else self._run(numbers)
        return graph

    def _as_a_task(self, numbers: Mapping[str, Any]) -> Any:
        """Make the call as `graph.npu` captures attention: as a task that waits for an event."""
        stream = torch_npu.npu.current_stream()
        self._event = torch_npu.npu.ExternalEvent()
        self._event.wait(stream)
        self._event.reset(stream)
        torch_npu.npu.graph_task_group_begin(stream)
        returned = self._run(numbers)
        self._task = torch_npu.npu.graph_task_group_end(stream)
        return returned

    def _update(self, numbers: Mapping[str, Any]) -> None:
        updates = torch_npu.npu.Stream()
        with torch_npu.npu.stream(updates):
            torch_npu.npu.graph_task_update_begin(updates, self._task)
            self._run(numbers)
            torch_npu.npu.graph_task_update_end(updates)
            self._event.record(updates)
        self._device.synchronize()

    def microseconds(self, known: float | None = None) -> float:
        """Return the median of some calls, among them one that is known to have taken so long."""
        taken = [] if known is None else [known]
        while len(taken) < TIMED and sum(taken) <= ENOUGH:
            taken.append(self._timed()[1])
        return statistics.median(taken)

    def _timed(self) -> tuple[Any, float]:
        begin, end = (torch_npu.npu.Event(enable_timing=True) for _ in range(2))
        begin.record()
        returned = self._run()
        end.record()
        end.synchronize()
        return returned, begin.elapsed_time(end) * 1e3


def _against_float64(
    call: Call, got: Sequence[torch.Tensor], expected: Sequence[Expected]
) -> Outcome:
    parts = [
        compare(part.of(got[part.result]), part.values, str(call), tolerance=part.tolerance)
        for part in expected
    ]
    return worst_of(parts, str(call)) if parts else Outcome(str(call), "", "an answer", Verdict.RAN)


def _against_torch(
    call: Call, got: Sequence[torch.Tensor], of_torch: Sequence[torch.Tensor]
) -> Outcome:
    """Compare an operator's results with those of torch's form, as far as layers read them.

    Whole numbers are left out: of equal scores, either may take any.
    """
    parts = []
    for one, other in zip(got, of_torch):
        if other.numel() == 0 != one.numel():  # which no layer reads
            continue
        if one.dtype == torch.int8:
            fractions = one.float() / LEVELS, other.cpu().float() / LEVELS
            parts.append(compare(*fractions, str(call), tolerance=ONE_LEVEL))
        elif one.is_floating_point():
            parts.append(compare(one, other.cpu(), str(call)))
    return worst_of(parts, str(call)) if parts else Outcome(str(call), "", "an answer", Verdict.RAN)


def _same(
    call: Call, how: str, first: Sequence[torch.Tensor], other: Sequence[torch.Tensor]
) -> Outcome:
    """Compare two results of the device: NaN equals NaN, and zeros of both signs are equal."""
    for one, two in zip(first, (each.cpu() for each in other)):
        if torch.equal(_words(one), _words(two)):
            continue
        one = one.cpu()
        differs = (one != two) & ~(one.isnan() & two.isnan())
        if number := int(differs.sum()):
            got = f"{how}: {number:,} of {one.numel():,} differ"
            return Outcome(str(call), "what the eager call gave", got, Verdict.DIFFERS)
    return Outcome(str(call), "the same bits", "equal", Verdict.SAME)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits on the host, in as few numbers as they fit in."""
    bits = tensor.cpu().flatten()
    return bits.view(torch.uint8 if bits.nbytes % 8 else torch.int64)


@cache
def _other_stream() -> Any:
    """Return one stream for all rows: each stream has memory of its own."""
    return torch_npu.npu.Stream()
