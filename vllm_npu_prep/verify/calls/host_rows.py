"""Rows about what all calls depend on, before those of the calls: software, streams, variables.

Most of them ask the doctor, whose findings they show; `RAN` says that nothing was compared.
"""

import os
from collections.abc import Callable, Collection
from functools import partial

import torch

from vllm_npu_prep.aclnn import FUNCTIONS, first_release, missing_functions
from vllm_npu_prep.device import visible_devices
from vllm_npu_prep.inspect.doctor.environment import OF_TORCH_NPU, environment_findings
from vllm_npu_prep.inspect.doctor.finding import Finding
from vllm_npu_prep.inspect.doctor.hardware import Hardware
from vllm_npu_prep.inspect.doctor.host import Host
from vllm_npu_prep.verify.outcome import Outcome, Verdict
from vllm_npu_prep.verify.row import Row, RowContext

VARIABLES = (*OF_TORCH_NPU, "HCCL_*")
"""The doctor's findings about variables that change how calls are made."""

PINNED = 1 << 26
"""Bytes of pinned memory that are asked for: more than any copy of a step."""

GROUP = "host"


def rows_of(names: Collection[str]) -> tuple[Row, ...]:
    """Return the rows for a list of calls of operators with these names."""
    plain = {name.partition(".")[0].removeprefix("_") for name in names}
    operators = sorted(plain & FUNCTIONS.keys())
    asked: dict[str, tuple[str, Callable[[RowContext], Outcome]]] = {
        "functions": ("functions of CANN", partial(_functions, operators)),
        "versions": ("CANN, driver, firmware", _versions),
        "variables": ("environment", _variables),
        "streams": ("free streams", _streams),
        "pinned": ("pinned memory", _pinned),
    }
    return tuple(Row(f"{GROUP}-{name}", what, run) for name, (what, run) in asked.items())


def _functions(operators: list[str], context: RowContext) -> Outcome:
    given, expected = f"{len(operators)} operators of the list", "their functions"
    missing = missing_functions(operators)
    if not missing:
        return Outcome(given, expected, "all are there", Verdict.SAME)
    got = ", ".join(
        f"no {function} ({operator}), which CANN {first_release(function)} has"
        for operator, function in missing.items()
    )
    return Outcome(given, expected, got, Verdict.DIFFERS)


def _versions(context: RowContext) -> Outcome:
    names = ("CANN", "driver", "firmware")
    return _found([each for each in Hardware(Host.here()).findings() if each.name in names])


def _variables(context: RowContext) -> Outcome:
    found = environment_findings(Host.here(), visible_devices("npu") or 0, None)
    outcome = _found([each for each in found if each.name in VARIABLES])
    unset = [name for name in OF_TORCH_NPU if name not in os.environ]
    return Outcome(f"not set: {', '.join(unset) or 'none'}", "", outcome.got, outcome.verdict)


def _found(findings: list[Finding]) -> Outcome:
    shown = [f"{each.name} {each.found}" + f" -> {each.do}" * bool(each.do) for each in findings]
    return Outcome("", "", "; ".join(shown) or "nothing", Verdict.RAN)


def _streams(context: RowContext) -> Outcome:
    from vllm_npu_prep.device.npu import free_streams

    left = free_streams()
    got = "this CANN does not tell it" if left is None else f"{left:,} are left"
    return Outcome("", "one for each graph", got, Verdict.DIFFERS if left == 0 else Verdict.RAN)


def _pinned(context: RowContext) -> Outcome:
    pinned = torch.empty(PINNED, dtype=torch.uint8, pin_memory=True)
    is_pinned = pinned.is_pinned()
    got, verdict = ("pinned", Verdict.SAME) if is_pinned else ("not pinned", Verdict.DIFFERS)
    return Outcome(f"{PINNED:,} bytes", "pinned", got, verdict)
