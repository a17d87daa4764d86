"""Writes files so that they appear complete or not at all."""

import os
from pathlib import Path

from vllm_npu_prep.errors import PrepError


def check_replaceable(path: Path) -> None:
    """Refuse a path where something other than a file is, such as a folder or a device."""
    if path.exists() and not path.is_file():
        raise PrepError(f"{path}: not a file that can be replaced; name another")


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that readers never see it incomplete.

    Raises
    ------
    PrepError
        If it can't be written; no partial file remains.
    """
    try:
        path = path.resolve()  # a link stays a link; its target is replaced
        check_replaceable(path)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        with unfinished.open("xb") as file:  # refuses an existing file
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.replace(unfinished, path)
            except OSError:
                unfinished.unlink()
                raise
    except OSError as error:
        raise PrepError(f"{path}: can't be written: {error.strerror or error}") from None
