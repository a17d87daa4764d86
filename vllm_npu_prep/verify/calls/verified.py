"""What an engine does with a table of verified calls: other forms for some, and a count of others.

An operator with a wrong call keeps its kernel only in calls that gave the right answer: a kernel
that is wrong for one shape is not trusted with shapes that nobody has tried. An operator with
slower calls takes torch's form in these. No other operator is touched.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch_npu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_npu_prep.compat.operators import Overrides
from vllm_npu_prep.verify.calls.call import OF_PYTHON, Call, is_tried
from vllm_npu_prep.verify.calls.forms import form_of
from vllm_npu_prep.verify.calls.table import Table, is_trusted
from vllm_npu_prep.verify.outcome import Result, Verdict
from vllm_npu_prep.wording import counted


class VerifiedCalls:
    """A table at work in one process of an engine."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._overrides = Overrides()
        self.counted: dict[str, Call] = {}  # by their keys

    def override(self) -> list[str]:
        """Let torch's form make the calls that the table says; return one line for each operator.

        The table has no wrong call without such a form (`Table.refuse_what_cannot_be_replaced`).
        """
        by_operator: dict[str, dict[str, Result]] = {}
        for key, result in self._table.results.items():
            by_operator.setdefault(result.what, {})[key] = result
        lines = []
        for operator, results in by_operator.items():
            wrong = sum(result.verdict.is_bad for result in results.values())
            slower = sum(result.verdict is Verdict.SLOWER for result in results.values())
            if wrong or slower:
                self._override(operator, results, trusts_others=not wrong)
                lines.append(
                    f"{operator}: torch's own form makes {counted(slower, 'slower call')}"
                    if not wrong
                    else f"{operator}: {counted(wrong, 'call')} of {len(results)} went wrong, so "
                    "torch's own form makes all but those that are known to be right"
                )
        return lines

    def _override(self, operator: str, results: dict[str, Result], trusts_others: bool) -> None:
        right = {key for key, result in results.items() if is_trusted(result)}
        others = results.keys() - right
        function = Call(operator, {}).function()
        chosen: dict[Any, Callable[..., Any] | None] = {}

        def choose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
            captured = is_capturing()
            signature = signature_of(function, args, kwargs, captured)
            if signature not in chosen:
                call = Call.of(function._schema, args, kwargs, captured)
                keeps = call.key not in others if trusts_others else call.key in right
                chosen[signature] = None if keeps else form_of(call)
            return chosen[signature]

        self._overrides.add(function, choose)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Note the distinct calls that are made on a device meanwhile."""
        with _Counting(self.counted):
            yield

    def describe(self) -> str:
        """Say how many of the calls that were counted are in the table."""
        tried = sum(key in self._table.results for key in self.counted)
        return (
            f"Verified: {tried} of {counted(len(self.counted), 'distinct call')} of this start-up "
            f"are in {self._table.path}; the others are made unverified."
        )

    def end(self) -> None:
        self._overrides.end()


class _Counting(TorchDispatchMode):
    def __init__(self, counted: dict[str, Call]) -> None:
        super().__init__()
        self._counted, self._known = counted, set[Any]()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile trace meanwhile; what it has compiled is counted when it runs."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in OF_PYTHON:
            with self:
                return func._op_dk(torch._C.DispatchKey.PrivateUse1, *args, **kwargs)
        captured = is_capturing()
        signature = signature_of(func, args, kwargs, captured)
        if signature not in self._known:  # the calls of one layer are those of all
            self._known.add(signature)
            if is_counted(func, args, kwargs):
                call = Call.of(func._schema, args, kwargs, captured)
                self._counted[call.key] = call
        return func(*args, **kwargs)


def is_counted(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call is one that lists have, on a tensor of the device."""
    if not is_tried(function):
        return False
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    # What is traced has tensors of another class
    kinds = (torch.Tensor, torch.nn.Parameter)
    return any(type(each) in kinds and each.device.type == "npu" for each in tensors)


def is_capturing() -> bool:
    return torch_npu.npu.is_current_stream_capturing()


def signature_of(function: Any, args: Any, kwargs: Any, captured: bool) -> Any:
    """Return what `Call.key` depends on, found in a tenth of its time."""
    return function, captured, _short(args), _short(list(kwargs.items()))


def _short(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        layout = value.shape, value.stride(), value.storage_offset()
        return type(value), value.dtype, value.device.type, *layout
    return tuple(map(_short, value)) if isinstance(value, (list, tuple)) else value
