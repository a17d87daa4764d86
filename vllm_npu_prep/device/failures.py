"""What users are told of a step that a device or another rank ended.

A kernel runs after the call that launched it, so its failure is an error of a later call, in which
the host waits for the device. The traceback of that call says nothing about the kernel. In the same
way, the traceback of a call that waits for another rank does not say why that rank ended.
"""

import re

import torch

from vllm_npu_prep.errors import PrepError

CODE = re.compile(r"error code(?: is|:)? ?(507\d{3}|107019|107020)\b")
"""Codes of CANN's runtime: 507 and three digits for what failed on the device, 107019 and 107020
for waits and tasks that took too long. A call that is refused when it is made has other codes."""
MEANING = re.compile(r"^\[Error\]: (.+?)\.?\s*$", re.MULTILINE)
"""Matches torch_npu's explanation of a code."""
SOURCE = " NPU function error: "
"""Separates the place in torch_npu's source from the reason."""
KERNEL = re.compile(r"\bkernel_name ?= ?([\w.:]+)")
"""Matches the name of the kernel that failed, in CANN's report."""
LOST = re.compile(r"\[\S*gloo/transport/\S*\] (.+?)(?:\. This is typically|$)", re.MULTILINE)
"""Matches what gloo says of a rank whose connection has ended, or that did not come in time. It
says "enforce fail at" in the brackets of what the ranks themselves do wrong: sizes that differ."""


def explained(error: BaseException, step: str) -> PrepError | None:
    """Return an error of one line for one that ended `step`; None for those that need none.

    An error of memory says only how much one tensor wanted.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return PrepError(
            f"out of memory in {step} ({str(error).partition(chr(10))[0]}); lower "
            "--gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs"
        )
    if (reason := device_failure(error)) is not None:
        return PrepError(
            f"the device failed, as was seen in {step} ({reason}); start again. If it fails again: "
            "--enforce-eager and ASCEND_LAUNCH_BLOCKING=1 in the environment show the operator"
        )
    if (reason := lost_rank(error)) is not None:
        return PrepError(
            f"another rank was lost in {step} ({reason}); the first error of the log says why it "
            "ended"
        )
    return None


def device_failure(error: BaseException) -> str | None:
    r"""Return why a device failed while it worked, in one line; None for any other error.

    Examples
    --------
    >>> device_failure(RuntimeError("ACL stream synchronize failed, error code:507015\nmore"))
    'ACL stream synchronize failed, error code:507015'
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or CODE.search(text) is None:
        return None
    first = text.partition("\n")[0]
    reason = first.rpartition(SOURCE)[2].strip()
    if (meaning := MEANING.search(text)) is not None:
        reason += f"; {meaning[1]}"
    if (kernel := KERNEL.search(text)) is not None:
        reason += f"; kernel {kernel[1]}"
    return reason


def lost_rank(error: BaseException) -> str | None:
    r"""Return what gloo says of another rank that it waited for in vain; None for other errors.

    Examples
    --------
    >>> lost_rank(RuntimeError("[gloo/transport/tcp/pair.cc:5] Connection closed by peer"))
    'Connection closed by peer'
    """
    found = LOST.search(str(error)) if isinstance(error, RuntimeError) else None
    return found and found[1]
