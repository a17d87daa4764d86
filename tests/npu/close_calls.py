"""Whether tokens of the device part from the reference only where the model hardly prefers one."""

from pathlib import Path

from tests.helpers.huggingface import logits_of
from tests.helpers.step_logits import close_calls
from tests.npu import generate

CLOSE = 0.1
"""Margin of two tokens, in standard deviations of logits, within which bfloat16 may take either."""


def same_but_close_calls(model: Path, scheduling: str, ours: dict, theirs: dict) -> None:
    """Tokens part in one prompt of four at most, and only where float32 hardly prefers one."""
    given = generate.prompts(scheduling)
    parted = close_calls(
        logits_of(model), given[:1] + given, ours["tokens"], theirs["tokens"], CLOSE
    )
    assert parted <= len(given) // 4
