"""The order of driver versions."""

import pytest

from vllm_npu_prep.driver import driver_key, is_older

ASCENDING = ["24.1.RC3", "25.0.RC1", "25.0.RC1.1", "25.0.0", "25.2.RC1", "25.2.0", "25.5.1"]


def test_release_candidates_come_before_releases():
    assert sorted({*ASCENDING}, key=driver_key) == ASCENDING
    assert driver_key("26.0.rc1.alpha2") == driver_key("26.0.RC1")


@pytest.mark.parametrize("unknown", ["", "custom", "25"])
def test_an_unknown_version_is_not_old(unknown):
    assert driver_key(unknown) is None
    assert not is_older(unknown, "25.0.RC1")
    assert is_older("24.1.RC3", "25.0.RC1") and not is_older("25.0.RC1", "25.0.RC1")
