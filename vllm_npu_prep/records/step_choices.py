"""The file beside a record: the positions that indexers chose, layer by layer."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vllm_npu_prep.errors import PrepError

SUFFIX = ".choices"
"""The suffix of the file, in place of the record's. numpy reads it as it reads an ``.npz``; another
suffix keeps it apart from records.
"""


def choices_to_bytes(chosen: Mapping[str, np.ndarray]) -> bytes:
    """Return the file of a step's choices: int32 ``[num_tokens, index_topk]`` for each layer."""
    file = io.BytesIO()
    np.savez_compressed(file, **chosen)  # type: ignore[arg-type]  # names are layers
    return file.getvalue()


def read_choices(record: Path, num_tokens: int, index_topk: int | None) -> dict[str, np.ndarray]:
    """Return what each indexer chose in a record's step; nothing if there is no such file.

    Raises
    ------
    PrepError
        If the file has anything else than choices of `num_tokens` tokens.
    """
    path = record.with_suffix(SUFFIX)
    if not path.exists():
        return {}
    try:
        with np.load(path) as file:
            chosen = {name: file[name] for name in file.files}
        for name, array in chosen.items():
            if array.dtype != np.int32 or array.shape != (num_tokens, index_topk):
                found = f"{name} is {array.dtype} {list(array.shape)}"
                raise ValueError(f"{found}, not int32 {[num_tokens, index_topk]}")
        return chosen
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        why = " ".join(str(error).split())[:200]
        raise PrepError(
            f"{path}: not choices of indexers ({why}); remove the file to see the step without them"
        ) from None
