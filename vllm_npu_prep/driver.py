"""Versions of the Ascend driver and what they lack, and a setting that prevents graph capture."""

import re

TASK_UPDATES = "25.0.RC1"
"""First driver that updates captured attention, which full graphs need (CANN 8.5's
documentation)."""

QUEUES = "25.5.1"
"""First driver without "Alloc sq cq fail" (vllm-project/vllm-ascend, ``acl_graph.py``)."""


EXPANDING_PINS = "pin_memory_expandable_segments:True"
"""Setting of ``PYTORCH_NPU_ALLOC_CONF`` with which ``capture_begin`` refuses (Ascend/pytorch,
``NPUGraph.cpp``): such pinned memory could be reused while a graph still reads it."""


def driver_key(version: str) -> tuple[int, ...] | None:
    """Return a driver's version as numbers that sort as versions do: 25.0.RC1 comes before 25.0.0.

    Parameters
    ----------
    version
        Such as ``25.5.1``, ``24.1.RC3`` or ``26.0.RC1.alpha2``.

    Returns
    -------
    tuple of int
        None if the text is not a version.
    """
    match = re.match(r"(\d+)\.(\d+)\.(RC)?(\d+)((?:\.\d+)*)", version, re.IGNORECASE)
    if match is None:
        return None
    more = [int(number) for number in match[5].split(".") if number]
    return (int(match[1]), int(match[2]), 0 if match[3] else 1, int(match[4]), *more)


def is_older(version: str, than: str) -> bool:
    """Tell whether a driver is known to be older than another; False if a version is unknown."""
    key, other = driver_key(version), driver_key(than)
    return key is not None and other is not None and key < other
