"""Texts of a step's tokens, by the recorded model's tokenizer, where it is at hand."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.inspect.run import engine_config
from vllm_npu_prep.records.record import StepRecord

TOKENIZER = "tokenizer.json"


def input_texts(file: Path, record: StepRecord) -> list[str | None]:
    """Return the text of each token of a record; None for one that the host did not know.

    The tokenizer is the ``tokenizer.json`` beside the record, or else in the folder that the run's
    manifest names as its model; nothing is downloaded. Without one, the result is empty.
    """
    tokenizer = _tokenizer_of(file.parent)
    if tokenizer is None:
        return []
    step = record.step()
    known = np.isin(step.req_indices, record.batch.rows_with_embeds, invert=True)
    known &= step.input_ids >= 0
    if "is_on_device" in record.prepared:
        known &= ~record.prepared["is_on_device"].astype(bool)
    return [
        tokenizer.decode([token], skip_special_tokens=False) if is_known else None
        for token, is_known in zip(step.input_ids.tolist(), known.tolist(), strict=True)
    ]


@cache
def _tokenizer_of(run: Path) -> Any:
    """Return the tokenizer of a run's model; None if it is not on this machine or can't be read."""
    try:
        from tokenizers import Tokenizer

        file = run / TOKENIZER
        if not file.exists():
            file = Path(engine_config(run)["model"]) / TOKENIZER
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except (ImportError, PrepError, KeyError, TypeError, OSError):
        return None
    except Exception:  # of a file that is no tokenizer, tokenizers raises nothing more special
        return None
