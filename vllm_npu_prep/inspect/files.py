"""Files that are there whole or not at all."""

import os
import tempfile
from pathlib import Path

from vllm_npu_prep.errors import PrepError


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that nobody sees before it is complete.

    Raises
    ------
    PrepError
        One line, if it can't be written; nothing is left behind.
    """
    try:
        path = path.resolve()  # a link stays a link, what it points to is replaced
        if path.exists() and not path.is_file():
            raise PrepError(f"{path}: not a file that can be replaced; name another")
        handle, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(unfinished, 0o666 & ~mask)  # as any other new file
            os.replace(unfinished, path)
        except OSError:
            os.unlink(unfinished)
            raise
    except OSError as error:
        raise PrepError(f"{path}: can't be written: {error.strerror or error}") from None
