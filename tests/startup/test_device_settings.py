"""What the plugin sets on a host with devices."""

import os
from types import SimpleNamespace

import pytest
import torch

from vllm_npu_prep import aclnn, device, platform
from vllm_npu_prep.compat import activation


def test_a_thread_of_vllms_gets_the_device(monkeypatch):
    given = []
    monkeypatch.setattr(platform, "set_device", given.append)
    platform.NPUPlatform.set_device(torch.device("cpu"))
    assert given == [torch.device("cpu")]
    device.set_device(torch.device("cpu"))  # needs none


DEFAULT = "expandable_segments:True,pinned_max_round_threshold_mb:64"


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, DEFAULT), ("max_split_size_mb:64", "max_split_size_mb:64")],
    ids=["unset", "the user's"],
)
def test_the_allocator_extends_its_segments_by_default(monkeypatch, before, after):
    monkeypatch.delenv(activation.ALLOCATOR_ENV_VAR, raising=False)
    if before is not None:
        monkeypatch.setenv(activation.ALLOCATOR_ENV_VAR, before)
    monkeypatch.setattr(activation, "choose_device", lambda: device.NPU_KIND)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    assert activation.activate_platform() == activation.PLATFORM_CLASS
    assert os.environ[activation.ALLOCATOR_ENV_VAR] == after
    monkeypatch.delenv(activation.ALLOCATOR_ENV_VAR)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("settings", "nbytes", "taken"),
    [
        (DEFAULT, 65 * MIB, 65 * MIB),
        (DEFAULT, 33 * MIB, 64 * MIB),
        ("max_split_size_mb:64", 65 * MIB, 128 * MIB),
        ("", 64 * MIB, 64 * MIB),
    ],
)
def test_pinned_memory_counts_as_it_is_rounded(monkeypatch, settings, nbytes, taken):
    monkeypatch.setenv(device.ALLOCATOR_ENV_VAR, settings)
    assert device.host_bytes("npu", nbytes) == taken
    assert device.host_bytes("cpu", nbytes) == nbytes


def test_a_function_that_no_library_of_cann_has_is_missing(monkeypatch):
    """Where CANN is not installed, nobody misses a function of it."""
    there = SimpleNamespace(aclnnThere=1, aclnnThereGetWorkspaceSize=1, aclnnHalf=1)
    is_missing = aclnn.is_missing.__wrapped__
    monkeypatch.setattr(aclnn, "_libraries", lambda: (SimpleNamespace(), there))
    names = ("aclnnThere", "aclnnHalf", "aclnnNowhere")
    assert [is_missing(name) for name in names] == [False, True, True]
    monkeypatch.setattr(aclnn, "_libraries", tuple)
    assert not any(map(is_missing, names))
