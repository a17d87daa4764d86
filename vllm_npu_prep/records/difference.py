"""Finds the first difference between a record and the step prepared again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm_npu_prep.records.record import StepRecord


@dataclass(frozen=True)
class Difference:
    """The first difference between a record and the step prepared again.

    Attributes
    ----------
    step
        Number of the step.
    by
        Which preparation differs: ``core`` or ``oracle``.
    variable, index
        Where; the index is empty for a scalar, or where shapes differ.
    req_id, token
        Request and token of the step, if the variable has them; None in padding.
    """

    step: int
    by: str
    variable: str
    index: tuple[int, ...]
    req_id: str | None
    token: int | None
    recorded: Any
    expected: Any

    def __str__(self) -> str:
        place = "".join(f"[{index}]" for index in self.index)
        who = [f"token {self.token}"] * (self.token is not None)
        who += [f"request {self.req_id}"] * (self.req_id is not None)
        where = f" ({', '.join(who)})" if who else ""
        by = f"the {self.by}"
        return (
            f"step {self.step}: {self.variable}{place}{where}: recorded {self.recorded}, "
            f"{by} says {self.expected}"
        )


def first_difference(
    record: "StepRecord", expected: Mapping[str, np.ndarray], by: str
) -> Difference | None:
    """Compare a record with arrays by its names, in the record's order."""
    for name in expected:
        if name not in record.prepared:
            return Difference(record.number, by, name, (), None, None, "nothing", "an array")
    for name, recorded in record.prepared.items():
        array = expected.get(name)
        if array is None:
            continue
        if recorded.shape != array.shape:
            shapes = list(recorded.shape), list(array.shape)
            return Difference(record.number, by, f"{name}.shape", (), None, None, *shapes)
        unequal = np.flatnonzero(recorded != array)
        if len(unequal):
            index = tuple(int(i) for i in np.unravel_index(unequal[0], array.shape))
            values = _plain(recorded[index]), _plain(array[index])
            return Difference(record.number, by, name, index, *_owner(record, name, index), *values)
    return None


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic | np.ndarray) else value
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _owner(
    record: "StepRecord", name: str, index: tuple[int, ...]
) -> tuple[str | None, int | None]:
    """Return the request and the token that an element belongs to, by the recorded batch."""
    from vllm_npu_prep.prep.arrays import STEP_ARRAYS, Level
    from vllm_npu_prep.records.contract import LEVELS

    batch, req_ids = record.batch, record.settings.req_ids
    ends = np.cumsum(batch.num_scheduled_tokens)
    base = name.rpartition(".")[2].removesuffix("_padded")
    token = req = None
    if "local" in name or not index:
        return None, None
    level = LEVELS.get(base)
    if level is Level.TOKEN:
        token = index[-1]
    elif level is Level.REQUEST:
        line = STEP_ARRAYS.get(base)
        req = max(0, index[0] - (line is not None and line.has_borders))
    elif level is not None:
        rows = batch.num_draft_tokens + (level is Level.LOGIT)
        req = int(np.searchsorted(np.cumsum(rows), index[0], side="right"))
    elif "attn_mask." in name and base != "shape" and _has_row_for_each_token(record, name):
        token = index[0]
    if token is not None:
        if token >= ends[-1]:
            return None, None  # padding
        req = int(np.searchsorted(ends, token, side="right"))
    if req is None or req >= len(req_ids):
        return None, token
    return req_ids[req], token


def _has_row_for_each_token(record: "StepRecord", name: str) -> bool:
    shape = record.prepared.get(f"{name.rpartition('.')[0]}.shape")
    tokens = record.settings.num_input_tokens
    state = record.prepared.get("attn_state")
    is_matrix = state is not None and state.tobytes() == b"PrefillNoCache"
    return shape is not None and shape.size == 2 and int(shape[0]) == tokens and not is_matrix
