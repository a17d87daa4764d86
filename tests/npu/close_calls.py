"""Whether tokens of the device part from the reference only where the model hardly prefers one."""

from pathlib import Path
from typing import Any

from tests.helpers.huggingface import logits_by, logits_of
from tests.helpers.step_logits import close_calls
from tests.npu import generate

CLOSE = 0.1
"""Margin of two tokens, in standard deviations of logits, within which bfloat16 may take either."""

CLOSE_IN_INT8 = 0.25
"""Of int8 models, whose inputs may come to lie a level higher or lower."""


def same_but_close_calls(
    model: Path | Any,
    scheduling: str,
    ours: dict,
    theirs: dict,
    close: float = CLOSE,
    one_of: int = 4,
) -> None:
    """Tokens part in one prompt of four (`one_of`), and only where float32 hardly prefers one.

    The model is a folder, or a model of transformers.
    """
    given = generate.prompts(scheduling)
    logits = logits_of(model) if isinstance(model, Path) else logits_by(model)
    parted = close_calls(logits, given[:1] + given, ours["tokens"], theirs["tokens"], close)
    print(f"{parted} of {len(given)} prompts part")
    assert parted <= len(given) // one_of
