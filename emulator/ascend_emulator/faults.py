"""Known silent misbehaviour of kernels, switched on by name.

Each fault changes one value at one point of the references; `FAULTS` is the whole list. A reference
passes its value through `apply` with the name of the point. No fault is on unless
``NPU_EMULATOR_FAULTS`` names it, which is read once in a process; `using` replaces the choice for a
block of code.

To add a fault, add a line to `FAULTS`, and an `apply` to the reference if its point is new.
"""

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from ascend_emulator.errors import EmulatorError

FAULTS_VARIABLE = "NPU_EMULATOR_FAULTS"
EVERYTHING = 2**31 - 1
"""The value of ``pre_tokens`` that limits nothing."""


class Scores(NamedTuple):
    """What attention of one request is computed from, at the point ``scores``."""

    key: Any  # [S, Nkv, D]
    value: Any  # [S, Nkv, D]
    scale: float
    masked: Any  # [Q, S] bool or None
    bias: Any  # [Q, S] or None


class Fault(NamedTuple):
    """One misbehaviour.

    Attributes
    ----------
    name
        The name that ``--fault`` takes.
    description
        What the kernel does wrong.
    point
        Where a reference lets it happen.
    change
        Takes the value at this point and the context that the reference passes, and returns the
        wrong value.
    """

    name: str
    description: str
    point: str
    change: Callable[..., Any]


def _interleave(scores: Scores, num_heads: int) -> Scores:
    order = [head % scores.key.shape[1] for head in range(num_heads)]
    return scores._replace(key=scores.key[:, order], value=scores.value[:, order])


def _drop_last(scores: Scores, num_heads: int) -> Scores:
    del num_heads
    if scores.key.shape[0] < 2:  # a kernel that skips the only key would read nothing at all
        return scores
    cut = [None if part is None else part[:, :-1] for part in (scores.masked, scores.bias)]
    return scores._replace(key=scores.key[:-1], value=scores.value[:-1], masked=cut[0], bias=cut[1])


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "uniform-average",
            "fused attention over fresh keys in TND, mode 0 without a mask, averages the values "
            "(vllm-project/vllm-ascend 13699)",
            "scale of fresh keys without a mask",
            lambda scale: 0.0,
        ),
        Fault(
            "wide-window",
            "mode 4 shows one token more than pre_tokens says: W where W - 1 was meant",
            "pre_tokens",
            lambda pre_tokens, num_rows: min(pre_tokens + 1, EVERYTHING),
        ),
        Fault(
            "unnarrowed-decode",
            "mode 4 does not narrow a request of one query token",
            "pre_tokens",
            lambda pre_tokens, num_rows: EVERYTHING if num_rows == 1 else pre_tokens,
        ),
        Fault(
            "upper-left-causal",
            "mode 3 counts its diagonal from the upper left corner, not from the lower right one",
            "corner",
            lambda corner: 0,
        ),
        Fault(
            "ignored-mask",
            "attention takes no notice of its mask (fused, fusion and atb)",
            "scores",
            lambda scores, num_heads: scores._replace(masked=None, bias=None),
        ),
        Fault(
            "ignored-scale",
            "scores are not scaled",
            "scores",
            lambda scores, num_heads: scores._replace(scale=1.0),
        ),
        Fault(
            "last-token-dropped",
            "the last key of a request that has several is not read",
            "scores",
            _drop_last,
        ),
        Fault(
            "interleaved-heads",
            "query head n reads K/V head n % Nkv, not n // (N / Nkv)",
            "scores",
            _interleave,
        ),
        Fault(
            "wrong-lse",
            "the log-sum-exp has base 2",
            "lse",
            lambda lse: lse / math.log(2),
        ),
        Fault(
            "first-table-row",
            "every request reads row 0 of the block table",
            "table row",
            lambda request: 0,
        ),
        Fault(
            "ignored-rope",
            "fused attention leaves the rotated parts of query and key out of its scores",
            "query_rope",
            lambda query_rope: query_rope * 0,
        ),
        Fault(
            "whole-block-read",
            "keys are read, and seen, to the end of a request's last block",
            "read length",
            lambda length, block_size: -(-length // block_size) * block_size,
        ),
        Fault(
            "padding-slot-written",
            "a cache write puts the row of a -1 slot into the last slot of the last block",
            "slots",
            lambda slots, num_slots: slots.masked_fill(slots == -1, num_slots - 1),
        ),
        Fault(
            "transposed-cache",
            "a cache write lays a block out as heads x tokens, not as tokens x heads",
            "cache rows",
            # [num_blocks, block_size, Nkv, D] over the same memory, written in the other order
            lambda cache: cache.view(
                cache.shape[0], cache.shape[2], cache.shape[1], cache.shape[3]
            ).transpose(1, 2),
        ),
        Fault(
            "added-flags",
            "flags of a bfloat16 atb mask are added as they are, without the factor -10000",
            "flag bias",
            lambda bias: 1.0,
        ),
        Fault(
            "stale-lengths",
            "replays keep the arguments of their capture: updates of task groups are ignored",
            "runtime",  # in native/runtime/capture.cpp
            lambda value: value,
        ),
        Fault(
            "future-chosen",
            "the lightning indexer chooses among all keys of a request, those behind a token, too",
            "limits of a choice",
            lambda limits, num_keys: limits * 0 + num_keys,
        ),
        Fault(
            "neighbours-choice",
            "sparse attention reads what the request's token before has chosen",
            "rows of a choice",
            lambda rows, first: (rows - 1).clamp(min=first),
        ),
        Fault(
            "unchosen-read",
            "sparse attention takes an entry of -1 for position 0, and reads all entries",
            "choice",
            lambda choice: choice._replace(
                entries=choice.entries.clamp(min=0), read=choice.read | True
            ),
        ),
        Fault(
            "mask-ignored",
            "npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2 take tokens that the "
            "mask leaves out for tokens with experts",
            "tokens of a mask",
            lambda active, tokens: tokens,
        ),
        Fault(
            "combined-twice",
            "npu_moe_distribute_combine_v2 adds the row of a token's first expert twice",
            "weights of a combination",
            lambda weights: weights * (1 + (weights.new_ones(weights.shape[1]).cumsum(0) == 1)),
        ),
        Fault(
            "early-maximum",
            "npu_dequant_swiglu_quant with dynamic scales reads the maximum of a part of a row "
            "above 7,840 columns before it is written: that of the last part counts for nothing",
            "maxima of the parts of a wide row",
            lambda maxima: maxima[..., :-1],
        ),
    )
}


def check(names: Iterable[str]) -> frozenset[str]:
    """Return the names of faults as a set.

    Raises
    ------
    EmulatorError
        If one of the names is no fault; it lists the faults.
    """
    chosen = frozenset(names)
    if unknown := sorted(chosen - set(FAULTS)):
        listed = "; ".join(f"{fault.name} ({fault.description})" for fault in FAULTS.values())
        raise EmulatorError(f"--fault {unknown[0]!r} is not a fault; use some of: {listed}")
    return chosen


_replaced: ContextVar[frozenset[str] | None] = ContextVar("faults", default=None)


def active() -> frozenset[str]:
    replaced = _replaced.get()
    return _of_process() if replaced is None else replaced


@functools.cache
def _of_process() -> frozenset[str]:
    return check(filter(None, os.environ.get(FAULTS_VARIABLE, "").split(",")))


@contextmanager
def using(*names: str) -> Iterator[None]:
    """Switch on these faults and no others for a block of code, in this thread."""
    token = _replaced.set(check(names))
    try:
        yield
    finally:
        _replaced.reset(token)


def apply(point: str, value: Any, **context: Any) -> Any:
    """Return a value as the active faults of a point leave it.

    The context is what the faults of this point need to know; all of them get the same names.
    """
    if names := active():
        for fault in FAULTS.values():
            if fault.point == point and fault.name in names:
                value = fault.change(value, **context)
    return value
