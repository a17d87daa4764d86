"""Tar archives, on any Python 3.11: filters of their members came with 3.11.4."""

import tarfile
from pathlib import Path


def unpack(file: Path, folder: Path, beginnings: tuple[str, ...] = ("",)) -> None:
    """Unpack the members whose names begin so."""
    with tarfile.open(file) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        members = [each for each in archive if each.name.startswith(beginnings)]
        archive.extractall(folder, members)
