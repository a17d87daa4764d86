"""Binds a rank to the CPUs of its NPU's NUMA node, from which copies and launches are fastest.

Hosts with NPUs have four or eight nodes (Kunpeng). vllm-project/vllm-ascend binds its ranks, too
(``cpu_binding.py``). If the host's topology can't be read, nothing is bound.
"""

import os
import re
import subprocess
from pathlib import Path

TOPOLOGY = ("npu-smi", "info", "-t", "topo")
TOPOLOGY_SECONDS = 10.0


def cpus_of_devices(topology: str) -> dict[int, set[int]]:
    """Return the CPUs near each NPU of the host, from the output of ``npu-smi info -t topo``.

    It has a row ``NPU<n>`` for each device, whose last column lists CPUs as ``0-23,96``.
    """
    found = {}
    for line in topology.splitlines():
        match = re.match(r"\s*NPU(\d+)\s.*\s(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\s*$", line)
        if match:
            cpus: set[int] = set()
            for part in match[2].split(","):
                first, _, last = part.partition("-")
                cpus.update(range(int(first), int(last or first) + 1))
            found[int(match[1])] = cpus
    return found


def physical_device(index: int, visible: str | None) -> int | None:
    """Return the host's number of the visible device `index`; None if the variable doesn't tell.

    `visible` is the value of ``ASCEND_RT_VISIBLE_DEVICES``, and None if it is unset.
    """
    if visible is None:
        return index
    numbers = [each.strip() for each in visible.split(",")]
    return int(numbers[index]) if index < len(numbers) and numbers[index].isdigit() else None


def bind_to_device(index: int) -> str:
    """Bind all threads of this process to the CPUs near a device; `index` counts visible devices.

    Return what was done, for the log; it is empty if nothing was.
    """
    number = physical_device(index, os.environ.get("ASCEND_RT_VISIBLE_DEVICES"))
    try:
        ran = subprocess.run(TOPOLOGY, capture_output=True, text=True, timeout=TOPOLOGY_SECONDS)
        near = cpus_of_devices(ran.stdout).get(-1 if number is None else number, set())
        allowed = os.sched_getaffinity(0)
        if not near & allowed or allowed <= near:
            return ""  # unknown, outside of this container's part of the host, or bound already
        for thread in Path("/proc/self/task").iterdir():  # later threads inherit it
            os.sched_setaffinity(int(thread.name), near & allowed)
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{len(near & allowed)} of {len(allowed)} CPUs, which are near NPU {number}"
