"""Copies: directions, bounds, what is staged, and what pinned memory must not be used for."""

import pytest


def test_wrong_direction_and_bounds_are_refused(emulate):
    run = emulate(
        """
        x = torch.ones(1024, dtype=INT, device="npu")
        torch.npu.synchronize()
        address, n = malloc(4096), ctypes.c_size_t(4096)
        host = ctypes.create_string_buffer(8192)
        TO_DEVICE, TO_HOST = 1, 2
        stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
        assert acl.aclrtMemcpy(host, n, address, n, TO_HOST) == 0
        assert acl.aclrtMemcpy(host, n, address, n, TO_DEVICE) == 107000
        assert acl.aclrtMemcpyAsync(address, n, host, n, TO_HOST, stream) == 107000
        big = ctypes.c_size_t(8192)
        assert acl.aclrtMemcpy(address, big, host, big, TO_DEVICE) == 107000
        assert acl.aclrtMemcpyAsync(host, big, address, big, TO_HOST, stream) == 107000
        assert acl.aclrtMemcpy(address, n, host, big, TO_DEVICE) == 107000
        assert acl.aclrtMemset(address, big, 0, big) == 107000
        assert acl.aclrtFree(address) == 0
        """
    )
    errors = " ".join(run.report["errors"])
    for message in ("wrong direction", "out of bounds at its target", "bounds at its source"):
        assert message in errors
    assert run.report["counters"]["errors"] == 6


@pytest.mark.parametrize("delay", ["none", "skewed"])
def test_a_rewritten_pinned_source_is_found_whatever_the_delay(emulate, delay):
    run = emulate(
        """
        device, source = torch.zeros(1024, dtype=INT, device="npu"), pinned(1024)
        torch.npu.synchronize()

        def copy():
            source.fill_(1)
            device.copy_(source, non_blocking=True)

        copy()
        source.fill_(2)
        assert "rewritten before the host knew" in sync_error()
        # A later kernel under way, or a wait for another stream, says nothing of the copy.
        copy()
        device + 1
        torch.npu.Stream().synchronize()
        source.fill_(3)
        assert "rewritten before the host knew" in sync_error()
        # An event recorded behind the copy tells the host.
        copy()
        event = torch.npu.Event()
        event.record()
        event.synchronize()
        source.fill_(4)
        assert sync_error() == ""
        assert device.cpu()[0] == 1
        """,
        delay=delay,
    )
    assert run.report["counters"]["hazards"] == 2


def test_an_early_read_of_a_target_sees_poison(emulate):
    emulate(
        """
        device, target = torch.full((64,), 7, dtype=INT, device="npu"), pinned(64)
        torch.npu.synchronize()
        target.copy_(device, non_blocking=True)
        emulator.let_run()  # and the host can't know
        assert target[0].item() & 0xFFFFFFFF == 0xCBCBCBCB
        torch.npu.synchronize()
        assert target[0] == 7
        # A copy back from the target, in stream order, is no read by the host.
        target.copy_(device, non_blocking=True)
        back = torch.zeros(64, dtype=INT, device="npu")
        back.copy_(target, non_blocking=True)
        assert back.cpu()[0] == 7
        """
    )
