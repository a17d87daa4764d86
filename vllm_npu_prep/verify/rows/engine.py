"""Rows of a tiny engine, whose tokens are held against those of the CPU fallback."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from vllm_npu_prep.verify import tiny_engine
from vllm_npu_prep.verify.outcome import Outcome, Verdict
from vllm_npu_prep.verify.row import Row, RowContext

SECONDS = 900.0
"""Time limit of an engine's row, which first runs the CPU fallback's process, then an engine."""


def expected_tokens(folder: Path) -> tuple[list[list[int]], list[list[float]]]:
    """Return the tokens of the CPU fallback and their leads, made once in the command's folder.

    Raises
    ------
    RuntimeError
        If its process failed.
    """
    made = folder / tiny_engine.TOKENS
    if not made.exists():
        done = subprocess.run(
            [sys.executable, "-P", "-m", "vllm_npu_prep.verify.tiny_engine", str(folder)],
            env={**os.environ, "NPU_PREP_DEVICE": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not made.exists():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
            raise RuntimeError(f"the CPU fallback ended with {done.returncode}: {last[0]}")
    answer = json.loads(made.read_text())
    return answer["tokens"], answer["leads"]


def engine(mode: str, context: RowContext) -> Outcome:
    expected, leads = expected_tokens(context.folder)
    tokens, _ = tiny_engine.tokens_of(context.folder / tiny_engine.MODEL, mode)
    compared, wanted, got = tiny_engine.difference(tokens, expected, leads)
    total = sum(map(len, expected))
    given = f"{len(expected)} prompts of 1 to {max(tiny_engine.PROMPT_LENGTHS)} tokens, {mode}"
    if wanted:
        return Outcome(given, wanted, got, Verdict.DIFFERS)
    same = f"{compared} of {total} tokens compared, all equal"
    return Outcome(given, "the tokens of the CPU fallback", same, Verdict.SAME)


ROWS: tuple[Row, ...] = (
    Row("engine-eager", "a tiny engine, eager", partial(engine, "eager"), seconds=SECONDS),
    Row(
        "engine-graphs",
        "a tiny engine with graphs",
        partial(engine, "FULL_AND_PIECEWISE"),
        seconds=SECONDS,
    ),
)
