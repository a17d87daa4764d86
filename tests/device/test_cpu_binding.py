"""Which CPUs a rank runs on."""

import os
import subprocess
from types import SimpleNamespace

import pytest

from vllm_npu_prep.device import cpu_binding
from vllm_npu_prep.device.cpu_binding import bind_to_device, cpus_of_devices, physical_device

TOPOLOGY = """
\t   NPU0       NPU1       CPU Affinity
NPU0       X          HCCS       144-147,3
NPU1       HCCS       X          96-98

Legend:
  X    = Self
  NPU9 = nothing that ends in a list of CPUs: 1-2 or so
"""


def test_cpus_are_those_of_the_last_column():
    assert cpus_of_devices(TOPOLOGY) == {0: {144, 145, 146, 147, 3}, 1: {96, 97, 98}}
    assert cpus_of_devices("") == {}


@pytest.mark.parametrize(
    ("index", "visible", "number"),
    [(1, None, 1), (0, "6,7", 6), (1, "6, 7", 7), (2, "6,7", None), (0, "", None)],
)
def test_visible_devices_have_numbers_on_the_host(index, visible, number):
    assert physical_device(index, visible) == number


@pytest.fixture
def host(monkeypatch):
    """A host with CPUs 0 to 7 and an NPU near the last four; what threads were bound to."""
    bound: list[set[int]] = []
    made = SimpleNamespace(bound=bound, topology="NPU0   X   4-7\n")
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(cpus))
    ran = lambda *args, **settings: SimpleNamespace(stdout=made.topology)  # noqa: E731
    monkeypatch.setattr(cpu_binding.subprocess, "run", ran)
    return made


def test_every_thread_is_bound_to_the_cpus_near_its_device(host):
    assert bind_to_device(0) == "4 of 8 CPUs, which are near NPU 0"
    assert host.bound and all(cpus == {4, 5, 6, 7} for cpus in host.bound)


@pytest.mark.parametrize(
    "topology",
    ["", "NPU1   X   4-7\n", "NPU0   X   90-99\n", "NPU0   X   0-63\n"],
    ids=["not told", "another device", "outside of this container", "all of them"],
)
def test_a_host_that_does_not_tell_is_left_as_it_is(host, topology):
    host.topology = topology
    assert bind_to_device(0) == "" and not host.bound


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("npu-smi", 1)])
def test_without_npu_smi_nothing_happens(host, monkeypatch, error):
    def fail(*args, **settings):
        raise error

    monkeypatch.setattr(cpu_binding.subprocess, "run", fail)
    assert bind_to_device(0) == "" and not host.bound
